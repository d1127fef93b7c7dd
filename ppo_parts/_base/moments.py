"""Running moments of one or several streams."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..errors import ShapeError
from ..functional._common import unsqueeze
from .trees import select


class Moments(NamedTuple):
    """Running mean and (population) variance of a stream, and the number of elements so far.

    `seen` has no axes or, for separate streams of A agents, shape `[A, 1, ...]` with as many axes as `mean`.
    """

    mean: jax.Array
    var: jax.Array
    seen: jax.Array

    @staticmethod
    def of(example: jax.Array, per_agent: bool = False) -> Moments:
        """Make the moments of an empty stream, mean 0 and variance 1, or with `per_agent`, of a stream per row."""
        shape = jnp.shape(example)
        streams = (shape[0], *(1 for _ in shape[1:])) if per_agent else ()
        return Moments(jnp.zeros(shape), jnp.ones(shape), jnp.zeros(streams))

    def updated(self, x: jax.Array, present: jax.Array | None = None) -> Moments:
        """Return the moments after appending the rows of `x`, `[N, ...]`, to the stream (Chan et al. 1979).

        Only rows where `present` is True count; it has shape `[N]`, or `[N, A]` for streams of A agents. Non-finite
        numbers would stay in the moments forever, so `x` is ignored if an element that counts is not finite, or so
        large that the variance overflows, in float32 above about 1e19.
        """
        if x.shape[1:] != self.mean.shape:
            says = f"x must have a row axis before {self.mean.shape}, got shape {x.shape}"
            raise ShapeError(f"Moments.updated: {says}: one observation is x[None], and a rollout x.reshape(-1, ...)")
        x = x.astype(jnp.float32)
        if present is None:
            where, seen = None, jnp.full_like(self.seen, x.shape[0])
        else:
            where = unsqueeze(present, x.ndim)
            seen = jnp.sum(where, axis=0, dtype=jnp.float32).reshape(self.seen.shape)
        return self.appended(Moments(jnp.mean(x, axis=0, where=where), jnp.var(x, axis=0, where=where), seen))

    def appended(self, other: Moments) -> Moments:
        """Return the moments of this stream followed by another, or of this stream if the result is not finite.

        It is not finite if a moment of the other stream is not, the variance overflows, or there are no elements.
        """
        total, some = self.seen + other.seen, other.seen > 0
        share = other.seen / total
        delta, old = other.mean - self.mean, jnp.where(self.seen > 0, self.var, 0)
        # Take a step from the old variance, because float32 cannot count beyond 2**24 elements, and sums would diverge.
        var = old + (other.var - old + jnp.square(delta) * (1 - share)) * share
        after = Moments(self.mean + delta * share, var, total)
        finite = jnp.isfinite(after.mean) & jnp.isfinite(after.var)
        return select(jnp.all(finite | ~some) & some, after, self)

    def of_rows(self, number: int) -> Moments:
        """Return the moments with a leading axis that broadcasts against `number` rows."""
        return Moments(*(x[None] for x in self))


def find_moments(tree: Any) -> list[Moments]:
    """List the `Moments` in a tree."""
    return [x for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Moments)) if isinstance(x, Moments)]


def merge_shards(each: Moments) -> Moments:
    """Merge the moments of shards, `[shards, ...]`, with two sums over devices, for the mean and the variance."""
    mean, var, seen = each
    weight, total = unsqueeze(seen, mean.ndim), jnp.sum(seen, axis=0)
    some = jnp.maximum(total, 1)
    whole = jnp.sum(weight * mean, axis=0) / some
    return Moments(whole, jnp.sum(weight * (var + jnp.square(mean - whole[None])), axis=0) / some, total)
