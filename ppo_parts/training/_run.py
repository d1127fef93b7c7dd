"""The loop of a run on the host: it trains, evaluates, logs and saves, until the run is done or asked to stop."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._base.errors import UserTypeError
from .._core.checks import nonfinite_report
from ._devices import devices_of
from ._errors import NonFiniteError
from ._messages import logger
from ._metrics_file import Row
from ._options import RunOptions, checkpoint_interval, validate
from ._processes import agree, broadcast_first, is_first, noticing_losses, together
from ._program import Program
from ._progress import Destination, OnRows, ProgressBar, Records, StopRun, TensorBoard, WeightsAndBiases
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
    if not is_first():
        return follow(train, config, options, program)
    with contextlib.ExitStack() as stack, noticing_losses():
        with together("open the folder of the run"):
            folder = stack.enter_context(open_run(train, config, options))
            begun, state = folder.begin(train)
        logger.info(introduction(train, options, folder.path, begun))
        if state is not None and train.rollout.restart is not None:
            logger.info("the environments are on the host, where no checkpoint can store them: new episodes begin")
        begun, state = begun_by_first(train, options, begun, state)
        with Interrupt() as interrupt:
            loop = Loop(train, options, folder, program, interrupt, on_rows)
            done, state = loop(begun, program.start(state))
        earlier = folder.earlier_result() if begun == train.num_updates else {}  # such as the timing
        result = earlier | beginning_of_result(train, config, options.num_seeds, done)
        if done < train.num_updates:  # the sender of the signal is waiting for this process to end
            logger.info(f"interrupted after update {done} of {train.num_updates}; continue with --resume {folder.path}")
            return result | interrupt.reason
        if options.eval_episodes:
            result["evaluation"] = evaluation_of(loop.evaluate(state, done), options.eval_episodes)
        best = folder.best()
        if best is not None:
            result["best"] = {"metric": options.best_metric, "update": best[0], "value": best[1]}
        if (curve := curve_of(folder.tail(0))) is not None:
            result |= result_of(curve)
            result |= draw(folder.path / "curve.png", curve, title=str(getattr(config, "env_id", "")))
        if done > begun:
            env_steps = (done - begun) * train.steps_per_update * options.num_seeds
            result["timing"] = timing_of(env_steps, loop.seconds)
        folder.write_result(result)
    announce(result)
    return result


def follow(train: Train, config: Any, options: RunOptions, program: Program) -> dict[str, Any]:
    """Run what the first process of a distributed run does, without its files."""
    options = dataclasses.replace(options, progress=False)
    with noticing_losses():
        with together("open the folder of the run"):
            folder = Follower()
        begun, state = begun_by_first(train, options, *folder.begin(train))
        with Interrupt() as interrupt:
            loop = Loop(train, options, folder, program, interrupt, None)
            done, state = loop(begun, program.start(state))
        if done == train.num_updates and options.eval_episodes:
            loop.evaluate(state, done)
        return beginning_of_result(train, config, options.num_seeds, done) | interrupt.reason


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
        seconds: how long the updates took, without the time to compile them and without evaluations.
        played: the last evaluation, and the update before it.
    """

    train: Train
    options: RunOptions
    folder: RunWriter | Follower
    program: Program
    interrupt: Interrupt
    on_rows: OnRows | None
    seconds: float = 0.0
    played: tuple[int, Row] | None = None

    def evaluate(self, state: Any, done: int) -> Row:
        """Play the evaluation after update `done`, unless it was the last one played."""
        if self.played is None or self.played[0] != done:
            self.played = done, self.program.evaluate(state, done)
        return self.played[1]

    def __call__(self, done: int, state: Any) -> tuple[int, Any]:
        """Run all remaining updates, or as many as are done before a request to stop."""
        train, options, folder, interrupt = self.train, self.options, self.folder, self.interrupt
        if done == train.num_updates:
            return done, state
        folder.remove_result()
        advance = self.program.advance_from(state)
        with self._listeners(done) as listeners:
            interrupt.working, saved, began = True, done, time.monotonic()
            last_save = began
            while done < train.num_updates and not interrupt.agree():
                with self._saving_before_errors(done, state, saved, if_=train.rollout.restart is not None):
                    state, metrics = advance(state, self._next_goal(done) - done)
                rows = rows_of(metrics, done, train.steps_per_update)
                self._check_finite(metrics, rows, listeners)
                done += len(rows)
                evaluated = self._due(done, options.eval_every)
                if evaluated:
                    paused = time.monotonic()
                    with self._saving_before_errors(done, state, saved, rows):
                        rows[-1] |= self.evaluate(state, done)
                    self.seconds -= time.monotonic() - paused
                with self._rescuing(done, state, rows):
                    folder.append(rows)
                    with self._saving_before_errors(done, state, saved):
                        self._tell(listeners, rows)
                    late = time.monotonic() - last_save > 60 * options.checkpoint_minutes
                    due = self._due(done, self._checkpoint_every) or late or interrupt.save
                    if any(agree(due or (evaluated and folder.is_best(done)))):
                        folder.save(done, self.program.whole(state))
                        interrupt.save, last_save, saved = False, time.monotonic(), done
            if saved < done:  # the run was asked to stop
                with self._rescuing(done, state, []):
                    folder.save(done, self.program.whole(state))
            self.seconds += time.monotonic() - began
        return done, state

    @contextlib.contextmanager
    def _saving_before_errors(
        self, done: int, state: Any, saved: int, rows: Sequence[Row] = (), *, if_: bool = True
    ) -> Iterator[None]:
        """Save the state from before a call that raised an error, such as one of an environment or of a listener.

        Args:
            done, state: the updates so far, and the state after them.
            saved: the update of the latest checkpoint.
            rows: rows that are not written yet.
            if_: whether the state is still valid after the call; a call on a device overwrites it.
        """
        try:
            yield
        except Exception:
            if if_ and jax.process_count() == 1:  # one of several processes has only a part of the state
                if rows:
                    self.folder.append(list(rows))
                if saved < done:
                    self.folder.save(done, state)
                    logger.info(f"saved after update {done}; continue with --resume {self.folder.path}")
            raise

    def _rescuing(self, done: int, state: Any, rows: list[Row]) -> contextlib.AbstractContextManager[None]:
        """Save as much as possible if a file cannot be written; one of several processes has only part of the state."""
        if isinstance(self.folder, Follower) or jax.process_count() > 1:
            return contextlib.nullcontext()
        return self.folder.rescuing(done, state, rows)

    @contextlib.contextmanager
    def _listeners(self, done: int) -> Iterator[list[OnRows]]:
        """Yield the listeners that are called with new rows."""
        with contextlib.ExitStack() as stack:
            listeners: list[OnRows] = [stack.enter_context(closing(ProgressBar(self.train, self.options, done)))]
            if isinstance(self.folder, Follower):  # the first process reports
                yield listeners
                return
            destinations: list[Destination] = []
            if self.options.tensorboard:
                begun = done * self.train.steps_per_update if done or self.options.resume is not None else None
                destinations.append(TensorBoard(self.folder.path, begun))
            if self.options.track:
                config = self.folder.stored["config"]
                destinations.append(WeightsAndBiases(self.folder.path, config, self.options.track_project))
            for destination in destinations:
                records = Records(self.train, self.options, self.folder.tail, done, destination)
                listeners.append(stack.enter_context(closing(records)))
            yield listeners if self.on_rows is None else [*listeners, self.on_rows]

    def _tell(self, listeners: list[OnRows], rows: list[Row]) -> None:
        for listen in listeners:
            try:
                listen([dict(row) for row in rows])
            except StopRun as stop:
                self.interrupt.ask("StopRun", str(stop))

    @property
    def _checkpoint_every(self) -> int:
        return checkpoint_interval(self.options, self.train.num_updates)

    def _next_goal(self, done: int) -> int:
        """Return the next update after which the host has something to do."""
        goals = [(done // every + 1) * every for every in (self._checkpoint_every, self.options.eval_every) if every]
        return min(self.train.num_updates, *goals)

    def _due(self, done: int, every: int | None) -> bool:
        return every is not None and (done % every == 0 or done == self.train.num_updates)

    def _check_finite(self, metrics: Mapping[str, np.ndarray], rows: list[Row], listeners: list[OnRows]) -> None:
        """Raise at the first update with non-finite numbers, after recording the rows up to it."""
        found = None if self.options.on_nonfinite == "skip" else first_nonfinite(metrics)
        if found is None:
            return
        index, report = found
        self.folder.append(rows[: index + 1])
        self._tell(listeners, rows[: index + 1])
        latest = self.folder.latest()
        last = "there is no checkpoint yet" if latest is None else f"its last checkpoint, of update {latest}, is sound"
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
