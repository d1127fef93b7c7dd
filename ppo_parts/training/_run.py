"""The host loop of a run, which trains, evaluates, logs and saves until the run is done or asked to stop."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._base.checked import checked
from .._core.checks import nonfinite_report
from ..errors import UserTypeError
from ._config import RunOptions, validate
from ._files import NonFiniteError, Row, RunFolderError, read_result, write_json
from ._folder import RunFolder, open_run
from ._population import PARENT
from ._processes import Interrupt, is_first, logger, take_largest
from ._program import Advance, Program, count_devices
from ._reports import OnRows, StopRun, announce, finish, open_listeners
from ._stored import check_made_from, read_versions
from ._train import NONFINITE, Train


@checked
def run(
    train: Train,
    config: Any,
    options: RunOptions | None = None,
    *,
    on_rows: OnRows | None = None,
    make_program: Callable[[Train, int, RunOptions], Program] = Program,
) -> dict[str, Any]:
    """Train on this host, and keep all files in `<directory>/<name>/`.

    `resume` continues an interrupted run from its last checkpoint. On a CPU, the result is bit-identical to the result
    of an uninterrupted run. Ctrl-C, SIGTERM, SIGHUP and SIGUSR2 save the run and end it; a second signal ends it at
    once. SIGUSR1 saves and continues. Messages go to the logger `ppo_parts.training`.

    All processes of a distributed run must call this function with the same arguments. The first one writes the files
    and calls `on_rows`; a signal to one process stops all.

    Args:
        train: the run, as returned by a recipe's `make_train`.
        config: the dataclass that `make_train` was given, with any `seed`. It is recorded, and compared on resuming.
        options: see `RunOptions`.
        on_rows: function that receives the metrics of new updates after they were written, as a list of dictionaries in
            order. Each has `update` and `env_steps`; with several seeds, each metric is an array with one number per
            seed. The function may raise `StopRun`. After a kill, updates since the last checkpoint are reported again.
        make_program: function that makes the object that computes updates and evaluations; see `Program`.

    Returns:
        The content of `result.json`. An interrupted run, and any process but the first, returns only `config`,
        `num_seeds`, `env_steps`, `versions`, `interrupted_by` (the name of the signal, or "StopRun") and `reason`, the
        message of `StopRun`.

    Raises:
        FileExistsError: if the folder already holds a run. FileNotFoundError: if there is no run to resume.
        ValueError: if it has another configuration. OSError: if the folder cannot be written.
        FloatingPointError: if non-finite numbers appear and `options.on_nonfinite` is "stop".
    """
    if not isinstance(train, Train):
        raise UserTypeError(f"must be what a recipe's make_train returns, got {train!r}", where="run", argument="train")
    if "seed" not in getattr(type(config), "__dataclass_fields__", ()):
        raise UserTypeError(f"must be a dataclass with a seed, got {config!r}", where="run", argument="config")
    if not isinstance(options, RunOptions | None):
        raise UserTypeError(f"must be training.RunOptions(...), got {options!r}", where="run", argument="options")
    check_made_from(train, config)
    options = RunOptions() if options is None else options
    validate(options, train)
    program = make_program(train, config.seed, options)
    result = {"config": dataclasses.asdict(config), "num_seeds": options.num_seeds, "versions": read_versions()}
    with open_run(train, config, options) as (folder, done_before, state), Interrupt() as interrupt:
        path = shlex.quote(str(folder.path)) if folder else "the folder of the first process"
        devices, updates = count_devices(options), train.num_updates
        logger.info(
            f"{path}: {updates} updates of {train.steps_per_update} steps = "
            f"{updates * train.steps_per_update:,} environment steps"
            + (f", {options.num_seeds} seeds" if options.num_seeds > 1 else "")
            + (f", on {devices} devices" if devices > 1 else "")
            + (f", from update {done_before}" if 0 < done_before < updates else "")
            + (f", already complete; use --init-from {path} to train further" if done_before >= updates else "")
        )
        if state is not None and train.on_host:
            logger.info("the environments are on the host, where no checkpoint can store them: new episodes begin")
        loop = Loop(train, options, folder, program, interrupt, done_before, state)
        with open_listeners(train, options, folder, done_before, on_rows) as loop.listeners:
            loop.run(f"{train.recipe} {getattr(config, 'env_id', '')}")
        result["env_steps"] = loop.done * train.steps_per_update
        if loop.done < updates:
            logger.info(f"interrupted after update {loop.done} of {updates}; continue with --resume {path}")
            return result | interrupt.reason
        played = loop.evaluate() if options.eval_episodes else None  # in all processes
        if folder is None:
            return result
        if loop.done > done_before:
            env_steps = (loop.done - done_before) * train.steps_per_update * options.num_seeds
            speed, device = env_steps / loop.seconds, jax.devices()[0].device_kind
            timing = {"seconds": loop.seconds, "steps_per_second": speed, "device": device}
            result["timing"] = {"env_steps_this_session": env_steps, **timing}
        else:  # the run was already complete
            result = read_result(folder.result_path) | result
        result = finish(folder, result, played)
    announce(result)
    return result


@contextlib.contextmanager
def time_compiling(name: str) -> Iterator[None]:
    """Log how long compiling takes and, beforehand, how long it took last time (from a file next to JAX's cache)."""
    cache = jax.config.values["jax_compilation_cache_dir"]
    path, known = None if cache is None or "://" in cache else Path(f"{cache}_seconds.json"), dict[str, float]()
    with contextlib.suppress(OSError, ValueError, TypeError):  # missing, or not in the format that is written below
        known = {each: float(x) for each, x in dict(json.loads(path.read_bytes() if path else "{}")).items()}
    logger.info("compiling" + (f"; {name} took {known[name]:.1f} s the last time" if name in known else ""))
    began = time.monotonic()
    yield
    known[name] = time.monotonic() - began
    logger.info(f"compiled in {known[name]:.1f} s")
    if path and is_first():
        with contextlib.suppress(OSError):  # the file only informs
            write_json(path, known)


@dataclasses.dataclass
class Loop:
    """The loop over updates, from a state to the end of the run or a request to stop."""

    train: Train
    options: RunOptions
    folder: RunFolder | None  # None in all processes but the first
    program: Program
    interrupt: Interrupt
    done: int  # updates so far
    state: Any  # the state after them; None before the start, and while a call overwrites it
    listeners: list[OnRows] = dataclasses.field(default_factory=list)  # called with each new row
    rows: list[Row] = dataclasses.field(default_factory=list)  # rows that are not yet written
    seconds: float = 0.0  # duration of the updates, without compiling and evaluations
    played: tuple[int, Row] | None = None  # number of updates at the last evaluation, and its metrics

    def __post_init__(self) -> None:
        self.saved, self.last_save = self.done, 0.0  # the update of the latest checkpoint, and when it was written
        self.checkpoint_every = self.options.checkpoint_every or max(1, self.train.num_updates // 10)

    def run(self, name: str) -> None:
        """Run all remaining updates, or those before a request to stop; `name` is the name of the program."""
        if self.done >= self.train.num_updates:
            self.state = self.program.start(self.state)
            return
        with time_compiling(name):
            self.state = self.program.start(self.state)
            advance = self.program.advance_from(self.state)
        began = self.last_save = time.monotonic()
        try:
            while self.done < self.train.num_updates and not self.interrupt.agree():
                self.update(advance)
                if evaluated := self.is_due(self.options.eval_every):
                    paused = time.monotonic()
                    self.rows[-1] |= self.evaluate()
                    self.seconds -= time.monotonic() - paused
                self.report()
                self.save_if_due(evaluated)
            if self.saved < self.done:  # the run was asked to stop
                self.write_checkpoint()
        except Exception as error:
            if not self.rescue(error) or not self.interrupt.reason:
                raise
            # Slurm, for example, sends SIGTERM to the processes of the environments as well.
            logger.warning(f"after {self.interrupt.reason['interrupted_by']}: {type(error).__name__}: {error}")
        self.seconds += time.monotonic() - began

    def update(self, advance: Advance) -> None:
        """Run updates in one call, which ends when the host must evaluate or save.

        Raise at the first update with non-finite numbers, after recording the rows up to it.
        """
        state, overwrites = self.state, not self.train.on_host
        self.state = None if overwrites else state
        intervals = (self.checkpoint_every, self.options.eval_every or self.train.num_updates)
        goal = min((self.done // every + 1) * every for every in intervals)
        state, metrics = advance(state, min(goal, self.train.num_updates) - self.done)
        each = (dict(zip(metrics, values, strict=True)) for values in zip(*metrics.values(), strict=True))
        steps = self.train.steps_per_update
        rows = [{"update": i, "env_steps": (i + 1) * steps} | row for i, row in enumerate(each, self.done)]
        if self.options.on_nonfinite == "stop" and (found := find_nonfinite(metrics)) is not None:
            index, report = found
            self.rows = rows[: index + 1]
            self.report()
            last = f"its last checkpoint, of update {self.saved}, is sound" if self.saved else "there is no checkpoint"
            raise NonFiniteError(
                f"update {rows[index]['update'] + 1}{report}. The run ends here; {last}. --on-nonfinite skip skips "
                "such updates and counts them"
            )
        self.done, self.state, self.rows = self.done + len(rows), state, rows

    def report(self) -> None:
        """Write the new rows, and then pass them to the listeners."""
        rows, self.rows = self.rows, []
        if self.folder is not None:
            self.folder.append(rows)
        for listen in self.listeners:
            try:
                listen([dict(row) for row in rows])
            except StopRun as stop:
                self.interrupt.ask("StopRun", str(stop))

    def evaluate(self) -> Row:
        """Evaluate after the updates so far, unless this has already been done."""
        if self.played is None or self.played[0] != self.done:
            self.played = self.done, self.program.evaluate(self.state, self.done)
        return self.played[1]

    def is_due(self, every: int | None) -> bool:
        """Return whether something that happens every `every` updates and at the end is due."""
        return every is not None and (self.done % every == 0 or self.done == self.train.num_updates)

    def save_if_due(self, evaluated: bool) -> None:
        """Write a checkpoint at its interval, on request, after some minutes, or after the best evaluation."""
        late = time.monotonic() - self.last_save > 60 * self.options.checkpoint_minutes
        due = self.is_due(self.checkpoint_every) or late or self.interrupt.save
        if evaluated and self.folder is not None:
            best = self.folder.find_best(self.done)
            due = due or (best is not None and best[0] == self.done)
        if any(take_largest(due)):
            self.write_checkpoint()
            self.interrupt.save = False

    def write_checkpoint(self) -> None:
        state = self.program.gather(self.state)
        if self.folder is not None:
            self.folder.write_checkpoint(self.done, state)
        self.saved, self.last_save = self.done, time.monotonic()

    def rescue(self, error: Exception) -> bool:
        """Save what remains of the run after an error in an environment or a listener, and return whether it could.

        Nothing can be saved if a call was overwriting the state, if this is one of several processes, each of which has
        only a part of the state, or if the folder cannot be written. Non-finite numbers are never saved.
        """
        if self.state is None or jax.process_count() > 1 or isinstance(error, (NonFiniteError, RunFolderError)):
            return False
        try:
            if self.rows:  # the evaluation after them failed
                self.report()
        finally:
            if self.saved < self.done:
                self.write_checkpoint()
            if self.saved and self.folder is not None:
                path = shlex.quote(str(self.folder.path))
                logger.info(f"saved after update {self.saved}; continue with --resume {path}")
        return True


def find_nonfinite(metrics: Mapping[str, np.ndarray]) -> tuple[int, str] | None:
    """Return the first update with non-finite numbers and where they arose; later ones are its consequences."""
    counts = {name: np.nan_to_num(x).reshape(len(x), -1) for name, x in metrics.items() if NONFINITE in name}
    total = np.sum(list(counts.values()), axis=0)  # [updates, seeds]
    if not np.any(total):
        return None
    first = int(np.argmax(np.any(total, axis=1)))
    report = nonfinite_report({name: x[first] for name, x in counts.items()})
    seeds = np.flatnonzero(total[first])
    what = "member" if PARENT in metrics else "seed"
    where = f" ({what} {', '.join(map(str, seeds))} of {total.shape[1]}, from 0)" if total.shape[1] > 1 else ""
    return first, f"{where}: {report}"
