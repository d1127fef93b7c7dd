"""The PufferLib-style recipe: recurrent, squashed and plain, from the same learner and rollout."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from ppo_parts.recipes import cleanrl_ppo, ippo, pufferlib_ppo
from ppo_parts.recipes.pufferlib_ppo import Config, make_train

pytestmark = pytest.mark.lenient_ranks  # flax adds biases [H] to [T, N, H]
SMALL = Config(total_timesteps=128, num_envs=4, num_steps=16, num_minibatches=2, update_epochs=1, hidden=8)
MEMORY = dataclasses.replace(SMALL, env_id="MemoryChain-bsuite", memory="gru")


@pytest.fixture(scope="module")
def recurrent():
    """A recurrent run with two rollouts collected: `(train, params, states, batches)`."""
    train = make_train(MEMORY)
    start = jax.jit(train.init)(jax.random.key(0))
    collect, params = jax.jit(train.rollout.collect), start.learner.params
    middle, first, _ = collect(jax.random.key(1), params, start.rollout)
    _, second, _ = collect(jax.random.key(2), params, middle)
    return train, params, middle, (first, second)


def test_recurrent_first_ratio_is_one(recurrent):
    train, params, _, batches = recurrent
    for batch in batches:  # the second starts from a carry that is not zero
        distribution, value, *_ = jax.jit(train.policy.evaluate)(params, batch)
        np.testing.assert_allclose(distribution.log_prob(batch.action), batch.log_prob, atol=1e-6)
        np.testing.assert_allclose(value, batch.value, atol=1e-6)
    assert np.abs(batches[1].carry).max() > 0


def test_recurrent_state_is_zeroed_where_an_episode_begins(recurrent):
    train, params, middle, (first, second) = recurrent
    ended = first.terminated | first.truncated
    np.testing.assert_array_equal(first.reset[0], True)
    np.testing.assert_array_equal(first.reset[1:], ended[:-1])
    np.testing.assert_array_equal(second.reset[0], ended[-1])
    np.testing.assert_array_equal(second.carry, middle.carry)
    step = int(np.argmax(np.asarray(first.reset[1:, 0]))) + 1
    assert bool(first.reset[step, 0])
    alone = pp.Batch(obs=first.obs[step:, :1], carry=jnp.zeros((1, 8)), reset=first.reset[step:, :1])
    evaluate = jax.jit(train.policy.evaluate)
    distribution, *_ = evaluate(params, alone)
    np.testing.assert_allclose(distribution.log_prob(first.action[step:, :1]), first.log_prob[step:, :1], atol=1e-6)
    kept = evaluate(params, first.replace(reset=jnp.zeros_like(first.reset)))[0]
    assert not np.allclose(kept.log_prob(first.action), first.log_prob, atol=1e-4)


def test_recurrent_batches_refuse_single_steps(recurrent):
    train, params, _, (first, _) = recurrent
    losses = (pp.gae(gamma=0.9, gae_lambda=0.9), pp.shuffled_minibatches(2), pp.clipped_surrogate(clip_eps=0.2))
    learner = pp.learner(train.policy, pp.chain(*losses), optax.sgd(0.1))
    with pytest.raises(ValueError, match="segment_minibatches"):
        learner.update(jax.random.key(0), learner.init(params), first)


@pytest.mark.parametrize(
    "changes",
    [
        {"env_id": "MemoryChain-bsuite", "memory": "lstm"},
        {"env_id": "Pendulum-v1", "squash": True, "normalize_env": True, "optimizer": "adam"},
        {
            "total_timesteps": 64 * 3, "anneal_ent": True, "ent_coef": 1.0, "learning_rate": 0.0,
            "normalize_env": False, "activation": "gelu", "anneal_lr": False, "microbatch": None,
        },
    ],
    ids=["lstm", "squashed", "plain"],
)  # fmt: skip
def test_variants_train(changes):
    config = dataclasses.replace(SMALL, **changes)
    train = make_train(config)
    result = jax.jit(train)(jax.random.key(0))
    for name in ("loss", "grad_norm", "entropy", "explained_variance"):
        assert result.metrics[name].shape == (train.num_updates,)
        assert np.isfinite(result.metrics[name]).all()
    assert all(int(np.sum(x)) == 0 for name, x in result.metrics.items() if name.startswith("nonfinite/"))
    if config.memory:
        played = jax.jit(lambda state: train.evaluate_policy(jax.random.key(1), state, 3))(result.state)
        assert np.all(played.terminated | played.truncated)
    if config.anneal_ent:  # the coefficient falls linearly
        metrics = result.metrics
        bonus = metrics["policy_loss"] + config.vf_coef * metrics["value_loss"] - metrics["loss"]  # what is left is it
        np.testing.assert_allclose(bonus / metrics["entropy"], [1, 2 / 3, 1 / 3], rtol=1e-3)


@pytest.mark.parametrize("recipe", [cleanrl_ppo, pufferlib_ppo, ippo], ids=lambda recipe: recipe.__name__)
def test_presets_can_be_made(recipe):
    """`make_train` traces the whole run, so what does not fit together would fail."""
    if recipe is ippo:
        pytest.importorskip("jaxmarl")
    for preset in recipe.PRESETS.values():
        train = recipe.make_train(preset)
        assert train.num_updates * train.steps_per_update <= preset.total_timesteps


def test_an_option_of_another_optimizer_is_refused():
    with pytest.raises(pp.errors.UserValueError, match="adam_eps has no effect with the optimizer muon"):
        make_train(Config(adam_eps=0.5))


def test_the_chain_can_be_another():
    pipeline = pp.chain(pp.gae(gamma=0.9, gae_lambda=0.9), pp.segment_minibatches(2), pp.value_loss())
    metrics = jax.eval_shape(make_train(SMALL, pipeline=pipeline), jax.random.key(0)).metrics
    assert {"value_loss", "policy_loss"} & set(metrics) == {"value_loss"}
