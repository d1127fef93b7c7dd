"""The PPO of other libraries, each as a chain and an optimizer with that library's defaults.

    pipeline, optimizer = libraries.rsl_rl(num_epochs=8)
    learner = pp.learner(policy, pipeline, optimizer)

Each function reads as the update of the library that it is named after, so that two of them can be compared line by
line, and one line at a time can be taken over. The tests replay updates that were recorded from the libraries' own
code. docs/libraries.md compares the choices.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
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
        squared_error(value_coef),
        pp.entropy_bonus(coef=entropy_coef),
        pp.identity() if target_kl is None else pp.kl_early_stop(1.5 * target_kl),
    )
    return pipeline, pp.clipped_adam(learning_rate, max_grad_norm)


def tianshou(
    *, learning_rate: float = 1e-3, num_minibatches: int = 32, num_epochs: int = 1, gamma: float = 0.99,
    gae_lambda: float = 0.95, advantage_normalize: bool = True, recompute_advantage: bool = False,
    clip_eps: float = 0.2, dual_clip: float | None = None, value_clip_eps: float | None = None,
    value_coef: float = 0.5, entropy_coef: float = 0.01, max_grad_norm: float | None = None,
) -> tuple[pp.Part, optax.GradientTransformation]:  # fmt: skip
    """Tianshou 2.0: advantages can be recomputed before each epoch; needs `rollout(keep_next_obs=True)` then."""
    pipeline = pp.chain(
        evaluate_next_obs() if recompute_advantage else pp.identity(),
        pp.gae(gamma=gamma, gae_lambda=gae_lambda),
        pp.shuffled_minibatches(num_minibatches, num_epochs, refresh="epoch" if recompute_advantage else "rollout"),
        pp.advantage_normalize(ddof=1) if advantage_normalize else pp.identity(),
        pp.clipped_surrogate(clip_eps=clip_eps, dual_clip=dual_clip),
        pp.policy_diagnostics(),
        squared_error(value_coef, value_clip_eps),
        pp.entropy_bonus(coef=entropy_coef),
    )
    clip = optax.identity() if max_grad_norm is None else optax.clip_by_global_norm(max_grad_norm)
    return pipeline, optax.chain(clip, optax.scale_by_adam(eps=1e-8), pp.scale_by_update_schedule(learning_rate))


def rsl_rl(
    *, learning_rate: float = 1e-3, target_kl: float | None = 0.01, num_minibatches: int = 4, num_epochs: int = 5,
    gamma: float = 0.99, gae_lambda: float = 0.95, advantage_normalize_rollout: bool = True, clip_eps: float = 0.2,
    clip_value: bool = True, value_coef: float = 1.0, entropy_coef: float = 0.01, max_grad_norm: float = 1.0,
) -> tuple[pp.Part, optax.GradientTransformation]:  # fmt: skip
    """rsl_rl 5.5: a rate that follows the exact divergence; needs `rollout(keep_distribution=True)`."""
    normalize = pp.advantage_normalize(ddof=1)
    pipeline = pp.chain(
        truncate_at_current_value(),
        pp.gae(gamma=gamma, gae_lambda=gae_lambda),
        normalize if advantage_normalize_rollout else pp.identity(),
        pp.shuffled_minibatches(num_minibatches, num_epochs),
        pp.identity() if advantage_normalize_rollout else normalize,
        pp.clipped_surrogate(clip_eps=clip_eps),
        squared_error(value_coef, clip_eps if clip_value else None),
        pp.entropy_bonus(coef=entropy_coef),
        divergence(),
    )
    rate = adaptive(learning_rate, target_kl, metric="kl")
    return pipeline, optax.chain(clip_each_network(max_grad_norm), optax.scale_by_adam(eps=1e-8), rate)


def skrl(
    *, learning_rate: float = 1e-3, target_kl: float | None = None, num_minibatches: int = 2, num_epochs: int = 8,
    gamma: float = 0.99, gae_lambda: float = 0.95, bootstrap_truncations: bool = False, normalize_value: bool = False,
    clip_eps: float = 0.2, value_clip_eps: float | None = 0.2, value_coef: float = 2.5, entropy_coef: float = 0.0,
    max_grad_norm: float = 0.5,
) -> tuple[pp.Part, optax.GradientTransformation]:  # fmt: skip
    """skrl 2.1: by default, an episode goes on where it was truncated; `target_kl` is that of its `KLAdaptiveLR`."""
    truncations = pp.identity() if bootstrap_truncations else ignore_truncations()
    estimator = pp.chain(truncations, pp.gae(gamma=gamma, gae_lambda=gae_lambda))
    pipeline = pp.chain(
        normalized_values(estimator) if normalize_value else estimator,
        pp.advantage_normalize(ddof=1),
        pp.shuffled_minibatches(num_minibatches, num_epochs),
        pp.clipped_surrogate(clip_eps=clip_eps),
        pp.policy_diagnostics(),
        pp.identity() if value_clip_eps is None else clip_prediction(value_clip_eps),
        squared_error(value_coef),
        pp.entropy_bonus(coef=entropy_coef),
    )
    rate = adaptive(learning_rate, target_kl, average_over=num_minibatches, low=1e-6)
    return pipeline, optax.chain(optax.clip_by_global_norm(max_grad_norm), optax.scale_by_adam(eps=1e-8), rate)


def brax(
    *, learning_rate: float = 1e-4, target_kl: float | None = None, num_minibatches: int = 16, num_epochs: int = 2,
    reward_scale: float = 1.0, gamma: float = 0.9, gae_lambda: float = 0.95, advantage_normalize: bool = True,
    clip_eps: float = 0.3, value_clip_eps: float | None = None, value_coef: float = 0.5, entropy_coef: float = 1e-4,
    max_grad_norm: float | None = None,
) -> tuple[pp.Part, optax.GradientTransformation]:  # fmt: skip
    """brax 0.14: advantages of the policy being trained; for `TanhNormal`; needs `rollout(keep_next_obs=True)`.

    With `target_kl`, it needs `rollout(keep_distribution=True)`, too.
    """
    pipeline = pp.chain(
        scale_reward(reward_scale),
        pp.segment_minibatches(num_minibatches, num_epochs),
        evaluate_next_obs(),
        one_more_step(gamma, gae_lambda),
        pp.advantage_normalize() if advantage_normalize else pp.identity(),
        pp.clipped_surrogate(clip_eps=clip_eps),
        pp.value_loss(coef=value_coef) if value_clip_eps is None
        else pp.clipped_value_loss(clip_eps=value_clip_eps, coef=value_coef),
        pp.entropy_bonus(coef=entropy_coef),
        pp.identity() if target_kl is None else divergence(),
    )  # fmt: skip
    clip = optax.identity() if max_grad_norm is None else optax.clip_by_global_norm(max_grad_norm)
    return pipeline, optax.chain(clip, optax.scale_by_adam(), adaptive(learning_rate, target_kl, metric="kl"))


def rl_games(
    *, num_envs: int, num_steps: int, num_actions: int, learning_rate: float = 3e-4, target_kl: float | None = 0.008,
    adapt_each_epoch: bool = False, num_minibatches: int = 2, num_epochs: int = 4, gamma: float = 0.99,
    gae_lambda: float = 0.95, normalize_value: bool = True, clip_eps: float = 0.2, clip_value: bool = True,
    value_coef: float = 2.0, entropy_coef: float = 0.0, bounds_coef: float = 0.0, max_grad_norm: float = 1.0,
) -> tuple[pp.Part, optax.GradientTransformation]:  # fmt: skip
    """rl_games 1.6, as in its `ant_envpool.yaml`: minibatches are not shuffled; needs `rollout(keep_distribution=True)`."""
    estimator = pp.chain(truncate_at_current_value(), pp.gae(gamma=gamma, gae_lambda=gae_lambda))
    segments = np.tile(np.arange(num_envs).reshape(1, num_minibatches, -1), (num_epochs, 1, 1))
    pipeline = pp.chain(
        normalized_values(estimator, eps=1e-5, ddof=0) if normalize_value else estimator,
        pp.advantage_normalize(ddof=1),
        pp.given_indices(segments, "segment"),
        pp.clipped_surrogate(clip_eps=clip_eps),
        pp.clipped_value_loss(clip_eps=clip_eps, coef=value_coef) if clip_value else pp.value_loss(coef=value_coef),
        pp.entropy_bonus(coef=entropy_coef),
        bounds_loss(bounds_coef),
        divergence_since_last_epoch((num_minibatches, num_steps, num_envs // num_minibatches, num_actions)),
    )
    rate = adaptive(
        learning_rate, target_kl, metric="kl", average_over=num_minibatches if adapt_each_epoch else 1, low=1e-6
    )
    return pipeline, optax.chain(optax.clip_by_global_norm(max_grad_norm), optax.scale_by_adam(eps=1e-8), rate)


# Parts that have no equal in `ppo_parts`, each of which makes one of the differences.


def squared_error(coef: float, clip_eps: float | None = None) -> pp.Part:
    """The value loss without the factor 1/2, clipped or not."""
    if clip_eps is None:
        return pp.value_loss(coef=2 * coef)
    return pp.clipped_value_loss(clip_eps=clip_eps, coef=2 * coef)


def truncate_at_current_value() -> pp.Part:
    """Bootstrap truncated steps from the value of the observation before the step, which needs no final observation."""

    def update(batch: pp.Batch) -> pp.Batch:
        return batch.replace(next_value=jnp.where(batch.truncated.astype(bool), batch.value, batch.next_value))

    fields = ("truncated", "value", "next_value")
    return pp.stateless(update, name="truncate_at_current_value", requires=fields, provides=("next_value",), reads=())


def ignore_truncations() -> pp.Part:
    """Let episodes go on where they were truncated, as if the first state of the next had followed."""

    def update(batch: pp.Batch) -> pp.Batch:
        following = pp.functional.next_values(batch.value, batch.next_value[-1])
        return batch.replace(truncated=jnp.zeros_like(batch.truncated), next_value=following)

    fields = ("truncated", "value", "next_value")
    return pp.stateless(
        update, name="ignore_truncations", requires=fields, provides=fields[::2], reads=(), needs_time=True
    )


def scale_reward(scale: float) -> pp.Part:
    """Multiply the reward."""
    return pp.stateless(
        lambda batch: batch.replace(reward=scale * batch.reward),
        name="scale_reward", requires=("reward",), provides=("reward",), reads=(),
    )  # fmt: skip


def one_more_step(gamma: float, gae_lambda: float) -> pp.Part:
    r"""Write the lambda-return as target, and as advantage the reward plus the *next* target, less the value.

    The advantage is :math:`\delta_t + \gamma A_{t+1}`, where GAE has :math:`\delta_t + \gamma\lambda A_{t+1}`. A
    truncated step has the advantage 0 and its own value as target.
    """

    def update(batch: pp.Batch) -> pp.Batch:
        value, last_value = jax.lax.stop_gradient((batch.current.value, batch.next_value[-1]))
        keep, goes_on = 1 - batch.truncated, 1 - batch.terminated
        estimate = pp.functional.gae(
            batch.reward, value, pp.functional.next_values(value, last_value), batch.terminated,
            gamma=gamma, gae_lambda=gae_lambda, mask=keep,
        )  # fmt: skip
        target = estimate.advantage + value
        following = pp.functional.next_values(target, last_value)
        return batch.replace(target=target, advantage=keep * (batch.reward + gamma * goes_on * following - value))

    return pp.stateless(
        update, name="one_more_step", requires=("reward", "terminated", "truncated", "next_value"),
        provides=("advantage", "target"), reads=("current",), place="after_sampler", needs_time=True,
    )  # fmt: skip


class Moments(NamedTuple):
    """State of `normalized_values`: running moments of values and targets."""

    mean: jax.Array
    variance: jax.Array
    count: jax.Array

    def add(self, x: jax.Array, keep: Any, ddof: int) -> Moments:
        """Combine the moments with those of a sample (Chan et al. 1979)."""
        number, mean = jnp.sum(jnp.broadcast_to(keep, x.shape)), jnp.mean(x, where=keep)
        count, shift = self.count + number, mean - self.mean
        squares = self.variance * self.count + jnp.var(x, ddof=ddof, where=keep) * number
        variance = (squares + jnp.square(shift) * self.count * number / count) / count
        return Moments(self.mean + shift * number / count, variance, count)

    def normalize(self, x: jax.Array, eps: float) -> jax.Array:
        """Standardize, and clip to five standard deviations."""
        return jnp.clip((x - self.mean) / jnp.sqrt(self.variance + eps), -5, 5)

    def restore(self, x: jax.Array, eps: float) -> jax.Array:
        """The inverse of `normalize`."""
        return jnp.sqrt(self.variance + eps) * jnp.clip(x, -5, 5) + self.mean


def normalized_values(estimator: pp.Part, eps: float = 0.0, ddof: int = 1) -> pp.Part:
    """Run `estimator` in reward units, for a network whose value is in units of running moments of the targets."""

    def init(params: Any, key: Any = None) -> tuple[Moments, Any]:
        return Moments(jnp.zeros(()), jnp.ones(()), jnp.ones(())), estimator.init(params, key)

    def update(batch: pp.Batch, state: Any, context: pp.Context) -> tuple[pp.Batch, Any]:
        old, inner = state
        value, next_value = old.restore(batch.value, eps), old.restore(batch.next_value, eps)
        batch, inner = estimator.update(batch.replace(value=value, next_value=next_value), inner, context)
        keep = True if batch.mask is None else batch.mask.astype(bool)
        moments = old.add(batch.value, keep, ddof)
        value = moments.normalize(batch.value, eps)  # with the moments of the values, but not yet of the targets
        moments = moments.add(batch.target, keep, ddof)
        return batch.replace(value=value, target=moments.normalize(batch.target, eps)), (moments, inner)

    return pp.Part(
        init, update, "normalized_values", estimator.requires, (*estimator.provides, "value"), estimator.reads,
        "before_sampler", needs_time=True,
    )  # fmt: skip


def divergence() -> pp.Part:
    """Add the metric `kl`, the mean of KL(behavior || current) in closed form."""

    def update(batch: pp.Batch) -> pp.Batch:
        kl = batch.behavior.kl_divergence(batch.current.distribution)
        return batch.add_metrics(kl=pp.functional.masked_mean(jax.lax.stop_gradient(kl), batch.mask))

    return pp.stateless(
        update, name="divergence", requires=("behavior",), provides=("metrics.kl",), reads=("current", "mask"),
        place="after_sampler",
    )  # fmt: skip


def divergence_since_last_epoch(shape: tuple[int, ...]) -> pp.Part:
    """Add the metric `kl`, the mean of KL(current || the policy when it last saw this minibatch), for Gaussians.

    `shape` is that of the means of all minibatches, `[minibatches, ..., actions]`. The small constants are those of
    rl_games, with which the divergence of a policy that has not moved is not exactly 0, and may be negative.
    """

    def init(params: Any, key: Any = None) -> dict[str, jax.Array]:
        del params, key
        return {"loc": jnp.zeros(shape, float), "scale": jnp.ones(shape, float)}

    def update(batch: pp.Batch, state: Any, context: pp.Context) -> tuple[pp.Batch, Any]:
        gaussian, index = jax.lax.stop_gradient(batch.current.distribution), context.minibatch
        now = {name: getattr(gaussian, name) for name in state}
        then = {
            name: jnp.where(context.epoch > 0, x[index], getattr(batch.behavior, name)) for name, x in state.items()
        }
        log_ratio = jnp.log(then["scale"] / now["scale"] + 1e-5)
        squares = jnp.square(now["scale"]) + jnp.square(then["loc"] - now["loc"])
        kl = jnp.sum(log_ratio + squares / (2 * (jnp.square(then["scale"]) + 1e-5)) - 0.5, axis=-1)
        state = {name: x.at[index].set(now[name].astype(x.dtype)) for name, x in state.items()}
        return batch.add_metrics(kl=pp.functional.masked_mean(kl, batch.mask)), state

    return pp.Part(
        init,
        update,
        "divergence_since_last_epoch",
        ("behavior",),
        ("metrics.kl",),
        ("current", "mask"),
        "after_sampler",
    )


def bounds_loss(coef: float, bound: float = 1.1) -> pp.Part:
    """Add the squared distance of the mean action from the box [-bound, bound] as the loss `bounds`."""

    def update(batch: pp.Batch) -> pp.Batch:
        beyond = jax.nn.relu(jnp.abs(batch.current.distribution.loc) - bound)
        return batch.add_loss("bounds", coef * jnp.sum(jnp.square(beyond), axis=-1))

    return pp.stateless(update, name="bounds_loss", provides=("losses",), reads=("current",), place="after_sampler")


def adaptive(learning_rate: float, target_kl: float | None, **options: Any) -> optax.GradientTransformation:
    """The rate that follows the divergence, or without a target the constant rate."""
    if target_kl is None:
        return pp.scale_by_update_schedule(learning_rate)
    return pp.scale_by_kl_adaptive_rate(learning_rate, target_kl, **options)


def clip_each_network(max_grad_norm: float) -> optax.GradientTransformation:
    """Clip the gradient of each entry of the parameter tree, such as actor and critic, by its own norm."""
    clip = optax.clip_by_global_norm(max_grad_norm)
    return optax.stateless(lambda updates, _: {name: clip.update(x, clip.init(x))[0] for name, x in updates.items()})


def evaluate_next_obs() -> pp.Part:
    """Write `next_value` by evaluating the observations that followed, with the latest parameters."""

    def update(batch: pp.Batch, context: pp.Context) -> pp.Batch:
        following = context.evaluate(context.params, batch.replace(obs=batch.next_obs)).value
        return batch.replace(next_value=jax.lax.stop_gradient(following))

    return pp.stateless(
        update, name="evaluate_next_obs", requires=("next_obs",), provides=("next_value",), reads=("mask",)
    )


def clip_prediction(clip_eps: float) -> pp.Part:
    """Clip the value being trained around the rollout's; without the maximum of `clipped_value_loss`."""

    def update(batch: pp.Batch) -> pp.Batch:
        change = jnp.clip(batch.current.value - batch.value, -clip_eps, clip_eps)
        return batch.replace(current=batch.current._replace(value=batch.value + change))

    return pp.stateless(update, name="clip_prediction", reads=("current", "value"), place="after_sampler")
