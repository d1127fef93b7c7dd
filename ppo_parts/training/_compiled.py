"""Compiled programs that are kept between runs, in JAX's persistent compilation cache, and messages about them."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from .._base.extras import require_package
from ._files import parse_json, write_json
from ._messages import logger
from ._processes import is_first

LIMIT = 2**30
"""Bytes that JAX keeps, those of 2,000 training programs or more; it deletes what was not used for the longest time."""
SECONDS = "ppo_parts_compile_seconds.json"
"""File beside the compiled programs: how long compiling took the last time, by the name of the run."""


def keep_compiled_programs() -> None:
    """Let JAX keep compiled programs in the user's cache folder.

    JAX's own variables win: JAX_COMPILATION_CACHE_DIR is another folder, and JAX_ENABLE_COMPILATION_CACHE=0 keeps none.
    A folder that cannot be written is reported, and then nothing is kept. JAX neither keeps programs that call the host
    (environments on the host), nor writes programs in other processes than the first of a distributed run.
    """
    if _folder() is not None or not jax.config.values["jax_enable_compilation_cache"]:
        return
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ppo_parts" / "jax"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # code is loaded from it: nobody else may write there
        with tempfile.TemporaryFile(dir=folder) as probe:  # JAX would warn once for each program
            probe.write(bytes(2**16))
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        logger.warning(
            f"compiled programs are not kept: {error}; XDG_CACHE_HOME is the folder for them, and "
            "JAX_ENABLE_COMPILATION_CACHE=0 keeps none"
        )
        return
    require_package("filelock", "train")  # with which JAX limits the size, and several processes share the folder
    options = {"persistent_cache_min_compile_time_secs": 0.0, "compilation_cache_max_size": LIMIT}
    for name, value in {"compilation_cache_dir": str(folder), **options}.items():
        if f"JAX_{name.upper()}" not in os.environ:
            jax.config.update(f"jax_{name}", value)


@contextlib.contextmanager
def compiling(run: str) -> Iterator[None]:
    """Log that the programs of a run are compiled, with the seconds of the last time; in the end, what it took.

    Args:
        run: what the seconds depend on most, such as the recipe and the environment.
    """
    known = _known_seconds()
    about = f", which takes about {known[run]:.0f} s if the programs are new" if run in known else ""
    logger.info(f"compiling{about}")
    began, before = time.perf_counter(), _saved()[0]
    yield
    took, saved = time.perf_counter() - began, _saved()[0] - before
    logger.info(f"compiled in {took:.1f} s" + f"; programs of earlier runs saved {saved:.0f} s" * (saved >= 1))
    path = _seconds_path()
    if path is not None and is_first():
        with contextlib.suppress(OSError):  # it only informs
            write_json(path, {**_known_seconds(), run: round(took + saved, 1)})


def _known_seconds() -> dict[str, float]:
    path = _seconds_path()
    try:
        return {} if path is None else {str(name): float(x) for name, x in parse_json(path.read_bytes()).items()}
    except (OSError, ValueError, TypeError, AttributeError):  # absent, or not what this module wrote
        return {}


def _folder() -> str | None:
    return jax.config.values["jax_compilation_cache_dir"]


def _seconds_path() -> Path | None:
    folder = _folder()
    return None if folder is None or "://" in folder else Path(folder) / SECONDS


@functools.cache
def _saved() -> list[float]:
    """The seconds of compiling that the cache has saved in this process so far, in a list of one element."""
    total = [0.0]

    def add(event: str, duration_secs: float, **_: str | int) -> None:
        total[0] += duration_secs * (event == "/jax/compilation_cache/compile_time_saved_sec")

    jax.monitoring.register_event_duration_secs_listener(add)
    return total
