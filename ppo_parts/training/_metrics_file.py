"""`metrics.jsonl`: one JSON object per update, each with a checksum of everything up to and including it."""

from __future__ import annotations

import bisect
import contextlib
import errno
import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ._files import plain, to_path, write_whole

Row = dict[str, Any]


class Log(NamedTuple):
    """The valid beginning of a metrics file, up to the first line that is damaged.

    Attributes:
        rows: metrics by name, one row per update.
        size: number of bytes that the rows take in the file.
        checksum: checksum of these bytes, without the checksums in them.
    """

    rows: list[Row]
    size: int = 0
    checksum: int = 0


class MetricsFile:
    """The metrics file, for the process that writes it. Values are numbers, or lists with one number per seed.

    Args:
        path: the file.
        log: the rows to keep, as returned by `read_log`; the rest of the file is cut off.
    """

    def __init__(self, path: Path, log: Log) -> None:
        self.path = path
        self.rows, self._size, self._checksum = log
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666)
        os.ftruncate(self._file, self._size)
        os.fsync(self._file)

    def append(self, rows: list[Row]) -> None:
        """Append rows; on return they are on the disk.

        Raises:
            OSError: the disk is full, or the file was replaced. No partial row is left in the file.
        """
        if not self.intact():
            raise OSError(errno.ENOENT, "removed or changed while the run was writing it", str(self.path))
        content, checksum = _lines(rows, self._checksum)
        try:
            _write_all(self._file, content)
            os.fsync(self._file)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self.rows += rows
        self._size, self._checksum = self._size + len(content), checksum

    def intact(self) -> bool:
        """Return whether the file still exists and has the size that was written."""
        try:
            there = os.stat(self.path)
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self._file)) and there.st_size == self._size

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_log(path: Path, before: int | None = None) -> Log:
    """Read the rows of a metrics file (of the updates `before` one) up to the first damaged, doubled or swapped row."""
    rows: list[Row] = []
    size = checksum = 0
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            body, _, stored = line.rpartition(CHECKSUM)
            following = zlib.crc32(body, checksum)
            if stored != _end(following):
                break
            row = json.loads(body + b"}")
            if before is not None and row["update"] >= before:
                break
            rows.append(row)
            size, checksum = size + len(line), following
    return Log(rows, size, checksum)


def read_metrics(path: str | Path) -> list[Row]:
    """Read the rows of a metrics file, up to the first line that is damaged or cut short."""
    path = to_path("read_metrics", "path", path)
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, "no metrics file", str(path))
    return read_log(path).rows


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write a metrics file atomically."""
    write_whole(path, _lines(rows, 0)[0])


def column(rows: list[Row], name: str) -> np.ndarray:
    """Return one metric over all rows, `[updates]` or `[updates, seeds]`, NaN where it was not measured."""
    if rows and not any(name in row for row in rows):
        raise KeyError(f"no update has {name}; there are {', '.join(sorted(set().union(*rows)))}")
    missing = next((np.full(np.shape(row[name]), np.nan) for row in rows if name in row), None)
    return np.asarray([np.asarray(row.get(name, missing), float) for row in rows])


def best_update(
    rows: list[Row], updates: Iterable[int], metric: str, *, mode: str = "max", window: int = 1
) -> tuple[int, float] | None:
    """Return the one of `updates` after which a metric was best, and its mean over the last `window` updates and seeds.

    Among equal values the first update is returned; None if the metric was never measured.
    """

    def value(update: int) -> float:
        first, last = (bisect.bisect_left(rows, u, key=lambda row: row["update"]) for u in (update - window, update))
        known = np.asarray([row[metric] for row in rows[first:last] if metric in row], float)
        known = known[np.isfinite(known)]
        return float(known.mean()) if known.size else np.nan

    values = {update: value(update) for update in sorted(updates)}
    known = {update: x for update, x in values.items() if np.isfinite(x)}
    if not known:
        return None
    best = (min if mode == "min" else max)(known, key=known.__getitem__)
    return best, known[best]


CHECKSUM = b', "checksum": "'


def _lines(rows: list[Row], checksum: int) -> tuple[bytes, int]:
    lines = []
    for row in rows:
        body = json.dumps(plain(row)).encode()[:-1]
        checksum = zlib.crc32(body, checksum)
        lines.append(body + CHECKSUM + _end(checksum))
    return b"".join(lines), checksum


def _end(checksum: int) -> bytes:
    return b'%08x"}\n' % checksum


def _write_all(file: int, content: bytes) -> None:
    left = memoryview(content)
    while left:  # one call may write only a part
        left = left[os.write(file, left) :]
