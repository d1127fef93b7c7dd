"""Loading a run into memory, to use its policy or to start another run from its state."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from .._errors import UserTypeError, UserValueError
from ._folder import RunFolder
from ._metrics_file import column
from ._options import RunOptions
from ._stored import changes, stored_config
from ._train import Train, TrainState


class LoadedRun(NamedTuple):
    """A run after `update` updates.

    Attributes:
        config: its configuration.
        train: the result of `make_train(config)`.
        state: the whole state; with several seeds, the seeds are its first axis.
        metrics: every metric up to this update by name, `[update]` or `[update, seeds]`; NaN where it was not measured
            or its row is lost. Empty if the whole log is lost.
        update: number of updates.
    """

    config: Any
    train: Train
    state: TrainState
    metrics: dict[str, np.ndarray]
    update: int


def load(
    folder: str | Path, make_train: Callable[[Any], Train], *, checkpoint: Literal["latest", "best"] | int = "latest"
) -> LoadedRun:
    """Load a run from its folder. The folder is only read, and another process may be writing to it.

    A lost or damaged `metrics.jsonl` causes only a warning, because the policy does not depend on it.

    Args:
        folder: folder of the run.
        make_train: the recipe's function; the annotation of its argument names the class of the configuration.
        checkpoint: the latest, the best (of a run with a `best_metric`), or the number of an update.

    Returns:
        `LoadedRun`.

    Raises:
        FileNotFoundError: the run or the checkpoint does not exist.
        ValueError: the run does not belong to this recipe; the message names the difference.
    """
    run = RunFolder(folder)
    config = stored_config(_config_type(make_train), run.stored)
    train = make_train(config)
    update, state = run.restore(train, checkpoint)
    known = {row["update"]: row for row in run.rows(update)}
    rows = [known.get(i, {}) for i in range(update)] if known else []
    return LoadedRun(config, train, state, {name: column(rows, name) for name in sorted(set().union(*rows))}, update)


def continued_from(train: Train, config: Any, options: RunOptions) -> dict[str, Any] | None:
    """Describe the run that a new one starts from, for `config.json`.

    Raises:
        ValueError: the state of that run does not fit; the message names the difference.
    """
    if options.init_from is None:
        return None
    run = RunFolder(options.init_from.resolve())
    changed = changes(run.stored, config, options)
    fixed = [f"{name} was {was!r}, is {now!r}" for name, (was, now) in changed.items() if name in ("seed", "num_seeds")]
    if fixed:
        raise UserValueError(f"a run that begins with the state of {run.path} continues its keys; {'; '.join(fixed)}")
    update, _ = run.restore(train, options.checkpoint)
    steps = update * run.stored["steps_per_update"]
    if run.stored["steps_per_update"] != train.steps_per_update:
        raise UserValueError(
            f"the {update} updates of {run.path} were {steps} environment steps, but an update is now "
            f"{train.steps_per_update}: keep num_envs * num_steps, so that the counters continue"
        )
    if update >= train.num_updates:
        raise UserValueError(
            f"{run.path} begins this run with {update} updates, {steps} environment steps, and there are "
            f"{train.num_updates} in all: raise total_timesteps"
        )
    return {"folder": str(run.path), "update": update, "changed": changed}


def _config_type(make_train: Callable[[Any], Train]) -> type:
    names = list(inspect.signature(make_train).parameters)
    kind = typing.get_type_hints(make_train).get(names[0]) if names else None
    if not isinstance(kind, type):
        raise UserTypeError(
            "load: the argument of make_train has no annotation that says what the configuration is: "
            "write def make_train(config: Config)"
        )
    return kind
