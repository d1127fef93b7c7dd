"""Learning curves over environment steps, and pictures of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .._base.extras import require_package
from ._files import check_writable, replacing
from ._statistics import iqm_interval

WINDOW = 25  # updates that a point of the learning curve averages
POINTS = 200  # of a curve


def plot_curve(
    path: Path, env_steps: np.ndarray, returns: np.ndarray, title: str, evaluation: np.ndarray | None = None
) -> None:
    """Draw the learning curve, a running mean of `returns` `[updates]` or `[updates, seeds]`, NaN if no episode ended.

    `evaluation`, NaN for updates without one, is drawn as the mean over the seeds.
    """
    each = returns.reshape(len(returns), -1)
    with drawing(path, f"episode return (running mean of {WINDOW})", title) as axes:
        if returns.ndim == 1:
            # With markers, because a line does not show an update between two updates in which no episode ended.
            axes.plot(env_steps, returns, color="C0", alpha=0.25, linewidth=0.8, marker=".", markersize=3)
        label = f"interquartile mean of {each.shape[1]} runs, 95 % interval" if returns.ndim > 1 else None
        draw_seeds(axes, *resampled([(env_steps, smoothed(each, WINDOW))]), "C0", label)
        if evaluation is not None:
            played = evaluation.reshape(len(returns), -1)
            at = np.isfinite(played).any(axis=1)
            axes.plot(env_steps[at], np.nanmean(played[at], axis=1), "C1.-", linewidth=0.8, label="evaluation")


def resampled(tables: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Interpolate curves, each of steps `[n]` and values `[n, seeds]`, up to the last step that all have reached.

    Returns steps `[POINTS]`, and values `[POINTS, seeds]` of all curves, NaN before the first one of a seed.
    """
    grid = np.linspace(min(steps[0] for steps, _ in tables), min(steps[-1] for steps, _ in tables), POINTS)
    values = np.full((POINTS, sum(table.shape[1] for _, table in tables)), np.nan)
    for i, (steps, x) in enumerate((steps, x) for steps, table in tables for x in table.T):
        if (known := np.isfinite(x)).any():
            values[:, i] = np.interp(grid, steps[known], x[known], left=np.nan)
    return grid, values


def draw_seeds(axes: Any, env_steps: np.ndarray, values: np.ndarray, color: str, label: str | None) -> None:
    """Draw the interquartile mean of values `[points, seeds]` with its 95 % interval, and thin lines of the seeds."""
    center, low, high = iqm_interval(values)
    axes.plot(env_steps, values, color=color, alpha=0.15, linewidth=0.6)
    axes.fill_between(env_steps, low, high, color=color, alpha=0.25, linewidth=0)
    axes.plot(env_steps, center, color=color, label=label)


@contextlib.contextmanager
def drawing(path: Path, ylabel: str, title: str) -> Iterator[Any]:
    """Yield axes over environment steps, and write the picture of what was drawn in them."""
    check_picture(path)
    figure = require_package("matplotlib.figure", "train").Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    yield axes
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="best")
    axes.set(xlabel="environment steps", ylabel=ylabel, title=title)
    axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 0))
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    with replacing(path) as partial:
        figure.savefig(partial, dpi=130)


def check_picture(path: Path) -> None:
    """Raise if a picture cannot be written to a path."""
    formats = require_package("matplotlib.backend_bases", "train").FigureCanvasBase.get_supported_filetypes()
    check_writable(path, tuple(f".{name}" for name in sorted(formats)))


def smoothed(returns: np.ndarray, window: int) -> np.ndarray:
    """Average over those of the last `window` updates in which an episode ended; NaN if there are none."""
    known, before = np.isfinite(returns), np.zeros((min(window, len(returns)), *returns.shape[1:]))
    sums = [np.cumsum(np.concatenate([before, x]), axis=0) for x in (np.where(known, returns, 0), known)]
    total, number = (x[len(before) :] - x[: -len(before)] for x in sums)
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)
