"""The folder of a run, which many processes may read and one process writes, and `load`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import shlex
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all

from .._base.checked import checked
from .._base.extras import require_package
from ..errors import UserValueError
from . import _files, _stored
from ._checkpoint import Checkpoints
from ._config import RunOptions
from ._evaluate import EVALUATION
from ._processes import fail_together, is_first, logger
from ._train import Train, TrainState


class RunFolder:
    """A run on disk. Many processes may read it; only the one that holds its lock writes to it, see `open_run`.

    Whenever the writer dies, the folder contains a run that can be resumed. No results are deleted; files from which
    the run cannot continue are moved to `aside/`. `result.json` marks the run as complete. `stored` is `config.json`.
    """

    def __init__(self, path: Path, stored: dict[str, Any] | None = None, options: RunOptions | None = None) -> None:
        self.path, self.log_path, self.result_path = path, path / "metrics.jsonl", path / "result.json"
        self.stored = _stored.read_config(self.path) if stored is None else stored
        self.options = _stored.read_options(self.stored) if options is None else options
        self.checkpoints = Checkpoints(path / "checkpoints", keep=self.options.keep_checkpoints)

    def restore(self, train: Train, which: str | int = "latest") -> tuple[int, Any]:
        """Restore a checkpoint ("latest", "best" or a number), and return its number of updates and its state."""
        if which == "best" and self.checkpoints.steps():
            if (best := self.find_best()) is None:
                there, metric = ", ".join(map(str, self.checkpoints.steps())), self.options.best_metric
                raise UserValueError(f"{self.path} has no best checkpoint: best_metric is {metric}; there are {there}")
            which, _ = best
        number = None if which in ("latest", "best") else int(which)
        return self.checkpoints.restore(train.state_shapes(self.options.num_seeds), number)

    def find_best(self, new: int | None = None) -> tuple[int, float] | None:
        """Return the best of the checkpoints and a `new` one, with its value, or None if there are none.

        Ties go to the earliest checkpoint. The value comes from the evaluation at the checkpoint, or is the mean over
        the last tenth of the run's updates before it, so it does not depend on when checkpoints are saved.
        """
        metric = self.options.best_metric
        if metric is None:
            return None
        window = 1 if metric.startswith(EVALUATION) else max(1, self.stored.get("num_updates", 1) // 10)
        found = {}
        for step in sorted({*self.checkpoints.steps(), *(() if new is None else (new,))}):
            mean = _files.average_finite([self.tracked.get(update, np.nan) for update in range(step - window, step)])
            if np.isfinite(mean):
                found[step] = mean
        return max(found.items(), key=lambda x: x[1], default=None)

    @functools.cached_property
    def tracked(self) -> dict[int, float]:
        """Return the `best_metric` of each update in the log, averaged over the seeds; `append` adds new rows."""
        return self._read_tracked(_files.read_rows(self.log_path))

    def _read_tracked(self, rows: Iterable[_files.Row]) -> dict[int, float]:
        return {row["update"]: _files.average_finite(row.get(str(self.options.best_metric), np.nan)) for row in rows}

    def read_rows(self, before: int) -> Iterator[_files.Row]:
        """Yield the rows of the updates before a checkpoint, and warn if the log lacks some."""
        known = 0
        for row in _files.read_rows(self.log_path):
            if row["update"] >= before:
                break
            known = row["update"] + 1
            yield row
        if known < before:
            state = "damaged" if self.log_path.exists() else "missing"
            lost = f"the metrics of {before - known} of the {before} updates before the checkpoint are lost"
            message = f"{self.log_path} is {state}: {lost}; the checkpoint is sound"
            warnings.warn(message, RuntimeWarning, stacklevel=3)

    def rewind(self, train: Train, which: str | int = "latest") -> tuple[int, Any]:
        """Return the number of updates done and the state after them, and cut off later results."""
        steps = self.checkpoints.steps()
        done, state = self.restore(train, which) if steps or which != "latest" else (0, None)
        for later in steps:  # move nothing before a state has been accepted
            if later > done:
                os.rename(self.checkpoints.directory / str(later), self._find_aside(f"checkpoint-{later}"))
        kept = sum(1 for _ in self.read_rows(done))
        self.log_path.touch()
        with self.log_path.open("rb") as file:  # it may not fit into memory
            size = sum(map(len, itertools.islice(file, kept)))
        if size < self.log_path.stat().st_size:
            shutil.copy(self.log_path, self._find_aside("metrics.jsonl"))
            os.truncate(self.log_path, size)
            if not done:
                logger.warning(f"{self.path} has no checkpoint: the run begins again; its log is in aside/")
        options = {name: getattr(self.options, name) for name in _stored.KEPT_ON_RESUME}
        _files.write_json(self.path / "config.json", {**self.stored, "run": options})
        if done < train.num_updates and self.result_path.exists():  # the run is not complete
            os.rename(self.result_path, self._find_aside("result.json"))
        return done, state

    def append(self, rows: list[_files.Row]) -> None:
        try:
            with self.log_path.open("r+b") as file:  # fails if it has been removed
                file.seek(0, os.SEEK_END)
                file.write(_files.format_rows(rows))
        except OSError as error:
            last = max(self.checkpoints.steps(), default=None)
            there = "there is no checkpoint" if last is None else f"the latest checkpoint is {last}"
            raise _files.RunFolderError(f"{self.log_path} could not be written: {error.strerror}; {there}") from error
        if self.options.best_metric is not None:
            self.tracked.update(self._read_tracked(rows))

    def write_checkpoint(self, update: int, state: Any) -> None:
        """Write a checkpoint; keep the latest ones and the best one."""
        found = self.find_best(update)
        self.checkpoints.save(update, state, best=found and found[0])

    def _find_aside(self, name: str) -> Path:
        place = self.path / "aside"
        place.mkdir(exist_ok=True)
        paths = _number_paths(place / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
        return next(path for path in paths if not path.exists())


@contextlib.contextmanager
def open_run(train: Train, config: Any, options: RunOptions) -> Iterator[tuple[RunFolder | None, int, Any]]:
    """Open the folder of a new run or of the run to resume, and lock it against other writers.

    Yield the folder (None in processes other than the first), the number of updates done, and the state after them
    (None for a new run). No folder is created if a configuration, a recipe or a state does not fit.
    """
    with contextlib.ExitStack() as stack:
        folder, done, state = None, 0, None
        with fail_together("open the folder of the run"):
            if is_first():
                folder, done, state = _open(train, config, options, stack)
        if jax.process_count() > 1:
            done, restored = map(int, broadcast_one_to_all(np.array([done, state is not None])))
            with fail_together("read the checkpoint"):
                source = options.resume or options.init_from
                if source is not None and restored and not is_first():
                    _, state = RunFolder(source).restore(train, done)
        yield folder, done, state


def _open(train: Train, config: Any, options: RunOptions, stack: contextlib.ExitStack) -> tuple[RunFolder, int, Any]:
    """Open the folder in this process, until the stack unwinds."""
    if options.resume is not None:
        stored = _stored.read_config(options.resume)
        _stored.check_unchanged(stored, config, options, train.recipe)
        stack.enter_context(_lock(options.resume))
        folder = RunFolder(options.resume, stored, options)
        return folder, *folder.rewind(train, options.checkpoint)
    stored = _stored.describe_run(config, train)
    source, done, state = _open_source(train, config, options) if options.init_from is not None else (None, 0, None)
    env_id = str(getattr(config, "env_id", "run")).partition(",")[0].replace("/", "-")  # settings may contain paths
    name = f"{env_id}-s{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        path = options.directory / (options.name or name)
        if options.name is None:
            path = _create_unused(path)
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        says = f"{error.filename} cannot be created: {error.strerror}; give another --directory or --name"
        raise _files.RunFolderError(says) from error
    stack.enter_context(_lock(path))
    if (path / "config.json").exists():
        resume = f"continue it with --resume {shlex.quote(str(path))}"
        raise _files.RunExistsError(f"{path} holds a run: {resume}, or give another --name")
    folder = RunFolder(path, stored, options)
    for left in ("checkpoints", "metrics.jsonl"):  # left by a killed start
        if (path / left).exists():
            os.rename(path / left, folder._find_aside(left))
    if source is not None:  # `config.json` comes last, as it marks the folder as a run
        changed = _stored.find_changes(source.stored, config, options)
        stored["continued_from"] = {"folder": str(source.path), "update": done, "changed": changed}
        _files.write_whole(folder.log_path, _files.format_rows(source.read_rows(done)))
        folder.write_checkpoint(done, state)
    return folder, *folder.rewind(train)


def _open_source(train: Train, config: Any, options: RunOptions) -> tuple[RunFolder, int, Any]:
    """Return the run from which a new run starts, its update and its state; raise if they do not fit."""
    assert options.init_from is not None
    run = RunFolder(options.init_from.resolve())
    changed = _stored.find_changes(run.stored, config, options)
    fixed = {name: changed[name] for name in ("env_id", "seed", "num_seeds", "num_envs") if name in changed}
    if "env_id" in fixed and len({str(env_id).partition(",")[0] for env_id in fixed["env_id"]}) == 1:
        del fixed["env_id"]  # its settings may change
    if fixed:
        says = f"a run from the state of {run.path} continues its episodes and keys; {_stored.format_changes(fixed)}"
        raise UserValueError(f"{says}: keep these, or begin a run without --init-from")
    update, state = run.restore(train, options.checkpoint)
    if run.stored.get("recipe") != train.recipe:
        logger.info(f"{run.path} was made by the recipe {run.stored.get('recipe')}, and this run is of {train.recipe}")
    steps = update * run.stored["steps_per_update"]
    if run.stored["steps_per_update"] != train.steps_per_update:
        raise UserValueError(
            f"the {update} updates of {run.path} were {steps} environment steps, but an update is now "
            f"{train.steps_per_update}: keep num_envs * num_steps, so that the counters continue"
        )
    if update >= train.num_updates:
        says = f"must be more than the {steps:,} steps ({update} updates) of {run.path}, got {config.total_timesteps}"
        raise UserValueError(says, where="Config", argument="total_timesteps")
    return run, update, state


def _number_paths(path: Path) -> Iterator[Path]:
    """Yield `path`, then the same path with a suffix -2, -3, ..."""
    return (path if n == 1 else path.with_name(f"{path.name}-{n}") for n in itertools.count(1))


def _create_unused(path: Path) -> Path:
    """Create the first unused folder of `_number_paths`, even if other processes do the same at once."""
    for each in _number_paths(path):
        with contextlib.suppress(FileExistsError):
            each.mkdir(parents=True)
            return each
    raise AssertionError


def _lock(folder: Path) -> Any:
    """Lock `folder` and return the lock, which the operating system releases however this process ends."""
    filelock = require_package("filelock", "train")
    try:
        return filelock.FileLock(folder / ".lock", timeout=0).acquire()
    except NotImplementedError:  # the file system has no locks
        return contextlib.nullcontext()
    except filelock.Timeout:
        raise _files.RunExistsError(
            f"{folder} is being written by another process: wait; a new run needs another --name"
        ) from None
    except OSError as error:
        raise _files.RunFolderError(f"{folder} cannot be written: {error.strerror}") from error


class LoadedRun(NamedTuple):
    """A run after `update` updates, with its configuration, the result of `make_train(config)`, and its state.

    Several seeds are the first axis of the state. `metrics` has every metric up to this update by name, `[update]` or
    `[update, seeds]`. It is NaN where a metric was not measured or its row is lost, and empty if the whole log is lost.
    `training.run(run.train, run.config, run.options)` resumes the run.
    """

    config: Any
    train: Train
    state: TrainState
    metrics: dict[str, np.ndarray]
    update: int
    options: RunOptions


@checked
def load(
    folder: str | Path,
    make_train: Callable[[Any], Train] | None = None,
    *,
    checkpoint: Literal["latest", "best"] | int = "latest",
    trust: bool = False,
) -> LoadedRun:
    """Load a run from its folder, without changing it, even while another process writes to it.

    A lost or damaged `metrics.jsonl` causes only a warning, because the policy does not depend on it.

    Args:
        folder: folder of the run.
        make_train: the recipe's function, in which the annotation of the argument names the class of the configuration.
            None means the `make_train` of the module that `config.json` names.
        checkpoint: "latest", "best" (if the run has a `best_metric`), or the number of an update.
        trust: whether `config.json` may choose what is imported: a recipe outside `ppo_parts.recipes`, or the module
            of an environment like "gym:module:Env-v0", that is not imported yet.

    Raises:
        FileNotFoundError: if the run or the checkpoint does not exist.
        ValueError: if the recipe cannot be imported, or the run was not made by it; the message names the difference.
    """
    run = RunFolder(Path(folder))
    _stored.check_trusted(run.stored, run.path, trust, recipe=make_train is None)
    if make_train is None:
        make_train = _stored.import_recipe(run.stored.get("recipe"), run.path)
    config = _stored.restore_config(_stored.find_config_type(make_train), run.stored)
    named = _stored.name_recipe(make_train) == run.stored.get("recipe")  # `main` also names what has no decorator
    train = (_stored.recipe(make_train) if named else make_train)(config)
    update, state = run.restore(train, checkpoint)
    rows: list[_files.Row] = [{}] * update
    for row in run.read_rows(update):
        rows[row["update"]] = row
    metrics = {name: _files.select_metric(rows, name) for name in sorted(set().union(*rows))}
    options = dataclasses.replace(run.options, resume=run.path, checkpoint=checkpoint)
    return LoadedRun(config, train, state, metrics, update, options)
