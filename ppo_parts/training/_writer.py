"""The folder of a run, for the one process that writes it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._base.errors import UserValueError
from ..envs._registry import without_settings
from ._config_json import changes, check_unchanged, describe, listed, stored_run
from ._errors import RunExistsError, RunFolderError, RunNotFoundError
from ._files import parse_json, plain, write_json
from ._folder import RunFolder, unwritten
from ._messages import logger
from ._metrics_file import Best, Log, MetricsFile, Row, Thinning, read_rows, scan, write_rows
from ._options import RunOptions, kept_options, row_interval
from ._processes import is_first
from ._train import Train


@contextlib.contextmanager
def open_run(train: Train, config: Any, options: RunOptions) -> Iterator[tuple[RunWriter | Follower, int, Any]]:
    """Open the folder of a new run, or of the run to resume, and lock it against other writers.

    Yields:
        The folder, how many updates are done, and the state after them (None for a new run). Processes other than the
        first get a `Follower`, and no state.

    Raises:
        RunExistsError: the folder already contains a run, or another process is writing to it.
        RunNotFoundError: there is no run to resume, or to start from.
        RunFolderError: the folder cannot be created, or not be written.
        UserValueError: it has another configuration or recipe, or its state does not fit. No folder was created.
    """
    if not is_first():
        yield Follower(), 0, None
        return
    if options.resume is not None:
        path, stored = options.resume, stored_run(options.resume)
        check_unchanged(stored, config, options, train.recipe)
    else:
        stored = describe(config, options, train.steps_per_update, train.recipe)
        if options.init_from is not None:
            stored["continued_from"] = _continued_from(train, config, options, options.init_from)
        try:
            path = _new_folder(config, options)
        except OSError as error:
            raise RunFolderError(
                f"{error.filename} cannot be created: {error.strerror}; give another --directory or --name"
            ) from error
    with _locked(path):
        if options.resume is None:
            check_unused(path)
            write_json(path / "config.json", stored)
        with contextlib.closing(RunWriter(path, stored, options, train)) as folder:
            yield folder, *folder.begin(train)


def check_unused(path: Path) -> None:
    """Raise `RunExistsError` if a folder contains a run."""
    if (path / "config.json").exists() or (path / "checkpoints").exists():
        raise RunExistsError(f"{path} already holds a run: continue it with --resume {path}, or give another --name")


class RunWriter(RunFolder):
    """The folder of a run for the single process that writes to it; `open_run` creates it.

    Whenever the process dies, the folder contains a run that can be resumed. No results are deleted: files that the run
    cannot continue from are moved to `aside/`.
    """

    def __init__(self, path: Path, stored: dict[str, Any], options: RunOptions, train: Train) -> None:
        super().__init__(path, stored)
        self.options = options
        metrics: Any = train.shapes[1]
        reductions = dict(zip(metrics.names, metrics.reductions, strict=True))
        self._thinning = Thinning(row_interval(options, train.num_updates), train.num_updates, reductions)
        self._best: Best | None = None
        self._log: MetricsFile | None = None
        self._checkpoints = self.checkpoints()
        self._result_path = path / "result.json"

    @property
    def log(self) -> MetricsFile:
        """The metrics so far; available after `begin`."""
        assert self._log is not None, "begin() comes first"
        return self._log

    def best(self, new: int | None = None) -> tuple[int, float] | None:
        """Return the best of the checkpoints and of a `new` one, and its value; None without a `best_metric`."""
        return None if self._best is None else self._best.of(self._checkpoints.steps(), new)

    def is_best(self, update: int) -> bool:
        """Return whether a checkpoint of this update would be the best so far."""
        found = self.best(update)
        return found is not None and found[0] == update

    def begin(self, train: Train) -> tuple[int, Any]:
        """Load the log; see `open_run`.

        Later checkpoints and rows are set aside only after the state has been accepted.
        """
        source = self.stored.get("continued_from")
        begun = bool(self._checkpoints.steps())
        pending: list[Row] = []
        if begun:
            done, state, pending = self.restore(train, self.options.checkpoint)
        elif source is not None:
            before = RunFolder(Path(source["folder"]))
            done, state, pending = before.restore(train, source["update"])
            self._set_aside_log()
            write_rows(self.log_path, before.rows(done, pending))
        elif self.options.resume is not None and self.options.checkpoint != "latest":
            raise RunNotFoundError(f"{self.path} has no checkpoints, so not {self.options.checkpoint!r} either")
        else:
            done, state = 0, None
        for later in self._checkpoints.steps():
            if later > done:
                self._checkpoints.set_aside(later, self._aside(f"checkpoint-{later}"))
        inherited = source is not None and not begun
        log = scan(self.log_path) if inherited else self._accepted(done, pending)
        self._log = MetricsFile(self.log_path, log, self._thinning, unwritten(log, pending))
        self.append([])  # rows that a full disk left to the checkpoint
        self._best = self.judged(self._checkpoints.steps(), train.num_updates)
        self._write_config()
        if done < train.num_updates and self._result_path.exists():  # the run is not complete
            os.rename(self._result_path, self._aside("result.json"))
        if inherited:
            self.write_checkpoint(done, state)
        return done, state

    def append(self, rows: list[Row]) -> None:
        """Add the metrics of updates to the log."""
        try:
            finished = self.log.append(rows)
        except OSError as error:
            raise RunFolderError(f"{self.log_path}: {error.strerror}") from error
        if self._best is not None:
            self._best.add(finished)

    def tail(self, first: int) -> Iterator[Row]:
        """Yield the rows from update `first` on, and the updates that are not in a row yet."""
        return itertools.chain(read_rows(self.log_path, first), self.log.pending)

    def write_checkpoint(self, update: int, state: Any, lost: Sequence[Row] = ()) -> None:
        """Write a checkpoint, with the updates that no row has yet, such as `lost`, which the log could not take.

        The latest ones and the best one are kept.
        """
        if not (self.path / "config.json").exists():
            raise RunFolderError(f"{self.path} was removed")
        found, without_row = self.best(update), [*self.log.pending, *lost]
        note = json.dumps(plain(without_row)) if without_row else ""
        self._checkpoints.save(update, state, best=found and found[0], note=note)

    def rescued(self, update: int, state: Any, rows: list[Row], error: Exception) -> RunFolderError:
        """Save as much as possible of the state and of `rows`, which are not written yet, after a failure to write.

        If files were removed, this recreates the configuration, the rows that were written before, `rows`, and the
        state. If the disk is full, it writes what fits.

        Returns:
            The error to raise; its message states how much was saved.
        """
        try:
            if not (self.log.intact() and (self.path / "config.json").exists()):
                self.path.mkdir(parents=True, exist_ok=True)
                self._write_config()
                if not self.log.intact():
                    self._set_aside_log()
                    self.log.recreate()
                self.append(rows)
                rows = []
            self._checkpoints.close()
            self._checkpoints = self.checkpoints()
            self.write_checkpoint(update, state, rows)
        except OSError as second:
            latest = max(self._checkpoints.steps(), default=None)
            there = "there is no checkpoint" if latest is None else f"the latest checkpoint is {latest}"
            because = "" if str(second) == str(error) else f" ({second})"
            return RunFolderError(f"{error}. The state after update {update} is lost{because}; {there}")
        return RunFolderError(
            f"{error}. The run ends here; the state after update {update} is saved: continue with --resume {self.path}"
        )

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write `result.json`, which marks the run as complete."""
        write_json(self._result_path, result)

    def earlier_result(self) -> dict[str, Any]:
        """Return the content of `result.json`; nothing if the run was not complete."""
        try:
            found = parse_json(self._result_path.read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def close(self) -> None:
        """Release the files."""
        if self._log is not None:
            self._log.close()
        self._checkpoints.close()

    def _write_config(self) -> None:
        write_json(self.path / "config.json", {**self.stored, "run": kept_options(self.options)})

    def _accepted(self, done: int, pending: list[Row]) -> Log:
        """Return the log up to an accepted checkpoint; one that lacks some of its rows is moved aside unchanged."""
        log = scan(self.log_path, before=done)
        if done and log.more:
            write_rows(self._aside("metrics.jsonl"), read_rows(self.log_path, first=done))
        if log.update + len(unwritten(log, pending)) < done:
            self.rows(done, pending)  # warns
            damaged = self._set_aside_log()
            write_rows(self.log_path, () if damaged is None else read_rows(damaged, before=done))
        elif not done and log.more:
            logger.warning(f"{self.path} has no checkpoint: the run begins again; its log is in aside/")
            self._set_aside_log()
        return log

    def _set_aside_log(self) -> Path | None:
        if not self.log_path.exists():
            return None
        place = self._aside("metrics.jsonl")
        os.rename(self.log_path, place)
        return place

    def _aside(self, name: str) -> Path:
        """Return an unused path in `aside/`."""
        place = self.path / "aside"
        place.mkdir(exist_ok=True)
        return next(path for path in _numbered(place / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}") if not path.exists())


class Follower:
    """Stands in for the folder in all processes but the first, which write nothing."""

    path = Path("the folder of the first process")

    def append(self, rows: list[Row]) -> None:
        """Leave it to the first process."""

    def write_checkpoint(self, update: int, state: Any) -> None:
        """Leave it to the first process."""

    def is_best(self, update: int) -> bool:
        """Leave it to the first process."""
        del update
        return False


def _continued_from(train: Train, config: Any, options: RunOptions, source: Path) -> dict[str, Any]:
    """Describe the run that a new one starts from, for `config.json`; raise if its state does not fit."""
    run = RunFolder(source.resolve())
    changed = changes(run.stored, config, options)
    if fixed := {name: changed[name] for name in ("seed", "num_seeds") if name in changed}:
        raise UserValueError(
            f"a run that begins with the state of {run.path} continues its keys; {listed(fixed)}: keep these, or "
            "begin a run without --init-from"
        )
    try:
        update, _, _ = run.restore(train, options.checkpoint)
    except UserValueError as error:
        if not changed:
            raise
        raise UserValueError(
            f"{error}. Keep the settings that shape the network and the environments; {listed(changed)}"
        ) from error
    steps = update * run.stored["steps_per_update"]
    if run.stored["steps_per_update"] != train.steps_per_update:
        raise UserValueError(
            f"the {update} updates of {run.path} were {steps} environment steps, but an update is now "
            f"{train.steps_per_update}: keep num_envs * num_steps, so that the counters continue"
        )
    if update >= train.num_updates:
        raise UserValueError(
            f"must be more than the {steps:,} steps ({update} updates) of {run.path}, from which this run continues, "
            f"got {config.total_timesteps}", where="Config", argument="total_timesteps",
        )  # fmt: skip
    return {"folder": str(run.path), "update": update, "changed": changed}


def _new_folder(config: Any, options: RunOptions) -> Path:
    if options.name is not None:
        folder = options.directory / options.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    env_id = without_settings(str(getattr(config, "env_id", "run")))  # settings may contain a path
    name = f"{env_id}-s{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    for folder in _numbered(options.directory / name):  # several runs may begin within a second
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("there is always a next number")


def _numbered(path: Path) -> Iterator[Path]:
    """Yield `path`, and then the same path with the suffixes -2, -3, ..."""
    return (path if n == 1 else path.with_name(f"{path.name}-{n}") for n in itertools.count(1))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock `folder` for this process; the operating system releases the lock however the process ends."""
    try:
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be written: {error.strerror}") from error
    with lock as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunExistsError(f"{folder} is being written by another process") from None
        except (ImportError, OSError):  # no locks on this system, or on this file system
            pass
        yield
