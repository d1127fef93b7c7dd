"""CleanRL's PPO as one function; `recipes.cleanrl_ppo` composes the same from parts."""

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


class ActorCritic(nn.Module):
    """Two tanh MLPs."""

    actions: int
    hidden: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[distrax.Categorical, jax.Array]:
        """Distribution over actions, and value."""
        x = x.reshape((*x.shape[:1], -1)).astype(jnp.float32)
        actor = critic = x
        for width in self.hidden:
            actor = nn.tanh(nn.Dense(width, kernel_init=nn.initializers.orthogonal(np.sqrt(2)))(actor))
        logits = nn.Dense(self.actions, kernel_init=nn.initializers.orthogonal(0.01))(actor)
        for width in self.hidden:
            critic = nn.tanh(nn.Dense(width, kernel_init=nn.initializers.orthogonal(np.sqrt(2)))(critic))
        value = nn.Dense(1, kernel_init=nn.initializers.orthogonal(1.0))(critic)
        return distrax.Categorical(logits=logits), value[:, 0]


class Transition(NamedTuple):
    """One step of all environments."""

    done: jax.Array
    action: jax.Array
    value: jax.Array
    reward: jax.Array
    log_prob: jax.Array
    obs: jax.Array
    episode_return: jax.Array


def make_train(config: Any) -> Callable[[jax.Array], Any]:
    """`train(key) -> (parameters, metrics [updates])` for a `recipes.cleanrl_ppo.Config` with discrete actions."""
    env, env_params = gymnax.make(config.env_id)
    actions = env.action_space(env_params).n
    batch_size = config.num_envs * config.num_steps
    num_updates = config.total_timesteps // batch_size
    network = ActorCritic(actions, config.hidden)

    def learning_rate(count: jax.Array) -> jax.Array:
        done = count // (config.num_minibatches * config.update_epochs)
        return config.learning_rate * (1.0 - done / num_updates)

    def train(key: jax.Array) -> Any:
        key, init_key, reset_key = jax.random.split(key, 3)
        shape = env.observation_space(env_params).shape
        params = network.init(init_key, jnp.zeros((1, *shape)))
        optimizer = optax.chain(
            optax.clip_by_global_norm(config.max_grad_norm),
            optax.adam(learning_rate if config.anneal_lr else config.learning_rate, eps=1e-5),
        )
        opt_state = optimizer.init(params)
        reset_keys = jax.random.split(reset_key, config.num_envs)
        obs, env_state = jax.vmap(env.reset, in_axes=(0, None))(reset_keys, env_params)

        def update_step(runner: Any, _: None) -> Any:
            def env_step(runner: Any, _: None) -> Any:
                params, opt_state, env_state, obs, running, key = runner
                key, action_key, step_key = jax.random.split(key, 3)
                pi, value = network.apply(params, obs)
                action = pi.sample(seed=action_key)
                log_prob = pi.log_prob(action)
                step_keys = jax.random.split(step_key, config.num_envs)
                next_obs, env_state, reward, terminated, truncated, _ = jax.vmap(env.step, in_axes=(0, 0, 0, None))(
                    step_keys, env_state, action, env_params
                )
                done = terminated | truncated
                running = running + reward
                transition = Transition(done, action, value, reward, log_prob, obs, running)
                return (params, opt_state, env_state, next_obs, running * (1 - done), key), transition

            runner, trajectory = jax.lax.scan(env_step, runner, None, config.num_steps)
            params, opt_state, env_state, obs, running, key = runner
            _, last_value = network.apply(params, obs)

            def gae_step(carry: Any, transition: Transition) -> Any:
                gae, next_value = carry
                delta = transition.reward + config.gamma * next_value * (1 - transition.done) - transition.value
                gae = delta + config.gamma * config.gae_lambda * (1 - transition.done) * gae
                return (gae, transition.value), gae

            start = (jnp.zeros_like(last_value), last_value)
            _, advantages = jax.lax.scan(gae_step, start, trajectory, reverse=True)
            targets = advantages + trajectory.value

            def loss_fn(params: Any, minibatch: Any) -> Any:
                old, gae, target = minibatch
                pi, value = network.apply(params, old.obs)
                log_prob = pi.log_prob(old.action)
                clipped = old.value + (value - old.value).clip(-config.clip_coef, config.clip_coef)
                value_loss = 0.5 * jnp.maximum(jnp.square(value - target), jnp.square(clipped - target)).mean()
                ratio = jnp.exp(log_prob - old.log_prob)
                gae = (gae - gae.mean()) / (gae.std(ddof=1) + 1e-8)
                surrogate = jnp.minimum(ratio * gae, jnp.clip(ratio, 1 - config.clip_coef, 1 + config.clip_coef) * gae)
                entropy = pi.entropy().mean()
                loss = -surrogate.mean() + config.vf_coef * value_loss - config.ent_coef * entropy
                return loss, (value_loss, -surrogate.mean(), entropy)

            def minibatch_step(state: Any, minibatch: Any) -> Any:
                params, opt_state = state
                losses, grads = jax.value_and_grad(loss_fn, has_aux=True)(params, minibatch)
                updates, opt_state = optimizer.update(grads, opt_state, params)
                return (optax.apply_updates(params, updates), opt_state), losses

            def epoch_step(state: Any, _: None) -> Any:
                params, opt_state, key = state
                key, shuffle_key = jax.random.split(key)
                permutation = jax.random.permutation(shuffle_key, batch_size)
                batch = (trajectory, advantages, targets)
                batch = jax.tree.map(lambda x: x.reshape((batch_size, *x.shape[2:])), batch)
                shuffled = jax.tree.map(lambda x: jnp.take(x, permutation, axis=0), batch)
                minibatches = jax.tree.map(lambda x: x.reshape((config.num_minibatches, -1, *x.shape[1:])), shuffled)
                (params, opt_state), losses = jax.lax.scan(minibatch_step, (params, opt_state), minibatches)
                return (params, opt_state, key), losses

            (params, opt_state, key), losses = jax.lax.scan(
                epoch_step, (params, opt_state, key), None, config.update_epochs
            )
            episodes = trajectory.done.sum()
            total = jnp.where(trajectory.done, trajectory.episode_return, 0).sum()
            metrics = {"episode_return": total / episodes, "episodes": episodes, "loss": losses[0].mean()}
            return (params, opt_state, env_state, obs, running, key), metrics

        runner = (params, opt_state, env_state, obs, jnp.zeros(config.num_envs), key)
        runner, metrics = jax.lax.scan(update_step, runner, None, num_updates)
        return runner[0], metrics

    return train
