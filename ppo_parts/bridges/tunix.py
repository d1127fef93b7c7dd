"""Losses and advantages of `ppo_parts` in Tunix's registry, and Tunix's advantage estimators in a chain.

    from ppo_parts.bridges import tunix

    tunix.register()
    config = GRPOConfig(advantage_estimator="ppo_parts/rloo", policy_loss_fn="ppo_parts/cispo")

Tunix's arrays are `[B, T]`, with the sequence first. It was tested with google-tunix 0.1.7.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .. import functional
from .._extras import require_package
from .._types import Array, Batch, Part, stateless
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
    """Put every loss of `LOSSES`, every advantage of `ADVANTAGES` and GAE into Tunix's registry.

    Args:
        prefix: how the names begin, so that they do not replace Tunix's own.

    Returns:
        The names, for `policy_loss_fn=` and `advantage_estimator=` of Tunix's configurations.

    Raises:
        MissingPackage: Tunix is not installed.
    """
    for name, (loss, hyperparameters) in LOSSES.items():
        register_loss(prefix + name, loss, **hyperparameters)
    for name, settings in ADVANTAGES.items():
        register_advantage(prefix + name, **settings)
    _registry().register("advantage_estimator", prefix + "gae")(gae)
    return tuple(prefix + name for name in (*LOSSES, *ADVANTAGES, "gae"))


def register_loss(name: str, loss: Callable[..., Array], **hyperparameters: Any) -> None:
    """Register `loss(log_ratio, advantage, *, mask, **hyperparameters)`, one number per token, as a policy loss.

    As in Tunix's own losses, `loss_agg_mode` of its configuration determines how the tokens are aggregated, `beta` and
    `kl_loss_mode` add the divergence from the reference, and weights of the sampler multiply the loss. Tunix logs
    `pg_clipfrac`, which these losses do not define, so it is NaN.

    Args:
        name: for `policy_loss_fn=`.
        loss: a function of arrays `[T, B]`, such as those of `ppo_parts.functional`.
        **hyperparameters: of that function.
    """
    common, nnx = require_package("tunix.rl.common", "tunix"), require_package("flax.nnx", "tunix")

    def policy_loss(
        model: Any, train_example: Any, algo_config: Any, pad_id: int, eos_id: int, **_: Any
    ) -> tuple[Array, dict[str, Any]]:
        x = train_example

        def setting(name: str, default: Any) -> Any:
            return getattr(algo_config, name, default)

        log_prob = _log_prob(common, nnx, model, x, pad_id, eos_id, setting("temperature", 1.0))
        acted = jax.lax.stop_gradient(log_prob) if x.old_per_token_logps is None else x.old_per_token_logps
        whole = x.advantages if jnp.ndim(x.advantages) == 2 else x.advantages[:, None]
        advantage, mask = jnp.broadcast_to(whole, log_prob.shape).astype(log_prob.dtype), x.completion_mask
        tokens = loss((log_prob - acted).T, advantage.T, mask=mask.T, **hyperparameters).T
        if getattr(x, "sampler_is_weights", None) is not None:
            tokens = tokens * x.sampler_is_weights
        mode = setting("loss_agg_mode", "token-mean")
        total = common.aggregate_loss(tokens, mask, mode)
        kl = jnp.zeros_like(log_prob)
        if x.ref_per_token_logps is not None:
            arguments = (log_prob, x.ref_per_token_logps, setting("kl_loss_mode", "kl"))
            kl = common.compute_kl_divergence(*arguments, clamp_value=setting("kl_clamp_value", None))
            total = total + (setting("beta", 0.0) or 0.0) * common.aggregate_loss(kl, mask, mode)
        return total, {"kl": masked_mean(kl, mask), "pg_clipfrac": jnp.nan, "pg_clipfrac_lower": jnp.nan}

    _registry().register("policy_loss_fn", name)(policy_loss)


def register_advantage(name: str, **settings: Any) -> None:
    """Register `functional.group_advantage` with these settings as an advantage estimator.

    Args:
        name: for `advantage_estimator=`.
        **settings: of `functional.group_advantage`, for example `scale=None`.
    """

    def advantage(rewards: Any, num_generations: int) -> Array:
        reward = jnp.asarray(rewards, jnp.result_type(float))
        return functional.group_advantage(reward, jnp.arange(len(reward)) // num_generations, **settings)

    _registry().register("advantage_estimator", name)(advantage)


def gae(rewards: Array, values: Array, completion_mask: Array, gamma: float, gae_lambda: float) -> tuple[Array, Array]:
    """Compute standardized advantages and returns `[B, T]` as Tunix's "gae" does, skipping masked tokens."""
    mask = completion_mask.astype(bool).T
    value, last = values.T, jnp.cumsum(mask[::-1], axis=0)[::-1] == 1
    following = functional.next_values(value, jnp.zeros_like(value[0]), mask=mask)
    steps = (jnp.asarray(rewards, value.dtype).T, value, following, last & mask)
    out = functional.gae(*steps, gamma=gamma, gae_lambda=gae_lambda, mask=mask, mask_mode="skip")
    return functional.advantage_normalize(out.advantage, ddof=1, mask=mask).T, out.target.T


def advantage(name: str, *, group: int, score: str = "score") -> Part:
    """Make a part of an advantage estimator of Tunix's registry: `estimator(rewards, num_generations)`.

    Args:
        name: its name in the registry, for example "grpo".
        group: the number of neighboring segments that form a group.
        score: name of an entry of `per_segment`, one number per sequence.

    Place: before the sampler.
    """
    estimator = _registry().get("advantage_estimator", name)

    def update(batch: Batch) -> Batch:
        tokens = jnp.broadcast_to(estimator(batch.per_segment[score], group), batch.log_prob.shape)
        return batch.replace(advantage=tokens if batch.mask is None else jnp.where(batch.mask.astype(bool), tokens, 0))

    needs = (f"per_segment.{score}",)
    return stateless(
        update, name=f"tunix {name}", requires=needs, provides=("advantage",), place="before_sampler", needs_time=True
    )


def _registry() -> Any:
    require_package("tunix.rl.algo_core", "tunix")  # registers Tunix's own functions
    return require_package("tunix.rl.function_registry", "tunix").default_registry


def _log_prob(common: Any, nnx: Any, model: Any, x: Any, pad_id: int, eos_id: int, temperature: float) -> Array:
    graphdef, state = nnx.split(model)
    return common.compute_per_token_logps(
        graphdef,
        state,
        prompt_tokens=x.prompt_ids,
        completion_tokens=x.completion_ids,
        pad_id=pad_id,
        eos_id=eos_id,
        stop_gradient=False,
        segment_ids=getattr(x, "segment_ids", None),
        segment_positions=getattr(x, "segment_positions", None),
        temperature=temperature,
    ).astype(jnp.float32)
