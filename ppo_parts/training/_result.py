"""The result of a run: `result.json`, the learning curve, and a printed summary."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from .._base.doors import checked
from .._base.errors import ShapeError, UserTypeError, UserValueError
from .._base.extras import require_package
from .._base.hyperparameters import check_count
from ._config_json import versions
from ._evaluate import EVALUATION
from ._files import check_writable, replacing
from ._messages import logger
from ._metrics_file import Row
from ._statistics import iqm_interval, summary
from ._train import NONFINITE, Train, last_episodes_return

POINTS = 200
"""Number of points of a curve with an interval."""


def beginning_of_result(train: Train, config: Any, num_seeds: int, done: int) -> dict[str, Any]:
    """Return the part of the result that is known even if the run was interrupted."""
    return {
        "config": dataclasses.asdict(config),
        "num_seeds": num_seeds,
        "env_steps": done * train.steps_per_update,
        "versions": versions(),
    }


class Curve(NamedTuple):
    """What the result and the picture need of the rows: `[rows]`, or `[rows, seeds]`; NaN where not measured.

    Attributes:
        env_steps: environment steps after each row.
        returns, episodes: the mean return of the episodes that ended, and their number.
        evaluation: the mean return of evaluations.
        skipped: the numbers of minibatches without effect, and of all.
    """

    env_steps: np.ndarray
    returns: np.ndarray
    episodes: np.ndarray
    evaluation: np.ndarray
    skipped: tuple[float, float]


def curve_of(rows: Iterable[Row]) -> Curve | None:
    """Take from the rows, one after another, what the result and the picture need; None if there are none."""
    names = ("env_steps", "episode_return", "episodes", EVALUATION + "episode_return")
    columns: dict[str, list[np.ndarray]] = {name: [] for name in names}
    lost = total = 0.0
    for row in rows:
        for name in names:
            columns[name].append(np.asarray(row.get(name, np.nan), float))
        counts = {name: np.nan_to_num(np.asarray(x, float)) for name, x in row.items()}
        bad = sum(x for name, x in counts.items() if NONFINITE in name)
        minibatches = sum(x for name, x in counts.items() if name.split("/")[-1] == "minibatches")
        lost, total = lost + float(np.sum(np.where(bad, minibatches, 0))), total + float(np.sum(minibatches))
    if not columns["env_steps"]:
        return None
    env_steps, returns, episodes, evaluation = map(_stacked, columns.values())
    return Curve(env_steps, returns, episodes, evaluation, (lost, total))


def _stacked(values: list[np.ndarray]) -> np.ndarray:
    shape = max((np.shape(x) for x in values), key=len)  # a missing one is a single NaN
    return np.stack([np.broadcast_to(x, shape) for x in values])


def result_of(curve: Curve) -> dict[str, Any]:
    """Return the part of the result that follows from the metrics of all updates."""
    last = last_episodes_return(curve.returns.T, np.nan_to_num(curve.episodes).T)
    lost, total = curve.skipped
    skipped = {"skipped_minibatches": int(lost), "skipped_share": lost / total} if lost else {}
    return {"last_100_episodes_return": summary(np.asarray(last)), **skipped}


def timing_of(env_steps: int, seconds: float) -> dict[str, Any]:
    """Return how fast this process trained, from the steps of all seeds and the seconds after compiling."""
    return {
        "env_steps": env_steps,
        "seconds": seconds,
        "steps_per_second": env_steps / seconds,
        "device": jax.devices()[0].device_kind,
    }


def evaluation_of(played: dict[str, Any], episodes: int) -> dict[str, Any]:
    """Summarize the last evaluation for the result."""
    means = {name.removeprefix(EVALUATION): float(np.mean(x)) for name, x in played.items()}
    return {
        **means,
        "episodes": episodes,
        "episode_return": summary(played[EVALUATION + "episode_return"]),
        "terminated": int(np.sum(played[EVALUATION + "terminated"])),
        "truncated": int(np.sum(played[EVALUATION + "truncated"])),
    }


def draw(path: Path, curve: Curve, title: str) -> dict[str, str]:
    """Draw the learning curve, if any episode ended, and return its path."""
    if not np.isfinite(curve.returns).any():
        return {}
    evaluation = curve.evaluation if np.isfinite(curve.evaluation).any() else None
    plot_curve(path, curve.env_steps, curve.returns, title, evaluation=evaluation)
    return {"curve": str(path)}


def with_interval(numbers: dict[str, Any], decimals: int = 1) -> str:
    """Format a summary: the mean and, of several numbers, their spread and the interquartile mean."""
    mean, text = f"{numbers['mean']:.{decimals}f}", ""
    if numbers["iqm_95"] is not None:
        low, high = numbers["iqm_95"]
        std, center, low, high = (f"{x:.{decimals}f}" for x in (numbers["std"], numbers["iqm"], low, high))
        text = f" (standard deviation {std}), IQM {center} [95 %: {low}, {high}]"
    return mean + text


def announce(result: dict[str, Any]) -> None:
    """Log the result."""
    if "last_100_episodes_return" in result and np.isfinite(result["last_100_episodes_return"]["mean"]):
        logger.info(f"mean return of the last 100 episodes: {with_interval(result['last_100_episodes_return'])}")
    else:
        logger.info("no episode ended" + (" in some of the seeds" if result["num_seeds"] > 1 else ""))
    if "skipped_minibatches" in result:
        logger.info(
            f"{result['skipped_minibatches']:,} minibatches ({result['skipped_share']:.0%}) had no effect: there were "
            f"non-finite numbers in their updates; {NONFINITE}... in the metrics says where"
        )
    if "evaluation" in result:
        played = result["evaluation"]
        logger.info(f"evaluation over {played['episodes']} episodes: {with_interval(played['episode_return'])}")
    if "best" in result:
        logger.info("best {metric}: {value:.4g}, in the checkpoint of update {update}".format(**result["best"]))
    if "timing" in result:
        seeds = f" of {result['num_seeds']} seeds" if result["num_seeds"] > 1 else ""
        text = "{env_steps:,} steps{seeds} in {seconds:,.1f} s ({steps_per_second:,.0f} per second) on {device}"
        logger.info(text.format(seeds=seeds, **result["timing"]))
    if "curve" in result:
        logger.info(f"learning curve: {result['curve']}")


@checked
def plot_curve(
    path: str | Path,
    env_steps: np.ndarray,
    returns: np.ndarray,
    title: str,
    window: int = 25,
    evaluation: np.ndarray | None = None,
) -> None:
    """Draw the learning curve, a running mean of `returns` over `window` updates, and write it to a picture.

    With several seeds, it is their interquartile mean, from the update at which all have a value on, with its 95 %
    bootstrap interval.

    Args:
        path: the picture; its extension determines the format.
        env_steps: `[updates]`.
        returns: `[updates]` or `[updates, seeds]`; NaN where no episode ended.
        title: title of the picture.
        window: number of updates to average over.
        evaluation: like `returns`, NaN for updates without an evaluation; the mean over the seeds is drawn.
    """
    path, window = Path(path), check_count("plot_curve", "window", window)
    env_steps, returns = _numbers("env_steps", env_steps), _numbers("returns", returns)
    if env_steps.ndim != 1 or returns.ndim not in (1, 2) or len(returns) != len(env_steps):
        raise ShapeError(
            "plot_curve: env_steps must have shape [updates], and returns [updates] or [updates, seeds], got "
            f"{list(env_steps.shape)} and {list(returns.shape)}"
        )
    if evaluation is not None and _numbers("evaluation", evaluation).shape != returns.shape:
        raise ShapeError(
            f"plot_curve: evaluation must have the shape of returns, {list(returns.shape)}, got "
            f"{list(np.shape(evaluation))}"
        )
    smooth = _held(smoothed(returns, window))
    with drawing(path, f"episode return (running mean of {window})", title) as axes:
        if returns.ndim == 1:
            # With markers, because a line does not show an update between two updates in which no episode ended.
            axes.plot(env_steps, returns, color="C0", alpha=0.25, linewidth=0.8, marker=".", markersize=3)
            axes.plot(env_steps, smooth, color="C0")
        else:
            at = np.unique(np.linspace(0, len(smooth) - 1, POINTS).astype(int))
            center, low, high = iqm_interval(smooth[at])
            seeds = f"interquartile mean of {returns.shape[1]} seeds, 95 % interval"
            axes.plot(env_steps, smooth, color="C0", alpha=0.15, linewidth=0.7)
            axes.fill_between(env_steps[at], low, high, color="C0", alpha=0.3, linewidth=0)
            axes.plot(env_steps[at], center, color="C0", label=seeds)
        if evaluation is not None:
            played = _known_mean(_numbers("evaluation", evaluation).reshape(len(returns), -1))
            at = np.isfinite(played)
            axes.plot(env_steps[at], played[at], color="C1", marker=".", linewidth=0.8, label="evaluation")


@contextlib.contextmanager
def drawing(path: Path, ylabel: str, title: str) -> Iterator[Any]:
    """Yield axes over environment steps, and write the picture of what was drawn in them."""
    check_picture(path)
    figure = require_package("matplotlib.figure", "train").Figure(figsize=(7, 4.2), layout="constrained")
    require_package("matplotlib.backends.backend_agg", "train").FigureCanvasAgg(figure)
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
    if path.suffix[1:].lower() not in formats:
        raise UserValueError(f"{path} must end with the extension of an image format: .{', .'.join(sorted(formats))}")
    check_writable(path)


def _numbers(name: str, x: Any) -> np.ndarray:
    try:
        return np.asarray(x).astype(float, casting="same_kind")
    except (TypeError, ValueError):
        raise UserTypeError(f"must be numbers, got {x!r:.100}", where="plot_curve", argument=name) from None


def smoothed(returns: np.ndarray, window: int) -> np.ndarray:
    """Average over those of the last `window` updates in which an episode ended; NaN if there are none."""
    known = np.isfinite(returns)
    total = np.cumsum(np.where(known, returns, 0), axis=0)
    number = np.cumsum(known, axis=0)
    before = np.zeros_like(total[:1])
    total = total - np.concatenate([np.repeat(before, min(window, len(total)), 0), total])[: len(total)]
    number = number - np.concatenate([np.repeat(before, min(window, len(number)), 0), number])[: len(number)]
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)


def _held(x: np.ndarray) -> np.ndarray:
    """Replace NaN by the last number before it in the same column, if there is one."""
    rows = np.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1))
    last = np.maximum.accumulate(np.where(np.isfinite(x), rows, 0), axis=0)
    return np.take_along_axis(x, last, axis=0)


def _known_mean(x: np.ndarray) -> np.ndarray:
    """Average over the last axis without NaN; NaN where there are no other values."""
    known = np.isfinite(x)
    mean = np.sum(np.where(known, x, 0), axis=-1) / np.maximum(np.sum(known, axis=-1), 1)
    return np.where(known.any(axis=-1), mean, np.nan)
