"""The loop of a run on the host: it trains, evaluates, logs and saves, until the run is done or asked to stop.

An update goes through `Loop.run`: the program computes it (`_program`), the folder of the run gets its row and, if one
is due, a checkpoint (`_writer`, with `_metrics_file` and `_checkpoint`), and the listeners are told (`_progress`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._base.errors import UserTypeError
from .._core.checks import nonfinite_report
from ._devices import devices_of
from ._errors import NonFiniteError, RunFolderError
from ._messages import logger
from ._metrics_file import Row
from ._options import RunOptions, checkpoint_interval, validate
from ._processes import agree, broadcast_first, noticing_losses, together
from ._program import Program
from ._progress import OnRows, StopRun, listeners
from ._result import announce, beginning_of_result, curve_of, draw, evaluation_of, result_of, timing_of
from ._signals import Interrupt
from ._train import NONFINITE, Train
from ._writer import Follower, RunWriter, open_run


def run(
    train: Train,
    config: Any,
    options: RunOptions | None = None,
    *,
    on_rows: OnRows | None = None,
    make_program: Callable[[Train, int, RunOptions], Program] = Program,
) -> dict[str, Any]:
    """Train on this host, and keep all files in `<directory>/<name>/`.

    The folder contains `config.json`, `metrics.jsonl`, TensorBoard events, `checkpoints/` and, at the end, `curve.png`
    and `result.json`. A run that was interrupted continues from its last checkpoint with `resume`; on a CPU
    its result is bit-identical to that of an uninterrupted run. Ctrl-C, SIGTERM and SIGHUP save the run and end it; a
    second one ends it at once. SIGUSR1 saves and continues.

    Messages about the run go to the logger `ppo_parts.training`, for example "compiled in 4.0 s" at the level INFO.

    All processes of a distributed run call this function with the same arguments. The first one writes the files and
    calls `on_rows`; a signal to one of them stops all.

    Args:
        train: the run, as a recipe's `make_train` returns it.
        config: a dataclass with the fields `seed` and `env_id`, among others; recorded, and compared on resuming.
        options: see `RunOptions`.
        on_rows: called with the metrics of new updates after they were written, a list of dictionaries in order. Each
            has `update` and `env_steps`; with several seeds, each metric is an array with one number per seed. The
            function may raise `StopRun` to save the run and end it. Updates after the last checkpoint are repeated, and
            reported again, if the process is killed.
        make_program: makes the object that computes updates and evaluations; see `Program`.

    Returns:
        The result: returns of the last 100 episodes per seed, evaluation, versions, timing, paths. If the run was
        interrupted, only `config`, `num_seeds`, `env_steps`, `versions`, `interrupted_by` (the name of the signal, or
        "StopRun") and, if the exception had a message, `reason`.
        Processes other than the first always return only these.

    Raises:
        FileExistsError: the folder already holds a run. FileNotFoundError: there is no run to resume.
        ValueError: it has another configuration. OSError: the folder cannot be written; as much as possible was saved.
        FloatingPointError: non-finite numbers appeared, and `options.on_nonfinite` is "stop".
    """
    if not isinstance(train, Train):
        raise UserTypeError(f"must be what a recipe's make_train returns, got {train!r}", where="run", argument="train")
    if not isinstance(options, RunOptions | None):
        raise UserTypeError(f"must be training.RunOptions(...), got {options!r}", where="run", argument="options")
    if isinstance(config, type) or not hasattr(config, "__dataclass_fields__"):
        raise UserTypeError(f"must be an instance of a dataclass, got {config!r}", where="run", argument="config")
    options = validate(options or RunOptions(), train)
    program = make_program(train, config.seed, options)
    with contextlib.ExitStack() as stack, noticing_losses():
        with together("open the folder of the run"):
            folder, begun, state = stack.enter_context(open_run(train, config, options))
        begun, state = begun_by_first(train, options, begun, state)
        logger.info(introduction(train, options, folder.path, begun))
        if state is not None and train.rollout.restart is not None:
            logger.info("the environments are on the host, where no checkpoint can store them: new episodes begin")
        with Interrupt() as interrupt:
            loop = Loop(train, options, folder, program, interrupt, on_rows, begun, state)
            loop.run()
        result = beginning_of_result(train, config, options.num_seeds, loop.done)
        if loop.done < train.num_updates:  # the sender of the signal is waiting for this process to end
            logger.info(
                f"interrupted after update {loop.done} of {train.num_updates}; continue with --resume {folder.path}"
            )
            return result | interrupt.reason
        if options.eval_episodes:
            result["evaluation"] = evaluation_of(loop.evaluate(), options.eval_episodes)
        if isinstance(folder, Follower):
            return beginning_of_result(train, config, options.num_seeds, loop.done) | interrupt.reason
        if begun == train.num_updates:
            result = folder.earlier_result() | result  # such as the timing
        best = folder.best()
        if best is not None:
            result["best"] = {"metric": options.best_metric, "update": best[0], "value": best[1]}
        if (curve := curve_of(folder.tail(0))) is not None:
            result |= result_of(curve)
            result |= draw(folder.path / "curve.png", curve, title=str(getattr(config, "env_id", "")))
        if loop.done > begun:
            env_steps = (loop.done - begun) * train.steps_per_update * options.num_seeds
            result["timing"] = timing_of(env_steps, loop.seconds)
        folder.write_result(result)
    announce(result)
    return result


def begun_by_first(train: Train, options: RunOptions, begun: int, state: Any) -> tuple[int, Any]:
    """Return how many updates are done, and the state after them, as the first process has read them."""
    if jax.process_count() == 1:
        return begun, state
    numbers = np.asarray([begun, state is not None], np.int32)
    begun, restored = broadcast_first(numbers, numbers).tolist()
    return begun, broadcast_first(state, train.state_shapes(options.num_seeds)) if restored else None


@dataclasses.dataclass
class Loop:
    """The loop over updates, from a state to the end of the run or to a request to stop.

    Attributes:
        train, options, folder, program, interrupt, on_rows: see `run`.
        done, state: number of updates so far, and the state after them (None: the first one); None while a call
            overwrites it.
        rows: rows that are not written yet.
        saved: the update of the latest checkpoint.
        seconds: how long the updates took, without the time to compile them and without evaluations.
        played: the last evaluation, and the update before it.
    """

    train: Train
    options: RunOptions
    folder: RunWriter | Follower
    program: Program
    interrupt: Interrupt
    on_rows: OnRows | None
    done: int
    state: Any
    rows: list[Row] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    played: tuple[int, Row] | None = None

    def __post_init__(self) -> None:
        self.saved = self.done
        self.checkpoint_every = checkpoint_interval(self.options, self.train.num_updates)

    def run(self) -> None:
        """Run all remaining updates, or as many as are done before a request to stop."""
        if self.done == self.train.num_updates:
            self.state = self.program.start(self.state)
            return
        began = time.perf_counter()
        logger.info("compiling")
        self.state = self.program.start(self.state)
        advance = self.program.advance_from(self.state)
        logger.info(f"compiled in {time.perf_counter() - began:.1f} s")
        overwrites = self.train.rollout.restart is None
        with listeners(self.train, self.options, self.folder, self.done, self.on_rows) as told:
            self.interrupt.working, began = True, time.monotonic()
            last_save = began
            try:
                while self.done < self.train.num_updates and not self.interrupt.agree():
                    state, self.state = self.state, None if overwrites else self.state
                    state, metrics = advance(state, self.next_goal() - self.done)
                    rows = rows_of(metrics, self.done, self.train.steps_per_update)
                    self.check_finite(metrics, rows, told)
                    self.done, self.state, self.rows = self.done + len(rows), state, rows
                    evaluated = self.is_due(self.options.eval_every)
                    if evaluated:
                        paused = time.monotonic()
                        rows[-1] |= self.evaluate()
                        self.seconds -= time.monotonic() - paused
                    self.folder.append(rows)
                    self.rows = []
                    self.tell(told, rows)
                    late = time.monotonic() - last_save > 60 * self.options.checkpoint_minutes
                    due = self.is_due(self.checkpoint_every) or late or self.interrupt.save
                    if any(agree(due or (evaluated and self.folder.is_best(self.done)))):
                        self.write_checkpoint()
                        self.interrupt.save, last_save = False, time.monotonic()
                if self.saved < self.done:  # the run was asked to stop
                    self.write_checkpoint()
            except Exception as error:
                self.rescue(error)
                raise
            self.seconds += time.monotonic() - began

    def evaluate(self) -> Row:
        """Play the evaluation after the updates so far, unless it was the last one played."""
        if self.played is None or self.played[0] != self.done:
            self.played = self.done, self.program.evaluate(self.state, self.done)
        return self.played[1]

    def write_checkpoint(self) -> None:
        """Write a checkpoint."""
        self.saved = self.done  # already now: `rescue` does not try again after an error that nobody expected
        self.folder.write_checkpoint(self.done, self.program.whole(self.state))

    def tell(self, told: list[OnRows], rows: list[Row]) -> None:
        """Call the listeners, each with rows of its own."""
        for listen in told:
            try:
                listen([dict(row) for row in rows])
            except StopRun as stop:
                self.interrupt.ask("StopRun", str(stop))

    def rescue(self, error: Exception) -> None:
        """Save what an error left of the run: of an environment, of a listener, or of a file that cannot be written.

        Nothing can be saved if a call was overwriting the state, or if this is one of several processes, which has only
        a part of the state. Non-finite numbers are never saved.

        Raises:
            RunFolderError: a file could not be written; the message states how much was saved.
        """
        if self.state is None or jax.process_count() > 1 or isinstance(error, NonFiniteError):
            return
        assert isinstance(self.folder, RunWriter)
        failure = error
        if not isinstance(error, RunFolderError):
            try:
                self.folder.append(self.rows)
                self.rows = []
                if self.saved < self.done:
                    self.write_checkpoint()
                    logger.info(f"saved after update {self.done}; continue with --resume {self.folder.path}")
                return
            except RunFolderError as second:
                failure = second
        raise self.folder.rescued(self.done, self.state, self.rows, failure) from error

    def next_goal(self) -> int:
        """Return the next update after which the host has something to do."""
        intervals = filter(None, (self.checkpoint_every, self.options.eval_every))
        return min(self.train.num_updates, *((self.done // every + 1) * every for every in intervals))

    def is_due(self, every: int | None) -> bool:
        """Return whether it is time for something that happens every so many updates and at the end."""
        return every is not None and (self.done % every == 0 or self.done == self.train.num_updates)

    def check_finite(self, metrics: Mapping[str, np.ndarray], rows: list[Row], told: list[OnRows]) -> None:
        """Raise at the first update with non-finite numbers, after recording the rows up to it."""
        found = None if self.options.on_nonfinite == "skip" else first_nonfinite(metrics)
        if found is None:
            return
        index, report = found
        self.folder.append(rows[: index + 1])
        self.tell(told, rows[: index + 1])
        last = f"its last checkpoint, of update {self.saved}, is sound" if self.saved else "there is no checkpoint yet"
        update = rows[index]["update"]
        raise NonFiniteError(
            f"update {update}{report}. The run ends here; {last}. --on-nonfinite skip skips such updates "
            "and counts them"
        )


def introduction(train: Train, options: RunOptions, path: Path, done: int) -> str:
    """Describe the size of the run, for the log before it starts."""
    return (
        f"{path}: {train.num_updates} updates of {train.steps_per_update} steps = "
        f"{train.num_updates * train.steps_per_update:,} environment steps"
        + (f", {options.num_seeds} seeds" if options.num_seeds > 1 else "")
        + (f", on {devices_of(options)} devices" if devices_of(options) > 1 else "")
        + (f", from update {done}" if 0 < done < train.num_updates else "")
        + (f", all done; --init-from {path} trains it further" if done == train.num_updates else "")
    )


def rows_of(metrics: Mapping[str, np.ndarray], done: int, steps_per_update: int) -> list[Row]:
    """Return one row for each update, from metrics `[updates, ...]` that follow `done` updates."""
    number = len(next(iter(metrics.values())))
    return [
        {"update": done + i, "env_steps": (done + i + 1) * steps_per_update}
        | {name: x[i] for name, x in metrics.items()}
        for i in range(number)
    ]


def first_nonfinite(metrics: Mapping[str, np.ndarray]) -> tuple[int, str] | None:
    """Return the first update with non-finite numbers, and where they arose; later ones follow from it."""
    counts = {name: x.reshape(len(x), -1) for name, x in metrics.items() if NONFINITE in name}
    total = np.sum(list(counts.values()), axis=0)  # [updates, seeds]
    if not np.any(total):
        return None
    first = int(np.argmax(np.any(total, axis=1)))
    report = nonfinite_report({name: x[first] for name, x in counts.items()})
    seeds = np.flatnonzero(total[first])
    where = f" (seed {', '.join(map(str, seeds))} of {total.shape[1]}, from 0)" if total.shape[1] > 1 else ""
    return first, f"{where}: {report}"
