"""Statistics over seeds or episodes, their formatting, and learning curves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit  # JAX needs scipy too

from .._base.checked import Count, checked
from .._base.extras import require_package
from .._base.hyperparameters import check_number
from ..errors import UserTypeError, UserValueError
from ..functional._common import Range, is_real
from ._files import check_writable, replace_file

WINDOW = 25  # number of updates averaged in a point of the learning curve
POINTS = 200  # of a curve
FEW = 5  # with fewer numbers, the bootstrap interval of the IQM is their range


def iqm(x: np.ndarray) -> float:
    """Compute the interquartile mean, the mean of the middle half (Agarwal et al. 2021, arXiv:2108.13264)."""
    return float(iqm_over_seeds(_check_numbers("iqm", x)))


def _check_numbers(where: str, x: Any) -> np.ndarray:
    """Return the numbers as an array; raise if there are none, or if there is more than one axis."""
    try:
        numbers = np.atleast_1d(np.asarray(x))
    except ValueError:  # a ragged list
        numbers = np.asarray([None])
    if numbers.size and not is_real(numbers):
        raise UserTypeError(f"must be numbers, one per seed, got {x!r}", where=where, argument="x")
    if not numbers.size:
        raise UserValueError(f"must be at least one number, got {x!r}", where=where, argument="x")
    if numbers.ndim > 1:
        says = f"must have one axis, of seeds, got shape {numbers.shape}: pass each setting alone"
        raise UserValueError(says, where=where, argument="x")
    return numbers.astype(float)


def iqm_over_seeds(x: np.ndarray) -> np.ndarray:
    """Compute the interquartile mean over the last axis, without a quarter of the (fractional) numbers at each end."""
    n = x.shape[-1]
    weight = np.diff(np.clip(np.arange(n + 1), 0.25 * n, 0.75 * n))  # the part of each sorted number inside
    return np.sort(x, axis=-1) @ (weight / np.sum(weight))


@checked
def bootstrap(
    x: np.ndarray, statistic: Callable[[np.ndarray], Any] = np.mean, *, level: float = 0.95, samples: Count = 5000
) -> list[float]:
    """Compute the percentile bootstrap interval of a statistic over seeds.

    For few seeds it is too narrow. With ten seeds, a 95 % interval misses the mean of normal data about one time in
    ten. `summary` has an exact interval.
    """
    x = _check_numbers("bootstrap", x)
    check_number("bootstrap", "level", level, Range(0, 1, open_low=True), schedule=False)
    draws = np.random.default_rng(0).choice(x, (samples, len(x)))
    if statistic is np.mean or statistic is iqm:  # all draws at once, a hundred times faster
        values = np.mean(draws, axis=-1) if statistic is np.mean else iqm_over_seeds(draws)
    else:
        values = np.array([statistic(draw) for draw in draws])
    if values.ndim > 1:
        says = f"must return one number, got an array of shape {values.shape[1:]}"
        raise UserValueError(says, where="bootstrap", argument="statistic")
    return [float(q) for q in np.quantile(values, [(1 - level) / 2, (1 + level) / 2])]


def iqm_interval(values: np.ndarray, *, samples: int = 2000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the interquartile mean over seeds, and its 95 % percentile bootstrap interval, at each point of a curve.

    Each sample draws as many seeds of `values` `[points, seeds]` as there are, with their whole curves. This is the
    stratified bootstrap of Agarwal et al. 2021, section 4, for one task. Return mean and ends, NaN with one seed.
    """
    if values.shape[1] == 1:
        return values[:, 0], *np.full((2, len(values)), np.nan)
    low, high = np.transpose([bootstrap(row, iqm, samples=samples) for row in values])  # equal draws at each point
    return iqm_over_seeds(values), low, high


def summary(x: np.ndarray) -> dict[str, object]:
    """Summarize one number per seed: mean, standard deviation, median, IQM, both intervals, and the values themselves.

    The 95 % interval of the mean is Student's t; the interval of the IQM is its `bootstrap`.
    """
    x = _check_numbers("summary", x)
    mean, std = float(np.mean(x)), float(np.std(x, ddof=1)) if len(x) > 1 else None
    half = None if std is None else float(stdtrit(len(x) - 1, 0.975)) * std / len(x) ** 0.5
    return {
        "mean": mean,
        "std": std,
        "median": float(np.median(x)),
        "iqm": iqm(x),
        "iqm_95": bootstrap(x, iqm) if len(x) > 1 else None,
        "mean_95": None if half is None else [mean - half, mean + half],
        "per_seed": [float(value) for value in x],
    }


def format_summary(numbers: dict[str, Any], decimals: int | None = None) -> str:
    """Format a summary as the mean and, for several numbers, their spread and the interquartile mean."""
    if numbers["mean"] is None:  # read from a file, in which null stands for a number that was not finite
        return "not finite"
    decimals = choose_decimals(numbers["mean"]) if decimals is None else decimals
    mean, text = f"{numbers['mean']:.{decimals}f}", ""
    if numbers["iqm_95"] is not None:
        std, center, low, high = (f"{x:.{decimals}f}" for x in (numbers["std"], numbers["iqm"], *numbers["iqm_95"]))
        few = len(numbers.get("per_seed") or numbers["per_episode"]) < FEW
        text = f" (standard deviation {std}), IQM {center} [{'range' if few else '95 %'}: {low}, {high}]"
    return mean + text


def choose_decimals(x: float) -> int:
    """Return the number of decimals for a return and for others printed next to it."""
    return 1 if abs(x) >= 10 else 3


def plot_curve(
    path: Path, env_steps: np.ndarray, returns: np.ndarray, title: str, evaluation: np.ndarray | None = None
) -> None:
    """Draw the learning curve, a running mean of `returns` `[updates]` or `[updates, seeds]`, NaN if no episode ended.

    `evaluation`, NaN for updates without one, is drawn as the mean over the seeds.
    """
    each = returns.reshape(len(returns), -1)
    with draw_picture(path, f"episode return (running mean of {WINDOW})", title) as axes:
        if returns.ndim == 1:
            # Use markers, because a line does not show an update between two updates in which no episode ended.
            axes.plot(env_steps, returns, color="C0", alpha=0.25, linewidth=0.8, marker=".", markersize=3)
        label = f"interquartile mean of {each.shape[1]} runs, 95 % interval" if returns.ndim > 1 else None
        draw_seeds(axes, env_steps, smooth(each, WINDOW), "C0", label)
        if evaluation is not None:
            played = evaluation.reshape(len(returns), -1)
            known = np.isfinite(played).any(axis=1)
            axes.plot(env_steps[known], np.nanmean(played[known], axis=1), "C1.-", linewidth=0.8, label="evaluation")


def resample(
    tables: Sequence[tuple[np.ndarray, np.ndarray]], points: int | None = POINTS
) -> tuple[np.ndarray, np.ndarray]:
    """Interpolate curves of steps `[n]` and values `[n, seeds]` up to the last step that all have reached.

    Return `points` equidistant steps (with None, every step of a curve) and the values `[points, seeds]` of all curves,
    NaN before a seed's first value.
    """
    every = np.unique(np.concatenate([steps for steps, _ in tables]))
    grid = every[every <= min(steps[-1] for steps, _ in tables)]
    grid = grid if points is None else np.linspace(grid[0], grid[-1], points)
    values = np.full((len(grid), sum(table.shape[1] for _, table in tables)), np.nan)
    for i, (steps, x) in enumerate((steps, x) for steps, table in tables for x in table.T):
        if (known := np.isfinite(x)).any():
            values[:, i] = np.interp(grid, steps[known], x[known], left=np.nan)
    return grid, values


def draw_seeds(axes: Any, env_steps: np.ndarray, values: np.ndarray, color: str, label: str | None) -> None:
    """Draw the interquartile mean of values `[points, seeds]` with its 95 % interval, and thin lines of the seeds."""
    env_steps, values = resample([(env_steps, values)])
    center, low, high = iqm_interval(values)
    axes.plot(env_steps, values, color=color, alpha=0.15, linewidth=0.6)
    axes.fill_between(env_steps, low, high, color=color, alpha=0.25, linewidth=0)
    axes.plot(env_steps, center, color=color, label=label)


@contextlib.contextmanager
def draw_picture(path: Path, ylabel: str, title: str) -> Iterator[Any]:
    """Yield axes over environment steps, and write the picture that was drawn in them."""
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
    with replace_file(path) as partial:
        figure.savefig(partial, dpi=130)


def check_picture(path: Path) -> None:
    """Raise if a picture cannot be written to a path."""
    formats = require_package("matplotlib.backend_bases", "train").FigureCanvasBase.get_supported_filetypes()
    check_writable(path, tuple(f".{name}" for name in sorted(formats)))


def smooth(returns: np.ndarray, window: int) -> np.ndarray:
    """Average over the updates among the last `window` in which an episode ended; NaN if there are none."""
    known, window = np.isfinite(returns), min(window, len(returns))

    def add_last(x: np.ndarray) -> np.ndarray:
        """Sum over windows, each the end of one block and the beginning of the next.

        A difference of two cumulative sums would lose its digits after a huge value.
        """
        zeros = np.zeros((-len(x) % window, *x.shape[1:]))
        blocks = np.concatenate([x, zeros]).reshape(-1, window, *x.shape[1:])
        heads, tails = np.cumsum(blocks, axis=1), np.cumsum(blocks[:, ::-1], axis=1)[:, ::-1]
        heads[1:, :-1] += tails[:-1, 1:]
        return heads.reshape(-1, *x.shape[1:])[: len(x)]

    total, number = add_last(np.where(known, returns, 0)), add_last(known)
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)
