"""Networks evaluated in pieces, for less memory and, on a CPU, more speed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ._cpu import usable_cores
from ._errors import UserTypeError, UserValueError
from ._hyperparameters import count
from ._policy import evaluate_policy
from ._types import PER_SEGMENT, PER_STEP, Array, Batch, Evaluate, Output, Params, Policy, kind

# Thresholds of "auto", measured on CPUs with networks of 64 to 256 units and 4 to 400 inputs: the smallest minibatch
# for which pieces are faster, the elements of a piece that stay in the cache, and the widest observations that gain.
MIN_ELEMENTS, PIECE_ELEMENTS, MAX_INPUTS = 16_384, 1024, 128


def microbatched(evaluate: Evaluate, size: int | Literal["auto"]) -> Evaluate:
    """Evaluate a network on pieces of at most `size` elements of a minibatch, one after another.

    The backward pass evaluates each piece again instead of storing its activations. The gradient is that of the whole
    minibatch (up to rounding: losses, means and statistics are taken over all of it) with the memory of one piece. On
    one core of a CPU, where the activations of a piece stay in the cache, large minibatches are faster as well. With
    several cores XLA shares out a large minibatch, and all at once is faster. Not for networks that mix elements,
    as batch normalisation does.

    Args:
        evaluate: the network, as in `learner`. Its distribution has to be a pytree of arrays.
        size: elements per piece; pieces of a recurrent policy are whole segments, at least one. "auto": 1024 where that
            is faster, which is on a single core of a CPU, for minibatches of 16,384 elements or more with observations
            of at most 128 numbers, and without recurrence; otherwise all at once.

    Returns:
        `evaluate` of the same signature, which returns an `Output`; a `Policy` of a `Policy`.

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
        count("microbatched", "size", size)

    def joined(params: Params, batch: Batch) -> Output:
        if batch.log_prob is None:  # not a minibatch, but observations that a part or a rollout evaluates
            return evaluate_policy(evaluate, params, batch)
        shape, axis = jnp.shape(batch.log_prob), len(batch.axes) - 1
        pieces = _pieces_where_faster(batch, shape, axis) if size == "auto" else _pieces(shape, axis, size)
        if pieces == 1:
            return evaluate_policy(evaluate, params, batch)
        return _in_pieces(evaluate, params, batch, pieces, optional=size == "auto")

    return dataclasses.replace(evaluate, evaluate=joined) if isinstance(evaluate, Policy) else joined


def _in_pieces(evaluate: Evaluate, params: Params, batch: Batch, pieces: int, optional: bool) -> Output:
    axis = len(batch.axes) - 1  # pieces are cut along the last of the leading axes
    segments = 0  # the axis of segments in fields without time
    structures: list[Any] = []

    def evaluate_leaves(params: Params, batch: Batch) -> Output:
        """The output with the distribution replaced by its leaves, which a loop can carry for any class."""
        output = evaluate_policy(evaluate, params, batch)
        leaves, structure = jax.tree.flatten(output.distribution)
        for leaf in leaves:
            if not isinstance(leaf, jax.Array):
                raise UserTypeError(
                    f"microbatched: the distribution must be a pytree of arrays, and {kind(leaf)} is not: use one of "
                    "ppo_parts.distributions, register it with jax.tree_util, or leave microbatches out"
                )
        structures.append(structure)
        return output._replace(distribution=leaves)

    # Take the structure from the whole minibatch, because that of a piece may contain the shape of a piece.
    shapes = jax.eval_shape(evaluate_leaves, params, batch)
    structure = structures[0]
    stuck = _stuck_in_a_trace(structure, shapes.distribution, batch.action)
    if stuck is not None:
        if optional:
            return evaluate_policy(evaluate, params, batch)
        raise UserTypeError(
            f"microbatched: {kind(stuck)} keeps arrays outside the leaves of its pytree (in bound methods, say), so "
            "that its pieces cannot be joined: use one of ppo_parts.distributions, or leave microbatches out"
        )

    def split(along: int) -> Callable[[Array], Array]:
        return lambda x: jnp.moveaxis(x.reshape(*x.shape[:along], pieces, -1, *x.shape[along + 1 :]), along, 0)

    fields = {field: jax.tree.map(split(axis), getattr(batch, field)) for field in PER_STEP}
    for field in PER_SEGMENT:
        fields[field] = jax.tree.map(split(segments), getattr(batch, field))

    @jax.checkpoint
    def piece(params: Params, fields: Any) -> Output:
        return evaluate_leaves(params, batch.replace(**fields, weight=None))

    results = jax.lax.map(lambda fields: piece(params, fields), fields)

    def join(along: int) -> Callable[[Array, Any], Array]:
        def joined(x: Array, whole: Any) -> Array:
            # A leaf of a piece with the shape of the whole does not depend on the elements; all pieces have the same.
            return x[0] if x.shape[1:] == whole.shape else jnp.moveaxis(x, 0, along).reshape(whole.shape)

        return joined

    output = jax.tree.map(join(axis), results._replace(carry=None), shapes._replace(carry=None))
    carry = jax.tree.map(join(segments), results.carry, shapes.carry)
    return output._replace(distribution=jax.tree.unflatten(structure, output.distribution), carry=carry)


def _stuck_in_a_trace(structure: Any, leaves: Any, action: Any) -> Any:
    """The distribution, if it computes with arrays of the trace it was made in, besides its leaves; else None."""
    distribution = jax.tree.unflatten(structure, leaves)
    if not hasattr(distribution, "log_prob"):
        return None
    try:
        traced = jax.make_jaxpr(lambda x, a: jax.tree.unflatten(structure, x).log_prob(a))(leaves, action)
    except jax.errors.UnexpectedTracerError:
        return distribution
    return distribution if any(isinstance(x, jax.core.Tracer) for x in traced.consts) else None


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
    """The smallest number of equal pieces along `axis` with at most `size` elements each, and of unequal ones."""
    length, needed = shape[axis], min(shape[axis], -(-math.prod(shape) // size))
    return next(n for n in range(needed, length + 1) if length % n == 0), needed
