"""A `lax.cond` that `vmap` does not turn into a select of both branches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
Branch = Callable[..., Any]


def cond_any(wanted: Array, f: Branch, otherwise: Branch, *operands: Any) -> Any:
    """Return `f(*operands)` if any element of `wanted` is True, else `otherwise(*operands)`; one branch runs.

    `vmap` turns a `cond` with a batched predicate into a select that runs both branches. Here the predicate is reduced
    over the batch first, so that it remains a `cond`. `f` then also runs for elements whose `wanted` is False: it must
    not change them, unless the caller ignores its results there.
    """

    # `custom_vmap` must be given what the branches close over, which may be batched: an environment's parameter, say.
    f, f_constants = hoisted(f, operands)
    otherwise, otherwise_constants = hoisted(otherwise, operands)
    return _cond_any(f, otherwise, wanted, f_constants, otherwise_constants, *operands)


def _cond_any(f: Branch, otherwise: Branch, wanted: Array, *operands: Any) -> Any:
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


def hoisted(f: Branch, operands: Any) -> tuple[Branch, list[Any]]:
    """Return `f` as a function of the constants that it closes over and of its operands, and these constants."""
    closed, shape = jax.make_jaxpr(f, return_shape=True)(*operands)

    def call(constants: list[Any], *operands: Any) -> Any:
        leaves = jax.core.eval_jaxpr(closed.jaxpr, constants, *jax.tree.leaves(operands))
        return jax.tree.unflatten(jax.tree.structure(shape), leaves)

    return call, list(closed.consts)
