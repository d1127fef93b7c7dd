"""IPPO, written by hand: shared parameters, a local critic, actor and critic trained one after the other.

`ppo_parts.recipes.ippo` is the same of parts. gymnax's environments have one agent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import distrax
import flax.linen as nn
import jax
import jax.numpy as jnp

from . import _steps


class Network(nn.Module):
    """Two tanh layers and a head, for the actor and for the critic."""

    size: int
    gain: float
    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., size]` of observations `[..., D]`."""
        x = _steps.hidden(x, (self.hidden,) * 2)
        return _steps.dense(self.size, self.gain)(x)


def make_train(config: Any) -> Callable[[jax.Array], Any]:
    """`train(key) -> (parameters, metrics [updates])` for an `ippo.Config` that names a gymnax environment."""
    environments = _steps.Environments(config.env_id, config.num_envs)
    num_updates = config.total_timesteps // (config.num_envs * config.num_steps)
    actor = Network(environments.actions, 0.01, config.hidden)
    critic = Network(1, 1.0, config.hidden)

    def optimizer_of(rate: float, num_epochs: int) -> Any:
        falling = _steps.annealed(rate, config.num_minibatches * num_epochs, num_updates)
        return _steps.clipped_adam(falling if config.anneal_lr else rate, config.max_grad_norm)

    actor_optimizer = optimizer_of(config.actor_learning_rate, config.actor_epochs)
    critic_optimizer = optimizer_of(config.critic_learning_rate, config.critic_epochs)

    def actor_loss(params: Any, minibatch: Any) -> jax.Array:
        obs, action, old_log_prob, advantage = minibatch
        pi = distrax.Categorical(logits=actor.apply(params, obs))
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        loss = _steps.policy_loss(jnp.exp(pi.log_prob(action) - old_log_prob), advantage, config.clip_coef)
        return loss - config.ent_coef * pi.entropy().mean()

    def critic_loss(params: Any, minibatch: Any) -> jax.Array:
        obs, old_value, target = minibatch
        return config.vf_coef * _steps.value_loss(critic.apply(params, obs)[:, 0], old_value, target, config.clip_coef)

    def update_step(runner: Any, _: None) -> Any:
        actor_params, actor_state, critic_params, critic_state, *running = runner

        def evaluate(obs: jax.Array) -> Any:
            return distrax.Categorical(logits=actor.apply(actor_params, obs)), critic.apply(critic_params, obs)[:, 0]

        (env_state, obs, returns, key), old = _steps.collect(environments, evaluate, tuple(running), config.num_steps)
        advantage, target = _steps.gae(old, evaluate(obs)[1], config.gamma, config.gae_lambda)
        state, batch = (actor_params, actor_state, key), (old.obs, old.action, old.log_prob, advantage)
        (actor_params, actor_state, key), actor_losses = _steps.epochs(
            actor_loss, actor_optimizer, state, batch, config.actor_epochs, config.num_minibatches
        )
        state, batch = (critic_params, critic_state, key), (old.obs, old.value, target)
        (critic_params, critic_state, key), critic_losses = _steps.epochs(
            critic_loss, critic_optimizer, state, batch, config.critic_epochs, config.num_minibatches
        )
        metrics = _steps.finished(old) | {"actor_loss": actor_losses.mean(), "critic_loss": critic_losses.mean()}
        return (actor_params, actor_state, critic_params, critic_state, env_state, obs, returns, key), metrics

    def train(key: jax.Array) -> Any:
        key, actor_key, critic_key, reset_key = jax.random.split(key, 4)
        obs, env_state = environments.reset(reset_key)
        actor_params, critic_params = actor.init(actor_key, obs), critic.init(critic_key, obs)
        states = actor_optimizer.init(actor_params), critic_optimizer.init(critic_params)
        runner = (actor_params, states[0], critic_params, states[1], env_state, obs, jnp.zeros(config.num_envs), key)
        runner, metrics = jax.lax.scan(update_step, runner, None, num_updates)
        return {"actor": runner[0], "critic": runner[2]}, metrics

    return train
