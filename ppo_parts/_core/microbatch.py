"""Networks evaluated in pieces, for less memory and, on a CPU, more speed."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

from .._base.cpu import usable_cores
from .._base.errors import UserValueError
from .._base.hyperparameters import check_count
from .pieces import evaluate_pieces, one_after_another, side_by_side
from .policy import evaluate_policy
from .types import Batch, Evaluate, Output, Params, Policy

# These thresholds of "auto" were measured on CPUs, with networks of 64 to 256 units and 4 to 400 inputs. They are the
# smallest minibatch for which pieces are faster, the number of elements in a piece that stay in the cache, and the
# widest observations for which pieces are faster.
MIN_ELEMENTS, PIECE_ELEMENTS, MAX_INPUTS = 16_384, 1024, 128


def microbatched(evaluate: Evaluate, size: int | Literal["auto"]) -> Evaluate:
    """Wrap a network so that it evaluates a minibatch in pieces of at most `size` elements, one after another.

    The backward pass evaluates each piece again instead of storing its activations. The gradient is that of the whole
    minibatch (up to rounding: losses, means and statistics are taken over all of it) with the memory of one piece. On
    one core of a CPU, where the activations of a piece stay in the cache, large minibatches are faster as well. With
    several cores, XLA distributes a large minibatch over them, and evaluating it all at once is faster. Do not use this
    for networks that mix elements, as batch normalization does.

    Args:
        evaluate: the network, as in `learner`. Its distribution must be a pytree of arrays.
        size: elements per piece; pieces of a recurrent policy are whole segments, at least one. With several shards,
            the size applies to each shard, and all shards are cut into pieces at once. "auto": 1024 where that is
            faster, that is, on a single core of a CPU, for minibatches of 16,384 elements or more, observations of at
            most 128 numbers, and no recurrence; otherwise the whole minibatch at once.

    Returns:
        A function with the signature of `evaluate` that returns an `Output`; a `Policy` if `evaluate` is one.

    Raises:
        ValueError: a minibatch that cannot be cut into equal pieces of about that size.
        TypeError: a distribution that is not a pytree of arrays.

    Example:
        >>> import ppo_parts as pp
        >>> def evaluate(params, batch):
        ...     return pp.distributions.Categorical(batch.obs @ params["policy"]), batch.obs @ params["value"]
        >>> evaluate = pp.microbatched(evaluate, 1024)
    """
    if size != "auto":
        check_count("microbatched", "size", size)

    def joined(params: Params, batch: Batch) -> Output:
        if batch.log_prob is None:  # this is not a minibatch: a part or a rollout evaluates observations
            return evaluate_policy(evaluate, params, batch)
        axis = len(batch.axes) - 1
        shape = (*jnp.shape(batch.log_prob)[:axis], jnp.shape(batch.log_prob)[axis] // batch.shards)
        shape += jnp.shape(batch.log_prob)[axis + 1 :]  # of one shard
        pieces = _pieces_where_faster(batch, shape, axis) if size == "auto" else _pieces(shape, axis, size)
        if pieces == 1:
            return evaluate_policy(evaluate, params, batch)
        network, number, run = evaluate, pieces, one_after_another
        if batch.shards > 1:  # evaluate shards side by side, calling this function again for each
            network, number, run = joined, batch.shards, side_by_side
        output = evaluate_pieces(network, params, batch, number, run, "microbatched", optional=size == "auto")
        return evaluate_policy(evaluate, params, batch) if output is None else output

    return dataclasses.replace(evaluate, evaluate=joined) if isinstance(evaluate, Policy) else joined


def _pieces_where_faster(batch: Batch, shape: tuple[int, ...], axis: int) -> int:
    wide = sum(math.prod(jnp.shape(x)[len(shape) :]) for x in jax.tree.leaves(batch.obs)) > MAX_INPUTS
    recurrent = bool(jax.tree.leaves(batch.carry))
    if wide or recurrent or math.prod(shape) < MIN_ELEMENTS or jax.default_backend() != "cpu" or usable_cores() > 1:
        return 1
    pieces, needed = _equal_pieces(shape, axis, PIECE_ELEMENTS)
    return pieces if pieces <= 2 * needed else 1


def _pieces(shape: tuple[int, ...], axis: int, size: int) -> int:
    pieces, needed = _equal_pieces(shape, axis, size)
    if pieces > 2 * needed:
        raise UserValueError(
            f"microbatched: a minibatch of shape {shape} cannot be evaluated in equal pieces of about {size} elements: "
            f"the nearest number of pieces that divides {shape[axis]} is {pieces}; use another size or minibatches of "
            "another size"
        )
    return pieces


def _equal_pieces(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, int]:
    """Return the smallest number of equal pieces of at most `size` elements along `axis`, and of unequal pieces."""
    length, needed = shape[axis], min(shape[axis], -(-math.prod(shape) // size))
    return next(n for n in range(needed, length + 1) if length % n == 0), needed
