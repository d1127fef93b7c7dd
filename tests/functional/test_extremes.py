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
REWARD, GROUP, RATIO = jnp.array([1.0, 3.0, 9.0]), jnp.array([0, 0, 1]), jnp.array([100.0, 0.0])
LONG, MANY = jnp.ones((200, 1), jnp.bfloat16), jnp.full(70000, 1 / 70000, "f2")
FIFTIES = jnp.zeros((2000, 10), jnp.float16).at[:, 0].set(50.0)
UNCLIPPED = {"gamma": 0.9, "rho_clip": jnp.inf, "c_clip": jnp.inf}


def grouped(reward, group, **options):
    return F.group_advantage(reward, jnp.array(group), scale=None, **options)


def by_length(*length):
    return {"baseline": "length_weighted", "length": jnp.array(length)}


def advantage(part, batch):
    return part.update(batch, part.init(None), CONTEXT)[0].advantage


def bounded(mode, dtype=jnp.float32):
    return F.importance_sampling_weight(RATIO.astype(dtype), mode=mode, high=jnp.inf)


def row(what, expected, call, rtol=1e-5):
    return pytest.param(expected, call, rtol, id=what)


def drawn_weights():
    sampler = pp.prioritized_sampler(1, alpha=1.0, beta=0.0, segments_per_minibatch=2)
    flat = jnp.zeros((1, 3000), jnp.float16).at[0, 0].set(6e4)  # the others have a probability of 2e-11
    return sampler.draw(jax.random.key(0), pp.Batch(log_prob=flat, advantage=flat), CONTEXT)[1]


def statistics_of_nothing():
    part, batch = pp.critics.normalize_target(lambda params, old, new: params, rate=0.5), example_batch()
    before = pp.critics.ValueStatistics(jnp.float32(5), jnp.float32(2))
    return part.update(batch.replace(mask=0 * batch.mask), before, CONTEXT)[1]


def made(low):
    return pp.policy_loss(F.clip_cov, clip_eps=0.2, cov_low=low).init({}) == ()


MASKED = {"mask": jnp.array([1, 1, 0])}
NUMBERS = [  # what is special, what has to come out, and a call
    row("a discount that bfloat16 cannot hold", (1 - 0.999**200) / 0.001,
        lambda: advantage(pp.tokens.reward_to_go(gamma=0.999), pp.Batch(reward=LONG))[0, 0], 0.01),
    row("rewards to go over masked steps, whose ends do not count", [3, 0, 4, 0], lambda: F.reward_to_go(
        jnp.array([1.0, jnp.nan, 4.0, 8.0]), jnp.array([0, 1, 0, 0]), gamma=0.5, mask=jnp.array([1, 0, 1, 0]))),
    row("a group that is masked", [-1, 1, 0], lambda: grouped(REWARD, [0, 0, -1], **MASKED)),
    row("a length that is masked", [-1, 1, 0], lambda: grouped(REWARD, [0, 0, -1], **MASKED, **by_length(1, 1, -7))),
    row("a group of one", 0, lambda: F.group_advantage(REWARD, GROUP)[2]),
    row("no others", [-2, 2, 0], lambda: grouped(REWARD, GROUP, baseline="leave_one_out")),
    row("no tokens", [0, 0], lambda: grouped(REWARD[:2], [0, 0], **by_length(0, 0))),
    row("a group out of range, which is not known", [-1, 1, np.nan], lambda: jax.jit(grouped)(REWARD, [0, 0, 3])),
    row("priorities that overflow", [1, 0], lambda: F.segment_priorities(jnp.array([[1e5, 1.0]]), alpha=8.0)),
    row("a large eps", [5 / 6, 1 / 6], lambda: F.segment_priorities(jnp.array([[6.0, 2.0]]), alpha=2.0, eps=4.0)),
    row("many narrow probabilities", [1, 1], lambda: F.importance_weights(MANY, jnp.arange(2), beta=1.0), 0.1),
    row("a sum of narrow losses before their mean", 10000, lambda: F.aggregate(FIFTIES, by="sequence_sum")),
    row("a score without a penalty", [0, 9],
        lambda: F.outcome_reward(REWARD[2], log_prob=jnp.array([-jnp.inf, -1.0]))),
    row("no step", np.zeros((0, 2)), lambda: F.next_values(jnp.zeros((0, 2)), jnp.zeros(2))),
    row("narrow actions", [-np.log(300)] * 2,
        lambda: distributions.Categorical(jnp.zeros(300)).log_prob(jnp.array([256.0, 3.0], jnp.bfloat16))),
    row("numbers of options in an array", [2, 3],
        lambda: [len(x.logits) for x in distributions.MultiCategorical(jnp.zeros(5), jnp.array([2, 3])).parts]),
    row("weights of segments in float16, all of which are reached", [1, 1], drawn_weights),
    row("a rollout without a step that counts, which teaches nothing", [5, 2], statistics_of_nothing),
    row("bounds of covariances that are traced", [True, True], lambda: jax.vmap(made)(jnp.array([1.0, 2.0]))),
    row("no clips", [[0], [0]], lambda: F.vtrace(RATIO[:, None], *[jnp.zeros((2, 1))] * 4, **UNCLIPPED).error),
    *(row(f"no bound of {mode}, {dtype}", [jnp.finfo(dtype).max, 1], lambda x=mode, y=dtype: bounded(x, y))
      for mode in ("truncate", "mask") for dtype in ("bfloat16", "float16", "float32")),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "call", "rtol"), NUMBERS)
def test_numbers(expected, call, rtol):
    np.testing.assert_allclose(np.asarray(call(), float), np.asarray(expected, float), rtol, atol=1e-30)


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


def test_a_narrow_head_is_rescaled_without_loss():
    head = jnp.ones((2, 1), jnp.bfloat16), jnp.full(1, 2.0, jnp.bfloat16)
    kernel, bias = F.rescale_head(*head, (1000.0, 1.0), (1001.0, 1.0))
    assert (bias.tolist(), bias.dtype, kernel.dtype) == ([1], jnp.bfloat16, jnp.bfloat16)
    with pytest.raises(F.ShapeError, match=r"the old mean must be one number, got an array of shape \(3,\)"):
        F.rescale_head(*head, (jnp.zeros(3), jnp.ones(3)), (0.0, 1.0))


def test_narrow_logits_draw_rare_actions():
    """Random numbers of their own dtype would have ties, and no tail."""
    dtype = jnp.bfloat16
    policy = distributions.Categorical(jnp.zeros(1000, dtype))
    drawn = policy.sample(seed=jax.random.key(0), sample_shape=(4_000,))
    assert abs(float(jnp.mean(drawn < 100)) - 0.1) < 0.02
    rare = distributions.MultiCategorical([jnp.log(jnp.array([0.9, 0.099, 0.001])).astype(dtype)])
    drawn = rare.sample(seed=jax.random.key(1), sample_shape=(30_000,))
    assert abs(float(jnp.mean(drawn == 2)) - 0.001) < 0.0007
