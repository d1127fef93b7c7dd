"""Files that are written atomically: even if the process dies, either the old or the new file is there, complete."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically."""
    write_whole(path, (json.dumps(plain(content), indent=2) + "\n").encode())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically; on return it is on the disk."""
    partial = path.with_suffix(".tmp")
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", str(path.parent))
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync(path.parent)


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
