"""Calling the user's network, and checking what it returns."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ._types import Array, Batch, Current, Evaluate, Params, kind
from .functional import next_values
from .functional._common import ShapeError


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
            "element is needed; sum over the action's dimensions (distrax.Independent or MultivariateNormalDiag)"
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
