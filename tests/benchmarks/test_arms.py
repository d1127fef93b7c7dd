"""The benchmarks of PPO-EWMA and PPG have the arms they name; what is measured of every run."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_parts as pp
from benchmarks import _runs, ewma, ppg


def test_arms_of_ewma_adjust_what_they_say():
    config = ewma.Config(learning_rate=0.01, age=3.0)
    assert len({ewma.numbers(config, arm, 1) for arm in ewma.ARMS.values()}) == 1  # nothing, in the largest batch
    none, old, fixed, new = (ewma.numbers(config, arm, 4) for arm in ewma.ARMS.values())
    assert none == (0.01, 0.0, 0.75)
    assert old == fixed == (0.005, 0.75, 0.75)
    assert new == (0.005, 0.75, pytest.approx(12 / 13))  # a mean age of 12 steps: 1 / (1 - decay) - 1


def test_moments_over_rollouts_are_a_weighted_average():
    part, state, rng = ewma.standardize_over_rollouts(0.75), None, np.random.default_rng(0)
    rollouts = rng.normal(2.0, 3.0, (3, 5, 2))
    for advantage in rollouts:
        flat = jnp.asarray(advantage, jnp.float32)
        batch = pp.Batch(obs=flat, action=flat, log_prob=flat, advantage=flat)
        state = part.init(None, None) if state is None else state
        batch, state = part.update(batch, state, None)
    weights = np.repeat(0.75 ** np.arange(3)[::-1], 10)
    mean = np.average(rollouts.ravel(), weights=weights)
    std = np.sqrt(np.average(np.square(rollouts.ravel() - mean), weights=weights))
    np.testing.assert_allclose(batch.advantage, (rollouts[-1] - mean) / std, rtol=1e-5)


@pytest.mark.lenient_ranks  # the networks' biases
def test_arms_of_ppg_have_the_networks_and_phases_they_name():
    small = ppg.Config(num_envs=2, num_steps=4, num_minibatches=2, num_rollouts=2, hidden=(4,), total_timesteps=64)
    phases = {}
    for arm in ppg.ARMS.values():
        state, metrics = ppg.make_train(dataclasses.replace(small, arm=arm)).shapes
        phases[arm] = {name.split("/")[0] for name in metrics if "_loss" in name}
        assert set(state.learner.params) == ({"policy"} if arm == "shared" else {"policy", "value"})
    assert phases["phasic"] == {"policy", "value", "auxiliary"}
    assert phases["shared"] == phases["separate"] == {"policy_loss", "value_loss"}


@pytest.mark.lenient_ranks  # the networks' biases
def test_outcomes_are_those_of_the_training_and_of_new_episodes():
    """Also where the run stops at several stages."""
    small = _runs.Config(total_timesteps=2048, num_envs=8, num_steps=16, hidden=(4,), learning_rate=0.0)
    train = ewma.make_train(ewma.Config(**vars(small)), False, ewma.Numbers(0.0, 0.0, 0.0))
    result = jax.jit(train)(jax.random.key(3))
    returns, episodes = (np.asarray(result.metrics[name]) for name in ("episode_return", "episodes"))
    found = jax.jit(functools.partial(_runs.outcome, train))(3)
    over_training = np.nansum(returns * episodes) / episodes.sum()
    np.testing.assert_allclose(found["return_over_training"], over_training, rtol=1e-5)
    pieces = np.arange(16) * _runs.WINDOWS // 16
    np.testing.assert_allclose(found["curve"][pieces], returns, rtol=1e-5)
    assert np.isnan(np.delete(found["curve"], pieces)).all()
    assert 9 < found["evaluation_return"] < 40  # of a policy that does not learn
    stages = list(_runs.stages(train, _runs.keys_of(range(3, 5)), 3))
    assert [(stage.env_steps, stage.last) for stage in stages] == [(640, False), (1280, False), (1920, True)]
    np.testing.assert_allclose(np.concatenate([stage.metrics["episodes"][0] for stage in stages]), episodes[:15])
