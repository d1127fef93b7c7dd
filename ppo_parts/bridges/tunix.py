"""Functions that add losses and advantages to Tunix's registry.

    from ppo_parts.bridges import tunix

    tunix.register()
    config = GRPOConfig(advantage_estimator="ppo_parts/rloo", policy_loss_fn="ppo_parts/cispo")

Tunix's arrays are `[B, T]`, with the sequence axis first. This module was tested with google-tunix 0.1.7.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .. import functional
from .._base.extras import require_package
from .._core.batch import Array
from .._parts.losses import declaration
from ..distributions import Categorical
from ..errors import UserValueError
from ..functional import masked_mean

LOSSES: dict[str, tuple[Callable[..., Array], dict[str, Any]]] = {
    "clipped_surrogate": (functional.clipped_surrogate, {"clip_eps": 0.2}),
    "clip_higher": (functional.clipped_surrogate, {"clip_eps": 0.2, "clip_eps_high": 0.28}),
    "cispo": (functional.cispo, {"clip_eps": 1.0, "clip_eps_high": 1.0}),
    "gmpo": (functional.gmpo, {"clip_eps": 0.4}),
    "gpg": (functional.policy_gradient_loss, {}),
    "gspo": (functional.gspo, {"clip_eps": 3e-4, "clip_eps_high": 4e-4}),
    "sapo": (functional.sapo, {"tau": 1.0, "tau_negative": 1.05}),
}
ADVANTAGES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "drgrpo": {"scale": None},
    "lite_ppo": {"scale": "batch"},
    "rloo": {"baseline": "leave_one_out", "scale": None},
}


def register(prefix: str = "ppo_parts/") -> tuple[str, ...]:
    """Register every loss of `LOSSES`, every advantage of `ADVANTAGES`, and GAE with Tunix.

    Args:
        prefix: prefix of the names, so that they do not replace Tunix's own.

    Returns:
        The registered names, for `policy_loss_fn=` and `advantage_estimator=` in Tunix's configurations.

    Raises:
        MissingPackage: if Tunix is not installed.
    """
    for name, (loss, hyperparameters) in LOSSES.items():
        register_loss(prefix + name, loss, **hyperparameters)
    for name, settings in ADVANTAGES.items():
        register_advantage(prefix + name, **settings)
    _find_registry().register("advantage_estimator", prefix + "gae")(gae)
    return tuple(prefix + name for name in (*LOSSES, *ADVANTAGES, "gae"))


def register_loss(name: str, loss: Callable[..., Array], **hyperparameters: Any) -> None:
    """Register `loss(log_ratio, advantage, *, mask, **hyperparameters)`, one number per token, as a policy loss.

    Tunix's configuration determines the rest. `loss_agg_mode` aggregates the tokens, `beta` and `kl_loss_mode` of
    `GRPOConfig` (or `kl_coef` of `PPOConfig`, whose `beta` is part of the reward) add the divergence from the
    reference, `entropy_coef` subtracts an entropy bonus, and sampler weights multiply the loss. The metrics
    `pg_clipfrac`, `pg_clipfrac_lower` and `pg_loss/clipped_mean` of Tunix's learners are NaN, because not all losses
    define them.

    Args:
        name: name for `policy_loss_fn=`.
        loss: a function of arrays `[T, B]`, such as those of `ppo_parts.functional`.
        **hyperparameters: keyword arguments of that function.

    The registered loss raises a ValueError if Tunix packs several sequences into a row and the loss works on whole
    sequences, as `gspo` does.
    """
    common, nnx = require_package("tunix.rl.common", "tunix"), require_package("flax.nnx", "tunix")
    jax.eval_shape(lambda x: loss(x, x, mask=x, **hyperparameters), jnp.ones((1, 1)))  # raises if invalid

    def policy_loss(
        model: Any, train_example: Any, algo_config: Any, pad_id: int, eos_id: int, **_: Any
    ) -> tuple[Array, dict[str, Any]]:
        x, mask = train_example, train_example.completion_mask
        packed = {name: getattr(x, name, None) for name in ("segment_ids", "segment_positions")}
        if declaration(loss, "along_time") and packed["segment_ids"] is not None:
            says = "the loss averages over each sequence, and Tunix has packed several sequences into a row"
            raise UserValueError(f"{name}: {says}: switch sequence packing off")

        def read_setting(name: str, default: Any) -> Any:
            value = getattr(algo_config, name, None)
            return default if value is None else value

        def aggregate(tokens: Array) -> Array:
            return common.aggregate_loss(tokens, mask, read_setting("loss_agg_mode", "token-mean"))

        sequences = {"prompt_tokens": x.prompt_ids, "completion_tokens": x.completion_ids, **packed}
        how = {"stop_gradient": False, "return_logits": True, "temperature": read_setting("temperature", 1.0)}
        computed = common.compute_per_token_logps(*nnx.split(model), **sequences, pad_id=pad_id, eos_id=eos_id, **how)
        log_prob, logits = (array.astype(jnp.float32) for array in computed)
        acted = jax.lax.stop_gradient(log_prob) if x.old_per_token_logps is None else x.old_per_token_logps
        whole = x.advantages if jnp.ndim(x.advantages) == 2 else x.advantages[:, None]
        advantage = jnp.broadcast_to(whole, log_prob.shape).astype(log_prob.dtype)
        weights = getattr(x, "sampler_is_weights", None)
        weights = jnp.ones_like(log_prob) if weights is None else weights
        policy = aggregate(weights * loss((log_prob - acted).T, advantage.T, mask=mask.T, **hyperparameters).T)

        kl = jnp.zeros_like(log_prob)
        if x.ref_per_token_logps is not None:
            estimator, limit = read_setting("kl_loss_mode", "kl"), read_setting("kl_clamp_value", None)
            kl = common.compute_kl_divergence(log_prob, x.ref_per_token_logps, estimator, clamp_value=limit)
        kl_coef = read_setting("beta" if hasattr(algo_config, "loss_agg_mode") else "kl_coef", 0.0)
        kl_loss = aggregate(kl)
        total = policy + kl_coef * kl_loss if kl_coef else policy  # 0 * inf would be NaN
        entropy_coef = read_setting("entropy_coef", 0.0)
        entropy = aggregate(Categorical(logits if entropy_coef else jax.lax.stop_gradient(logits)).entropy())
        if entropy_coef:  # as a metric it needs no gradient, which takes as much memory as the logits
            total = total - entropy_coef * entropy
        metrics = _measure(log_prob - acted, advantage, weights, mask)
        metrics |= {"kl": masked_mean(kl, mask), "kl_loss": kl_loss, "pg_loss": policy}
        metrics |= {"entropy": entropy, "loss/entropy": entropy}
        return total, metrics

    _find_registry().register("policy_loss_fn", name)(policy_loss)


def _measure(log_ratio: Array, advantage: Array, weights: Array, mask: Array) -> dict[str, Any]:
    """Return the metrics that Tunix's learners log, under their names."""
    log_ratio, counts = jax.lax.stop_gradient(log_ratio), mask.astype(bool)
    ratio = jnp.exp(log_ratio)

    def find_largest(x: Array) -> Array:
        return jnp.max(x, where=counts, initial=-jnp.inf)

    means = {
        "ppo_kl": -log_ratio,
        "log_ratio/abs_mean": jnp.abs(log_ratio),
        "is_ratio/mean": ratio,
        "pg_loss/unclipped_mean": -advantage * ratio,
        "advantage/abs_mean": jnp.abs(advantage),
        "advantage/nonzero_frac": (jnp.abs(advantage) > 1e-8).astype(log_ratio.dtype),
        "sampler_is/weight_mean": weights.astype(log_ratio.dtype),
    }
    return {
        **{name: masked_mean(x, mask) for name, x in means.items()},
        "is_ratio/max": find_largest(ratio),
        "is_ratio/min": -find_largest(-ratio),
        "advantage/max": find_largest(advantage),
        "advantage/min": -find_largest(-advantage),
        "sampler_is/weight_min": -find_largest(-weights),
        **dict.fromkeys(("pg_clipfrac", "pg_clipfrac_lower", "pg_loss/clipped_mean"), jnp.nan),
    }


def register_advantage(name: str, **settings: Any) -> None:
    """Register `functional.group_advantage` with these settings as an advantage estimator.

    Args:
        name: name for `advantage_estimator=`. Tunix's agentic learner calls it once per group, where `scale="batch"`
            (as in "lite_ppo") divides by the standard deviation of only that group, as "grpo" does.
        **settings: arguments of `functional.group_advantage`, for example `scale=None`.
    """
    functional.group_advantage(jnp.zeros(2), jnp.zeros(2, int), **settings)  # raises for a wrong setting

    def estimator(rewards: Any, num_generations: int) -> Array:
        reward = jnp.asarray(rewards, jnp.result_type(float))
        if len(reward) % num_generations:
            raise UserValueError(f"{name}: num_generations={num_generations} must divide the {len(reward)} rewards")
        return functional.group_advantage(reward, jnp.arange(len(reward)) // num_generations, **settings)

    _find_registry().register("advantage_estimator", name)(estimator)


def gae(rewards: Array, values: Array, completion_mask: Array, gamma: float, gae_lambda: float) -> tuple[Array, Array]:
    """Compute standardized advantages and returns `[B, T]` as Tunix's "gae" does, skipping masked tokens."""
    mask = completion_mask.astype(bool).T
    value, last = values.T, jnp.cumsum(mask[::-1], axis=0)[::-1] == 1
    following = functional.next_values(value, jnp.zeros_like(value[0]), mask=mask)
    steps = (jnp.asarray(rewards, value.dtype).T, value, following, last & mask)
    out = functional.gae(*steps, gamma=gamma, gae_lambda=gae_lambda, mask=mask, mask_mode="skip")
    return functional.advantage_normalize(out.advantage, ddof=1, mask=mask).T, out.target.T


def _find_registry() -> Any:
    require_package("tunix.rl.algo_core", "tunix")  # registers Tunix's own functions
    return require_package("tunix.rl.function_registry", "tunix").default_registry
