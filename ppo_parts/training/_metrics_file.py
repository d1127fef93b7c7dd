"""`metrics.jsonl`: one JSON object per row, each with a checksum of everything up to and including it.

Nothing here holds a whole file: a run of a million updates reads and writes it in constant memory.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._base.doors import checked
from .._base.errors import UserTypeError, UserValueError
from .._core.types import Reduction
from ._errors import MetricNotFoundError
from ._evaluate import EVALUATION
from ._files import plain, replacing
from ._train import NONFINITE

Row = dict[str, Any]


class Log(NamedTuple):
    """The valid beginning of a metrics file, up to the first line that is damaged.

    Attributes:
        size: number of bytes that it takes in the file.
        checksum: checksum of these bytes, without the checksums in them.
        update: number of updates that it covers.
        more: whether valid rows follow that were left out.
    """

    size: int = 0
    checksum: int = 0
    update: int = 0
    more: bool = False


class Thinning(NamedTuple):
    """How several updates become one row.

    Rows end as `ends_row` says, and an update with non-finite numbers has a row of its own. They therefore do not
    depend on interruptions. `reductions` says how each metric is reduced, by name, "mean" if it is not there; what
    begins with "episode_" is averaged over episodes.
    """

    every: int = 1
    num_updates: int = 0
    reductions: Mapping[str, Reduction] = {}

    def split(self, rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
        """Return the finished rows, and the updates after them."""
        finished: list[Row] = []
        pending: list[Row] = []
        for row in rows:
            alone = self.every > 1 and any(NONFINITE in name and np.any(x) for name, x in row.items())
            if alone and pending:
                finished.append(self.merged(pending))
                pending = []
            pending.append(row)
            if alone or ends_row(row, self.every, self.num_updates):
                finished.append(self.merged(pending))
                pending = []
        return finished, pending

    def merged(self, rows: list[Row]) -> Row:
        """Return one row for several updates, with the number of the last."""
        if len(rows) == 1:
            return rows[0]
        whole = {name: rows[-1][name] for name in ("update", "env_steps")}
        episodes = np.nan_to_num(column(rows, "episodes")) if any("episodes" in row for row in rows) else 1
        for name in dict.fromkeys(name for row in rows for name in row if name not in whole):
            x, way = column(rows, name), self.reductions.get(name, "mean")
            known = np.isfinite(x)
            weight = np.where(known, episodes if name.startswith("episode_") else 1, 0)
            if way in ("max", "min"):
                end = -np.inf if way == "max" else np.inf
                found = getattr(np, way)(np.where(known, x, end), axis=0)
            else:
                found = np.sum(weight * np.where(known, x, 0), axis=0)
                found = found / np.maximum(np.sum(weight, axis=0), 1e-9) if way == "mean" else found
            whole[name] = np.where(np.any(weight > 0, axis=0), found, np.nan)
        return whole


def ends_row(row: Row, every: int, num_updates: int) -> bool:
    """Return whether a row or a record ends with an update: a multiple of `every`, an evaluation, or the last one."""
    done = row["update"] + 1
    return done % every == 0 or done == num_updates or any(name.startswith(EVALUATION) for name in row)


class MetricsFile:
    """The metrics file, for the process that writes it. Values are numbers, or lists with one number per seed.

    Args:
        path: the file.
        log: the rows to keep, as returned by `scan`; the rest of the file is cut off.
        thinning: how updates become rows.
        pending: updates after these rows that are not in the file yet.

    Attributes:
        pending: updates that are not in the file yet, because their row is not finished.
        update: number of updates that the file covers.
    """

    def __init__(self, path: Path, log: Log, thinning: Thinning, pending: Iterable[Row] = ()) -> None:
        self.path, self.pending, self.update = path, list(pending), log.update
        self._thinning, self._size, self._checksum = thinning, log.size, log.checksum
        self._file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o666)
        os.ftruncate(self._file, self._size)
        os.fsync(self._file)

    def append(self, updates: list[Row]) -> list[Row]:
        """Append updates; return the rows that are finished, and on the disk. `pending` has the rest.

        Raises:
            OSError: the disk is full, or the file was replaced. No partial row is left in the file.
        """
        if not self.intact():
            raise OSError(errno.ENOENT, "removed or changed while the run was writing it", str(self.path))
        rows, pending = self._thinning.split([*self.pending, *updates])
        if rows:
            lines, checksum = _lines(rows, self._checksum)
            content = b"".join(lines)
            try:
                _write_all(self._file, content)
                os.fsync(self._file)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, self._size)
                raise
            self._size, self._checksum, self.update = self._size + len(content), checksum, rows[-1]["update"] + 1
        self.pending = pending
        return rows

    def intact(self) -> bool:
        """Return whether the file still exists and has the size that was written."""
        try:
            there = os.stat(self.path)
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self._file)) and there.st_size == self._size

    def recreate(self) -> None:
        """Write the file again after it was removed: what was written is still readable as long as it is open."""
        with replacing(self.path) as partial, open(os.dup(self._file), "rb") as old, partial.open("wb") as new:
            old.seek(0)
            shutil.copyfileobj(old, new)
        again = MetricsFile(self.path, scan(self.path), self._thinning, self.pending)
        self.close()
        self.__dict__ = again.__dict__

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def scan(path: Path, before: int | None = None) -> Log:
    """Find the valid rows of a metrics file (of the updates `before` one), without parsing them."""
    log = Log()
    for update, _, size, checksum in _valid(path):
        if before is not None and update >= before:
            return log._replace(more=True)
        log = Log(log.size + size, checksum, update + 1)
    return log


def read_rows(
    path: Path, first: int = 0, before: int | None = None, wanted: Callable[[int], bool] | None = None
) -> Iterator[Row]:
    """Yield the valid rows of a metrics file from update `first` to the one before `before`, only those `wanted`."""
    for update, body, _, _ in _valid(path):
        if before is not None and update >= before:
            return
        if update >= first and (wanted is None or wanted(update)):
            yield json.loads(body + b"}")


@checked
def read_metrics(path: str | Path) -> list[Row]:
    """Read the rows of a metrics file, up to the first line that is damaged or cut short."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, "no metrics file", str(path))
    return list(read_rows(path))


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write a metrics file atomically."""
    checksum = 0
    with replacing(path) as partial, partial.open("wb") as file:
        for row in rows:
            lines, checksum = _lines([row], checksum)
            file.writelines(lines)


@checked
def column(rows: list[Row], name: str) -> np.ndarray:
    """Return one metric over all rows, `[rows]` or `[rows, seeds]`, NaN where it was not measured.

    Raises:
        KeyError: no row has it; the message names the metrics that there are.
    """
    if not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) for row in rows):
        raise UserTypeError(
            f"must be a list of rows, as read_metrics returns them, got {rows!r:.100}", where="column", argument="rows"
        )
    if rows and not any(name in row for row in rows):
        raise MetricNotFoundError(f"no update has {name}; there are {', '.join(sorted(set().union(*rows)))}")
    missing = next((np.full(np.shape(row[name]), np.nan) for row in rows if name in row), None)
    try:
        return np.asarray([np.asarray(row.get(name, missing), float) for row in rows])
    except (TypeError, ValueError):
        given = [row[name] for row in rows if name in row]
        raise UserValueError(f"{name} must be numbers, and as many in each row, got {given!r:.100}") from None


class Best:
    """The best of the checkpoints: their values of a metric, each the mean over the last `window` updates and seeds.

    Only checkpoints at multiples of `window` and the last one, of `num_updates`, are compared, and not those that were
    saved at other times, for example because of a signal.
    """

    def __init__(self, metric: str, mode: str = "max", window: int = 1, num_updates: int = 0) -> None:
        self._metric, self._window, self._better = metric, window, min if mode == "min" else max
        self._num_updates = num_updates
        self._recent: collections.deque[tuple[int, float, int]] = collections.deque()
        self._values: dict[int, float] = {}

    def comparable(self, steps: Iterable[int]) -> list[int]:
        """Return those of the checkpoints that are compared, in order."""
        return sorted(step for step in steps if step % self._window == 0 or step == self._num_updates)

    def add(self, rows: Iterable[Row], checkpoints: Iterable[int] = ()) -> None:
        """Take later rows, and judge the checkpoints among them."""
        waiting = collections.deque(self.comparable(checkpoints))
        for row in rows:
            while waiting and waiting[0] <= row["update"]:
                self._judge(waiting.popleft())
            x = np.asarray(row.get(self._metric, np.nan), float)
            self._recent.append((row["update"], float(np.sum(x, where=np.isfinite(x))), int(np.isfinite(x).sum())))
            while self._recent[0][0] <= row["update"] - self._window:
                self._recent.popleft()
        for step in waiting:
            self._judge(step)

    def of(self, steps: Iterable[int], new: int | None = None) -> tuple[int, float] | None:
        """Return the best of these checkpoints and of a `new` one after the rows so far, and its value.

        Among equal ones it is the first; None if none has a value.
        """
        for step in self.comparable(() if new is None else [new]):
            self._judge(step)
        kept = {*steps, new}
        self._values = known = {step: x for step, x in sorted(self._values.items()) if step in kept}
        if not known:
            return None
        best = self._better(known, key=known.__getitem__)
        return best, known[best]

    def _judge(self, step: int) -> None:
        sums = [(total, number) for update, total, number in self._recent if step - self._window <= update < step]
        total, number = np.sum(sums, axis=0) if sums else (0.0, 0)
        if number:
            self._values[step] = float(total / number)


CHECKSUM = b', "checksum": "'


def _valid(path: Path) -> Iterator[tuple[int, bytes, int, int]]:
    """Yield update, content, size and checksum of each line, up to the first that is damaged, doubled or swapped."""
    checksum = 0
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            body, _, stored = line.rpartition(CHECKSUM)
            checksum = zlib.crc32(body, checksum)
            update = body.removeprefix(b'{"update": ').partition(b",")[0]
            if stored != _end(checksum) or not update.isdigit():
                return
            yield int(update), body, len(line), checksum


def _lines(rows: list[Row], checksum: int) -> tuple[list[bytes], int]:
    lines = []
    for row in rows:
        body = json.dumps(plain(row)).encode()[:-1]
        checksum = zlib.crc32(body, checksum)
        lines.append(body + CHECKSUM + _end(checksum))
    return lines, checksum


def _end(checksum: int) -> bytes:
    return b'%08x"}\n' % checksum


def _write_all(file: int, content: bytes) -> None:
    left = memoryview(content)
    while left:  # one call may write only a part
        left = left[os.write(file, left) :]
