"""Checkpoints: orbax writes any state as a flat dictionary of named arrays; states that do not fit are rejected."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import warnings
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base.doors import checked
from .._base.errors import UserError, UserValueError
from .._base.extras import require_package
from .._base.hyperparameters import check_count
from ._errors import RunFolderError, RunNotFoundError
from ._files import sync


class Checkpoints:
    """Numbered checkpoints of one run in one folder. Each is complete or absent, even if the process dies.

    A checkpoint stores its number, the configuration of its run and a checksum, so that one that was damaged, renamed
    or copied from another run is detected. Reading does not change the folder.

    Args:
        directory: the folder; the first `save` creates it if it is missing.
        keep: how many of the latest checkpoints to keep; None: all.
        configuration: a string that identifies the configuration of the run, such as a hash; "": not checked.
    """

    @checked
    def __init__(self, directory: str | Path, *, keep: int | None = 2, configuration: str = "") -> None:
        if keep is not None:
            check_count("Checkpoints", "keep", keep)
        ocp = require_package("orbax.checkpoint", "train")
        self._ocp, self._keep, self._configuration = ocp, keep, configuration
        self.directory = Path(directory).resolve()
        self._manager: Any = None  # created on the first write

    def steps(self) -> list[int]:
        """Return the numbers of the complete checkpoints, in order."""
        try:
            return sorted(int(name) for name in os.listdir(self.directory) if name.isdecimal())
        except FileNotFoundError:
            return []

    def save(self, step: int, state: Any, *, best: int | None = None, note: str = "") -> None:
        """Write `state` as checkpoint `step`; on return it is on the disk. The state may contain keys and empty arrays.

        Afterwards older checkpoints are removed, except for the latest `keep` and `best`. If the disk is full, they are
        removed first; the latest one always stays. `note` is any text, which `restore_with_note` returns.

        Raises:
            RunFolderError: the checkpoint could not be written; the older ones that were not removed are intact.
        """
        check_count("Checkpoints.save", "step", step, 0)
        arrays = {name: x for name, x in _named(state).items() if x.size}
        arrays[NUMBER] = np.asarray(step, np.int64)
        arrays[CONFIGURATION] = _as_array(f"configuration {self._configuration}")
        arrays |= {NOTE: _as_array(note)} if note else {}
        arrays[CHECKSUM] = _checksum(arrays)
        try:
            with _quietly():
                self._write(step, arrays)
        except Exception as error:  # orbax and tensorstore raise their own errors for a full disk
            self._discard_partial()
            surplus = [] if self._keep is None else self._surplus(max(1, self._keep - 1), best)
            if not surplus or not _is_full(error):
                raise RunFolderError(f"{self.directory / str(step)} could not be written: {_short(error)}") from error
            self._remove(surplus)
            return self.save(step, state, best=best, note=note)
        if self._keep is not None:
            self._remove(self._surplus(self._keep, best))

    def restore(self, like: Any, step: int | None = None) -> tuple[int, Any]:
        """Return the number and the state of the latest readable checkpoint (or of `step`); `like` has its structure.

        `like` is a pytree of arrays or of their shapes and dtypes.

        A checkpoint that is damaged, or that does not match its name, is skipped with a warning. One that disappears
        during the call, because another process writes to the folder, is skipped without a warning.

        Raises:
            RunNotFoundError: there is no checkpoint.
            RunFolderError: no checkpoint can be read.
            ValueError: it was made with another configuration; the message names the differences.
        """
        return self.restore_with_note(like, step)[:2]

    def restore_with_note(self, like: Any, step: int | None = None) -> tuple[int, Any, str]:
        """Return the number, the state and the note of a checkpoint; see `restore`."""
        steps = self.steps()
        if step is not None and step not in steps:
            there = f"there are {', '.join(map(str, steps))}" if steps else "there is none"
            raise RunNotFoundError(f"no checkpoint {step} in {self.directory}: {there}")
        if not steps:
            raise RunNotFoundError(f"no checkpoint in {self.directory}")
        failures = []
        for number in reversed(steps if step is None else [step]):
            try:
                with _quietly():
                    found = self._read(number)
            except Exception as error:  # a damaged checkpoint must not end a run that has an older one
                if (self.directory / str(number)).is_dir():
                    failures.append(f"{number}: {_why_unreadable(error)}")
                continue
            if failures:
                warnings.warn(
                    f"damaged checkpoint in {self.directory}, going back to {number}; {'; '.join(failures)}",
                    RuntimeWarning,
                    stacklevel=3,
                )
            note = bytes(found.pop(NOTE, b"")).decode()
            return number, _fitted(like, found, f"{self.directory / str(number)}"), note
        raise RunFolderError(f"no checkpoint in {self.directory} can be read; {'; '.join(failures)}")

    def set_aside(self, step: int, place: Path) -> None:
        """Move a checkpoint to `place`."""
        os.rename(self.directory / str(step), place)
        self._reload()

    def close(self) -> None:
        """Release the folder."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def _write(self, step: int, arrays: dict[str, Any]) -> None:
        if self._manager is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            options = self._ocp.CheckpointManagerOptions(
                enable_async_checkpointing=False, cleanup_tmp_directories=True, **self._alone(create=False)
            )
            # Without a name for the item, orbax would guess it from the latest folder, which may be damaged.
            self._manager = self._ocp.CheckpointManager(self.directory, options=options, item_names=(ITEM,))
        item = {ITEM: self._ocp.args.StandardSave(arrays)}
        self._manager.save(step, args=self._ocp.args.Composite(**item), force=True)
        self._manager.wait_until_finished()
        _sync_all(self.directory / str(step))
        sync(self.directory)

    def _read(self, number: int) -> dict[str, Any]:
        with self._ocp.StandardCheckpointer(**self._alone()) as reader:
            found = dict(reader.restore(self.directory / str(number) / ITEM))
        checksum, found = found.pop(CHECKSUM, None), {name: np.asarray(x) for name, x in found.items()}
        if not np.array_equal(checksum, _checksum(found)):
            raise UserValueError("its contents do not match their checksum")
        stored, configuration = found.pop(NUMBER, None), found.pop(CONFIGURATION, None)
        if stored != number:
            raise UserValueError(f"it was renamed or copied: it is checkpoint {stored}")
        if self._configuration and not np.array_equal(configuration, _as_array(f"configuration {self._configuration}")):
            raise UserValueError("it is of a run with another configuration than config.json says")
        return found

    def _alone(self, **more: Any) -> dict[str, Any]:
        """Return options with which orbax does not wait for other processes; with several processes, add `more`."""
        if jax.process_count() == 1:
            return {}
        this = jax.process_index()
        options = self._ocp.options.MultiprocessingOptions(primary_host=this, active_processes={this})
        return {"multiprocessing_options": options, **more}

    def _surplus(self, keep: int, best: int | None) -> list[int]:
        return [old for old in self.steps()[:-keep] if old != best]

    def _remove(self, steps: Iterable[int]) -> None:
        for step in sorted(steps, reverse=True):
            partial = self.directory / f"{step}{PARTIAL}"  # renamed first, so that a kill leaves no broken checkpoint
            os.replace(self.directory / str(step), partial)
            shutil.rmtree(partial)
        self._reload()

    def _discard_partial(self) -> None:
        with contextlib.suppress(Exception):
            self.close()
        with contextlib.suppress(OSError):
            for partial in self.directory.glob(f"*{PARTIAL}*"):
                shutil.rmtree(partial, ignore_errors=True)

    def _reload(self) -> None:
        if self._manager is not None:
            self._manager.reload()


ITEM = "state"
PARTIAL = ".orbax-checkpoint-tmp"
NUMBER, CONFIGURATION, CHECKSUM = "number of the checkpoint", "configuration of the run", "checksum of the rest"
NOTE = "note"


def _as_array(word: str) -> np.ndarray:
    return np.frombuffer(word.encode(), np.uint8)


def _checksum(arrays: dict[str, Any]) -> np.ndarray:
    total = 0
    for name in sorted(arrays):
        total = zlib.crc32(np.asarray(arrays[name]).tobytes(), zlib.crc32(name.encode(), total))
    return np.asarray(total, np.uint32)


def _short(error: Exception) -> str:
    if _is_full(error):
        return "No space left on device"
    return " ".join(str(error).split())[:200]


def _why_unreadable(error: Exception) -> str:
    """Return why a checkpoint was not read; of the messages of orbax and tensorstore, only the kind."""
    if isinstance(error, UserError) or getattr(error, "errno", None):
        return str(error)
    return f"a file in it is missing or damaged ({type(error).__name__})"


def _is_full(error: Exception) -> bool:
    return any(words in str(error) for words in ("No space left", "quota exceeded", "RESOURCE_EXHAUSTED"))


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep orbax from logging what it does, and the errors that it also raises.

    After an error its threads call back into event loops that are closed, and Python prints a traceback for each. They
    do so later, too, so that the filter stays.
    """
    log, hook = logging.getLogger("absl"), sys.unraisablehook
    level = log.level

    def filtered(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    log.setLevel(logging.CRITICAL)
    sys.unraisablehook = filtered
    try:
        yield
        sys.unraisablehook = hook
    finally:
        log.setLevel(level)


def _sync_all(folder: Path) -> None:
    for place, _, files in os.walk(folder):
        for name in files:
            sync(Path(place) / name)
        sync(Path(place))


def is_key(x: Any) -> bool:
    """Return whether an array, or the shape of one, contains PRNG keys."""
    return isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def as_key(like: Any, data: Any) -> jax.Array:
    """Return the keys of this data, of the kind of `like`, which may be a shape."""
    implementations: list[Any] = []
    jax.eval_shape(lambda key: implementations.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(data, impl=implementations[0])


def raw(tree: Any) -> Any:
    """Replace keys by their data, which NumPy can store; a tree of shapes becomes a tree of shapes."""

    def of_leaf(x: Any) -> Any:
        if not is_key(x):
            return x
        return jax.random.key_data(x) if isinstance(x, jax.Array) else jax.eval_shape(jax.random.key_data, x)

    return jax.tree.map(of_leaf, tree)


def _named(state: Any) -> dict[str, Any]:
    """Return the leaves as NumPy arrays (or their shapes) by name, and PRNG keys as their key data."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(raw(state))
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): (
            x if isinstance(x, jax.ShapeDtypeStruct) else np.asarray(x)
        )
        for path, x in leaves
    }


def _fitted(like: Any, found: dict[str, Any], where: str) -> Any:
    wanted = _named(like)
    found = {**{name: np.zeros(x.shape, x.dtype) for name, x in wanted.items() if not x.size}, **found}  # not stored
    differences = [f"{name} is missing" for name in wanted if name not in found]
    differences += [f"{name} is not expected" for name in found if name not in wanted]
    differences += [
        f"{name} has {_describe(found[name])}, expected {_describe(x)}"
        for name, x in wanted.items()
        if name in found and _describe(found[name]) != _describe(x)
    ]
    if differences:
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise UserValueError(f"checkpoint {where} is of another configuration: {'; '.join(differences[:3])}{more}")
    leaves, tree = jax.tree.flatten(like)
    restored = [
        as_key(x, found[name]) if is_key(x) else jnp.asarray(found[name])
        for name, x in zip(wanted, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, restored)


def _describe(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"
