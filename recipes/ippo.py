"""Independent PPO for many agents (IPPO, and MAPPO with one setting), made of parts.

    python -m recipes.ippo --env-id MPE_simple_spread_v3
    python -m recipes.ippo --preset smax
    python -m recipes.ippo --preset riddle

Actor and critic are phases of one update: each has its own sampler, epochs and optimizer, and the early stop is the
actor's alone. Rollouts are [T, N, A]; where agents are absent, the mask leaves them out. Where it differs from the
originals (jaxagents, JaxMARL) is in docs/fidelity.md.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import ppo_parts as pp
from ppo_parts import distributions, envs, networks, training


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyperparameters. Numbers that are floats may be traced arrays."""

    env_id: str = "MPE_simple_spread_v3"
    """any JaxMARL environment; SMAX with its map, "SMAX/3m" """
    total_timesteps: Annotated[int, training.at_least(1)] = 10_000_000
    """steps of environments (not of agents) in the whole run, rounded down to whole updates; 1e7 is fine, too"""
    num_envs: Annotated[int, training.at_least(1)] = 16
    """environments that are stepped side by side"""
    num_steps: Annotated[int, training.at_least(1)] = 128
    """steps of each environment in a rollout, after which there is an update"""
    parameters: Literal["shared", "independent"] = "shared"
    """one network for all agents, or one each"""
    critic: Literal["local", "central"] = "local"
    """what the value is a function of: the agent's own observation (IPPO), or everybody's (MAPPO)"""
    agent_id: bool = False
    """append the agent's number to its observation, so that shared networks can tell agents apart"""
    actor_learning_rate: Annotated[float, training.at_least(0)] = 2.5e-4
    """of the actor's Adam, in [0, inf)"""
    critic_learning_rate: Annotated[float, training.at_least(0)] = 2.5e-4
    """of the critic's Adam, in [0, inf)"""
    anneal_lr: bool = True
    """linearly to 0 over the updates of the run"""
    adam_eps: Annotated[float, training.more_than(0)] = 1e-5
    """added to the denominator of Adam's steps, in (0, inf)"""
    max_grad_norm: Annotated[float, training.more_than(0)] = 0.5
    """a gradient with a larger norm is scaled down to this one, in (0, inf); of actor and critic each, and of each
    agent where parameters are independent"""
    gamma: Annotated[float, training.between(0, 1)] = 0.99
    """discount of rewards per step, in [0, 1]"""
    gae_lambda: Annotated[float, training.between(0, 1)] = 0.95
    """trace decay of generalized advantage estimation, in [0, 1]: 0 has least variance, 1 least bias"""
    num_minibatches: Annotated[int, training.at_least(1)] = 4
    """gradient steps per epoch; has to divide num_envs * num_steps, and with memory num_envs"""
    actor_epochs: Annotated[int, training.at_least(1)] = 4
    """the actor's passes over each rollout"""
    critic_epochs: Annotated[int, training.at_least(1)] = 4
    """the critic's passes over each rollout"""
    advantages: Literal["together", "agent", "step_and_agent"] = "together"
    """standardise them over the whole minibatch, for each agent, or for each step and agent"""
    clip_coef: Annotated[float, training.more_than(0)] = 0.2
    """how far the probability ratio (and the value, if clipped) may move from the rollout's, in (0, inf)"""
    clip_vloss: bool = True
    """clip the value loss as well"""
    vf_coef: Annotated[float, training.at_least(0)] = 0.5
    """weight of the value loss, in [0, inf)"""
    ent_coef: Annotated[float, training.at_least(0)] = 0.01
    """weight of the entropy bonus, in [0, inf)"""
    target_kl: Annotated[float | None, training.at_least(0)] = None
    """end the actor's phase after the epoch whose last minibatch has a larger KL divergence, in nats, in [0, inf); the
    critic's continues"""
    actor_gain: Annotated[float, training.more_than(0)] = 0.01
    """orthogonal gain of the policy's last layer, in (0, inf); from 1, what is done depends on what is seen from the
    start"""
    hidden: Annotated[int, training.at_least(1)] = 64
    """units of each hidden layer, and of the GRU"""
    activation: Literal["tanh", "relu"] = "tanh"
    """of the hidden layers"""
    memory: bool = False
    """a GRU in actor and critic"""
    microbatch: Annotated[int | Literal["auto"] | None, training.at_least(1)] = "auto"
    """evaluate the networks on so many steps of agents at a time, for less memory; "auto": 1024 where that is faster"""
    seed: Annotated[int, training.between(0, 2**32 - 1)] = 1
    """of all random numbers, in [0, 2**32)"""


PRESETS = {
    "spread": Config(),  # JaxMARL's ippo_ff_mpe
    "smax": Config(
        env_id="SMAX/3m",
        total_timesteps=4_000_000,
        num_envs=128,
        num_steps=32,
        critic="central",
        actor_learning_rate=6e-3,
        critic_learning_rate=6e-3,
        ent_coef=0.003,
        activation="relu",
    ),
    # With a short horizon it pays to announce before the last night, and so to signal; a policy that acts on what it
    # sees from the start has signals to begin with.
    "riddle": Config(
        env_id="switch_riddle",
        total_timesteps=2_000_000,
        num_envs=64,
        num_steps=24,
        critic="central",
        actor_learning_rate=3e-3,
        critic_learning_rate=3e-3,
        gamma=0.87,
        num_minibatches=2,
        ent_coef=0.01,
        actor_gain=2.0,
        hidden=32,
        memory=True,
    ),
}


class Network(nn.Module):
    """Two layers, a GRU if there is memory, and a head: what actor and critic have in common."""

    size: int
    gain: float
    hidden: int
    activation: str
    memory: bool
    deviation: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, carry: Any, reset: Any) -> tuple[Any, ...]:
        """Output `[..., size]` (and a deviation, if asked for) and the carry; with memory of `[T, N, D]`."""
        activation = {"tanh": nn.tanh, "relu": nn.relu}[self.activation]
        dense = functools.partial(nn.Dense, dot_general=networks.dense_dot_general)
        for _ in range(2):
            x = activation(dense(self.hidden, kernel_init=networks.orthogonal(np.sqrt(2)))(x))
        if self.memory:
            cell = nn.GRUCell(self.hidden, recurrent_kernel_init=networks.orthogonal())

            def step(cell: nn.Module, carry: Any, now: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
                x, reset = now
                return cell(jnp.where(reset[..., None], 0, carry), x)

            scan = nn.scan(step, variable_broadcast="params", split_rngs={"params": False})
            carry, x = scan(cell, carry, (x, reset))
        out = dense(self.size, kernel_init=networks.orthogonal(self.gain))(x)
        if self.deviation:
            scale = jnp.exp(self.param("log_std", nn.initializers.zeros, (self.size,)))
            return (out, jnp.broadcast_to(scale, out.shape)), carry
        return out, carry


def make_env(config: Config) -> envs.Env:
    """The environment; continuous actions are clipped on their way to it."""
    env = envs.make_agents(config.env_id)
    return env if envs.is_discrete(env.action_space) else envs.clip_action(env)


def make_train(config: Config, env: envs.Env | None = None) -> training.Train:
    """A pure `train(key) -> TrainResult(state, metrics)`; make it inside a vmapped function to sweep its numbers.

    `env` is an environment of your own with an axis of agents; None: the one the configuration names.
    """
    training.check_config(config)
    env = make_env(config) if env is None else env
    if env.num_agents is None:
        raise pp.UserValueError("ippo: this environment has no axis of agents; use cleanrl_ppo, or give it one")
    agents, space, discrete = env.num_agents, env.action_space, envs.is_discrete(env.action_space)
    num_updates = training.updates_in(config.total_timesteps, num_envs=config.num_envs, num_steps=config.num_steps)
    common = {"hidden": config.hidden, "activation": config.activation, "memory": config.memory}
    models = {
        "actor": Network(
            space.n if discrete else envs.size(space), config.actor_gain, deviation=not discrete, **common
        ),
        "critic": Network(1, 1.0, **common),
    }

    def inputs(obs: envs.AgentsObs) -> dict[str, jax.Array]:
        own = envs.with_agent_id(obs.obs) if config.agent_id else obs.obs
        if config.critic == "local":
            return {"actor": own, "critic": own}
        everybody = obs.obs.reshape(*obs.obs.shape[:-2], 1, -1)
        everybody = jnp.broadcast_to(everybody, (*obs.obs.shape[:-1], everybody.shape[-1]))
        return {"actor": own, "critic": envs.with_agent_id(everybody)}

    def each_agent(name: str, params: Any, x: jax.Array, carry: Any, reset: Any) -> tuple[Any, Any]:
        """The network over the axis of agents, which stands behind the others: `[..., A, D]`."""
        if config.parameters == "shared":
            return models[name].apply(params, x, carry, reset)
        memory = (-2, -1) if config.memory else (None, None)
        apply = jax.vmap(models[name].apply, in_axes=(0, -2, *memory), out_axes=(-2, memory[0]))
        return apply(params, x, carry, reset)

    def evaluate(params: Any, batch: pp.Batch) -> Any:
        x, before = inputs(batch.obs), batch.carry or {"actor": None, "critic": None}
        out, actor = each_agent("actor", params["actor"], x["actor"], before["actor"], batch.reset)
        value, critic = each_agent("critic", params["critic"], x["critic"], before["critic"], batch.reset)
        if not discrete:
            distribution = distributions.Normal(*out)
        elif batch.obs.available is None:
            distribution = distributions.Categorical(out)
        else:
            distribution = distributions.Categorical(distributions.mask_logits(out, batch.obs.available))
        if not config.memory:
            return distribution, value[..., 0]
        return distribution, value[..., 0], {"actor": actor, "critic": critic}

    def initial_carry(num_envs: int) -> Any:
        return {name: jnp.zeros((num_envs, agents, config.hidden)) for name in models}

    def init_params(key: jax.Array) -> Any:
        obs = envs.AgentsObs(jnp.zeros((1, 1, agents, envs.size(env.observation_space))))
        carry, reset = jnp.zeros((1, config.hidden)), jnp.zeros((1, 1), bool)

        def init(name: str, key: jax.Array) -> Any:
            x = inputs(obs)[name][..., 0, :]
            if config.parameters == "shared":
                return models[name].init(key, x, carry, reset)
            return jax.vmap(lambda key: models[name].init(key, x, carry, reset))(jax.random.split(key, agents))

        return {name: init(name, k) for name, k in zip(models, jax.random.split(key), strict=True)}

    if config.advantages == "step_and_agent" and config.num_envs // config.num_minibatches < 2:
        raise pp.UserValueError(
            'advantages="step_and_agent" standardises over the environments of a minibatch, and with '
            f"num_envs={config.num_envs}, num_minibatches={config.num_minibatches} there is one in each: all would be 0"
        )
    time_kept = config.memory or config.advantages == "step_and_agent"
    minibatches = pp.segment_minibatches if time_kept else pp.shuffled_minibatches
    axis = {"together": None, "agent": (0, 1) if time_kept else 0, "step_and_agent": 1}[config.advantages]
    pipeline = pp.chain(
        pp.gae(gamma=config.gamma, gae_lambda=config.gae_lambda),
        pp.phases(
            actor=pp.chain(
                minibatches(config.num_minibatches, config.actor_epochs),
                pp.advantage_normalize(axis=axis),
                pp.clipped_surrogate(clip_eps=config.clip_coef),
                pp.policy_diagnostics(),
                pp.entropy_bonus(coef=config.ent_coef),
                pp.identity() if config.target_kl is None else pp.kl_early_stop(config.target_kl, check="epoch"),
            ),
            critic=pp.chain(
                minibatches(config.num_minibatches, config.critic_epochs),
                pp.clipped_value_loss(clip_eps=config.clip_coef, coef=config.vf_coef)
                if config.clip_vloss
                else pp.value_loss(coef=config.vf_coef),
            ),
        ),
    )

    def optimizer(learning_rate: Any) -> optax.GradientTransformation:
        annealed = pp.linear_schedule(learning_rate, 0.0, num_updates)
        steps = optax.flatten(  # all parameters as one vector: the same steps in fewer, larger operations
            optax.chain(
                optax.clip_by_global_norm(config.max_grad_norm),
                optax.scale_by_adam(eps=config.adam_eps),
                pp.scale_by_update_schedule(annealed if config.anneal_lr else learning_rate),
            )
        )
        return pp.per_agent(steps) if config.parameters == "independent" else steps

    optimizers = {"actor": optimizer(config.actor_learning_rate), "critic": optimizer(config.critic_learning_rate)}
    policy = pp.Policy(init_params, evaluate, initial_carry if config.memory else None)
    return training.Train(
        env=env,
        policy=policy,
        rollout=pp.rollout(env, policy, num_envs=config.num_envs, num_steps=config.num_steps),
        learner=pp.learner(
            evaluate if config.microbatch is None else pp.microbatched(evaluate, config.microbatch),
            pipeline,
            optimizers,
        ),
        num_updates=num_updates,
        steps_per_update=config.num_envs * config.num_steps,
    )


def preset_for(config: Config, train: training.Train) -> str:
    """The preset that is made for environments like this one."""
    del train
    if config.env_id.startswith("SMAX"):
        return "smax"
    return "riddle" if config.env_id == PRESETS["riddle"].env_id else "spread"


def main() -> None:
    """Command line: trains, and leaves metrics, a picture and checkpoints under runs/."""
    training.main(make_train, PRESETS, prog="python -m recipes.ippo", preset_for=preset_for)


if __name__ == "__main__":
    main()
