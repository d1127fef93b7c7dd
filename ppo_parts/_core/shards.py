"""Shards, equal blocks of neighboring segments that samplers do not mix, so that each can stay on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import UserValueError
from ..functional._arguments import is_whole
from .batch import Array, Batch, field_axes


def split(x: Array, shards: int, axis: int) -> Array:
    """Divide `axis` into two axes, shards and positions within a shard; `jax.lax.collapse` merges them again."""
    return x.reshape((*x.shape[:axis], shards, x.shape[axis] // shards, *x.shape[axis + 1 :]))


def join_shards(tree: Any, axis: int) -> Any:
    """Join the results of several shards, leaves `[shards, ...]`, along `axis`."""
    return jax.tree.map(lambda x: jax.lax.collapse(jnp.moveaxis(x, 0, axis), axis, axis + 2), tree)


def beside(x: Array, shards: int, axis: int) -> Array:
    """Merge the axis k of `[k, ..., N, ...]` into the segment axis, within each shard."""
    return jax.lax.collapse(jnp.moveaxis(split(x, shards, axis + 1), 0, axis + 1), axis, axis + 3)


def split_fields(batch: Batch, pieces: int) -> dict[str, Any]:
    """Divide the segment or step axis of each field into two axes, pieces and positions within a piece."""
    return {
        name: jax.tree.map(lambda x, axis=axis: split(x, pieces, axis), getattr(batch, name))
        for name, axis in field_axes(batch).items()
    }


def check_shards(where: str, shards: int, what: str, size: int) -> None:
    """Raise unless the number of shards is positive and divides the number of segments."""
    if not is_whole(shards) or shards < 1 or size % shards:
        raise UserValueError(
            f"{where}: shards={shards!r} must be an integer that divides {what} = {size}: shards are equal blocks "
            "of neighboring segments"
        )


def replicate(x: Array) -> Array:
    """Replicate `x` `[shards, ...]`, a few numbers for each shard, on every device.

    This is computed as a sum of each shard's row, padded with zeros, because XLA combines sums into one operation.
    """
    own = jnp.eye(len(x), dtype=bool).reshape(len(x), len(x), *(1 for _ in x.shape[1:]))
    return jnp.sum(jnp.where(own, x, 0), axis=1)


def map_shards(f: Callable[..., Any], batch: Batch, *each: Any) -> Any:
    """Compute `f(batch, *each)` for every shard, with `vmap`; leaves of `each` and the result begin with `[shards]`.

    Every call receives the segments of one shard as a batch with one shard.
    """
    axes = field_axes(batch)
    fields = split_fields(batch, batch.shards)

    def one(fields: dict[str, Any], *each: Any) -> Any:
        return f(batch.replace(**fields, shards=1), *each)

    return jax.vmap(one, in_axes=(axes, *(0 for _ in each)))(fields, *each)
