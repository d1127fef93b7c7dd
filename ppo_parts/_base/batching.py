"""Functions that `vmap` does not batch: a `lax.cond` of one branch, and calls in sequence on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
Function = Callable[..., Any]


def cond_any(wanted: Array, f: Function, otherwise: Function, *operands: Any) -> Any:
    """Return `f(*operands)` if any element of `wanted` is True, else `otherwise(*operands)`; one branch runs.

    `vmap` turns a `cond` with a batched predicate into a select that runs both branches. Here the predicate is reduced
    over the batch first, so that it remains a `cond`. `f` then also runs for elements whose `wanted` is False: it must
    not change them, unless the caller ignores its results there.
    """
    f, f_constants = closure_converted(f, operands)  # such as an environment's parameter
    otherwise, otherwise_constants = closure_converted(otherwise, operands)
    return _cond_any(f, otherwise, wanted, f_constants, otherwise_constants, *operands)


def _cond_any(f: Function, otherwise: Function, wanted: Array, *operands: Any) -> Any:
    @jax.custom_batching.custom_vmap
    def call(wanted: Array, f_constants: Any, otherwise_constants: Any, *operands: Any) -> Any:
        branches = (lambda *x: f(f_constants, *x)), (lambda *x: otherwise(otherwise_constants, *x))
        return jax.lax.cond(jnp.any(wanted), *branches, *operands)

    @call.def_vmap
    def rule(axis_size: int, in_batched: Any, wanted: Array, *operands: Any) -> tuple[Any, Any]:
        f_axes, otherwise_axes, *axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(in_batched[1:]))
        batched_f = jax.vmap(f, in_axes=(f_axes, *axes), axis_size=axis_size)
        batched_otherwise = jax.vmap(otherwise, in_axes=(otherwise_axes, *axes), axis_size=axis_size)
        result = _cond_any(batched_f, batched_otherwise, wanted, *operands)
        return result, jax.tree.map(lambda _: True, result)

    return call(wanted, *operands)


def sequential_vmap_on_cpu(function: Function) -> Function:
    """Wrap `function` so that `jax.vmap` calls it for one element after another if the backend is a CPU.

    There are two reasons. A single update keeps a core busy: many at once take longer, because their activations fill
    the cache, and none of them can stop early. In addition, a program deadlocks if it factorizes batches of matrices in
    two places at once and they block every thread of the CPU; see docs/decisions/0004-batched-lapack.md.
    """

    def run(*args: Any) -> Any:
        if jax.default_backend() != "cpu":
            return function(*args)
        call, constants = closure_converted(function, args)  # such as a swept learning rate
        return jax.custom_batching.sequential_vmap(call)(constants, *args)

    return run


def closure_converted(f: Function, operands: Any) -> tuple[Function, list[Any]]:
    """Return `f` as a function of the constants that it closes over and of its operands, and these constants.

    What is batched must be an argument of a `custom_vmap`. (`jax.closure_convert` does this for differentiation only.)
    """
    closed, shape = jax.make_jaxpr(f, return_shape=True)(*operands)

    def call(constants: list[Any], *operands: Any) -> Any:
        leaves = jax.core.eval_jaxpr(closed.jaxpr, constants, *jax.tree.leaves(operands))
        return jax.tree.unflatten(jax.tree.structure(shape), leaves)

    return call, list(closed.consts)
