"""PPO as PufferLib 3 and JaxDEM have it, made of parts: V-trace, prioritized segments, values and ratios written back.

    python -m recipes.pufferlib_ppo --env-id CartPole-v1
    python -m recipes.pufferlib_ppo --preset memory
    python -m recipes.pufferlib_ppo --preset continuous --env-id Pendulum-v1
    python -m recipes.pufferlib_ppo --preset minatar

Before each minibatch, advantages and priorities are computed again from what the latest minibatches saw; segments keep
their time axis, so recurrent policies need nothing else. Where it differs from the originals is in docs/fidelity.md.
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
    """Hyperparameters, with PufferLib's names where it has them. Numbers that are floats may be traced arrays."""

    env_id: str = "CartPole-v1"
    """any gymnax environment, with discrete or continuous actions"""
    total_timesteps: Annotated[int, training.at_least(1)] = 500_000
    """environment steps of the whole run, rounded down to whole updates; 5e5 is fine, too"""
    num_envs: Annotated[int, training.at_least(1)] = 16
    """environments that are stepped side by side"""
    num_steps: Annotated[int, training.at_least(1)] = 64
    """steps of each environment in a rollout, after which there is an update"""
    optimizer: Literal["muon", "adam"] = "muon"
    """Muon orthogonalises the steps of weight matrices"""
    learning_rate: Annotated[float, training.at_least(0)] = 0.005
    """of the optimizer, in [0, inf)"""
    anneal_lr: bool = True
    """cosine to 0, over the gradient steps of the run"""
    adam_eps: Annotated[float, training.more_than(0)] = 1e-5
    """added to the denominator of Adam's steps, in (0, inf)"""
    gamma: Annotated[float, training.between(0, 1)] = 0.99
    """discount of rewards per step, in [0, 1]"""
    gae_lambda: Annotated[float, training.between(0, 1)] = 0.95
    """trace decay of the advantage, in [0, 1]: 0 has least variance, 1 least bias"""
    advantage: Literal["vtrace", "gae"] = "vtrace"
    """the same numbers until a refresh writes ratios back"""
    vtrace_rho_clip: Annotated[float, training.more_than(0)] = 1.0
    """upper clip of the importance ratio on the temporal-difference error, in (0, inf)"""
    vtrace_c_clip: Annotated[float, training.more_than(0)] = 1.0
    """upper clip of the importance ratio on the trace, in (0, inf)"""
    num_minibatches: Annotated[int, training.at_least(1)] = 4
    """minibatches drawn per epoch, of whole segments; has to divide num_envs"""
    update_epochs: Annotated[int, training.at_least(1)] = 4
    """multiplies the number of minibatches drawn per update"""
    accumulate_minibatches: Annotated[int, training.at_least(1)] = 1
    """average the gradients of this many minibatches into one step"""
    prioritized: bool = True
    """draw segments by their advantages; otherwise each comes once per epoch"""
    prio_alpha: Annotated[float, training.at_least(0)] = 0.8
    """exponent of the priority, in [0, inf); 0 draws uniformly"""
    prio_beta0: Annotated[float, training.between(0, 1)] = 0.2
    """exponent of the importance weights at the start, in [0, 1]; it grows linearly to 1 over the run"""
    refresh: Literal["rollout", "epoch", "minibatch"] = "minibatch"
    """how often advantages are computed again, with the latest values and ratios"""
    clip_coef: Annotated[float, training.more_than(0)] = 0.2
    """how far the probability ratio may move from the rollout's, in (0, inf)"""
    vf_clip_coef: Annotated[float, training.more_than(0)] = 0.2
    """how far the value may move from the latest one, in reward units, in (0, inf)"""
    vf_coef: Annotated[float, training.at_least(0)] = 2.0
    """weight of the value loss, in [0, inf)"""
    ent_coef: Annotated[float, training.at_least(0)] = 0.01
    """weight of the entropy bonus, in [0, inf)"""
    anneal_ent: bool = False
    """linearly to 0 over the updates of the run"""
    max_grad_norm: Annotated[float, training.more_than(0)] = 1.5
    """a gradient with a larger norm is scaled down to this one, in (0, inf)"""
    normalize_env: bool = True
    """standardise and clip observations and rewards by running statistics"""
    hidden: Annotated[int, training.at_least(1)] = 64
    """units of each hidden layer, and of the recurrent cell"""
    activation: Literal["tanh", "relu", "gelu"] = "tanh"
    """of the hidden layers"""
    memory: Literal["none", "lstm", "gru"] = "none"
    """recurrent cell between the encoder and the heads"""
    squash: bool = False
    """continuous actions: tanh-squashed into the box; otherwise Gaussian, clipped on their way to the environment"""
    microbatch: Annotated[int | Literal["auto"] | None, training.at_least(1)] = "auto"
    """evaluate the network on so many steps at a time, for less memory; "auto": 1024 where that is faster"""
    seed: Annotated[int, training.between(0, 2**32 - 1)] = 1
    """of all random numbers, in [0, 2**32)"""


PRESETS = {
    "discrete": Config(),
    "continuous": Config(
        env_id="Pendulum-v1", total_timesteps=1_000_000, squash=True, optimizer="adam", learning_rate=1e-3
    ),
    "memory": Config(env_id="MemoryChain-bsuite", total_timesteps=200_000, memory="lstm"),
    # Without much entropy early on, policies end in rallies that never hit another brick.
    "minatar": Config(
        env_id="Breakout-MinAtar",
        total_timesteps=5_000_000,
        num_envs=64,
        learning_rate=0.015,
        vf_coef=0.5,
        ent_coef=0.1,
        anneal_ent=True,
        normalize_env=False,
        hidden=128,
        activation="gelu",
    ),
}


class Policy(nn.Module):
    """Encoder, optional recurrent cell, and two heads (orthogonal; gain 0.01 for the policy's, 1 for the value's)."""

    space: Any
    hidden: int
    activation: str
    memory: str
    squash: bool

    @nn.compact
    def __call__(self, obs: jax.Array, carry: Any, reset: Any) -> tuple[Any, ...]:
        """Distribution and value of observations `[..., D]`; with memory, of `[T, N, D]`, and the carry after them."""
        dense = functools.partial(nn.Dense, dot_general=networks.dense_dot_general)
        x, activation = obs, {"gelu": nn.gelu, "relu": nn.relu, "tanh": nn.tanh}[self.activation]
        for _ in range(2):
            x = activation(dense(self.hidden, kernel_init=networks.orthogonal(np.sqrt(2)))(x))
        if self.memory != "none":
            cell = make_cell(self.memory, self.hidden)

            def step(cell: nn.Module, carry: Any, now: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
                x, reset = now
                return cell(jax.tree.map(lambda c: jnp.where(reset[:, None], 0, c), carry), x)

            scan = nn.scan(step, variable_broadcast="params", split_rngs={"params": False})
            carry, x = scan(cell, carry, (x, reset))

        def head(size: int, gain: float) -> jax.Array:
            return dense(size, kernel_init=networks.orthogonal(gain))(x)

        value = head(1, 1.0)[..., 0]
        if envs.is_discrete(self.space):
            distribution = distributions.Categorical(head(self.space.n, 0.01))
        else:
            size = envs.size(self.space)
            scale = jnp.exp(self.param("log_std", nn.initializers.zeros, (size,)))
            loc = head(size, 0.01)
            if self.squash:
                distribution = distributions.TanhNormal(loc, scale, self.space.low, self.space.high)
            else:
                distribution = distributions.Normal(loc, scale)
        return (distribution, value) if self.memory == "none" else (distribution, value, carry)


def make_cell(memory: str, hidden: int) -> nn.RNNCellBase:
    """The recurrent cell by its name."""
    cell = {"lstm": nn.OptimizedLSTMCell, "gru": nn.GRUCell}[memory]
    return cell(hidden, recurrent_kernel_init=networks.orthogonal())


def make_env(config: Config) -> envs.Env:
    """The environment, with actions clipped and running statistics where the configuration says so."""
    env = envs.make(config.env_id)
    if not envs.is_discrete(env.action_space):
        env = envs.clip_action(env)
    if config.normalize_env:
        env = envs.normalize_reward(envs.normalize_observation(env), gamma=config.gamma)
    return env


def make_train(config: Config, env: envs.Env | None = None) -> training.Train:
    """A pure `train(key) -> TrainResult(state, metrics)`; make it inside a vmapped function to sweep its numbers.

    `env` is an environment of your own, wrapped as you like; None: the one the configuration names.
    """
    training.check_config(config)
    env = make_env(config) if env is None else env
    num_updates = training.updates_in(config.total_timesteps, num_envs=config.num_envs, num_steps=config.num_steps)
    network = Policy(env.action_space, config.hidden, config.activation, config.memory, config.squash)
    obs_size, obs_rank = envs.size(env.observation_space), len(env.observation_space.shape)

    def evaluate(params: Any, batch: pp.Batch) -> Any:
        obs = batch.obs.astype(jnp.float32)
        return network.apply(params, obs.reshape((*obs.shape[: obs.ndim - obs_rank], -1)), batch.carry, batch.reset)

    def zeros(num_envs: int) -> Any:
        cell = make_cell(config.memory, config.hidden)
        return cell.initialize_carry(jax.random.key(0), (num_envs, config.hidden))

    initial_carry = None if config.memory == "none" else zeros

    def init_params(key: jax.Array) -> Any:
        carry = None if initial_carry is None else initial_carry(1)
        return network.init(key, jnp.zeros((1, 1, obs_size)), carry, jnp.zeros((1, 1), bool))

    if config.prioritized:
        beta = pp.linear_schedule(config.prio_beta0, 1.0, num_updates)
        sampler = pp.prioritized_sampler(
            config.num_minibatches,
            alpha=config.prio_alpha,
            beta=beta,
            num_epochs=config.update_epochs,
            refresh=config.refresh,
        )
    else:
        sampler = pp.segment_minibatches(config.num_minibatches, config.update_epochs, refresh=config.refresh)
    decay = {"gamma": config.gamma, "gae_lambda": config.gae_lambda}
    clips = {"rho_clip": config.vtrace_rho_clip, "c_clip": config.vtrace_c_clip}
    ent_coef = pp.linear_schedule(config.ent_coef, 0.0, num_updates) if config.anneal_ent else config.ent_coef
    pipeline = pp.chain(
        pp.vtrace(**decay, **clips) if config.advantage == "vtrace" else pp.gae(**decay),
        sampler,
        pp.advantage_normalize(ddof=1),
        pp.advantage_weight() if config.prioritized else pp.identity(),
        pp.clipped_surrogate(clip_eps=config.clip_coef),
        pp.policy_diagnostics(),
        pp.clipped_value_loss(clip_eps=config.vf_clip_coef, coef=config.vf_coef),
        pp.entropy_bonus(coef=ent_coef),
    )
    gradient_steps = num_updates * config.update_epochs * config.num_minibatches // config.accumulate_minibatches
    rate: Any = config.learning_rate
    if config.anneal_lr:
        rate = pp.cosine_decay_schedule(config.learning_rate, max(1, gradient_steps))
    descend = optax.contrib.muon(rate) if config.optimizer == "muon" else optax.adam(rate, eps=config.adam_eps)
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), descend)
    if config.optimizer == "adam":  # Muon needs its matrices
        optimizer = optax.flatten(optimizer)
    if config.accumulate_minibatches > 1:
        optimizer = optax.MultiSteps(optimizer, config.accumulate_minibatches).gradient_transformation()
    policy = pp.Policy(init_params, evaluate, initial_carry)
    return training.Train(
        env=env,
        policy=policy,
        rollout=pp.rollout(
            env,
            policy,
            num_envs=config.num_envs,
            num_steps=config.num_steps,
            value_each_step=True,  # from the same layers as the action
        ),
        learner=pp.learner(
            evaluate if config.microbatch is None else pp.microbatched(evaluate, config.microbatch), pipeline, optimizer
        ),
        num_updates=num_updates,
        steps_per_update=config.num_envs * config.num_steps,
    )


def preset_for(config: Config, train: training.Train) -> str:
    """The preset that is made for environments like this one."""
    if config.env_id.endswith("-MinAtar"):
        return "minatar"
    if config.env_id == PRESETS["memory"].env_id:
        return "memory"
    return "discrete" if envs.is_discrete(train.env.action_space) else "continuous"


def main() -> None:
    """Command line: trains, and leaves metrics, a picture and checkpoints under runs/."""
    training.main(make_train, PRESETS, prog="python -m recipes.pufferlib_ppo", preset_for=preset_for)


if __name__ == "__main__":
    main()
