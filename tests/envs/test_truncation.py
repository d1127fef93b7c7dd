"""Probes with a known value function: the real rollout and learner find it, and three usual mistakes do not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from ppo_parts import envs
from tests.common import Categorical

GAMMA, UPDATES = 0.9, 200
RIGHT, AS_TERMINATION, NO_BOUNDARY, RESET_VALUE = range(4)
"""How truncations are treated: as they are, or with one of the usual mistakes."""

CONSTANT, TWO_STATES = (1.0, False), (-10.0, True)
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
"""Reward of state 0, where episodes begin, and whether it is told apart; steps; whether they end it; the values."""


def learned(treatment, first_reward, told_apart, limit, terminates):
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

    def treated(batch, reset_value):
        over = batch.terminated | batch.truncated
        return batch.replace(
            terminated=jnp.where(treatment == AS_TERMINATION, over, batch.terminated),
            truncated=batch.truncated & (treatment != AS_TERMINATION) & (treatment != NO_BOUNDARY),
            next_value=jnp.where((treatment >= NO_BOUNDARY) & over, reset_value, batch.next_value),
        )

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
        batch = treated(batch, first @ learner_state.params["value"])
        return (learner.update(keys[1], learner_state, batch)[0], state), None

    state = learner.init({"policy": jnp.zeros((2, 2)), "value": jnp.zeros(2)}), rollout.init(jax.random.key(0))
    (end, _), _ = jax.lax.scan(update, state, jax.random.split(jax.random.key(1), UPDATES))
    return end.params["value"]


@pytest.fixture(scope="module")
def values():
    """`[treatments, 2]` for each case, all trained in one program."""
    rows = [(*kind, limit, terminates) for kind, limit, terminates, _ in CASES.values()]
    every = jax.vmap(jax.vmap(learned, (0, *[None] * 4)), (None, *[0] * 4))
    found = jax.jit(every)(jnp.arange(4), *map(jnp.asarray, zip(*rows, strict=True)))
    return dict(zip(CASES, np.asarray(found), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_the_learned_value_is_the_true_one_and_that_of_a_mistake_is_not(values, case):
    kind, _, terminates, expected = CASES[case]
    known = [i for i, value in enumerate(expected) if value is not None]
    right, *mistakes = values[case]
    for i in known:
        assert right[i] == pytest.approx(expected[i], abs=0.02 * max(abs(expected[j]) for j in known))
    for treatment, found in enumerate(mistakes, AS_TERMINATION):
        if terminates:  # nothing is bootstrapped across a termination, with a mistake or without
            np.testing.assert_allclose(found, right, atol=1e-5)
        elif kind is CONSTANT and treatment > AS_TERMINATION:  # where reset and final observation look alike
            assert found[0] == pytest.approx(expected[0], rel=0.02)
        else:
            assert max(abs(found[i] - expected[i]) for i in known) > 2.0


def test_mistakes_have_the_values_theory_gives_them(values):
    """Two states, cut after 2 steps: r = -10, 1, -10, 1, ... as one endless episode, or episodes that end there."""
    found = values["two states, truncated after 2"]
    endless = np.linalg.solve(np.eye(2) - GAMMA * np.array([[0, 1], [1, 0]]), [-10, 1])
    np.testing.assert_allclose(found[AS_TERMINATION], [-10 + GAMMA, 1], atol=0.2)
    np.testing.assert_allclose(found[NO_BOUNDARY], endless, rtol=0.02)
    np.testing.assert_allclose(found[RESET_VALUE], endless, rtol=0.02)
    assert values["constant, truncated after 1"][AS_TERMINATION][0] == pytest.approx(1.0, rel=0.01)
