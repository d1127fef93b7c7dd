"""PPO for gymnax's classic control tasks: one chain, and options that can be left out one at a time.

`python -m benchmarks learning classic_mountain_car --set refresh=rollout` leaves one out.
"""

import dataclasses
from typing import Any, Literal

import ppo_parts as pp
from ppo_parts import envs, networks, training
from ppo_parts.recipes import cleanrl_ppo


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(cleanrl_ppo.Config):
    """CleanRL's hyperparameters and others; the defaults are those for MountainCar-v0 with a million steps."""

    env_id: str = "MountainCar-v0"
    total_timesteps: int = 1_000_000
    num_envs: int = 32
    num_steps: int = 16
    learning_rate: float = 2e-3
    gae_lambda: float = 0.98
    clip_vloss: bool = False
    ent_coef: float = 0.0
    normalize_env: bool = True
    normalize_observations: bool = True  # False: only rewards are normalized
    normalize_rewards: bool = True  # False: only observations are normalized
    refresh: Literal["rollout", "epoch"] = "epoch"  # how often advantages are recomputed
    log_std: float = 0.0  # initial logarithm of the standard deviation of continuous actions


def make_train(config: Config) -> training.Train:
    """Make a pure function `train(key) -> TrainResult(state, metrics)`."""
    env = envs.prepare(envs.make(config.env_id))
    if config.normalize_env and config.normalize_observations:
        env = envs.normalize_observation(env)
    if config.normalize_env and config.normalize_rewards:
        env = envs.normalize_reward(env, gamma=config.gamma)
    policy = networks.actor_critic(env, config.hidden, "tanh", log_std=config.log_std)

    def annealed(first: float) -> Any:
        return pp.linear_schedule(first, 0.0, config.num_updates) if config.anneal_lr else first

    pipeline = pp.chain(
        pp.gae(gamma=config.gamma, gae_lambda=config.gae_lambda),
        pp.shuffled_minibatches(config.num_minibatches, config.update_epochs, refresh=config.refresh),
        pp.advantage_normalize() if config.norm_adv else pp.identity(),
        pp.clipped_surrogate(clip_eps=annealed(config.clip_coef)),
        pp.policy_diagnostics(),
        pp.clipped_value_loss(clip_eps=config.clip_coef, coef=config.vf_coef)
        if config.clip_vloss
        else pp.value_loss(coef=config.vf_coef),
        pp.entropy_bonus(coef=annealed(config.ent_coef)),
        pp.identity() if config.target_kl is None else pp.kl_early_stop(config.target_kl, check="epoch"),
    )
    return cleanrl_ppo.make_train(config, env, pipeline, policy)


PRESETS = {
    "mountain_car": Config(),
    "mountain_car_250k": Config(total_timesteps=250_000, num_envs=16, learning_rate=1e-3, update_epochs=10),
    "acrobot": Config(
        env_id="Acrobot-v1", total_timesteps=300_000, num_minibatches=8, gamma=0.98, gae_lambda=0.8, learning_rate=4e-3,
        clip_coef=0.1, refresh="rollout"),
    "mountain_car_continuous": Config(
        env_id="MountainCarContinuous-v0", total_timesteps=300_000, gamma=0.9999, gae_lambda=0.9, num_envs=8,
        num_steps=64, update_epochs=10, log_std=-1.0, learning_rate=3e-4),
    "cartpole": Config(
        env_id="CartPole-v1", total_timesteps=100_000, num_envs=8, num_steps=32, num_minibatches=1, update_epochs=10,
        gae_lambda=0.95),
}  # fmt: skip
