"""The PPO of other libraries, each as a chain and an optimizer with that library's defaults.

    pipeline, optimizer = libraries.rsl_rl(num_epochs=8)
    learner = pp.learner(policy, pipeline, optimizer)

Each function describes the update of the library after which it is named, so that you can compare two of them line by
line and adopt single lines. The tests replay updates that were recorded from the libraries' own code. docs/libraries.md
compares the choices.
"""

from __future__ import annotations

import numpy as np
import optax

import ppo_parts as pp

from . import parts as parts


def stable_baselines3(
    *, learning_rate: float = 3e-4, num_minibatches: int = 32, num_epochs: int = 10, gamma: float = 0.99,
    gae_lambda: float = 0.95, clip_eps: float = 0.2, value_clip_eps: float | None = None, value_coef: float = 0.5,
    entropy_coef: float = 0.0, max_grad_norm: float | None = 0.5, target_kl: float | None = None,
) -> tuple[pp.Part, optax.GradientTransformation]:  # fmt: skip
    """Stable-Baselines3 2.9: a clipped value without the maximum, and a stop at 1.5 times `target_kl`."""
    pipeline = pp.chain(
        pp.gae(gamma=gamma, gae_lambda=gae_lambda),
        pp.shuffled_minibatches(num_minibatches, num_epochs),
        pp.advantage_normalize(ddof=1),
        pp.clipped_surrogate(clip_eps=clip_eps),
        pp.policy_diagnostics(),
        pp.identity() if value_clip_eps is None else parts.clip_prediction(value_clip_eps),
        parts.squared_error(value_coef),
        pp.entropy_bonus(coef=entropy_coef),
        pp.identity() if target_kl is None else pp.kl_early_stop(1.5 * target_kl),
    )
    rate = pp.optim.scale_by_update_schedule(learning_rate)
    return pipeline, optax.chain(parts.clip(max_grad_norm), optax.scale_by_adam(eps=1e-5), rate)


def tianshou(
    *, learning_rate: float = 1e-3, num_minibatches: int = 32, num_epochs: int = 1, gamma: float = 0.99,
    gae_lambda: float = 0.95, advantage_normalize: bool = True, recompute_advantage: bool = False,
    clip_eps: float = 0.2, dual_clip: float | None = None, value_clip_eps: float | None = None,
    value_coef: float = 0.5, entropy_coef: float = 0.01, max_grad_norm: float | None = None,
) -> tuple[pp.Part, optax.GradientTransformation]:  # fmt: skip
    """Tianshou 2.0: advantages can be recomputed before each epoch, which needs `rollout(keep_next_obs=True)`."""
    pipeline = pp.chain(
        parts.evaluate_next_obs() if recompute_advantage else pp.identity(),
        pp.gae(gamma=gamma, gae_lambda=gae_lambda),
        pp.shuffled_minibatches(num_minibatches, num_epochs, refresh="epoch" if recompute_advantage else "rollout"),
        pp.advantage_normalize(ddof=1) if advantage_normalize else pp.identity(),
        pp.clipped_surrogate(clip_eps=clip_eps, dual_clip=dual_clip),
        pp.policy_diagnostics(),
        parts.squared_error(value_coef, value_clip_eps),
        pp.entropy_bonus(coef=entropy_coef),
    )
    rate = pp.optim.scale_by_update_schedule(learning_rate)
    return pipeline, optax.chain(parts.clip(max_grad_norm), optax.scale_by_adam(eps=1e-8), rate)


def rsl_rl(
    *, learning_rate: float = 1e-3, target_kl: float | None = 0.01, num_minibatches: int = 4, num_epochs: int = 5,
    gamma: float = 0.99, gae_lambda: float = 0.95, advantage_normalize_rollout: bool = True, clip_eps: float = 0.2,
    clip_value: bool = True, value_coef: float = 1.0, entropy_coef: float = 0.01, max_grad_norm: float | None = 1.0,
) -> tuple[pp.Part, optax.GradientTransformation]:  # fmt: skip
    """rsl_rl 5.5: an adaptive rate, and gradients clipped per network; needs `rollout(keep_distribution=True)`.

    The entries of the parameter tree are the networks, such as `{"policy": ..., "value": ...}`.
    """
    normalize = pp.advantage_normalize(ddof=1)
    pipeline = pp.chain(
        parts.truncate_at_current_value(),
        pp.gae(gamma=gamma, gae_lambda=gae_lambda),
        normalize if advantage_normalize_rollout else pp.identity(),
        pp.shuffled_minibatches(num_minibatches, num_epochs),
        pp.identity() if advantage_normalize_rollout else normalize,
        pp.clipped_surrogate(clip_eps=clip_eps),
        pp.policy_diagnostics(),
        parts.squared_error(value_coef, clip_eps if clip_value else None),
        pp.entropy_bonus(coef=entropy_coef),
        pp.identity() if target_kl is None else parts.divergence(),
    )
    rate = parts.adaptive(learning_rate, target_kl, metric="kl")
    return pipeline, optax.chain(parts.clip_each_network(max_grad_norm), optax.scale_by_adam(eps=1e-8), rate)


def skrl(
    *, learning_rate: float = 1e-3, target_kl: float | None = None, num_minibatches: int = 2, num_epochs: int = 8,
    gamma: float = 0.99, gae_lambda: float = 0.95, bootstrap_truncations: bool = False, normalize_value: bool = False,
    clip_eps: float = 0.2, value_clip_eps: float | None = 0.2, value_coef: float = 2.5, entropy_coef: float = 0.0,
    max_grad_norm: float | None = 0.5,
) -> tuple[pp.Part, optax.GradientTransformation]:  # fmt: skip
    """skrl 2.1: by default, an episode continues where it was truncated; `target_kl` is for its `KLAdaptiveLR`."""
    truncations = pp.identity() if bootstrap_truncations else parts.ignore_truncations()
    estimator = pp.chain(truncations, pp.gae(gamma=gamma, gae_lambda=gae_lambda))
    pipeline = pp.chain(
        parts.normalized_values(estimator) if normalize_value else estimator,
        pp.advantage_normalize(ddof=1),
        pp.shuffled_minibatches(num_minibatches, num_epochs),
        pp.clipped_surrogate(clip_eps=clip_eps),
        pp.policy_diagnostics(),
        pp.identity() if value_clip_eps is None else parts.clip_prediction(value_clip_eps),
        parts.squared_error(value_coef),
        pp.entropy_bonus(coef=entropy_coef),
    )
    rate = parts.adaptive(learning_rate, target_kl, average_over=num_minibatches, low=1e-6)
    return pipeline, optax.chain(parts.clip(max_grad_norm), optax.scale_by_adam(eps=1e-8), rate)


def brax(
    *, learning_rate: float = 1e-4, target_kl: float | None = None, num_minibatches: int = 16, num_epochs: int = 2,
    segment_length: int | None = None, reward_scale: float = 1.0, gamma: float = 0.9, gae_lambda: float = 0.95,
    advantage_normalize: bool = True, clip_eps: float = 0.3, value_clip_eps: float | None = None,
    value_coef: float = 0.5, entropy_coef: float = 1e-4, max_grad_norm: float | None = None,
) -> tuple[pp.Part, optax.GradientTransformation]:  # fmt: skip
    """brax 0.14: advantages of the policy being trained; for `TanhNormal`; needs `rollout(keep_next_obs=True)`.

    With `target_kl`, it also needs `rollout(keep_distribution=True)`. Advantages end with the segments, which are as
    long as the rollout, or `segment_length`, which brax calls `unroll_length`.
    """
    pipeline = pp.chain(
        parts.scale_reward(reward_scale),
        pp.segment_minibatches(num_minibatches, num_epochs) if segment_length is None
        else pp.time_chunks(num_minibatches, num_epochs, length=segment_length),
        parts.evaluate_next_obs(),
        parts.one_more_step(gamma, gae_lambda),
        pp.advantage_normalize() if advantage_normalize else pp.identity(),
        pp.clipped_surrogate(clip_eps=clip_eps),
        pp.policy_diagnostics(),
        pp.value_loss(coef=value_coef) if value_clip_eps is None
        else pp.clipped_value_loss(clip_eps=value_clip_eps, coef=value_coef),
        pp.entropy_bonus(coef=entropy_coef),
        pp.identity() if target_kl is None else parts.divergence(),
    )  # fmt: skip
    rate = parts.adaptive(learning_rate, target_kl, metric="kl")
    return pipeline, optax.chain(parts.clip(max_grad_norm), optax.scale_by_adam(), rate)


def rl_games(
    *, num_envs: int, num_steps: int, num_actions: int, learning_rate: float = 3e-4, target_kl: float | None = 0.008,
    adapt_each_epoch: bool = False, num_minibatches: int = 2, num_epochs: int = 4, gamma: float = 0.99,
    gae_lambda: float = 0.95, normalize_value: bool = True, clip_eps: float = 0.2, clip_value: bool = True,
    value_coef: float = 2.0, entropy_coef: float = 0.0, bounds_coef: float = 0.0, soft_bound: float = 1.1,
    max_grad_norm: float | None = 1.0, reward_scale: float = 1.0,
) -> tuple[pp.Part, optax.GradientTransformation]:  # fmt: skip
    """rl_games 1.6: no shuffle, running moments of the value; needs `rollout(keep_distribution=True)`.

    rl_games has no defaults for most of these arguments, so they come from its `configs/mujoco/ant_envpool.yaml`. Its
    `bound_loss_type: regularisation` is `soft_bound=0`.
    """
    if num_envs % num_minibatches:
        says = f"must divide the {num_envs} environments, got {num_minibatches}"
        raise pp.errors.UserValueError(says, where="rl_games", argument="num_minibatches")
    estimator = pp.chain(parts.truncate_at_current_value(), pp.gae(gamma=gamma, gae_lambda=gae_lambda))
    segments = np.tile(np.arange(num_envs).reshape(1, num_minibatches, -1), (num_epochs, 1, 1))
    pipeline = pp.chain(
        parts.scale_reward(reward_scale),
        parts.normalized_values(estimator, eps=1e-5, ddof=0) if normalize_value else estimator,
        pp.advantage_normalize(ddof=1),
        pp.given_indices(segments, "segment"),
        pp.clipped_surrogate(clip_eps=clip_eps),
        pp.policy_diagnostics(),
        pp.clipped_value_loss(clip_eps=clip_eps, coef=value_coef) if clip_value else pp.value_loss(coef=value_coef),
        pp.entropy_bonus(coef=entropy_coef),
        pp.regularizers.bounds_loss(coef=bounds_coef, bound=soft_bound),
        parts.divergence_since_last_epoch((num_minibatches, num_steps, num_envs // num_minibatches, num_actions)),
    )
    average = num_minibatches if adapt_each_epoch else 1
    rate = parts.adaptive(learning_rate, target_kl, metric="kl", average_over=average, low=1e-6)
    return pipeline, optax.chain(parts.clip(max_grad_norm), optax.scale_by_adam(eps=1e-8), rate)
