"""Operations on pytrees that JAX does not have."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def without_weak_types(tree: Any) -> Any:
    """The tree without weak types (a Python number in a state has one), which would change from call to call."""

    def strengthened(x: Any) -> Any:
        dtype = jnp.result_type(x)
        return x if jnp.issubdtype(dtype, jax.dtypes.prng_key) else jax.lax.convert_element_type(x, dtype)

    return jax.tree.map(strengthened, tree)


def varying_like(tree: Any, like: Any) -> Any:
    """The tree as arrays that vary over the devices over which the array `like` does, inside `jax.shard_map`.

    A loop in there must not turn a carry that all devices share into one that differs between them. Elsewhere nothing
    is changed.
    """
    if not hasattr(jax, "typeof"):  # before JAX 0.6 there is nothing to distinguish
        return tree
    zero = jnp.sum(jnp.zeros_like(like, jnp.int32))
    if jax.typeof(zero) == jax.typeof(jnp.zeros((), jnp.int32)):
        return tree

    def varying(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(varying(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        return x | zero.astype(bool) if x.dtype == bool else x + zero.astype(x.dtype)

    return jax.tree.map(lambda x: varying(jnp.asarray(x)), tree)


def gathered(tree: Any) -> Any:
    """The tree with arrays that are sharded over an explicit mesh gathered on each of its devices.

    JAX refuses to guess the sharding of rows that are picked from such an array. Gathering costs time, never numbers.
    """

    def whole(x: Any) -> Any:
        sharding = getattr(jax.typeof(x), "sharding", None)
        if sharding is None or all(axis is None for axis in sharding.spec):
            return x
        spec = jax.sharding.PartitionSpec(*(None,) * x.ndim)
        return jax.sharding.reshard(x, jax.sharding.NamedSharding(sharding.mesh, spec))

    return jax.tree.map(whole, tree) if hasattr(jax, "typeof") else tree
