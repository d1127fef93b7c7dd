"""Files that are written atomically: the JSON files and the learning curve of a run."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from .._extras import require_package
from ._statistics import interval


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically."""
    write_whole(path, (json.dumps(plain(content), indent=2) + "\n").encode())


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that affect the numbers of a run."""
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

    `evaluation` has the same shape, with NaN for updates without one; its mean over the seeds is drawn.
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
    """Average over those of the last `window` updates in which an episode ended; NaN where there is none."""
    known = np.isfinite(returns)
    total = np.cumsum(np.where(known, returns, 0), axis=0)
    number = np.cumsum(known, axis=0)
    before = np.zeros_like(total[:1])
    total = total - np.concatenate([np.repeat(before, min(window, len(total)), 0), total])[: len(total)]
    number = number - np.concatenate([np.repeat(before, min(window, len(number)), 0), number])[: len(number)]
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)


def _known_mean(x: np.ndarray) -> np.ndarray:
    """Average over the last axis without NaN; NaN where there are no other values."""
    known = np.isfinite(x)
    mean = np.sum(np.where(known, x, 0), axis=-1) / np.maximum(np.sum(known, axis=-1), 1)
    return np.where(known.any(axis=-1), mean, np.nan)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically; on return it is on the disk."""
    partial = path.with_suffix(".tmp")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def plain(x: Any) -> Any:
    """Convert `x` for JSON: arrays become lists, and numbers that are not finite become None."""
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain(value) for value in x]
    if isinstance(x, (np.ndarray, np.generic)) or hasattr(x, "__array__"):
        return plain(np.asarray(x).tolist())
    if isinstance(x, float) and not np.isfinite(x):
        return None  # JSON has no NaN
    return x
