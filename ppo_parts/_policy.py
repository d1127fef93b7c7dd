"""Calling the user's network, and checking what it returns."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ._errors import UserTypeError
from ._types import PER_STEP, Array, Batch, Current, Evaluate, Params, kind
from .functional import next_values
from .functional._common import ShapeError

# From how many elements of a minibatch on so many at a time are faster on a CPU, and up to which size of observation.
LARGE, CACHED, WIDE = 16_384, 1024, 128


def evaluate_policy(evaluate: Evaluate, params: Params, batch: Batch) -> tuple[Any, Array]:
    """`evaluate(params, batch)` without a recurrent carry, with errors that say what it should have returned."""
    result = evaluate(params, _own(batch))
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        got = f"{len(result)} items" if isinstance(result, tuple) else kind(result)
        raise TypeError(
            "evaluate(params, batch) must return the pair (distribution, value), and a recurrent policy (distribution, "
            f"value, carry); got {got}"
        )
    return result[:2]


def _own(batch: Batch) -> Batch:
    """The batch with containers of its own: a user's function that writes into them changes nothing of ours."""
    return jax.tree.map(lambda x: x, batch)


def evaluate_step(evaluate: Evaluate, params: Params, obs: Any, carry: Any, reset: Any) -> tuple[Any, Array, Any]:
    """One step of a recurrent policy, `(distribution, value, carry)`, the first two with a time axis of size 1."""
    batch = Batch(obs=jax.tree.map(lambda x: x[None], obs), carry=carry, reset=reset[None])
    result = evaluate(params, _own(batch))
    if not isinstance(result, tuple) or len(result) != 3:
        raise TypeError(
            "evaluate(params, batch) of a recurrent policy must return (distribution, value, carry), the last being "
            f"its state after the batch's last step; got {type(result).__name__}"
        )
    return result


def evaluate_current(evaluate: Evaluate, params: Params, batch: Batch) -> Current:
    """Distribution, log-probability of the batch's actions and value under `params`."""
    distribution, value = evaluate_policy(evaluate, params, batch)
    if not hasattr(distribution, "log_prob"):
        raise TypeError(
            f"evaluate(params, batch) must return (distribution, value); the first, {kind(distribution)}, "
            "has no log_prob"
        )
    log_prob = distribution.log_prob(batch.action)
    expected = jnp.shape(batch.log_prob)
    if jnp.shape(log_prob) != expected:
        raise ShapeError(
            f"the distribution's log_prob has shape {jnp.shape(log_prob)}, batch.log_prob {expected}: one number per "
            "element is needed; sum over the action's dimensions, as distributions.Normal does"
        )
    if jnp.shape(value) != expected:
        raise ShapeError(
            f"evaluate returned a value of shape {jnp.shape(value)}, batch.log_prob has {expected}: one number per "
            "element is needed; index the trailing axis of a Dense(1) away, value[..., 0]"
        )
    if batch.mask is not None:  # masked places keep what was recorded: their ratio is 1, and no gradient leaves them
        keep = batch.mask.astype(bool)
        log_prob = jnp.where(keep, log_prob, batch.log_prob.astype(log_prob.dtype))
        value = value if batch.value is None else jnp.where(keep, value, batch.value.astype(value.dtype))
    return Current(distribution, log_prob, value)


def follow(batch: Batch, value: Array) -> Array:
    """`next_value` for new values: shifted, except where the recorded one is of an observation not in the batch.

    That is at truncations, at the end of the rollout, and before masked steps.
    """
    recorded = batch.next_value
    elsewhere = jnp.zeros_like(value, bool) if batch.truncated is None else batch.truncated.astype(bool)
    if batch.mask is not None:
        keep = batch.mask.astype(bool)
        elsewhere = elsewhere | jnp.concatenate([~keep[1:], jnp.zeros_like(keep[:1])])
    return next_values(value, recorded[-1], elsewhere, recorded)


def in_pieces(evaluate: Evaluate, microbatch: int | Literal["auto"]) -> Evaluate:
    """`evaluate` on pieces of at most `microbatch` elements, one after the other, and joined again.

    The backward pass evaluates each piece again instead of remembering it. Pieces of a recurrent policy are whole
    segments, at least one. "auto": of `CACHED` elements, on a CPU, where there are `LARGE` or more of them.
    """

    def leaves_of(params: Params, batch: Batch) -> tuple[list[Array], Any]:
        leaves, structure = jax.tree.flatten(evaluate_policy(evaluate, params, batch))
        for leaf in leaves:
            if not isinstance(leaf, jax.Array):
                raise TypeError(
                    "learner: microbatch needs a distribution that is a pytree of arrays, as those of "
                    f"ppo_parts.distributions are; {kind(leaf)} is none: register it with jax.tree_util, or leave "
                    "microbatch out"
                )
        return leaves, structure

    def joined(params: Params, batch: Batch) -> tuple[Any, Array]:
        if batch.log_prob is None:  # no minibatch: observations that a part looks at by itself
            return evaluate_policy(evaluate, params, batch)
        shape, axis = jnp.shape(batch.log_prob), len(batch.axes) - 1
        pieces = _chosen(batch, shape, axis) if microbatch == "auto" else _pieces(shape, axis, microbatch)
        if pieces == 1:
            return evaluate_policy(evaluate, params, batch)
        found: list[Any] = []

        def remembering(params: Params, batch: Batch) -> list[Array]:
            leaves, structure = leaves_of(params, batch)
            found.append(structure)
            return leaves

        shapes = jax.eval_shape(remembering, params, batch)
        structure = found[0]  # of the whole: a piece's may hold the shape of a piece
        if (stuck := _stuck_in_a_trace(structure, shapes, batch.action)) is not None:
            if microbatch == "auto":
                return evaluate_policy(evaluate, params, batch)
            raise UserTypeError(
                f"learner: microbatch={microbatch} needs a distribution whose arrays are all leaves of its pytree; "
                f"{kind(stuck)} keeps some elsewhere (in bound methods, say), and its pieces cannot be joined: use "
                "ppo_parts.distributions.Normal or another of ours, or leave microbatch out"
            )

        def split(x: Array, axis: int = axis) -> Array:
            return jnp.moveaxis(x.reshape(*x.shape[:axis], pieces, -1, *x.shape[axis + 1 :]), axis, 0)

        extras, extras_structure = jax.tree.flatten(batch.extras)
        sampled = [jnp.shape(x)[: axis + 1] == shape[: axis + 1] for x in extras]
        fields = {field: jax.tree.map(split, getattr(batch, field)) for field in PER_STEP}
        fields["carry"] = jax.tree.map(lambda x: split(x, 0), batch.carry)
        own = [split(x) for x, cut in zip(extras, sampled, strict=True) if cut]

        @jax.checkpoint
        def piece(params: Params, fields: Any, own: list[Array]) -> list[Array]:
            cut = iter(own)
            here = [next(cut) if is_cut else x for x, is_cut in zip(extras, sampled, strict=True)]
            part = batch.replace(**fields, weight=None, extras=jax.tree.unflatten(extras_structure, here))
            return leaves_of(params, part)[0]

        results = jax.lax.map(lambda xs: piece(params, *xs), (fields, own))

        def join(x: Array, whole: Any) -> Array:
            if x.shape[1:] == whole.shape:  # says nothing of single elements
                return x[0]
            return jnp.moveaxis(x, 0, axis).reshape(whole.shape)

        return jax.tree.unflatten(structure, map(join, results, shapes))

    return joined


def _stuck_in_a_trace(structure: Any, shapes: list[Any], action: Any) -> Any:
    """The distribution, if it computes with arrays of the trace it was made in, besides its leaves; else None."""
    distribution = jax.tree.unflatten(structure, shapes)[0]
    if not hasattr(distribution, "log_prob"):
        return None
    try:
        traced = jax.make_jaxpr(lambda x, action: jax.tree.unflatten(structure, x)[0].log_prob(action))(shapes, action)
    except jax.errors.UnexpectedTracerError:
        return distribution
    return distribution if any(isinstance(x, jax.core.Tracer) for x in traced.consts) else None


def _chosen(batch: Batch, shape: tuple[int, ...], axis: int) -> int:
    """How many pieces are fastest, as measured with networks of 64 to 256 units and 4 to 400 inputs."""
    wide = sum(math.prod(jnp.shape(x)[len(shape) :]) for x in jax.tree.leaves(batch.obs)) > WIDE
    recurrent = bool(jax.tree.leaves(batch.carry))
    if wide or recurrent or math.prod(shape) < LARGE or jax.default_backend() != "cpu":
        return 1
    pieces, needed = _equal_pieces(shape, axis, CACHED)
    return pieces if pieces <= 2 * needed else 1


def _equal_pieces(shape: tuple[int, ...], axis: int, microbatch: int) -> tuple[int, int]:
    """The least number of equal pieces of axis `axis` with at most `microbatch` elements each; and of any pieces."""
    size, needed = shape[axis], min(shape[axis], -(-math.prod(shape) // microbatch))
    return next(n for n in range(needed, size + 1) if size % n == 0), needed


def _pieces(shape: tuple[int, ...], axis: int, microbatch: int) -> int:
    """How many pieces were asked for."""
    pieces, needed = _equal_pieces(shape, axis, microbatch)
    if pieces > 2 * needed:
        raise ValueError(
            f"learner: a minibatch of shape {shape} cannot be evaluated in equal pieces of about microbatch="
            f"{microbatch} elements: the nearest number of pieces that divides {shape[axis]} is {pieces}; use another "
            "microbatch or minibatches of another size"
        )
    return pieces
