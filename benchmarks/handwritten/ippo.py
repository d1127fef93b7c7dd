"""IPPO as one function: shared parameters, a local critic, actor and critic trained one after the other.

`recipes.ippo` is the same of parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import distrax
import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from .cleanrl import Transition

AGENTS = 1  # of gymnax's environments; all that follows the environment's step would do with more


class Network(nn.Module):
    """Two tanh layers and a head, for the actor and for the critic."""

    size: int
    gain: float
    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., size]` of observations `[..., D]`."""
        for _ in range(2):
            x = nn.tanh(nn.Dense(self.hidden, kernel_init=nn.initializers.orthogonal(np.sqrt(2)))(x))
        return nn.Dense(self.size, kernel_init=nn.initializers.orthogonal(self.gain))(x)


def make_train(config: Any) -> Callable[[jax.Array], Any]:
    """`train(key) -> (parameters, metrics [updates])` for a `recipes.ippo.Config` that names a gymnax environment."""
    env, env_params = gymnax.make(config.env_id)
    rows = config.num_envs * AGENTS
    batch_size = rows * config.num_steps
    num_updates = config.total_timesteps // (config.num_envs * config.num_steps)
    actor = Network(env.action_space(env_params).n, 0.01, config.hidden)
    critic = Network(1, 1.0, config.hidden)

    def optimizer(learning_rate: float, epochs: int) -> optax.GradientTransformation:
        def annealed(count: jax.Array) -> jax.Array:
            return learning_rate * (1.0 - count // (config.num_minibatches * epochs) / num_updates)

        adam = optax.adam(annealed if config.anneal_lr else learning_rate, eps=1e-5)
        return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adam)

    actor_optimizer = optimizer(config.actor_learning_rate, config.actor_epochs)
    critic_optimizer = optimizer(config.critic_learning_rate, config.critic_epochs)

    def batchify(x: jax.Array) -> jax.Array:
        """Observations of all agents of all environments, `[rows, D]`."""
        return x.reshape(rows, -1).astype(jnp.float32)

    def train(key: jax.Array) -> Any:
        key, actor_key, critic_key, reset_key = jax.random.split(key, 4)
        reset_keys = jax.random.split(reset_key, config.num_envs)
        obs, env_state = jax.vmap(env.reset, in_axes=(0, None))(reset_keys, env_params)
        obs = batchify(obs)
        actor_params, critic_params = actor.init(actor_key, obs), critic.init(critic_key, obs)
        actor_state, critic_state = actor_optimizer.init(actor_params), critic_optimizer.init(critic_params)

        def update_step(runner: Any, _: None) -> Any:
            def env_step(runner: Any, _: None) -> Any:
                env_state, obs, running, key = runner
                key, action_key, step_key = jax.random.split(key, 3)
                pi = distrax.Categorical(logits=actor.apply(actor_params, obs))
                value = critic.apply(critic_params, obs)[:, 0]
                action = pi.sample(seed=action_key)
                log_prob = pi.log_prob(action)
                step_keys = jax.random.split(step_key, config.num_envs)
                taken = action.reshape(config.num_envs, AGENTS)[:, 0]
                next_obs, env_state, reward, terminated, truncated, _ = jax.vmap(env.step, in_axes=(0, 0, 0, None))(
                    step_keys, env_state, taken, env_params
                )
                reward, done = jnp.repeat(reward, AGENTS), jnp.repeat(terminated | truncated, AGENTS)
                running = running + reward
                transition = Transition(done, action, value, reward, log_prob, obs, running)
                return (env_state, batchify(next_obs), running * (1 - done), key), transition

            actor_params, actor_state, critic_params, critic_state, *running = runner
            running, trajectory = jax.lax.scan(env_step, tuple(running), None, config.num_steps)
            env_state, obs, returns, key = running
            last_value = critic.apply(critic_params, obs)[:, 0]

            def gae_step(carry: Any, transition: Transition) -> Any:
                gae, next_value = carry
                delta = transition.reward + config.gamma * next_value * (1 - transition.done) - transition.value
                gae = delta + config.gamma * config.gae_lambda * (1 - transition.done) * gae
                return (gae, transition.value), gae

            start = (jnp.zeros_like(last_value), last_value)
            _, advantages = jax.lax.scan(gae_step, start, trajectory, reverse=True)
            targets = advantages + trajectory.value

            def actor_loss(params: Any, minibatch: Any) -> Any:
                obs, action, old_log_prob, gae = minibatch
                pi = distrax.Categorical(logits=actor.apply(params, obs))
                ratio = jnp.exp(pi.log_prob(action) - old_log_prob)
                gae = (gae - gae.mean()) / (gae.std() + 1e-8)
                surrogate = jnp.minimum(ratio * gae, jnp.clip(ratio, 1 - config.clip_coef, 1 + config.clip_coef) * gae)
                return -surrogate.mean() - config.ent_coef * pi.entropy().mean()

            def critic_loss(params: Any, minibatch: Any) -> Any:
                obs, old_value, target = minibatch
                value = critic.apply(params, obs)[:, 0]
                clipped = old_value + (value - old_value).clip(-config.clip_coef, config.clip_coef)
                return 0.5 * config.vf_coef * jnp.maximum((value - target) ** 2, (clipped - target) ** 2).mean()

            def phase(loss_fn: Any, optimizer: Any, epochs: int, state: Any, batch: Any) -> Any:
                def minibatch_step(state: Any, minibatch: Any) -> Any:
                    params, opt_state = state
                    loss, grads = jax.value_and_grad(loss_fn)(params, minibatch)
                    updates, opt_state = optimizer.update(grads, opt_state, params)
                    return (optax.apply_updates(params, updates), opt_state), loss

                def epoch_step(state: Any, _: None) -> Any:
                    params, opt_state, key = state
                    key, shuffle_key = jax.random.split(key)
                    permutation = jax.random.permutation(shuffle_key, batch_size)
                    flat = jax.tree.map(lambda x: x.reshape((batch_size, *x.shape[2:])), batch)
                    shuffled = jax.tree.map(lambda x: jnp.take(x, permutation, axis=0), flat)
                    minibatches = jax.tree.map(
                        lambda x: x.reshape((config.num_minibatches, -1, *x.shape[1:])), shuffled
                    )
                    (params, opt_state), losses = jax.lax.scan(minibatch_step, (params, opt_state), minibatches)
                    return (params, opt_state, key), losses

                return jax.lax.scan(epoch_step, state, None, epochs)

            seen = (trajectory.obs, trajectory.action, trajectory.log_prob, advantages)
            (actor_params, actor_state, key), actor_losses = phase(
                actor_loss, actor_optimizer, config.actor_epochs, (actor_params, actor_state, key), seen
            )
            seen = (trajectory.obs, trajectory.value, targets)
            (critic_params, critic_state, key), critic_losses = phase(
                critic_loss, critic_optimizer, config.critic_epochs, (critic_params, critic_state, key), seen
            )
            episodes = trajectory.done.sum()
            metrics = {
                "episode_return": jnp.where(trajectory.done, trajectory.episode_return, 0).sum() / episodes,
                "episodes": episodes // AGENTS,
                "actor_loss": actor_losses.mean(),
                "critic_loss": critic_losses.mean(),
            }
            return (actor_params, actor_state, critic_params, critic_state, env_state, obs, returns, key), metrics

        runner = (actor_params, actor_state, critic_params, critic_state, env_state, obs, jnp.zeros(rows), key)
        runner, metrics = jax.lax.scan(update_step, runner, None, num_updates)
        return {"actor": runner[0], "critic": runner[2]}, metrics

    return train
