"""The PPO of other libraries, as commands: rsl_rl, rl_games, skrl, brax, Stable-Baselines3 and Tianshou.

    python -m recipes.library_ppo --preset rsl_rl --env-id gym:HalfCheetah-v5
    python -m recipes.library_ppo --preset playground --env-id playground:CheetahRun

A preset has the update of a library, which `recipes.libraries` composes of parts, with the library's default
hyperparameters. Rollouts, network and normalization are not the library's: they are the same in all presets, so that
two runs compare the updates; brax's minibatches of whole segments need more and shorter segments. docs/libraries.md
compares the choices.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import jax
import optax

import ppo_parts as pp
from ppo_parts import envs, networks, training
from ppo_parts.training import at_least, between, more_than
from recipes import libraries

Library = Literal["rsl_rl", "rl_games", "skrl", "brax", "stable_baselines3", "tianshou"]
ARGUMENTS = {
    "learning_rate": "learning_rate", "target_kl": "target_kl", "num_minibatches": "num_minibatches",
    "update_epochs": "num_epochs", "gamma": "gamma", "gae_lambda": "gae_lambda", "clip_coef": "clip_eps",
    "vf_coef": "value_coef", "ent_coef": "entropy_coef", "max_grad_norm": "max_grad_norm",
    "reward_scale": "reward_scale", "segment_length": "segment_length",
}  # fmt: skip
"""The fields of `Config` that are arguments of the functions of `recipes.libraries`, and the names of these."""
NOT_TAKEN = {"target_kl": None, "reward_scale": 1.0, "segment_length": None}
"""The values of these fields where the function of a library does not take them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(training.Config):
    """Hyperparameters; the presets have the defaults of each library."""

    env_id: str = "gym:HalfCheetah-v5"
    total_timesteps: int = 1_000_000
    num_envs: int = 8
    num_steps: int = 256
    library: Annotated[Library, "the library whose update to use; --preset also sets its hyperparameters"]
    learning_rate: Annotated[float, at_least(0), "learning rate of Adam; with target_kl, the initial one"]
    target_kl: Annotated[
        float | None, more_than(0), "divergence to which the rate adapts; in Stable-Baselines3, it ends the update"
    ]
    num_minibatches: Annotated[int, at_least(1), "gradient steps per epoch"]
    update_epochs: Annotated[int, at_least(1), "passes over each rollout"]
    gamma: Annotated[float, between(0, 1), "discount of rewards per step"]
    gae_lambda: Annotated[float, between(0, 1), "trace decay: 0 has the least variance, 1 the least bias"]
    clip_coef: Annotated[float, more_than(0), "how far the probability ratio may move from 1"]
    vf_coef: Annotated[float, at_least(0), "weight of the value loss; its factor 1/2 is that of the library"]
    ent_coef: Annotated[float, at_least(0), "weight of the entropy bonus"]
    max_grad_norm: Annotated[float | None, more_than(0), "a gradient with a larger norm is scaled down to this one"]
    reward_scale: Annotated[float, more_than(0), "rewards are multiplied by this; brax only"] = 1.0
    segment_length: Annotated[
        int | None, at_least(1), "steps of each segment of a minibatch, None: those of the rollout; brax only"
    ] = None
    normalize_observations: Annotated[bool, "standardize observations by running statistics"] = True
    normalize_rewards: Annotated[bool, "divide rewards by the running deviation of the discounted return"] = True
    hidden: Annotated[tuple[int, ...], at_least(1), "units of each hidden layer, of actor and critic"] = (64, 64)
    activation: Annotated[networks.Activation, "activation of the hidden layers"] = "tanh"
    log_std: Annotated[float, "initial logarithm of the standard deviation of actions"] = 0.0
    squash: Annotated[bool, "squash actions into their bounds by tanh; otherwise they are clipped"] = False
    noise_steps: Annotated[
        int | None, at_least(1), "state-dependent exploration (gSDE): steps for which noise is kept, None: white noise"
    ] = None


def parameters_of(library: Library) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the function of `recipes.libraries`."""
    return inspect.signature(getattr(libraries, library)).parameters


def preset(library: Library, **changes: Any) -> Config:
    """Make the configuration with the defaults of a library, except for `changes`."""
    taken = parameters_of(library)
    defaults = {
        field: taken[argument].default if argument in taken else NOT_TAKEN[field]
        for field, argument in ARGUMENTS.items()
    }
    return Config(library=library, **{**defaults, **changes})


PRESETS = {
    "rsl_rl": preset("rsl_rl"),
    "rl_games": preset("rl_games"),
    "skrl": preset("skrl"),
    "brax": preset("brax", num_envs=64, num_steps=32, squash=True),
    "playground": preset(  # brax's update with the settings of MuJoCo Playground's DM control suite
        "brax", env_id="playground:CheetahRun", total_timesteps=60_000_000, num_envs=2048, num_steps=480,
        segment_length=30, num_minibatches=32, update_epochs=16, learning_rate=1e-3, gamma=0.995, ent_coef=1e-2,
        reward_scale=10.0, normalize_rewards=False, hidden=(256, 256), activation="silu", squash=True,
    ),
    "stable_baselines3": preset("stable_baselines3"),
    "tianshou": preset("tianshou"),
}  # fmt: skip


def check_library(config: Config) -> None:
    """Raise if the hyperparameters are all those of another library, as after `--library skrl` without `--preset`."""
    own, here = (tuple(getattr(each, field) for field in ARGUMENTS) for each in (preset(config.library), config))
    if any(isinstance(x, jax.Array) for x in here):  # of a sweep
        return
    for name, other in PRESETS.items():
        if here != own and here == tuple(getattr(other, field) for field in ARGUMENTS) and other.library == name:
            raise pp.errors.UserValueError(
                f"must be {name}, whose hyperparameters these are, got {config.library!r}: --preset {config.library} "
                "has its own", where="Config", argument="library",
            )  # fmt: skip


def update_of(config: Config, env: envs.Env) -> tuple[pp.Part, optax.GradientTransformation]:
    """Return the chain and the optimizer of the library."""
    taken = parameters_of(config.library)
    for field, unused in NOT_TAKEN.items():
        if ARGUMENTS[field] not in taken and getattr(config, field) != unused:
            raise pp.errors.UserValueError(
                f"must be {unused}, because {config.library} has no such option, got {getattr(config, field)!r}",
                where="Config", argument=field,
            )  # fmt: skip
    given = {name: getattr(config, field) for field, name in ARGUMENTS.items() if name in taken}
    if config.segment_length is not None and config.num_steps % config.segment_length:
        raise pp.errors.UserValueError(
            f"must divide the {config.num_steps} steps of a rollout, got {config.segment_length}",
            where="Config", argument="segment_length",
        )  # fmt: skip
    if config.library == "rl_games":
        if envs.is_discrete(env.action_space):
            raise pp.errors.UserValueError(
                f"library_ppo: rl_games measures the divergence of Gaussians, but the actions of {config.env_id} are "
                "discrete: use another preset"
            )
        given |= {"num_envs": config.num_envs, "num_steps": config.num_steps, "num_actions": env.action_space.shape[-1]}
    return getattr(libraries, config.library)(**given)


def make_train(config: Config, env: envs.Env | None = None, pipeline: pp.Part | None = None) -> training.Train:
    """Return the run, a pure function `train(key) -> TrainResult(state, metrics)`.

    `env` is your own environment with any wrappers, and `pipeline` your own chain; None: as configured.
    """
    training.check_config(config)
    check_library(config)
    if env is None:
        env = envs.make(config.env_id)
        env = env if config.squash else envs.prepare(env)
        env = envs.normalize_observation(env) if config.normalize_observations else env
        env = envs.normalize_reward(env, gamma=config.gamma) if config.normalize_rewards else env
    gsde = config.noise_steps is not None
    if gsde and envs.is_discrete(env.action_space):
        raise pp.errors.UserValueError(
            f"must be None, because gSDE is for continuous actions, got {config.noise_steps}",
            where="Config", argument="noise_steps",
        )  # fmt: skip
    policy = networks.actor_critic(
        env, config.hidden, config.activation, log_std=config.log_std, squash=config.squash, gsde=gsde
    )
    if config.library == "rsl_rl":
        policy = libraries.parts.in_two_entries(policy)
    chain, optimizer = update_of(config, env)
    adaptive = config.target_kl is not None and config.library != "stable_baselines3"
    schedules = {} if adaptive else {"learning_rate": config.learning_rate}
    return training.Train.of(
        config, env, policy, pipeline or chain, optimizer, noise_steps=config.noise_steps or 1, schedules=schedules
    )


def main() -> None:
    """Train from the command line, and write metrics, a learning curve and checkpoints to runs/."""
    training.main(make_train, PRESETS, prog="python -m recipes.library_ppo")


if __name__ == "__main__":
    main()
