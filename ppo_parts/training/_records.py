"""What a run leaves on the disk besides checkpoints: a metrics file, TensorBoard events, a picture."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from .._extras import require_package
from ._statistics import interval

Row = dict[str, Any]


class MetricsFile:
    """`metrics.jsonl`: one JSON object per update, in order; values are numbers, or lists with one for each seed."""

    def __init__(self, path: Path, first_update: int = 0) -> None:
        self.path = path
        self.rows = rows_before(first_update, path)
        write_rows(path, self.rows)
        self._file = path.open("a")

    def append(self, rows: list[Row]) -> None:
        """Add rows; on return they are on the disk."""
        self.rows += rows
        self._file.write("".join(_line(row) for row in rows))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: str | Path) -> list[Row]:
    """The rows of a metrics file; a last line that was cut short is left out."""
    rows = []
    for line in Path(path).read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def rows_before(update: int, path: Path) -> list[Row]:
    """The rows of the updates before a checkpoint, all of them."""
    rows = [row for row in read_metrics(path) if row["update"] < update] if path.exists() else []
    if len(rows) != update:
        raise ValueError(
            f"{path} holds {len(rows)} of the {update} updates before the checkpoint: it was changed or "
            "damaged, so this run cannot go on; start another"
        )
    return rows


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write a metrics file whole or not at all."""
    _write(path, "".join(_line(row) for row in rows))


def column(rows: list[Row], name: str) -> np.ndarray:
    """One metric over all updates, `[updates]` or `[updates, seeds]`, NaN where there was none."""
    if rows and not any(name in row for row in rows):
        raise KeyError(f"no update has {name}; there are {', '.join(sorted(set().union(*rows)))}")
    missing = next((np.full(np.shape(row[name]), np.nan) for row in rows if name in row), None)
    return np.asarray([np.asarray(row.get(name, missing), float) for row in rows])


def best_update(
    rows: list[Row], updates: Iterable[int], metric: str, *, mode: str = "max", window: int = 1
) -> tuple[int, float] | None:
    """After which of `updates` a metric was best, and its value: the mean over the last `window` rows and the seeds.

    The first of several equal ones; None where it was never measured.
    """

    def value(update: int) -> float:
        recent = [row[metric] for row in rows[max(0, update - window) : update] if metric in row]
        known = np.asarray(recent, float)
        known = known[np.isfinite(known)]
        return float(known.mean()) if known.size else np.nan

    values = {update: value(update) for update in sorted(updates)}
    known = {update: x for update, x in values.items() if np.isfinite(x)}
    if not known:
        return None
    best = (min if mode == "min" else max)(known, key=known.__getitem__)
    return best, known[best]


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file whole or not at all."""
    _write(path, json.dumps(plain(content), indent=2) + "\n")


def versions() -> dict[str, str]:
    """Versions of what numbers depend on, of those that are installed."""
    found = {"python": platform.python_version(), "ppo_parts": __version__}
    for name in ("jax", "jaxlib", "optax", "flax", "gymnax", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def plot_curve(
    path: Path,
    env_steps: np.ndarray,
    returns: np.ndarray,
    title: str,
    window: int = 25,
    evaluation: np.ndarray | None = None,
) -> None:
    """Draw the learning curve: `returns` `[updates]` or `[updates, seeds]`, with a 95 % interval over the seeds.

    `evaluation` has the same shape, NaN in updates without one; the mean over the seeds is drawn.
    """
    figure = require_package("matplotlib.figure", "train").Figure(figsize=(7, 4.2), layout="constrained")
    require_package("matplotlib.backends.backend_agg", "train").FigureCanvasAgg(figure)
    axes = figure.subplots()
    smooth = smoothed(returns, window)
    if returns.ndim == 1:
        axes.plot(env_steps, returns, color="C0", alpha=0.25, linewidth=0.8)
        axes.plot(env_steps, smooth, color="C0")
    else:
        low, high = interval(smooth)
        axes.plot(env_steps, smooth, color="C0", alpha=0.15, linewidth=0.7)
        axes.fill_between(env_steps, low, high, color="C0", alpha=0.3, linewidth=0)
        axes.plot(env_steps, _known_mean(smooth), color="C0", label=f"mean of {returns.shape[1]} seeds, 95 % CI")
    if evaluation is not None:
        played = _known_mean(evaluation.reshape(len(evaluation), -1))
        at = np.isfinite(played)
        axes.plot(env_steps[at], played[at], color="C1", marker=".", linewidth=0.8, label="evaluation")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="best")
    axes.set(xlabel="environment steps", ylabel=f"episode return (mean over {window} updates)", title=title)
    axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 0))
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    partial = path.with_suffix(".tmp.png")
    figure.savefig(partial, dpi=130)
    os.replace(partial, path)


def smoothed(returns: np.ndarray, window: int) -> np.ndarray:
    """Mean over those of the last `window` updates in which an episode ended, NaN where there is none."""
    known = np.isfinite(returns)
    total = np.cumsum(np.where(known, returns, 0), axis=0)
    number = np.cumsum(known, axis=0)
    before = np.zeros_like(total[:1])
    total = total - np.concatenate([np.repeat(before, min(window, len(total)), 0), total])[: len(total)]
    number = number - np.concatenate([np.repeat(before, min(window, len(number)), 0), number])[: len(number)]
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)


def _known_mean(x: np.ndarray) -> np.ndarray:
    """Mean over the last axis without what is NaN, NaN where there is nothing else."""
    known = np.isfinite(x)
    mean = np.sum(np.where(known, x, 0), axis=-1) / np.maximum(np.sum(known, axis=-1), 1)
    return np.where(known.any(axis=-1), mean, np.nan)


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(".tmp")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _line(row: Row) -> str:
    return json.dumps(plain(row)) + "\n"


def plain(x: Any) -> Any:
    """`x` as JSON can hold it: arrays as lists, and None for numbers that are not finite."""
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain(value) for value in x]
    if isinstance(x, (np.ndarray, np.generic)) or hasattr(x, "__array__"):
        return plain(np.asarray(x).tolist())
    if isinstance(x, float) and not np.isfinite(x):
        return None  # JSON has no NaN
    return x
