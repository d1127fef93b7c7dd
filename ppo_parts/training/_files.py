"""Atomic writes of files, `metrics.jsonl` with one JSON object per update, and errors about files."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .._base.checked import checked
from ..errors import UserError, UserTypeError, UserValueError


class RunFolderError(UserError, OSError):
    """The folder of a run cannot be used, or can no longer be used."""


class RunExistsError(RunFolderError, FileExistsError):
    """The folder already contains a run, or another process is writing to it."""


class RunNotFoundError(RunFolderError, FileNotFoundError):
    """The run, or the checkpoint in it, does not exist."""


class NonFiniteError(UserError, FloatingPointError):
    """Non-finite numbers ended a run."""


for _error in (RunFolderError, RunExistsError, RunNotFoundError, NonFiniteError):
    _error.__module__ = "ppo_parts.training"  # the public module, so that tracebacks show the public name


def write_json(path: str | Path, content: Any) -> None:
    """Write a JSON file atomically."""
    write_whole(Path(path), (json.dumps(make_plain(content), indent=2) + "\n").encode())


def read_result(path: Path) -> dict[str, Any]:
    """Read a `result.json`; return {} if it is missing or (with a warning) damaged, as it can be written again."""
    try:
        return dict(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError) as error:
        warnings.warn(f"{path} is damaged: {error}", RuntimeWarning, stacklevel=2)
        return {}


def write_whole(path: Path, content: bytes) -> None:
    with replace_file(path) as partial:
        partial.write_bytes(content)


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file that replaces `path` at the end, or is removed after an error."""
    check_writable(path)
    partial = path.with_name(f".tmp-{path.name}")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def check_writable(path: Path, suffixes: tuple[str, ...] = ()) -> None:
    """Raise if a file with one of the `suffixes` (if empty, any) cannot be written; called before the work for it."""
    if suffixes and path.suffix.lower() not in suffixes:
        raise UserValueError(f"{path} must end with {' or '.join(suffixes)}, which determines its format")
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", str(path.parent))
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path.parent))


def average_finite(x: Any) -> float:
    """Return the mean of the finite numbers, or NaN if there are none."""
    x = np.asarray(x, float)
    known = np.isfinite(x)
    return float(np.mean(x, where=known)) if known.any() else np.nan


def make_plain(x: Any) -> Any:
    """Convert `x` for JSON: arrays become lists, and non-finite numbers become None."""
    if isinstance(x, dict):
        return {key: make_plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [make_plain(value) for value in x]
    if hasattr(x, "__array__"):
        return make_plain(np.asarray(x).tolist())
    if isinstance(x, float) and not np.isfinite(x):
        return None  # JSON has no NaN
    return x


Row = dict[str, Any]
"""The metrics of an update, which are numbers, or lists with one number per seed."""


def format_rows(rows: Iterable[Row]) -> bytes:
    return b"".join(json.dumps(make_plain(row)).encode() + b"\n" for row in rows)


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows before the first line that is damaged or out of order; yield nothing without a file."""
    last = -1
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line)
                update = row["update"]
            except (ValueError, TypeError, KeyError):
                return
            if not line.endswith(b"\n") or type(update) is not int or update <= last:
                return
            last = update
            yield row


@checked
def read_metrics(path: str | Path) -> list[Row]:
    """Read the rows of a `metrics.jsonl`, or of a run's folder, before the first damaged or incomplete line."""
    path = Path(path)
    path = path / "metrics.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, "no metrics file", str(path))
    return list(read_rows(path))


@checked
def select_metric(rows: list[Row], name: str) -> np.ndarray:
    """Return one metric of all rows, `[rows]` or `[rows, seeds]`, with NaN where it was not measured.

    Raises:
        ValueError: if no row has it; the message names the existing metrics.
    """
    if not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) for row in rows):
        says = f"must be a list of rows, as read_metrics returns them, got {rows!r:.100}"
        raise UserTypeError(says, where="select_metric", argument="rows")
    known = [row[name] for row in rows if name in row]
    if rows and not known:
        raise UserValueError(f"no row has the metric {name}; available: {', '.join(sorted(set().union(*rows)))}")
    missing = np.full(np.shape(known[0]), np.nan) if known else np.nan
    try:
        return np.asarray([np.asarray(row.get(name, missing), float) for row in rows])
    except (TypeError, ValueError):
        raise UserValueError(f"{name} must be numbers, and as many in each row, got {known!r:.100}") from None
