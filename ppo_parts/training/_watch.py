"""The progress bar and the TensorBoard events of a run."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from .._extras import require_package
from ._evaluate import EVALUATION
from ._metrics_file import Row, column
from ._options import RunOptions
from ._train import Train


class Watch:
    """Updates the progress bar and writes TensorBoard records, each of which is the mean of `log_every` updates.

    Records end at multiples of `log_every`, at evaluations and at the end of the run. They therefore depend neither on
    the number of updates per device call nor on interruptions.

    Args:
        train: the run.
        options: the options of the run.
        folder: folder for TensorBoard's events.
        rows: rows of the updates that are done.
        done: number of updates that are done.
    """

    def __init__(self, train: Train, options: RunOptions, folder: Path, rows: list[Row], done: int) -> None:
        self._seeds, self._each, self._last = options.num_seeds, train.steps_per_update, train.num_updates
        self._log_every, self._began = options.log_every or 1, time.perf_counter()
        total = train.num_updates * self._each * self._seeds
        self._bar = require_package("tqdm", "train").tqdm(
            total=total,
            initial=done * self._each * self._seeds,
            unit="step",
            unit_scale=True,
            disable=None if options.progress else True,  # None: shown only on terminals
        )
        self._events = _Events(folder, purge=done * self._each + 1 if done else None) if options.tensorboard else None
        self._pending: list[Row] = []
        for row in rows[-self._log_every :]:
            self._pending = [] if self._ends_record(row) else [*self._pending, row]

    def show(self, rows: list[Row]) -> None:
        """Show rows that have been written to the disk."""
        returns = np.asarray([row["episode_return"] for row in rows], float)
        if np.isfinite(returns).any():
            self._bar.set_postfix_str(f"return {np.nanmean(returns):.1f}")
        self._bar.update(len(rows) * self._each * self._seeds)
        if self._events is None:
            return
        for row in rows:
            self._pending.append(row)
            if self._ends_record(row):
                self._events.write(self._record(), row["env_steps"])
                self._pending = []

    def flush(self) -> None:
        """Flush TensorBoard's events to the disk."""
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Close the progress bar and the events."""
        self._bar.close()
        if self._events is not None:
            self._events.close()

    def _ends_record(self, row: Row) -> bool:
        done = row["update"] + 1
        return done % self._log_every == 0 or done == self._last or any(name.startswith(EVALUATION) for name in row)

    def _record(self) -> dict[str, float]:
        rows, now = self._pending, time.perf_counter()
        names = sorted(set().union(*rows) - {"update", "env_steps"})
        means = {name: x for name in names if np.isfinite(x := _mean(column(rows, name)))}
        speed = len(rows) * self._each * self._seeds / (now - self._began)
        self._began = now
        return {**means, "steps_per_second": speed}


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
