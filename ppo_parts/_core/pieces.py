"""Networks evaluated on equal pieces of a batch: shard by shard, or one after another, for less memory."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from .._base.checked import Count, checked
from .._base.errors import UserTypeError, UserValueError
from .._base.hyperparameters import check_takes
from .._base.trees import varying_like
from ..functional._common import accumulator_dtype
from .batch import Array, Batch, Evaluate, Output, Params, Policy, field_axes, kind
from .policy import evaluate_policy
from .shards import split, split_fields

# These thresholds of "auto" were measured on CPUs, with networks of 64 to 256 units and 4 to 400 inputs.
MIN_ELEMENTS, MIN_ELEMENTS_TWICE = 2048, 16_384  # of a minibatch for which pieces are faster, evaluated once or twice
PIECE_ELEMENTS = 1024  # whose activations stay in the cache
MAX_INPUTS = 128  # numbers of an observation


class Piece(NamedTuple):
    """A piece of a batch, the output of the network, and the same output with the distribution as a list of leaves."""

    batch: Batch
    output: Output
    leaves: Output


EvaluatePiece = Callable[[Params, dict[str, Any]], Piece]
Run = Callable[[EvaluatePiece, Params, dict[str, Any], dict[str, int]], Output]
"""`run(piece, params, fields, axes)` calls `piece(params, fields)` for each piece and returns the `leaves`, which begin
with `[pieces]`. The pieces lie along the axis `axes[name]` of each field."""


def one_after_another(piece: EvaluatePiece, params: Params, fields: dict[str, Any], axes: dict[str, int]) -> Output:
    """Evaluate the pieces in a loop, and each again in the backward pass, for less memory."""
    again = jax.checkpoint(lambda params, fields: piece(params, fields).leaves)
    return jax.lax.map(lambda fields: again(params, fields), _pieces_first(fields, axes))


def side_by_side(piece: EvaluatePiece, params: Params, fields: dict[str, Any], axes: dict[str, int]) -> Output:
    """Evaluate all pieces at once, each with its own copy of the parameters.

    A loop inside the network (over time, for example) accumulates a separate gradient for each copy. The sum over the
    copies, which is all that requires communication between devices, is computed once, after the loop.
    """
    number = jax.tree.leaves(fields["log_prob"])[0].shape[axes["log_prob"]]
    copies = jax.tree.map(lambda x: jnp.broadcast_to(x, (number, *jnp.shape(x))), params)
    return jax.vmap(lambda params, fields: piece(params, fields).leaves, in_axes=(0, axes))(copies, fields)


def differentiate_pieces(
    loss: Callable[[Params, Output, Batch, Array], Array], evaluate: Evaluate, params: Params, batch: Batch, pieces: int
) -> tuple[Output, Params] | None:
    """Return `evaluate(params, batch)`, and the gradient of a loss that is a sum over the pieces.

    Piece i is evaluated once, and contributes `loss(params, output, piece, i)`. None: the distributions of the pieces
    cannot be joined.
    """
    gradients = []

    def run(piece: EvaluatePiece, params: Params, fields: dict[str, Any], axes: dict[str, int]) -> Output:
        def loss_of_piece(params: Params, index: Array, fields: dict[str, Any]) -> tuple[Array, Output]:
            evaluated = piece(params, fields)
            return loss(params, evaluated.output, evaluated.batch, index), evaluated.leaves

        def step(total: Params, numbered: tuple[Array, dict[str, Any]]) -> tuple[Params, Output]:
            gradient, leaves = jax.grad(loss_of_piece, has_aux=True)(params, *numbered)
            return jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, gradient), leaves

        # A sum of many bfloat16 numbers would lose digits.
        zeros = jax.tree.map(lambda x: jnp.zeros_like(x, accumulator_dtype(x)), params)
        numbered = (jnp.arange(pieces), _pieces_first(fields, axes))
        total, leaves = jax.lax.scan(step, varying_like(zeros, batch.log_prob), numbered)
        gradients.append(jax.tree.map(lambda x, y: x.astype(jnp.result_type(y)), total, params))
        return leaves

    output = evaluate_pieces(evaluate, params, batch, pieces, run, "microbatched", optional=True)
    return None if output is None else (output, gradients[0])


def _pieces_first(fields: dict[str, Any], axes: dict[str, int]) -> dict[str, Any]:
    """Move the axis of the pieces to the front, for a loop."""
    return {
        name: jax.tree.map(lambda x, axis=axes[name]: jnp.moveaxis(x, axis, 0), tree) for name, tree in fields.items()
    }


def evaluate_shards(evaluate: Evaluate, params: Params, batch: Batch) -> Output:
    """Compute `evaluate(params, batch)`; for a recurrent policy and several shards, separately for each device."""
    blocks = _blocks(batch.shards)
    if blocks == 1 or batch.log_prob is None or not jax.tree.leaves(batch.carry):
        return evaluate_policy(evaluate, params, batch)
    where = "learner: for a recurrent policy and several shards"
    output = evaluate_pieces(evaluate, params, batch, blocks, side_by_side, where)
    assert output is not None
    return output


def _blocks(shards: int) -> int:
    """Return how many blocks of neighboring shards to evaluate, the fewest that any mesh can divide.

    The number of devices that hold the data is not known while a program is traced, but it divides the number of shards
    and is at most `jax.device_count()`. Each block costs a separate gradient in every iteration of a network's loop.
    """
    return math.lcm(*(number for number in range(1, jax.device_count() + 1) if shards % number == 0))


def evaluate_pieces(
    evaluate: Evaluate, params: Params, batch: Batch, pieces: int, run: Run, where: str, optional: bool = False
) -> Output | None:
    """Compute `evaluate(params, batch)` on equal pieces of a rollout or a minibatch.

    Args:
        evaluate: the network.
        params: its parameters.
        batch: the batch, cut along the last of its leading axes.
        pieces: how many.
        run: evaluates the pieces, one after another or side by side.
        where: the beginning of error messages.
        optional: return None, instead of raising an error, for a distribution whose pieces cannot be joined.
    """
    axes = field_axes(batch)
    axis = axes["log_prob"]
    # `evaluated` appends to this list while it is traced: a tree structure cannot be an output of `eval_shape`.
    structures: list[Any] = []

    def evaluated(params: Params, batch: Batch) -> Piece:
        """Evaluate the network; a loop can carry the leaves of a distribution of any class."""
        output = evaluate_policy(evaluate, params, batch)
        leaves, structure = jax.tree.flatten(output.distribution)
        for leaf in leaves:
            if not isinstance(leaf, jax.Array):
                raise UserTypeError(
                    f"{where}: the distribution must be a pytree of arrays, but {kind(leaf)} is not: use one of "
                    "ppo_parts.distributions, register it with jax.tree_util, or leave microbatches and shards out"
                )
        structures.append(structure)
        return Piece(batch, output, output._replace(distribution=leaves))

    # Take the structure from the whole batch, because that of a piece may contain the shape of a piece.
    whole = batch.replace(shards=1)
    shapes = jax.eval_shape(lambda params, batch: evaluated(params, batch).leaves, params, whole)
    structure = structures[0]
    stuck = _holding_tracers(structure, shapes.distribution, batch.action)
    if stuck is not None:
        if optional:
            return None
        raise UserTypeError(
            f"{where}: {kind(stuck)} keeps arrays outside the leaves of its pytree (in bound methods, for example), so "
            "its pieces cannot be joined: use one of ppo_parts.distributions, or leave microbatches and shards out"
        )

    def piece(params: Params, fields: dict[str, Any]) -> Piece:
        return evaluated(params, whole.replace(**fields))

    weight = jax.tree.map(lambda x: split(x, pieces, 0), batch.weight)  # of each sampled step or segment
    results = run(piece, params, {**split_fields(batch, pieces), "weight": weight}, {**axes, "weight": 0})

    def join(along: int) -> Callable[[Array, Any], Array]:
        def joined(x: Array, whole: Any) -> Array:
            # A leaf of a piece with the shape of the whole does not depend on the elements; all pieces have the same.
            return x[0] if x.shape[1:] == whole.shape else jnp.moveaxis(x, 0, along).reshape(whole.shape)

        return joined

    output = jax.tree.map(join(axis), results._replace(carry=None), shapes._replace(carry=None))
    carry = jax.tree.map(join(0), results.carry, shapes.carry)
    return output._replace(distribution=jax.tree.unflatten(structure, output.distribution), carry=carry)


def _holding_tracers(structure: Any, leaves: Any, action: Any) -> Any:
    """Return the distribution if it uses traced arrays other than its leaves; else None."""
    distribution = jax.tree.unflatten(structure, leaves)
    if not hasattr(distribution, "log_prob"):
        return None
    try:
        traced = jax.make_jaxpr(lambda x, a: jax.tree.unflatten(structure, x).log_prob(a))(leaves, action)
    except jax.errors.UnexpectedTracerError:
        return distribution
    return distribution if any(isinstance(x, jax.core.Tracer) for x in traced.consts) else None


@checked
def microbatched(evaluate: Evaluate, size: Count | Literal["auto"]) -> Evaluate:
    """Wrap a network so that it evaluates a minibatch in pieces of at most `size` elements, one after another.

    The gradient is that of the whole minibatch, up to rounding, with the memory of one piece. Where every part that
    reads `current` is `elementwise`, the gradients of the pieces are summed; a loss that draws random numbers then
    draws others for each piece. Otherwise the loss is taken over the outputs of all pieces, and the backward pass
    evaluates each piece a second time. On one core of a CPU, where the activations of a piece stay in the cache, large
    minibatches are faster as well. With several cores, XLA distributes a large minibatch over them, and evaluating it
    all at once is faster. Do not use this for networks that mix elements, as batch normalization does.

    Args:
        evaluate: the network, as in `learner`. Its distribution must be a pytree of arrays.
        size: elements per piece; pieces of a recurrent policy are whole segments, at least one. With several shards,
            the size applies to each shard, and all shards are cut into pieces at once. "auto": 1024 where that is
            faster, that is, on a single core of a CPU, for minibatches of 2,048 elements or more (16,384 if each piece
            is evaluated twice), observations of at most 128 numbers, and no recurrence; otherwise the whole minibatch
            at once.

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
        pieces = self.pieces(batch)
        if pieces == 1:
            return evaluate_policy(self.evaluate, params, batch)
        network, num_pieces, run = self.evaluate, pieces, one_after_another
        if batch.shards > 1:  # evaluate shards side by side, calling this function again for each
            network, num_pieces, run = self, batch.shards, side_by_side
        output = evaluate_pieces(network, params, batch, num_pieces, run, "microbatched", optional=self.size == "auto")
        return evaluate_policy(self.evaluate, params, batch) if output is None else output

    def pieces(self, batch: Batch, once: bool = False) -> int:
        """Return the number of pieces for each shard of a batch; `once`: each piece is evaluated once, not twice."""
        if batch.log_prob is None:  # this is not a minibatch: a part or a rollout evaluates observations
            return 1
        shape, total = jnp.shape(batch.log_prob), batch.log_prob.size // batch.shards
        size = self.size
        if size == "auto":
            size, smallest = PIECE_ELEMENTS, MIN_ELEMENTS if once else MIN_ELEMENTS_TWICE
            inputs = sum(math.prod(jnp.shape(x)[len(shape) :]) for x in jax.tree.leaves(batch.obs))
            one_core = jax.default_backend() == "cpu" and usable_cores() == 1
            if total < smallest or inputs > MAX_INPUTS or jax.tree.leaves(batch.carry) or not one_core:
                return 1
        length = shape[len(batch.axes) - 1] // batch.shards  # along which shards are cut
        needed = min(length, -(-total // size))
        pieces = next(n for n in range(needed, length + 1) if length % n == 0)
        if pieces <= 2 * needed:
            return pieces
        if self.size == "auto":
            return 1
        raise UserValueError(
            f"microbatched: a minibatch of shape {shape} cannot be evaluated in equal pieces of about {size} elements: "
            f"the nearest number of pieces that divides {length} is {pieces}; use another size or minibatches of "
            "another size"
        )


def usable_cores() -> int:
    """Return how many cores this process may use; on a CPU, XLA distributes its work over as many threads."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # this system does not have the function
        return os.cpu_count() or 1
