"""Listeners of a run: the progress bar, TensorBoard's events, Weights & Biases. Each is called with new rows."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from .._base.extras import require_package
from ._evaluate import EVALUATION
from ._metrics_file import Row, ends_row
from ._options import RunOptions, log_interval
from ._train import NONFINITE, Train
from ._writer import Follower, RunWriter

OnRows = Callable[[list[Row]], object]
"""`on_rows(rows)` is called with the metrics of new updates, in order, after they were written to `metrics.jsonl`."""


class StopRun(Exception):
    """Raised by an `on_rows` function to end the run; the run is saved first, and can be resumed.

    Its message is the `reason` in the result.
    """

    __module__ = "ppo_parts.training"


@contextlib.contextmanager
def listeners(
    train: Train, options: RunOptions, folder: RunWriter | Follower, done: int, on_rows: OnRows | None
) -> Iterator[list[OnRows]]:
    """Open all that the first process calls with new rows after `done` updates; the other processes report nothing."""
    if isinstance(folder, Follower):
        yield []
        return
    destinations: list[TensorBoard | WeightsAndBiases] = []
    if options.tensorboard:
        continued = done or options.resume is not None
        destinations.append(TensorBoard(folder.path, done * train.steps_per_update if continued else None))
    if options.track:
        destinations.append(WeightsAndBiases(folder.path, folder.stored["config"], options.track_project))
    with contextlib.ExitStack() as stack:
        opened: list[Any] = [ProgressBar(train, options, done)]
        opened += [Records(train, options, folder.tail, done, destination) for destination in destinations]
        for listener in opened:
            stack.enter_context(closing(listener))
        yield opened if on_rows is None else [*opened, on_rows]


class ProgressBar:
    """Shows environment steps, steps per second, and the mean return of the last updates, after `done` updates."""

    def __init__(self, train: Train, options: RunOptions, done: int) -> None:
        self._steps = train.steps_per_update * options.num_seeds
        self._bar = require_package("tqdm", "train").tqdm(
            total=train.num_updates * self._steps,
            initial=done * self._steps,
            unit="step",
            unit_scale=True,
            disable=None if options.progress else True,  # None: shown only on terminals
        )
        self.close = self._bar.close

    def __call__(self, rows: list[Row]) -> None:
        """Show new rows."""
        returns = np.asarray([row["episode_return"] for row in rows], float)
        if np.isfinite(returns).any():
            self._bar.set_postfix_str(f"return {np.nanmean(returns):.1f}")
        self._bar.update(len(rows) * self._steps)


class Records:
    """Writes records, each of which is the mean of `log_every` updates, and of all seeds.

    Records end as `ends_row` says. They therefore depend neither on the number of updates per device call nor on
    interruptions: of the first record, `tail(first)` yields the rows of the `done` updates from `first` on. On return
    from a call they are on the disk.
    """

    def __init__(
        self,
        train: Train,
        options: RunOptions,
        tail: Callable[[int], Iterable[Row]],
        done: int,
        destination: TensorBoard | WeightsAndBiases,
    ) -> None:
        self._log_every, self._num_updates = log_interval(options, train.num_updates), train.num_updates
        self._steps = train.steps_per_update * options.num_seeds
        self._destination = destination
        self._updates, self._sums = 0, dict[str, tuple[float, int]]()
        self._began = time.perf_counter()
        self.close = destination.close
        for _ in self._ended(tail(done - done % self._log_every)):
            pass  # these records are written already

    def __call__(self, rows: list[Row]) -> None:
        """Write the records that end in new rows."""
        for step, record in self._ended(rows):
            self._destination.write(record, step)
        self._destination.flush()

    def _ended(self, rows: Iterable[Row]) -> Iterator[tuple[int, dict[str, float]]]:
        """Add rows; yield the records that end in them, with their environment steps."""
        for row in rows:
            self._updates += 1
            for name, x in row.items():
                known = np.isfinite(x := np.asarray(x, float))
                total, number = self._sums.get(name, (0.0, 0))
                self._sums[name] = total + float(np.sum(x, where=known)), number + int(np.sum(known))
            if ends_row(row, self._log_every, self._num_updates):
                yield row["env_steps"], self._record()
                self._updates, self._sums = 0, {}

    def _record(self) -> dict[str, float]:
        now = time.perf_counter()
        names = sorted(self._sums.keys() - {"update", "env_steps"})
        means = {tag(name): self._sums[name][0] / self._sums[name][1] for name in names if self._sums[name][1]}
        speed, self._began = self._updates * self._steps / (now - self._began), now
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


class TensorBoard:
    """TensorBoard's event file, written directly: the usual writer has a queue, which is lost if the process dies.

    A resumed run is `continued_at` so many environment steps; later events of a killed process are discarded.
    """

    def __init__(self, folder: Path, continued_at: int | None = None) -> None:
        require_package("tensorboardX", "train")
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        self._event, self._scalar = Event, scalar
        purge = (continued_at or 0) + 1
        # Names resolve seconds, and two processes may start in one.
        suffix = "" if continued_at is None else f".{purge}"
        self._writer = EventsWriter(str(folder / "events"), suffix)
        self.flush, self.close = self._writer.flush, self._writer.close
        if continued_at is not None:
            self._writer.write_event(Event(step=purge, session_log=SessionLog(status=SessionLog.START)))

    def write(self, record: dict[str, float], step: int) -> None:
        """Write numbers by tag, after `step` environment steps."""
        for name, value in record.items():
            event = self._event(wall_time=time.time(), step=step, summary=self._scalar(name, value))
            self._writer.write_event(event)


class WeightsAndBiases:
    """A run of Weights & Biases, with the name and the configuration of the run on the disk.

    A resumed run continues the same one, whose identifier is in `wandb_id.txt`. Records that a killed process had
    already written are not written again, because their steps are not later than its last one.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], project: str) -> None:
        wandb = require_package("wandb", "track")
        path = folder / "wandb_id.txt"
        if not path.exists():
            path.write_text(secrets.token_hex(4))
        self._run = wandb.init(
            project=project, name=folder.name, id=path.read_text(), resume="allow", config=dict(config), dir=str(folder)
        )
        self.close = self._run.finish  # uploads what is left

    def write(self, record: dict[str, float], step: int) -> None:
        """Write numbers by tag, after `step` environment steps."""
        self._run.log(record, step=step)

    def flush(self) -> None:
        """Do nothing: `wandb` has its own process."""
