"""The PPO of other libraries, as commands: rsl_rl, rl_games, skrl, brax, Stable-Baselines3 and Tianshou.

    python -m ppo_parts.recipes.library_ppo --preset rsl_rl --env-id gym:HalfCheetah-v5
    python -m ppo_parts.recipes.library_ppo --preset playground --env-id playground:CheetahRun
    python -m ppo_parts.recipes.library_ppo --preset humanoid

A preset has the update of a library, which `ppo_parts.recipes.libraries` composes of parts, with the library's default
hyperparameters. Rollouts, network and normalization are not the library's: they are the same in all presets, so that
two runs compare the updates; brax's minibatches of whole segments need more and shorter segments. docs/libraries.md
compares the choices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Literal

import optax

import ppo_parts as pp
from ppo_parts import envs, networks, training
from ppo_parts.recipes import libraries
from ppo_parts.training import Range

Library = Literal["rsl_rl", "rl_games", "skrl", "brax", "stable_baselines3", "tianshou"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(training.Config):
    """Hyperparameters; the presets have the defaults of each library."""

    env_id: str = "gym:HalfCheetah-v5"
    total_timesteps: int = 1_000_000
    num_envs: int = 8
    num_steps: int = 256
    library: Annotated[Library, "the library whose update to use; --preset also sets its hyperparameters"]
    learning_rate: Annotated[float, "learning rate of Adam; with target_kl, the initial one"]
    target_kl: Annotated[
        float | None, Range(0, open_low=True), "rate adapts to this divergence; in Stable-Baselines3, it ends an update"
    ] = None
    adapt_each_epoch: Annotated[bool, "the rate adapts after each epoch, not after each step; rl_games only"] = False
    num_minibatches: Annotated[int, "gradient steps per epoch"]
    update_epochs: int
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_coef: float = 0.2
    vf_coef: Annotated[float, "weight of the value loss; its factor 1/2 is that of the library"]
    ent_coef: float
    max_grad_norm: Annotated[float | None, "a gradient with a larger norm is scaled down to this"] = None
    bounds_coef: Annotated[float, Range(0), "weight of the loss for means out of bounds; rl_games only"] = 0.0
    soft_bound: Annotated[float, Range(0), "the bound, 0 for a loss on all means; rl_games only"] = 1.1
    reward_scale: Annotated[float, Range(0, open_low=True), "factor of rewards; brax and rl_games only"] = 1.0
    normalize_value: Annotated[bool, "values in units of the running moments of returns; rl_games only"] = True
    segment_length: Annotated[
        int | None, Range(1), "steps of each segment of a minibatch, None: those of the rollout; brax only"
    ] = None
    normalize_observations: Annotated[bool, "standardize observations by running statistics"] = True
    normalize_rewards: Annotated[bool, "divide rewards by the running deviation of the discounted return"] = True
    hidden: Annotated[tuple[int, ...], "units of each hidden layer, of actor and critic"] = (64, 64)
    shared: Annotated[bool, "actor and critic share the hidden layers; not in rsl_rl"] = False
    activation: networks.Activation = "tanh"
    log_std: float = 0.0
    squash: Annotated[bool, "squash actions into their bounds by tanh; otherwise [-1, 1] is mapped onto them"] = False
    noise_steps: Annotated[
        int | None, Range(1), "state-dependent exploration (gSDE): steps for which noise is kept, None: white noise"
    ] = None


OPTIONS: dict[Library, tuple[str, ...]] = {
    "rsl_rl": ("target_kl",),
    "rl_games": ("target_kl", "adapt_each_epoch", "bounds_coef", "soft_bound", "reward_scale", "normalize_value"),
    "skrl": ("target_kl",),
    "brax": ("target_kl", "reward_scale", "segment_length"),
    "stable_baselines3": ("target_kl",),
    "tianshou": (),
}
"""The fields that only some libraries have; `libraries` gives them the same names."""

RL_GAMES = Config(
    library="rl_games", learning_rate=3e-4, target_kl=0.008, num_minibatches=2, update_epochs=4, vf_coef=2.0,
    ent_coef=0.0, max_grad_norm=1.0,
)  # fmt: skip
BRAX = Config(
    library="brax", learning_rate=1e-4, num_minibatches=16, update_epochs=2, gamma=0.9, clip_coef=0.3, vf_coef=0.5,
    ent_coef=1e-4, num_envs=64, num_steps=32, squash=True,
)  # fmt: skip
PRESETS = {
    "rsl_rl": Config(
        library="rsl_rl", learning_rate=1e-3, target_kl=0.01, num_minibatches=4, update_epochs=5, vf_coef=1.0,
        ent_coef=0.01, max_grad_norm=1.0,
    ),
    "rl_games": RL_GAMES,
    "humanoid": dataclasses.replace(  # rl_games' settings of Humanoid, but for the smooth clamp
        RL_GAMES, adapt_each_epoch=True, num_minibatches=4, update_epochs=5, vf_coef=4.0, bounds_coef=5e-4,
        soft_bound=0.0, reward_scale=0.1, normalize_rewards=False, num_envs=64, num_steps=128, hidden=(512, 256, 128),
        shared=True, activation="elu", env_id="gym:Humanoid-v5,include_cfrc_ext_in_observation=False",
    ),
    "skrl": Config(
        library="skrl", learning_rate=1e-3, num_minibatches=2, update_epochs=8, vf_coef=2.5, ent_coef=0.0,
        max_grad_norm=0.5,
    ),
    "brax": BRAX,
    "playground": dataclasses.replace(  # the settings of MuJoCo Playground's DM control suite
        BRAX, learning_rate=1e-3, num_minibatches=32, update_epochs=16, ent_coef=1e-2, gamma=0.995, num_envs=2048,
        num_steps=480, segment_length=30, reward_scale=10.0, normalize_rewards=False, hidden=(256, 256),
        activation="silu", env_id="playground:CheetahRun", total_timesteps=60_000_000,
    ),
    "stable_baselines3": Config(
        library="stable_baselines3", learning_rate=3e-4, num_minibatches=32, update_epochs=10, vf_coef=0.5,
        ent_coef=0.0, max_grad_norm=0.5,
    ),
    "tianshou": Config(
        library="tianshou", learning_rate=1e-3, num_minibatches=32, update_epochs=1, vf_coef=0.5, ent_coef=0.01
    ),
}  # fmt: skip


def make_update(config: Config, env: envs.Env) -> tuple[pp.Part, optax.GradientTransformation]:
    """Return the chain and the optimizer of the library."""
    options = {name: getattr(config, name) for name in OPTIONS[config.library]}
    if config.library == "rl_games":
        sizes = {"num_envs": config.num_envs, "num_steps": config.num_steps}
        options |= {**sizes, "num_actions": envs.count_numbers(env.action_space)}
    update: Callable[..., tuple[pp.Part, optax.GradientTransformation]] = getattr(libraries, config.library)
    return update(
        learning_rate=config.learning_rate, num_minibatches=config.num_minibatches, num_epochs=config.update_epochs,
        gamma=config.gamma, gae_lambda=config.gae_lambda, clip_eps=config.clip_coef, value_coef=config.vf_coef,
        entropy_coef=config.ent_coef, max_grad_norm=config.max_grad_norm, **options,
    )  # fmt: skip


def check_options(config: Config, discrete: bool) -> None:
    """Raise if an option has no effect in the library, or does not fit the others."""
    library, length = config.library, config.segment_length
    wrong = {}
    for field in dataclasses.fields(config):
        others = any(field.name in names for names in OPTIONS.values()) and field.name not in OPTIONS[library]
        if others and getattr(config, field.name) != field.default:
            wrong[field.name] = f"must be {field.default}, because {library} has no such option"
    if library == "rsl_rl" and config.shared:
        wrong["shared"] = "must be False, because rsl_rl clips the gradients of two networks"
    if length is not None and config.num_steps % length:
        wrong.setdefault("segment_length", f"must divide the {config.num_steps} steps of a rollout")
    if discrete and config.noise_steps is not None:
        wrong["noise_steps"] = "must be None, because gSDE is for continuous actions"
    for name, says in wrong.items():
        raise pp.errors.UserValueError(f"{says}, got {getattr(config, name)!r}", where="Config", argument=name)


@training.recipe
def make_train(config: Config, env: envs.Env | None = None, pipeline: pp.Part | None = None) -> training.Train:
    """Return the run, a pure function `train(key) -> TrainResult(state, metrics)`.

    `env` is your own environment with any wrappers, and `pipeline` your own chain; None: as configured.
    """
    if env is None:
        env = envs.make(config.env_id)
        env = env if config.squash else envs.prepare(env, rescale=True)
        env = envs.normalize_observation(env) if config.normalize_observations else env
        env = envs.normalize_reward(env, gamma=config.gamma) if config.normalize_rewards else env
    check_options(config, envs.is_discrete(env.action_space))
    if pipeline is None and config.library == "rl_games" and not hasattr(env.action_space, "low"):
        raise pp.errors.UserValueError(
            f"library_ppo: rl_games measures the divergence of Gaussians, but the actions of {config.env_id} are "
            f"{env.action_space}: use another preset"
        )
    policy = networks.actor_critic(
        env, config.hidden, config.activation, shared=config.shared, log_std=config.log_std, squash=config.squash,
        gsde=config.noise_steps is not None,
    )  # fmt: skip
    if config.library == "rsl_rl":
        policy = libraries.parts.in_two_entries(policy)
    chain, optimizer = make_update(config, env)
    adaptive = config.target_kl is not None and config.library != "stable_baselines3"
    return training.Train.of(
        config, env, policy, pipeline or chain, optimizer,
        value_each_step=config.shared,
        noise_steps=config.noise_steps or 1,
        schedules={} if adaptive else {"learning_rate": config.learning_rate},
    )  # fmt: skip


if __name__ == "__main__":
    training.main(make_train, PRESETS)  # writes metrics, a learning curve and checkpoints to runs/
