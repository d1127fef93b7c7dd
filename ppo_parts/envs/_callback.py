"""Callbacks on NumPy arrays from compiled programs, faster than `jax.pure_callback` on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from ._env import Array

Shapes = tuple[jax.ShapeDtypeStruct, ...]


def numpy_callback(function: Callable[..., Any], shapes: Any, *args: Array) -> Any:
    """Compute `jax.pure_callback(function, shapes, *args, vmap_method="broadcast_all")`, faster on a CPU.

    That function, which this calls on other devices and in programs for several devices, first converts its arguments
    to JAX arrays on the host: with two arguments and three results, a call took 134 us, and 13 us without. The function
    must not keep the NumPy arrays that it receives, or write to them.
    """
    leaves, structure = jax.tree.flatten(shapes)

    def flat(*args: Any) -> list[Any]:
        try:
            return jax.tree.leaves(function(*(np.asarray(x) for x in args)))
        except BaseException as error:
            _raised[:] = [error]
            raise

    return jax.tree.unflatten(structure, _numpy_callback.bind(*args, function=flat, shapes=tuple(leaves)))


_raised: list[BaseException] = []  # the latest error of a function, which XLA reports as text only


@contextlib.contextmanager
def host_errors() -> Iterator[None]:
    """Raise the original error of an environment on the host, instead of XLA's report of it."""
    try:
        yield
    except Exception as error:
        # It may be another error, as of an environment that steps in another thread.
        if not _raised or _raised[0] is error or str(_raised[0]) not in str(error):
            raise
        raise _raised.pop() from None


_numpy_callback = Primitive("numpy_callback")
_numpy_callback.multiple_results = True


@_numpy_callback.def_impl
def _run(*args: Array, function: Callable[..., Any], shapes: Shapes) -> list[Array]:
    return [jnp.asarray(x) for x in function(*args)]


@_numpy_callback.def_abstract_eval
def _abstract(*args: Any, function: Callable[..., Any], shapes: Shapes) -> list[Any]:
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in shapes]


def _batch(args: Sequence[Array], axes: Sequence[Any], *, function: Callable[..., Any], shapes: Shapes) -> Any:
    count = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    moved = [batching.bdim_at_front(x, axis, count) for x, axis in zip(args, axes, strict=True)]
    batched = tuple(jax.ShapeDtypeStruct((count, *x.shape), x.dtype) for x in shapes)
    return _numpy_callback.bind(*moved, function=function, shapes=batched), [0] * len(shapes)


def _pure_callback(*args: Array, function: Callable[..., Any], shapes: Shapes) -> Any:
    return jax.pure_callback(function, list(shapes), *args, vmap_method="broadcast_all")


_lower_pure_callback = mlir.lower_fun(_pure_callback, multiple_results=True)


def _lower_on_cpu(ctx: Any, *args: Any, function: Callable[..., Any], shapes: Shapes) -> Any:
    if getattr(ctx.module_context.axis_context, "num_devices", None) != 1:
        return _lower_pure_callback(ctx, *args, function=function, shapes=shapes)
    avals = ctx.avals_in, ctx.avals_out
    return mlir.emit_python_callback(ctx, function, None, list(args), *avals, has_side_effect=False)[0]


batching.primitive_batchers[_numpy_callback] = _batch
mlir.register_lowering(_numpy_callback, _lower_pure_callback)
mlir.register_lowering(_numpy_callback, _lower_on_cpu, platform="cpu")
