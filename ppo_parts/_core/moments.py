"""Running moments of normalizing wrappers, which several shards update separately during a rollout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._base.trees import select
from ..functional._common import unsqueezed
from .shards import split
from .types import Array


class Moments(NamedTuple):
    """Running mean and (population) variance of a stream, and the number of elements so far.

    `seen` has no axes, or, for the separate streams of A agents, `[A, 1, ...]`, with as many axes as `mean`.
    """

    mean: Array
    var: Array
    seen: Array

    @staticmethod
    def of(example: Array, per_agent: bool = False) -> Moments:
        """Moments of an empty stream: mean 0, variance 1; `per_agent`: of one stream for each row of the example."""
        shape = jnp.shape(example)
        streams = (shape[0], *(1 for _ in shape[1:])) if per_agent else ()
        return Moments(jnp.zeros(shape), jnp.ones(shape), jnp.zeros(streams))

    def updated(self, x: Array, present: Array | None = None) -> Moments:
        """Return the moments after appending the rows of `x`, `[N, ...]`, to the stream (Chan et al. 1979).

        Only rows where `present` is True count; it has shape `[N]`, or `[N, A]` for the streams of A agents. Non-finite
        numbers would never leave the moments, so `x` is ignored if an element that counts is not finite, or so large
        that the variance overflows, in float32 from about 1e19.
        """
        x = x.astype(jnp.float32)
        if present is None:
            where, seen = None, jnp.full_like(self.seen, x.shape[0])
        else:
            where = unsqueezed(present, x.ndim)
            seen = jnp.sum(where, axis=0, dtype=jnp.float32).reshape(self.seen.shape)
        return self.appended(Moments(jnp.mean(x, axis=0, where=where), jnp.var(x, axis=0, where=where), seen))

    def appended(self, other: Moments) -> Moments:
        """Return the moments of this stream followed by another one; those of this one if the result is not finite.

        It is not finite if a moment of the other stream is not, if the variance overflows, or without any element.
        """
        total, some = self.seen + other.seen, other.seen > 0
        share = other.seen / total
        delta, old = other.mean - self.mean, jnp.where(self.seen > 0, self.var, 0)
        # Written as a step from the old variance: float32 cannot count beyond 2**24 elements, and sums would diverge.
        var = old + (other.var - old + jnp.square(delta) * (1 - share)) * share
        after = Moments(self.mean + delta * share, var, total)
        finite = jnp.isfinite(after.mean) & jnp.isfinite(after.var)
        return select(jnp.all(finite | ~some) & some, after, self)

    def of_rows(self, number: int) -> Moments:
        """Return the moments with a leading axis that broadcasts against `number` rows."""
        return Moments(*(x[None] for x in self))


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
        shards = len(self.since.seen)

        def rows(x: Array) -> Array:
            return jax.lax.collapse(jnp.broadcast_to(x[:, None], (shards, number // shards, *x.shape[1:])), 0, 2)

        return jax.tree.map(rows, each)


class NormalizedState(NamedTuple):
    """State of a normalizing wrapper: the state of the inner environment, and running moments."""

    inner: Any
    moments: Any
    running_return: Any = None


def divided_moments(env_state: Any, shards: int) -> Any:
    """Give each shard its own moments in the state of an environment, at the beginning of a rollout."""
    return _map_moments(lambda moments: ShardMoments.of(moments, shards), env_state)


def merged_moments(env_state: Any) -> Any:
    """Merge the moments of all shards in the state of an environment, at the end of a rollout."""
    return _map_moments(lambda moments: moments.before.appended(merged(moments.since)), env_state)


def merged(each: Moments) -> Moments:
    """Merge the moments of shards, `[shards, ...]`; devices sum twice, for the mean and for the variance around it."""
    mean, var, seen = each
    weight, total = unsqueezed(seen, mean.ndim), jnp.sum(seen, axis=0)
    some = jnp.maximum(total, 1)
    whole = jnp.sum(weight * mean, axis=0) / some
    return Moments(whole, jnp.sum(weight * (var + jnp.square(mean - whole[None])), axis=0) / some, total)


def _map_moments(f: Callable[[Any], Any], env_state: Any) -> Any:
    def of_wrapper(x: Any) -> Any:
        if not isinstance(x, NormalizedState):
            return x
        return x._replace(inner=_map_moments(f, x.inner), moments=f(x.moments))

    return jax.tree.map(of_wrapper, env_state, is_leaf=lambda x: isinstance(x, NormalizedState))
