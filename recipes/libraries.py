"""The PPO of other libraries, each as a chain and an optimizer with that library's defaults.

    pipeline, optimizer = libraries.rsl_rl(num_epochs=8)
    learner = pp.learner(policy, pipeline, optimizer)

Each function reads as the update of the library that it is named after, so that two of them can be compared line by
line, and one line at a time can be taken over. The tests replay updates that were recorded from the libraries' own
code. docs/libraries.md compares the choices.
"""

from __future__ import annotations

import jax.numpy as jnp
import optax

import ppo_parts as pp


def stable_baselines3(
    *, learning_rate: float = 3e-4, num_minibatches: int = 32, num_epochs: int = 10, gamma: float = 0.99,
    gae_lambda: float = 0.95, clip_eps: float = 0.2, value_clip_eps: float | None = None, value_coef: float = 0.5,
    entropy_coef: float = 0.0, max_grad_norm: float = 0.5, target_kl: float | None = None,
) -> tuple[pp.Part, optax.GradientTransformation]:  # fmt: skip
    """Stable-Baselines3 2.9: truncations bootstrapped from the final state, half the usual clip of the value."""
    pipeline = pp.chain(
        pp.gae(gamma=gamma, gae_lambda=gae_lambda),
        pp.shuffled_minibatches(num_minibatches, num_epochs),
        pp.advantage_normalize(ddof=1),
        pp.clipped_surrogate(clip_eps=clip_eps),
        pp.policy_diagnostics(),
        pp.identity() if value_clip_eps is None else clip_prediction(value_clip_eps),
        pp.value_loss(coef=2 * value_coef),  # it has no factor 1/2
        pp.entropy_bonus(coef=entropy_coef),
        pp.identity() if target_kl is None else pp.kl_early_stop(1.5 * target_kl),
    )
    return pipeline, pp.clipped_adam(learning_rate, max_grad_norm)


def clip_prediction(clip_eps: float) -> pp.Part:
    """Clip the value being trained around the rollout's; without the maximum of `clipped_value_loss`."""

    def update(batch: pp.Batch) -> pp.Batch:
        change = jnp.clip(batch.current.value - batch.value, -clip_eps, clip_eps)
        return batch.replace(current=batch.current._replace(value=batch.value + change))

    return pp.stateless(update, name="clip_prediction", reads=("current", "value"), place="after_sampler")
