"""Statistics and estimators: float64 references, the limits of each function, and arguments that are refused.

`test_arguments.py` has the laws of all functions, and `test_catalogue.py` the table of losses; the examples of the
docstrings are worked by hand.
"""

import inspect
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_parts as pp
from ppo_parts import distributions
from ppo_parts import functional as f
from ppo_parts.functional import _recurrence
from ppo_parts.functional._sampling import _small_exponential
from ppo_parts.testing import example_batch, example_context
from tests import reference
from tests.common import assert_close as close
from tests.common import estimator_inputs, refused

# hyperparameters are traced, so each shape compiles once
gae, vtrace = (jax.jit(function, static_argnames="stop_gradient") for function in (f.gae, f.vtrace))


def test_statistics_and_standardization_equal_their_references():
    given = estimator_inputs(4, 3, 2)
    for mask in (None, given["mask"]):
        value, target = (np.asarray(given[name])[... if mask is None else mask == 1] for name in ("value", "reward"))
        explained = f.explained_variance(given["value"], given["reward"], mask=mask)
        close(explained, np.array(1 - np.var(target - value) / np.var(target)))
        close(f.masked_mean(given["value"], mask), np.mean(value))
    assert jnp.isnan(f.explained_variance(jnp.zeros(0), jnp.zeros(0)))
    close(f.masked_mean(jnp.array([1.0, 3.0]), jnp.zeros(2)), np.array(0.0))
    close(f.masked_mean(jnp.array([True, False, True]), jnp.array([1, 1, 0])), np.array(0.5))
    with jax.enable_x64(True):  # where NumPy's mean of integers is float64
        assert [f.masked_mean(jnp.arange(4), mask).dtype for mask in (None, jnp.ones(4))] == [jnp.float32] * 2
    assert f.categorical_value(jnp.zeros(3), jnp.arange(3, dtype=jnp.bfloat16)) == 1
    for axis, ddof in ((None, 0), (None, 1), (0, 0), (1, 1), (-1, 1), ((0, 1), 0), ((0, 2), 1)):
        for mask, eps in itertools.product((None, given["mask"]), (1e-8, 0.1)):
            expected = reference.advantage_normalize(given["value"], mask, axis=axis, ddof=ddof, eps=eps)
            close(f.advantage_normalize(given["value"], mask=mask, axis=axis, ddof=ddof, eps=eps), expected)


@pytest.mark.parametrize("number", [1, 1000])
def test_normalize_gives_zero_for_equal_elements(number):
    for x in (0.1, 3.3, -1e6):
        equal = np.full((number, 2), x, np.float32)
        for axis, mask in ((None, None), (0, None), (0, np.arange(2 * number).reshape(number, 2) % 3 > 0)):
            assert not np.any(f.advantage_normalize(equal, axis=axis, mask=mask))
        equal[0] += 0.001 * abs(x)  # a real difference counts, however small it is
        assert number == 1 or np.std(f.advantage_normalize(equal, eps=0.0)) > 0.9


def test_priorities_equal_their_reference():
    given = estimator_inputs(5, 4)
    indices = jnp.array([0, 3, 1, 2, 0])  # where segment 2 is masked, it has weight 0, and N is 3
    for mask, alpha in itertools.product((None, given["mask"], given["mask"].at[:, 2].set(0)), (0.0, 0.6, 1.0, 2.0)):
        probabilities = f.segment_priorities(given["value"], mask=mask, alpha=alpha)
        close(probabilities, reference.segment_priorities(given["value"], mask, alpha=alpha))
        close(jnp.sum(probabilities), np.array(1.0))
        for beta in (0.0, 0.4, 1.0):
            expected = reference.importance_weights(probabilities, indices, beta=beta)
            close(f.importance_weights(probabilities, indices, beta=beta), expected)
    advantage, some = jnp.array([[1.0, np.nan, 0.0], [-3.0, 0.0, 0.0]]), jnp.array([[1, 0, 1]] * 2)
    close(f.segment_priorities(advantage, alpha=0.5, eps=1.0), np.array([3, 1, 1]) / 5)  # NaN counts as 0
    close(f.segment_priorities(advantage, mask=0 * some, alpha=0.5), np.zeros(3))
    close(f.segment_priorities(0 * advantage, alpha=1.0, eps=0.0, mask=some), np.array([1, 0, 1]) / 2)


def test_a_constant_target_has_no_variance_to_explain_and_large_numbers_are_not_equal_ones():
    value = jnp.linspace(-1, 1, 3001)
    assert np.all(np.isnan([f.explained_variance(value, jnp.full(3001, c)) for c in (0.1, 1e-30, 12345.678, 0.0)]))
    assert np.isnan(f.explained_variance(value, 0.1 + 1e-8 * (jnp.arange(3001) % 2)))
    far = 1e4 + value  # small beside its size, but not constant
    np.testing.assert_allclose(f.explained_variance(far, far), 1.0)
    mask = jnp.arange(3001) % 2
    assert np.isnan(f.explained_variance(value, jnp.where(mask, 0.1, value), mask=mask))
    # A variance that overflows gives NaN, which the learner counts, and not the 0 of equal numbers.
    huge, counts = jnp.array([1e20, -1e20, 5.0]), jnp.array([1, 1, 0])
    assert np.isnan(f.advantage_normalize(huge, mask=counts)).tolist() == [True, True, False]
    assert np.isnan(f.group_advantage(huge, jnp.array([0, 0, 1]))).tolist() == [True, True, False]


KEY, SKEWED = jax.random.key(0), jnp.array([0.7, 0.2, 0.1, 0.0])


def test_each_draw_is_in_proportion_to_the_probabilities_that_are_left_and_accurate_near_0(monkeypatch):
    draw = jax.vmap(lambda key: f.sample_without_replacement(key, SKEWED, 4))
    drawn = np.asarray(draw(jax.random.split(KEY, 20_000)))
    assert np.all(np.sort(drawn) == np.arange(4))
    assert np.all(drawn[:, 3] == 3)
    seen = [np.mean((drawn[:, 0] == i) & (drawn[:, 1] == j)) for i, j in itertools.permutations(range(3), 2)]
    expected = [SKEWED[i] * SKEWED[j] / (1 - SKEWED[i]) for i, j in itertools.permutations(range(3), 2)]
    np.testing.assert_allclose(seen, expected, atol=4 * 0.5 / 20_000**0.5)
    # The draws of `jax.random` are multiples of 2^-23, so segments with a probability below 1e-7 would never be drawn.
    variates = np.asarray(_small_exponential(KEY, jnp.zeros(2**20)), np.float64)
    small = variates[variates < 1e-4]
    assert abs(len(small) - 105) < 5 * 105**0.5
    assert np.mean(small * 2**23 % 1 == 0) < 0.1
    assert abs(np.mean(variates) - 1) < 5 / 2**10
    assert abs(np.mean(variates > 3) - np.exp(-3)) < 5 * (np.exp(-3) / 2**20) ** 0.5
    rare = jnp.array([[0], [2**20]], jnp.uint32)  # one draw in 2^32 begins with 0
    monkeypatch.setattr(jax.random, "bits", lambda *given: rare)
    close(_small_exponential(KEY, jnp.zeros(1)), np.array([2.0**-44]), atol=0)


def test_terminations_may_be_probabilities_and_what_follows_one_may_be_anything():
    given = arrays("gae", (5, 3), given=())
    half = gae(**given | {"terminated": jnp.full((5, 3), 0.5)}, gamma=0.8, gae_lambda=0.5)
    close(half, gae(**given | {"terminated": jnp.zeros((5, 3))}, gamma=0.4, gae_lambda=0.5))
    for name, function in (("gae", gae), ("vtrace", vtrace)):
        given = arrays(name, (5, 3), given=("truncated",))
        poisoned = given | {"next_value": jnp.where(given["terminated"] == 1, jnp.nan, given["next_value"])}
        found = (function(**x, gamma=0.9, gae_lambda=0.9) for x in (given, poisoned))
        jax.tree.map(np.testing.assert_array_equal, *found)


def test_the_part_writes_the_advantage_of_the_policy_gradient_if_it_is_told():
    given, settings = estimator_inputs(6, 4), {"gamma": 0.9, "gae_lambda": 0.7}
    plain, batch = vtrace(**given, **settings), pp.Batch(**given)
    close(vtrace(**given, **settings, pg_rho_clip=1.0, pg_lambda=1.0).policy_advantage, plain.policy_advantage)
    for policy_gradient, expected in ((False, plain.error), (True, plain.policy_advantage)):
        part = pp.vtrace(**settings, policy_gradient=policy_gradient)
        close(part.update(batch, part.init(None), pp.Context(key=KEY))[0].advantage, expected)


def test_estimators_have_finite_gradients_at_extreme_ratios():
    given = estimator_inputs(4, 2) | {"log_ratio": jnp.array([[-200.0, 100.0]] * 4)}
    settings = {"gamma": 0.9, "gae_lambda": 0.8, "stop_gradient": False}
    for clips in ({}, {"rho_clip": 2.0, "c_clip": 0.5}):
        total = lambda given, clips=clips: jnp.sum(vtrace(**given, **settings, **clips).error)  # noqa: E731
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(jax.jit(jax.grad(total))(given)))
    for eps in (1e-8, 0.0):
        value, pull = jax.vjp(lambda x, eps=eps: f.advantage_normalize(x, eps=eps), jnp.full((4, 2), 3.0))
        np.testing.assert_array_equal(value, np.zeros((4, 2)))
        assert np.all(np.isfinite(pull(value)[0]))


def test_nan_is_never_hidden():
    one, nan = jnp.ones((1, 1)), jnp.full((1, 1), jnp.nan)
    of_nan = jax.jit(lambda x, eps: f.clipped_surrogate(0.5 * one, x, clip_eps=eps))
    for advantage, eps in ((nan, 0.2), (one, jnp.nan), (-one, jnp.nan)):
        assert np.isnan(of_nan(advantage, eps))
    value = jax.jit(lambda x, eps: f.clipped_value_loss(x, 0 * one, 2 * one, clip_eps=eps))
    for prediction, eps in ((nan, 0.2), (one, jnp.nan)):
        assert np.isnan(value(prediction, eps))
    assert np.isnan(jax.grad(lambda x: jnp.sum(f.clipped_surrogate(x, one, clip_eps=0.2)))(nan))


ONES, LONGER = np.ones((5, 3), np.float32), np.ones((6, 3))
TENSOR = type("Tensor", (), {"__module__": "torch", "__dlpack__": None, "requires_grad": True})()
SERIES = type("Series", (), {"__module__": "pandas.core.series"})()
HYPER = {"gamma": 0.9, "gae_lambda": 0.9}


def estimated(function, *flags, first=(ONES, ONES, ONES), **hyperparameters):
    return lambda: function(*first, *(flags or (0 * ONES,)), **(HYPER | hyperparameters))


def grouped(group, mask=None, **options):
    options = {"baseline": "length_weighted", "length": np.ones(3)} | options
    return lambda: f.group_advantage(ONES[0], np.array(group), mask=mask, **options)


def weighted(probabilities, **options):
    return lambda: f.importance_weights(probabilities, np.array([0]), **({"beta": 1} | options))


WRONG = [
    (estimated(f.gae, gamma=jnp.ones(5)), "gamma of shape (5,) does not fit"),
    (estimated(f.gae, np.nan * ONES), "terminated must hold 0 and 1, or .* got nan"),
    (estimated(f.gae, ONES, 0.5 * ONES), "truncated must hold 0 and 1, got 0.5"),
    (estimated(f.gae, ONES[0, 0], first=[ONES[0, 0]] * 3), "gae works along axis 0, .* is a single number"),
    (lambda: f.segment_priorities(ONES[0], alpha=1), "advantage must be [T, N], got shape (3,)"),
    (weighted(ONES[0]), "probabilities must .* got a sum of 3.0"),
    (weighted(np.nan * ONES[0]), "probabilities must .* got a sum of nan"),
    (lambda: f.sample_without_replacement(KEY, np.array([-0.5, 1.5]), 1), "probabilities must .* minimum of -0.5"),
    (lambda: f.importance_weights(ONES[0] / 3, np.array([3]), beta=1), "indices must lie in [0, 3), got 3"),
    (lambda: f.masked_mean(ONES, axis=np.int64(2)), "axis must name distinct axes in [-2, 2), got (2,)"),
    (lambda: f.advantage_normalize(ONES, axis=()), "advantage_normalize: axis must name .* None means all"),
    *((lambda x=x: f.categorical_value(ONES, x), "support must be .* two finite numbers that increase")
      for x in ([-np.inf, 0.0, np.inf], np.array([0.0, 1.0, 1 + 1e-12]), np.array([3, 1], np.uint8), [[0.0, 1.0]])),
    (lambda: f.rescale_head(np.ones((5, 3), int), ONES[0], (0, 1), (0, 1)), "kernel must be floating, got int"),
    (lambda: f.outcome_reward(np.ones(3, int), log_prob=ONES), "score must be floating, got int"),
    (lambda: f.rescale_head(ONES, ONES[0], (0, 1), (0, 0)), "the new scale must lie in (0, inf], got 0"),
    (lambda: f.group_advantage(ONES, np.ones((5, 3), int)), "must be [N] (one number per sequence), got shape"),
    (grouped([0, 0, -1]), "group must lie in [0, 3), got -1"),
    (grouped([0, 0, 0], np.array([0, 1, 1]), length=np.array([-7, -2, 1])), "length must not be negative, got -2"),
    (lambda: f.clip_cov(ONES, ONES, ONES, key=KEY, clip_eps=0.2, cov_low=5.0, cov_high=1.0),
     "cov_low must be less than cov_high, got cov_low=5.0 and cov_high=1.0"),
    *((grouped([0, 0, 1], **x), "length, .* if and only") for x in ({"length": None}, {"baseline": "mean"})),
    *((lambda x=x: f.masked_mean(ONES, axis=x), "axis must name distinct axes") for x in (2, -3, (1, -1))),
    (lambda: f.value_loss(ONES.astype(">f4"), ONES), "got >f4; convert it with value.astype(jnp.float32)"),
    (lambda: f.value_loss(np.ma.array(ONES), ONES), "got a numpy.MaskedArray; convert it with value.filled(0)"),
    (lambda: distributions.mask_logits(ONES, np.eye(5, 3)), "mask_logits: available must have an option in each row"),
    (lambda: f.outcome_reward(ONES[0], log_prob=ONES, kl_coef=0.1), "needs reference_log_prob"),
    (lambda: f.aggregate(ONES, by="token_mean", length=3), "leave it out"),
    (lambda: pp.vtrace(gamma=0.9, pg_lambda=0.5), "only with policy_gradient=True"),
    (lambda: f.reverse_recurrence(ONES, ONES, implementation="x"), "implementation must be one of 'auto', .* got 'x'"),
    (lambda: f.categorical_value_loss(ONES, ONES[:, 0], support=[0.0, 1.0]), "logits (5, 3) and support (2,)"),
    (lambda: f.bounds_loss(ONES[0, 0]), "bounds_loss: mean must have a last axis"),
    (lambda: distributions.mask_logits(ONES[0], np.array([0, -np.inf, 0])),
     "mask_logits: available must hold 0 and 1, got -inf"),
    (lambda: f.value_loss(TENSOR, ONES), "value must be an array, got a torch.Tensor; .*detach()), or keep this"),
    (lambda: f.value_loss(ONES, SERIES), "got a pandas.Series; convert it with jnp.asarray(target)"),
    (lambda: f.gae(ONES, LONGER, ONES, ONES, **HYPER), "value=value[:-1] and next_value=next_values(value[:-1], va"),
    (lambda: f.gae(ONES, ONES, ONES[0], ONES, **HYPER), "pass next_values(value, next_value)"),
    (lambda: f.gae(ONES[:, 0], ONES[:, 0], 1.0, ONES[:, 0], **HYPER), "pass next_values(value, next_value)"),
    (lambda: f.gae(ONES, ONES, ONES, LONGER, **HYPER), "than reward; pass terminated[:-1] or terminated[1:]."),
    (lambda: f.gae(ONES, ONES, LONGER, ONES, **HYPER), "has one row more than reward; pass next_value[1:]"),
    (lambda: f.value_loss(LONGER, ONES), "value has one row more than target; pass value[:-1]"),
    (lambda: f.clipped_surrogate(ONES, ONES[0], clip_eps=0.2), "jnp.broadcast_to(advantage, log_ratio.shape)"),
    (lambda: f.clipped_surrogate(ONES, ONES[:, 0], clip_eps=0.2), "sum log_ratio .*(advantage[..., None], log_ratio.s"),
    (lambda: f.value_loss(ONES, ONES, mask=ONES[0]), "); if it holds lengths, pass jnp.arange(5)[:, None] < mask."),
    (lambda: f.value_loss(ONES[None], ONES[None], mask=ONES[0]), "jnp.broadcast_to(mask, value.shape)."),
    (lambda: f.value_loss(ONES, np.ones((4, 2))), "Nothing is broadcast."),
    (lambda: f.value_loss(np.ones((4, 2)), np.ones((2, 4))), "Nothing is broadcast: transpose value or target"),
    (lambda: f.group_advantage(ONES[0], 2), "the group of each element, such as jnp.arange(n) // size."),
]  # fmt: skip
test_what_is_wrong_is_said_with_what_helps = refused(
    *((call, re.escape(words).replace(r"\.\*", ".*")) for call, words in WRONG)
)


def test_mask_is_a_keyword_everywhere():
    """The exception is `masked_mean`, whose subject it is."""
    for function in vars(f).values():
        parameters = inspect.signature(function).parameters if inspect.isfunction(function) else {}
        if "mask" in parameters and function is not f.masked_mean:
            assert parameters["mask"].kind == inspect.Parameter.KEYWORD_ONLY, function.__name__
            last = [name for name in parameters if name not in ("stop_gradient", "implementation", "mask_mode")][-1]
            assert last == "mask", function.__name__


# --- the ways to run the backward recursion, and the choice between them ----------------------------------------------

WAYS = ("scan", "associative")
CLIPS = {"rho_clip": 1.5, "c_clip": 0.8}
MIXED = {"gae": (), "vtrace": ("pg_rho_clip", "pg_lambda")}  # these have a default
HYPERPARAMETERS = {"gae": {"gamma": 0.9, "gae_lambda": 0.8}, "vtrace": {"gamma": 0.9, "gae_lambda": 0.8} | CLIPS}


@pytest.fixture
def pretended(monkeypatch):
    """Pretend that there is a GPU: programs can be lowered for it, but not run."""
    monkeypatch.setattr(_recurrence, "has_gpu", lambda: True)
    # The key of jit's caches contains the precision of products, of which there are none here, but not what is patched.
    # No other test has this precision, so no other test gets a program that was traced here, and vice versa.
    with jax.default_matmul_precision("bfloat16"):
        yield


def arrays(name, shape, dtype=jnp.float32, given=("truncated", "mask"), seed=0):
    """Return what the estimator reads, with these flags."""
    left_out = {"truncated", "mask"} - {*given} | ({"log_ratio"} if name == "gae" else set())
    return {field: x for field, x in estimator_inputs(*shape, seed=seed, dtype=dtype).items() if field not in left_out}


def estimator(name):
    """Make a new function each time, because what a fixture patches is not part of jit's key."""
    return jax.jit(lambda named: getattr(f, name)(**named, **HYPERPARAMETERS[name]))


LAYOUTS = (  # shape, dtype, the given flags, and the number of batches
    ((1, 1), jnp.float32, (), 4),
    ((5, 2), jnp.float32, ("truncated", "mask"), 20),
    ((4, 2, 3), jnp.bfloat16, ("truncated", "mask"), 20),
    ((11, 3, 13), jnp.float32, ("truncated",), 3),  # ragged blocks of rows and columns
    ((8, 64), jnp.float32, ("mask",), 3),  # wide rows
)


@pytest.mark.parametrize("name", HYPERPARAMETERS)
def test_equals_the_reference(name):
    rng, estimate = np.random.default_rng(0), jax.jit(getattr(f, name))
    for shape, dtype, given, count in LAYOUTS:
        # In bfloat16, sums are float32, so there is one rounding, of 2^-9, at the end.
        tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == jnp.float32 else {"rtol": 2**-8, "atol": 1e-3}
        for seed in range(count):
            # Draw numbers, or arrays with one number for each step.
            size = shape if shape in ((5, 2), (8, 64)) and seed % 2 else ()
            keys = (*HYPERPARAMETERS[name], *MIXED[name])
            choices = {key: (0.5, 1.0, 4.0) if "clip" in key else (0.0, 0.5, 0.95, 1.0) for key in keys}
            chosen = {key: jnp.asarray(rng.choice(some, size), jnp.float32) for key, some in choices.items()}
            named = arrays(name, shape, dtype, given, seed)
            expected = getattr(reference, name)(**named, **chosen)
            for x, y in zip(estimate(**named, **chosen), expected, strict=True):
                assert x.dtype == dtype
                np.testing.assert_allclose(np.asarray(x, float), y, **tolerance)


@pytest.mark.parametrize("way", WAYS)
def test_both_ways_equal_a_loop_and_accumulate_bfloat16_in_float32(way):
    ones = jnp.ones(512, jnp.bfloat16)  # a bfloat16 sum stays at 256
    assert jax.jit(lambda x: f.reverse_recurrence(x, x, implementation=way))(ones)[0] == 512
    delta, trace = np.random.default_rng(0).normal(size=(2, 11, 35)).astype(np.float32)
    expected, later = np.zeros_like(delta), 0.0
    for t in reversed(range(11)):
        expected[t] = later = delta[t] + trace[t] * later
    got = f.reverse_recurrence(jnp.asarray(delta), jnp.asarray(trace), implementation=way)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_auto_follows_the_platform_of_the_program(pretended):
    """For a GPU it is the associative scan. For the CPU of the same machine it is the scan, which runs here."""
    for name, dtype in (("vtrace", jnp.bfloat16), ("gae", jnp.float32)):
        named = arrays(name, (11, 35), dtype)
        traced = estimator(name).trace(named)
        texts = [traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cuda", "rocm", "cpu")]
        assert ["while" in text for text in texts] == [False, False, True]
        expected = getattr(reference, name)(**named, **HYPERPARAMETERS[name])
        for x, y in zip(estimator(name)(named), expected, strict=True):
            np.testing.assert_allclose(np.asarray(x, float), y, rtol=2**-8, atol=1e-3)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_auto_without_a_gpu_is_the_scan():
    jaxprs = {way: str(jax.make_jaxpr(lambda x, way=way: f.reverse_recurrence(x, x, implementation=way))(jnp.ones(4)))
              for way in ("auto", *WAYS)}  # fmt: skip
    assert jaxprs["auto"] == jaxprs["scan"] != jaxprs["associative"]


# --- narrow numbers, empty masks, and states that have gone as far as they can ----------------------------------------

CONTEXT = example_context()
TINY = jnp.array([[1e-20, 2e-20]])
REWARD, GROUP, RATIO = jnp.array([1.0, 3.0, 9.0]), jnp.array([0, 0, 1]), jnp.array([100.0, 0.0])
LONG, MANY = jnp.ones((200, 1), jnp.bfloat16), jnp.full(70000, 1 / 70000, "f2")
FIFTIES = jnp.zeros((2000, 10), jnp.float16).at[:, 0].set(50.0)
UNCLIPPED = {"gamma": 0.9, "rho_clip": jnp.inf, "c_clip": jnp.inf}


def centered(reward, group, **options):
    return f.group_advantage(reward, jnp.array(group), scale=None, **options)


def by_length(*length):
    return {"baseline": "length_weighted", "length": jnp.array(length)}


def advantage(part, batch):
    return part.update(batch, part.init(None), CONTEXT)[0].advantage


def of_tokens(reward):
    return pp.Batch(log_prob=0 * reward, reward=reward)


def row(what, expected, call, rtol=1e-5):
    return pytest.param(expected, call, rtol, id=what)


def drawn_weights():
    sampler = pp.prioritized_sampler(1, alpha=1.0, beta=0.0, segments_per_minibatch=2)
    flat = jnp.zeros((1, 3000), jnp.float16).at[0, 0].set(6e4)  # the other segments have a probability of 2e-11
    return sampler.draw(jax.random.key(0), pp.Batch(log_prob=flat, advantage=flat), CONTEXT)[1]


def statistics_of_nothing():
    part, batch = pp.critics.normalize_target(lambda params, old, new: params, rate=0.5), example_batch()
    before = pp.critics.ValueStatistics(jnp.float32(5), jnp.float32(2))
    return part.update(batch.replace(mask=0 * batch.mask), before, CONTEXT)[1]


MASKED = {"mask": jnp.array([1, 1, 0])}
NUMBERS = [  # what is special, the expected result, and a call
    row("a discount that bfloat16 cannot hold", (1 - 0.999**200) / 0.001,
        lambda: advantage(pp.tokens.reward_to_go(gamma=0.999), pp.Batch(reward=LONG))[0, 0], 0.01),
    row("rewards to go over masked steps, whose ends do not count", [3, 0, 4, 0], lambda: f.reward_to_go(
        jnp.array([1.0, jnp.nan, 4.0, 8.0]), jnp.array([0, 1, 0, 0]), gamma=0.5, mask=jnp.array([1, 0, 1, 0]))),
    row("a group that is masked", [-1, 1, 0], lambda: centered(REWARD, [0, 0, -1], **MASKED)),
    row("a length that is masked", [-1, 1, 0], lambda: centered(REWARD, [0, 0, -1], **MASKED, **by_length(1, 1, -7))),
    row("a group of one", 0, lambda: f.group_advantage(REWARD, GROUP)[2]),
    row("no others", [-2, 2, 0], lambda: centered(REWARD, GROUP, baseline="leave_one_out")),
    row("no tokens", [0, 0], lambda: centered(REWARD[:2], [0, 0], **by_length(0, 0))),
    row("a group out of range, which is not known", [-1, 1, np.nan], lambda: jax.jit(centered)(REWARD, [0, 0, 3])),
    row("priorities that overflow", [1, 0], lambda: f.segment_priorities(jnp.array([[1e5, 1.0]]), alpha=8.0)),
    row("priorities that underflow", [1 / 9, 8 / 9], lambda: f.segment_priorities(TINY, alpha=3.0, eps=0.0)),
    row("a large eps", [5 / 6, 1 / 6], lambda: f.segment_priorities(jnp.array([[6.0, 2.0]]), alpha=2.0, eps=4.0)),
    row("many narrow probabilities", [1, 1], lambda: f.importance_weights(MANY, jnp.arange(2), beta=1.0), 0.1),
    row("a ratio of 0, which is as far as a policy can move", [3, 3],
        lambda: f.mirror_descent_surrogate(jnp.array([-jnp.inf, -3e38]), jnp.array([1.0, -1e30]), coef=3.0)),
    row("rewards that bfloat16 cannot add", [-0.5, 0.5], lambda: advantage(
        pp.tokens.group_advantage(group=2, scale=None), of_tokens(jnp.ones((600, 2), "bfloat16").at[0, 0].set(0)))[0]),
    row("more tokens than float16 can count", [0.5, -0.5], lambda: advantage(
        pp.tokens.group_advantage(group=2, scale=None, baseline="length_weighted"),
        of_tokens(jnp.zeros((70000, 2), "float16").at[0, 0].set(1)))[0]),
    row("a sum of narrow losses before their mean", 10000, lambda: f.aggregate(FIFTIES, by="sequence_sum")),
    row("a penalty of 0 from a reference that is infinite", 9, lambda: f.outcome_reward(
        REWARD[2], log_prob=RATIO[1:], reference_log_prob=-jnp.inf * RATIO[:1], kl_coef=0.0)),
    row("no drift", -1.5, lambda: f.discovered_policy_optimization(jnp.log(1.5), jnp.float32(1), alpha=jnp.inf)),
    row("the hardest gate", True, lambda: abs(f.sapo(jnp.float32(0), jnp.float32(1), tau=jnp.inf)) < 1e-18),
    *(row(f"a weight that is unknown, {mode}", [np.nan, 1], lambda x=mode: f.importance_sampling_weight(
        jnp.array([np.nan, 0]), high=2.0, mode=x)) for mode in ("truncate", "mask")),
    row("a score without a penalty", [0, 9], lambda: f.outcome_reward(REWARD[2], log_prob=jnp.array([-jnp.inf, -1.0]))),
    *(row(f"no step, {len(mask)} mask", np.zeros((0, 2)), lambda mask=mask: f.next_values(
        jnp.zeros((0, 2)), jnp.zeros(2), **mask)) for mask in ({}, {"mask": jnp.zeros((0, 2))})),
    row("narrow actions", [-np.log(300)] * 2,
        lambda: distributions.Categorical(jnp.zeros(300)).log_prob(jnp.array([256.0, 3.0], jnp.bfloat16))),
    row("numbers of options in an array", [2, 3],
        lambda: [len(x.logits) for x in distributions.MultiCategorical(jnp.zeros(5), jnp.array([2, 3])).parts]),
    row("weights of segments in float16, all of which are reached", [1, 1], drawn_weights),
    row("a rollout without a step that counts, which teaches nothing", [5, 2], statistics_of_nothing),
    row("bounds of covariances that are traced", [True, True], lambda: jax.vmap(
        lambda x: pp.policy_loss(f.clip_cov, clip_eps=0.2, cov_low=x).init({}) == ())(jnp.array([1.0, 2.0]))),
    row("no clips", [[0], [0]], lambda: f.vtrace(RATIO[:, None], *[jnp.zeros((2, 1))] * 4, **UNCLIPPED).error),
    *(row(f"no bound of {mode}, {dtype}", [jnp.finfo(dtype).max, 1], lambda mode=mode, dtype=dtype:
          f.importance_sampling_weight(RATIO.astype(dtype), mode=mode, high=jnp.inf))
      for mode in ("truncate", "mask") for dtype in ("bfloat16", "float16", "float32")),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "call", "rtol"), NUMBERS)
def test_extreme_inputs_give_the_expected_numbers(expected, call, rtol):
    np.testing.assert_allclose(np.asarray(call(), float), np.asarray(expected, float), rtol, atol=1e-30)


def test_the_coefficient_of_an_adaptive_penalty_recovers():
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
    assert part.finish(still.replace(mask=0 * still.mask), part.init(None), CONTEXT).coef == 1  # no step counts


def test_narrow_logits_draw_rare_actions_and_a_narrow_head_is_rescaled_without_loss():
    """Random numbers in the narrow dtype would have ties, and no tail."""
    dtype = jnp.bfloat16
    drawn = distributions.Categorical(jnp.zeros(1000, dtype)).sample(seed=jax.random.key(0), sample_shape=(4_000,))
    assert abs(float(jnp.mean(drawn < 100)) - 0.1) < 0.02
    rare = distributions.MultiCategorical([jnp.log(jnp.array([0.9, 0.099, 0.001])).astype(dtype)])
    assert abs(float(jnp.mean(rare.sample(seed=jax.random.key(1), sample_shape=(30_000,)) == 2)) - 0.001) < 0.0007
    head = jnp.ones((2, 1), jnp.bfloat16), jnp.full(1, 2.0, jnp.bfloat16)
    kernel, bias = f.rescale_head(*head, (1000.0, 1.0), (1001.0, 1.0))
    assert (bias.tolist(), bias.dtype, kernel.dtype) == ([1], jnp.bfloat16, jnp.bfloat16)
    with pytest.raises(f.ShapeError, match=r"the old mean must be one number, got an array of shape \(3,\)"):
        f.rescale_head(*head, (jnp.zeros(3), jnp.ones(3)), (0.0, 1.0))


def test_a_clipped_loss_and_its_gradient_share_one_exponential():
    loss = lambda x: jnp.mean(f.clipped_surrogate(x, x, clip_eps=0.2))  # noqa: E731
    program = jax.jit(jax.value_and_grad(loss)).lower(jnp.ones((8, 16))).compile()
    assert program.as_text().count(" exponential(") == 1
