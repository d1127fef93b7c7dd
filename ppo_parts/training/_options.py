"""Options for recording a run, which are checked before anything is created or trained."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax

from .._errors import UserValueError
from .._extras import require_package
from .._hyperparameters import choice, count
from ._evaluate import EVALUATION, metric_names
from ._train import Train


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How a run is recorded, and on what it runs. Only `init_from`, with its `checkpoint`, changes what is learned."""

    name: str | None = None
    """folder of the run inside --directory; by default named after the environment, the seed and the time"""
    directory: Path = Path("runs")
    """folder that holds the runs"""
    resume: Path | None = None
    """folder of a run to continue, with its own configuration"""
    init_from: Path | None = None
    """folder of a run to start from: a new run continues from its state, with a configuration that you may change"""
    checkpoint: Literal["latest", "best"] | int = "latest"
    """checkpoint that --resume or --init-from loads: the latest, the best, or the one of this update"""
    num_seeds: int = 1
    """train this many seeds (seed, seed + 1, ...) in one compiled program"""
    num_devices: int | None = None
    """devices over which to divide the environments, or the seeds if there are several; None: one, or with
    --distributed all of them"""
    distributed: bool = False
    """one of several processes that train together, started by Slurm, Open MPI, Kubernetes, torchrun or on TPUs"""
    heartbeat_timeout: int = 100
    """seconds without a sign of life after which a process of a distributed run counts as lost, and the run ends"""
    eval_every: int | None = None
    """updates between evaluations; by default there is only one, at the end"""
    eval_episodes: int = 0
    """number of whole episodes to play in an evaluation"""
    eval_mode: bool = False
    """evaluate with the mode of the policy's distribution instead of samples"""
    checkpoint_every: int | None = None
    """updates between checkpoints; by default a tenth of the run"""
    checkpoint_minutes: float = 5.0
    """longest time between checkpoints, in minutes"""
    keep_checkpoints: int | None = 2
    """number of the latest checkpoints to keep; None: all"""
    best_metric: str | None = None
    """also keep the checkpoint at which this metric was best, e.g. episode_return or evaluation/won"""
    best_mode: Literal["max", "min"] = "max"
    """whether the best value of that metric is the highest or the lowest"""
    log_every: int | None = None
    """updates averaged into one record of TensorBoard or Weights & Biases; by default a two-hundredth of the run"""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """if a number is not finite: stop the run, or skip the update and count it"""
    tensorboard: bool = True
    """write TensorBoard events"""
    track: bool = False
    """log to Weights & Biases as well, with wandb's own settings, such as WANDB_MODE=offline"""
    track_project: str = "ppo_parts"
    """project in Weights & Biases"""
    progress: bool = True
    """show a progress bar if the output is a terminal"""


MACHINE = ("num_devices", "distributed", "heartbeat_timeout")
"""Options about the machine, which may be another one when the run is resumed."""
KEPT = tuple(
    field.name
    for field in dataclasses.fields(RunOptions)
    if field.name not in ("name", "directory", "resume", "init_from", "checkpoint", "progress", *MACHINE)
)
"""Options that a resumed run takes over; all except `num_seeds` may be given again."""


def kept_options(options: RunOptions) -> dict[str, Any]:
    """The options that `config.json` stores."""
    return {name: getattr(options, name) for name in KEPT}


def stored_options(stored: Mapping[str, Any]) -> RunOptions:
    """The options of a run that are stored in its `config.json`."""
    return RunOptions(**{name: x for name, x in stored["run"].items() if name in KEPT})


def checked(options: RunOptions, train: Train) -> RunOptions:
    """`options` with the default intervals filled in.

    Raises:
        ValueError, TypeError: the options cannot work; the message names what to change.
    """
    tenth, two_hundredth = (max(1, train.num_updates // parts) for parts in (10, 200))
    options = dataclasses.replace(
        options,
        checkpoint_every=tenth if options.checkpoint_every is None else options.checkpoint_every,
        log_every=two_hundredth if options.log_every is None else options.log_every,
    )
    for name in ("num_seeds", "checkpoint_every", "log_every", "heartbeat_timeout"):
        count("run", name, getattr(options, name))
    for name in ("eval_every", "keep_checkpoints", "num_devices"):
        if getattr(options, name) is not None:
            count("run", name, getattr(options, name))
    if options.distributed and not jax.distributed.is_initialized():
        raise UserValueError(
            "run: distributed=True is for processes that have called jax.distributed.initialize() before anything used "
            "a device, as the command lines of recipes do: call it first"
        )
    if options.track:
        require_package("wandb", "track")  # fails now rather than after compiling
    if options.resume is not None and options.init_from is not None:
        raise UserValueError(
            f"run: resume={options.resume} continues a run and init_from={options.init_from} begins a new one: give "
            "one of them"
        )
    if options.checkpoint != "latest" and options.resume is None and options.init_from is None:
        raise UserValueError(
            f"run: checkpoint={options.checkpoint!r} says what to load from the run that resume or init_from names: "
            "give one of them"
        )
    if options.eval_every is not None and not options.eval_episodes:
        raise UserValueError(f"run: eval_every={options.eval_every} needs eval_episodes, the number of episodes")
    if not options.checkpoint_minutes > 0:
        raise UserValueError(f"run: checkpoint_minutes must be more than 0, got {options.checkpoint_minutes}")
    choice("run", "on_nonfinite", options.on_nonfinite, ("stop", "skip"))
    choice("run", "best_mode", options.best_mode, ("max", "min"))
    if options.eval_episodes:
        count("run", "eval_episodes", options.eval_episodes)
        key, episodes = jax.random.key(0), options.eval_episodes
        play = functools.partial(train.evaluate_policy, episodes=episodes)
        played = jax.eval_shape(play, key, train.shapes[0])  # fails now rather than after training
    if options.best_metric is not None:
        measured = set(train.shapes[1])
        if options.eval_every is not None:
            measured |= {EVALUATION + name for name in metric_names(played)}
        if options.best_metric not in measured:
            hint = "evaluation/... needs eval_every; " if options.best_metric.startswith(EVALUATION) else ""
            raise UserValueError(
                f"run: best_metric={options.best_metric!r} is not measured in this run; {hint}"
                f"there are {', '.join(map(repr, sorted(measured)))}"
            )
    return options
