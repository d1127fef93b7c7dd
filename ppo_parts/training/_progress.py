"""What watches a run: the progress bar and TensorBoard's events. Each is called with the rows of new updates."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from .._extras import require_package
from ._evaluate import EVALUATION
from ._metrics_file import Row, column
from ._options import RunOptions
from ._train import NONFINITE, Train

OnRows = Callable[[list[Row]], object]
"""`on_rows(rows)` is called with the metrics of new updates, in order, after they were written to `metrics.jsonl`."""


class StopRun(Exception):
    """Raised by an `on_rows` function to end the run; the run is saved first, and can be resumed.

    Its message is the `reason` in the result.
    """

    __module__ = "ppo_parts.training"


class ProgressBar:
    """Shows environment steps, steps per second, and the mean return of the last updates.

    Args:
        train: the run.
        options: the options of the run; without `progress`, nothing is shown.
        done: number of updates that are done.
    """

    def __init__(self, train: Train, options: RunOptions, done: int) -> None:
        self._steps = train.steps_per_update * options.num_seeds
        self._bar = require_package("tqdm", "train").tqdm(
            total=train.num_updates * self._steps,
            initial=done * self._steps,
            unit="step",
            unit_scale=True,
            disable=None if options.progress else True,  # None: shown only on terminals
        )

    def __call__(self, rows: list[Row]) -> None:
        """Show new rows."""
        returns = np.asarray([row["episode_return"] for row in rows], float)
        if np.isfinite(returns).any():
            self._bar.set_postfix_str(f"return {np.nanmean(returns):.1f}")
        self._bar.update(len(rows) * self._steps)

    def close(self) -> None:
        """Close the bar."""
        self._bar.close()


class TensorBoard:
    """Writes TensorBoard records, each of which is the mean of `log_every` updates.

    Records end at multiples of `log_every`, at evaluations and at the end of the run. They therefore depend neither on
    the number of updates per device call nor on interruptions. On return from a call they are on the disk.

    Args:
        train: the run.
        options: the options of the run.
        folder: folder for the events.
        rows: rows of the updates that are done.
        done: number of updates that are done.
    """

    def __init__(self, train: Train, options: RunOptions, folder: Path, rows: list[Row], done: int) -> None:
        self._log_every, self._num_updates = options.log_every or 1, train.num_updates
        self._steps = train.steps_per_update * options.num_seeds
        self._events = _Events(folder, purge=done * train.steps_per_update + 1 if done else None)
        self._began = time.perf_counter()
        self._pending: list[Row] = []
        for row in rows[-self._log_every :]:
            self._pending = [] if self._ends_record(row) else [*self._pending, row]

    def __call__(self, rows: list[Row]) -> None:
        """Write the records that end in new rows."""
        for row in rows:
            self._pending.append(row)
            if self._ends_record(row):
                self._events.write(self._record(), row["env_steps"])
                self._pending = []
        self._events.flush()

    def close(self) -> None:
        """Close the file."""
        self._events.close()

    def _ends_record(self, row: Row) -> bool:
        done = row["update"] + 1
        evaluated = any(name.startswith(EVALUATION) for name in row)
        return done % self._log_every == 0 or done == self._num_updates or evaluated

    def _record(self) -> dict[str, float]:
        rows, now = self._pending, time.perf_counter()
        names = sorted(set().union(*rows) - {"update", "env_steps"})
        means = {tag(name): x for name in names if np.isfinite(x := _mean(column(rows, name)))}
        speed, self._began = len(rows) * self._steps / (now - self._began), now
        return {**means, "time/steps_per_second": speed}


def tag(name: str) -> str:
    """Return the tag of a metric in TensorBoard, which groups tags by the word before the first slash.

    Example:
        >>> tag("episode_return"), tag("approx_kl"), tag("evaluation/episode_return"), tag("actor/learning_rate")
        ('charts/episode_return', 'losses/approx_kl', 'evaluation/episode_return', 'charts/actor/learning_rate')
    """
    if NONFINITE in name:
        return NONFINITE + name.replace(NONFINITE, "")
    if name.startswith("episode") or name.endswith("learning_rate"):
        return f"charts/{name}"
    return name if name.startswith(EVALUATION) else f"losses/{name}"


class _Events:
    """TensorBoard's event file, written directly: the usual writer has a queue, which is lost if the process dies."""

    def __init__(self, folder: Path, purge: int | None) -> None:
        require_package("tensorboardX", "train")
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        self._event, self._scalar = Event, scalar
        suffix = "" if purge is None else f".{purge}"  # names have a resolution of one second, and two may start in one
        self._writer = EventsWriter(str(folder / "events"), suffix)
        if purge is not None:  # discards what a killed process wrote from this step on
            self._writer.write_event(Event(step=purge, session_log=SessionLog(status=SessionLog.START)))

    def write(self, record: dict[str, float], step: int) -> None:
        for name, value in record.items():
            event = self._event(wall_time=time.time(), step=step, summary=self._scalar(name, value))
            self._writer.write_event(event)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _mean(x: np.ndarray) -> float:
    known = x[np.isfinite(x)]
    return float(known.mean()) if known.size else np.nan
