"""A program as users of `mypy --strict` write it: public annotations suffice. It is type-checked, but not run."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

import ppo_parts as pp
from ppo_parts import distributions, envs
from ppo_parts import functional as F


class Params(NamedTuple):
    actor: jax.Array
    critic: jax.Array


def evaluate(params: Params, batch: pp.Batch) -> tuple[distributions.Distribution, jax.Array]:
    return distributions.Categorical(batch.obs @ params.actor), batch.obs @ params.critic


pipeline = pp.chain(pp.gae(gamma=0.99, gae_lambda=0.95), pp.full_batch(), pp.clipped_surrogate(clip_eps=0.2))
learner = pp.learner(evaluate, pipeline, pp.clipped_adam(1e-3, max_grad_norm=0.5))
rollout = pp.rollout(envs.make("CartPole-v1"), evaluate, num_envs=4, num_steps=8)


@jax.jit
def train_step(
    key: jax.Array, learner_state: pp.LearnerState, rollout_state: pp.RolloutState
) -> tuple[pp.LearnerState, pp.RolloutState, jax.Array]:
    rollout_state, batch, episodes = rollout.collect(key, learner_state.params, rollout_state)
    learner_state, metrics = learner.update(key, learner_state, batch)
    return learner_state, rollout_state, metrics["loss"] + episodes["episode_return"]


def main() -> None:
    learner_state = learner.init(Params(jnp.zeros((4, 2)), jnp.zeros(4)))
    learner_state, *_ = train_step(jax.random.key(1), learner_state, rollout.init(jax.random.key(0)))
    out = F.gae(jnp.ones((3, 1)), jnp.zeros((3, 1)), jnp.zeros((3, 1)), jnp.zeros((3, 1)), gamma=0.99, gae_lambda=0.95)
    print(out.advantage.shape, learner_state.step)
