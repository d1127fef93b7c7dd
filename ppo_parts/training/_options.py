"""Options of a run other than its configuration, which are checked before anything is created or trained."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import jax

from .._base.errors import UserValueError
from .._base.extras import require_package
from ._config import at_least, check_config, more_than
from ._evaluate import EVALUATION, metric_names
from ._messages import did_you_mean
from ._train import Train


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How a run is recorded and continued, on which devices it runs, and with how many seeds."""

    name: Annotated[str | None, "folder inside --directory; None: named after environment, seed and time"] = None
    directory: Annotated[Path, "folder that holds the runs"] = Path("runs")
    resume: Annotated[Path | None, "folder of a run to continue, with its own configuration"] = None
    init_from: Annotated[Path | None, "folder of a run from whose state a new run with other settings continues"] = None
    checkpoint: Annotated[Literal["latest", "best"] | int, "checkpoint to continue from, or its update"] = "latest"
    num_seeds: Annotated[int, at_least(1), "train this many seeds (seed, seed + 1, ...) in one compiled program"] = 1
    num_devices: Annotated[
        int | None, at_least(1), "devices that share environments, or several seeds; None: one; all if --distributed"
    ] = None
    distributed: Annotated[bool, "one of several processes that train together (Slurm, torchrun, TPUs, ...)"] = False
    heartbeat_timeout: Annotated[
        int, at_least(1), "seconds without a sign of life after which a process counts as lost, and the run ends"
    ] = 100
    eval_every: Annotated[int | None, at_least(1), "updates between evaluations; None: only one, at the end"] = None
    eval_episodes: Annotated[int, at_least(0), "number of whole episodes to play in an evaluation"] = 0
    eval_mode: Annotated[bool, "evaluate with the mode of the policy's distribution instead of samples"] = False
    checkpoint_every: Annotated[int | None, at_least(1), "updates between checkpoints; None: a tenth of the run"] = None
    checkpoint_minutes: Annotated[float, more_than(0), "longest time between checkpoints, in minutes"] = 5.0
    keep_checkpoints: Annotated[int | None, at_least(1), "number of the latest checkpoints to keep; None: all"] = 2
    best_metric: Annotated[
        str | None, "also keep the checkpoint at which this metric was best, e.g. episode_return or evaluation/won"
    ] = None
    best_mode: Annotated[Literal["max", "min"], "whether that metric is best at its maximum or its minimum"] = "max"
    log_every: Annotated[
        int | None, at_least(1), "updates averaged into a record of TensorBoard or wandb; None: 1/200 of the run"
    ] = None
    on_nonfinite: Annotated[
        Literal["stop", "skip"], "if a number is not finite: stop the run, or skip the update and count it"
    ] = "stop"
    tensorboard: Annotated[bool, "write TensorBoard events"] = True
    track: Annotated[bool, "also log to Weights & Biases, as WANDB_PROJECT and WANDB_MODE=offline say"] = False
    progress: Annotated[bool, "show a progress bar if the output is a terminal"] = True


ONCE = ("name", "directory", "resume", "init_from", "checkpoint", "progress")
MACHINE = ("num_devices", "distributed", "heartbeat_timeout")  # which may be another one when the run is resumed
KEPT = tuple(field.name for field in dataclasses.fields(RunOptions) if field.name not in (*ONCE, *MACHINE))
"""Options that a resumed run takes over; all except `num_seeds` may be given again."""


def kept_options(options: RunOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in KEPT}


def stored_options(stored: Mapping[str, Any]) -> RunOptions:
    """Return the options in the `config.json` of a run, after checking them."""
    options = RunOptions(**{name: x for name, x in stored["run"].items() if name in KEPT})
    check_config(options, where="config.json: run")
    return options


def checkpoint_interval(options: RunOptions, num_updates: int) -> int:
    """Return after how many updates a checkpoint is saved; `config.json` stores None, for a run of another length."""
    return options.checkpoint_every or max(1, num_updates // 10)


def log_interval(options: RunOptions, num_updates: int) -> int:
    """Return how many updates a record summarizes."""
    return options.log_every or max(1, num_updates // 200)


def validate(options: RunOptions, train: Train) -> RunOptions:
    check_config(options, where="run")
    for name, message in _contradictions(options):
        raise UserValueError(message, where="run", argument=name)
    if options.track:
        require_package("wandb", "track")  # fails now rather than after compiling
    measured = set(train.shapes[1])
    if options.eval_episodes:
        play = functools.partial(train.evaluate_policy, episodes=options.eval_episodes)
        played = jax.eval_shape(play, jax.random.key(0), train.shapes[0])  # fails now rather than after training
        if options.eval_every is not None:
            measured |= {EVALUATION + name for name in metric_names(played)}
    best = options.best_metric
    if best is not None and best not in measured:
        without = best.startswith(EVALUATION) and options.eval_every is None
        hint = "; evaluation/... needs eval_every;" if without else did_you_mean(best, measured) or ";"
        raise UserValueError(
            f"must be measured in this run, got {best!r}{hint} there are {', '.join(map(repr, sorted(measured)))}",
            where="run",
            argument="best_metric",
        )
    return options


def _contradictions(options: RunOptions) -> Iterator[tuple[str, str]]:
    """Yield the options that do not go together: the name of one, and what is wrong with it."""
    before = options.resume if options.resume is not None else options.init_from
    path = Path("run" if options.name is None else options.name)
    if path.is_absolute() or not path.parts or ".." in path.parts:
        yield "name", f"must name a folder inside directory, got {options.name!r}: give the path before it as directory"
    if options.resume is not None and options.name is not None and options.resume.name != path.name:
        yield "name", f"is for new runs, got {options.name!r}, and resume continues {options.resume} where it is"
    elsewhere = options.resume is not None and options.directory.resolve() not in options.resume.resolve().parents
    if elsewhere and options.directory != RunOptions.directory:
        yield (
            "directory",
            f"is for new runs, got {options.directory}, and resume continues {options.resume}: leave it out",
        )
    if options.distributed and not jax.distributed.is_initialized():
        yield "distributed", "needs jax.distributed.initialize() before anything uses a device: call it first"
    if options.resume is not None and options.init_from is not None:
        both = f"from {options.init_from}, and resume continues {options.resume}"
        yield "init_from", f"begins a new run {both}: give one of them"
    if options.checkpoint != "latest" and before is None:
        yield "checkpoint", f"is one of the run that resume or init_from names, got {options.checkpoint!r}: give it"
    for name in ("eval_every", "eval_mode"):
        if getattr(options, name) and not options.eval_episodes:
            yield name, "needs eval_episodes, the number of episodes in an evaluation"
