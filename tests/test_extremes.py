"""Parts where numbers are narrow, masks are empty, or a state has gone as far as it can."""

import jax
import jax.numpy as jnp
import numpy as np

import ppo_parts as pp
from ppo_parts.testing import example_batch, example_context

CONTEXT = example_context()


def test_reward_to_go_keeps_a_discount_that_bfloat16_cannot_hold():
    part, batch = pp.reward_to_go(gamma=0.999), pp.Batch(reward=jnp.ones((200, 1), jnp.bfloat16))
    advantage = part.update(batch, part.init(None), CONTEXT)[0].advantage
    np.testing.assert_allclose(float(advantage[0, 0]), (1 - 0.999**200) / 0.001, rtol=0.01)


def test_prioritized_sampler_reaches_all_segments_in_bfloat16():
    sampler = pp.prioritized_sampler(1, alpha=1.0, beta=1.0, replacement=True, segments_per_minibatch=750)
    flat = jnp.ones((1, 3000), jnp.bfloat16)
    drawn, weight = sampler.draw(jax.random.key(0), pp.Batch(log_prob=flat, advantage=flat), CONTEXT)
    assert len(np.unique(drawn)) > 600  # of 750 draws; a cumulative sum in bfloat16 leaves 128
    assert weight.dtype == jnp.bfloat16


def test_the_coefficient_of_an_adaptive_penalty_finds_back():
    part = pp.kl_penalty(coef=1.0, target_kl=0.1)
    batch = example_batch(after_sampler=True)
    still = batch.replace(current=batch.current._replace(log_prob=batch.log_prob))
    moved = batch.replace(current=batch.current._replace(log_prob=batch.log_prob - 2))

    @jax.jit
    def after(state, updates, batch):
        return jax.lax.fori_loop(0, updates, lambda i, state: part.finish(batch, state, CONTEXT), state)

    low = after(part.init(None), 200, still)
    assert 0 < float(low.coef) < 1e-30
    assert float(after(low, 100, moved).coef) > 1e-10
    assert np.isfinite(after(low, 400, moved).coef)


def test_normalize_target_learns_nothing_from_a_rollout_without_a_step_that_counts():
    part = pp.normalize_target(lambda params, old, new: params, rate=0.5)
    batch, before = example_batch(), pp.ValueStatistics(jnp.float32(5), jnp.float32(2))
    _, after = part.update(batch.replace(mask=jnp.zeros_like(batch.mask)), before, CONTEXT)
    assert after == before
