"""Probes with a known value function: the real rollout and learner find it, and three usual mistakes do not."""

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct

import ppo_parts as pp
from ppo_parts import envs
from tests.common import Softmax

GAMMA, UPDATES = 0.9, 200
TREATMENTS = ("right", "as termination", "no boundary", "value of the reset observation")


@struct.dataclass
class State:
    time: jax.Array


@struct.dataclass
class Params:
    max_steps_in_episode: jax.Array
    terminates: jax.Array
    first_reward: jax.Array
    """in state 0, where every episode begins; every other step is in state 1 and pays 1"""
    told_apart: jax.Array
    """whether the observation says which state it is"""


class Probe(gymnax.environments.environment.Environment):
    """The same for ever but for its first step, if nothing cuts it; it is cut after `max_steps_in_episode` steps."""

    def look(self, time, params):
        first = (time == 0) | ~params.told_apart
        return jnp.stack([first, ~first]).astype(jnp.float32)

    def reset_env(self, key, params):
        return self.look(jnp.int32(0), params), State(jnp.int32(0))

    def step_env(self, key, state, action, params):
        reward = jnp.where(state.time == 0, params.first_reward, 1.0)
        time = state.time + 1
        terminated = params.terminates & (time >= params.max_steps_in_episode)
        return self.look(time, params), State(time), reward, terminated, {}

    def is_truncated(self, state, params):
        return ~params.terminates & (state.time >= params.max_steps_in_episode)

    def observation_space(self, params):
        return gymnax.environments.spaces.Box(0, 1, (2,))

    def action_space(self, params=None):
        return gymnax.environments.spaces.Discrete(2)


def treated(batch, treatment, reset_value):
    """The batch as a code that makes mistake number `treatment` would have it; 0: as it is."""
    over = batch.terminated | batch.truncated
    return batch.replace(
        terminated=jnp.where(treatment == 1, over, batch.terminated),
        truncated=jnp.where((treatment == 1) | (treatment == 2), False, batch.truncated),
        next_value=jnp.where((treatment >= 2) & over, reset_value, batch.next_value),
    )


def learned(treatment, params):
    """V of the two states after training; V is linear in the observation, so it can be exact."""

    def evaluate(weights, batch):
        return Softmax(batch.obs @ weights["policy"]), batch.obs @ weights["value"]

    env = envs.from_gymnax(Probe(), params)
    rollout = pp.rollout(env, evaluate, num_envs=3, num_steps=16)
    pipeline = pp.chain(
        pp.gae(gamma=GAMMA, gae_lambda=0.5),
        pp.full_batch(num_epochs=8),
        pp.clipped_surrogate(clip_eps=0.2),
        pp.value_loss(),
    )
    learner = pp.learner(evaluate, pipeline, optax.sgd(0.7))

    def step(carry, key):
        learner_state, state = carry
        keys = jax.random.split(key)
        state, batch, _ = rollout.collect(keys[0], learner_state.params, state)
        first = Probe().look(jnp.int32(0), params)
        batch = treated(batch, treatment, first @ learner_state.params["value"])
        learner_state, _ = learner.update(keys[1], learner_state, batch)
        return (learner_state, state), None

    start = learner.init({"policy": jnp.zeros((2, 2)), "value": jnp.zeros(2)}), rollout.init(jax.random.key(0))
    (end, _), _ = jax.lax.scan(step, start, jax.random.split(jax.random.key(1), UPDATES))
    return end.params["value"]


CONSTANT = {"first_reward": 1.0, "told_apart": False}
TWO_STATES = {"first_reward": -10.0, "told_apart": True}
CASES = {
    # every step is its own episode, cut: the state is worth 1 / (1 - gamma) all the same
    "constant, truncated after 1": (CONSTANT, 1, False, [10.0, None]),
    "constant, truncated after 5": (CONSTANT, 5, False, [10.0, None]),
    "constant, terminated after 1": (CONSTANT, 1, True, [1.0, None]),
    # V(1) = 1 / (1 - gamma), V(0) = -10 + gamma V(1): the reset observation is worth far less than the final one
    "two states, truncated after 5": (TWO_STATES, 5, False, [-1.0, 10.0]),
    "two states, truncated after 2": (TWO_STATES, 2, False, [-1.0, 10.0]),
    "two states, terminated after 2": (TWO_STATES, 2, True, [-10.0 + GAMMA, 1.0]),
    "two states, terminated after 1": (TWO_STATES, 1, True, [-10.0, None]),
}


@pytest.fixture(scope="module")
def values():
    """`[cases, treatments, 2]`, all trained in one program."""
    rows = [
        Params(
            jnp.int32(limit),
            jnp.asarray(terminates),
            jnp.float32(kind["first_reward"]),
            jnp.asarray(kind["told_apart"]),
        )
        for kind, limit, terminates, _ in CASES.values()
    ]
    params = jax.tree.map(lambda *x: jnp.stack(x), *rows)
    every = jax.vmap(jax.vmap(learned, (0, None)), (None, 0))
    found = jax.jit(every)(jnp.arange(len(TREATMENTS)), params)
    return dict(zip(CASES, np.asarray(found), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_the_learned_value_is_the_true_one(values, case):
    *_, expected = CASES[case]
    for actual, value in zip(values[case][0], expected, strict=True):
        if value is not None:
            assert actual == pytest.approx(value, abs=0.02 * max(abs(x) for x in expected if x is not None))


@pytest.mark.parametrize("case", [name for name, (_, _, terminates, _) in CASES.items() if terminates])
def test_a_termination_is_not_taken_for_a_truncation(values, case):
    """As termination: the same thing here. The others bootstrap nothing across a termination either."""
    np.testing.assert_allclose(values[case][1:], np.broadcast_to(values[case][0], (3, 2)), atol=1e-5)


@pytest.mark.parametrize("treatment", range(1, len(TREATMENTS)), ids=TREATMENTS[1:])
@pytest.mark.parametrize("case", [name for name, (_, _, terminates, _) in CASES.items() if not terminates])
def test_a_mistake_at_truncations_would_be_seen(values, case, treatment):
    """Where reset and final observation look alike, only the first of the mistakes can change anything."""
    kind, limit, _, expected = CASES[case]
    found = values[case][treatment]
    if kind is CONSTANT and treatment > 1:
        assert found[0] == pytest.approx(expected[0], rel=0.02)
        return
    if kind is CONSTANT and limit == 1:
        assert found[0] == pytest.approx(1.0, rel=0.01)  # taken for terminated, after a single step
    known = [i for i, value in enumerate(expected) if value is not None]
    assert max(abs(found[i] - expected[i]) for i in known) > 2.0


def test_mistakes_have_the_values_theory_gives_them(values):
    """Two states, cut after 2 steps: r = -10, 1, -10, 1, ... as one endless episode, or episodes that end there."""
    found = values["two states, truncated after 2"]
    endless = np.linalg.solve(np.eye(2) - GAMMA * np.array([[0, 1], [1, 0]]), [-10, 1])
    np.testing.assert_allclose(found[1], [-10 + GAMMA, 1], atol=0.2)
    np.testing.assert_allclose(found[2], endless, rtol=0.02)
    np.testing.assert_allclose(found[3], endless, rtol=0.02)
