"""The code of the cards on losses.md, regularizers.md, updates.md, run by the learner, equals loops written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from tests.common import ACTIONS, OBS, SEGMENTS, TIME, make_params
from tests.docs.cards import (
    KEY,
    MINIBATCHES,
    RATE,
    assert_equal,
    card,
    categorical,
    chosen,
    clipped,
    cut,
    data_of,
    descend,
    double,
    double_precision,
    entropy_of,
    gae_of,
    given,
    linear,
    log_probs,
    mean,
    normalized,
    ppo,
    train,
)

pytestmark = pytest.mark.usefixtures(double_precision.__name__)


SURROGATES = {
    "dual_clip": lambda r, a: jnp.where(a < 0, jnp.minimum(clipped(r, a), -3 * a), clipped(r, a)),
    "clip_higher": lambda r, a: clipped(r, a, 0.2, 0.28),
    "spo": lambda r, a: -(r * a - jnp.abs(a) / (2 * 0.2) * (r - 1) ** 2),
}


@pytest.mark.parametrize("name", SURROGATES)
def test_surrogate_equals_a_loop_by_hand(name):
    params, batch = make_params(dtype=jnp.float64), double(masked=False)
    advantage, target = gae_of(batch)
    rng = np.random.default_rng(4)  # ratios on both sides of every clip
    raised, lowered = (rng.choice(x, size=(TIME, SEGMENTS)) for x in ([0.9, 1.1, 1.25, 2], [0.5, 0.9, 3.2, 4]))
    ratio = np.where(advantage > 0, raised, lowered)
    batch = batch.replace(log_prob=chosen(batch.obs @ params["policy"], batch.action) - np.log(ratio))
    data = cut(data_of(batch, advantage=advantage, target=target))

    def by_hand(surrogate):
        def loss(params, d):
            logits, value = d["obs"] @ params["policy"], d["obs"] @ params["value"]
            ratio = jnp.exp(chosen(logits, d["action"]) - d["log_prob"])
            policy = surrogate(ratio, normalized(d["advantage"], d["mask"]))
            return mean(policy + 0.25 * (value - d["target"]) ** 2 - 0.01 * entropy_of(logits), d["mask"])

        return descend(loss, params, data)

    state, metrics = train(given(getattr(card("losses", "Other surrogates"), name)), params, [batch], categorical)
    assert_equal(state.params, by_hand(SURROGATES[name]))
    ordinary = by_hand(clipped)
    assert float(jnp.max(jnp.abs(state.params["policy"] - ordinary["policy"]))) > 1e-4  # the variant is at work
    assert metrics[0]["ratio_max"] > 3


def test_adaptive_kl_penalty_equals_a_loop_by_hand():
    params, target_kl, coef, coefs, kls = make_params(dtype=jnp.float64), 0.01, 1.0, [], []
    logits = [jnp.asarray(np.random.default_rng(seed).normal(size=(TIME, SEGMENTS, ACTIONS))) for seed in range(3)]
    logits[1] = double(1).obs @ params["policy"]  # close to the policy that is trained
    batches = []
    for seed, old in enumerate(logits):
        batch = double(seed)
        behavior = pp.distributions.Categorical(old)
        batches.append(batch.replace(log_prob=behavior.log_prob(batch.action), behavior=behavior))

    def divergence(params, d):
        old, new = log_probs(d["old"]), log_probs(d["obs"] @ params["policy"])
        return jnp.sum(jnp.exp(old) * (old - new), axis=-1)

    def loss(params, d, coef):
        logits, value = d["obs"] @ params["policy"], d["obs"] @ params["value"]
        ratio = jnp.exp(chosen(logits, d["action"]) - d["log_prob"])
        policy = -ratio * normalized(d["advantage"], d["mask"]) + coef * divergence(params, d)
        return mean(policy + 0.25 * (value - d["target"]) ** 2, d["mask"])

    expected = params
    for batch, old in zip(batches, logits, strict=True):
        advantage, target = gae_of(batch)
        data = data_of(batch, advantage=advantage, target=target, old=old)
        coefs.append(coef)
        expected = descend(loss, expected, [(d, coef) for (d,) in cut(data)], 0.01)
        kls.append(float(mean(divergence(expected, data), data["mask"])))
        coef = coef / 2 if kls[-1] < target_kl / 1.5 else coef * 2 if kls[-1] > 1.5 * target_kl else coef
    module = card("losses", "Adaptive KL penalty")
    state, metrics = train(given(module.pipeline), params, batches, categorical, optax.sgd(0.01))
    assert_equal(state.params, expected)
    np.testing.assert_allclose([m["kl_penalty_coef"] for m in metrics], coefs)
    np.testing.assert_allclose([m["kl_penalty_after"] for m in metrics], [0, *kls[:-1]], atol=1e-9)
    assert coefs == [1, 2, 1]  # it went both ways


def test_ppo_ewma_equals_a_loop_by_hand():
    params, batches, decay = make_params(dtype=jnp.float64), [double(seed) for seed in range(2)], 0.889

    def loss(params, d, proximal):
        logits, value = d["obs"] @ params["policy"], d["obs"] @ params["value"]
        log_prob = chosen(logits, d["action"])
        middle = chosen(d["obs"] @ proximal["policy"], d["action"])
        surrogate = clipped(jnp.exp(log_prob - middle), normalized(d["advantage"], d["mask"]))
        policy = jnp.exp(middle - d["log_prob"]) * surrogate
        return mean(policy + 0.25 * (value - d["target"]) ** 2, d["mask"])

    expected, visited = params, []
    for batch in batches:
        advantage, target = gae_of(batch)
        for (d,) in cut(data_of(batch, advantage=advantage, target=target)):
            visited.append(expected)
            weights = decay ** np.arange(len(visited))[::-1]
            proximal = jax.tree.map(
                lambda *all, w=weights: sum(a * b for a, b in zip(w, all, strict=True)) / sum(w), *visited
            )
            expected = descend(loss, expected, [(d, proximal)])
    state, metrics = train(given(card("losses", "PPO-EWMA").pipeline), params, batches, categorical)
    assert_equal(state.params, expected)
    assert abs(float(metrics[1]["off_policy_weight"]) - 1) > 1e-3


@pytest.mark.lenient_ranks
def test_caps_equals_a_loop_by_hand():
    module, rng, size = card("regularizers", "CAPS"), np.random.default_rng(6), 2
    shapes = {"policy": (OBS, size), "log_scale": (size,), "value": (OBS,)}
    params = jax.tree.map(jnp.asarray, {name: 0.5 * rng.normal(size=shape) for name, shape in shapes.items()})
    batch = double().replace(
        action=jnp.asarray(rng.normal(size=(TIME, SEGMENTS, size))),
        next_obs=jnp.asarray(rng.normal(size=(TIME, SEGMENTS, OBS))),
        log_prob=jnp.asarray(rng.normal(size=(TIME, SEGMENTS)) - 3),
    )
    learner = pp.learner(module.evaluate, given(module.pipeline), optax.sgd(0.01), return_batch=True)
    state, metrics, seen = jax.jit(learner.update)(KEY, learner.init(params), batch)
    perturbed = seen.extras["perturbed_obs"]
    counts = np.asarray(batch.mask, bool)  # the learner erases masked observations
    assert 0.8 < np.std((perturbed - batch.obs)[counts]) / 0.05 < 1.2

    def log_density(params, d):
        scaled = (d["action"] - jnp.tanh(d["obs"] @ params["policy"])) / jnp.exp(params["log_scale"])
        return jnp.sum(-0.5 * scaled**2 - params["log_scale"] - 0.5 * jnp.log(2 * jnp.pi), axis=-1)

    def distance(params, d, other):
        return jnp.sqrt(jnp.sum((jnp.tanh(d["obs"] @ params["policy"]) - jnp.tanh(other @ params["policy"])) ** 2, -1))

    def loss(params, d):
        policy = clipped(jnp.exp(log_density(params, d) - d["log_prob"]), normalized(d["advantage"], d["mask"]))
        smoothness = distance(params, d, d["next_obs"]) + 5 * distance(params, d, d["perturbed"])
        return mean(policy + 0.25 * (d["obs"] @ params["value"] - d["target"]) ** 2 + smoothness, d["mask"])

    advantage, target = gae_of(batch)
    data = data_of(batch, advantage=advantage, target=target, next_obs=batch.next_obs, perturbed=perturbed)
    assert_equal(state.params, descend(loss, params, cut(data), 0.01))
    assert metrics["temporal_distance"] > metrics["spatial_distance"] > 0


def test_drac_equals_a_loop_by_hand():
    module, params, batch = card("regularizers", "DrAC"), make_params(dtype=jnp.float64), double()
    advantage, target = gae_of(batch, gamma=0.999)
    augment = module.random_amplitude(0.6, 1.2)(KEY, jnp.ones((50, OBS)))
    assert 0.6 <= np.min(augment) < 0.8 < 1 < np.max(augment) <= 1.2
    np.testing.assert_array_equal(augment[:, 0], augment[:, 1])

    def loss(params, d, fixed):
        logits, value = linear(params, d["obs"])
        new_logits, new_value = linear(params, 1.5 * d["obs"])
        old_logits, old_value = linear(fixed, d["obs"])
        old = log_probs(old_logits)
        kl = jnp.sum(jnp.exp(old) * (old - log_probs(new_logits)), axis=-1)
        augmented = 0.1 * (kl + 0.5 * (old_value - new_value) ** 2)
        return mean(ppo(logits, value, d) + augmented, d["mask"])

    expected = params
    for (d,) in cut(data_of(batch, advantage=advantage, target=target)):
        expected = descend(loss, expected, [(d, expected)])
    pipeline = given(module.drac(module.random_amplitude(1.5, 1.5)))  # a factor that the loop can have, too
    state, metrics = train(pipeline, params, [batch], categorical)
    assert_equal(state.params, expected)
    assert metrics[0]["augmented_kl"] > 0


def adam(gradient, moments, step, eps):
    """The direction of Adam's step number `step`, from 1, and its moments."""
    first, second = moments
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradient)
    second = jax.tree.map(lambda m, g: 0.999 * m + 0.001 * g**2, second, gradient)
    direction = jax.tree.map(lambda m, v: m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.999**step)) + eps), first, second)
    return direction, (first, second)


def norm_of(tree):
    return np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(tree)))


def test_kl_adaptive_rate_equals_a_loop_by_hand():
    module, params, rate = card("updates", "KL-adaptive learning rate"), make_params(dtype=jnp.float64), 1e-3
    batches = [double(0), double(1, behavior=params)]  # far away, and nearby

    def loss(params, d):
        return mean(ppo(*linear(params, d["obs"]), d, entropy=0.005, critic=0.5), d["mask"])

    @jax.jit
    def gradient(params, d):
        log_ratio = chosen(d["obs"] @ params["policy"], d["action"]) - d["log_prob"]
        return jax.grad(loss)(params, d), mean(jnp.exp(log_ratio) - 1 - log_ratio, d["mask"])

    expected, moments, step, rates = params, (jax.tree.map(np.zeros_like, params),) * 2, 0, []
    for batch in batches:
        advantage, target = gae_of(batch)
        for (d,) in cut(data_of(batch, advantage=advantage, target=target)):
            g, kl = jax.tree.map(np.asarray, gradient(expected, d))
            rate = max(rate / 1.5, 1e-5) if kl > 0.02 else min(rate * 1.5, 1e-2) if 0 < kl < 0.005 else rate
            rates.append(rate)
            step += 1
            scale = min(1, 1 / norm_of(g))
            g = {name: scale * x for name, x in g.items()}
            direction, moments = adam(g, moments, step, 1e-8)
            expected = jax.tree.map(lambda p, u, rate=rate: p - rate * u, expected, direction)
    state, _ = train(given(module.pipeline), params, batches, categorical, module.optimizer)
    assert_equal(state.params, expected)
    np.testing.assert_allclose(optax.tree.get(state.opt_state, "learning_rate"), rates[-1])
    assert rates[0] < 1e-3
    assert rates[-1] > rates[1]  # it went both ways


def test_gradient_norms_equal_a_loop_by_hand():
    module, params, batch = card("updates", "Gradient norms"), make_params(dtype=jnp.float64), double()
    advantage, target = gae_of(batch)

    def loss(params, d):
        return mean(ppo(*linear(params, d["obs"]), d, entropy=0, critic=0.5), d["mask"])

    gradient, limits, norms = jax.jit(jax.grad(loss)), {"policy": 0.1, "value": 1}, {"policy": [], "value": []}
    expected, moments = params, (jax.tree.map(np.zeros_like, params),) * 2
    for step, (d,) in enumerate(cut(data_of(batch, advantage=advantage, target=target))):
        g = jax.tree.map(np.asarray, gradient(expected, d))
        for name, limit in limits.items():
            norms[name].append(norm_of(g[name]))
            g[name] = min(1, limit / norms[name][-1]) * g[name]
        direction, moments = adam(g, moments, step + 1, 1e-5)
        expected = jax.tree.map(lambda p, u: p - 3e-4 * u, expected, direction)
    options = {"gradient_metrics": module.norms}
    learner = pp.learner(module.evaluate, given(module.pipeline), module.optimizer, **options)
    state, metrics = jax.jit(learner.update)(KEY, learner.init(params), batch)
    assert_equal(state.params, expected)
    for name, limit in limits.items():
        np.testing.assert_allclose(metrics[f"grad_norm_{name}"], np.mean(norms[name]))
        assert max(norms[name]) > limit  # the clip acts


@pytest.mark.parametrize(("max_deviation", "least"), [(0.05, 0.0), (10.0, 0.99)])
def test_early_stop_equals_a_loop_by_hand(max_deviation, least):
    params = make_params(dtype=jnp.float64)
    batch = double(masked=False, behavior=params)
    rows = np.stack([np.roll(MINIBATCHES, shift, axis=1 - shift % 2) for shift in range(5)])  # five epochs of two
    advantage, target = gae_of(batch)

    def ratio_of(params, d):
        return jnp.exp(chosen(d["obs"] @ params["policy"], d["action"]) - d["log_prob"])

    def loss(params, d):
        logits, value = linear(params, d["obs"])
        policy = -ratio_of(params, d) * normalized(d["advantage"], d["mask"]) - 0.01 * entropy_of(logits)
        return mean(policy + 0.25 * (value - d["target"]) ** 2, d["mask"])

    gradient = jax.jit(jax.grad(loss))

    @jax.jit
    def measures(params, d):
        ratio = ratio_of(params, d)
        return jnp.mean(jnp.abs(ratio - 1)), jnp.sum(ratio) ** 2 / len(ratio) / jnp.sum(ratio**2)

    expected, applied, sizes = params, 0, []
    for (d,) in cut(data_of(batch, advantage=advantage, target=target), rows.reshape(10, -1)):
        deviation, size = measures(expected, d)
        sizes.append(size)
        if deviation > max_deviation or size < least:
            break
        expected = jax.tree.map(lambda p, g: p - RATE * g, expected, gradient(expected, d))
        applied += 1
    pipeline = given(card("updates", "Your own early stop").espo(max_deviation, least), indices=rows)
    state, metrics = train(pipeline, params, [batch], categorical)
    assert_equal(state.params, expected)
    assert (metrics[0]["minibatches"], metrics[0]["early_stopped"]) == (applied, 1)
    assert 0 < applied < 10
    np.testing.assert_allclose(metrics[0]["sample_size"], min(sizes))
