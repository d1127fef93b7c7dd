"""PPO for gymnax's classic control tasks: one chain, and options that can be left out one at a time.

Each option is a field of `Config`, so that `python -m benchmarks learning classic_mountain_car --set refresh=rollout`
leaves one out. docs/exploration.md has the results.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import ppo_parts as pp
from ppo_parts import envs, networks, training
from ppo_parts.training import at_least, between, more_than


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(training.Config):
    """Hyperparameters; the defaults are those of MountainCar-v0 with a million steps."""

    env_id: str = "MountainCar-v0"
    total_timesteps: int = 1_000_000
    num_envs: int = 32
    num_steps: int = 16
    learning_rate: Annotated[float, at_least(0)] = 2e-3  # of Adam
    anneal: bool = True  # anneal the learning rate and the clip range linearly to 0
    gamma: Annotated[float, between(0, 1)] = 0.99
    gae_lambda: Annotated[float, between(0, 1)] = 0.98
    num_minibatches: Annotated[int, at_least(1)] = 4
    update_epochs: Annotated[int, at_least(1)] = 4
    clip_coef: Annotated[float, more_than(0)] = 0.2
    vf_coef: Annotated[float, at_least(0)] = 0.5
    ent_coef: Annotated[float, at_least(0)] = 0.0
    max_grad_norm: Annotated[float, more_than(0)] = 0.5
    normalize_observations: bool = True
    normalize_rewards: bool = True
    normalize_advantages: bool = True
    clip_values: bool = False  # clip values around those of the rollout
    refresh: Literal["rollout", "epoch"] = "epoch"  # how often advantages are computed again
    hidden: Annotated[tuple[int, ...], at_least(1)] = (64, 64)
    log_std: float = 0.0  # initial logarithm of the standard deviation of continuous actions


def make_train(config: Config, env: envs.Env | None = None) -> training.Train:
    """Make a pure function `train(key) -> TrainResult(state, metrics)`."""
    training.check_config(config)
    env = envs.prepare(envs.make(config.env_id) if env is None else env)
    if config.normalize_observations:
        env = envs.normalize_observation(env)
    if config.normalize_rewards:
        env = envs.normalize_reward(env, gamma=config.gamma)
    policy = networks.actor_critic(env, config.hidden, "tanh", log_std=config.log_std)

    def annealed(first: float) -> Any:
        return pp.linear_schedule(first, 0.0, config.num_updates) if config.anneal else first

    pipeline = pp.chain(
        pp.gae(gamma=config.gamma, gae_lambda=config.gae_lambda),
        pp.shuffled_minibatches(config.num_minibatches, config.update_epochs, refresh=config.refresh),
        pp.advantage_normalize() if config.normalize_advantages else pp.identity(),
        pp.clipped_surrogate(clip_eps=annealed(config.clip_coef)),
        pp.policy_diagnostics(),
        pp.clipped_value_loss(clip_eps=config.clip_coef, coef=config.vf_coef)
        if config.clip_values
        else pp.value_loss(coef=config.vf_coef),
        pp.entropy_bonus(coef=annealed(config.ent_coef)),
    )
    rate = annealed(config.learning_rate)
    optimizer = pp.clipped_adam(rate, config.max_grad_norm)
    return training.Train.of(config, env, policy, pipeline, optimizer, schedules={"learning_rate": rate})


PRESETS = {
    "mountain_car": Config(),
    "mountain_car_250k": Config(total_timesteps=250_000, num_envs=16, learning_rate=1e-3, update_epochs=10),
    "acrobot": Config(
        env_id="Acrobot-v1", total_timesteps=300_000, num_minibatches=8, gamma=0.98, gae_lambda=0.8, learning_rate=4e-3,
        clip_coef=0.1, refresh="rollout",
    ),
    "mountain_car_continuous": Config(
        env_id="MountainCarContinuous-v0", total_timesteps=300_000, gamma=0.9999, gae_lambda=0.9, num_envs=8,
        num_steps=64, update_epochs=10, log_std=-1.0, learning_rate=3e-4,
    ),
    "cartpole": Config(
        env_id="CartPole-v1", total_timesteps=100_000, num_envs=8, num_steps=32, num_minibatches=1, update_epochs=10,
        gae_lambda=0.95,
    ),
}  # fmt: skip
