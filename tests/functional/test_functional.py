"""The array layer: worked numbers, float64 references, gradients, and what each function becomes at its limits."""

import inspect
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_parts as pp
from ppo_parts import functional as f
from ppo_parts.distributions import mask_logits
from ppo_parts.functional._sampling import _small_exponential
from tests import reference
from tests.common import make_params, rollout

LOG2 = float(np.log(2))
# hyperparameters are traced: one compilation per shape
gae, vtrace = (jax.jit(function, static_argnames="stop_gradient") for function in (f.gae, f.vtrace))
SHAPES = ((5, 3), (4, 3, 2))


def close(actual, expected, rtol=2e-5, atol=2e-6):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.shape(x) == np.shape(y)
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)


def arrays(*shape, seed=0, scale=1.0):
    """What the advantage estimators read, by name."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(3, size=shape, p=(0.6, 0.2, 0.2))
    normal = {name: scale * rng.normal(size=shape) for name in ("log_ratio", "reward", "value", "next_value")}
    ends = {"terminated": kind == 1, "truncated": kind == 2, "mask": rng.random(shape) < 0.7}
    return {name: jnp.asarray(x, jnp.float32) for name, x in (normal | ends).items()}


def without(named, *names):
    return {name: x for name, x in named.items() if name not in names}


# --- worked numbers -------------------------------------------------------------------------------------------------

REWARD, VALUE, NEXT = jnp.array([1.0, 2.0, 3.0]), jnp.array([0.5, 1.0, 1.5]), jnp.array([1.0, 1.5, 2.0])
NOWHERE, MIDDLE = jnp.zeros(3), jnp.array([0.0, 1.0, 0.0])


@pytest.mark.parametrize(
    ("terminated", "truncated", "advantage"),
    [
        # delta = [1 + .5*1 - .5, 2 + .5*1.5 - 1, 3 + .5*2 - 1.5] = [1, 1.75, 2.5]; trace .5*.5 = .25
        (NOWHERE, NOWHERE, [1 + 0.25 * 2.375, 1.75 + 0.25 * 2.5, 2.5]),
        # truncated after step 1: its bootstrap stays, nothing of step 2 comes back
        (NOWHERE, MIDDLE, [1 + 0.25 * 1.75, 1.75, 2.5]),
        # terminated after step 1: its bootstrap goes as well, delta_1 = 2 - 1
        (MIDDLE, NOWHERE, [1 + 0.25 * 1.0, 1.0, 2.5]),
    ],
    ids=["continuing", "truncated", "terminated"],
)
def test_gae_by_hand(terminated, truncated, advantage):
    out = gae(REWARD, VALUE, NEXT, terminated, truncated, gamma=0.5, gae_lambda=0.5)
    close(out.advantage, np.array(advantage))
    close(out.target, np.array(advantage) + np.array(VALUE))


@pytest.mark.parametrize(
    ("truncated", "error", "policy_advantage"),
    [
        # ratio [2, .5, 1]: rho = [1.5, .5, 1], c = [1, .5, 1]; delta as above, gamma .5, lambda 1
        # e_2 = 2.5; e_1 = .5*1.75 + .5*.5*2.5 = 1.5; e_0 = 1.5*1 + .5*1*1.5 = 2.25; target = e + v = [2.75, 2.5, 4]
        # policy: 1.5*(1 + .5*2.5 - .5) = 2.625; .5*(2 + .5*4 - 1) = 1.5; 3 + .5*2 - 1.5 = 2.5
        (NOWHERE, [2.25, 1.5, 2.5], [2.625, 1.5, 2.5]),
        # cut after step 1: e_1 = .5*1.75 = .875; e_0 = 1.5 + .5*.875 = 1.9375; target_1 = 1.875
        # policy: 1.5*(1 + .5*1.875 - .5) = 2.15625; .5*(2 + .5*1.5 - 1) = .875; 2.5
        (MIDDLE, [1.9375, 0.875, 2.5], [2.15625, 0.875, 2.5]),
    ],
    ids=["continuing", "truncated"],
)
def test_vtrace_by_hand(truncated, error, policy_advantage):
    log_ratio = jnp.log(jnp.array([2.0, 0.5, 1.0]))
    out = vtrace(log_ratio, REWARD, VALUE, NEXT, NOWHERE, truncated, gamma=0.5, rho_clip=1.5, c_clip=1.0)
    close(out, (np.array(error), np.array(error) + np.array(VALUE), np.array(policy_advantage)))


def test_next_values_by_hand():
    close(f.next_values(VALUE, jnp.array(9.0)), np.array([1.0, 1.5, 9.0]))
    final = jnp.array([np.nan, 7.0, np.nan])  # read only where an episode was truncated
    close(f.next_values(VALUE, jnp.array(9.0), MIDDLE, final), np.array([1.0, 7.0, 9.0]))
    close(f.next_values(VALUE, jnp.array(9.0), jnp.array([0, 0, 1]), jnp.full(3, 5.0)), np.array([1.0, 1.5, 5.0]))


def test_clipped_surrogate_by_hand():
    # ratio 2, eps .5: A = 1 is clipped to -1.5; A = -1 is not, 2.  ratio .25: A = 1 gives -.25; A = -1 is clipped, .5
    log_ratio = jnp.array([LOG2, LOG2, -2 * LOG2, -2 * LOG2])
    advantage = jnp.array([1.0, -1.0, 1.0, -1.0])
    close(f.clipped_surrogate(log_ratio, advantage, clip_eps=0.5), np.array([-1.5, 2.0, -0.25, 0.5]))
    # clip-higher .75: the upper bound is 1.75, the lower stays .5.  dual clip 1.25: no loss above 1.25 for A = -1
    higher = f.clipped_surrogate(log_ratio, advantage, clip_eps=0.5, clip_eps_high=0.75)
    close(higher, np.array([-1.75, 2.0, -0.25, 0.5]))
    dual = f.clipped_surrogate(log_ratio, advantage, clip_eps=0.5, dual_clip=1.25)
    close(dual, np.array([-1.5, 1.25, -0.25, 0.5]))


def test_value_losses_by_hand():
    value, old, target = jnp.array([2.0, 2.0, -1.0]), jnp.zeros(3), jnp.array([2.0, 5.0, -3.0])
    close(f.value_loss(value, target), np.array([0.0, 4.5, 2.0]))  # .5*0, .5*9, .5*4
    # clipped to [-.5, .5]: .5*1.5^2 = 1.125 > 0; .5*4.5^2 = 10.125 > 4.5; .5*2.5^2 = 3.125 > 2
    close(f.clipped_value_loss(value, old, target, clip_eps=0.5), np.array([1.125, 10.125, 3.125]))
    # moved away from the target: the unclipped error is the larger, .5*(2 - -1)^2 = 4.5 > .5*(.5 - -1)^2
    close(f.clipped_value_loss(value[:1], old[:1], jnp.array([-1.0]), clip_eps=0.5), np.array([4.5]))


def test_normalize_by_hand():
    advantage = jnp.array([[1.0, 5.0], [3.0, 9.0]])
    # mean 4.5, deviations -3.5 .5 -1.5 4.5, squares 12.25 + .25 + 2.25 + 20.25 = 35: /4 = 8.75, /3 = 11.666...
    centred = np.array([[-3.5, 0.5], [-1.5, 4.5]])
    close(f.advantage_normalize(advantage, eps=0.0), centred / np.sqrt(8.75))
    close(f.advantage_normalize(advantage, eps=1.0), centred / (np.sqrt(8.75) + 1))
    close(f.advantage_normalize(advantage, ddof=1, eps=0.0), centred / np.sqrt(35 / 3))
    close(f.advantage_normalize(advantage, axis=0), np.array([[-1.0, -1.0], [1.0, 1.0]]))
    # without the 9: mean 3, deviations -2 2 0
    mask = jnp.array([[1, 1], [1, 0]])
    close(f.advantage_normalize(advantage, mask=mask), np.array([[-2.0, 2.0], [0.0, 0.0]]) / np.sqrt(8 / 3))


def test_statistics_by_hand():
    two = jnp.array([LOG2])
    close(f.approx_kl(two, estimator="k1"), np.array([-LOG2]))
    close(f.approx_kl(two, estimator="k2"), np.array([LOG2**2 / 2]))
    close(f.approx_kl(two), np.array([1 - LOG2]))
    # target 0 2 4 has variance 8/3; the errors 0 1 2 have 2/3: 1 - 1/4
    close(f.explained_variance(jnp.array([0.0, 1.0, 2.0]), jnp.array([0.0, 2.0, 4.0])), np.array(0.75))
    assert jnp.isnan(f.explained_variance(jnp.array([0.0, 1.0]), jnp.ones(2)))
    assert jnp.isnan(f.explained_variance(jnp.zeros(0), jnp.zeros(0)))
    log_ratio = jnp.log(jnp.array([0.5, 0.9, 1.0, 1.1, 1.5]))
    close(f.clip_fraction(log_ratio, clip_eps=0.2), np.array([1.0, 0.0, 0.0, 0.0, 1.0]))
    close(f.clip_fraction(log_ratio, clip_eps=0.2, clip_eps_high=0.6), np.array([1.0, 0.0, 0.0, 0.0, 0.0]))
    close(f.clip_fraction(log_ratio, clip_eps=0.05), np.array([1.0, 1.0, 0.0, 1.0, 1.0]))
    close(f.masked_mean(jnp.array([1.0, 3.0, np.nan]), jnp.array([1, 1, 0])), np.array(2.0))
    close(f.masked_mean(jnp.array([1.0, 3.0]), jnp.zeros(2)), np.array(0.0))


def test_priorities_by_hand():
    # sums of |A|: 4, 1, 0; square roots 2, 1, 0; plus 1: 3, 2, 1 of 6
    advantage = jnp.array([[1.0, -1.0, 0.0], [-3.0, 0.0, 0.0]])
    close(f.segment_priorities(advantage, alpha=0.5, eps=1.0), np.array([3, 2, 1]) / 6)
    # without the -3: sums 1 1 0, priorities 2 2 1 of 5; without column 1: 3 and 1 of 4
    mask = jnp.ones((2, 3))
    close(f.segment_priorities(advantage, mask=mask.at[1, 0].set(0), alpha=0.5, eps=1.0), np.array([2, 2, 1]) / 5)
    close(f.segment_priorities(advantage, mask=mask.at[:, 1].set(0), alpha=0.5, eps=1.0), np.array([3, 0, 1]) / 4)
    close(f.segment_priorities(advantage, mask=0 * mask, alpha=0.5), np.zeros(3))
    close(f.segment_priorities(advantage.at[0, 1].set(np.nan), alpha=0.5, eps=1.0), np.array([3, 1, 1]) / 5)
    # N*P = 2, 1.5, .5, 0 with N = 4: one over it; of three that can be drawn (the 0 cannot): N = 3
    probabilities = jnp.array([0.5, 0.375, 0.125, 0.0])
    weights = f.importance_weights(probabilities, jnp.array([0, 2, 0, 3]), beta=1.0)
    close(weights, np.array([1 / 1.5, 1 / 0.375, 1 / 1.5, 0.0]))
    largest = f.importance_weights(probabilities, jnp.array([0, 2]), beta=0.5, normalize=True)
    close(largest, np.array([(0.375 / 1.5) ** 0.5, 1.0]))


# --- float64 references over a product of settings -----------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ends", [("truncated",), ("mask",), ("truncated", "mask"), ()], ids="+".join)
def test_estimators_equal_their_reference(shape, ends):
    given = arrays(*shape)
    given = without(given, *({"truncated", "mask"} - set(ends)))
    on_policy = without(given, "log_ratio")
    for gamma, gae_lambda in itertools.product((0.0, 0.9, 1.0), (0.0, 0.7, 1.0)):
        settings = {"gamma": gamma, "gae_lambda": gae_lambda}
        close(gae(**on_policy, **settings), reference.gae(**on_policy, **settings))
        for rho_clip, c_clip in ((1.0, 1.0), (0.8, 2.0), (np.inf, 0.5)):
            clips = settings | {"rho_clip": rho_clip, "c_clip": c_clip}
            close(vtrace(**given, **clips), reference.vtrace(**given, **clips))


def test_next_values_equal_their_reference():
    given = arrays(5, 3)
    last, final = given["reward"][0], given["next_value"]
    close(f.next_values(given["value"], last), reference.next_values(given["value"], last))
    close(
        f.next_values(given["value"], last, given["truncated"], final),
        reference.next_values(given["value"], last, given["truncated"], final),
    )


@pytest.mark.parametrize("number", [1, 3, 7, 1000, 4096])
@pytest.mark.parametrize("x", [0.1, 3.3, -1e6])
def test_normalize_gives_zero_for_equal_elements(number, x):
    equal = jnp.full((number, 2), x, jnp.float32)
    for axis, mask in ((None, None), (0, None), (0, jnp.arange(2 * number).reshape(number, 2) % 3 > 0)):
        assert not np.any(f.advantage_normalize(equal, axis=axis, mask=mask))
    spread = equal.at[0].add(0.001 * abs(x))  # a real difference, however small, still counts
    assert number == 1 or np.std(f.advantage_normalize(spread, eps=0.0)) > 0.9


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 1), (0, 2)], ids=str)
def test_normalize_equals_its_reference(axis, ddof):
    given = arrays(4, 3, 2)
    for mask, eps in itertools.product((None, given["mask"]), (1e-8, 0.1)):
        expected = reference.advantage_normalize(given["value"], mask, axis=axis, ddof=ddof, eps=eps)
        close(f.advantage_normalize(given["value"], mask=mask, axis=axis, ddof=ddof, eps=eps), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_losses_equal_their_reference(shape):
    given = arrays(*shape)
    log_ratio, advantage, value, old, target = (
        given[name] for name in ("log_ratio", "reward", "value", "next_value", "reward")
    )
    for eps, high, dual in itertools.product((0.1, 0.5), (None, 0.4), (None, 1.5)):
        settings = {"clip_eps": eps, "clip_eps_high": high, "dual_clip": dual}
        expected = reference.clipped_surrogate(log_ratio, advantage, **settings)
        close(f.clipped_surrogate(log_ratio, advantage, **settings), expected)
        close(
            f.clip_fraction(log_ratio, clip_eps=eps, clip_eps_high=high),
            reference.clip_fraction(log_ratio, clip_eps=eps, clip_eps_high=high),
        )
        close(
            f.clipped_value_loss(value, old, target, clip_eps=eps),
            reference.clipped_value_loss(value, old, target, clip_eps=eps),
        )
    close(f.value_loss(value, target), reference.value_loss(value, target))
    for estimator in ("k1", "k2", "k3"):
        close(f.approx_kl(log_ratio, estimator=estimator), reference.approx_kl(log_ratio, estimator))
    for mask in (None, given["mask"]):
        close(
            f.explained_variance(value, target, mask=mask), np.array(reference.explained_variance(value, target, mask))
        )
        close(f.masked_mean(value, mask), np.array(reference.masked_mean(value, mask)))


def test_large_numbers_do_not_look_like_equal_ones():
    """A variance that overflows gives NaN, which the learner counts, and not the 0 of equal numbers."""
    huge, counts = jnp.array([1e20, -1e20, 5.0]), jnp.array([1, 1, 0])
    assert np.isnan(f.advantage_normalize(huge, mask=counts)).tolist() == [True, True, False]
    assert np.isnan(f.group_advantage(huge, jnp.array([0, 0, 1]), num_groups=np.int64(2))).tolist() == [
        True,
        True,
        False,
    ]


def test_priorities_of_0_are_equal():
    counts = jnp.ones((2, 3)).at[:, 1].set(0)
    close(f.segment_priorities(jnp.zeros((2, 3)), alpha=1.0, eps=0.0, mask=counts), np.array([0.5, 0, 0.5]))


def test_priorities_equal_their_reference():
    given = arrays(5, 4)
    indices = jnp.array([0, 3, 1, 0])
    for mask, alpha in itertools.product((None, given["mask"], given["mask"].at[:, 2].set(0)), (0.0, 0.6, 1.0, 2.0)):
        probabilities = f.segment_priorities(given["value"], mask=mask, alpha=alpha)
        close(probabilities, reference.segment_priorities(given["value"], mask, alpha=alpha))
        close(jnp.sum(probabilities), np.array(1.0))
        for beta, normalize in itertools.product((0.0, 0.4, 1.0), (False, True)):
            close(
                f.importance_weights(probabilities, indices, beta=beta, normalize=normalize),
                reference.importance_weights(probabilities, indices, beta=beta, normalize=normalize),
            )


# --- gradients -------------------------------------------------------------------------------------------------------


def test_surrogate_gradient_stops_where_the_clip_binds():
    # dL/dl = -A*r inside the range and wherever clipping would help; 0 where the ratio left it in A's direction
    ratio = np.array([1.0, 2.0, 2.0, 0.25, 0.25])
    advantage = jnp.array([3.0, 3.0, -3.0, 3.0, -3.0])
    loss = lambda log_ratio: jnp.sum(f.clipped_surrogate(log_ratio, advantage, clip_eps=0.5))  # noqa: E731
    gradient = jax.grad(loss)(jnp.log(jnp.asarray(ratio, jnp.float32)))
    close(gradient, np.array([-3.0, 0.0, 6.0, -0.75, 0.0]))
    bounded = lambda log_ratio: jnp.sum(  # noqa: E731
        f.clipped_surrogate(log_ratio, advantage, clip_eps=0.5, dual_clip=1.5)
    )
    gradient = jax.grad(bounded)(jnp.log(jnp.asarray(ratio, jnp.float32)))
    close(gradient, np.array([-3.0, 0.0, 0.0, -0.75, 0.0]))


def test_value_loss_gradients():
    value, target = jnp.array([2.0, 2.0, 0.25]), jnp.array([5.0, -1.0, 1.0])
    close(jax.grad(lambda v: jnp.sum(f.value_loss(v, target)))(value), np.array([-3.0, 3.0, -0.75]))
    # old 0, range .5: moved towards the target beyond the range: no gradient; away from it, or within: as unclipped
    clipped = jax.grad(lambda v: jnp.sum(f.clipped_value_loss(v, jnp.zeros(3), target, clip_eps=0.5)))(value)
    close(clipped, np.array([0.0, 3.0, -0.75]))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_gradient(estimator):
    log_ratio = jnp.array([-1.0, 0.0, 1.0])
    expected = {"k1": -np.ones(3), "k2": np.array([-1.0, 0.0, 1.0]), "k3": np.expm1([-1.0, 0.0, 1.0])}[estimator]
    close(jax.grad(lambda x: jnp.sum(f.approx_kl(x, estimator=estimator)))(log_ratio), expected)


def test_estimators_differentiate_as_their_equation():
    given = arrays(4, 2)
    settings = {"gamma": 0.9, "gae_lambda": 0.5}
    flowing = settings | {"stop_gradient": False}
    gradient = jax.grad(
        lambda reward: jnp.sum(gae(**without(given, "log_ratio", "reward"), reward=reward, **flowing).advantage)
    )(given["reward"])
    shift = 1e-3
    for index in np.ndindex(4, 2):
        bump = np.zeros((4, 2))
        bump[index] = shift
        both = [
            reference.gae(**without(given, "log_ratio", "reward"), reward=given["reward"] + sign * bump, **settings)[0]
            for sign in (1, -1)
        ]
        close(gradient[index], np.sum(both[0] - both[1]) / (2 * shift), rtol=1e-3, atol=1e-3)


# --- at the limits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [1.0, 3.0, np.inf])
def test_vtrace_on_policy_is_gae(clip):
    given = arrays(6, 3) | {"log_ratio": jnp.zeros((6, 3))}
    settings = {"gamma": 0.9, "gae_lambda": 0.8}
    ours = vtrace(**given, **settings, rho_clip=clip, c_clip=clip)
    expected = gae(**without(given, "log_ratio"), **settings)
    np.testing.assert_array_equal(ours.error, expected.advantage)
    np.testing.assert_array_equal(ours.target, expected.target)


def test_lambda_0_is_the_td_error():
    given = without(arrays(6, 3), "log_ratio", "mask")
    delta = given["reward"] + 0.9 * (1 - given["terminated"]) * given["next_value"] - given["value"]
    close(gae(**given, gamma=0.9, gae_lambda=0.0).advantage, delta)


def test_lambda_1_is_the_monte_carlo_return():
    given = without(arrays(6, 3), "log_ratio", "mask")
    # inside an episode the value of the next step bootstraps what follows: the values telescope away
    shifted = f.next_values(given["value"], given["next_value"][-1], given["truncated"], given["next_value"])
    target = gae(**(given | {"next_value": shifted}), gamma=0.9, gae_lambda=1.0).target
    expected = np.zeros((6, 3))
    for t, n in itertools.product(reversed(range(6)), range(3)):
        if given["terminated"][t, n]:
            following = 0.0
        elif given["truncated"][t, n] or t == 5:
            following = shifted[t, n]
        else:
            following = expected[t + 1, n]
        expected[t, n] = given["reward"][t, n] + 0.9 * following
    close(target, expected)


def test_without_clips_the_losses_are_the_unclipped_ones():
    given = arrays(5, 3)
    log_ratio, advantage = given["log_ratio"], given["reward"]
    close(f.clipped_surrogate(log_ratio, advantage, clip_eps=np.inf), -jnp.exp(log_ratio) * advantage)
    value, old, target = given["value"], given["next_value"], given["reward"]
    # not exactly: old + (value - old) is value but for rounding
    close(f.clipped_value_loss(value, old, target, clip_eps=np.inf), f.value_loss(value, target))
    same = f.clipped_surrogate(jnp.zeros((5, 3)), advantage, clip_eps=0.2)
    np.testing.assert_array_equal(same, -advantage)
    high = f.clipped_surrogate(log_ratio, advantage, clip_eps=0.2, clip_eps_high=0.2, dual_clip=np.inf)
    np.testing.assert_array_equal(high, f.clipped_surrogate(log_ratio, advantage, clip_eps=0.2))


def test_normalize_has_mean_0_and_deviation_1():
    given = arrays(5, 4, scale=30.0)
    normalized = f.advantage_normalize(given["value"] + 100, mask=given["mask"])
    close(f.masked_mean(normalized, given["mask"]), np.array(0.0), atol=1e-5)
    close(f.masked_mean(normalized**2, given["mask"]), np.array(1.0))
    once = f.advantage_normalize(given["value"], eps=0.0)
    close(f.advantage_normalize(3 * once + 7, eps=0.0), once)
    for alone in (jnp.ones(1), jnp.full((3, 2), 4.0)):
        np.testing.assert_array_equal(f.advantage_normalize(alone, ddof=1), np.zeros(alone.shape))


def test_perfect_and_useless_critics():
    target = arrays(5, 3)["reward"]
    close(f.explained_variance(target + 3, target), np.array(1.0))
    close(f.explained_variance(jnp.full((5, 3), 2.0), target), np.array(0.0))
    close(f.explained_variance(-target, target), np.array(-3.0))  # the error is twice the target


def test_alpha_0_draws_uniformly():
    given = arrays(5, 4)
    close(f.segment_priorities(given["value"], alpha=0.0), np.full(4, 1 / 4))
    none_left = given["mask"].at[:, 1].set(0)
    close(f.segment_priorities(given["value"], mask=none_left, alpha=0.0), np.array([1, 0, 1, 1]) / 3)
    close(f.importance_weights(jnp.full(4, 0.25), jnp.arange(4), beta=0.7), np.ones(4))
    close(f.importance_weights(jnp.array([0.1, 0.9]), jnp.arange(2), beta=0.0), np.ones(2))


def test_beta_1_makes_the_weighted_mean_unbiased():
    given = arrays(5, 4)
    mask = given["mask"].at[:, 3].set(0)  # segment 3 is never drawn, and is not part of the mean
    probabilities = f.segment_priorities(given["value"], mask=mask, alpha=1.0)
    weights = f.importance_weights(probabilities, jnp.arange(4), beta=1.0)
    quantity = jnp.array([3.0, -1.0, 5.0, 100.0])
    # exact: E[w f] = sum_n P_n w_n f_n
    close(jnp.sum(probabilities * weights * quantity), np.array((3 - 1 + 5) / 3))
    # and drawn: the mean of 20,000 draws, within five of its standard errors
    drawn = jax.random.choice(jax.random.key(0), 4, (20_000,), p=probabilities)
    sample = np.asarray(f.importance_weights(probabilities, drawn, beta=1.0) * quantity[drawn], np.float64)
    error = sample.std() / np.sqrt(len(sample))
    assert abs(sample.mean() - 7 / 3) < 5 * error < 0.2
    assert not np.any(np.asarray(drawn) == 3)


KEY, SKEWED = jax.random.key(0), jnp.array([0.7, 0.2, 0.1, 0.0])


@pytest.mark.parametrize(
    ("probabilities", "size"), [(SKEWED, 2), (SKEWED, 3), (SKEWED, 4), (jax.nn.softmax(jnp.arange(64.0) / 9), 32)]
)
def test_weights_by_inclusion_are_unbiased_without_replacement(probabilities, size):
    """The others are not: by 65 % in the first case."""
    count = len(probabilities)
    quantity = jnp.where(probabilities > 0, 1 + jnp.flip(jnp.arange(count)) ** 2, 1e6)
    kept = min(size, int(jnp.sum(probabilities > 0)))

    def means(key):
        drawn, inclusion = f.sample_without_replacement(key, probabilities, size)
        weights = [f.importance_weights(probabilities, drawn, beta=1.0, inclusion=x) for x in (None, inclusion)]
        return jnp.stack([jnp.sum(w * quantity[drawn]) / kept for w in weights]), jnp.sort(drawn), inclusion

    many = jax.jit(jax.vmap(means, out_axes=(1, 0, 0)))(jax.random.split(KEY, 20_000))
    (biased, unbiased), drawn, inclusion = (np.asarray(x, np.float64) for x in many)
    expected, error = np.mean(quantity[probabilities > 0]), np.std(unbiased) / 20_000**0.5
    assert abs(np.mean(unbiased) - expected) < 4 * error + 1e-5 * expected
    assert np.mean(biased) > 1.03 * expected
    assert np.all(drawn[:, 1:] > drawn[:, :-1])
    assert np.all((inclusion > 0) == np.asarray(probabilities > 0))
    included = np.any(drawn[:, :, None] == np.arange(count), axis=1)[:, probabilities > 0]
    each = included / inclusion[:, probabilities > 0]
    assert np.all(np.abs(np.mean(each, axis=0) - 1) < 4.5 * np.std(each, axis=0) / 20_000**0.5 + 1e-3)


def test_exponential_variates_are_accurate_near_0():
    """Those of `jax.random` are multiples of 2^-23, so segments with a probability below 1e-7 would not be drawn."""
    variates = np.asarray(_small_exponential(KEY, jnp.zeros(2**22)), np.float64)
    small = variates[variates < 1e-4]
    assert abs(len(small) - 419) < 5 * 419**0.5
    assert np.mean(small * 2**23 % 1 == 0) < 0.1
    assert abs(np.mean(variates) - 1) < 5 / 2**11
    assert abs(np.mean(variates > 3) - np.exp(-3)) < 5 * (np.exp(-3) / 2**22) ** 0.5


def test_traced_probabilities_that_are_none_give_nan():
    weigh = jax.jit(lambda p: f.importance_weights(p, jnp.array([0, 1]), beta=0.5))
    for bad in ([0.5, 0.6], [np.nan, 0.5], [-0.5, 1.5]):
        assert np.all(np.isnan(weigh(jnp.array(bad))))
    close(weigh(jnp.zeros(2)), np.zeros(2))


def test_kl_estimators_estimate_the_divergence():
    # KL(p || q) of two categoricals: k1 and k3 in exact expectation, k2 to second order in the distance
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.45, 0.33, 0.22])
    log_ratio = jnp.asarray(np.log(q / p), jnp.float32)
    exact = np.sum(p * np.log(p / q))
    for estimator, rtol in (("k1", 1e-4), ("k3", 1e-4), ("k2", 0.05)):
        expectation = np.sum(p * np.asarray(f.approx_kl(log_ratio, estimator=estimator)))
        np.testing.assert_allclose(expectation, exact, rtol=rtol)
    assert np.all(np.asarray(f.approx_kl(log_ratio)) >= 0)


def test_numbers_are_probabilities_of_termination():
    given = without(arrays(5, 3), "log_ratio", "mask", "truncated", "terminated")
    half = gae(**given, terminated=jnp.full((5, 3), 0.5), gamma=0.8, gae_lambda=0.5)
    close(half, gae(**given, terminated=jnp.zeros((5, 3)), gamma=0.4, gae_lambda=0.5))


def test_next_value_may_be_anything_after_a_termination():
    given = without(arrays(5, 3), "mask")
    poisoned = jnp.where(given["terminated"] == 1, jnp.nan, given["next_value"])
    for function, named in ((gae, without(given, "log_ratio")), (vtrace, given)):
        settings = {"gamma": 0.9, "gae_lambda": 0.9}
        clean = function(**named, **settings)
        for x, y in zip(clean, function(**(named | {"next_value": poisoned}), **settings), strict=True):
            np.testing.assert_array_equal(x, y)


def test_ends_may_be_booleans_or_integers():
    given = without(arrays(5, 3), "log_ratio")
    expected = gae(**given, gamma=0.9, gae_lambda=0.9)
    for kind in (bool, jnp.int32):
        cast = given | {name: given[name].astype(kind) for name in ("terminated", "truncated", "mask")}
        for x, y in zip(gae(**cast, gamma=0.9, gae_lambda=0.9), expected, strict=True):
            np.testing.assert_array_equal(x, y)


# --- masks, and finite gradients -------------------------------------------------------------------------------------

ESTIMATE = {"gamma": 0.9, "gae_lambda": 0.8, "stop_gradient": False}
STEPS = ("reward", "value", "next_value", "terminated", "truncated")
MASKED = {  # every function that takes a mask: the arrays it reads, and the rest of its arguments
    "gae": (f.gae, STEPS, ESTIMATE),
    "gae, associative": (f.gae, STEPS, ESTIMATE | {"implementation": "associative"}),
    "vtrace": (f.vtrace, ("log_ratio", *STEPS), ESTIMATE | {"rho_clip": 1.5}),
    "clipped_surrogate": (f.clipped_surrogate, ("log_ratio", "advantage"), {"clip_eps": 0.2, "dual_clip": 3.0}),
    "value_loss": (f.value_loss, ("value", "target"), {}),
    "clipped_value_loss": (f.clipped_value_loss, ("value", "old_value", "target"), {"clip_eps": 0.2}),
    "k1": (f.approx_kl, ("log_ratio",), {"estimator": "k1"}),
    "k2": (f.approx_kl, ("log_ratio",), {"estimator": "k2"}),
    "k3": (f.approx_kl, ("log_ratio",), {"estimator": "k3"}),
    "clip_fraction": (f.clip_fraction, ("log_ratio",), {"clip_eps": 0.2}),
    "explained_variance": (f.explained_variance, ("value", "target"), {}),
    "advantage_normalize": (f.advantage_normalize, ("advantage",), {}),
    "segment_priorities": (f.segment_priorities, ("advantage",), {"alpha": 0.6}),
    "masked_mean": (f.masked_mean, ("x",), {}),
}


@pytest.mark.parametrize("name", MASKED)
def test_masked_places_give_0_and_have_no_gradient(name):
    function, reads, rest = MASKED[name]
    rng = np.random.default_rng(0)
    mask = (rng.random((6, 5)) < 0.6).astype(np.float32)
    mask[:, 1] = 0
    clean = {field: rng.normal(size=(6, 5)).astype(np.float32) * mask for field in reads}
    for field in {"terminated", "truncated"} & clean.keys():
        clean[field] = (clean[field] > 1).astype(np.float32)

    @jax.jit
    def results(given):
        outputs, pull = jax.vjp(lambda given: function(**given, **rest, mask=jnp.asarray(mask)), given)
        return outputs, pull(jax.tree.map(jnp.ones_like, outputs))[0]

    expected, gradients = jax.device_get(results(clean))
    for x in jax.tree.leaves(gradients):
        assert np.all(np.isfinite(x))
    for garbage in (np.nan, np.inf, -np.inf, 1e38, -1e38):
        spoilt = {field: np.where(mask, x, np.float32(garbage)) for field, x in clean.items()}
        outputs, found = jax.device_get(results(spoilt))
        jax.tree.map(np.testing.assert_array_equal, (outputs, found), (expected, gradients))
        for x in jax.tree.leaves((outputs, found)):
            if x.shape == mask.shape:
                np.testing.assert_array_equal(x[mask == 0], 0)


LOGS = np.array([-3e38, -200, -20, -0.1, 0, 0.1, 12, 88.5, 89, 200, 3e38])
SIZES = np.array([-1e4, -1.0, -1e-3, -1e-30, 0, 1e-30, 1e-3, 1.0, 1e4])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_surrogate_is_finite_wherever_it_is_bounded(dtype):
    top = float(jnp.finfo(dtype).max)
    log_ratio, advantage = (
        jnp.asarray(x.ravel(), dtype) for x in np.meshgrid(np.clip(LOGS, -0.9 * top, 0.9 * top), SIZES)
    )
    flat, exact = np.asarray(log_ratio, np.float64), np.asarray(advantage, np.float64)
    for dual_clip, clip_eps in ((3.0, 0.2), (None, 0.2), (3.0, np.inf)):
        settings = {"clip_eps": clip_eps, "dual_clip": dual_clip}
        loss, pull = jax.vjp(lambda x, settings=settings: f.clipped_surrogate(x, advantage, **settings), log_ratio)
        slope = np.asarray(pull(jnp.ones_like(loss))[0], np.float64)
        loss = np.asarray(loss, np.float64)
        assert not np.any(np.isnan(loss) | np.isnan(slope))
        with np.errstate(over="ignore", invalid="ignore"):
            ratio = np.exp(flat)
            bounded = np.where(exact < 0, np.clip(ratio, 1 - clip_eps, dual_clip), np.minimum(ratio, 1 + clip_eps))
            expected = np.where(exact == 0, 0, -exact * bounded)
        fits = np.abs(expected) < 0.9 * top
        assert np.all(fits) or dual_clip is None or clip_eps == np.inf
        representable = fits & (ratio < 1e38)  # what decides, the ratio, is itself a float32
        np.testing.assert_allclose(loss[representable], expected[representable], rtol=0.02, atol=1e-6)
        np.testing.assert_allclose(
            slope[representable], np.where(bounded == ratio, loss, 0)[representable], rtol=0.02, atol=1e-6
        )
        assert np.all(np.isfinite(loss[fits & ((exact >= 0) | (bounded != ratio))]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_value_losses_and_divergences_are_finite_wherever_they_are_bounded(dtype):
    top = float(jnp.finfo(dtype).max)
    grid = np.array([-0.9 * top, -(top**0.45), -1.0, 0.0, 1.1, top**0.45, 0.9 * top])
    value, old, target = (jnp.asarray(x.ravel(), dtype) for x in np.meshgrid(grid, grid, grid))
    exact = [np.asarray(x, np.float64) for x in (value, old, target)]
    near = exact[1] + np.clip(exact[0] - exact[1], -0.2, 0.2)
    errors = {"plain": exact[0] - exact[2], "clipped": near - exact[2]}
    losses = {
        "plain": lambda v: f.value_loss(v, target),
        "clipped": lambda v: f.clipped_value_loss(v, old, target, clip_eps=0.2),
        "k1": lambda v: f.approx_kl(v, estimator="k1"),
        "k2": lambda v: f.approx_kl(v, estimator="k2"),
        "k3": f.approx_kl,
    }
    for name, of in losses.items():
        loss, pull = jax.vjp(of, value)
        slope = np.asarray(pull(jnp.ones_like(loss))[0], np.float64)
        assert not np.any(np.isnan(np.asarray(loss, np.float64)) | np.isnan(slope)), name
        if name in errors:
            largest = np.maximum(np.abs(errors["plain"]), np.abs(errors[name]))
            assert np.all(np.isfinite(np.asarray(loss, np.float64)[0.5 * largest**2 < 0.9 * top])), name
            assert np.all(np.isfinite(slope[np.abs(errors["plain"]) < 0.9 * top])), name


def test_estimators_have_finite_gradients_at_extreme_ratios():
    given = arrays(4, 2) | {"log_ratio": jnp.array([[-200.0, 100.0]] * 4)}
    for clips in ({}, {"rho_clip": 2.0, "c_clip": 0.5}):
        gradient = jax.grad(lambda given, clips=clips: jnp.sum(vtrace(**given, **ESTIMATE, **clips).error))(given)
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(gradient))
    equal = jnp.full((4, 2), 3.0)
    for function in (f.advantage_normalize, lambda x: f.advantage_normalize(x, eps=0.0)):
        value, pull = jax.vjp(function, equal)
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
    assert np.isnan(gae(one, one, one, nan, gamma=0.9, gae_lambda=0.9).advantage)  # traced: it cannot be refused


# --- what is differentiated ------------------------------------------------------------------------------------------

CONTRACT = {  # every function: the arrays it reads, those that gradients flow to, and the rest of its arguments
    "gae": (f.gae, STEPS, (), {"gamma": 0.9, "gae_lambda": 0.8}),
    "gae, flowing": (f.gae, STEPS, ("reward", "value", "next_value"), ESTIMATE),
    "vtrace": (f.vtrace, ("log_ratio", *STEPS), (), {"gamma": 0.9}),
    "vtrace, flowing": (f.vtrace, ("log_ratio", *STEPS), ("log_ratio", "reward", "value", "next_value"), ESTIMATE),
    "reverse_recurrence": (f.reverse_recurrence, ("delta", "trace"), ("delta", "trace"), {}),
    "next_values": (f.next_values, ("value", "last_value"), ("value", "last_value"), {}),
    "clipped_surrogate": (f.clipped_surrogate, ("log_ratio", "advantage"), ("log_ratio",), {"clip_eps": 0.2}),
    "value_loss": (f.value_loss, ("value", "target"), ("value",), {}),
    "clipped_value_loss": (f.clipped_value_loss, ("value", "old_value", "target"), ("value",), {"clip_eps": 0.2}),
    "approx_kl": (f.approx_kl, ("log_ratio",), ("log_ratio",), {}),
    "clip_fraction": (f.clip_fraction, ("log_ratio",), (), {"clip_eps": 0.2}),
    "explained_variance": (f.explained_variance, ("value", "target"), (), {}),
    "advantage_normalize": (f.advantage_normalize, ("advantage",), ("advantage",), {}),
    "segment_priorities": (f.segment_priorities, ("advantage",), (), {"alpha": 0.6}),
    "importance_weights": (f.importance_weights, ("probabilities",), (), {"indices": jnp.array([0, 2]), "beta": 0.5}),
    "masked_mean": (f.masked_mean, ("x",), ("x",), {}),
}


@pytest.mark.parametrize("name", CONTRACT)
def test_gradients_flow_where_the_docstring_says(name):
    function, reads, flows, rest = CONTRACT[name]
    rng = np.random.default_rng(1)
    shapes = {"last_value": (3,), "probabilities": (3,)}
    given = {field: rng.uniform(-1, 1, shapes.get(field, (4, 3))).astype(np.float32) for field in reads}
    given |= {field: np.array([0.5, 0.2, 0.3], np.float32) for field in ("probabilities",) if field in reads}
    given |= {field: np.zeros((4, 3), np.float32) for field in ("terminated", "truncated") if field in reads}
    weights = rng.normal(size=100).astype(np.float32)

    def weighed(given):
        outputs = [x.ravel() for x in jax.tree.leaves(function(**given, **rest))]
        return sum(jnp.vdot(x, weights[: x.size]) for x in outputs)

    gradient = jax.grad(weighed)(given)
    moved = {field for field in reads if np.any(gradient[field]) and field not in ("terminated", "truncated")}
    assert moved == set(flows)
    text = " ".join(function.__doc__.partition("Args:")[0].split())
    assert "radient" in text


def test_an_advantage_computed_inside_the_loss_is_a_constant():
    given = without(arrays(6, 3), "log_ratio", "mask")

    def loss(scale, stop_gradient, stop_target):
        value = scale * given["value"]
        named = given | {"value": value, "next_value": f.next_values(value, value[-1])}
        out = f.gae(**named, gamma=0.9, gae_lambda=0.8, stop_gradient=stop_gradient)
        target = jax.lax.stop_gradient(out.target) if stop_target else out.target
        return jnp.mean(0.5 * jnp.square(value - target))

    stopped, by_hand = jax.grad(loss)(1.0, True, False), jax.grad(loss)(1.0, False, True)
    close(stopped, by_hand)
    assert abs(stopped - jax.grad(loss)(1.0, False, False)) > 1e-2


# --- what is refused -------------------------------------------------------------------------------------------------

ONES = np.ones((5, 3), np.float32)
HYPER = {"gamma": 0.9, "gae_lambda": 0.9}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: f.gae(ONES, ONES, ONES, 0 * ONES, gamma=1.5, gae_lambda=0.9),
            "gamma must lie in [0, 1], got 1.5",
        ),
        (lambda: f.gae(ONES, ONES, ONES, 0 * ONES, gamma=0.9, gae_lambda=-1), "gae: gae_lambda must lie in [0, 1]"),
        (lambda: f.vtrace(ONES, ONES, ONES, ONES, 0 * ONES, gamma=0.9, rho_clip=0), "rho_clip must lie in (0, inf]"),
        (lambda: f.vtrace(ONES, ONES, ONES, ONES, 0 * ONES, gamma=0.9, c_clip=np.nan), "c_clip must lie in (0, inf]"),
        (lambda: f.gae(ONES, ONES, ONES, np.nan * ONES, **HYPER), "terminated must hold 0 and 1, or .* got nan"),
        (lambda: f.gae(ONES, ONES, ONES, -ONES, **HYPER), "terminated must hold 0 and 1, or .* got -1.0"),
        (lambda: f.gae(ONES, ONES, ONES, ONES, 0.5 * ONES, **HYPER), "truncated must hold 0 and 1, got 0.5"),
        (lambda: f.value_loss(ONES, ONES, mask=2 * ONES), "value_loss: mask must hold 0 and 1, got 2.0"),
        (lambda: f.masked_mean(ONES, np.nan * ONES), "masked_mean: mask must hold 0 and 1, got nan"),
        (lambda: f.next_values(ONES, ONES[0], -ONES, ONES), "next_values: truncated must hold 0 and 1, got -1.0"),
        (lambda: f.clipped_surrogate(ONES, ONES, clip_eps=0), "clip_eps must lie in (0, inf], got 0"),
        (lambda: f.clipped_surrogate(ONES, ONES, clip_eps=0.2, clip_eps_high=-1), "clip_eps_high must lie in (0, inf]"),
        (lambda: f.clipped_surrogate(ONES, ONES, clip_eps=0.2, dual_clip=1), "dual_clip must lie in (1, inf], got 1"),
        (lambda: f.clipped_surrogate(ONES[0], ONES[0], clip_eps=np.ones((5, 1))), "clip_eps of shape (5, 1) does not"),
        (lambda: f.clipped_value_loss(ONES, ONES, ONES, clip_eps=np.ones(5)), "clip_eps of shape (5,) does not fit"),
        (lambda: f.clipped_value_loss(ONES, ONES, ONES, clip_eps=-1), "clip_eps must lie in (0, inf], got -1"),
        (lambda: f.clip_fraction(ONES, clip_eps=np.nan), "clip_fraction: clip_eps must lie in (0, inf], got nan"),
        (lambda: f.segment_priorities(ONES, alpha=-1), "alpha must lie in [0, inf], got -1"),
        (lambda: f.segment_priorities(ONES, alpha=np.ones(3)), "alpha must be one number, got an array of shape (3,)"),
        (lambda: f.segment_priorities(ONES, alpha=1, eps=-1), "eps must lie in [0, inf], got -1"),
        (lambda: f.importance_weights(ONES[0] / 3, np.array([0]), beta=2), "beta must lie in [0, 1], got 2"),
        (lambda: f.importance_weights(ONES[0], np.array([0]), beta=1), "probabilities must .* got a sum of 3.0"),
        (
            lambda: f.importance_weights(np.nan * ONES[0], np.array([0]), beta=1),
            "probabilities must .* got a sum of nan",
        ),
        (lambda: f.sample_without_replacement(KEY, np.array([-0.5, 1.5]), 1), "probabilities must .* minimum of -0.5"),
        (lambda: f.sample_without_replacement(KEY, ONES[0] / 3, 4), "size must be a whole number in [1, 3]"),
        (lambda: f.advantage_normalize(ONES, eps=-1e-8), "eps must lie in [0, inf], got -1e-08"),
        (lambda: f.advantage_normalize(ONES, ddof=2), "advantage_normalize: ddof must be 0 or 1, got 2"),
        (lambda: f.advantage_normalize(ONES, axis=()), "advantage_normalize: axis must name .* None means all"),
        (lambda: f.segment_priorities(ONES[0], alpha=1), "advantage must be [T, N], got shape (3,)"),
        (
            lambda: f.importance_weights(ONES, np.array([0]), beta=1),
            "probabilities must have one axis, got shape (5, 3)",
        ),
        (lambda: f.two_hot(ONES, [-np.inf, 0.0, np.inf]), "two_hot: support must be .* finite numbers of float32, got"),
        (lambda: f.two_hot(ONES, np.array([0.0, 1.0, 1 + 1e-12])), "two_hot: support must be .* increasing"),
        (lambda: f.hl_gauss(ONES, np.array([3, 1], np.uint8), sigma=1.0), "hl_gauss: support must be .* increasing"),
        (lambda: f.hl_gauss(ONES, ["a", "b"], sigma=1.0), "hl_gauss: support must be .* got ['a', 'b']"),
        (
            lambda: f.rescale_head(ONES, ONES[0], (0, 1), (0, 0)),
            "rescale_head: the new scale must lie in (0, inf], got 0",
        ),
        (lambda: mask_logits(ONES[0], np.array([0, -np.inf, 0])), "mask_logits: available must hold 0 and 1, got -inf"),
    ],
)
def test_values_out_of_range_are_refused(call, words):
    with pytest.raises(ValueError, match=re.escape(words).replace(r"\.\*", ".*")):
        call()


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (
            lambda: f.gae(ONES, np.ones((6, 3)), ONES, ONES, **HYPER),
            "value=value[:-1] and next_value=next_values(value[:-1], value[-1])",
        ),
        (lambda: f.gae(ONES, ONES, ONES, np.ones((6, 3)), **HYPER), "drop the row that is not of a step, e.g. term"),
        (lambda: f.clipped_surrogate(ONES, ONES[0], clip_eps=0.2), "jnp.broadcast_to(advantage, log_ratio.shape)"),
        (
            lambda: f.clipped_surrogate(ONES, ONES[:, 0], clip_eps=0.2),
            "sum log_ratio over the action's dimensions, or, with one advantage for each row of it, use "
            "jnp.broadcast_to(advantage[..., None], log_ratio.shape)",
        ),
        (lambda: f.value_loss(ONES[..., None], ONES), "drop the trailing axis of size 1 with value[..., 0]."),
        (lambda: f.value_loss(ONES, ONES, mask=ONES[0]), "jnp.broadcast_to(mask, value.shape)."),
        (lambda: f.value_loss(ONES, np.ones((4, 2))), "Nothing is broadcast."),
    ],
)
def test_shape_errors_offer_what_helps(call, remedy):
    with pytest.raises(f.ShapeError, match=re.escape(remedy)):
        call()


def test_arrays_of_other_libraries_are_told_how_to_come_in():
    tensor = type("Tensor", (), {"__module__": "torch", "__dlpack__": None})()
    with pytest.raises(TypeError, match=r"value must be an array, got a torch.Tensor; .*jnp.from_dlpack\(value.detach"):
        f.value_loss(tensor, ONES)
    frame = type("Series", (), {"__module__": "pandas.core.series"})()
    with pytest.raises(TypeError, match=r"got a pandas.Series; convert it with jnp.asarray\(target\)"):
        f.value_loss(ONES, frame)


@pytest.mark.parametrize("name", MASKED)
def test_numpy_arrays_are_arrays(name):
    function, reads, rest = MASKED[name]
    wide = {field: np.zeros((4, 3)) for field in reads}  # NumPy's own dtype, float64
    with_mask, without_mask = function(**wide, **rest, mask=np.ones((4, 3), bool)), function(**wide, **rest)
    for x, y in zip(jax.tree.leaves(with_mask), jax.tree.leaves(without_mask), strict=True):
        assert x.dtype == jnp.float32
        np.testing.assert_array_equal(x, y)


def test_means_of_integers_are_not_truncated():
    close(f.masked_mean(jnp.array([1, 2, 9]), jnp.array([1, 1, 0])), np.array(1.5))
    close(f.masked_mean(jnp.array([True, False, True]), jnp.array([1, 1, 0])), np.array(0.5))


def test_a_constant_target_has_no_variance_to_explain():
    value = jnp.linspace(-1, 1, 3001)
    assert np.all(np.isnan([f.explained_variance(value, jnp.full(3001, c)) for c in (0.1, 1e-30, 12345.678, 0.0)]))
    nearly = 0.1 + 1e-8 * (jnp.arange(3001) % 2)
    assert np.isnan(f.explained_variance(value, nearly))
    far = 1e4 + value  # small beside its size, and not constant
    np.testing.assert_allclose(f.explained_variance(far, far), 1.0)
    mask = jnp.arange(3001) % 2
    assert np.isnan(f.explained_variance(value, jnp.where(mask, 0.1, value), mask=mask))


# --- the parts call the functions of the same name -------------------------------------------------------------------


def test_nothing_is_differentiated_through_an_advantage():
    params = make_params(1)
    batch = rollout()
    part = pp.vtrace(gamma=0.9, gae_lambda=0.8)

    def estimate(params):
        current = pp.Current(None, batch.log_prob + batch.obs @ params["value"], batch.obs @ params["value"])
        out, _ = part.update(batch.replace(current=current), part.init(params), pp.Context(key=jax.random.key(0)))
        return jnp.sum(out.advantage * 2 + out.target), out.advantage

    (_, advantage), gradient = jax.value_and_grad(estimate, has_aux=True)(params)
    assert np.any(np.asarray(advantage) != 0)
    for leaf in jax.tree.leaves(gradient):
        np.testing.assert_array_equal(leaf, np.zeros(leaf.shape))


def test_hyperparameters_that_do_not_fit_are_refused():
    ones = jnp.ones((5, 3))
    for gamma in (jnp.ones(5), jnp.ones((2, 5, 3))):
        with pytest.raises(ValueError, match=r"shape \(.*5.*\) does not fit"):
            f.gae(ones, ones, ones, ones, gamma=gamma, gae_lambda=0.9)
    for gamma in (jnp.full(3, 0.9), jnp.full((5, 3), 0.9)):
        per_agent = f.gae(ones, ones, ones, 0 * ones, gamma=gamma, gae_lambda=0.9)
        np.testing.assert_allclose(
            per_agent.advantage, f.gae(ones, ones, ones, 0 * ones, gamma=0.9, gae_lambda=0.9).advantage, rtol=1e-6
        )


def test_lists_and_single_numbers_are_refused():
    with pytest.raises(TypeError, match="got a list"):
        f.gae([1.0], [1.0], [1.0], [0.0], gamma=0.9, gae_lambda=0.9)
    with pytest.raises(ValueError, match="single number"):
        f.gae(*[jnp.ones(())] * 4, gamma=0.9, gae_lambda=0.9)


def test_mask_is_a_keyword_everywhere():
    """Except in `masked_mean`, whose subject it is."""
    for function in vars(f).values():
        parameters = inspect.signature(function).parameters if inspect.isfunction(function) else {}
        if "mask" in parameters and function is not f.masked_mean:
            assert parameters["mask"].kind == inspect.Parameter.KEYWORD_ONLY, function.__name__
            last = [name for name in parameters if name not in ("stop_gradient", "implementation", "mask_mode")][-1]
            assert last == "mask", function.__name__
