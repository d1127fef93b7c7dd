"""Checkpoints: any state as a flat dictionary of named arrays, written by orbax, refused where it does not fit."""

from __future__ import annotations

import logging
import os
import shutil
import warnings
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._extras import require_package


class Checkpoints:
    """Numbered checkpoints of one run in one folder. A checkpoint is complete or absent, whenever the process dies.

    Each carries a checksum, so that one damaged later is noticed.

    Args:
        directory: the folder; made if it is missing.
        keep: how many of the latest to keep; None: all.
        tidy: remove what a process that was killed left half-written; only for the one process that writes here.
    """

    def __init__(self, directory: str | Path, *, keep: int | None = 2, tidy: bool = False) -> None:
        ocp = require_package("orbax.checkpoint", "train")
        logging.getLogger("absl").setLevel(logging.ERROR)
        self._ocp = ocp
        options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False, cleanup_tmp_directories=tidy)
        self._keep = keep
        self.directory = Path(directory).resolve()
        # The item is named, or orbax would guess from the latest folder, which may be a damaged one.
        self._manager = ocp.CheckpointManager(self.directory, options=options, item_names=(ITEM,))

    def steps(self) -> list[int]:
        """Numbers of the complete checkpoints, in order."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, *, best: int | None = None) -> None:
        """Write `state` as checkpoint `step`; on return it is on the disk. Keys and empty arrays are no obstacle.

        Only then the older ones go, but for the latest `keep` and `best`.
        """
        arrays = {name: x for name, x in _named(state).items() if x.size}
        arrays[CHECKSUM] = _checksum(arrays)
        item = {ITEM: self._ocp.args.StandardSave(arrays)}
        self._manager.save(step, args=self._ocp.args.Composite(**item), force=True)
        self._manager.wait_until_finished()
        if self._keep is not None:
            self._remove(old for old in self.steps()[: -self._keep] if old != best)

    def restore(self, like: Any, step: int | None = None) -> tuple[int, Any]:
        """The latest checkpoint that can be read (or `step`), with the structure of `like` (arrays or their shapes).

        A damaged checkpoint is passed over with a warning.

        Raises:
            FileNotFoundError: there is none.
            OSError: none can be read.
            ValueError: it was made by another configuration; the differences are named.
        """
        steps = self.steps()
        if step is not None and step not in steps:
            there = f"there are {', '.join(map(str, steps))}" if steps else "there is none"
            raise FileNotFoundError(f"no checkpoint {step} in {self.directory}: {there}")
        if not steps:
            raise FileNotFoundError(f"no checkpoint in {self.directory}")
        steps = steps if step is None else [step]
        failures = []
        for number in reversed(steps):
            try:
                item = {ITEM: self._ocp.args.StandardRestore()}
                found = dict(self._manager.restore(number, args=self._ocp.args.Composite(**item))[ITEM])
                if not np.array_equal(found.pop(CHECKSUM, None), _checksum(found)):
                    raise ValueError("its contents do not match their checksum")
            except Exception as error:  # a damaged checkpoint must not end a run that has an older one
                failures.append(f"{number}: {' '.join(str(error).split())[:200]}")
                continue
            if failures:
                warnings.warn(
                    f"damaged checkpoint in {self.directory}, going back to {number}; {'; '.join(failures)}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return number, _fitted(like, found, f"{self.directory / str(number)}")
        raise OSError(f"no checkpoint in {self.directory} can be read; {'; '.join(failures)}")

    def drop_after(self, step: int) -> None:
        """Remove the checkpoints later than `step`, which will be made again."""
        self._remove(later for later in self.steps() if later > step)

    def _remove(self, steps: Iterable[int]) -> None:
        for step in sorted(steps, reverse=True):
            partial = self.directory / f"{step}.orbax-checkpoint-tmp"  # what a kill leaves of it is no checkpoint
            os.replace(self.directory / str(step), partial)
            shutil.rmtree(partial)
        self._manager.reload()

    def close(self) -> None:
        """Release the folder."""
        self._manager.close()


ITEM = "state"
CHECKSUM = "checksum of the rest"


def _checksum(arrays: dict[str, Any]) -> np.ndarray:
    total = 0
    for name in sorted(arrays):
        total = zlib.crc32(np.asarray(arrays[name]).tobytes(), zlib.crc32(name.encode(), total))
    return np.asarray(total, np.uint32)


def _is_key(x: Any) -> bool:
    return isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _key(like: Any, data: Any) -> jax.Array:
    implementations: list[Any] = []
    jax.eval_shape(lambda key: implementations.append(jax.random.key_impl(key)), like)  # `like` may be a shape only
    return jax.random.wrap_key_data(data, impl=implementations[0])


def _named(state: Any) -> dict[str, Any]:
    """The leaves as numpy arrays (or their shapes) by name, keys as the numbers they are made of."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): _raw(x) for path, x in leaves}


def _raw(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x
    return np.asarray(jax.random.key_data(x) if _is_key(x) else x)


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
        raise ValueError(f"checkpoint {where} is of another configuration: {'; '.join(differences[:3])}{more}")
    leaves, tree = jax.tree.flatten(like)
    restored = [
        _key(x, found[name]) if _is_key(x) else jnp.asarray(found[name]) for name, x in zip(wanted, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, restored)


def _describe(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"
