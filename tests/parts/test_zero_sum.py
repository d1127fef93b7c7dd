"""Self-play: `zero_sum` tells the sides of a game apart, and an environment says that there are two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_parts as pp
from ppo_parts import envs
from ppo_parts.recipes import cleanrl_ppo
from ppo_parts.testing import example_batch, example_context
from tests import env_fakes, reference
from tests.common import compiled

GAE = pp.gae(gamma=0.9, gae_lambda=0.8)


@pytest.fixture
def nim(monkeypatch):
    env_fakes.install(monkeypatch)
    return envs.make("pgx:nim", opponent="self")


def run(part, batch):
    return jax.jit(lambda batch: part.update(batch, part.init({}), example_context())[0])(batch)


def signed(seed, **fields):
    batch = example_batch(seed, **fields)
    seats = np.sign(np.random.default_rng(seed).normal(size=(2, *batch.reward.shape))).astype(np.float32)
    return batch.replace(extras={"seat": jnp.asarray(seats[0]), "next_seat": jnp.asarray(seats[1])})


def test_zero_sum_follows_its_equation_and_has_each_stream_alone():
    batch = signed(0, mask=None)
    out = run(pp.agents.zero_sum(GAE), batch)
    seat, following = (batch.extras[name] for name in envs.SEATS)
    # Of the first player: the advantage of a row is that of its own player, and so is a value.
    steps = batch.reward, seat * batch.value, following * batch.next_value, batch.terminated, batch.truncated
    expected = seat * reference.gae(*steps, gamma=0.9, gae_lambda=0.8)[0]
    np.testing.assert_allclose(out.advantage, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out.target, expected + batch.value, rtol=1e-5, atol=1e-6)
    for name in ("value", "next_value", "reward"):
        np.testing.assert_array_equal(getattr(out, name), getattr(batch, name))
    pairs = {name: (1, k) for name, k in (("reward", 1), ("value", 2), ("next_value", 2))}
    streams = {name: jnp.stack([k * getattr(batch, name) for k in ks], -1) for name, ks in pairs.items()}
    both = run(pp.agents.zero_sum(GAE), batch.replace(**streams))
    np.testing.assert_allclose(both.advantage[..., 0], out.advantage, rtol=1e-5, atol=1e-6)


def test_zero_sum_reduces_to_its_estimator_after_the_sampler_and_takes_a_chain():
    """Where the first player always moves; where the second does, with the rewards of the first, too."""
    batch = example_batch(1, after_sampler=True)
    ones = jnp.ones_like(batch.reward)
    for sign in (1, -1):
        seats = batch.replace(reward=sign * batch.reward, extras=dict.fromkeys(envs.SEATS, sign * ones))
        out, plain = run(pp.agents.zero_sum(GAE), seats), run(GAE, batch)
        for name in ("advantage", "target"):
            np.testing.assert_array_equal(getattr(out, name), getattr(plain, name))
        np.testing.assert_array_equal(out.value, batch.value)
        np.testing.assert_array_equal(out.current.value, batch.current.value)
    # `chain` flattens chains, and must not take the parts out of what wraps them.
    batch = signed(0)
    part = pp.agents.zero_sum(pp.chain(GAE))
    same = run(pp.chain(part), batch), run(pp.agents.zero_sum(GAE), batch)
    np.testing.assert_array_equal(*(out.advantage for out in same))
    assert part.needs_time
    assert "zero_sum" in str(pp.chain(part))


def test_both_sides_of_a_game_are_played(nim):
    assert nim.zero_sum
    assert not envs.make("pgx:nim").zero_sum
    reset, step = compiled(nim)
    state, obs = reset(jax.random.key(0), 32)
    assert set(obs.obs[:, 0].tolist()) == {5.0}  # nobody has moved
    seats = []
    for t in range(5):
        left = obs.obs[:, 0]
        state, out = step(jax.random.key(t), state, jnp.zeros(32, jnp.int32))  # everybody takes 1 match
        obs = out.obs
        seats.append(out.info["seat"])
        np.testing.assert_array_equal(out.info["next_seat"], -out.info["seat"])
        np.testing.assert_array_equal(out.terminated, left == 1)
    np.testing.assert_array_equal(np.diff(np.abs(seats), axis=0), 0)
    assert set(np.unique(seats[0])) == {-1.0, 1.0}  # who begins is drawn
    np.testing.assert_array_equal(out.reward, seats[0])  # of the first player: who begins takes the last of 5
    np.testing.assert_array_equal(out.info["won"], seats[0] > 0)
    played = nim.evaluation(state)
    assert not played.zero_sum  # against random moves
    assert envs.check_laws(nim, num_steps=60).terminated > 0


def test_a_chain_that_does_not_tell_the_sides_apart_is_refused(nim):
    """That of the recipe does, and is traced when it is made."""
    cleanrl_ppo.make_train(cleanrl_ppo.Config(), nim)
    with pytest.raises(pp.errors.UserValueError, match=r"the policy plays both sides .* pp\.agents\.zero_sum\(pp\.gae"):
        cleanrl_ppo.make_train(cleanrl_ppo.Config(), nim, pipeline=pp.chain(GAE, pp.full_batch(), pp.value_loss()))
