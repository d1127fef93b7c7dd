"""The folder of a run. `RunFolder` reads it, and `RunWriter` writes it, in one process at a time."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from .._errors import UserValueError
from ._checkpoint import Checkpoints
from ._errors import RunExistsError, RunFolderError, RunNotFoundError
from ._evaluate import EVALUATION
from ._metrics_file import Log, MetricsFile, Row, best_update, read_log, write_rows
from ._options import KEPT, RunOptions, stored_options
from ._records import write_json
from ._stored import check_unchanged, described, digest
from ._stored import stored_config as stored_config
from ._stored import stored_run as stored_run

if TYPE_CHECKING:
    from ._train import Train


class RunFolder:
    """A read-only view of a run on the disk: `config.json`, `metrics.jsonl` and `checkpoints/`.

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
        """Restore a checkpoint ("latest", "best" or a number); returns its number of updates and its state.

        Raises:
            RunNotFoundError: the checkpoint does not exist. RunFolderError: it cannot be read.
            UserValueError: `train` has another state; the message names the differences.
        """
        from ._train import seed_keys, vmap_over_seeds

        checkpoints, seeds = self.checkpoints(), self.options.num_seeds
        keys = seed_keys(self.stored["config"].get("seed", 0), seeds)
        like = jax.eval_shape(vmap_over_seeds(train.init, seeds), keys)
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

    def _number(self, which: str | int, steps: list[int], last: int) -> int | None:
        if which == "latest" or not isinstance(which, str):
            return None if which == "latest" else int(which)
        if which != "best":
            raise UserValueError(f"checkpoint={which!r} must be 'latest', 'best' or the number of an update")
        found = self.best(read_log(self.log_path).rows, steps, last)
        if found is None:
            metric = self.options.best_metric
            reason = "it was run without best_metric" if metric is None else f"{metric} is unknown"
            raise UserValueError(f"{self.path} has no best checkpoint: {reason}; there are {steps}")
        return found[0]

    def best(self, rows: list[Row], steps: list[int], last: int) -> tuple[int, float] | None:
        """Return the best of these checkpoints, and the value of `best_metric` for it.

        The value is that of the evaluation at the checkpoint, or the mean since the previous checkpoint. Checkpoints
        that were saved at irregular times, for example because of a signal, are not compared. `last` is the last update
        of the run.
        """
        options = self.options
        if options.best_metric is None:
            return None
        if options.best_metric.startswith(EVALUATION):
            return best_update(rows, steps, options.best_metric, mode=options.best_mode)
        every = options.checkpoint_every or 1
        regular = [step for step in steps if step % every == 0 or step == last]
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


class RunWriter(RunFolder):
    """The folder of a run for the single process that writes to it; `open_run` creates it.

    Whenever the process dies, the folder holds a run that can be resumed. No results are deleted: files that the run
    cannot continue from are moved to `aside/`.
    """

    def __init__(self, path: Path, stored: dict[str, Any], options: RunOptions) -> None:
        super().__init__(path, stored)
        self.options = options
        self._log: MetricsFile | None = None
        self._best: int | None = None
        self._checkpoints = self.checkpoints()

    @property
    def log(self) -> MetricsFile:
        """The metrics so far; available after `begin`."""
        assert self._log is not None, "begin() comes first"
        return self._log

    def latest(self) -> int | None:
        """Return the update of the latest checkpoint."""
        return max(self._checkpoints.steps(), default=None)

    def best_with(self, update: int | None, last: int) -> tuple[int, float] | None:
        """Apply `best` to the existing checkpoints and the one that is about to be saved."""
        steps = [*self._checkpoints.steps(), *([] if update is None else [update])]
        return self.best(self.log.rows, steps, last)

    def begin(self, train: Train) -> tuple[int, Any]:
        """Load the log; return how many updates are done, and the state after them (None for a new run).

        Later checkpoints and rows are set aside only after the state has been accepted.
        """
        source = self.stored.get("continued_from")
        if self._checkpoints.steps():
            done, state = self.restore(train, self.options.checkpoint)
        elif source is not None:
            before = RunFolder(source["folder"])
            done, state = before.restore(train, source["update"])
            self._set_aside_log()
            write_rows(self.log_path, before.rows(done))
            self._log = MetricsFile(self.log_path, read_log(self.log_path))
        elif self.options.resume is not None and self.options.checkpoint != "latest":
            raise RunNotFoundError(f"{self.path} has no checkpoints, so not {self.options.checkpoint!r} either")
        else:
            done, state = 0, None
        for later in self._checkpoints.steps():
            if later > done:
                self._checkpoints.set_aside(later, self._aside(f"checkpoint-{later}"))
        if self._log is None:
            self._log = MetricsFile(self.log_path, self._accepted(done))
        self._describe()
        if done and not self._checkpoints.steps():
            self.save(done, state)
        return done, state

    def append(self, rows: list[Row]) -> None:
        """Add rows to the log.

        Raises:
            RunFolderError: it cannot be written; see `rescue`.
        """
        try:
            self.log.append(rows)
        except OSError as error:
            raise RunFolderError(f"{self.log_path}: {error.strerror}") from error

    def save(self, update: int, state: Any, best: int | None = None) -> None:
        """Write a checkpoint.

        Raises:
            RunFolderError: it cannot be written; see `rescue`.
        """
        if not (self.path / "config.json").exists():
            raise RunFolderError(f"{self.path} was removed")
        self._best = best
        self._checkpoints.save(update, state, best=best)

    def rescue(self, update: int, state: Any, rows: list[Row], error: RunFolderError) -> RunFolderError:
        """After a failure to write, save as much as possible; returns the error that states how much was saved.

        If files were removed, this recreates the configuration, the rows that were written before, the rows that were
        to be written now, and the state. If the disk is full, it writes what fits.
        """
        written = self.log.rows[-1]["update"] + 1 if self.log.rows else 0
        missing = [row for row in rows if row["update"] >= written]
        try:
            if not (self.log.intact() and (self.path / "config.json").exists()):
                self.path.mkdir(parents=True, exist_ok=True)
                self._describe()
                self._set_aside_log()
                write_rows(self.log_path, self.log.rows + missing)
                missing = []
            self._checkpoints.close()
            self._checkpoints = self.checkpoints()
            self._checkpoints.save(update, state, best=self._best)
        except OSError as second:
            latest = "there is no checkpoint" if self.latest() is None else f"the latest checkpoint is {self.latest()}"
            return RunFolderError(f"{error}. The state after update {update} is lost ({second}); {latest}")
        try:  # after the state, which matters more, and whose checkpoint may have made room
            if missing:
                self.log.append(missing)
        except OSError:
            error = RunFolderError(f"{error}. The metrics of {len(missing)} updates are lost")
        return RunFolderError(
            f"{error}. The run ends here; the state after update {update} is saved: continue with --resume {self.path}"
        )

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write `result.json`, which marks the run as complete."""
        write_json(self.path / "result.json", result)

    def remove_result(self) -> None:
        """Remove `result.json`, because the run is not complete."""
        (self.path / "result.json").unlink(missing_ok=True)

    def close(self) -> None:
        """Release the files."""
        if self._log is not None:
            self._log.close()
        self._checkpoints.close()

    def _describe(self) -> None:
        write_json(self.path / "config.json", {**self.stored, "run": _kept(self.options)})

    def _accepted(self, done: int) -> Log:
        """Return the rows up to an accepted checkpoint; a log that lacks some of them is moved aside unchanged."""
        log = read_log(self.log_path, before=done)
        if len(log.rows) < done:
            self.rows(done)  # warns
            self._set_aside_log()
            write_rows(self.log_path, log.rows)
        elif not done and read_log(self.log_path, before=1).rows:
            print(f"{self.path} has no checkpoint: the run begins again; its log is in aside/", file=sys.stderr)
            self._set_aside_log()
        return log

    def _set_aside_log(self) -> None:
        if self.log_path.exists():
            os.rename(self.log_path, self._aside("metrics.jsonl"))

    def _aside(self, name: str) -> Path:
        """Return an unused path in `aside/`."""
        place = self.path / "aside"
        place.mkdir(exist_ok=True)
        return next(path for path in _numbered(place / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}") if not path.exists())


@contextlib.contextmanager
def open_run(
    config: Any, options: RunOptions, steps_per_update: int, continued_from: Mapping[str, Any] | None = None
) -> Iterator[RunWriter]:
    """Open the folder of a new run, or of the run to resume, and lock it against other writers.

    Raises:
        RunExistsError: the folder already holds a run, or another process is writing to it.
        RunNotFoundError: there is no run to resume. UserValueError: it has another configuration.
    """
    if options.resume is not None:
        path, stored = options.resume, stored_run(options.resume)
        check_unchanged(stored, config, options)
    else:
        beginning = {} if continued_from is None else {"continued_from": dict(continued_from)}
        stored = {**described(config, _kept(options), steps_per_update), **beginning}
        path = _made(config, options)
    with _locked(path):
        if options.resume is None:
            if (path / "config.json").exists() or (path / "checkpoints").exists():
                raise RunExistsError(
                    f"{path} holds a run already: continue it with --resume {path}, or give another --name"
                )
            write_json(path / "config.json", stored)
        with contextlib.closing(RunWriter(path, stored, options)) as folder:
            yield folder


def _kept(options: RunOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in KEPT}


def _made(config: Any, options: RunOptions) -> Path:
    if options.name is not None:
        folder = options.directory / options.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    name = f"{getattr(config, 'env_id', 'run')}-s{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
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
    with (folder / ".lock").open("w") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunExistsError(f"{folder} is being written by another process") from None
        except (ImportError, OSError):  # no locks on this system, or on this file system
            pass
        yield
