"""The host loop around a `Train`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import nonfinite_report
from ._errors import NonFiniteError, RunFolderError
from ._evaluate import metrics_of
from ._folder import RunWriter, open_run
from ._load import continued_from
from ._metrics_file import Row
from ._options import RunOptions, checked
from ._program import Advance, Pace, compiled
from ._result import announce, draw, evaluation_of, result_of
from ._signals import Interrupt
from ._train import NONFINITE, Train, seed_keys, vmap_over_seeds
from ._watch import Watch


def run(train: Train, config: Any, options: RunOptions | None = None) -> dict[str, Any]:
    """Train on this host, and keep all files in `<directory>/<name>/`.

    The folder holds `config.json`, `metrics.jsonl`, TensorBoard events, `checkpoints/`, `curve.png` and, at the end,
    `result.json`. A run that was interrupted at any moment continues from its last checkpoint with `resume`; on a CPU
    its result is bit-identical to that of an uninterrupted run. Ctrl-C, SIGTERM and SIGHUP save the run and end it; a
    second one ends it at once. SIGUSR1 saves and continues.

    Args:
        train: the run, as a recipe's `make_train` returns it.
        config: a dataclass with the fields `seed` and `env_id`, among others; recorded, and compared on resuming.
        options: see `RunOptions`.

    Returns:
        The result: returns of the last 100 episodes per seed, evaluation, versions, paths. After a signal, only the
        number of steps, the versions, and the signal's name as `interrupted_by`.

    Raises:
        FileExistsError: the folder already holds a run. FileNotFoundError: there is no run to resume.
        ValueError: it has another configuration. OSError: the folder cannot be written; as much as possible was saved.
        FloatingPointError: numbers that are not finite appeared, and `options.on_nonfinite` is "stop".
    """
    options = checked(options or RunOptions(), train)
    source = continued_from(train, config, options)
    with open_run(config, options, train.steps_per_update, source) as folder:
        return Loop(train, config, options, folder)()


@dataclasses.dataclass
class Loop:
    """The loop of one run, from the state in its folder to its end or to a signal.

    Attributes:
        train, config, options, folder: the run, and where its files are kept.
        compile: makes the program that runs updates; see `compiled`.
    """

    train: Train
    config: Any
    options: RunOptions
    folder: RunWriter
    compile: Callable[..., Advance] = compiled

    def __call__(self) -> dict[str, Any]:
        """Train, and return the result."""
        with Interrupt() as interrupt:
            done, state = self.folder.begin(self.train)
            self._introduce(done)
            if done < self.train.num_updates:
                done, state = self._updates(done, self._initial() if state is None else state, interrupt)
        return self._ended(done, state, interrupt.asked)

    def _introduce(self, done: int) -> None:
        train, seeds = self.train, self.options.num_seeds
        print(
            f"{self.folder.path}: {train.num_updates} updates of {train.steps_per_update} steps = "
            f"{train.num_updates * train.steps_per_update:,} environment steps"
            + (f", {seeds} seeds" if seeds > 1 else "")
            + (f", from update {done}" if done else "")
        )

    def _initial(self) -> Any:
        seeds = self.options.num_seeds
        return jax.jit(vmap_over_seeds(self.train.init, seeds))(seed_keys(self.config.seed, seeds))

    def _updates(self, done: int, state: Any, interrupt: Interrupt) -> tuple[int, Any]:
        """Run all remaining updates, or as many as are done before a signal."""
        train, options, folder = self.train, self.options, self.folder
        folder.remove_result()
        step = vmap_over_seeds(train.compiled_step, options.num_seeds)
        advance = self.compile(step, state, train.num_updates, options.num_seeds, Pace())
        with contextlib.closing(Watch(train, options, folder.path, folder.log.rows, done)) as watch:
            interrupt.working, saved = True, time.monotonic()
            while done < train.num_updates and not interrupt.asked:
                state, measured = advance(state, self._next_goal(done) - done)
                rows = self._rows(done, measured)
                self._check_finite(done, rows, measured)
                done += len(rows)
                evaluated = self._due(done, options.eval_every)
                if evaluated:
                    rows[-1] |= self._evaluate(state, done)
                due = self._due(done, options.checkpoint_every) or interrupt.asked or interrupt.save
                due = due or time.monotonic() - saved > 60 * options.checkpoint_minutes
                if self._keep(done, state, rows, bool(due), evaluated, watch):
                    interrupt.save, saved = False, time.monotonic()
                watch.show(rows)
        return done, state

    def _next_goal(self, done: int) -> int:
        goals = [
            (done // every + 1) * every for every in (self.options.checkpoint_every, self.options.eval_every) if every
        ]
        return min(self.train.num_updates, *goals)

    def _due(self, done: int, every: int | None) -> bool:
        return every is not None and (done % every == 0 or done == self.train.num_updates)

    def _rows(self, done: int, measured: Mapping[str, np.ndarray]) -> list[Row]:
        number = len(next(iter(measured.values())))
        return [
            {"update": done + i, "env_steps": (done + i + 1) * self.train.steps_per_update}
            | {name: x[i] for name, x in measured.items()}
            for i in range(number)
        ]

    def _keep(self, done: int, state: Any, rows: list[Row], due: bool, evaluated: bool, watch: Watch) -> bool:
        """Write rows and, if a checkpoint is due or is the best so far, the state; returns whether it was written."""
        folder = self.folder
        try:
            folder.append(rows)
            found = folder.best_with(done, self.train.num_updates) if due or evaluated else None
            if not due and (found is None or found[0] != done):
                return False
            watch.flush()
            folder.save(done, state, best=found and found[0])
        except RunFolderError as error:
            raise folder.rescue(done, state, rows, error) from error
        return True

    def _check_finite(self, done: int, rows: list[Row], measured: Mapping[str, np.ndarray]) -> None:
        """Raise at the first update with numbers that are not finite, after writing the rows up to it."""
        found = None if self.options.on_nonfinite == "skip" else first_nonfinite(measured)
        if found is None:
            return
        index, report = found
        self.folder.append(rows[: index + 1])
        latest = self.folder.latest()
        last = "there is no checkpoint yet" if latest is None else f"its last checkpoint, of update {latest}, is sound"
        raise NonFiniteError(
            f"update {done + index}{report}. The run ends here; {last}. --on-nonfinite skip skips such updates and "
            "counts them"
        )

    @functools.cached_property
    def _evaluate(self) -> Callable[[Any, int], dict[str, Any]]:
        """`evaluate(state, update)` returns the metrics of an evaluation; one program serves all updates.

        Its keys depend only on the seed and the update, so an evaluation does not affect training and can be repeated.
        """
        train, options = self.train, self.options
        keys = seed_keys(self.config.seed, options.num_seeds)

        def play(seed: tuple[jax.Array, Any], update: jax.Array) -> Any:
            key, state = seed
            key = jax.random.fold_in(jax.random.fold_in(key, 2**20), update)
            return train.evaluate_policy(key, state, options.eval_episodes, mode=options.eval_mode)

        @jax.jit
        def program(state: Any, update: jax.Array) -> Any:
            return vmap_over_seeds(lambda seed: play(seed, update), options.num_seeds)((keys, state))

        return lambda state, update: metrics_of(
            jax.device_get(program(state, jnp.asarray(update, jnp.int32))), seed_axes=int(options.num_seeds > 1)
        )

    def _ended(self, done: int, state: Any, asked: int) -> dict[str, Any]:
        """Return the result; if the run is complete, also write and print it."""
        train, options, folder = self.train, self.options, self.folder
        if done < train.num_updates:  # the sender of the signal is waiting for this process to end
            print(f"interrupted after update {done} of {train.num_updates}; continue with --resume {folder.path}")
            interrupted_by = {"interrupted_by": signal.Signals(asked).name}
            return result_of(train, self.config, options.num_seeds, [], done) | interrupted_by
        rows = folder.log.rows
        result = result_of(train, self.config, options.num_seeds, rows, done)
        found = folder.best_with(None, train.num_updates)
        if found is not None:
            result["best"] = {"metric": options.best_metric, "update": found[0], "value": found[1]}
        if options.eval_episodes:
            result["evaluation"] = evaluation_of(self._evaluate(state, done), options.eval_episodes)
        if rows:
            result |= draw(folder, rows, str(getattr(self.config, "env_id", "")))
        folder.write_result(result)
        announce(result)
        return result


def first_nonfinite(measured: Mapping[str, np.ndarray]) -> tuple[int, str] | None:
    """Return the first update with numbers that are not finite, and where they arose; later ones follow from it."""
    counts = {name: x.reshape(len(x), -1) for name, x in measured.items() if NONFINITE in name}
    total = np.sum(list(counts.values()), axis=0)  # [updates, seeds]
    if not np.any(total):
        return None
    first = int(np.argmax(np.any(total, axis=1)))
    report = nonfinite_report({name: x[first] for name, x in counts.items()})
    seeds = np.flatnonzero(total[first])
    where = f" (seed {', '.join(map(str, seeds))} of {total.shape[1]}, from 0)" if total.shape[1] > 1 else ""
    return first, f"{where}: {report}"
