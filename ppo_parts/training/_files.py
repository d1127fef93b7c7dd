"""Files: JSON that is read without surprises, and files that are written atomically."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .._base.doors import checked
from .._base.errors import UserValueError


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raise `ValueError` if it is not JSON, is nested too deeply, or gives a name twice in one object."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ValueError(f"{twice[0]} is given {names.count(twice[0])} times: give it once")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@checked
def write_json(path: str | Path, content: Any) -> None:
    """Write a JSON file atomically."""
    write_whole(Path(path), (json.dumps(plain(content), indent=2) + "\n").encode())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically; on return it is on the disk."""
    with replacing(path) as partial:
        partial.write_bytes(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file that takes the place of `path` at the end, or is removed after an error."""
    check_writable(path)
    partial = path.with_name(f".tmp-{path.name}")
    try:
        yield partial
        sync(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def check_writable(path: Path, suffixes: tuple[str, ...] = ()) -> None:
    """Raise if a file with one of the `suffixes` (any, if empty) cannot be written; called before the work for it."""
    if suffixes and path.suffix.lower() not in suffixes:
        raise UserValueError(f"{path} must end with {' or '.join(suffixes)}, which determines its format")
    for code, what, wrong in (
        (errno.ENOENT, path.parent, not path.parent.is_dir()),
        (errno.EISDIR, path, path.is_dir()),
        (errno.EACCES, path.parent, not os.access(path.parent, os.W_OK)),
    ):
        if wrong:
            raise OSError(code, "there is no such folder" if code == errno.ENOENT else os.strerror(code), str(what))


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def plain(x: Any) -> Any:
    """Convert `x` for JSON: arrays become lists, and non-finite numbers become None."""
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain(value) for value in x]
    if isinstance(x, (np.ndarray, np.generic)) or hasattr(x, "__array__"):
        return plain(np.asarray(x).tolist())
    if isinstance(x, float) and not np.isfinite(x):
        return None  # JSON has no NaN
    return x
