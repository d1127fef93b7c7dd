"""Functions that evaluate networks on equal pieces of a batch, shard by shard, or in sequence to save memory."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from .._base.checked import Count, checked
from .._base.hyperparameters import check_takes
from ..errors import UserTypeError, UserValueError
from .batch import Array, Batch, Evaluate, Output, Params, Policy, field_axes, kind
from .policy import evaluate_policy
from .shards import split_fields

# These thresholds of "auto" were measured on CPUs, with networks of 64 to 256 units and 4 to 400 inputs.
MIN_ELEMENTS, MIN_ELEMENTS_TWICE = 2048, 16_384  # pieces are faster from this size on, if evaluated once, or twice
PIECE_ELEMENTS = 1024  # the activations of a piece this large stay in the cache
MAX_INPUTS = 128  # the largest observation for which pieces are faster


class Pieces(NamedTuple):
    """A batch, cut into equal pieces along the last of its leading axes, and a network to evaluate on the pieces.

    `leaves` returns the leaves of an output, because a loop can carry them whatever the class of its distribution.
    `join` uses the tree structure of the whole output, because that of a piece may contain the shape of a piece.
    """

    where: str  # the beginning of error messages
    evaluate: Evaluate  # `evaluate(params, piece) -> output`
    batch: Batch  # the whole batch
    number: int  # the number of pieces
    output: Output  # the shapes of the output for the whole batch
    can_join: bool  # False if `join` raises an error

    def in_front(self) -> dict[str, Any]:
        """Return the fields of the batch with a new first axis of pieces, for a loop."""
        fields, axes = split_fields(self.batch, self.number), field_axes(self.batch)
        return {
            name: jax.tree.map(lambda x, axis=axes[name]: jnp.moveaxis(x, axis, 0), fields[name]) for name in fields
        }

    def leaves(self, params: Params, fields: dict[str, Any]) -> list[Array]:
        """Return the leaves of the output for a piece with these fields."""
        return jax.tree.leaves(self.evaluate(params, self.batch.replace(**fields)))

    def join(self, leaves: list[Array]) -> Output:
        """Return the output for the whole batch, from the leaves of the pieces' outputs, `[number, ...]`."""
        if not self.can_join:
            raise UserTypeError(
                f"{self.where}: {kind(self.output.distribution)} keeps arrays outside the leaves of its pytree (in "
                "bound methods, for example), so its pieces cannot be joined: use one of ppo_parts.distributions, or "
                "leave microbatches and shards out"
            )
        return jax.tree.map(_join_leaf, jax.tree.unflatten(jax.tree.structure(self.output), leaves), self.output)


def one_after_another(pieces: Pieces, params: Params) -> Output:
    """Evaluate the pieces in a loop, and again in the backward pass, to save memory."""
    again = jax.checkpoint(pieces.leaves)
    return pieces.join(jax.lax.map(lambda fields: again(params, fields), pieces.in_front()))


def side_by_side(pieces: Pieces, params: Params) -> Output:
    """Evaluate all pieces at once, each with its own copy of the parameters.

    A loop inside the network (over time, for example) accumulates a separate gradient for each copy. Only the sum over
    the copies requires communication between devices, and it is computed once, after the loop.
    """
    copies = jax.tree.map(lambda x: jnp.broadcast_to(x, (pieces.number, *jnp.shape(x))), params)
    evaluate = jax.vmap(pieces.leaves, in_axes=(0, field_axes(pieces.batch)))
    return pieces.join(evaluate(copies, split_fields(pieces.batch, pieces.number)))


def evaluate_shards(evaluate: Evaluate, params: Params, batch: Batch) -> Output:
    """Compute `evaluate(params, batch)`, in blocks of shards side by side if the policy is recurrent.

    The number of blocks of neighboring shards is the smallest that every mesh can divide, because each block needs a
    separate gradient in every iteration of a network's loop. The number of devices that hold the data is not known
    while a program is traced, but it divides the number of shards and is at most `jax.device_count()`.
    """
    blocks = math.lcm(*(number for number in range(1, jax.device_count() + 1) if batch.shards % number == 0))
    if blocks == 1 or batch.log_prob is None or not jax.tree.leaves(batch.carry):
        return evaluate_policy(evaluate, params, batch)
    where = "learner: for a recurrent policy and several shards"
    return side_by_side(cut(where, evaluate, params, batch, blocks), params)


def cut(where: str, evaluate: Evaluate, params: Params, batch: Batch, number: int) -> Pieces:
    """Cut a rollout or a minibatch into pieces for a network; error messages begin with `where`."""
    whole = batch.replace(shards=1)

    def evaluate_piece(params: Params, piece: Batch) -> Output:
        output = evaluate_policy(evaluate, params, piece)
        for leaf in jax.tree.leaves(output.distribution):
            if not isinstance(leaf, jax.Array):
                raise UserTypeError(
                    f"{where}: the distribution must be a pytree of arrays, but {kind(leaf)} is not: use one of "
                    "ppo_parts.distributions, register it with jax.tree_util, or leave microbatches and shards out"
                )
        return output

    output = jax.eval_shape(evaluate_piece, params, whole)
    return Pieces(where, evaluate_piece, whole, number, output, not _holds_tracers(output.distribution, batch.action))


def _join_leaf(x: Array, whole: Any) -> Array:
    """Join a leaf of all pieces, `[number, ...]`, along the axis that is shorter in a piece than in the whole.

    A leaf without such an axis does not depend on the elements, so it is the same for all pieces.
    """
    shorter = [axis for axis, size in enumerate(whole.shape) if x.shape[axis + 1] != size]
    return jnp.moveaxis(x, 0, shorter[0]).reshape(whole.shape) if shorter else x[0]


def _holds_tracers(distribution: Any, action: Any) -> bool:
    """Return whether a distribution uses traced arrays other than its leaves."""
    if not hasattr(distribution, "log_prob"):
        return False
    leaves, structure = jax.tree.flatten(distribution)
    try:
        traced = jax.make_jaxpr(lambda x, a: jax.tree.unflatten(structure, x).log_prob(a))(leaves, action)
    except jax.errors.UnexpectedTracerError:
        return True
    return any(isinstance(x, jax.core.Tracer) for x in traced.consts)


@checked
def microbatched(evaluate: Evaluate, size: Count | Literal["auto"]) -> Evaluate:
    """Wrap a network so that it evaluates a minibatch in pieces of at most `size` elements, one after another.

    The result is the gradient of the whole minibatch, up to rounding, with the memory of one piece. If every part that
    reads `current` is `elementwise`, the gradients of the pieces are summed; a loss that draws random numbers then
    draws different ones for each piece, and others for the reported loss. Otherwise the loss is computed from the
    outputs of all pieces, and the backward pass evaluates each piece a second time. On one CPU core, large minibatches
    also become faster, because the activations of a piece stay in the cache. With several cores, evaluation at once is
    faster, because XLA distributes a large minibatch over the cores. Do not use this for networks that mix elements, as
    batch normalization does.

    Args:
        evaluate: the network, as in `learner`. Its distribution must be a pytree of arrays.
        size: elements per piece, or as few as a quarter of it where pieces must be equal; pieces of a recurrent policy
            are whole segments, at least one. With several shards, the size applies to each shard, and the shards are
            evaluated side by side. "auto" means 1024 where this is faster: on a single CPU core, for minibatches of
            2,048 elements or more (16,384 if each piece is evaluated twice), observations of at most 128 numbers, and
            no recurrence. Otherwise "auto" evaluates the whole minibatch at once.

    Returns:
        A function with the signature of `evaluate` that returns an `Output`, or a `Policy` if `evaluate` is one.

    Raises:
        ValueError: if a minibatch cannot be cut into equal pieces of about that size.
        TypeError: if the distribution is not a pytree of arrays.

    Example:
        >>> import ppo_parts as pp
        >>> def evaluate(params, batch):
        ...     return pp.distributions.Categorical(batch.obs @ params["policy"]), batch.obs @ params["value"]
        >>> evaluate = pp.microbatched(evaluate, 1024)
    """
    check_takes("microbatched", "evaluate", evaluate, ("params", "batch"))
    if isinstance(evaluate, Policy):
        return dataclasses.replace(evaluate, evaluate=Microbatched(evaluate, size))
    return Microbatched(evaluate, size)


@dataclasses.dataclass(frozen=True, eq=False)
class Microbatched:
    """The function that `microbatched` returns."""

    evaluate: Evaluate
    size: int | Literal["auto"]

    def __call__(self, params: Params, batch: Batch) -> Output:
        number = self.pieces(batch)
        if number == 1:
            return evaluate_policy(self.evaluate, params, batch)
        if batch.shards > 1:  # evaluate shards side by side, with a recursive call for each
            pieces, run = cut("microbatched", self, params, batch, batch.shards), side_by_side
        else:
            pieces, run = cut("microbatched", self.evaluate, params, batch, number), one_after_another
        if self.size == "auto" and not pieces.can_join:
            return evaluate_policy(self.evaluate, params, batch)
        return run(pieces, params)

    def pieces(self, batch: Batch, once: bool = False) -> int:
        """Return the number of pieces per shard; `once` tells whether each piece is evaluated only once."""
        if batch.log_prob is None:  # not a minibatch, but observations from a part or a rollout
            return 1
        shape, total = jnp.shape(batch.log_prob), batch.log_prob.size // batch.shards
        size = self.size
        if size == "auto":
            size, smallest = PIECE_ELEMENTS, MIN_ELEMENTS if once else MIN_ELEMENTS_TWICE
            inputs = sum(math.prod(jnp.shape(x)[len(shape) :]) for x in jax.tree.leaves(batch.obs))
            one_core = jax.default_backend() == "cpu" and count_cores() == 1
            if total < smallest or inputs > MAX_INPUTS or jax.tree.leaves(batch.carry) or not one_core:
                return 1
        length = shape[len(batch.axes) - 1] // batch.shards  # size of the axis along which shards are cut
        needed = min(length, -(-total // size))
        pieces = next(n for n in range(needed, length + 1) if length % n == 0)
        if pieces <= (2 if self.size == "auto" else 4) * needed:
            return pieces
        if self.size == "auto":
            return 1
        raise UserValueError(
            f"microbatched: a batch of shape {shape} cannot be evaluated in equal pieces of about {size} elements: the "
            f"nearest number of pieces that divides {length} is {pieces}; use another size, another number of "
            "environments (for a whole rollout) or minibatches of another size"
        )


def count_cores() -> int:
    """Return the number of cores that this process may use, over which XLA distributes its work on a CPU."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not available on this system
        return os.cpu_count() or 1
