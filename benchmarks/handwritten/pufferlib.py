"""PufferLib's PPO, written by hand: V-trace and priorities of the latest values, recomputed before each minibatch.

`ppo_parts.recipes.pufferlib_ppo` is the same of parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import distrax
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from . import _steps


class ActorCritic(nn.Module):
    """Two tanh layers with two heads."""

    actions: int
    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[distrax.Categorical, jax.Array]:
        """Distribution over actions, and value, of observations `[..., D]`."""
        x = _steps.hidden(x, (self.hidden,) * 2)
        value = _steps.dense(1, 1.0)(x)
        return distrax.Categorical(logits=_steps.dense(self.actions, 0.01)(x)), value[..., 0]


class Moments(NamedTuple):
    """Running mean and variance of all rows so far."""

    mean: jax.Array
    var: jax.Array
    count: jax.Array

    def updated(self, x: jax.Array) -> Moments:
        """With the rows of `x` added."""
        mean, var, count = x.mean(0), x.var(0), x.shape[0]
        total, delta = self.count + count, mean - self.mean
        squares = self.var * self.count + var * count + delta**2 * self.count * count / total
        return Moments(self.mean + delta * count / total, squares / total, total)


def normalized(obs: jax.Array, moments: Moments) -> jax.Array:
    """Standardize and clip."""
    return jnp.clip((obs - moments.mean) / jnp.sqrt(moments.var + 1e-8), -10, 10)


def make_train(config: Any) -> Callable[[jax.Array], Any]:
    """`train(key) -> (parameters, metrics [updates])` for a `pufferlib_ppo.Config`.

    It has to be one with discrete actions, tanh, Adam and V-trace, priorities, environments normalized and everything
    refreshed before each minibatch, as they are by default, and without memory.
    """
    environments = _steps.Environments(config.env_id, config.num_envs)
    num_envs, drawn = config.num_envs, config.num_envs // config.num_minibatches
    num_updates = config.total_timesteps // (num_envs * config.num_steps)
    num_minibatches = config.num_minibatches * config.update_epochs
    network = ActorCritic(environments.actions, config.hidden)
    schedule = optax.cosine_decay_schedule(config.learning_rate, num_updates * num_minibatches)
    rate = schedule if config.anneal_lr else config.learning_rate
    optimizer = _steps.clipped_adam(rate, config.max_grad_norm, config.adam_eps)

    def loss_fn(params: Any, minibatch: Any) -> Any:
        old_obs, action, old_log_prob, old_value, advantage, target, weight = minibatch
        pi, value = network.apply(params, old_obs)
        ratio = jnp.exp(pi.log_prob(action) - old_log_prob)
        advantage = weight * (advantage - advantage.mean()) / (advantage.std(ddof=1) + 1e-8)
        loss = _steps.policy_loss(ratio, advantage, config.clip_coef)
        loss += config.vf_coef * _steps.value_loss(value, old_value, target, config.vf_clip_coef)
        loss -= config.ent_coef * pi.entropy().mean()
        return loss, (ratio, value, loss)

    def update_step(runner: Any, update: jax.Array) -> Any:
        params, opt_state, *running = runner

        def env_step(running: Any, _: None) -> Any:
            env_state, obs, seen, scale, discounted, returns, key = running
            key, action_key, step_key = jax.random.split(key, 3)
            pi, value = network.apply(params, obs)
            action = pi.sample(seed=action_key)
            log_prob = pi.log_prob(action)
            next_obs, env_state, reward, done = environments.step(step_key, env_state, action)
            seen = seen.updated(next_obs)
            returns, discounted = returns + reward, discounted * config.gamma + reward
            scale = scale.updated(discounted)
            reward = jnp.clip(reward / jnp.sqrt(scale.var + 1e-8), -10, 10)
            transition = _steps.Transition(done, action, value, reward, log_prob, obs, returns)
            kept = (discounted * (1 - done), returns * (1 - done))
            return (env_state, normalized(next_obs, seen), seen, scale, *kept, key), transition

        running, trajectory = jax.lax.scan(env_step, tuple(running), None, config.num_steps)
        *running, key = running
        _, last_value = network.apply(params, running[1])
        beta = config.prio_beta0 + (1 - config.prio_beta0) * update / num_updates

        def vtrace_step(carry: Any, step: Any) -> Any:
            error, next_value = carry
            reward, done, value, ratio = step
            rho, c = jnp.minimum(ratio, config.vtrace_rho_clip), jnp.minimum(ratio, config.vtrace_c_clip)
            delta = rho * (reward + config.gamma * next_value * (1 - done) - value)
            error = delta + config.gamma * config.gae_lambda * c * (1 - done) * error
            return (error, value), error

        def minibatch_step(state: Any, key: jax.Array) -> Any:
            params, opt_state, values, ratios = state
            start, steps = (jnp.zeros(num_envs), last_value), (trajectory.reward, trajectory.done, values, ratios)
            _, advantages = jax.lax.scan(vtrace_step, start, steps, reverse=True)
            priorities = jnp.abs(advantages).sum(0) ** config.prio_alpha + 1e-6
            probabilities = priorities / priorities.sum()
            index = jax.random.choice(key, num_envs, (drawn,), replace=False, p=probabilities)
            weight = (num_envs * probabilities[index]) ** -beta
            old = (trajectory.obs, trajectory.action, trajectory.log_prob)
            whole = (*old, values, advantages, advantages + values)
            minibatch = jax.tree.map(lambda x: jnp.take(x, index, axis=1), whole)
            grads, (ratio, value, loss) = jax.grad(loss_fn, has_aux=True)(params, (*minibatch, weight[None]))
            updates, opt_state = optimizer.update(grads, opt_state, params)
            values, ratios = values.at[:, index].set(value), ratios.at[:, index].set(ratio)
            return (optax.apply_updates(params, updates), opt_state, values, ratios), loss

        keys = jax.random.split(key, num_minibatches + 1)
        state = (params, opt_state, trajectory.value, jnp.ones_like(trajectory.value))
        (params, opt_state, *_), losses = jax.lax.scan(minibatch_step, state, keys[1:])
        return (params, opt_state, *running, keys[0]), _steps.finished(trajectory) | {"loss": losses.mean()}

    def train(key: jax.Array) -> Any:
        key, init_key, reset_key = jax.random.split(key, 3)
        obs, env_state = environments.reset(reset_key)
        seen = Moments(jnp.zeros(obs.shape[1]), jnp.ones(obs.shape[1]), jnp.zeros(())).updated(obs)
        scale = Moments(jnp.zeros(()), jnp.ones(()), jnp.zeros(()))
        obs, zeros = normalized(obs, seen), jnp.zeros(num_envs)
        params = network.init(init_key, obs)
        runner = (params, optimizer.init(params), env_state, obs, seen, scale, zeros, zeros, key)
        runner, metrics = jax.lax.scan(update_step, runner, jnp.arange(num_updates))
        return runner[0], metrics

    return train
