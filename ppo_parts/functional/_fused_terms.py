"""The terms of `categorical_ppo_loss`, which XLA computes for whole arrays, and the kernel for blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._common import Array
from ._losses import clipped_surrogate, clipped_value_loss, value_loss
from ._statistics import approx_kl, clip_fraction


class Inputs(NamedTuple):
    """The inputs of the loss: `logits` of all elements `[..., n]`, the other arrays `[...]`, then numbers."""

    logits: Array
    action: Array
    log_prob: Array
    advantage: Array
    value: Array
    target: Array
    old_value: Any
    mask: Any
    clip_eps: Any
    clip_eps_high: Any
    dual_clip: Any
    value_clip_eps: Any
    value_coef: Any
    entropy_coef: Any


FLOATS = ("logits", "log_prob", "advantage", "value", "target", "old_value")
NUMBERS = {  # the lower bound of each, and whether it is excluded
    "clip_eps": (0, True),
    "clip_eps_high": (0, True),
    "dual_clip": (1, True),
    "value_clip_eps": (0, True),
    "value_coef": (0, False),
    "entropy_coef": (0, False),
}
OPTIONAL = ("old_value", "mask", "clip_eps_high", "dual_clip", "value_clip_eps")


def terms(x: Inputs) -> tuple[Array, ...]:
    """Compute per element the policy loss, value loss, entropy, approximate KL and clip fraction; 0 where masked.

    The kernel runs this function, and its derivative, on blocks of elements.
    """
    dtype, actions = x.clip_eps.dtype, x.logits.shape[-1]
    keep = None if x.mask is None else x.mask.astype(bool)
    logits = x.logits.astype(dtype)
    if keep is not None:
        logits = jnp.where(keep[..., None], logits, 0)
    log_probs = jax.nn.log_softmax(logits)
    probs = jnp.exp(log_probs)
    entropy = -jnp.sum(probs * jnp.where(probs > 0, log_probs, 0), axis=-1)
    integer = jnp.promote_types(x.action.dtype, jnp.int32)
    action, option = x.action.astype(integer), jax.lax.broadcasted_iota(integer, logits.shape, logits.ndim - 1)
    chosen = jnp.sum(jnp.where(action[..., None] == option, log_probs, 0), axis=-1)
    log_ratio = jnp.where((action >= 0) & (action < actions), chosen, jnp.nan) - x.log_prob.astype(dtype)
    clip: dict[str, Any] = {"clip_eps": x.clip_eps, "clip_eps_high": x.clip_eps_high, "mask": keep}
    policy = clipped_surrogate(log_ratio, x.advantage.astype(dtype), dual_clip=x.dual_clip, **clip)
    value, target = x.value.astype(dtype), x.target.astype(dtype)
    if x.old_value is None:
        critic = value_loss(value, target, mask=keep)
    else:
        old = x.old_value.astype(dtype)
        critic = clipped_value_loss(value, old, target, clip_eps=x.value_clip_eps, mask=keep)
    if keep is not None:
        entropy = jnp.where(keep, entropy, 0)
    still = jax.lax.stop_gradient(log_ratio)
    return policy, critic, entropy, approx_kl(still, mask=keep), clip_fraction(still, **clip)


def combined(x: Inputs, terms: Sequence[Array]) -> Array:
    """Return the loss, from the terms of elements or from the means of all."""
    policy, value, entropy, *_ = terms
    return policy + x.value_coef * value - x.entropy_coef * entropy
