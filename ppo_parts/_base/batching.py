"""Functions that `vmap` does not batch: a `lax.cond` that runs one branch, and sequential calls on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
Function = Callable[..., Any]


def cond_any(wanted: Array, f: Function, otherwise: Function, *operands: Any) -> Any:
    """Return `f(*operands)` if any element of `wanted` is True, else `otherwise(*operands)`; only one branch runs.

    `vmap` turns a `cond` with a batched predicate into a select that runs both branches. Here the predicate is first
    reduced over the batch, so that it remains a `cond`. `f` then also runs for elements whose `wanted` is False, so it
    must not change them unless the caller ignores its results there.
    """
    return jax.lax.cond(_any_of_batch(wanted), f, otherwise, *operands)


@jax.custom_batching.custom_vmap
def _any_of_batch(wanted: Array) -> Array:
    return jnp.any(wanted)


@_any_of_batch.def_vmap
def _(axis_size: int, in_batched: Any, wanted: Array) -> tuple[Array, bool]:
    return _any_of_batch(wanted), False  # one answer for the whole batch


def sequential_vmap_on_cpu(function: Function) -> Function:
    """Wrap `function` so that on a CPU, `jax.vmap` calls it for one element after another.

    There are two reasons. A single update keeps a core busy, and many updates at once take longer, because their
    activations fill the cache and none of them can stop early. In addition, a program that factorizes batches of
    matrices deadlocks if these calls block all threads at once; see docs/decisions/0004-batched-lapack.md.
    """

    def run(*args: Any) -> Any:
        if jax.default_backend() != "cpu":
            return function(*args)
        # All batched values must be arguments of a `custom_vmap`, including values over which the function closes, such
        # as a swept learning rate. (`jax.closure_convert` does this only for differentiation.)
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        call = jax.custom_batching.sequential_vmap(lambda *x: jax.core.eval_jaxpr(closed.jaxpr, *x))
        return jax.tree.unflatten(jax.tree.structure(shape), call(closed.consts, *jax.tree.leaves(args)))

    return run
