"""A program as users of `mypy --strict` write it: the annotations of public names suffice. It is checked, not run."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

import ppo_parts as pp
from ppo_parts import distributions, envs, training
from ppo_parts import functional as F
from ppo_parts.recipes import cleanrl_ppo


class Params(NamedTuple):
    actor: jax.Array
    critic: jax.Array


class ScaleState(NamedTuple):
    mean_square: jax.Array


def scale_advantage(decay: float = 0.9) -> pp.Part:
    if not 0 <= decay < 1:
        raise pp.errors.UserValueError(f"scale_advantage: decay={decay} must be in [0, 1)")

    def init(params: Params, key: jax.Array) -> ScaleState:
        return ScaleState(jnp.ones(()))

    def update(batch: pp.Batch, state: ScaleState, context: pp.Context) -> tuple[pp.Batch, ScaleState]:
        mean_square = decay * state.mean_square + (1 - decay) * F.masked_mean(jnp.square(batch.advantage), batch.mask)
        return batch.replace(advantage=batch.advantage / jnp.sqrt(mean_square)), ScaleState(mean_square)

    return pp.Part(init, update, "scale_advantage", requires=("advantage",), provides=("advantage",))


def evaluate(params: Params, batch: pp.Batch) -> tuple[distributions.Distribution, jax.Array]:
    return distributions.Categorical(batch.obs @ params.actor), batch.obs @ params.critic


pipeline = pp.chain(
    pp.gae(gamma=0.99, gae_lambda=0.95),
    scale_advantage(),
    pp.shuffled_minibatches(2, num_epochs=2),
    pp.clipped_surrogate(clip_eps=0.2),
    pp.value_loss(coef=0.5),
)
learner = pp.learner(evaluate, pipeline, pp.clipped_adam(1e-3, max_grad_norm=0.5))
env = envs.make("CartPole-v1")
rollout = pp.rollout(env, evaluate, num_envs=4, num_steps=8)


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
    train: training.Train = cleanrl_ppo.make_train(cleanrl_ppo.Config(total_timesteps=4096))
    print(out.advantage.shape, train.num_updates, learner_state.step)
