"""A recipe for tests: three steps to the right, each of which can be rendered."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np

import ppo_parts as pp
from ppo_parts import envs, networks, training


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(training.Config):
    env_id: str = "walk"
    total_timesteps: int = 32
    num_envs: int = 4
    num_steps: int = 4
    microbatch: int | None = None
    learning_rate: float = 0.1
    drawn: bool = True
    memory: Literal["lstm"] | None = None


def walk(render=None) -> envs.Env:
    """Make episodes of three steps whose rewards are 1, 2 and 3, whatever the agent does."""

    def reset(key):
        return jnp.zeros(()), jnp.zeros(2)

    def step(key, x, action):
        x = x + 1 + 0 * jnp.sum(action)
        return envs.Step(x, jnp.stack([x, -x]), reward=x, terminated=x == 3, info={"won": x > 2})

    return envs.auto_reset(reset, step, envs.Box((2,)), envs.Box((1,), -0.5, 0.5), render=render)


def draw(state):
    return np.full((6, 8, 3), 50 * int(state), np.uint8)


@training.recipe
def make_train(config: Config) -> training.Train:
    env = envs.prepare(walk(draw if config.drawn else None), normalize=True, gamma=0.9)
    policy = networks.actor_critic(env, (4,), shared=config.memory is not None, memory=config.memory)
    losses = pp.clipped_surrogate(clip_eps=0.2), pp.value_loss(coef=0.5)
    pipeline = pp.chain(pp.gae(gamma=0.9, gae_lambda=0.9), pp.full_batch(), *losses)
    return training.Train.of(config, env, policy, pipeline, pp.clipped_adam(config.learning_rate, 0.5))
