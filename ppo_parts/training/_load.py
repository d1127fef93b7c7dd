"""A run back in memory: to use its policy, or to begin another run with its state."""

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
    """A run as it was after `update` updates.

    Attributes:
        config: its configuration.
        train: what `make_train(config)` returns.
        state: the whole state; with several seeds, they are its first axis.
        metrics: every metric up to there by name, `[update]` or `[update, seeds]`, NaN where there was none or where
            its row is lost; empty where the whole log is.
        update: how many updates there were.
    """

    config: Any
    train: Train
    state: TrainState
    metrics: dict[str, np.ndarray]
    update: int


def load(
    folder: str | Path, make_train: Callable[[Any], Train], *, checkpoint: Literal["latest", "best"] | int = "latest"
) -> LoadedRun:
    """Make a run again from its folder, which is only read; another process may be writing it.

    A lost or damaged `metrics.jsonl` is a warning: the policy does not depend on it.

    Args:
        folder: of a run.
        make_train: the recipe's; the annotation of its argument says what the configuration is.
        checkpoint: the latest, the best (of a run with a `best_metric`), or that of an update.

    Returns:
        `LoadedRun`.

    Raises:
        FileNotFoundError: there is no such run or checkpoint.
        ValueError: the recipe does not make such a run; the difference is named.
    """
    run = RunFolder(folder)
    config = stored_config(_config_type(make_train), run.stored)
    train = make_train(config)
    update, state = run.restore(train, checkpoint)
    known = {row["update"]: row for row in run.rows(update)}
    rows = [known.get(i, {}) for i in range(update)] if known else []
    return LoadedRun(config, train, state, {name: column(rows, name) for name in sorted(set().union(*rows))}, update)


def continued_from(train: Train, config: Any, options: RunOptions) -> dict[str, Any] | None:
    """What `config.json` says of the run that a new one begins with.

    Raises:
        ValueError: its state does not fit; the difference is named.
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
