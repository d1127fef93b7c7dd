"""Operations on pytrees that JAX lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import UserValueError
from ..functional._common import Array, unsqueeze


def is_key(x: Any) -> bool:
    """Return whether a leaf (an array or its shape) consists of PRNG keys."""
    return jnp.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key)


def to_data(x: Any) -> Any:
    """Return the integers of PRNG keys, and other leaves unchanged."""
    return jax.random.key_data(x) if is_key(x) else x


def from_data(x: Any, like: Any) -> Any:
    """Return PRNG keys with the data `x` if `like` (an array or its shape) consists of keys, otherwise `x`."""
    kinds: list[Any] = []
    if is_key(like):
        jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(x, impl=kinds[0]) if kinds else x


def without_weak_types(tree: Any) -> Any:
    """Remove weak types (for example of Python numbers) from a tree, because they would change between calls."""
    return jax.tree.map(lambda x: x if is_key(x) else jax.lax.convert_element_type(x, jnp.result_type(x)), tree)


def select(condition: Array, new: Any, old: Any) -> Any:
    """Return the leaves of `new` where a condition holds, one for all or `[N]` for leaves `[N, ...]`; else of `old`."""
    return jax.tree.map(lambda x, y: jnp.where(unsqueeze(condition, jnp.ndim(y)), x, y), new, old)


def shapes_of(tree: Any) -> Any:
    """Return a tree with the dtype and the shape of each leaf as text, such as "float32[2]", or else its repr."""

    def of_leaf(x: Any) -> str:
        is_array = hasattr(x, "dtype") or isinstance(x, (bool, int, float))
        return f"{x.dtype if is_key(x) else jnp.result_type(x)}{list(jnp.shape(x))}" if is_array else repr(x)

    return jax.tree.map(of_leaf, tree)


def are_alike(tree: Any, other: Any) -> bool:
    """Return whether two trees have the same structure, shapes and dtypes; nodes need no `==`."""
    return bool(jax.tree.flatten(shapes_of(tree)) == jax.tree.flatten(shapes_of(other)))


def varying_like(tree: Any, like: Any) -> Any:
    """Inside `jax.shard_map`, mark the arrays of a tree as varying over the same devices as `like`.

    Inside `shard_map`, a loop must not turn a carry that all devices share into one that differs between them. A zero
    that is computed from `like` is added to each array, because on several devices without `shard_map`, this also lets
    XLA divide a state that was replicated. `jax.lax.pcast` would not, and `replay` would gather rollouts.
    """
    if not hasattr(jax, "typeof"):  # before JAX 0.6, types do not record this
        return tree
    zero = jnp.sum(jnp.zeros_like(like, jnp.int32))
    if jax.typeof(zero) == jax.typeof(jnp.zeros((), jnp.int32)):
        return tree

    def varying(x: Any) -> Any:
        data = to_data(x)
        return from_data(data | zero.astype(bool) if data.dtype == bool else data + zero.astype(data.dtype), x)

    return jax.tree.map(lambda x: varying(jnp.asarray(x)), tree)


def has_explicit_axes(x: Any) -> bool:
    """Return whether an array is sharded over a mesh with explicit axes."""
    sharding = getattr(jax.typeof(x), "sharding", None) if hasattr(jax, "typeof") else None
    return sharding is not None and hasattr(jax.sharding, "auto_axes") and any(a is not None for a in sharding.spec)


def on_automatic_mesh(f: Callable[..., Any], like: Any) -> Callable[..., Any]:
    """Let XLA choose the shardings inside `f` if the array `like` is sharded over a mesh with explicit axes.

    On such a mesh, JAX does not infer the sharding of rows that are gathered from an array. The results of `f` are then
    replicated on each device.
    """
    if not has_explicit_axes(like):
        return f
    whole = jax.sharding.NamedSharding(jax.typeof(like).sharding.mesh, jax.sharding.PartitionSpec())
    return jax.sharding.auto_axes(f, out_sharding=whole)


def axis_sharding(where: str, mesh: jax.sharding.Mesh, shards: int) -> Callable[[int | None], Any]:
    """Return `sharding(axis)`, which divides an axis of an array over all devices of a mesh; None replicates it.

    The axes of the mesh become automatic, so that no function needs to state the shardings of its results.
    """
    if shards % mesh.size:
        raise UserValueError(
            f"{where}: shards={shards} cannot be divided over a mesh of {mesh.size} devices: samplers mix the segments "
            f"of a shard, so a device must hold whole shards; make shards {mesh.size} or a multiple of it"
        )
    kinds = getattr(jax.sharding, "AxisType", None)
    automatic = {} if kinds is None else {"axis_types": (kinds.Auto,) * len(mesh.axis_names)}
    mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, **automatic)

    def sharding(axis: int | None) -> Any:
        spec = () if axis is None else (*(None,) * axis, mesh.axis_names)
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

    return sharding
