"""Reading the folder of a run: `config.json`, `metrics.jsonl` and `checkpoints/`. `_writer` writes it."""

from __future__ import annotations

import inspect
import typing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from .._base.errors import UserTypeError, UserValueError
from ._checkpoint import Checkpoints
from ._config_file import digest, stored_config, stored_run
from ._errors import RunFolderError, RunNotFoundError
from ._evaluate import EVALUATION
from ._files import to_path
from ._metrics_file import Row, best_update, column, read_log
from ._options import checkpoint_interval, stored_options
from ._recipe import check_trusted, import_recipe
from ._train import Train, TrainState


class RunFolder:
    """A read-only view of a run on the disk; another process may be writing to it.

    Attributes:
        path: the folder.
        stored: the contents of `config.json`.
        options: the options of the run.
    """

    def __init__(self, path: str | Path, stored: dict[str, Any] | None = None) -> None:
        self.path = Path(path)
        self.stored = stored_run(self.path) if stored is None else stored
        self.options = stored_options(self.stored)

    @property
    def log_path(self) -> Path:
        """Path of `metrics.jsonl`."""
        return self.path / "metrics.jsonl"

    def checkpoints(self) -> Checkpoints:
        """The checkpoints that belong to this run's configuration."""
        return Checkpoints(
            self.path / "checkpoints", keep=self.options.keep_checkpoints, configuration=digest(self.stored)
        )

    def restore(self, train: Train, which: str | int = "latest") -> tuple[int, Any]:
        """Restore a checkpoint ("latest", "best" or a number); return its number of updates and its state.

        Raises:
            RunNotFoundError: the checkpoint does not exist. RunFolderError: it cannot be read.
            UserValueError: `train` has another state; the message names the differences.
        """
        checkpoints, like = self.checkpoints(), train.state_shapes(self.options.num_seeds)
        while True:
            steps = checkpoints.steps()
            if not steps:
                raise RunNotFoundError(f"{self.path} has no checkpoints")
            try:
                return checkpoints.restore(like, self._number(which, steps, train.num_updates))
            except RunFolderError:
                if checkpoints.steps() == steps:
                    raise
                # Another process is writing to this folder and has replaced the checkpoint by a later one: try again.

    def _number(self, which: str | int, steps: list[int], num_updates: int) -> int | None:
        if which == "latest":
            return None
        if which != "best":
            if isinstance(which, bool) or not isinstance(which, int):
                raise UserValueError(f"checkpoint={which!r} must be 'latest', 'best' or the number of an update")
            return which
        found = self.best_of(steps, read_log(self.log_path).rows, num_updates)
        if found is None:
            metric = self.options.best_metric
            reason = "it was run without best_metric" if metric is None else f"{metric} is unknown"
            there = ", ".join(map(str, steps))
            raise UserValueError(f"{self.path} has no best checkpoint: {reason}; there are {there}")
        return found[0]

    def best_of(self, steps: list[int], rows: list[Row], num_updates: int) -> tuple[int, float] | None:
        """Return the best of these checkpoints and the value of `best_metric` for it, if there is one.

        The value is that of the evaluation at the checkpoint, or the mean since the previous checkpoint. Checkpoints
        that were saved at irregular times, for example because of a signal, are not compared.
        """
        options = self.options
        if options.best_metric is None:
            return None
        if options.best_metric.startswith(EVALUATION):
            return best_update(rows, steps, options.best_metric, mode=options.best_mode)
        every = checkpoint_interval(options, num_updates)
        regular = [step for step in steps if step % every == 0 or step == num_updates]
        return best_update(rows, regular, options.best_metric, mode=options.best_mode, window=every)

    def rows(self, update: int) -> list[Row]:
        """Return the rows of the updates before a checkpoint, with a warning if the log lacks some of them."""
        log = read_log(self.log_path, before=update)
        if len(log.rows) < update:
            state = "is damaged and has only" if self.log_path.exists() else "is missing, and with it all"
            held = f" {len(log.rows)}" if self.log_path.exists() else ""
            warnings.warn(
                f"{self.log_path} {state}{held} of the {update} updates before the checkpoint, which is sound",
                RuntimeWarning,
                stacklevel=3,
            )
        return log.rows


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
    folder: str | Path,
    make_train: Callable[[Any], Train] | None = None,
    *,
    checkpoint: Literal["latest", "best"] | int = "latest",
    trust: bool = False,
) -> LoadedRun:
    """Load a run from its folder. The folder is only read, and another process may be writing to it.

    A lost or damaged `metrics.jsonl` causes only a warning, because the policy does not depend on it.

    Args:
        folder: folder of the run.
        make_train: the recipe's function; the annotation of its argument names the class of the configuration. None:
            the `make_train` of the module that `config.json` names.
        checkpoint: the latest, the best (of a run with a `best_metric`), or the number of an update.
        trust: whether `config.json` may choose what is imported: a recipe outside `recipes`, or the module of an
            environment like "gym:module:Env-v0", that is not imported yet.

    Returns:
        `LoadedRun`.

    Raises:
        FileNotFoundError: the run or the checkpoint does not exist.
        ValueError: the run does not belong to this recipe; the message names the difference. Or its recipe cannot be
            imported.
    """
    run = RunFolder(to_path("load", "folder", folder))
    check_trusted(run.stored, run.path, trust, recipe=make_train is None)
    if make_train is None:
        make_train = import_recipe(run.stored.get("recipe"), run.path)
    config = stored_config(_config_type(make_train), run.stored)
    train = make_train(config)
    update, state = run.restore(train, checkpoint)
    known = {row["update"]: row for row in run.rows(update)}
    rows = [known.get(i, {}) for i in range(update)] if known else []
    return LoadedRun(config, train, state, {name: column(rows, name) for name in sorted(set().union(*rows))}, update)


def _config_type(make_train: Callable[[Any], Train]) -> type:
    names = list(inspect.signature(make_train).parameters)
    kind = typing.get_type_hints(make_train).get(names[0]) if names else None
    if not isinstance(kind, type):
        raise UserTypeError(
            "load: the argument of make_train has no annotation that says what the configuration is: "
            "write def make_train(config: Config)"
        )
    return kind
