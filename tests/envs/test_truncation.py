"""Probes with a known value function, which the rollout and the learner find where episodes are cut or end."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from ppo_parts import envs
from tests.common import Categorical

GAMMA, UPDATES = 0.9, 200
CASES = [
    # Every step is paid 1: a state is worth 1 / (1 - gamma), even where each step is its own episode.
    (1.0, False, 1, False, [10.0]),
    (1.0, False, 5, False, [10.0]),
    (1.0, False, 1, True, [1.0]),
    # V(1) = 1 / (1 - gamma), V(0) = -10 + gamma V(1): the reset observation is worth far less than the final one.
    (-10.0, True, 5, False, [-1.0, 10.0]),
    (-10.0, True, 2, False, [-1.0, 10.0]),
    (-10.0, True, 2, True, [-10.0 + GAMMA, 1.0]),
    (-10.0, True, 1, True, [-10.0]),
]
"""Reward of state 0, where episodes begin, and whether it is told apart; steps; whether they end it; the values."""


def learned(first_reward, told_apart, limit, terminates):
    """V of the two states after training; V is linear in the observation, so it can be exact.

    Every step but the first of an episode is in state 1 and pays 1.
    """

    def look(time):
        first = (time == 0) | ~told_apart
        return jnp.stack([first, ~first]).astype(jnp.float32)

    def step(key, time, action):
        reward, over = jnp.where(time == 0, first_reward, 1.0), time + 1 >= limit
        return envs.Step(time + 1, look(time + 1), reward, over & terminates, over & ~terminates)

    def evaluate(weights, batch):
        return Categorical(batch.obs @ weights["policy"]), batch.obs @ weights["value"]

    first = np.array([1.0, 0.0], np.float32)
    env = envs.auto_reset(lambda key: (jnp.zeros((), int), first), step, envs.Box((2,)), envs.Discrete(2))
    rollout = pp.rollout(env, evaluate, num_envs=3, num_steps=16)
    losses = (pp.clipped_surrogate(clip_eps=0.2), pp.value_loss())
    pipeline = pp.chain(pp.gae(gamma=GAMMA, gae_lambda=0.5), pp.full_batch(num_epochs=8), *losses)
    learner = pp.learner(evaluate, pipeline, optax.sgd(0.7))

    def update(carry, key):
        learner_state, state = carry
        keys = jax.random.split(key)
        state, batch, _ = rollout.collect(keys[0], learner_state.params, state)
        return (learner.update(keys[1], learner_state, batch)[0], state), None

    state = learner.init({"policy": jnp.zeros((2, 2)), "value": jnp.zeros(2)}), rollout.init(jax.random.key(0))
    (end, _), _ = jax.lax.scan(update, state, jax.random.split(jax.random.key(1), UPDATES))
    return end.params["value"]


def test_the_learned_values_are_the_true_ones():
    *columns, values = zip(*CASES, strict=True)
    for found, expected in zip(jax.jit(jax.vmap(learned))(*map(jnp.asarray, columns)), values, strict=True):
        assert found[: len(expected)].tolist() == pytest.approx(expected, abs=0.02 * max(map(abs, expected)))
