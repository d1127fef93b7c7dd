"""Checkpoints, which orbax writes as a flat dictionary of named arrays; states that do not fit are rejected."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base.checked import Count, checked
from .._base.extras import require_package
from .._base.hyperparameters import check_count
from .._base.trees import from_data, to_data
from ..errors import UserError, UserValueError
from ._files import RunFolderError, RunNotFoundError

CHECKSUM = "checksum of the rest"
PARTIAL = ".orbax-checkpoint-tmp"
"""Part of the names of folders that are incomplete or being removed."""


class Checkpoints:
    """Numbered checkpoints in one folder; `save` keeps the latest `keep` of them (None means all).

    A checkpoint is complete or absent, even if the process dies, and a checksum in it detects damage.
    """

    @checked
    def __init__(self, directory: str | Path, *, keep: Count | None = 2) -> None:
        self._ocp, self._keep = require_package("orbax.checkpoint", "train"), keep
        self.directory = Path(directory).resolve()

    def steps(self) -> list[int]:
        """Return the numbers of the complete checkpoints, in order."""
        return sorted(int(path.name) for path in self.directory.glob("*") if path.name.isdecimal())

    def save(self, step: int, state: Any, *, best: int | None = None) -> None:
        """Write a tree of arrays and keys as checkpoint `step`; remove older ones except the latest and `best`.

        Raises:
            RunFolderError: if the checkpoint could not be written; older ones are intact.
            ValueError: if a leaf is neither an array nor a key.
        """
        check_count("Checkpoints.save", "step", step, 0)
        arrays = {name: x for name, x in _name_leaves(state).items() if x.size}
        arrays[CHECKSUM] = _compute_checksum(arrays)
        path = self.directory / str(step)
        try:
            with self._open_checkpointer() as writer:
                writer.save(path, arrays, force=True)
        except Exception as error:  # orbax and tensorstore have their own errors, for example for a full disk
            raise RunFolderError(f"{path} could not be written: {' '.join(str(error).split())[:200]}") from error
        finally:
            for partial in self.directory.glob(f"*{PARTIAL}*"):
                shutil.rmtree(partial, ignore_errors=True)
        steps = self.steps()
        if later := [x for x in steps if x > step]:
            says = f"{self.directory} has checkpoints later than {step}, {later}, which restore would prefer"
            warnings.warn(f"{says}: save to another folder", RuntimeWarning, stacklevel=2)
        for old in [] if self._keep is None else steps[: len(steps) - len(later)][: -self._keep]:
            if old != best:  # rename first, so that a kill leaves no broken checkpoint
                partial = self.directory / f"{old}{PARTIAL}"
                os.replace(self.directory / str(old), partial)
                shutil.rmtree(partial)

    def restore(self, like: Any, step: int | None = None) -> tuple[int, Any]:
        """Return the number and the state of the latest readable checkpoint (or of `step`).

        `like` is a tree of arrays, or of their shapes and dtypes, with the structure of the state. Damaged checkpoints
        are skipped with a warning; checkpoints that another process removes meanwhile are skipped silently.

        Raises:
            RunNotFoundError: if there is no checkpoint.
            RunFolderError: if no checkpoint can be read.
            ValueError: if it was made with another configuration; the message names the differences.
        """
        steps = self.steps()
        if not steps or step not in (None, *steps):
            there = f"there are {', '.join(map(str, steps))}" if steps else "there is none"
            raise RunNotFoundError(f"no checkpoint {'' if step is None else f'{step} '}in {self.directory}: {there}")
        failures = []
        for number in reversed(steps if step is None else [step]):
            try:
                found = self._read(number)
            except Exception as error:  # a damaged checkpoint must not end a run that has an older one
                if (self.directory / str(number)).is_dir():
                    damage = f"a file in it is missing or damaged ({type(error).__name__})"
                    failures.append(f"{number}: {error if isinstance(error, UserError) else damage}")
                continue
            if failures:
                message = f"damaged checkpoint in {self.directory}, going back to {number}; {'; '.join(failures)}"
                warnings.warn(message, RuntimeWarning, stacklevel=3)
            return number, _fit(like, found, f"{self.directory / str(number)}")
        raise RunFolderError(f"no checkpoint in {self.directory} can be read; {'; '.join(failures)}")

    def _read(self, number: int) -> dict[str, Any]:
        with self._open_checkpointer() as reader:
            found = {name: np.asarray(x) for name, x in reader.restore(self.directory / str(number)).items()}
        if found.pop(CHECKSUM, None) != _compute_checksum(found):
            raise UserValueError("its contents do not match their checksum")
        return found

    @contextlib.contextmanager
    def _open_checkpointer(self) -> Iterator[Any]:
        """Yield an orbax checkpointer that waits for no other process and does not log the errors that it raises."""
        this, log = jax.process_index(), logging.getLogger("absl")
        alone = self._ocp.options.MultiprocessingOptions(primary_host=this, active_processes={this})
        level = log.level
        log.setLevel(logging.CRITICAL)
        try:
            with self._ocp.StandardCheckpointer(multiprocessing_options=alone) as checkpointer:
                yield checkpointer
                checkpointer.wait_until_finished()
        finally:
            log.setLevel(level)


def _compute_checksum(arrays: dict[str, Any]) -> np.ndarray:
    total = 0
    for name in sorted(arrays):
        total = zlib.crc32(np.asarray(arrays[name]).tobytes(), zlib.crc32(name.encode(), total))
    return np.asarray(total, np.uint32)


def _name_leaves(state: Any) -> dict[str, Any]:
    """Return the leaves as NumPy arrays (or their shapes) by name, and PRNG keys as their key data."""
    named: dict[str, Any] = {}
    for path, x in jax.tree.leaves_with_path(state):
        x = jax.eval_shape(to_data, x) if isinstance(x, jax.ShapeDtypeStruct) else np.asarray(to_data(x))
        if (name := jax.tree_util.keystr(path, simple=True, separator=".") or "array") in named:
            where = jax.tree_util.keystr(path)
            raise UserValueError(f"a checkpoint would have two arrays named {name!r}: rename the entry {where}")
        if not isinstance(x, jax.ShapeDtypeStruct) and x.dtype.kind in "OSU":
            raise UserValueError(f"a checkpoint has arrays and keys, but its entry {name!r} is {x!r}: leave it out")
        named[name] = x
    return named


def _fit(like: Any, found: dict[str, Any], where: str) -> Any:
    """Return the arrays in the structure of `like`; raise if their names, shapes or dtypes differ from it."""
    wanted = _name_leaves(like)
    found = {**{name: np.zeros(x.shape, x.dtype) for name, x in wanted.items() if not x.size}, **found}  # not stored
    has, expected = ({name: f"{x.dtype}{list(x.shape)}" for name, x in arrays.items()} for arrays in (found, wanted))
    differences = [f"{name} is missing" for name in wanted if name not in found]
    differences += [f"{name} is not expected" for name in found if name not in wanted]
    differences += [f"{name} has {has[name]}, expected {x}" for name, x in expected.items() if has.get(name, x) != x]
    if differences:
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise UserValueError(f"checkpoint {where} is of another configuration: {'; '.join(differences[:3])}{more}")
    leaves, tree = jax.tree.flatten(like)
    stored = [found[name] for name in wanted]
    # Without x64, JAX would cast arrays of 64 bits, so these stay NumPy arrays.
    arrays = [jnp.asarray(x) if jax.dtypes.canonicalize_dtype(x.dtype) == x.dtype else x for x in stored]
    return jax.tree.unflatten(tree, map(from_data, arrays, leaves))
