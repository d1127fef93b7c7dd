"""The policy losses, divergences and regularizers of the catalogue: one table; `catalogue.py` has the checks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from ppo_parts import functional as f
from tests.catalogue import (
    Entry,
    Law,
    check_golden,
    check_laws,
    check_learns,
    check_reference,
    log_ratios_and_advantages,
)
from tests.common import evaluate, evaluate_gaussian, make_params, rollout

RATIOS = {"log_ratio": np.log([1.0, 2.0, 2.0, 0.25, 0.25]), "advantage": [3.0, 1.0, -1.0, 1.0, -1.0]}
LOG2 = np.log(2)


def clipped(eps):
    return functools.partial(f.clipped_surrogate, clip_eps=eps)


def log_ratios():
    return {"log_ratio": log_ratios_and_advantages()["log_ratio"]}


def values_and_targets():
    value, target = log_ratios_and_advantages().values()
    return {"value": value, "target": target + 0.01}  # there is a kink where they are equal


def sum_of_squares(mean):
    return 2 * jnp.sum(f.value_loss(mean, 0 * mean), axis=-1)


def within(x, low, high):
    return np.where((x >= low) & (x <= high), x, 0)


def ratio(log_ratio):
    return np.exp(np.asarray(log_ratio, np.float64))


# --- references, as the papers write them ---------------------------------------------------------------------------


def surrogate(log_ratio, advantage, *, clip_eps, clip_eps_high=None, dual_clip=None):
    r, high = ratio(log_ratio), 1 + (clip_eps_high or clip_eps)
    loss = -np.minimum(r * advantage, np.clip(r, 1 - clip_eps, high) * advantage)
    return loss if dual_clip is None else np.where(advantage < 0, np.minimum(loss, -dual_clip * advantage), loss)


def outside(log_ratio, *, clip_eps, clip_eps_high=None):
    r = ratio(log_ratio)
    return 1.0 * ((r < 1 - clip_eps) | (r > 1 + (clip_eps_high or clip_eps)))


def spo(log_ratio, advantage, *, clip_eps):
    r = ratio(log_ratio)
    return -r * advantage + np.abs(advantage) / (2 * clip_eps) * (r - 1) ** 2


def dpo(log_ratio, advantage, *, alpha=2.0, beta=0.6):
    r = ratio(log_ratio)
    up, down = (r - 1) * advantage, log_ratio * advantage
    risen = -advantage - alpha * np.tanh(up / alpha)  # -rA + (r - 1) A, which would cancel
    drift = np.where(advantage < 0, np.maximum(down - beta * np.tanh(down / beta), 0), 0)
    return np.where((advantage >= 0) & (up > alpha * np.tanh(up / alpha)), risen, -r * advantage + drift)


def rollback(log_ratio, advantage, *, clip_eps, slope, clip_eps_high=None):
    r, low, high = ratio(log_ratio), 1 - clip_eps, 1 + (clip_eps_high or clip_eps)
    back = np.where(r < low, (1 + slope) * low - slope * r, np.where(r > high, (1 + slope) * high - slope * r, r))
    return -np.minimum(r * advantage, back * advantage)


def mirror(log_ratio, advantage, *, coef):
    r = ratio(log_ratio)
    return -r * advantage + coef * (r * log_ratio - r + 1)


def policy(function, expected, reference, settings, *laws, note=""):
    """An entry for a function of log-ratio and advantage."""
    return Entry(function, RATIOS, expected, reference, settings, laws=laws, note=note)


def of_log_ratio(function, golden, expected, reference, settings, *laws, differentiable=("log_ratio",), note=""):
    return Entry(function, golden, expected, reference, settings, differentiable, log_ratios, laws, note=note)


UNCLIPPED = f.importance_weighted_surrogate
WEIGHT = functools.partial(of_log_ratio, f.importance_sampling_weight, {"log_ratio": np.log([1.0, 4.0, 0.25])})
FRACTION = functools.partial(of_log_ratio, f.clip_fraction, {"log_ratio": np.log([0.5, 0.9, 1.0, 1.1, 1.5])})
KL = functools.partial(of_log_ratio, f.approx_kl, {"log_ratio": np.log([1.0, 2.0, 0.25])})
K2 = functools.partial(f.approx_kl, estimator="k2")
EXPONENTIAL = Law(lambda log_ratio: jnp.exp(log_ratio), {"high": np.inf, "low": 0.0}, gradient=False)

POLICIES = (
    # eps .5: clipped where it helps; higher: at 1.75; dual: no loss above 1.25 for A = -1
    policy(f.clipped_surrogate, [-3, -1.5, 2, -0.25, 0.5], surrogate, {"clip_eps": 0.5},
           Law(UNCLIPPED, {"clip_eps": np.inf})),
    policy(f.clipped_surrogate, [-3, -1.75, 2, -0.25, 0.5], surrogate, {"clip_eps": 0.5, "clip_eps_high": 0.75},
           Law(clipped(0.5), {"clip_eps_high": 0.5}), note="higher"),
    policy(f.clipped_surrogate, [-3, -1.5, 1.25, -0.25, 0.5], surrogate, {"clip_eps": 0.5, "dual_clip": 1.25},
           Law(clipped(0.5), {"dual_clip": np.inf}), note="dual"),
    policy(UNCLIPPED, [-3, -2, 2, -0.25, 0.25], lambda log_ratio, advantage: -ratio(log_ratio) * advantage, {},
           Law(clipped(1e9))),
    # eps .5: -rA + (r - 1)^2 |A|: -2 + 1, 2 + 1, -.25 + .5625, .25 + .5625
    policy(f.simple_policy_optimization, [-3, -1, 3, 0.3125, 0.8125], spo, {"clip_eps": 0.5},
           Law(UNCLIPPED, {"clip_eps": 1e12})),
    # r 2, A 1: -1 - 2 tanh(1/2); r 1/4, A -1: 1/4 + 2 log 2 - .6 tanh(2 log 2 / .6); elsewhere there is no drift
    policy(f.discovered_policy_optimization,
           [-3, -1 - 2 * np.tanh(0.5), 2, -0.25, 0.25 + 2 * LOG2 - 0.6 * np.tanh(2 * LOG2 / 0.6)], dpo, {},
           Law(UNCLIPPED, {"alpha": 1e6, "beta": 1e6})),
    # eps .5, alpha .5: F(2) = 1.5 * 1.5 - 1 = 1.25; F(.25) = 1.5 * .5 - .125 = .625
    policy(f.rollback_surrogate, [-3, -1.25, 2, -0.25, 0.625], rollback, {"clip_eps": 0.5, "slope": 0.5},
           Law(clipped(0.5), {"slope": 1e-12}), Law(UNCLIPPED, {"clip_eps": 1e9})),
    policy(f.rollback_surrogate, [-3, 1 - 1.5 * 1.75, 2, -0.25, 0.625], rollback,
           {"clip_eps": 0.5, "clip_eps_high": 0.75, "slope": 0.5}, note="higher"),
    # beta 2: -rA + 2 (r log r - r + 1): 2 (2 log 2 - 1) for r 2, 2 (-.5 log 2 + .75) for r 1/4
    policy(f.mirror_descent_surrogate, [-3, -4 + 4 * LOG2, 4 * LOG2, 1.25 - LOG2, 1.75 - LOG2], mirror, {"coef": 2.0},
           Law(UNCLIPPED, {"coef": 1e-12})),
)  # fmt: skip
ENTRIES = (
    *POLICIES,
    Entry(f.self_imitation_loss, {"log_prob": [-2.0, -2.0, -1.0], "advantage": [3.0, -3.0, 0.0]}, [6.0, 0, 0],
          lambda log_prob, advantage: -log_prob * np.maximum(advantage, 0), differentiable=("log_prob",),
          samples=lambda: dict(zip(("log_prob", "advantage"), log_ratios_and_advantages().values(), strict=True))),
    FRACTION([1, 0, 0, 0, 1], outside, {"clip_eps": 0.2}, differentiable=(), note="wide"),
    FRACTION([1, 1, 0, 1, 1], outside, {"clip_eps": 0.05}, differentiable=(), note="narrow"),
    FRACTION([1, 0, 0, 0, 0], outside, {"clip_eps": 0.2, "clip_eps_high": 0.6}, differentiable=(), note="higher"),
    KL([0, -LOG2, 2 * LOG2], lambda log_ratio, estimator: -log_ratio, {"estimator": "k1"}, note="k1"),
    KL([0, LOG2**2 / 2, 2 * LOG2**2], lambda log_ratio, estimator: log_ratio**2 / 2, {"estimator": "k2"}, note="k2"),
    KL([0, 1 - LOG2, 2 * LOG2 - 0.75], lambda log_ratio, estimator: ratio(log_ratio) - 1 - log_ratio,
       {"estimator": "k3"}, Law(K2, where=lambda log_ratio: np.abs(log_ratio) < 0.04, rtol=2e-2), note="k3"),
    WEIGHT([1, 2, 0.5], lambda log_ratio, high, low: np.clip(ratio(log_ratio), low, high), {"high": 2.0, "low": 0.5},
           EXPONENTIAL, differentiable=(), note="truncate"),
    WEIGHT([1, 0, 0], lambda log_ratio, high, low, mode: within(ratio(log_ratio), low, high),
           {"high": 2.0, "low": 0.5, "mode": "mask"}, EXPONENTIAL, differentiable=(), note="mask"),
    Entry(f.bounds_loss, {"mean": [[1.0, -3.0], [0.5, 2.0]]}, [4.0, 1.0],
          lambda mean, bound: np.sum(np.maximum(np.abs(mean) - bound, 0) ** 2, axis=-1), {"bound": 1.0}, ("mean",),
          lambda: {"mean": log_ratios()["log_ratio"]},
          (Law(sum_of_squares, {"bound": 0.0}, where=lambda mean: np.ones(4, bool)),)),
    Entry(f.mirror_loss, {"mean": [[1.0, -3.0], [0.5, 2.0]], "mirrored": [[1.0, -1.0], [-0.5, 2.0]]}, [2.0, 0.5],
          lambda mean, mirrored: np.mean((mean - mirrored) ** 2, axis=-1), differentiable=("mean",),
          samples=lambda: {"mean": log_ratios()["log_ratio"], "mirrored": log_ratios()["log_ratio"][::-1]}),
    Entry(f.smoothness_loss, {"mean": [[3.0, 0.0], [1.0, 2.0]], "other": [[0.0, 4.0], [1.0, 2.0]]}, [5.0, 0.0],
          lambda mean, other: np.linalg.norm(mean - other, axis=-1), differentiable=("mean", "other"),
          samples=lambda: {"mean": log_ratios()["log_ratio"], "other": log_ratios()["log_ratio"][::-1] + 0.1}),
    Entry(f.self_imitation_value_loss, {"value": [1.0, 3.0, 2.0], "target": [3.0, 1.0, 2.0]}, [2.0, 0, 0],
          lambda value, target: np.maximum(target - value, 0) ** 2 / 2, differentiable=("value",),
          samples=values_and_targets, laws=(Law(f.value_loss, where=lambda value, target: value < target),)),
)  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)
def test_entry(entry):
    check_golden(entry)
    check_reference(entry)
    check_laws(entry)


# --- divergences: which estimator has whose gradient ----------------------------------------------------------------


def test_estimators_of_the_divergence_in_both_directions():
    """In exact expectation over four actions: the values, and which gradients are those of which divergence."""
    behavior, other = jnp.log(jnp.array([0.1, 0.2, 0.3, 0.4])), jnp.array([0.3, -0.5, 0.8, 0.1])

    def mean(estimator, sign, actions_of):
        def loss(logits):
            current = jax.nn.log_softmax(logits)
            probs = jnp.exp(behavior if actions_of == "behavior" else jax.lax.stop_gradient(current))
            return jnp.sum(probs * f.approx_kl(sign * (current - behavior), estimator=estimator))

        return jax.value_and_grad(loss)(other)

    def exact(forward):
        def kl(logits):
            first, second = behavior, jax.nn.log_softmax(logits)
            first, second = (first, second) if forward else (second, first)
            return jnp.sum(jnp.exp(first) * (first - second))

        return jax.value_and_grad(kl)(other)

    def same(actual, expected):
        return bool(np.allclose(actual, expected, rtol=1e-4, atol=1e-6))

    (forward, forward_slope), (backward, backward_slope) = exact(True), exact(False)
    assert not same(forward_slope, backward_slope)
    for estimator, unbiased in {"k1": True, "k2": False, "k3": True, "k3+": False}.items():
        value, slope = mean(estimator, 1, "behavior")
        assert same(value, forward) == (estimator != "k2")
        assert same(slope, forward_slope) == unbiased
    slopes = {"k1": 0 * other, "k2": backward_slope, "k3": forward_slope, "k3+": backward_slope}
    for estimator, expected in slopes.items():
        value, slope = mean(estimator, -1, "current")
        assert same(value, backward) == (estimator != "k2")
        assert same(slope, expected), estimator


def test_k3_plus_has_the_value_of_k3_and_the_gradient_of_k2_where_k3_overflows():
    log_ratio = jnp.array([-80.0, 0.5, 80, 200])
    value, back = jax.vjp(lambda x: f.approx_kl(x, estimator="k3+"), log_ratio)
    np.testing.assert_array_equal(value, f.approx_kl(log_ratio, estimator="k3"))
    np.testing.assert_array_equal(back(jnp.ones(4))[0], log_ratio)


# --- parts ----------------------------------------------------------------------------------------------------------


def applied(part, batch, policy=evaluate, params=None, state=None, key=0):
    """The part after a sampler: the batch, and the state."""
    params = make_params() if params is None else params
    distribution, value = policy(params, batch)
    current = pp.Current(distribution, distribution.log_prob(batch.action), value)
    context = pp.Context(key=jax.random.key(key), params=params, evaluate=lambda p, b: pp.Output(*policy(p, b)))
    return part.update(batch.replace(current=current), part.init(params) if state is None else state, context)


def minibatch(**fields):
    batch = rollout(masked=False)
    behavior, _ = evaluate(make_params(100), batch)
    return batch.replace(behavior=behavior, next_obs=jnp.roll(batch.obs, -1, 0), **fields)


def continuous(**fields):
    return minibatch(action=rollout(masked=False).obs[..., :2], **fields)


def test_kl_penalty_in_both_directions_and_to_another_policy():
    batch = minibatch(extras={"frozen": rollout(masked=False).log_prob - 0.1})
    current, _ = evaluate(make_params(), batch)
    log_ratio = current.log_prob(batch.action) - batch.log_prob
    to_frozen = current.log_prob(batch.action) - batch.extras["frozen"]
    for options, expected in (
        ({}, jnp.exp(log_ratio) - 1 - log_ratio),
        ({"estimator": "k2"}, log_ratio**2 / 2),
        ({"direction": "current_to_reference"}, jnp.exp(-log_ratio) - 1 + log_ratio),
        ({"estimator": "analytic"}, batch.behavior.kl_divergence(current)),
        ({"estimator": "analytic", "direction": "current_to_reference"}, current.kl_divergence(batch.behavior)),
        ({"reference": "frozen"}, jnp.exp(to_frozen) - 1 - to_frozen),
    ):
        out, _ = applied(pp.kl_penalty(coef=0.5, **options), batch)
        np.testing.assert_allclose(out.losses["kl_penalty"], 0.5 * expected, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(out.metrics["kl_penalty"], jnp.mean(expected), rtol=1e-4)
    with pytest.raises(ValueError, match="expected gradient of k1 is 0"):
        pp.kl_penalty(coef=1.0, estimator="k1", direction="current_to_reference")
    with pytest.raises(TypeError, match="has no kl_divergence"):
        applied(pp.kl_penalty(coef=1.0, estimator="analytic"), batch.replace(behavior=()))


@pytest.mark.parametrize(("times", "factor"), [(1.6, 0.5), (1.4, 1), (1, 1), (1 / 1.4, 1), (1 / 1.6, 2)])
def test_the_coefficient_of_the_penalty_follows_the_divergence(times, factor):
    batch = minibatch()
    distribution, value = evaluate(make_params(), batch)
    batch = batch.replace(current=pp.Current(distribution, distribution.log_prob(batch.action), value))
    kl = float(jnp.mean(batch.behavior.kl_divergence(distribution)))
    part = pp.kl_penalty(coef=3.0, estimator="analytic", target_kl=times * kl)
    state = part.finish(batch, part.init(None), pp.Context(key=jax.random.key(0)))
    np.testing.assert_allclose(state, (3 * factor, kl), rtol=1e-5)
    out, _ = applied(part, batch, state=state)
    np.testing.assert_allclose(out.losses["kl_penalty"], 3 * factor * batch.behavior.kl_divergence(distribution), 1e-5)
    np.testing.assert_allclose([out.metrics["kl_penalty_coef"], out.metrics["kl_penalty_after"]], state, rtol=1e-5)


def test_adaptive_entropy_bonus_steps_toward_its_target_and_without_a_rate_is_entropy_bonus():
    batch = minibatch()
    fixed, _ = applied(pp.entropy_bonus(coef=0.2), batch)
    part = pp.regularizers.adaptive_entropy_bonus(target_entropy=0.3, learning_rate=0.1, coef=0.2)
    out, state = applied(part, batch)
    np.testing.assert_allclose(out.losses["entropy"], fixed.losses["entropy"], rtol=1e-6)
    expected = np.log(0.2) - 0.1 * (float(fixed.metrics["entropy"]) - 0.3)
    np.testing.assert_allclose(state.log_coef, expected, rtol=1e-5)
    out, _ = applied(part, batch, state=state)
    np.testing.assert_allclose(out.metrics["entropy_coef"], np.exp(expected), rtol=1e-5)
    _, after = applied(part, batch.replace(mask=jnp.zeros_like(batch.value)), state=state)
    assert after == state  # no step counts


def test_bounds_loss_of_the_mean():
    batch, params = continuous(), make_params()
    out, _ = applied(pp.regularizers.bounds_loss(coef=0.5, bound=0.3), batch, evaluate_gaussian)
    expected = np.sum(np.maximum(np.abs(batch.obs @ params["policy"]) - 0.3, 0) ** 2, axis=-1)
    np.testing.assert_allclose(out.losses["bounds"], 0.5 * expected, rtol=1e-5)
    np.testing.assert_allclose(out.metrics["bounds_loss"], np.mean(expected), rtol=1e-5)
    with pytest.raises(TypeError, match="must be a Gaussian"):
        applied(pp.regularizers.bounds_loss(coef=0.5), minibatch())


def test_mirror_loss_is_the_distance_from_a_symmetric_policy():
    batch, weight = continuous(), make_params()["policy"]
    signs = jnp.broadcast_to(jnp.array([1.0, -1.0, -1.0]), batch.obs.shape)
    part = pp.symmetry.mirror_loss(observation=lambda obs: signs * obs, action=lambda action: -action, coef=2.0)
    out, _ = applied(part, batch, evaluate_gaussian)
    expected = np.mean(np.square((signs * batch.obs) @ weight + batch.obs @ weight), axis=-1)
    np.testing.assert_allclose(out.losses["mirror"], 2 * expected, rtol=1e-4)
    np.testing.assert_allclose(out.metrics["mirror_loss"], np.mean(expected), rtol=1e-4)
    odd = pp.symmetry.mirror_loss(observation=lambda obs: -obs, action=lambda action: -action)
    assert jnp.all(applied(odd, batch, evaluate_gaussian)[0].losses["mirror"] == 0)  # the policy is linear

    def slope(params):
        return jnp.sum(applied(part, batch, evaluate_gaussian, params=params)[0].losses["mirror"])

    def by_hand(policy):  # only the action for the mirrored observation is differentiated
        target = -batch.obs @ weight
        return 2 * jnp.sum(jnp.mean(jnp.square((signs * batch.obs) @ policy - target), axis=-1))

    slopes = jax.grad(slope)(make_params())["policy"], jax.grad(by_hand)(weight)
    np.testing.assert_allclose(*slopes, rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match="mirror_loss: action must be a function, got None"):
        pp.symmetry.mirror_loss(observation=lambda obs: obs, action=None)
    with pytest.raises(ValueError, match="memory"):
        applied(odd, continuous(carry=jnp.zeros((4, 1))), evaluate_gaussian)


def test_mirrored_segments_follow_those_of_their_shard():
    batch = continuous(shards=2, per_segment={"group": jnp.arange(4)}).replace(behavior=None)
    part = pp.symmetry.mirror_segments(observation=lambda obs: -obs, action=lambda action: 2 * action)
    out, _ = applied(part, batch, evaluate_gaussian)
    order = [0, 1, 0, 1, 2, 3, 2, 3]
    factor = jnp.array([1.0, 1, -1, -1, 1, 1, -1, -1]).reshape(1, 8, 1)
    np.testing.assert_array_equal(out.obs, batch.obs[:, order] * factor)
    np.testing.assert_array_equal(out.next_obs, batch.next_obs[:, order] * factor)
    np.testing.assert_array_equal(out.action, batch.action[:, order] * jnp.where(factor < 0, 2, 1))
    np.testing.assert_array_equal(out.log_prob, batch.log_prob[:, order])
    np.testing.assert_array_equal(out.per_segment["group"], order)
    with pytest.raises(ValueError, match="memory"):
        applied(part, batch.replace(carry=jnp.zeros((4, 1))), evaluate_gaussian)
    with pytest.raises(ValueError, match="distributions cannot be mirrored"):
        applied(part, continuous(), evaluate_gaussian)


def test_mirrored_segments_change_nothing_for_a_symmetric_policy():
    """Its mean is odd, so the copies have the losses and the gradients of the originals."""

    def symmetric(params, batch):
        return pp.distributions.Normal(batch.obs @ params["policy"], 1.0), None

    odd = pp.symmetry.mirror_segments(observation=lambda obs: -obs, action=lambda action: -action)
    after = (pp.full_batch(), pp.clipped_surrogate(clip_eps=0.2))
    batch = continuous(advantage=rollout(masked=False).reward, shards=2).replace(behavior=None)
    params = []
    for chain in (pp.chain(*after), pp.chain(odd, *after)):
        learner = pp.learner(symmetric, chain, optax.sgd(1.0))
        state, _ = learner.update(jax.random.key(0), learner.init(make_params()), batch.replace(current=None))
        params.append(state.params["policy"])
    assert jnp.any(params[0] != make_params()["policy"])
    np.testing.assert_allclose(*params, rtol=1e-5, atol=1e-6)


def test_smoothness_loss_is_the_distance_of_two_actions():
    batch, weight = continuous(), make_params()["policy"]
    temporal = np.linalg.norm((batch.obs - batch.next_obs) @ weight, axis=-1)
    out, _ = applied(pp.regularizers.smoothness_loss(temporal=2.0, spatial=None), batch, evaluate_gaussian)
    np.testing.assert_allclose(out.losses["smoothness"], 2 * temporal, rtol=1e-5)
    assert "smoothness_spatial" not in out.metrics
    measured = []
    for scale in (0.0, 0.1, 0.2):
        out, _ = applied(
            pp.regularizers.smoothness_loss(temporal=None, spatial=2.0, noise_scale=scale), batch, evaluate_gaussian
        )
        measured.append(float(out.metrics["smoothness_spatial"]))
    assert measured[0] < 1.1e-6 < measured[1]
    np.testing.assert_allclose(measured[2], 2 * measured[1], rtol=1e-4)  # the policy is linear
    with pytest.raises(TypeError, match="continuous actions"):
        applied(pp.regularizers.smoothness_loss(temporal=None), minibatch())
    with pytest.raises(ValueError, match="memory"):
        applied(pp.regularizers.smoothness_loss(temporal=None), continuous(carry=jnp.zeros((4, 1))), evaluate_gaussian)


def test_proximal_average_weighs_parameters_by_age():
    batch, part, state = minibatch(advantage=jnp.ones((6, 4))), pp.regularizers.proximal_average(decay=0.5), None
    visited = [make_params(seed) for seed in range(3)]
    for params in visited:
        out, state = applied(part, batch, params=params, state=state)
    mean = jax.tree.map(lambda a, b, c: (a / 4 + b / 2 + c) / 1.75, *visited)
    np.testing.assert_allclose(state.params["policy"], mean["policy"], rtol=1e-5)
    log_prob = evaluate(mean, batch)[0].log_prob(batch.action)
    np.testing.assert_allclose(out.log_prob, log_prob, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(out.advantage, jnp.exp(log_prob - batch.log_prob), rtol=1e-4)


def test_proximal_average_without_memory_is_the_unclipped_surrogate():
    """The proximal policy is the current one then, so that the surrogate has the ratio 1 and never clips."""
    batch = minibatch(advantage=rollout(masked=False).reward)
    proximal = pp.chain(pp.regularizers.proximal_average(decay=0.0), pp.clipped_surrogate(clip_eps=0.2))
    plain = pp.chain(pp.policy_loss(f.importance_weighted_surrogate))
    slopes = [
        jax.grad(lambda params, part=part: jnp.sum(applied(part, batch, params=params)[0].losses["policy"]))(
            make_params()
        )
        for part in (proximal, plain)
    ]
    np.testing.assert_allclose(slopes[0]["policy"], slopes[1]["policy"], rtol=1e-4, atol=1e-5)


def test_perturbed_mean_shifts_each_element_by_at_most_the_scale():
    batch, params = continuous(), make_params()
    policy = evaluate_gaussian(params, batch)[0]

    def log_prob(action, scale):
        out, _ = applied(pp.regularizers.perturbed_mean(scale=scale), batch.replace(action=action), evaluate_gaussian)
        np.testing.assert_array_equal(out.current.distribution.loc, policy.loc)  # entropies and penalties see no noise
        return jnp.sum(out.current.log_prob), out.current.log_prob

    # The slope of log N(a; mu + z, sigma) in a is (mu + z - a) / sigma^2.
    slope, perturbed = jax.grad(log_prob, has_aux=True)(batch.action, 0.5)
    shift = np.asarray(slope * policy.scale**2 + batch.action - policy.loc)
    assert np.abs(shift).max() <= 0.5
    assert np.abs(shift).max() > 0.4
    assert len(np.unique(shift.round(6))) == shift.size
    expected = pp.distributions.Normal(policy.loc + shift, policy.scale).log_prob(batch.action)
    np.testing.assert_allclose(perturbed, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(log_prob(batch.action, 0.0)[1], policy.log_prob(batch.action), rtol=1e-6)
    with pytest.raises(TypeError, match=r"must be a distributions\.Normal"):
        applied(pp.regularizers.perturbed_mean(), minibatch())


def test_importance_correction_weighs_advantages():
    log_ratio = rollout(masked=False).reward
    batch = minibatch(advantage=jnp.full((6, 4), 2.0))
    batch = batch.replace(extras={"sampler_log_prob": batch.log_prob - log_ratio})
    for mode, within in (("truncate", np.clip(ratio(log_ratio), 0.8, 1.5)), ("mask", None)):
        out, _ = applied(pp.tokens.importance_correction(low=0.8, high=1.5, mode=mode), batch)
        inside = (ratio(log_ratio) >= 0.8) & (ratio(log_ratio) <= 1.5)
        weight = np.where(inside, ratio(log_ratio), 0) if within is None else within
        np.testing.assert_allclose(out.advantage, 2 * weight, rtol=1e-4)
        np.testing.assert_allclose(out.metrics["correction_weight"], weight.mean(), rtol=1e-4)
        np.testing.assert_allclose(out.metrics["correction_fraction"], 1 - inside.mean(), rtol=1e-4)
    for refuse in (pp.tokens.importance_correction, functools.partial(f.importance_sampling_weight, log_ratio)):
        with pytest.raises(ValueError, match="low must not exceed high"):
            refuse(low=2.0, high=1.0)
        with pytest.raises(ValueError, match=r"mode must be .*'clip'"):
            refuse(high=1.0, mode="clip")
    short = jnp.ones((6, 4)).at[2:, 0].set(0)  # a sequence of two tokens, among sequences of six
    out, _ = applied(pp.tokens.importance_correction(high=1.5, level="sequence"), batch.replace(mask=short))
    weight = np.minimum(ratio(np.sum(np.where(short > 0, log_ratio, 0), axis=0, keepdims=True)), 1.5) * short
    np.testing.assert_allclose(out.advantage * short, 2 * weight, rtol=1e-4)
    with pytest.raises(ValueError, match="cuts the time axis"):
        pp.chain(pp.shuffled_minibatches(2), pp.tokens.importance_correction(high=1.5, level="sequence"))
    same = batch.replace(extras={"sampler_log_prob": batch.log_prob})
    np.testing.assert_array_equal(
        applied(pp.tokens.importance_correction(high=2.0), same)[0].advantage, batch.advantage
    )


def test_self_imitation_by_hand():
    batch = minibatch(target=rollout(masked=False).reward)
    out, _ = applied(pp.exploration.self_imitation(coef=0.5, value_coef=0.1), batch)
    log_prob, value = evaluate(make_params(), batch)[0].log_prob(batch.action), evaluate(make_params(), batch)[1]
    better = np.maximum(batch.target - value, 0)
    np.testing.assert_allclose(out.losses["self_imitation"], 0.5 * (-log_prob * better + 0.05 * better**2), rtol=1e-4)
    np.testing.assert_allclose(out.metrics["self_imitation_fraction"], np.mean(better > 0), rtol=1e-5)


def test_chains_of_all_learn():
    batch = minibatch(extras={"sampler_log_prob": rollout().log_prob - 0.1})
    parts = (
        pp.tokens.importance_correction(high=2.0),
        pp.kl_penalty(coef=0.1, estimator="analytic", target_kl=0.01),
        pp.regularizers.adaptive_entropy_bonus(target_entropy=0.5, learning_rate=0.1),
        pp.exploration.self_imitation(),
        pp.regularizers.proximal_average(decay=0.9),
    )
    policies = [pp.policy_loss(x.function, **x.hyperparameters, name=x.id) for x in POLICIES]
    metrics = check_learns([*parts, *policies], behavior=batch.behavior, extras=batch.extras)
    assert metrics["kl_penalty_coef"] == 0.1
    batch = continuous()
    parts = (
        pp.regularizers.perturbed_mean(scale=0.1),
        pp.clipped_surrogate(clip_eps=0.2),
        pp.regularizers.bounds_loss(coef=0.1),
        pp.symmetry.mirror_loss(observation=lambda obs: -obs, action=lambda action: action[..., ::-1]),
        pp.regularizers.smoothness_loss(),
        pp.kl_penalty(coef=0.1, estimator="analytic"),  # where the mask is 0, the learner erases even the scale
    )
    behavior, _ = evaluate_gaussian(make_params(100), batch)
    check_learns(parts, evaluate_gaussian, action=batch.action, next_obs=batch.next_obs, behavior=behavior)
