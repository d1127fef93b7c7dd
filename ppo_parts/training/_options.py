"""How a run is kept, checked before anything is made or trained."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax

from .._errors import UserValueError
from .._hyperparameters import choice, count
from ._evaluate import EVALUATION, metric_names
from ._train import Train


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How a run is kept; nothing here changes what is learned."""

    name: str | None = None
    """folder of the run below --directory; by default made of the environment, the seed and the time"""
    directory: Path = Path("runs")
    """where runs are kept"""
    resume: Path | None = None
    """folder of a run to continue, with its own configuration"""
    init_from: Path | None = None
    """folder of a run to begin with: a new run trains its state further, with what is changed in its configuration"""
    checkpoint: Literal["latest", "best"] | int = "latest"
    """where --resume or --init-from continues: at the latest checkpoint, the best, or that of an update"""
    num_seeds: int = 1
    """train this many seeds (seed, seed + 1, ...) in one compiled program"""
    eval_every: int | None = None
    """updates between evaluations; by default there is one at the end only"""
    eval_episodes: int = 0
    """play this many whole episodes in an evaluation"""
    eval_mode: bool = False
    """evaluate with the mode of the policy's distribution instead of samples"""
    checkpoint_every: int | None = None
    """updates between checkpoints; by default a tenth of the run"""
    checkpoint_minutes: float = 5.0
    """minutes after which there is a checkpoint in any case"""
    keep_checkpoints: int | None = 2
    """keep this many of the latest checkpoints; None: all"""
    best_metric: str | None = None
    """keep the checkpoint at which this metric was best, too, e.g. episode_return or evaluation/won"""
    best_mode: Literal["max", "min"] = "max"
    """whether the best is the highest or the lowest"""
    log_every: int | None = None
    """updates in a TensorBoard record, which is their mean; by default a two-hundredth of the run"""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """at numbers that are not finite: end the run, or skip the update they are in, and count it"""
    tensorboard: bool = True
    """write TensorBoard events"""
    progress: bool = True
    """show a progress bar, on terminals"""


KEPT = tuple(
    field.name
    for field in dataclasses.fields(RunOptions)
    if field.name not in ("name", "directory", "resume", "init_from", "checkpoint", "progress")
)
"""Options that a resumed run takes over; all but `num_seeds` may be given anew."""


def stored_options(stored: Mapping[str, Any]) -> RunOptions:
    """The options in what `config.json` says of a run."""
    return RunOptions(**{name: x for name, x in stored["run"].items() if name in KEPT})


def checked(options: RunOptions, train: Train) -> RunOptions:
    """`options` with every pace as a number.

    Raises:
        ValueError, TypeError: they cannot work; what to change is named.
    """
    tenth, two_hundredth = (max(1, train.num_updates // parts) for parts in (10, 200))
    options = dataclasses.replace(
        options,
        checkpoint_every=tenth if options.checkpoint_every is None else options.checkpoint_every,
        log_every=two_hundredth if options.log_every is None else options.log_every,
    )
    for name in ("num_seeds", "checkpoint_every", "log_every"):
        count("run", name, getattr(options, name))
    for name in ("eval_every", "keep_checkpoints"):
        if getattr(options, name) is not None:
            count("run", name, getattr(options, name))
    if options.resume is not None and options.init_from is not None:
        raise UserValueError("run: resume continues a run, init_from begins a new one with its state: give one of them")
    if options.checkpoint != "latest" and options.resume is None and options.init_from is None:
        raise UserValueError(
            f"run: checkpoint={options.checkpoint!r} says where resume or init_from continues: give one of them"
        )
    if options.eval_every is not None and not options.eval_episodes:
        raise UserValueError(f"run: eval_every={options.eval_every} needs eval_episodes, how many episodes to play")
    if not options.checkpoint_minutes > 0:
        raise UserValueError(f"run: checkpoint_minutes must be more than 0, got {options.checkpoint_minutes}")
    choice("run", "on_nonfinite", options.on_nonfinite, ("stop", "skip"))
    choice("run", "best_mode", options.best_mode, ("max", "min"))
    if options.eval_episodes:
        count("run", "eval_episodes", options.eval_episodes)
        key, episodes = jax.random.key(0), options.eval_episodes
        play = functools.partial(train.evaluate_policy, episodes=episodes)
        played = jax.eval_shape(play, key, train.shapes[0])  # what cannot work fails now
    if options.best_metric is not None:
        measured = set(train.shapes[1])
        if options.eval_every is not None:
            measured |= {EVALUATION + name for name in metric_names(played)}
        if options.best_metric not in measured:
            hint = "evaluation/... needs eval_every; " if options.best_metric.startswith(EVALUATION) else ""
            raise UserValueError(
                f"run: best_metric={options.best_metric!r} is not measured in this run; {hint}"
                f"there are {', '.join(sorted(measured))}"
            )
    return options
