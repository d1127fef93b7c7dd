"""PPO for gymnax's classic control tasks: one chain, options that can be left out one at a time, and gSDE.

Each option is a field of `Config`, so that `python -m benchmarks learning classic_mountain_car --set refresh=rollout`
leaves one out. docs/exploration.md has the results.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

import ppo_parts as pp
from ppo_parts import distributions, envs, networks, training
from ppo_parts.training import at_least, between, more_than

Array = jax.Array


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
    ent_coef: Annotated[float, at_least(0)] = 0.0
    vf_coef: Annotated[float, at_least(0)] = 0.5
    max_grad_norm: Annotated[float, more_than(0)] = 0.5
    normalize_observations: bool = True
    normalize_rewards: bool = True
    normalize_advantages: bool = True
    clip_values: bool = False  # clip values around those of the rollout
    refresh: Literal["rollout", "epoch"] = "epoch"  # how often advantages are computed again
    hidden: Annotated[tuple[int, ...], at_least(1)] = (64, 64)
    log_std: float = 0.0  # initial logarithm of the standard deviation of continuous actions
    noise_steps: Annotated[int, at_least(0)] = 0  # gSDE: steps for which a noise matrix is kept; 0: white noise


class Noisy(NamedTuple):
    """An observation, and the noise matrix `[N, features, D]` of each environment."""

    obs: Array
    noise: Array


def hold_noise(env: envs.Env, features: int, steps: int) -> envs.Env:
    """Add to the observations of each environment a standard normal matrix, drawn anew every `steps` steps."""
    shape = (features, *env.action_space.shape)

    def reset(key: Array, num_envs: int) -> tuple[Any, Any]:
        state, obs = env.reset(key, num_envs)
        noise = jax.random.normal(jax.random.fold_in(key, 1), (num_envs, *shape))
        return (state, noise, jnp.zeros((), jnp.int32)), Noisy(obs, noise)

    def step(key: Array, state: Any, action: Any) -> tuple[Any, Any]:
        inner, noise, count = state
        inner, out = env.step(key, inner, action)
        fresh = jax.random.normal(jax.random.fold_in(key, 1), noise.shape)
        noise = jnp.where((count + 1) % steps == 0, fresh, noise)
        out = out._replace(obs=Noisy(out.obs, noise), final_obs=Noisy(out.final_obs, noise))
        return (inner, noise, count + 1), out

    return env._replace(
        reset=reset, step=step, evaluation=lambda s: hold_noise(env.evaluation(s[0]), features, steps), observe=None,
        restart=None, render=None,
    )  # fmt: skip


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Explored:
    """A Gaussian whose samples are its mean plus a noise that was drawn before."""

    gaussian: distributions.Normal
    noise: Array

    def sample(self, *, seed: Array) -> Array:
        """Return the action that the noise determines."""
        del seed
        return self.gaussian.loc + self.noise

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "gaussian"), name)


class Network(nn.Module):
    """gSDE: the noise is a linear function of the actor's features, whose matrix is held for some steps."""

    config: Config
    size: int

    @nn.compact
    def __call__(self, obs: Array, noise: Array) -> pp.Output:
        """Evaluate observations `[..., D]` with a noise matrix `[..., features, size]`."""
        x = networks.mlp(obs, self.config.hidden)
        loc, features = networks.dense(self.size, gain=0.01)(x), jax.lax.stop_gradient(x)
        shape = (x.shape[-1], self.size)
        std = jnp.exp(self.param("log_std", nn.initializers.constant(self.config.log_std), shape))
        scale = jnp.sqrt(jnp.square(features) @ jnp.square(std) + 1e-6)
        explored = jnp.einsum("...l,...ld->...d", features, std * noise)
        value = networks.dense(1, gain=1.0)(networks.mlp(obs, self.config.hidden))[..., 0]
        return pp.Output(Explored(distributions.Normal(loc, scale), explored), value)


def gsde(config: Config, env: envs.Env) -> pp.Policy:
    """A policy with state-dependent exploration, for an environment in `hold_noise`."""
    size, observed = env.action_space.shape[0], env.observation_space.shape
    network = Network(config, size)

    def init(key: Array) -> Any:
        return network.init(key, jnp.zeros(observed), jnp.zeros((config.hidden[-1], size)))

    return pp.Policy(init, lambda params, batch: network.apply(params, *batch.obs))


def make_train(config: Config, env: envs.Env | None = None) -> training.Train:
    """Make a pure function `train(key) -> TrainResult(state, metrics)`."""
    training.check_config(config)
    env = envs.prepare(envs.make(config.env_id) if env is None else env)
    if config.normalize_observations:
        env = envs.normalize_observation(env)
    if config.normalize_rewards:
        env = envs.normalize_reward(env, gamma=config.gamma)
    if config.noise_steps:
        env = hold_noise(env, config.hidden[-1], config.noise_steps)
        policy = gsde(config, env)
    else:
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
        num_steps=64, update_epochs=10, log_std=-1.0, noise_steps=128, learning_rate=3e-4,
    ),
    "cartpole": Config(
        env_id="CartPole-v1", total_timesteps=100_000, num_envs=8, num_steps=32, num_minibatches=1, update_epochs=10,
        gae_lambda=0.95,
    ),
}  # fmt: skip
