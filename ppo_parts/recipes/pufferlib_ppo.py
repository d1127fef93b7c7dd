"""PufferLib 3's and JaxDEM's PPO, composed of parts: V-trace, prioritized segments, values and ratios written back.

    python -m ppo_parts.recipes.pufferlib_ppo --env-id CartPole-v1
    python -m ppo_parts.recipes.pufferlib_ppo --preset memory
    python -m ppo_parts.recipes.pufferlib_ppo --preset popgym --env-id popgym:AutoencodeEasy
    python -m ppo_parts.recipes.pufferlib_ppo --preset continuous --env-id Pendulum-v1
    python -m ppo_parts.recipes.pufferlib_ppo --preset minatar --env-id Asterix-MinAtar

Before each minibatch, advantages and priorities are recomputed from the values and ratios of the latest minibatches.
Segments keep their time axis, so recurrent policies need no other changes. docs/fidelity.md lists the differences.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import optax

import ppo_parts as pp
from ppo_parts import envs, networks, training
from ppo_parts.training import Range


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(training.Config):
    """Hyperparameters, with PufferLib's names where PufferLib has them."""

    env_id: str = "CartPole-v1"
    total_timesteps: int = 500_000
    num_envs: int = 16
    num_steps: int = 64
    optimizer: Annotated[Literal["muon", "adam"], "Muon orthogonalizes the steps of weight matrices"] = "muon"
    learning_rate: Annotated[float, "learning rate of the optimizer"] = 0.005
    anneal_lr: Annotated[bool, "anneal the learning rate by a cosine to 0 over the gradient steps of the run"] = True
    adam_eps: Annotated[float, Range(0, open_low=True), "added to the denominator of Adam's steps"] = 1e-5
    gamma: float = 0.99
    gae_lambda: float = 0.95
    vtrace_rho_clip: Annotated[float, Range(0, open_low=True), "limit of the ratio that weights the TD error"] = 1.0
    vtrace_c_clip: Annotated[float, Range(0, open_low=True), "limit of the ratio that weights the trace"] = 1.0
    num_minibatches: Annotated[int, "minibatches of whole segments per epoch; must divide num_envs"] = 4
    update_epochs: Annotated[int, "multiplies the number of minibatches drawn per update"] = 4
    prio_alpha: Annotated[float, Range(0), "exponent of the priorities; 0 draws uniformly"] = 0.8
    prio_beta0: Annotated[float, Range(0, 1), "initial exponent of the importance weights; grows linearly to 1"] = 0.2
    clip_coef: float = 0.2
    vf_clip_coef: Annotated[float, Range(0, open_low=True), "limit of the value's change, in reward units"] = 0.2
    vf_coef: float = 2.0
    ent_coef: float = 0.01
    anneal_ent: Annotated[bool, "anneal ent_coef linearly to 0 over the updates of the run"] = False
    max_grad_norm: float = 1.5
    normalize_env: bool = True
    hidden: Annotated[int, "units of each of two hidden layers, and of the recurrent cell"] = 64
    activation: networks.Activation = "tanh"
    memory: Annotated[networks.Cell | None, "recurrent cell before the heads"] = None
    squash: Annotated[bool, "squash continuous actions into their box with tanh, instead of clipping them"] = False


PRESETS = {
    "discrete": Config(),
    "continuous": Config(
        env_id="Pendulum-v1", total_timesteps=1_000_000, squash=True, optimizer="adam", learning_rate=1e-3),
    "memory": Config(env_id="MemoryChain-bsuite", total_timesteps=200_000, memory="lstm"),
    "popgym": Config(  # answers do not affect later steps, so a short horizon reduces noise
        env_id="popgym:RepeatPreviousMedium", total_timesteps=1_000_000, num_envs=64, num_steps=104, optimizer="adam",
        learning_rate=3e-3, gamma=0.5, gae_lambda=0.5, prio_alpha=0.0, ent_coef=0.02, normalize_env=False, memory="lru",
    ),
    "minatar": Config(  # Breakout needs high entropy at first
        env_id="Breakout-MinAtar", total_timesteps=10_000_000, num_envs=64, num_steps=32, optimizer="adam", hidden=128,
        learning_rate=0.002, gae_lambda=0.8, vf_coef=0.5, ent_coef=0.1, anneal_ent=True, normalize_env=False,
        activation="relu",
    ),
}  # fmt: skip


@training.recipe
def make_train(config: Config, env: envs.Env | None = None, pipeline: pp.Part | None = None) -> training.Train:
    """Return the run of a configuration, with your own environment (including its wrappers) or chain if given."""
    if env is None:
        env = envs.prepare(envs.make(config.env_id), normalize=config.normalize_env, gamma=config.gamma)
    shared = env.privileged_space is None  # otherwise the critic sees something else and has no memory
    policy = networks.actor_critic(
        env, (config.hidden,) * 2, config.activation, shared=shared, memory=config.memory, squash=config.squash
    )
    clips: dict[str, Any] = {"rho_clip": config.vtrace_rho_clip, "c_clip": config.vtrace_c_clip}
    ent_coef = pp.linear_schedule(config.ent_coef, 0.0, config.num_updates) if config.anneal_ent else config.ent_coef
    puffer = pp.chain(
        pp.vtrace(gamma=config.gamma, gae_lambda=config.gae_lambda, **clips),
        pp.prioritized_sampler(
            config.num_minibatches,
            num_epochs=config.update_epochs,
            alpha=config.prio_alpha,
            beta=pp.linear_schedule(config.prio_beta0, 1.0, config.num_updates),
            refresh="minibatch",
        ),
        pp.advantage_normalize(ddof=1),
        pp.advantage_weight(),
        pp.clipped_surrogate(clip_eps=config.clip_coef),
        pp.policy_diagnostics(),
        pp.clipped_value_loss(clip_eps=config.vf_clip_coef, coef=config.vf_coef),
        pp.entropy_bonus(coef=ent_coef),
    )
    steps = config.update_epochs * config.num_minibatches  # gradient steps per update
    annealed = optax.cosine_decay_schedule(config.learning_rate, config.num_updates * steps)
    rate = annealed if config.anneal_lr else config.learning_rate
    clip = optax.clip_by_global_norm(config.max_grad_norm)
    if config.optimizer == "muon" and config.adam_eps != Config.adam_eps:
        raise pp.errors.UserValueError("has no effect with the optimizer muon: leave it out", argument="adam_eps")
    if config.optimizer == "muon":
        optimizer = optax.chain(clip, optax.contrib.muon(rate))
    else:  # one vector of all parameters is faster, but Muon needs weight matrices
        optimizer = optax.flatten(optax.chain(clip, optax.adam(rate, eps=config.adam_eps)))
    rates = {"learning_rate": (lambda update: annealed(update * steps)) if config.anneal_lr else rate}
    return training.Train.of(config, env, policy, pipeline or puffer, optimizer, value_each_step=True, schedules=rates)


if __name__ == "__main__":
    training.main(make_train, PRESETS)  # writes metrics, a learning curve and checkpoints to runs/
