"""Statistics and estimators: float64 references, what each function becomes at its limits, and what is refused.

`test_arguments.py` has the laws of all functions, `test_catalogue.py` the table of losses, `test_recurrence.py` the
references of the estimators; the examples of the docstrings are the numbers worked by hand.
"""

import importlib
import inspect
import itertools
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_parts as pp
from ppo_parts import functional as f
from ppo_parts.distributions import mask_logits
from ppo_parts.functional._sampling import _small_exponential
from tests import reference
from tests.common import estimator_inputs

# hyperparameters are traced: one compilation per shape
gae, vtrace = (jax.jit(function, static_argnames="stop_gradient") for function in (f.gae, f.vtrace))


def close(actual, expected, rtol=2e-5, atol=2e-6):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.shape(x) == np.shape(y)
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)


def test_statistics_equal_their_reference():
    given = estimator_inputs(4, 3, 2)
    for mask in (None, given["mask"]):
        value, target = (np.asarray(given[name])[... if mask is None else mask == 1] for name in ("value", "reward"))
        explained = f.explained_variance(given["value"], given["reward"], mask=mask)
        close(explained, np.array(1 - np.var(target - value) / np.var(target)))
        close(f.masked_mean(given["value"], mask), np.mean(value))
    assert jnp.isnan(f.explained_variance(jnp.zeros(0), jnp.zeros(0)))
    close(f.masked_mean(jnp.array([1.0, 3.0]), jnp.zeros(2)), np.array(0.0))
    close(f.masked_mean(jnp.array([True, False, True]), jnp.array([1, 1, 0])), np.array(0.5))


@pytest.mark.parametrize("number", [1, 1000])
def test_normalize_gives_zero_for_equal_elements(number):
    for x in (0.1, 3.3, -1e6):
        equal = np.full((number, 2), x, np.float32)
        for axis, mask in ((None, None), (0, None), (0, np.arange(2 * number).reshape(number, 2) % 3 > 0)):
            assert not np.any(f.advantage_normalize(equal, axis=axis, mask=mask))
        equal[0] += 0.001 * abs(x)  # a real difference, however small, still counts
        assert number == 1 or np.std(f.advantage_normalize(equal, eps=0.0)) > 0.9


def test_normalize_equals_its_reference():
    given = estimator_inputs(4, 3, 2)
    for axis, ddof in ((None, 0), (None, 1), (0, 0), (1, 1), (-1, 1), ((0, 1), 0), ((0, 2), 1)):
        for mask, eps in itertools.product((None, given["mask"]), (1e-8, 0.1)):
            expected = reference.advantage_normalize(given["value"], mask, axis=axis, ddof=ddof, eps=eps)
            close(f.advantage_normalize(given["value"], mask=mask, axis=axis, ddof=ddof, eps=eps), expected)


def test_large_numbers_do_not_look_like_equal_ones():
    """A variance that overflows gives NaN, which the learner counts, and not the 0 of equal numbers."""
    huge, counts = jnp.array([1e20, -1e20, 5.0]), jnp.array([1, 1, 0])
    assert np.isnan(f.advantage_normalize(huge, mask=counts)).tolist() == [True, True, False]
    by_group = f.group_advantage(huge, jnp.array([0, 0, 1]))
    assert np.isnan(by_group).tolist() == [True, True, False]


def test_priorities_equal_their_reference():
    given = estimator_inputs(5, 4)
    indices = jnp.array([0, 3, 1, 0])
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
    # One segment cannot be drawn, so N is 3: one over 3 * 1/2 and 3 * 1/8.
    weights = f.importance_weights(jnp.array([0.5, 0.375, 0.125, 0.0]), jnp.array([0, 2, 3]), beta=1.0)
    close(weights, np.array([1 / 1.5, 1 / 0.375, 0.0]))


def test_a_constant_target_has_no_variance_to_explain():
    value = jnp.linspace(-1, 1, 3001)
    assert np.all(np.isnan([f.explained_variance(value, jnp.full(3001, c)) for c in (0.1, 1e-30, 12345.678, 0.0)]))
    nearly = 0.1 + 1e-8 * (jnp.arange(3001) % 2)
    assert np.isnan(f.explained_variance(value, nearly))
    far = 1e4 + value  # small beside its size, and not constant
    np.testing.assert_allclose(f.explained_variance(far, far), 1.0)
    mask = jnp.arange(3001) % 2
    assert np.isnan(f.explained_variance(value, jnp.where(mask, 0.1, value), mask=mask))


KEY, SKEWED = jax.random.key(0), jnp.array([0.7, 0.2, 0.1, 0.0])


def test_each_draw_is_in_proportion_to_the_probabilities_that_are_left():
    draw = jax.vmap(lambda key: f.sample_without_replacement(key, SKEWED, 4))
    drawn = np.asarray(draw(jax.random.split(KEY, 20_000)))
    assert np.all(np.sort(drawn) == np.arange(4))
    assert np.all(drawn[:, 3] == 3)
    seen = [np.mean((drawn[:, 0] == i) & (drawn[:, 1] == j)) for i, j in itertools.permutations(range(3), 2)]
    expected = [SKEWED[i] * SKEWED[j] / (1 - SKEWED[i]) for i, j in itertools.permutations(range(3), 2)]
    np.testing.assert_allclose(seen, expected, atol=4 * 0.5 / 20_000**0.5)


def test_exponential_variates_are_accurate_near_0(monkeypatch):
    """Those of `jax.random` are multiples of 2^-23, so segments with a probability below 1e-7 would not be drawn."""
    variates = np.asarray(_small_exponential(KEY, jnp.zeros(2**20)), np.float64)
    small = variates[variates < 1e-4]
    assert abs(len(small) - 105) < 5 * 105**0.5
    assert np.mean(small * 2**23 % 1 == 0) < 0.1
    assert abs(np.mean(variates) - 1) < 5 / 2**10
    assert abs(np.mean(variates > 3) - np.exp(-3)) < 5 * (np.exp(-3) / 2**20) ** 0.5
    rare = jnp.array([[0], [2**20]], jnp.uint32)  # one draw in 2^32 begins with 0
    monkeypatch.setattr(jax.random, "bits", lambda *given: rare)
    close(_small_exponential(KEY, jnp.zeros(1)), np.array([2.0**-44]), atol=0)


def steps(*names):
    return {name: x for name, x in estimator_inputs(5, 3).items() if name in ("reward", "value", "next_value", *names)}


def test_terminations_may_be_probabilities_and_what_follows_one_may_be_anything():
    half = gae(**steps(), terminated=jnp.full((5, 3), 0.5), gamma=0.8, gae_lambda=0.5)
    close(half, gae(**steps(), terminated=jnp.zeros((5, 3)), gamma=0.4, gae_lambda=0.5))
    ends = "terminated", "truncated"
    for function, given in ((gae, steps(*ends)), (vtrace, steps(*ends, "log_ratio"))):
        poisoned = given | {"next_value": jnp.where(given["terminated"] == 1, jnp.nan, given["next_value"])}
        found = (function(**x, gamma=0.9, gae_lambda=0.9) for x in (given, poisoned))
        jax.tree.map(np.testing.assert_array_equal, *found)


def test_vtrace_mixes_only_inside_an_episode():
    given, settings = estimator_inputs(6, 4), {"gamma": 0.9, "gae_lambda": 0.7}
    mixed = {"pg_rho_clip": 1.4, "pg_lambda": 0.3}
    ours, plain = vtrace(**given, **settings, **mixed), vtrace(**given, **settings)
    close(ours.policy_advantage, reference.vtrace(**given, **settings, **mixed)[2])
    np.testing.assert_array_equal(ours.error, plain.error)
    same = vtrace(**given, **settings, pg_rho_clip=1.0, pg_lambda=1.0)
    close(same.policy_advantage, plain.policy_advantage)
    batch = pp.Batch(**given)
    for policy_gradient, expected in ((False, plain.error), (True, plain.policy_advantage)):
        part = pp.vtrace(**settings, policy_gradient=policy_gradient)
        close(part.update(batch, part.init(None), pp.Context(key=KEY))[0].advantage, expected)
    with pytest.raises(ValueError, match="only with policy_gradient=True"):
        pp.vtrace(gamma=0.9, pg_lambda=0.5)


def test_estimators_have_finite_gradients_at_extreme_ratios():
    given = estimator_inputs(4, 2) | {"log_ratio": jnp.array([[-200.0, 100.0]] * 4)}
    settings = {"gamma": 0.9, "gae_lambda": 0.8, "stop_gradient": False}
    for clips in ({}, {"rho_clip": 2.0, "c_clip": 0.5}):
        total = lambda given, clips=clips: jnp.sum(vtrace(**given, **settings, **clips).error)  # noqa: E731
        gradient = jax.jit(jax.grad(total))(given)
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(gradient))
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
    slope = jax.grad(lambda x: jnp.sum(f.clipped_surrogate(x, one, clip_eps=0.2)))(nan)
    assert np.isnan(slope)


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
    (lambda: f.clipped_surrogate(ONES[0], ONES[0], clip_eps=np.ones((5, 1))), "clip_eps of shape (5, 1) does not"),
    (lambda: f.segment_priorities(ONES, alpha=np.ones(3)), "alpha must be one number, got an array of shape (3,)"),
    (lambda: f.segment_priorities(ONES[0], alpha=1), "advantage must be [T, N], got shape (3,)"),
    (weighted(ONES[0]), "probabilities must .* got a sum of 3.0"),
    (weighted(np.nan * ONES[0]), "probabilities must .* got a sum of nan"),
    (weighted(ONES), "probabilities must be [N], got shape (5, 3)"),
    (lambda: f.sample_without_replacement(KEY, np.array([-0.5, 1.5]), 1), "probabilities must .* minimum of -0.5"),
    (lambda: f.importance_weights(ONES[0] / 3, np.array([3]), beta=1), "indices must lie in [0, 3), got 3"),
    (lambda: f.advantage_normalize(ONES, axis=()), "advantage_normalize: axis must name .* None means all"),
    (lambda: f.categorical_value(ONES, [-np.inf, 0.0, np.inf]), "support must be .* finite numbers of float32, got"),
    (lambda: f.categorical_value(ONES, np.array([0.0, 1.0, 1 + 1e-12])), "support must be .* increasing"),
    (lambda: f.categorical_value(ONES, np.array([3, 1], np.uint8)), "support must be .* increasing"),
    (lambda: f.rescale_head(np.ones((5, 3), int), ONES[0], (0, 1), (0, 1)), "kernel must be floating, got int"),
    (lambda: f.outcome_reward(np.ones(3, int), log_prob=ONES), "score must be floating, got int"),
    (lambda: f.rescale_head(ONES, ONES[0], (0, 1), (0, 0)), "the new scale must lie in (0, inf], got 0"),
    (lambda: f.group_advantage(ONES, np.ones((5, 3), int)), "must be [N] (one number per sequence), got shape"),
    (grouped([0, 0, -1]), "group must lie in [0, 3), got -1"),
    (grouped([0, 0, 0], np.array([0, 1, 1]), length=np.array([-7, -2, 1])), "length must not be negative, got -2"),
    (lambda: f.clip_cov(ONES, ONES, ONES, key=KEY, clip_eps=0.2, cov_low=5.0, cov_high=1.0),
     "cov_low must be less than cov_high, got cov_low=5.0 and cov_high=1.0"),
    (grouped([0, 0, 1], length=None), "needs length"),
    (lambda: f.outcome_reward(ONES[0], log_prob=ONES, kl_coef=0.1), "needs reference_log_prob"),
    (lambda: f.aggregate(ONES, by="token_mean", length=3), "leave it out"),
    (lambda: f.categorical_value_loss(ONES, ONES[:, 0], support=[0.0, 1.0]), "logits (5, 3) and support (2,)"),
    (lambda: f.categorical_value(ONES, [[0.0, 1.0]]), "at least two increasing, finite numbers"),
    (lambda: f.bounds_loss(ONES[0, 0]), "bounds_loss: mean must have a last axis"),
    (lambda: mask_logits(ONES[0], np.array([0, -np.inf, 0])), "mask_logits: available must hold 0 and 1, got -inf"),
    (lambda: f.value_loss(TENSOR, ONES), "value must be an array, got a torch.Tensor; .*detach()), or keep this"),
    (lambda: f.value_loss(ONES, SERIES), "got a pandas.Series; convert it with jnp.asarray(target)"),
]  # fmt: skip
WRONG_SHAPES = [
    (lambda: f.gae(ONES, LONGER, ONES, ONES, **HYPER), "value=value[:-1] and next_value=next_values(value[:-1], va"),
    (lambda: f.gae(ONES, ONES, ONES[0], ONES, **HYPER), "pass next_values(value, next_value)"),
    (lambda: f.gae(ONES[:, 0], ONES[:, 0], 1.0, ONES[:, 0], **HYPER), "pass next_values(value, next_value)"),
    (lambda: f.gae(ONES, ONES, ONES, LONGER, **HYPER), "has one row more than reward; pass terminated[:-1]"),
    (lambda: f.clipped_surrogate(ONES, ONES[0], clip_eps=0.2), "jnp.broadcast_to(advantage, log_ratio.shape)"),
    (
        lambda: f.clipped_surrogate(ONES, ONES[:, 0], clip_eps=0.2),
        "sum log_ratio over the action's dimensions, or, with one advantage for each row of it, use "
        "jnp.broadcast_to(advantage[..., None], log_ratio.shape)",
    ),
    (lambda: f.value_loss(ONES[..., None], ONES), "drop the trailing axis of size 1 with value[..., 0]."),
    (lambda: f.value_loss(ONES, ONES, mask=ONES[0]), "jnp.broadcast_to(mask, value.shape)."),
    (lambda: f.value_loss(ONES, np.ones((4, 2))), "Nothing is broadcast."),
]


@pytest.mark.parametrize(
    ("error", "call", "words"),
    [((ValueError, TypeError), *row) for row in WRONG] + [(f.ShapeError, *row) for row in WRONG_SHAPES],
)
def test_what_is_wrong_is_said_with_what_helps(error, call, words):
    with pytest.raises(error, match=re.escape(words).replace(r"\.\*", ".*")):
        call()


def test_mask_is_a_keyword_everywhere():
    """Except in `masked_mean`, whose subject it is."""
    for function in vars(f).values():
        parameters = inspect.signature(function).parameters if inspect.isfunction(function) else {}
        if "mask" in parameters and function is not f.masked_mean:
            assert parameters["mask"].kind == inspect.Parameter.KEYWORD_ONLY, function.__name__
            last = [name for name in parameters if name not in ("stop_gradient", "implementation", "mask_mode")][-1]
            assert last == "mask", function.__name__


def test_a_copy_of_the_folder_lives_beside_the_package(tmp_path, monkeypatch):
    """In another codebase, which may also use the package."""
    shutil.copytree(Path(f.__file__).parent, tmp_path / "copied")
    monkeypatch.syspath_prepend(tmp_path)
    steps, options = (*[jnp.ones(3)] * 3, jnp.zeros(3)), {"gamma": 0.9, "gae_lambda": 0.8}
    copied = importlib.import_module("copied")
    np.testing.assert_array_equal(copied.gae(*steps, **options).advantage, f.gae(*steps, **options).advantage)
