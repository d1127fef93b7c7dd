"""PPO as CleanRL has it (`ppo.py`, `ppo_continuous_action.py`), made of parts.

    python -m recipes.cleanrl_ppo --env-id CartPole-v1
    python -m recipes.cleanrl_ppo --preset continuous --env-id Pendulum-v1

Where it differs from the original is listed in docs/fidelity.md; the one that matters: an episode cut by a time limit
is bootstrapped from its final observation.
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
    """Hyperparameters, with CleanRL's names and defaults. Numbers that are floats may be traced arrays."""

    env_id: str = "CartPole-v1"
    """any gymnax environment, with discrete or continuous actions"""
    total_timesteps: Annotated[int, training.at_least(1)] = 500_000
    """environment steps of the whole run, rounded down to whole updates; 5e5 is fine, too"""
    num_envs: Annotated[int, training.at_least(1)] = 4
    """environments that are stepped side by side"""
    num_steps: Annotated[int, training.at_least(1)] = 128
    """steps of each environment in a rollout, after which there is an update"""
    learning_rate: Annotated[float, training.at_least(0)] = 2.5e-4
    """of Adam, in [0, inf)"""
    anneal_lr: bool = True
    """linearly to 0 over the updates of the run"""
    gamma: Annotated[float, training.between(0, 1)] = 0.99
    """discount of rewards per step, in [0, 1]"""
    gae_lambda: Annotated[float, training.between(0, 1)] = 0.95
    """trace decay of generalized advantage estimation, in [0, 1]: 0 has least variance, 1 least bias"""
    num_minibatches: Annotated[int, training.at_least(1)] = 4
    """gradient steps per epoch; has to divide num_envs * num_steps"""
    update_epochs: Annotated[int, training.at_least(1)] = 4
    """passes over each rollout"""
    norm_adv: bool = True
    """standardise advantages in each minibatch"""
    clip_coef: Annotated[float, training.more_than(0)] = 0.2
    """how far the probability ratio (and the value, if clipped) may move from the rollout's, in (0, inf)"""
    clip_vloss: bool = True
    """clip the value loss as well"""
    ent_coef: Annotated[float, training.at_least(0)] = 0.01
    """weight of the entropy bonus, in [0, inf)"""
    vf_coef: Annotated[float, training.at_least(0)] = 0.5
    """weight of the value loss, in [0, inf)"""
    max_grad_norm: Annotated[float, training.more_than(0)] = 0.5
    """a gradient with a larger norm is scaled down to this one, in (0, inf)"""
    target_kl: Annotated[float | None, training.at_least(0)] = None
    """stop an update after the epoch whose last minibatch has a larger KL divergence, in nats, in [0, inf)"""
    normalize_env: bool = False
    """standardise and clip observations and rewards by running statistics"""
    hidden: Annotated[tuple[int, ...], training.at_least(1)] = (64, 64)
    """units of each hidden layer"""
    microbatch: Annotated[int | Literal["auto"] | None, training.at_least(1)] = "auto"
    """evaluate the network on so many steps at a time, for less memory; "auto": 1024 where that is faster"""
    seed: Annotated[int, training.between(0, 2**32 - 1)] = 1
    """of all random numbers, in [0, 2**32)"""


PRESETS = {
    "discrete": Config(),
    # CleanRL's ppo_continuous_action.py
    "continuous": Config(
        env_id="Pendulum-v1",
        total_timesteps=1_000_000,
        num_envs=1,
        num_steps=2048,
        learning_rate=3e-4,
        num_minibatches=32,
        update_epochs=10,
        ent_coef=0.0,
        normalize_env=True,
    ),
}


class ActorCritic(nn.Module):
    """Two tanh MLPs. Orthogonal weights: gain sqrt(2) inside, 0.01 for the policy's head, 1 for the value's."""

    num_actions: int
    discrete: bool
    hidden: tuple[int, ...]

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[Any, jax.Array]:
        """The policy's distribution and the value, for any leading axes."""
        dense = functools.partial(nn.Dense, dot_general=networks.dense_dot_general)

        def mlp(x: jax.Array, out: int, gain: float) -> jax.Array:
            for width in self.hidden:
                x = nn.tanh(dense(width, kernel_init=networks.orthogonal(np.sqrt(2)))(x))
            return dense(out, kernel_init=networks.orthogonal(gain))(x)

        head, value = mlp(obs, self.num_actions, 0.01), mlp(obs, 1, 1.0)[..., 0]
        if self.discrete:
            return distributions.Categorical(head), value
        log_std = self.param("log_std", nn.initializers.zeros, (self.num_actions,))
        return distributions.Normal(head, jnp.exp(log_std)), value


def make_env(config: Config) -> envs.Env:
    """The environment with CleanRL's wrappers."""
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
    discrete, space = envs.is_discrete(env.action_space), env.action_space
    network = ActorCritic(space.n if discrete else envs.size(space), discrete, config.hidden)
    obs_size, obs_rank = envs.size(env.observation_space), len(env.observation_space.shape)

    def evaluate(params: Any, batch: pp.Batch) -> tuple[Any, jax.Array]:
        obs = batch.obs.astype(jnp.float32)
        return network.apply(params, obs.reshape((*obs.shape[: obs.ndim - obs_rank], -1)))

    def init_params(key: jax.Array) -> Any:
        return network.init(key, jnp.zeros(obs_size))

    pipeline = pp.chain(
        pp.gae(gamma=config.gamma, gae_lambda=config.gae_lambda),
        pp.shuffled_minibatches(config.num_minibatches, config.update_epochs),
        pp.advantage_normalize(ddof=1) if config.norm_adv else pp.identity(),
        pp.clipped_surrogate(clip_eps=config.clip_coef),
        pp.policy_diagnostics(),
        pp.clipped_value_loss(clip_eps=config.clip_coef, coef=config.vf_coef)
        if config.clip_vloss
        else pp.value_loss(coef=config.vf_coef),
        pp.entropy_bonus(coef=config.ent_coef),
        pp.identity() if config.target_kl is None else pp.kl_early_stop(config.target_kl, check="epoch"),
    )
    annealed = pp.linear_schedule(config.learning_rate, 0.0, num_updates)
    optimizer = optax.flatten(  # all parameters as one vector: the same steps in fewer, larger operations
        optax.chain(
            optax.clip_by_global_norm(config.max_grad_norm),
            optax.scale_by_adam(eps=1e-5),
            pp.scale_by_update_schedule(annealed if config.anneal_lr else config.learning_rate),
        )
    )
    policy = pp.Policy(init_params, evaluate)
    return training.Train(
        env=env,
        policy=policy,
        rollout=pp.rollout(env, policy, num_envs=config.num_envs, num_steps=config.num_steps),
        learner=pp.learner(
            evaluate if config.microbatch is None else pp.microbatched(evaluate, config.microbatch), pipeline, optimizer
        ),
        num_updates=num_updates,
        steps_per_update=config.num_envs * config.num_steps,
    )


def preset_for(config: Config, train: training.Train) -> str:
    """The preset that is made for environments like this one."""
    del config
    return "discrete" if envs.is_discrete(train.env.action_space) else "continuous"


def main() -> None:
    """Command line: trains, and leaves metrics, a picture and checkpoints under runs/."""
    training.main(make_train, PRESETS, prog="python -m recipes.cleanrl_ppo", preset_for=preset_for)


if __name__ == "__main__":
    main()
