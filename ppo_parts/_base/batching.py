"""Functions that `vmap` does not batch: a `lax.cond` of one branch, and calls in sequence on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
Function = Callable[..., Any]


def cond_any(wanted: Array, f: Function, otherwise: Function, *operands: Any) -> Any:
    """Return `f(*operands)` if any element of `wanted` is True, else `otherwise(*operands)`; only one branch runs.

    `vmap` turns a `cond` with a batched predicate into a select that runs both branches. Here the predicate is reduced
    over the batch first, so that it remains a `cond`. `f` then also runs for elements whose `wanted` is False: it must
    not change them, unless the caller ignores its results there.
    """
    return jax.lax.cond(_any_of_batch(wanted), f, otherwise, *operands)


@jax.custom_batching.custom_vmap
def _any_of_batch(wanted: Array) -> Array:
    return jnp.any(wanted)


@_any_of_batch.def_vmap
def _(axis_size: int, in_batched: Any, wanted: Array) -> tuple[Array, bool]:
    return _any_of_batch(wanted), False  # one answer for the whole batch


def sequential_vmap_on_cpu(function: Function) -> Function:
    """Wrap `function` so that `jax.vmap` calls it for one element after another if the backend is a CPU.

    There are two reasons. A single update keeps a core busy: many at once take longer, because their activations fill
    the cache, and none of them can stop early. In addition, a program deadlocks if it factorizes batches of matrices in
    two places at once and they block every thread of the CPU; see docs/decisions/0004-batched-lapack.md.
    """

    def run(*args: Any) -> Any:
        if jax.default_backend() != "cpu":
            return function(*args)
        # What is batched must be an argument of a `custom_vmap`, also what the function closes over, such as a swept
        # learning rate. (`jax.closure_convert` does this for differentiation only.)
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        call = jax.custom_batching.sequential_vmap(lambda *x: jax.core.eval_jaxpr(closed.jaxpr, *x))
        return jax.tree.unflatten(jax.tree.structure(shape), call(closed.consts, *jax.tree.leaves(args)))

    return run
