"""Parts of other libraries' PPO that `ppo_parts` lacks; each implements one difference.

`ppo_parts.recipes.libraries` chains them, and docs/libraries.md tells which library uses which part.
"""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import optax

import ppo_parts as pp
from ppo_parts.envs import Moments


def squared_error(coef: float, clip_eps: float | None = None) -> pp.Part:
    """Add the value loss without the factor 1/2, clipped or not."""
    if clip_eps is None:
        return pp.value_loss(coef=2 * coef)
    return pp.clipped_value_loss(clip_eps=clip_eps, coef=2 * coef)


def truncate_at_current_value() -> pp.Part:
    """Bootstrap truncated steps from the value before the step, which needs no final observation."""

    def update(batch: pp.Batch) -> pp.Batch:
        return batch.replace(next_value=jnp.where(_truncated(batch), batch.value, batch.next_value))

    return pp.stateless(
        update, name="truncate_at_current_value", requires=("value", "next_value"), provides=("next_value",),
        reads=("truncated",),
    )  # fmt: skip


def ignore_truncations() -> pp.Part:
    """Continue episodes where they were truncated, as if the first state of the next one had followed."""

    def update(batch: pp.Batch) -> pp.Batch:
        truncated = _truncated(batch)
        next_value = _following(batch.value, batch.next_value, _next_counts(batch) & truncated)
        return batch.replace(truncated=jnp.zeros_like(truncated), next_value=next_value)

    return pp.stateless(
        update, name="ignore_truncations", requires=("value", "next_value"), provides=("truncated", "next_value"),
        reads=("truncated", "mask"), needs_time=True,
    )  # fmt: skip


def _truncated(batch: pp.Batch) -> jax.Array:
    """Return whether a time limit cut each step, as booleans; False everywhere if the batch has no such flags."""
    return jnp.zeros_like(batch.value, bool) if batch.truncated is None else batch.truncated.astype(bool)


def _next_counts(batch: pp.Batch) -> jax.Array:
    """Return whether the step after each step is in the batch and not masked, as booleans `[T, N]`."""
    counts = jnp.ones_like(batch.reward, bool) if batch.mask is None else batch.mask.astype(bool)
    return jnp.concatenate([counts[1:], jnp.zeros_like(counts[:1])])


def _following(x: jax.Array, otherwise: jax.Array, where: jax.Array) -> jax.Array:
    """Return the next step's entry of `x` where there is one, and `otherwise` elsewhere."""
    return jnp.where(where, jnp.roll(x, -1, axis=0), otherwise)


def scale_reward(scale: float) -> pp.Part:
    """Multiply the reward."""
    return pp.stateless(
        lambda batch: batch.replace(reward=scale * batch.reward),
        name="scale_reward", requires=("reward",), provides=("reward",), reads=(),
    )  # fmt: skip


def one_more_step(gamma: float, gae_lambda: float) -> pp.Part:
    r"""Write the lambda-return as target, and the reward plus the *next* target minus the value as advantage.

    The advantage is :math:`\delta_t + \gamma A_{t+1}`, instead of GAE's :math:`\delta_t + \gamma\lambda A_{t+1}`. A
    truncated step has an advantage of 0 and its own value as target.
    """

    def update(batch: pp.Batch) -> pp.Batch:
        value, next_value = jax.lax.stop_gradient((batch.current.value, batch.next_value))
        keep, goes_on, follows = 1 - _truncated(batch), 1 - batch.terminated, _next_counts(batch)
        estimate = pp.functional.gae(
            batch.reward, value, _following(value, next_value, follows), batch.terminated,
            gamma=gamma, gae_lambda=gae_lambda, mask=keep if batch.mask is None else keep * batch.mask,
        )  # fmt: skip
        target = estimate.advantage + value
        next_target = _following(target, next_value, follows)
        return batch.replace(target=target, advantage=keep * (batch.reward + gamma * goes_on * next_target - value))

    return pp.stateless(
        update, name="one_more_step", requires=("reward", "terminated", "next_value"),
        provides=("advantage", "target"), reads=("current.value", "truncated", "mask"), place="after_sampler",
        needs_time=True,
    )  # fmt: skip


def append_sample(moments: Moments, x: jax.Array, keep: Any, ddof: int) -> Moments:
    """Combine running moments with those of a sample, whose variance is divided by its size minus `ddof`."""
    x, counted = x.astype(moments.mean.dtype), jnp.broadcast_to(keep, x.shape)
    number = jnp.sum(counted).astype(x.dtype)
    mean = jnp.sum(x, where=counted) / jnp.maximum(number, 1)
    variance = jnp.sum(jnp.square(x - mean), where=counted) / jnp.maximum(number - ddof, 1)
    return moments.appended(Moments(mean, variance, number))


def normalize(moments: Moments, x: jax.Array, eps: float) -> jax.Array:
    """Standardize, and clip to five standard deviations."""
    return jnp.clip((x - moments.mean) / jnp.sqrt(moments.var + eps), -5, 5).astype(x.dtype)


def restore(moments: Moments, x: jax.Array, eps: float) -> jax.Array:
    """Invert `normalize`."""
    return (jnp.sqrt(moments.var + eps) * jnp.clip(x, -5, 5) + moments.mean).astype(x.dtype)


def normalized_values(estimator: pp.Part, eps: float = 0.0, ddof: int = 1) -> pp.Part:
    """Run `estimator` in reward units, for a network whose values are normalized by running moments of targets."""

    def init(params: Any, key: Any = None) -> tuple[Moments, Any]:
        return Moments(jnp.zeros(()), jnp.ones(()), jnp.ones(())), estimator.init(params, key)

    def update(batch: pp.Batch, state: Any, context: pp.Context) -> tuple[pp.Batch, Any]:
        old, inner = state
        value, next_value = restore(old, batch.value, eps), restore(old, batch.next_value, eps)
        given = batch.next_value
        batch, inner = estimator.update(batch.replace(value=value, next_value=next_value), inner, context)
        keep = True if batch.mask is None else batch.mask.astype(bool)
        moments = append_sample(old, batch.value, keep, ddof)
        value = normalize(moments, batch.value, eps)  # with moments that include the values, but not yet the targets
        moments = append_sample(moments, batch.target, keep, ddof)
        target = normalize(moments, batch.target, eps)
        return batch.replace(value=value, next_value=given, target=target), (moments, inner)

    written = dict.fromkeys(field for field in (*estimator.provides, "value") if field != "next_value")
    return pp.Part(
        init, update, "normalized_values", requires=estimator.requires, provides=tuple(written),
        reads=None if estimator.reads is None else (*estimator.reads, "target"), place="before_sampler",
        needs_time=True,
    )  # fmt: skip


def divergence() -> pp.Part:
    """Add the metric `kl`, the mean closed-form KL(behavior || current), with a penalty of weight 0."""
    return pp.kl_penalty(coef=0.0, estimator="analytic", name="kl")


def divergence_since_last_epoch(shape: tuple[int, ...]) -> pp.Part:
    """Add the metric `kl`, the mean of KL(current || the policy when it last saw this minibatch), for Gaussians.

    `shape` is the shape of the means of all minibatches, `[minibatches, ..., actions]`. The small constants come from
    rl_games; with them, the divergence of an unchanged policy is not exactly 0 and may be negative.
    """

    def init(params: Any, key: Any = None) -> dict[str, jax.Array]:
        return {"loc": jnp.zeros(shape, float), "scale": jnp.ones(shape, float)}

    def update(batch: pp.Batch, state: Any, context: pp.Context) -> tuple[pp.Batch, Any]:
        gaussian, index = jax.lax.stop_gradient(batch.current.distribution), context.minibatch
        now = {name: getattr(gaussian, name) for name in state}
        old = {name: jnp.where(context.epoch > 0, x[index], getattr(batch.behavior, name)) for name, x in state.items()}
        # Masked places may contain anything, so they keep their old content.
        keep = jnp.ones_like(batch.log_prob, bool) if batch.mask is None else batch.mask.astype(bool)
        log_ratio = jnp.log(old["scale"] / now["scale"] + 1e-5)
        squares = jnp.square(now["scale"]) + jnp.square(old["loc"] - now["loc"])
        kl = jnp.sum(log_ratio + squares / (2 * (jnp.square(old["scale"]) + 1e-5)) - 0.5, axis=-1)
        state = {
            name: x.at[index].set(jnp.where(keep[..., None], now[name].astype(x.dtype), x[index]))
            for name, x in jax.tree.map(jnp.asarray, state).items()
        }
        mean = pp.functional.masked_mean(kl, batch.mask)
        return batch.add_metrics(kl=mean.astype(batch.log_prob.dtype)), state

    return pp.Part(
        init, update, "divergence_since_last_epoch", requires=("behavior",), provides=("metrics.kl",),
        reads=("current.distribution", "log_prob", "mask"), place="after_sampler",
        needs_time=True,  # the last policy is stored with the shape of a minibatch
    )  # fmt: skip


def adaptive(learning_rate: float, target_kl: float | None, **options: Any) -> optax.GradientTransformation:
    """Scale by a rate that follows the divergence or, without a target, by a constant rate."""
    if target_kl is None:
        return pp.optim.scale_by_update_schedule(learning_rate)
    return pp.optim.scale_by_kl_adaptive_rate(learning_rate, target_kl, **options)


def clip(max_grad_norm: float | None) -> optax.GradientTransformation:
    """Clip the gradient by its norm, or do nothing if `max_grad_norm` is None."""
    return optax.identity() if max_grad_norm is None else optax.clip_by_global_norm(max_grad_norm)


def clip_each_network(max_grad_norm: float | None) -> optax.GradientTransformation:
    """Clip the gradient of each entry of the parameter tree, such as actor and critic, by its own norm."""
    clipped = clip(max_grad_norm)
    if max_grad_norm is None:
        return clipped

    def update(updates: Any, params: Any = None) -> Any:
        if not isinstance(updates, dict) or len(updates) < 2:
            raise pp.errors.UserValueError(
                "clip_each_network: the parameters must be a dict with an entry for each network, such as "
                f'{{"policy": ..., "value": ...}}, got {list(updates) if isinstance(updates, dict) else type(updates)}'
            )
        return {name: clipped.update(x, clipped.init(x))[0] for name, x in updates.items()}

    return optax.stateless(update)


def in_two_entries(policy: pp.Policy) -> pp.Policy:
    """Divide the parameters of `networks.actor_critic` without shared layers into the entries `policy` and `value`."""

    def init(key: jax.Array) -> Any:
        layers = policy.init(key)["params"]
        count = collections.Counter(name.rpartition("_")[0] for name in layers)
        entries: dict[str, Any] = {"policy": {}, "value": {}}
        for name, x in layers.items():  # of each kind of layer, the critic's follow the actor's
            kind, _, number = name.rpartition("_")
            entries["value" if number.isdigit() and 2 * int(number) >= count[kind] else "policy"][name] = x
        return entries

    def evaluate(params: Any, batch: pp.Batch) -> pp.Output:
        return pp.Output(*policy({"params": {**params["policy"], **params["value"]}}, batch))

    return pp.Policy(init, evaluate)


def evaluate_next_obs() -> pp.Part:
    """Write `next_value` by evaluating the observations that followed, with the latest parameters."""

    def update(batch: pp.Batch, context: pp.Context) -> pp.Batch:
        if batch.carry is not None:
            raise pp.errors.UserValueError(
                "evaluate_next_obs: the policy has a memory, but its state after the next observation is not known: "
                "leave this part out, or use a policy without memory"
            )
        following = context.evaluate(context.params, batch.replace(obs=batch.next_obs)).value
        return batch.replace(next_value=jax.lax.stop_gradient(following))

    return pp.stateless(update, name="evaluate_next_obs", requires=("next_obs",), provides=("next_value",))


def clip_prediction(clip_eps: float) -> pp.Part:
    """Clip the value being trained around the rollout's, without the maximum of `clipped_value_loss`."""

    def update(batch: pp.Batch) -> pp.Batch:
        change = jnp.clip(batch.current.value - batch.value, -clip_eps, clip_eps)
        return batch.replace(current=batch.current._replace(value=batch.value + change))

    return pp.stateless(
        update, name="clip_prediction", requires=("value",), provides=("current.value",), reads=("current.value",),
        place="after_sampler",
    )  # fmt: skip
