"""Means over seeds, their differences, and intervals of both, as numbers and as text."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import stdtrit

from ppo_parts import training
from ppo_parts.training._statistics import FEW


def show_interval(found: Mapping[str, Any], digits: int | None = None) -> str:
    """The mean over seeds and its 95 % interval, which one seed does not have, from the seeds of `training.summary`."""
    digits = int(abs(found["mean"]) < 20) if digits is None else digits
    ends = training.summary(found["per_seed"])["mean_95"]  # old records bootstrap it
    return show_ends(found["mean"], ends, f".{digits}f")


def show_ends(middle: float, ends: Any, form: str) -> str:
    """A number and the ends of its interval, if it has one."""
    return format(middle, form) + (f" [{', '.join(format(end, form) for end in ends)}]" if ends else "")


def show_iqm(found: dict[str, Any], digits: int = 1) -> str:
    """The interquartile mean over seeds and its 95 % bootstrap interval, from `training.summary`."""
    return show_ends(found["iqm"], found["iqm_95"], f".{digits}f")


def compare_means(now: Sequence[float], before: Sequence[float]) -> dict[str, Any]:
    """The difference of two means over seeds, and its 95 % interval: Welch's t; the seeds are not paired.

    `detectable` is the size of a difference that this many seeds detect with a power of 80 %.

    Reference: Welch 1947, doi:10.1093/biomet/34.1-2.28.
    """
    variances = [np.var(x, ddof=1) / len(x) for x in (now, before)]  # of the means
    error = np.sqrt(sum(variances))
    separate = sum(each**2 / (len(x) - 1) for each, x in zip(variances, (now, before), strict=True))
    level, power = stdtrit(error**4 / separate if error else 1, (0.975, 0.8))
    mean, half = float(np.mean(now) - np.mean(before)), float(level * error)
    return {"mean": mean, "95": [mean - half, mean + half], "detectable": half + float(power * error)}


def compare_pairs(now: Any, before: Any, comparisons: int = 1) -> dict[str, Any]:
    """The mean difference of pairs, and its 95 % interval, Student's t; those of several comparisons hold together.

    Each of them has the level 1 - 0.05 / comparisons.

    Reference: Dunn 1961, doi:10.1080/01621459.1961.10482090.
    """
    differences = np.subtract(now, before)
    error = np.std(differences, ddof=1) / len(differences) ** 0.5
    mean, half = float(np.mean(differences)), float(stdtrit(len(differences) - 1, 1 - 0.025 / comparisons) * error)
    return {"mean": mean, "95": [mean - half, mean + half]}


def show_change(change: dict[str, Any], form: str = "+.0f") -> str:
    """A difference and its interval."""
    return show_ends(change["mean"], change["95"], form)


def show_visible(change: dict[str, Any], seeds: int) -> str:
    """A difference and its interval, bold where that excludes 0, unless there are fewer than five seeds."""
    text, (low, high) = show_change(change, "+.3g"), change["95"]
    return f"**{text}**" if seeds >= FEW and (low > 0 or high < 0) else text
