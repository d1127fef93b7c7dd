"""A `lax.cond` that `vmap` does not turn into a select of both branches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


def cond_any(wanted: Array, f: Callable[..., Any], otherwise: Callable[..., Any], *operands: Any) -> Any:
    """Return `f(*operands)` if any element of `wanted` is True, else `otherwise(*operands)`; one branch runs.

    `vmap` turns a `cond` with a batched predicate into a select that runs both branches. Here the predicate is reduced
    over the batch first, so that it remains a `cond`. `f` then also runs for elements whose `wanted` is False: it must
    not change them, unless the caller ignores its results there.
    """

    @jax.custom_batching.custom_vmap
    def call(wanted: Array, *operands: Any) -> Any:
        return jax.lax.cond(jnp.any(wanted), f, otherwise, *operands)

    @call.def_vmap
    def rule(axis_size: int, in_batched: Any, wanted: Array, *operands: Any) -> tuple[Any, Any]:
        axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(in_batched[1:]))
        branches = (jax.vmap(branch, in_axes=axes, axis_size=axis_size) for branch in (f, otherwise))
        result = cond_any(wanted, *branches, *operands)
        return result, jax.tree.map(lambda _: True, result)

    return call(wanted, *operands)
