"""CleanRL's PPO, written by hand; `ppo_parts.recipes.cleanrl_ppo` composes the same from parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import distrax
import flax.linen as nn
import jax
import jax.numpy as jnp

from . import _steps


class ActorCritic(nn.Module):
    """Two tanh MLPs."""

    actions: int
    hidden: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[distrax.Categorical, jax.Array]:
        """Distribution over actions, and value."""
        actor = _steps.hidden(x, self.hidden)
        logits = _steps.dense(self.actions, 0.01)(actor)
        critic = _steps.hidden(x, self.hidden)
        return distrax.Categorical(logits=logits), _steps.dense(1, 1.0)(critic)[:, 0]


def make_train(config: Any) -> Callable[[jax.Array], Any]:
    """`train(key) -> (parameters, metrics [updates])` for a `cleanrl_ppo.Config` with discrete actions."""
    environments = _steps.Environments(config.env_id, config.num_envs)
    num_updates = config.total_timesteps // (config.num_envs * config.num_steps)
    network = ActorCritic(environments.actions, config.hidden)
    rate = _steps.annealed(config.learning_rate, config.num_minibatches * config.update_epochs, num_updates)
    optimizer = _steps.clipped_adam(rate if config.anneal_lr else config.learning_rate, config.max_grad_norm)

    def loss_fn(params: Any, minibatch: Any) -> jax.Array:
        old, advantage, target = minibatch
        pi, value = network.apply(params, old.obs)
        ratio = jnp.exp(pi.log_prob(old.action) - old.log_prob)
        advantage = (advantage - advantage.mean()) / (advantage.std(ddof=1) + 1e-8)
        loss = _steps.policy_loss(ratio, advantage, config.clip_coef)
        loss += config.vf_coef * _steps.value_loss(value, old.value, target, config.clip_coef)
        return loss - config.ent_coef * pi.entropy().mean()

    def update_step(runner: Any, _: None) -> Any:
        params, opt_state, *running = runner

        def evaluate(obs: jax.Array) -> Any:
            return network.apply(params, obs)

        (env_state, obs, returns, key), trajectory = _steps.collect(
            environments, evaluate, tuple(running), config.num_steps
        )
        batch = (trajectory, *_steps.gae(trajectory, evaluate(obs)[1], config.gamma, config.gae_lambda))
        state = (params, opt_state, key)
        (params, opt_state, key), losses = _steps.epochs(
            loss_fn, optimizer, state, batch, config.update_epochs, config.num_minibatches
        )
        return (params, opt_state, env_state, obs, returns, key), _steps.finished(trajectory) | {"loss": losses.mean()}

    def train(key: jax.Array) -> Any:
        key, init_key, reset_key = jax.random.split(key, 3)
        obs, env_state = environments.reset(reset_key)
        params = network.init(init_key, obs)
        runner = (params, optimizer.init(params), env_state, obs, jnp.zeros(config.num_envs), key)
        runner, metrics = jax.lax.scan(update_step, runner, None, num_updates)
        return runner[0], metrics

    return train
