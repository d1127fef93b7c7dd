"""The PPO of other libraries, as commands: rsl_rl, rl_games, skrl, brax, Stable-Baselines3 and Tianshou.

    python -m ppo_parts.recipes.library_ppo --preset rsl_rl --env-id gym:HalfCheetah-v5
    python -m ppo_parts.recipes.library_ppo --preset playground --env-id playground:CheetahRun
    python -m ppo_parts.recipes.library_ppo --preset humanoid

A preset has the update of a library, which `ppo_parts.recipes.libraries` composes of parts, with the library's default
hyperparameters. Rollouts, network and normalization are the same in all presets named after a library, so that two
runs compare the updates; only brax's minibatches of whole segments need more and shorter segments. `humanoid` and
`playground` have settings of rl_games and MuJoCo Playground for these tasks. docs/libraries.md compares the choices.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args

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
    clip_coef: Annotated[float, "how far the ratio may move from 1; in rsl_rl and rl_games, also the value"] = 0.2
    vf_coef: Annotated[float, "weight of the value loss; its factor 1/2 is that of the library"]
    ent_coef: float
    max_grad_norm: Annotated[float | None, "a gradient with a larger norm is scaled down to this"] = None
    bounds_coef: Annotated[float, Range(0), "weight of the loss for means out of bounds; rl_games only"] = 0.0
    soft_bound: Annotated[float, Range(0), "the bound, 0 for a loss on all means; rl_games only"] = 1.1
    reward_scale: Annotated[float, Range(0, open_low=True), "factor of rewards; brax and rl_games only"] = 1.0
    normalize_value: Annotated[bool, "values in units of running moments; rl_games and skrl only"] = False
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


NAMES = {"update_epochs": "num_epochs", "clip_coef": "clip_eps", "vf_coef": "value_coef", "ent_coef": "entropy_coef"}
"""The arguments of `libraries` for fields that have another name there."""


def read_defaults(library: Library) -> dict[str, Any]:
    """Return the fields that a library uses, with its defaults."""
    parameters = inspect.signature(getattr(libraries, library)).parameters
    defaults = {name: x.default for name, x in parameters.items() if x.default is not x.empty}
    arguments = {field.name: NAMES.get(field.name, field.name) for field in dataclasses.fields(Config)}
    return {field: defaults[name] for field, name in arguments.items() if name in defaults}


def preset(library: Library, **changes: Any) -> Config:
    """Return a configuration with the defaults of a library, apart from changes."""
    return Config(library=library, **read_defaults(library) | changes)


PRESETS = {
    "rsl_rl": preset("rsl_rl"),
    "rl_games": preset("rl_games"),
    "humanoid": preset(  # rl_games' settings for Humanoid, except the smooth clamp
        "rl_games", adapt_each_epoch=True, num_minibatches=4, update_epochs=5, vf_coef=4.0, bounds_coef=5e-4,
        soft_bound=0.0, reward_scale=0.1, normalize_rewards=False, num_envs=64, num_steps=128, hidden=(512, 256, 128),
        shared=True, activation="elu", env_id="gym:Humanoid-v5,include_cfrc_ext_in_observation=False",
    ),
    "skrl": preset("skrl"),
    "brax": preset("brax", num_envs=64, num_steps=32, squash=True),
    "playground": preset(  # MuJoCo Playground's settings for the DM control suite
        "brax", learning_rate=1e-3, num_minibatches=32, update_epochs=16, ent_coef=1e-2, gamma=0.995, num_envs=2048,
        num_steps=480, squash=True, segment_length=30, reward_scale=10.0, normalize_rewards=False, hidden=(256, 256),
        activation="silu", env_id="playground:CheetahRun", total_timesteps=60_000_000,
    ),
    "stable_baselines3": preset("stable_baselines3"),
    "tianshou": preset("tianshou"),
}  # fmt: skip


def make_update(config: Config, env: envs.Env) -> tuple[pp.Part, optax.GradientTransformation]:
    """Return the chain and the optimizer of the library."""
    given = {NAMES.get(name, name): getattr(config, name) for name in read_defaults(config.library)}
    if config.library == "rl_games":
        sizes = {"num_envs": config.num_envs, "num_steps": config.num_steps}
        given |= {**sizes, "num_actions": envs.count_numbers(env.action_space)}
    update: Callable[..., tuple[pp.Part, optax.GradientTransformation]] = getattr(libraries, config.library)
    return update(**given)


def check_options(config: Config, discrete: bool) -> None:
    """Raise if an option has no effect in the library or conflicts with others."""
    library, length = config.library, config.segment_length
    wrong, own = {}, read_defaults(library)
    others = {name for each in get_args(Library) for name in read_defaults(each)} - own.keys()
    for field in dataclasses.fields(config):
        if field.name in others and getattr(config, field.name) != field.default:
            wrong[field.name] = f"must be {field.default}, because {library} has no such option"
    if library == "rsl_rl" and config.shared:
        wrong["shared"] = "must be False, because rsl_rl clips the gradients of two networks"
    if length is not None and config.num_steps % length:
        wrong.setdefault("segment_length", f"must divide the {config.num_steps} steps of a rollout")
    if config.adapt_each_epoch and config.target_kl is None:
        wrong.setdefault("adapt_each_epoch", "must be False without target_kl")
    if isinstance(config.bounds_coef, float) and not config.bounds_coef and config.soft_bound != Config.soft_bound:
        wrong.setdefault("soft_bound", f"must be {Config.soft_bound} with bounds_coef=0")
    if library == "rl_games" and config.squash:
        wrong["squash"] = "must be False, because rl_games measures the divergence of Gaussians"
    if discrete and config.noise_steps is not None:
        wrong["noise_steps"] = "must be None, because gSDE is for continuous actions"
    for name, says in wrong.items():
        raise pp.errors.UserValueError(f"{says}, got {getattr(config, name)!r}", where="Config", argument=name)


@training.recipe
def make_train(config: Config, env: envs.Env | None = None, pipeline: pp.Part | None = None) -> training.Train:
    """Return the run of a configuration, with your own environment (including its wrappers) or chain if given."""
    if env is None:
        env = envs.prepare(envs.make(config.env_id), rescale=not config.squash)
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
