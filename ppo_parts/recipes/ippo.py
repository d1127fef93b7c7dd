"""Multi-agent PPO (IPPO, and MAPPO with one setting), composed of parts.

    python -m ppo_parts.recipes.ippo --env-id jaxmarl:MPE_simple_spread_v3
    python -m ppo_parts.recipes.ippo --preset smax

Actor and critic are phases of one update; each has its own sampler, epochs and optimizer, and the early stop applies
only to the actor. Rollouts have shape [T, N, A], and the mask excludes absent agents. docs/fidelity.md lists the
differences from the originals (jaxagents, JaxMARL).
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import jax

import ppo_parts as pp
from ppo_parts import envs, networks, training
from ppo_parts.training import Range


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(training.Config):
    """Hyperparameters, with the defaults of JaxMARL's ippo_ff_mpe."""

    env_id: str = "jaxmarl:MPE_simple_spread_v3"
    total_timesteps: int = 10_000_000
    num_envs: int = 16
    num_steps: int = 128
    parameters: Annotated[Literal["shared", "independent"], "one network for all agents, or one for each"] = "shared"
    critic: Annotated[Literal["local", "central"], "input: the agent's observation, or all agents' (MAPPO)"] = "local"
    agent_id: Annotated[bool, "append the agent's number to its observation, to tell agents apart"] = False
    actor_learning_rate: Annotated[float, Range(0), "learning rate of the actor's Adam"] = 2.5e-4
    critic_learning_rate: Annotated[float, Range(0), "learning rate of the critic's Adam"] = 2.5e-4
    anneal_lr: Annotated[bool, "anneal the learning rates linearly to 0 over the updates of the run"] = True
    max_grad_norm: Annotated[float, "separately for actor, critic and each independent agent"] = 0.5
    gamma: float = 0.99
    gae_lambda: float = 0.95
    num_minibatches: Annotated[int, "must divide num_envs * num_steps; with memory, num_envs"] = 4
    actor_epochs: Annotated[int, Range(1), "the actor's passes over each rollout"] = 4
    critic_epochs: Annotated[int, Range(1), "the critic's passes over each rollout"] = 4
    clip_coef: Annotated[float, "how far the ratio and the value may move from the rollout"] = 0.2
    vf_coef: float = 0.5
    ent_coef: float = 0.01
    target_kl: Annotated[float | None, "end the actor's phase after an epoch with a larger KL"] = None
    actor_gain: Annotated[float, Range(0, open_low=True), "gain of the head; a small one begins uniform"] = 0.01
    hidden: Annotated[int, "units of each of two hidden layers, and of the recurrent cell"] = 64
    activation: networks.Activation = "tanh"
    memory: Annotated[networks.Cell | None, "recurrent cell in actor and critic"] = None
    normalize_env: bool = False


PRESETS = {
    "spread": Config(),
    "smax": Config(
        env_id="jaxmarl:SMAX/3m", total_timesteps=4_000_000, num_envs=128, num_steps=32,
        critic="central", actor_learning_rate=6e-3, critic_learning_rate=6e-3, ent_coef=0.003, activation="relu",
    ),
    "riddle": Config(  # a short horizon rewards an announcement before the last night, and so signalling
        env_id="jaxmarl:switch_riddle", total_timesteps=2_000_000, num_envs=64, num_steps=24, num_minibatches=2,
        critic="central", actor_learning_rate=3e-3, critic_learning_rate=3e-3, gamma=0.87,
        actor_gain=2.0, hidden=32, memory="gru",
    ),
}  # fmt: skip


@training.recipe
def make_train(config: Config, env: envs.Env | None = None, pipeline: pp.Part | None = None) -> training.Train:
    """Return the run of a configuration, with your own environment (which has an agent axis) or chain if given."""
    independent = config.parameters == "independent"
    normalization: dict[str, Any] = {"normalize": True, "gamma": config.gamma, "per_agent": independent}
    env = env or envs.prepare(envs.make(config.env_id), **normalization if config.normalize_env else {})

    def inputs(obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the inputs of each agent's actor and critic, from the observations `[..., A, D]` of all agents."""
        own = envs.with_agent_id(obs) if config.agent_id else obs
        return own, own if config.critic == "local" else envs.with_agent_id(envs.share_observations(obs))

    layers: dict[str, Any] = {"hidden": (config.hidden,) * 2, "activation": config.activation, "memory": config.memory}
    policy = networks.multi_agent_actor_critic(env, inputs, **layers, independent=independent, gain=config.actor_gain)
    minibatches = pp.segment_minibatches if config.memory else pp.shuffled_minibatches  # segments keep the time order
    ippo = pp.chain(
        pp.gae(gamma=config.gamma, gae_lambda=config.gae_lambda),
        pp.phases(
            actor=pp.chain(
                minibatches(config.num_minibatches, config.actor_epochs),
                pp.advantage_normalize(),
                pp.clipped_surrogate(clip_eps=config.clip_coef),
                pp.policy_diagnostics(),
                pp.entropy_bonus(coef=config.ent_coef),
                pp.identity() if config.target_kl is None else pp.kl_early_stop(config.target_kl, check="epoch"),
            ),
            critic=pp.chain(
                minibatches(config.num_minibatches, config.critic_epochs),
                pp.clipped_value_loss(clip_eps=config.clip_coef, coef=config.vf_coef),
            ),
        ),
    )

    rates: dict[str, Any] = {"actor": config.actor_learning_rate, "critic": config.critic_learning_rate}
    if config.anneal_lr:
        rates = {name: pp.linear_schedule(rate, 0.0, config.num_updates) for name, rate in rates.items()}
    optimizers = {name: pp.clipped_adam(rate, config.max_grad_norm) for name, rate in rates.items()}
    if independent:
        optimizers = {name: pp.agents.per_agent(adam) for name, adam in optimizers.items()}
    schedules = {f"{name}/learning_rate": rate for name, rate in rates.items()}
    return training.Train.of(config, env, policy, pipeline or ippo, optimizers, schedules=schedules)


if __name__ == "__main__":
    training.main(make_train, PRESETS)  # writes metrics, a learning curve and checkpoints to runs/
