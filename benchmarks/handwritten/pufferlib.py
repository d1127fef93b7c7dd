"""PufferLib's PPO as one function: V-trace and priorities are recomputed before each minibatch, from the latest values.

`recipes.pufferlib_ppo` is the same of parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import distrax
import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from .cleanrl import Transition


class ActorCritic(nn.Module):
    """Two tanh layers with two heads."""

    actions: int
    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[distrax.Categorical, jax.Array]:
        """Distribution over actions, and value, of observations `[..., D]`."""
        for _ in range(2):
            x = nn.tanh(nn.Dense(self.hidden, kernel_init=nn.initializers.orthogonal(np.sqrt(2)))(x))
        value = nn.Dense(1, kernel_init=nn.initializers.orthogonal(1.0))(x)
        logits = nn.Dense(self.actions, kernel_init=nn.initializers.orthogonal(0.01))(x)
        return distrax.Categorical(logits=logits), value[..., 0]


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


def make_train(config: Any) -> Callable[[jax.Array], Any]:
    """`train(key) -> (parameters, metrics [updates])` for a `recipes.pufferlib_ppo.Config`.

    It has to be one with discrete actions, tanh, Adam and V-trace, priorities, environments normalized and everything
    refreshed before each minibatch, as they are by default, and without memory.
    """
    env, env_params = gymnax.make(config.env_id)
    num_envs, drawn = config.num_envs, config.num_envs // config.num_minibatches
    num_updates = config.total_timesteps // (num_envs * config.num_steps)
    num_minibatches = config.num_minibatches * config.update_epochs
    network = ActorCritic(env.action_space(env_params).n, config.hidden)

    def normalized(obs: jax.Array, moments: Moments) -> jax.Array:
        return jnp.clip((obs - moments.mean) / jnp.sqrt(moments.var + 1e-8), -10, 10)

    def train(key: jax.Array) -> Any:
        key, init_key, reset_key = jax.random.split(key, 3)
        reset_keys = jax.random.split(reset_key, num_envs)
        obs, env_state = jax.vmap(env.reset, in_axes=(0, None))(reset_keys, env_params)
        obs = obs.reshape(num_envs, -1).astype(jnp.float32)
        seen = Moments(jnp.zeros(obs.shape[1]), jnp.ones(obs.shape[1]), jnp.zeros(())).updated(obs)
        scale = Moments(jnp.zeros(()), jnp.ones(()), jnp.zeros(()))
        obs = normalized(obs, seen)
        params = network.init(init_key, obs)
        schedule = optax.cosine_decay_schedule(config.learning_rate, num_updates * num_minibatches)
        optimizer = optax.chain(
            optax.clip_by_global_norm(config.max_grad_norm),
            optax.adam(schedule if config.anneal_lr else config.learning_rate, eps=config.adam_eps),
        )
        opt_state = optimizer.init(params)

        def update_step(runner: Any, update: jax.Array) -> Any:
            def env_step(runner: Any, _: None) -> Any:
                params, opt_state, env_state, obs, seen, scale, discounted, running, key = runner
                key, action_key, step_key = jax.random.split(key, 3)
                pi, value = network.apply(params, obs)
                action = pi.sample(seed=action_key)
                log_prob = pi.log_prob(action)
                step_keys = jax.random.split(step_key, num_envs)
                next_obs, env_state, reward, terminated, truncated, _ = jax.vmap(env.step, in_axes=(0, 0, 0, None))(
                    step_keys, env_state, action, env_params
                )
                done = terminated | truncated
                next_obs = next_obs.reshape(num_envs, -1).astype(jnp.float32)
                seen = seen.updated(next_obs)
                running, discounted = running + reward, discounted * config.gamma + reward
                scale = scale.updated(discounted)
                reward = jnp.clip(reward / jnp.sqrt(scale.var + 1e-8), -10, 10)
                transition = Transition(done, action, value, reward, log_prob, obs, running)
                kept = (discounted * (1 - done), running * (1 - done))
                return (params, opt_state, env_state, normalized(next_obs, seen), seen, scale, *kept, key), transition

            runner, trajectory = jax.lax.scan(env_step, runner, None, config.num_steps)
            params, opt_state, env_state, obs, seen, scale, discounted, running, key = runner
            _, last_value = network.apply(params, obs)
            beta = config.prio_beta0 + (1 - config.prio_beta0) * update / num_updates

            def loss_fn(params: Any, minibatch: Any) -> Any:
                old_obs, action, old_log_prob, old_value, advantage, target, weight = minibatch
                pi, value = network.apply(params, old_obs)
                ratio = jnp.exp(pi.log_prob(action) - old_log_prob)
                advantage = weight * (advantage - advantage.mean()) / (advantage.std(ddof=1) + 1e-8)
                clipped_ratio = jnp.clip(ratio, 1 - config.clip_coef, 1 + config.clip_coef)
                policy_loss = -jnp.minimum(ratio * advantage, clipped_ratio * advantage).mean()
                clipped = old_value + (value - old_value).clip(-config.vf_clip_coef, config.vf_clip_coef)
                value_loss = 0.5 * jnp.maximum((value - target) ** 2, (clipped - target) ** 2).mean()
                entropy = pi.entropy().mean()
                loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy
                return loss, (ratio, value, (loss, policy_loss, value_loss, entropy))

            def minibatch_step(state: Any, key: jax.Array) -> Any:
                params, opt_state, values, ratios = state

                def vtrace_step(carry: Any, step: Any) -> Any:
                    error, next_value = carry
                    reward, done, value, ratio = step
                    rho, c = jnp.minimum(ratio, config.vtrace_rho_clip), jnp.minimum(ratio, config.vtrace_c_clip)
                    delta = rho * (reward + config.gamma * next_value * (1 - done) - value)
                    error = delta + config.gamma * config.gae_lambda * c * (1 - done) * error
                    return (error, value), error

                start, steps = (jnp.zeros(num_envs), last_value), (trajectory.reward, trajectory.done, values, ratios)
                _, advantages = jax.lax.scan(vtrace_step, start, steps, reverse=True)
                priorities = jnp.abs(advantages).sum(0) ** config.prio_alpha + 1e-6
                probabilities = priorities / priorities.sum()
                index = jax.random.choice(key, num_envs, (drawn,), replace=False, p=probabilities)
                weight = (num_envs * probabilities[index]) ** -beta
                whole = (
                    trajectory.obs,
                    trajectory.action,
                    trajectory.log_prob,
                    values,
                    advantages,
                    advantages + values,
                )
                minibatch = jax.tree.map(lambda x: jnp.take(x, index, axis=1), whole)
                grads, (ratio, value, losses) = jax.grad(loss_fn, has_aux=True)(params, (*minibatch, weight[None]))
                updates, opt_state = optimizer.update(grads, opt_state, params)
                values, ratios = values.at[:, index].set(value), ratios.at[:, index].set(ratio)
                return (optax.apply_updates(params, updates), opt_state, values, ratios), losses

            keys = jax.random.split(key, num_minibatches + 1)
            state = (params, opt_state, trajectory.value, jnp.ones_like(trajectory.value))
            (params, opt_state, *_), losses = jax.lax.scan(minibatch_step, state, keys[1:])
            episodes = trajectory.done.sum()
            total = jnp.where(trajectory.done, trajectory.episode_return, 0).sum()
            metrics = {"episode_return": total / episodes, "episodes": episodes, "loss": losses[0].mean()}
            return (params, opt_state, env_state, obs, seen, scale, discounted, running, keys[0]), metrics

        zeros = jnp.zeros(num_envs)
        runner = (params, opt_state, env_state, obs, seen, scale, zeros, zeros, key)
        runner, metrics = jax.lax.scan(update_step, runner, jnp.arange(num_updates))
        return runner[0], metrics

    return train
