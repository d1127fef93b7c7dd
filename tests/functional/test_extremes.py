"""Parts where numbers are narrow, masks are empty, or a state has gone as far as it can."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_parts as pp
from ppo_parts import distributions
from ppo_parts import functional as F
from ppo_parts.testing import example_batch, example_context

CONTEXT = example_context()


def test_reward_to_go_keeps_a_discount_that_bfloat16_cannot_hold():
    part, batch = pp.tokens.reward_to_go(gamma=0.999), pp.Batch(reward=jnp.ones((200, 1), jnp.bfloat16))
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
    part = pp.critics.normalize_target(lambda params, old, new: params, rate=0.5)
    batch, before = example_batch(), pp.critics.ValueStatistics(jnp.float32(5), jnp.float32(2))
    _, after = part.update(batch.replace(mask=jnp.zeros_like(batch.mask)), before, CONTEXT)
    assert after == before


def test_what_masked_groups_hold_does_not_matter():
    keep = jnp.array([1, 1, 0])
    groups, lengths = jnp.array([0, 0, -1]), jnp.array([1, 1, -7])
    for options in ({}, {"baseline": "length_weighted", "length": lengths}):
        advantage = F.group_advantage(jnp.array([1.0, 3.0, 9.0]), groups, scale=None, mask=keep, **options)
        np.testing.assert_allclose(advantage, [-1, 1, 0])


def test_groups_without_tokens_or_others_have_no_advantage():
    reward, group = jnp.array([1.0, 3.0, 9.0]), jnp.array([0, 0, 1])
    assert F.group_advantage(reward, group)[2] == 0
    assert F.group_advantage(reward, group, baseline="leave_one_out", scale=None).tolist() == [-2, 2, 0]
    options = {"baseline": "length_weighted", "length": jnp.array([0, 0]), "scale": None}
    assert F.group_advantage(jnp.array([1.0, 3.0]), jnp.array([0, 0]), **options).tolist() == [0, 0]


def test_priorities_do_not_overflow():
    np.testing.assert_allclose(F.segment_priorities(jnp.array([[1e5, 1.0]]), alpha=8.0), [1, 0], atol=1e-30)
    np.testing.assert_allclose(F.segment_priorities(jnp.array([[2e38, 2e38]]), alpha=1.0), [0.5, 0.5])
    np.testing.assert_allclose(F.segment_priorities(jnp.array([[6.0, 2.0]]), alpha=2.0, eps=4.0), [5 / 6, 1 / 6], 1e-6)
    large = jnp.array([[1.0, 2.0, 3e-3, 5.0]])
    np.testing.assert_allclose(
        F.segment_priorities(2e37 * large, alpha=0.8, eps=0), F.segment_priorities(large, alpha=0.8, eps=0), 1e-5
    )
    many = jnp.full(70000, 1 / 70000, jnp.float16)
    np.testing.assert_allclose(F.importance_weights(many, jnp.arange(2), beta=1.0), 1, rtol=0.1)


def test_a_narrow_head_is_rescaled_without_loss():
    head = jnp.ones((2, 1), jnp.bfloat16), jnp.full(1, 2.0, jnp.bfloat16)
    kernel, bias = F.rescale_head(*head, (1000.0, 1.0), (1001.0, 1.0))
    assert (bias.tolist(), bias.dtype, kernel.dtype) == ([1], jnp.bfloat16, jnp.bfloat16)
    many = jnp.zeros(3), jnp.ones(3)
    with pytest.raises(F.ShapeError, match=r"do not fit the kernel of shape \(1,\).* shape \(3,\)"):
        F.rescale_head(jnp.ones(1), jnp.zeros(1), many, many)


def test_sums_of_narrow_losses_do_not_overflow_before_their_mean():
    loss = jnp.zeros((2000, 10), jnp.float16).at[:, 0].set(50.0)
    assert float(F.aggregate(loss, by="sequence_sum")) == 10000


def test_infinite_bounds_give_finite_weights():
    ratio = jnp.array([100.0, 0.0])
    for mode in ("truncate", "mask"):
        assert jnp.isfinite(F.importance_sampling_weight(ratio, mode=mode, high=jnp.inf)).all()
        for dtype in (jnp.bfloat16, jnp.float16):
            weight = F.importance_sampling_weight(ratio.astype(dtype), mode=mode, high=jnp.inf)
            assert weight.tolist() == [float(jnp.finfo(dtype).max), 1]
    zeros = jnp.zeros((2, 1))
    clips = {"gamma": 0.9, "rho_clip": jnp.inf, "c_clip": jnp.inf}
    assert F.vtrace(ratio[:, None], *[zeros] * 4, **clips).error.tolist() == [[0], [0]]


def test_a_score_without_a_penalty_does_not_depend_on_log_probabilities():
    assert F.outcome_reward(jnp.array(1.0), log_prob=jnp.array([-jnp.inf, -1.0])).tolist() == [0, 1]


def test_bounds_of_covariances_may_be_traced():
    def made(low):
        return pp.policy_loss(F.clip_cov, clip_eps=0.2, cov_low=low).init({}) == ()

    assert jax.vmap(made)(jnp.array([1.0, 2.0])).all()


def test_no_step_has_no_next_value():
    assert F.next_values(jnp.zeros((0, 2)), jnp.zeros(2)).shape == (0, 2)


def test_narrow_logits_draw_rare_actions():
    """Random numbers of their own dtype would have ties, and no tail."""
    dtype = jnp.bfloat16
    policy = distributions.Categorical(jnp.zeros(1000, dtype))
    drawn = policy.sample(seed=jax.random.key(0), sample_shape=(4_000,))
    assert abs(float(jnp.mean(drawn < 100)) - 0.1) < 0.02
    rare = distributions.MultiCategorical([jnp.log(jnp.array([0.9, 0.099, 0.001])).astype(dtype)])
    drawn = rare.sample(seed=jax.random.key(1), sample_shape=(30_000,))
    assert abs(float(jnp.mean(drawn == 2)) - 0.001) < 0.0007


def test_narrow_actions_are_one_option():
    log_prob = distributions.Categorical(jnp.zeros(300)).log_prob(jnp.array([256.0, 3.0], jnp.bfloat16))
    np.testing.assert_allclose(log_prob, -np.log(300), rtol=1e-6)


def test_the_numbers_of_options_may_be_an_array():
    policy = distributions.MultiCategorical(jnp.zeros(5), jnp.array([2, 3]))
    assert [part.logits.shape for part in policy.parts] == [(2,), (3,)]
