"""Handwritten updates in the style of PureJaxRL, with everything inlined: the rivals of `parts` and `update`."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import ppo_parts as pp
from ppo_parts.recipes import cleanrl_ppo, ippo, pufferlib_ppo

Metrics = dict[str, jax.Array]


def scan_by_hand(*arrays: jax.Array, gamma: float, gae_lambda: float, unroll: int = 16) -> Any:
    """Compute GAE, or V-trace if the log-ratios come first, in the closure of one scan."""

    def delta(ratio: list[Any], reward: Any, value: Any, follows: Any, terminated: Any) -> tuple[Any, Any]:
        rho = jnp.minimum(jnp.exp(ratio[0]), 1.0) if ratio else 1.0
        return rho, rho * (reward + gamma * (1 - terminated) * follows - value)

    def step(later: jax.Array, row: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        *ratio, reward, value, follows, terminated, truncated = row
        rho, error = delta(ratio, reward, value, follows, terminated)
        later = error + gamma * gae_lambda * rho * (1 - terminated) * (1 - truncated) * later
        return later, later

    *ratio, reward, value, follows, terminated, truncated = arrays
    error = jax.lax.scan(step, jnp.zeros_like(value[0]), arrays, reverse=True, unroll=unroll)[1]
    target = error + value
    if not ratio:
        return error, target
    follows = jnp.where(truncated, follows, jnp.concatenate([target[1:], follows[-1:]]))
    return error, target, delta(ratio, reward, value, follows, terminated)[1]


class State(NamedTuple):
    """The carry of a handwritten update; the optimizer states have the names of their phases."""

    params: Any
    opt_state: Any
    step: Any = 0


def compute_advantages(config: Any, batch: pp.Batch, value: Any, next_value: Any, *log_ratio: Any) -> jax.Array:
    """Compute GAE or, given log-ratios, V-trace's errors with clips at 1."""
    arrays = (*log_ratio, batch.reward, value, next_value, batch.terminated, batch.truncated)
    return scan_by_hand(*arrays, gamma=config.gamma, gae_lambda=config.gae_lambda, unroll=1)[0]  # faster on CPUs


def compute_actor_loss(config: Any, policy: Any, minibatch: pp.Batch, weight: Any = 1.0, ddof: int = 0) -> Any:
    """Return the clipped surrogate with the entropy bonus, its metrics, and the log-ratio."""
    log_ratio = policy.log_prob(minibatch.action) - minibatch.log_prob
    ratio, advantage = jnp.exp(log_ratio), minibatch.advantage
    advantage = weight * (advantage - advantage.mean()) / (advantage.std(ddof=ddof) + 1e-8)
    clipped = jnp.clip(ratio, 1 - config.clip_coef, 1 + config.clip_coef)
    loss, entropy = -jnp.minimum(ratio * advantage, clipped * advantage).mean(), policy.entropy().mean()
    metrics = {
        "policy_loss": loss, "nonfinite/loss/policy": ~jnp.isfinite(loss),
        "entropy": entropy, "nonfinite/loss/entropy": ~jnp.isfinite(entropy),
        "approx_kl": (jnp.expm1(log_ratio) - log_ratio).mean(), "approx_kl_k1": -log_ratio.mean(),
        "ratio_mean": ratio.mean(), "ratio_min": ratio.min(), "ratio_max": ratio.max(),
        "clip_fraction": (jnp.abs(ratio - 1) > config.clip_coef).mean(),
    }  # fmt: skip
    return loss - config.ent_coef * entropy, metrics, log_ratio


def compute_critic_loss(coef: float, clip: float, value: jax.Array, minibatch: pp.Batch) -> tuple[jax.Array, Metrics]:
    """Return the clipped value loss, multiplied by its coefficient, and its metrics."""
    clipped = minibatch.value + jnp.clip(value - minibatch.value, -clip, clip)
    errors = jnp.maximum((value - minibatch.target) ** 2, (clipped - minibatch.target) ** 2)
    loss = 0.5 * errors.mean()
    return coef * loss, {"value_loss": loss, "nonfinite/loss/value": ~jnp.isfinite(loss)}


def take_step(loss: Callable[..., Any], optimizer: Any, params: Any, opt_state: Any, minibatch: pp.Batch) -> Any:
    """Take one optimizer step; return parameters, optimizer state, metrics, and what else the loss returns."""
    (value, (metrics, seen)), grads = jax.value_and_grad(loss, has_aux=True)(params, minibatch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    norm = optax.tree.norm(grads)
    metrics |= {"loss": value, "grad_norm": norm, "nonfinite/gradient": ~jnp.isfinite(norm)}
    metrics["nonfinite/advantage"] = (~jnp.isfinite(minibatch.advantage)).sum()
    return optax.apply_updates(params, updates), opt_state, metrics, seen


def split_epoch_keys(key: jax.Array, epoch: Any) -> jax.Array:
    """Return the key of an epoch's minibatches, derived exactly as the learner derives it; nothing else is random."""
    return jax.random.split(jax.random.fold_in(key, epoch + 1), 3)[1]


def run_shuffled_epochs(
    loss: Callable[..., Any], optimizer: Any, config: Any, epochs: int, key: jax.Array, state: Any, whole: pp.Batch
) -> tuple[Any, Metrics]:
    """Run epochs of shuffled minibatches of elements `[T, N, ...]`; metrics are `[epochs, minibatches]`."""
    flat = jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), whole)

    def minibatch_step(state: Any, minibatch: pp.Batch) -> Any:
        *state, metrics, _ = take_step(loss, optimizer, *state, minibatch)
        return tuple(state), metrics

    def epoch_step(state: Any, epoch: jax.Array) -> Any:
        permutation = pp.functional.permutation(split_epoch_keys(key, epoch), len(flat.log_prob))
        shuffled = jax.tree.map(lambda x: jnp.take(x, permutation, axis=0), flat)
        minibatches = jax.tree.map(lambda x: x.reshape((config.num_minibatches, -1, *x.shape[1:])), shuffled)
        return jax.lax.scan(minibatch_step, state, minibatches)

    return jax.lax.scan(epoch_step, state, jnp.arange(epochs))


def select_fields(batch: pp.Batch, advantage: jax.Array, value: jax.Array) -> pp.Batch:
    """Return the fields that the losses read."""
    of_rollout = {"obs": batch.obs, "action": batch.action, "log_prob": batch.log_prob}
    return pp.Batch(**of_rollout, value=value, advantage=advantage, target=advantage + value)


def count_nonfinite(batch: pp.Batch) -> Metrics:
    """Count the numbers of a rollout that are not finite."""
    bad = {name: ~jnp.isfinite(getattr(batch, name)) for name in ("reward", "log_prob", "value", "next_value")}
    bad["next_value"] &= ~batch.terminated
    return {f"nonfinite/{name}": x.sum() for name, x in bad.items()}


def reduce_metrics(metrics: Metrics, prefix: str = "") -> Metrics:
    """Reduce the metrics of a phase's minibatches, `[epochs, minibatches]`, to those of the phase."""
    reduce = {"ratio_min": jnp.min, "ratio_max": jnp.max}
    found = {n: (jnp.sum if "nonfinite" in n else reduce.get(n, jnp.mean))(x) for n, x in metrics.items()}
    epochs, minibatches = metrics["loss"].shape
    found |= {"epochs": jnp.array(epochs), "minibatches": jnp.array(epochs * minibatches)}
    return {prefix + name: x for name, x in found.items()}


class Phase(NamedTuple):
    """The epochs, learning rate and loss of a phase; the loss takes a distribution, a value and a minibatch."""

    epochs: int
    rate: float
    loss: Callable[[Any, jax.Array, pp.Batch], tuple[jax.Array, Metrics]]


def phases_by_hand(config: Any, policy: pp.Policy, phases: dict[str, Phase]) -> tuple[Any, Callable[..., Any]]:
    """Return the optimizers, and an update that runs each phase's epochs on the parameters of its name ("": all)."""

    def adam(phase: Phase) -> optax.GradientTransformation:
        def rate(count: jax.Array) -> jax.Array:  # falls linearly with each update
            return phase.rate * (1 - count // (phase.epochs * config.num_minibatches) / config.num_updates)

        return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(rate, eps=1e-5))

    optimizers = {name: adam(phase) for name, phase in phases.items()}

    def update(key: jax.Array, state: State, batch: pp.Batch) -> tuple[State, Metrics]:
        params, opt_state = state.params, dict(state.opt_state)
        advantage = compute_advantages(config, batch, batch.value, batch.next_value)
        whole = select_fields(batch, advantage, batch.value)
        found = count_nonfinite(batch) | {"explained_variance": 1 - jnp.var(advantage) / jnp.var(whole.target)}
        for number, (name, phase) in enumerate(phases.items()):

            def merged(trained: Any, name: str = name, params: Any = params) -> Any:
                return {**params, name: trained} if name else trained

            def loss(trained: Any, minibatch: pp.Batch, phase: Phase = phase, merged: Any = merged) -> Any:
                distribution, value, *_ = policy(merged(trained), pp.Batch(obs=minibatch.obs))
                loss, metrics = phase.loss(distribution, value, minibatch)
                return loss, (metrics, None)

            own, start = jax.random.fold_in(key, number + 1), (params[name] if name else params, opt_state[name])
            (trained, opt_state[name]), metrics = run_shuffled_epochs(
                loss, optimizers[name], config, phase.epochs, own, start, whole
            )
            params, found = merged(trained), found | reduce_metrics(metrics, f"{name}/" if name else "")
        return State(params, opt_state), found

    return optimizers, update


def cleanrl_by_hand(config: cleanrl_ppo.Config, policy: pp.Policy) -> tuple[Any, Callable[..., Any]]:
    """Make an update with one phase, which trains everything."""

    def loss(distribution: Any, value: jax.Array, minibatch: pp.Batch) -> tuple[jax.Array, Metrics]:
        of_actor, metrics, _ = compute_actor_loss(config, distribution, minibatch, ddof=1)
        of_critic, more = compute_critic_loss(config.vf_coef, config.clip_coef, value, minibatch)
        return of_actor + of_critic, metrics | more

    return phases_by_hand(config, policy, {"": Phase(config.update_epochs, config.learning_rate, loss)})


def ippo_by_hand(config: ippo.Config, policy: pp.Policy) -> tuple[Any, Callable[..., Any]]:
    """Make an update that runs first the actor's epochs, then the critic's."""

    def actor(distribution: Any, value: jax.Array, minibatch: pp.Batch) -> tuple[jax.Array, Metrics]:
        return compute_actor_loss(config, distribution, minibatch)[:2]

    def critic(distribution: Any, value: jax.Array, minibatch: pp.Batch) -> tuple[jax.Array, Metrics]:
        return compute_critic_loss(config.vf_coef, config.clip_coef, value, minibatch)

    phases = {"actor": Phase(config.actor_epochs, config.actor_learning_rate, actor)}
    phases["critic"] = Phase(config.critic_epochs, config.critic_learning_rate, critic)
    return phases_by_hand(config, policy, phases)


def pufferlib_by_hand(config: pufferlib_ppo.Config, policy: pp.Policy) -> tuple[Any, Callable[..., Any]]:
    """Make an update that writes the values and log-ratios of a minibatch back before it draws the next one."""
    steps = config.update_epochs * config.num_minibatches
    rate = optax.cosine_decay_schedule(config.learning_rate, config.num_updates * steps)
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.contrib.muon(rate))

    def loss(params: Any, minibatch: pp.Batch, weight: jax.Array) -> Any:
        distribution, value, *_ = policy(params, pp.Batch(obs=minibatch.obs))
        of_actor, metrics, log_ratio = compute_actor_loss(config, distribution, minibatch, weight, ddof=1)
        of_critic, more = compute_critic_loss(config.vf_coef, config.vf_clip_coef, value, minibatch)
        return of_actor + of_critic, (metrics | more, (log_ratio, value))

    def update(key: jax.Array, state: State, batch: pp.Batch) -> tuple[State, Metrics]:
        key = jax.random.fold_in(key, 1)
        beta = config.prio_beta0 + (1 - config.prio_beta0) * state.step / config.num_updates

        def minibatch_step(carry: Any, key: jax.Array) -> Any:
            params, opt_state, values, next_values, log_ratios = carry
            advantage = compute_advantages(config, batch, values, next_values, log_ratios)
            priorities = jnp.abs(advantage).sum(0) ** config.prio_alpha + 1e-6
            probabilities, drawn = priorities / priorities.sum(), config.num_envs // config.num_minibatches
            index = pp.functional.sample_without_replacement(key, probabilities, drawn)
            weight = (config.num_envs * probabilities[index]) ** -beta
            whole = select_fields(batch, advantage, values)
            minibatch = jax.tree.map(lambda x: jnp.take(x, index, axis=1), whole)

            weighted = functools.partial(loss, weight=weight)
            params, opt_state, metrics, seen = take_step(weighted, optimizer, params, opt_state, minibatch)
            metrics["explained_variance"] = 1 - jnp.var(advantage) / jnp.var(whole.target)
            log_ratios, values = (x.at[:, index].set(new) for x, new in zip((log_ratios, values), seen, strict=True))
            shifted = jnp.concatenate([values[1:], batch.next_value[-1:]])
            next_values = jnp.where(batch.truncated, batch.next_value, shifted)
            return (params, opt_state, values, next_values, log_ratios), metrics

        def epoch_step(carry: Any, epoch: jax.Array) -> Any:
            keys = jax.random.split(split_epoch_keys(key, epoch), config.num_minibatches)
            return jax.lax.scan(minibatch_step, carry, keys)

        start = (state.params, state.opt_state[""], batch.value, batch.next_value, jnp.zeros_like(batch.value))
        (params, opt_state, *_), metrics = jax.lax.scan(epoch_step, start, jnp.arange(config.update_epochs))
        return State(params, {"": opt_state}, state.step + 1), reduce_metrics(metrics) | count_nonfinite(batch)

    return {"": optimizer}, update
