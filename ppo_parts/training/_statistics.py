"""Statistics over seeds or episodes, and how they are printed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .._base.checked import Count, checked
from .._base.errors import UserTypeError, UserValueError
from .._base.hyperparameters import check_number
from ..functional._common import Range, is_real

FEW = 5  # fewer numbers have a bootstrap interval of the IQM that is only their range


def iqm(x: np.ndarray) -> float:
    """Compute the interquartile mean, the mean of the middle half (Agarwal et al. 2021, arXiv:2108.13264)."""
    return float(iqm_over_seeds(_numbers("iqm", x)))


def _numbers(where: str, x: Any) -> np.ndarray:
    """Return the numbers as one axis; raise if there are none."""
    try:
        numbers = np.asarray(x).ravel()
    except ValueError:  # a ragged list
        numbers = np.asarray(None)
    if numbers.size and not is_real(numbers):
        raise UserTypeError(f"must be numbers, one per seed, got {x!r}", where=where, argument="x")
    if not numbers.size:
        raise UserValueError(f"must be at least one number, got {x!r}", where=where, argument="x")
    return numbers.astype(float)


def iqm_over_seeds(x: np.ndarray) -> np.ndarray:
    """Compute the interquartile mean over the last axis: without a quarter (or a fraction of a number) at each end."""
    n = x.shape[-1]
    weight = np.diff(np.clip(np.arange(n + 1), 0.25 * n, 0.75 * n))  # the part of each sorted number that is inside
    return np.sort(x, axis=-1) @ (weight / np.sum(weight))


@checked
def bootstrap(
    x: np.ndarray, statistic: Callable[[np.ndarray], Any] = np.mean, *, level: float = 0.95, samples: Count = 5000
) -> list[float]:
    """Compute the percentile bootstrap interval of a statistic over seeds."""
    x = _numbers("bootstrap", x)
    check_number("bootstrap", "level", level, Range(0, 1, open_low=True), schedule=False)
    draws = np.random.default_rng(0).choice(x, (samples, len(x)))
    if statistic is np.mean or statistic is iqm:  # all draws at once, which is a hundred times as fast
        values = np.mean(draws, axis=-1) if statistic is np.mean else iqm_over_seeds(draws)
    else:
        values = np.array([statistic(draw) for draw in draws])
    return [float(q) for q in np.quantile(values, [(1 - level) / 2, (1 + level) / 2])]


def iqm_interval(values: np.ndarray, *, samples: int = 2000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    r"""Compute the interquartile mean over seeds, and its 95 % percentile bootstrap interval, at each point of a curve.

    Each of the `samples` draws as many seeds of `values` `[points, seeds]` as there are, with replacement, and takes
    their whole curves: the stratified bootstrap of Agarwal et al. 2021, section 4, for one task. Returns the mean and
    both ends of the interval, each `[points]`; the ends are NaN with one seed.
    """
    if values.shape[1] == 1:
        return values[:, 0], *np.full((2, len(values)), np.nan)
    low, high = np.transpose([bootstrap(row, iqm, samples=samples) for row in values])  # each point with equal draws
    return iqm_over_seeds(values), low, high


def summary(x: np.ndarray) -> dict[str, object]:
    """Summarize one number per seed: mean, standard deviation, median, IQM with interval, and the values themselves."""
    x = _numbers("summary", x)
    return {
        "mean": float(np.mean(x)),
        "std": float(np.std(x, ddof=1)) if len(x) > 1 else None,
        "median": float(np.median(x)),
        "iqm": iqm(x),
        "iqm_95": bootstrap(x, iqm) if len(x) > 1 else None,
        "mean_95": bootstrap(x) if len(x) > 1 else None,
        "per_seed": [float(value) for value in x],
    }


def with_interval(numbers: dict[str, Any], decimals: int | None = None) -> str:
    """Format a summary: the mean and, of several numbers, their spread and the interquartile mean."""
    decimals = decimals_of(numbers["mean"]) if decimals is None else decimals
    mean, text = f"{numbers['mean']:.{decimals}f}", ""
    if numbers["iqm_95"] is not None:
        std, center, low, high = (f"{x:.{decimals}f}" for x in (numbers["std"], numbers["iqm"], *numbers["iqm_95"]))
        few = len(numbers.get("per_seed") or numbers["per_episode"]) < FEW
        text = f" (standard deviation {std}), IQM {center} [{'range' if few else '95 %'}: {low}, {high}]"
    return mean + text


def decimals_of(x: float) -> int:
    """Return how many decimals of a return, and of others beside it, are printed."""
    return 1 if abs(x) >= 10 else 3
