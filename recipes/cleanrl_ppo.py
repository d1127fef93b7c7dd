"""PPO as CleanRL has it (`ppo.py`, `ppo_continuous_action.py`), made of parts.

    python -m recipes.cleanrl_ppo --env-id CartPole-v1
    python -m recipes.cleanrl_ppo --preset continuous --env-id Pendulum-v1

Where it differs from the original is listed in docs/fidelity.md; the one that matters: an episode cut by a time limit
is bootstrapped from its final observation.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import distrax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import ppo_parts as pp
from ppo_parts import distributions, envs, networks, training


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyperparameters, with CleanRL's names and defaults. Numbers that are floats may be traced arrays."""

    env_id: str = "CartPole-v1"
    """any gymnax environment, with discrete or continuous actions"""
    total_timesteps: int = 500_000
    """environment steps of the whole run, rounded down to whole updates"""
    num_envs: int = 4
    num_steps: int = 128
    """steps per environment and update"""
    learning_rate: float = 2.5e-4
    anneal_lr: bool = True
    """linearly to 0 over the updates of the run"""
    gamma: float = 0.99
    gae_lambda: float = 0.95
    num_minibatches: int = 4
    update_epochs: int = 4
    norm_adv: bool = True
    """standardise advantages in each minibatch"""
    clip_coef: float = 0.2
    clip_vloss: bool = True
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    target_kl: float | None = None
    """stop an update after the epoch whose last minibatch has a larger divergence"""
    normalize_env: bool = False
    """standardise and clip observations and rewards by running statistics"""
    hidden: tuple[int, ...] = (64, 64)
    microbatch: int | Literal["auto"] | None = "auto"
    """evaluate the network on so many steps at a time, for less memory; "auto": 1024 where that is faster"""
    seed: int = 1


PRESETS = {
    "discrete": Config(),
    # CleanRL's ppo_continuous_action.py
    "continuous": Config(
        env_id="Pendulum-v1",
        total_timesteps=1_000_000,
        num_envs=1,
        num_steps=2048,
        learning_rate=3e-4,
        num_minibatches=32,
        update_epochs=10,
        ent_coef=0.0,
        normalize_env=True,
    ),
}


class ActorCritic(nn.Module):
    """Two tanh MLPs. Orthogonal weights: gain sqrt(2) inside, 0.01 for the policy's head, 1 for the value's."""

    num_actions: int
    discrete: bool
    hidden: tuple[int, ...]

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[Any, jax.Array]:
        """The policy's distribution and the value, for any leading axes."""
        dense = functools.partial(nn.Dense, dot_general=networks.dense_dot_general)

        def mlp(x: jax.Array, out: int, gain: float) -> jax.Array:
            for width in self.hidden:
                x = nn.tanh(dense(width, kernel_init=nn.initializers.orthogonal(np.sqrt(2)))(x))
            return dense(out, kernel_init=nn.initializers.orthogonal(gain))(x)

        head, value = mlp(obs, self.num_actions, 0.01), mlp(obs, 1, 1.0)[..., 0]
        if self.discrete:
            return distributions.Categorical(head), value
        log_std = self.param("log_std", nn.initializers.zeros, (self.num_actions,))
        scale = jnp.broadcast_to(jnp.exp(log_std), head.shape)
        return distrax.MultivariateNormalDiag(head, scale), value


def make_env(config: Config) -> envs.Env:
    """The environment with CleanRL's wrappers."""
    env = envs.make(config.env_id)
    if not envs.is_discrete(env.action_space):
        env = envs.clip_action(env)
    if config.normalize_env:
        env = envs.normalize_reward(envs.normalize_observation(env), gamma=config.gamma)
    return env


def make_train(config: Config, env: envs.Env | None = None) -> training.Train:
    """A pure `train(key) -> TrainResult(state, metrics)`; make it inside a vmapped function to sweep its numbers.

    `env` is an environment of your own, wrapped as you like; None: the one the configuration names.
    """
    env = make_env(config) if env is None else env
    num_updates = training.updates_in(config.total_timesteps, num_envs=config.num_envs, num_steps=config.num_steps)
    discrete, space = envs.is_discrete(env.action_space), env.action_space
    network = ActorCritic(space.n if discrete else envs.size(space), discrete, config.hidden)
    obs_size, obs_rank = envs.size(env.observation_space), len(env.observation_space.shape)

    def evaluate(params: Any, batch: pp.Batch) -> tuple[Any, jax.Array]:
        obs = batch.obs.astype(jnp.float32)
        return network.apply(params, obs.reshape((*obs.shape[: obs.ndim - obs_rank], -1)))

    def init_params(key: jax.Array) -> Any:
        return network.init(key, jnp.zeros(obs_size))

    pipeline = pp.chain(
        pp.gae(gamma=config.gamma, gae_lambda=config.gae_lambda),
        pp.shuffled_minibatches(config.num_minibatches, config.update_epochs),
        pp.advantage_normalize(ddof=1) if config.norm_adv else pp.identity(),
        pp.clipped_surrogate(clip_eps=config.clip_coef),
        pp.clipped_value_loss(clip_eps=config.clip_coef, coef=config.vf_coef)
        if config.clip_vloss
        else pp.value_loss(coef=config.vf_coef),
        pp.entropy_bonus(coef=config.ent_coef),
        pp.identity() if config.target_kl is None else pp.kl_early_stop(config.target_kl, check="epoch"),
    )
    annealed = pp.linear_schedule(config.learning_rate, 0.0, num_updates)
    optimizer = optax.flatten(  # all parameters as one vector: the same steps in fewer, larger operations
        optax.chain(
            optax.clip_by_global_norm(config.max_grad_norm),
            optax.scale_by_adam(eps=1e-5),
            pp.per_update_learning_rate(annealed if config.anneal_lr else config.learning_rate),
        )
    )
    return training.Train(
        env=env,
        evaluate=evaluate,
        init_params=init_params,
        rollout=pp.rollout(env, evaluate, num_envs=config.num_envs, num_steps=config.num_steps),
        learner=pp.learner(evaluate, pipeline, optimizer, microbatch=config.microbatch),
        num_updates=num_updates,
        steps_per_update=config.num_envs * config.num_steps,
    )


def main() -> None:
    """Command line: trains, and leaves metrics, a picture and checkpoints under runs/."""
    training.main(make_train, PRESETS, prog="python -m recipes.cleanrl_ppo")


if __name__ == "__main__":
    main()
