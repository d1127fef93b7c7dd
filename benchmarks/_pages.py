"""Shared by tables and figures of pages: Markdown, intervals over seeds, and a canvas."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

STYLE = pathlib.Path(__file__).parents[1] / "docs/matplotlibrc"


def make_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    return ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]


def show_quartiles(ratio: Mapping[str, float]) -> str:
    """Median and quartiles."""
    return "{median:.2f} ({q1:.2f} - {q3:.2f})".format(**ratio)


def show_interval(found: dict[str, Any], digits: int | None = None) -> str:
    """The mean over seeds and its 95 % bootstrap interval, which one seed does not have, from `training.summary`."""
    digits = int(abs(found["mean"]) < 20) if digits is None else digits
    mean, *ends = (f"{number:.{digits}f}" for number in (found["mean"], *(found["mean_95"] or ())))
    return f"{mean} [{', '.join(ends)}]" if ends else mean


def show_iqm(found: dict[str, Any], digits: int = 1) -> str:
    """The interquartile mean over seeds and its 95 % bootstrap interval, from `training.summary`."""
    return show_interval({"mean": found["iqm"], "mean_95": found["iqm_95"]}, digits)


def compare_means(now: Sequence[float], before: Sequence[float], samples: int = 5000) -> dict[str, Any]:
    """The difference of two means over seeds, with its 95 % bootstrap interval; the seeds are not paired."""
    generator = np.random.default_rng(0)
    means = [generator.choice(x, (samples, len(x))).mean(axis=1) for x in (now, before)]
    low, high = np.quantile(means[0] - means[1], (0.025, 0.975))
    return {"mean": float(np.mean(now) - np.mean(before)), "95": [float(low), float(high)]}


def find_detectable(change: dict[str, Any]) -> float:
    """The size of a difference that as many seeds show with a power of 80 %: 2.8 standard errors, from the interval.

    Reference: Cohen, "Statistical Power Analysis", 1988: the quantiles 0.975 and 0.8 of a normal distribution together.
    """
    low, high = change["95"]
    return (1.96 + 0.84) * (high - low) / (2 * 1.96)


def show_change(change: dict[str, Any]) -> str:
    """A difference and its interval."""
    return "{:+.0f} [{:+.0f}, {:+.0f}]".format(change["mean"], *change["95"])


def make_canvas(panels: int, width: float = 5, columns: int | None = None) -> tuple[Any, Any]:
    """A figure and its axes, in rows of `columns` (None: side by side), without a display."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rc_file(STYLE)
    columns = min(columns or panels, panels)
    rows = -(-panels // columns)
    figure = Figure(figsize=(width * columns, 4 * rows))
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes[panels:]:
        axis.remove()
    return figure, axes[:panels]


def save(figure: Any, path: pathlib.Path) -> None:
    """Without the date and the version of matplotlib, so that the same data are the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi="figure", metadata={"Software": None})
