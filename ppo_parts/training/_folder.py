"""Reading the folder of a run: `config.json`, `metrics.jsonl` and `checkpoints/`. `_writer` writes it."""

from __future__ import annotations

import inspect
import itertools
import typing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from .._base.doors import checked
from .._base.errors import UserTypeError, UserValueError
from ._checkpoint import Checkpoints
from ._config_json import check_jax_settings, digest, stored_config, stored_run
from ._errors import RunFolderError, RunNotFoundError
from ._evaluate import EVALUATION
from ._files import parse_json
from ._metrics_file import Best, Log, Row, read_rows, scan
from ._options import checkpoint_interval, stored_options
from ._recipe import check_trusted, import_recipe
from ._train import Train, TrainState


class RunFolder:
    """A read-only view of a run on the disk; another process may be writing to it.

    Attributes:
        path, log_path: the folder, and `metrics.jsonl` in it.
        stored: the contents of `config.json`.
        options: the options of the run.
    """

    def __init__(self, path: Path, stored: dict[str, Any] | None = None) -> None:
        self.path, self.log_path = path, path / "metrics.jsonl"
        self.stored = stored_run(self.path) if stored is None else stored
        self.options = stored_options(self.stored)

    def checkpoints(self) -> Checkpoints:
        """The checkpoints that belong to this run's configuration."""
        return Checkpoints(
            self.path / "checkpoints", keep=self.options.keep_checkpoints, configuration=digest(self.stored)
        )

    def restore(self, train: Train, which: str | int = "latest") -> tuple[int, Any, list[Row]]:
        """Restore a checkpoint ("latest", "best" or a number).

        Returns:
            Its number of updates, its state, and those of the updates before it that the log may lack.
        """
        check_jax_settings(self.stored)
        checkpoints, like = self.checkpoints(), train.state_shapes(self.options.num_seeds)
        while True:
            steps = checkpoints.steps()
            if not steps:
                raise RunNotFoundError(f"{self.path} has no checkpoints")
            try:
                update, state, note = checkpoints.restore_with_note(like, self._number(which, steps, train.num_updates))
                return update, state, parse_json(note) if note else []
            except RunFolderError:
                if checkpoints.steps() == steps:
                    raise
                # Another process is writing to this folder and has replaced the checkpoint by a later one: try again.

    def _number(self, which: str | int, steps: list[int], num_updates: int) -> int | None:
        if which == "latest":
            return None
        if which != "best":
            return int(which)
        judged = self.judged(steps, num_updates)
        found = None if judged is None else judged.of(steps)
        if found is None:
            metric = self.options.best_metric
            reason = "it was run without best_metric" if metric is None else f"{metric} is unknown"
            there = ", ".join(map(str, steps))
            raise UserValueError(f"{self.path} has no best checkpoint: {reason}; there are {there}")
        return found[0]

    def judged(self, steps: list[int], num_updates: int) -> Best | None:
        """Judge the checkpoints by `best_metric`; None without one.

        The value is that of the evaluation at the checkpoint, or the mean since the previous checkpoint.
        """
        metric = self.options.best_metric
        if metric is None:
            return None
        window = 1 if metric.startswith(EVALUATION) else checkpoint_interval(self.options, num_updates)
        best = Best(metric, self.options.best_mode, window, num_updates)
        compared, last = best.comparable(steps), max(steps, default=0)

        def wanted(update: int) -> bool:  # also by the next checkpoint
            return update >= last - window or any(step - window <= update < step for step in compared)

        best.add(read_rows(self.log_path, wanted=wanted), compared)
        return best

    def rows(self, update: int, pending: list[Row]) -> Iterator[Row]:
        """Yield the rows before a checkpoint, with its `pending` updates; warn if the log lacks some of them."""
        log = scan(self.log_path, before=update)
        lacking = unwritten(log, pending)
        if log.update + len(lacking) < update:
            there = self.log_path.exists()
            state = f"is damaged and has only {log.update}" if there else "is missing, and with it all"
            warnings.warn(
                f"{self.log_path} {state} of the {update} updates before the checkpoint, which is sound",
                RuntimeWarning,
                stacklevel=3,
            )
        return itertools.chain(read_rows(self.log_path, before=update), lacking)


def unwritten(log: Log, pending: list[Row]) -> list[Row]:
    """Return the updates that a log does not have."""
    return [row for row in pending if row["update"] >= log.update]


class LoadedRun(NamedTuple):
    """A run after `update` updates.

    Attributes:
        config: its configuration.
        train: the result of `make_train(config)`.
        state: the whole state; with several seeds, the seeds are its first axis.
        metrics: every metric up to this update by name, `[update]` or `[update, seeds]`; NaN where it was not measured
            or its row is lost. Empty if the whole log is lost. Where a row summarizes several updates, it stands at the
            last of them.
        update: number of updates.
    """

    config: Any
    train: Train
    state: TrainState
    metrics: dict[str, np.ndarray]
    update: int


@checked
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
        trust: whether `config.json` may choose what is imported: a recipe outside `ppo_parts.recipes`, or the module
            of an environment like "gym:module:Env-v0", that is not imported yet.

    Returns:
        `LoadedRun`.

    Raises:
        FileNotFoundError: the run or the checkpoint does not exist.
        ValueError: the run does not belong to this recipe; the message names the difference. Or its recipe cannot be
            imported.
    """
    run = RunFolder(Path(folder))
    check_trusted(run.stored, run.path, trust, recipe=make_train is None)
    if make_train is None:
        make_train = import_recipe(run.stored.get("recipe"), run.path)
    config = stored_config(_config_type(make_train), run.stored)
    train = make_train(config)
    update, state, pending = run.restore(train, checkpoint)
    metrics: dict[str, np.ndarray] = {}
    for row in run.rows(update, pending):
        for name, x in row.items():
            if name not in metrics:
                metrics[name] = np.full((update, *np.shape(x)), np.nan)
            metrics[name][row["update"]] = np.asarray(x, float)
    return LoadedRun(config, train, state, dict(sorted(metrics.items())), update)


def _config_type(make_train: Callable[[Any], Train]) -> type:
    names = list(inspect.signature(make_train).parameters)
    kind = typing.get_type_hints(make_train).get(names[0]) if names else None
    if not isinstance(kind, type):
        raise UserTypeError(
            "load: the argument of make_train has no annotation that says what the configuration is: "
            "write def make_train(config: Config)"
        )
    return kind
