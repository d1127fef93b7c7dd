"""The moments of normalizing wrappers, which several shards update separately during a rollout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._base.moments import Moments, merge_shards
from .._core.batch import Array
from .._core.shards import split


class ShardMoments(NamedTuple):
    """Moments during a rollout of several shards, each of which sees only its own rows, so that devices do not wait.

    Attributes:
        before: the moments of all rows before this rollout.
        since: `[shards, ...]`, those of the rows that each shard has seen since.
    """

    before: Moments
    since: Moments

    @staticmethod
    def of(moments: Moments, shards: int) -> ShardMoments:
        """Moments at the beginning of a rollout."""
        empty = Moments.of(moments.mean)._replace(seen=jnp.zeros_like(moments.seen))
        return ShardMoments(moments, Moments(*(jnp.broadcast_to(x, (shards, *x.shape)) for x in empty)))

    def updated(self, x: Array, present: Array | None = None) -> ShardMoments:
        """Return the moments after appending the rows of `x`, `[N, ...]`, to the streams of their shards."""
        rows = jax.tree.map(lambda leaf: split(leaf, len(self.since.seen), 0), (x, present))
        return self._replace(since=jax.vmap(Moments.updated)(self.since, *rows))

    def of_rows(self, number: int) -> Moments:
        """Return for each of `number` rows the moments that its shard has seen, `[number, ...]`."""
        each = jax.vmap(Moments.appended, (None, 0))(self.before, self.since)
        return jax.tree.map(lambda x: jnp.repeat(x, number // len(x), axis=0), each)

    def whole(self) -> Moments:
        """Return the moments of all rows at the end of a rollout, in which the shards are merged."""
        return self.before.appended(merge_shards(self.since))


class NormalizedState(NamedTuple):
    """State of a normalizing wrapper: the state of the inner environment, and running moments."""

    inner: Any
    moments: Any
    running_return: Any = None


def map_moments(f: Callable[[Any], Any], env_state: Any) -> Any:
    """Change the moments of every normalizing wrapper in the state of an environment."""

    def of_wrapper(x: Any) -> Any:
        return x._replace(inner=map_moments(f, x.inner), moments=f(x.moments)) if isinstance(x, NormalizedState) else x

    return jax.tree.map(of_wrapper, env_state, is_leaf=lambda x: isinstance(x, NormalizedState))
