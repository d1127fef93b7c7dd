"""What a run left, back in memory: to use its policy, to go on with it, or to begin another run with its state."""

from __future__ import annotations

import contextlib
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from ._checkpoint import Checkpoints
from ._evaluate import EVALUATION
from ._folder import changes, stored_config, stored_run
from ._options import RunOptions, stored_options
from ._records import Row, best_update, column, read_metrics, rows_before
from ._train import Train, TrainState, over_seeds, seed_keys


class LoadedRun(NamedTuple):
    """A run as it was after `update` updates.

    Attributes:
        config: its configuration.
        train: what `make_train(config)` returns.
        state: the whole state; with several seeds, they are its first axis.
        metrics: every metric up to there by name, `[update]` or `[update, seeds]`, NaN where there was none.
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
    """Make a run again from its folder, which is only read.

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
    folder = Path(folder)
    stored = stored_run(folder)
    config = stored_config(_config_type(make_train), stored)
    train, options = make_train(config), stored_options(stored)
    with _reading(folder) as checkpoints:
        update, state = restored(folder, checkpoints, train, config.seed, options, checkpoint)
    rows = rows_before(update, folder / "metrics.jsonl")
    names = sorted(set().union(*rows))
    return LoadedRun(config, train, state, {name: column(rows, name) for name in names}, update)


def restored(
    folder: Path, checkpoints: Checkpoints, train: Train, seed: int, options: RunOptions, which: str | int
) -> tuple[int, Any]:
    """How many updates there were at a checkpoint, and the state."""
    step = None if which == "latest" else which
    if which == "best":
        found = best(read_metrics(folder / "metrics.jsonl"), checkpoints.steps(), options)
        if found is None:
            reason = (
                "it was run without best_metric" if options.best_metric is None else f"{options.best_metric} is unknown"
            )
            raise ValueError(f"{folder} has no best checkpoint: {reason}; there are {checkpoints.steps()}")
        step = found[0]
    elif isinstance(step, str):
        raise ValueError(f"checkpoint={which!r} must be 'latest', 'best' or the number of an update")
    keys = seed_keys(seed, options.num_seeds)
    return checkpoints.restore(jax.eval_shape(over_seeds(train.init, options.num_seeds), keys), step)


def best(rows: list[Row], updates: list[int], options: RunOptions) -> tuple[int, float] | None:
    """The update with the best checkpoint, and the value of `best_metric`: of that evaluation, or the mean since the
    checkpoint before."""
    if options.best_metric is None:
        return None
    window = 1 if options.best_metric.startswith(EVALUATION) else options.checkpoint_every or 1
    return best_update(rows, updates, options.best_metric, mode=options.best_mode, window=window)


def continued_from(train: Train, config: Any, options: RunOptions) -> dict[str, Any] | None:
    """What `config.json` says of the run that a new one begins with.

    Raises:
        ValueError: its state does not fit; the difference is named.
    """
    folder = options.init_from
    if folder is None:
        return None
    stored = stored_run(folder)
    changed = changes(stored, config, options)
    fixed = [f"{name} was {was!r}, is {now!r}" for name, (was, now) in changed.items() if name in ("seed", "num_seeds")]
    if fixed:
        raise ValueError(f"a run that begins with the state of {folder} goes on with its keys; {'; '.join(fixed)}")
    with _reading(folder) as checkpoints:
        update, _ = restored(folder, checkpoints, train, config.seed, stored_options(stored), options.checkpoint)
    before = rows_before(update, folder / "metrics.jsonl")[-1]["env_steps"]
    if before != update * train.steps_per_update:
        raise ValueError(
            f"the {update} updates of {folder} were {before} environment steps, but an update is now "
            f"{train.steps_per_update}: keep num_envs * num_steps, so that the counters go on"
        )
    if update >= train.num_updates:
        raise ValueError(
            f"{folder} begins this run with {update} updates, {before} environment steps, and there are "
            f"{train.num_updates} in all: raise total_timesteps"
        )
    return {"folder": str(folder), "update": update, "changed": changed}


def source(folder: Path, update: int, train: Train, seed: int, options: RunOptions) -> tuple[Any, list[Row]]:
    """The state and the metrics that a new run begins with."""
    with _reading(folder) as checkpoints:
        _, state = restored(folder, checkpoints, train, seed, options, update)
    return state, rows_before(update, folder / "metrics.jsonl")


def _reading(folder: Path) -> contextlib.closing[Checkpoints]:
    if not (folder / "checkpoints").is_dir():
        raise FileNotFoundError(f"{folder} has no checkpoints")
    return contextlib.closing(Checkpoints(folder / "checkpoints"))


def _config_type(make_train: Callable[[Any], Train]) -> type:
    names = list(inspect.signature(make_train).parameters)
    kind = typing.get_type_hints(make_train).get(names[0]) if names else None
    if not isinstance(kind, type):
        raise TypeError(
            "load: the argument of make_train has no annotation that says what the configuration is: "
            "write def make_train(config: Config)"
        )
    return kind
