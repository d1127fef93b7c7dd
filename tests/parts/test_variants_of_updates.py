"""The other pages of docs/variants: their very code, run by the learner, is equal to loops written by hand."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from tests.common import ACTIONS, OBS, SEGMENTS, TIME, make_params
from tests.docs.test_docs import ROOT, blocks
from tests.parts.test_variants_of_losses import (
    KEY,
    MINIBATCHES,
    RATE,
    assert_equal,
    categorical,
    chosen,
    clipped,
    cut,
    data_of,
    descend,
    double,
    double_precision,  # noqa: F401 (a fixture that every test uses)
    entropy_of,
    gae_of,
    given,
    log_probs,
    mean,
    normalized,
    page,
    train,
)


def in_double(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def ppo(logits, value, d, entropy=0.01, critic=0.25):
    """What PPO's three losses sum to, of each element."""
    ratio = jnp.exp(chosen(logits, d["action"]) - d["log_prob"])
    policy = clipped(ratio, normalized(d["advantage"], d["mask"])) - entropy * entropy_of(logits)
    return policy + critic * (value - d["target"]) ** 2


def linear(params, obs):
    return obs @ params["policy"], obs @ params["value"]


# --- further data ----------------------------------------------------------------------------------------------------


def test_behavior_cloning_equals_a_loop_by_hand():
    params, rng = make_params(dtype=jnp.float64), np.random.default_rng(5)
    obs, action = rng.normal(size=(8, OBS)), rng.integers(ACTIONS, size=8)
    demonstrations = jnp.asarray(obs), jnp.asarray(action)
    batches = [double(seed).replace(shared={"demonstrations": demonstrations}) for seed in range(2)]

    def loss(params, d, obs, action, coef):
        logits, value = linear(params, d["obs"])
        policy = clipped(jnp.exp(chosen(logits, d["action"]) - d["log_prob"]), d["advantage"])
        cloning = -jnp.mean(chosen(obs @ params["policy"], action))
        return mean(policy + 0.25 * (value - d["target"]) ** 2, d["mask"]) + coef * cloning

    expected = params
    for coef, batch in zip([1, 0.99], batches, strict=True):
        advantage, target = gae_of(batch)
        minibatches = cut(data_of(batch, advantage=advantage, target=target))
        shares = [(obs[:4], action[:4], coef), (obs[4:], action[4:], coef)]
        expected = descend(loss, expected, [(d, *share) for (d,), share in zip(minibatches, shares, strict=True)])
    state, _ = train(given(page("imitation").cloning), params, batches, categorical)
    assert_equal(state.params, expected)


def test_self_imitation_equals_a_loop_by_hand():
    params, batches, epochs = make_params(dtype=jnp.float64), [double(seed) for seed in range(3)], 2
    keep = ("obs", "action", "log_prob", "mask")
    like = pp.Batch(**{name: getattr(batches[0], name) for name in keep}, extras={"returns": batches[0].value})
    # One minibatch: the order within it does not matter.
    pipeline = page("imitation").imitating(like, num_rollouts=2, num_minibatches=1, num_epochs=epochs)

    def loss(params, d):
        logits, value = linear(params, d["obs"])
        policy = clipped(jnp.exp(chosen(logits, d["action"]) - d["log_prob"]), d["advantage"])
        return mean(policy + 0.25 * (value - d["target"]) ** 2, d["mask"])

    def imitation_loss(params, d, better):
        logits, value = linear(params, d["obs"])
        policy = -chosen(logits, d["action"]) * better
        return mean(policy + 0.005 * jnp.maximum(d["returns"] - value, 0) ** 2, d["mask"])

    expected, stored = params, []
    for batch in batches:
        advantage, target = gae_of(batch)
        _, returns = gae_of(batch, gae_lambda=1)
        data = data_of(batch, advantage=advantage, target=target, returns=returns)
        expected = descend(loss, expected, [(data,)] * epochs)
        stored = [*stored, data][-2:]
        old = {name: np.concatenate([d[name] for d in stored]) for name in data}
        for _ in range(epochs):
            better = np.maximum(old["returns"] - old["obs"] @ np.asarray(expected["value"]), 0)
            expected = descend(imitation_loss, expected, [(old, better)], 0.1)
    optimizer = {"ppo": optax.sgd(RATE), "imitation": optax.sgd(0.1)}
    state, metrics = train(pipeline, params, batches, categorical, optimizer)
    assert_equal(state.params, expected)
    assert 0 < metrics[-1]["imitation/better_share"] < 1


def test_distillation_equals_a_loop_by_hand():
    module, params = types.ModuleType("distillation"), make_params(dtype=jnp.float64)
    exec(blocks(ROOT / "docs" / "variants" / "distillation.md")[0][0], vars(module))  # without what it trains
    of_teacher, batches = make_params(7, jnp.float64)["policy"], [double(seed) for seed in range(2)]

    def teacher(params, batch):
        return pp.Output(pp.distributions.Categorical(batch.obs @ params))

    def loss(params, d, coef):
        target, logits = log_probs(d["obs"] @ of_teacher), d["obs"] @ params["policy"]
        return coef * mean(jnp.sum(jnp.exp(target) * (target - log_probs(logits)), axis=-1), d["mask"])

    expected = params
    for coef, batch in zip([1, 0.75], batches, strict=True):
        expected = descend(loss, expected, [(d, coef) for (d,) in cut(data_of(batch))])
    part = module.distill(teacher, of_teacher, coef=pp.linear_schedule(1.0, 0.0, 4))
    state, _ = train(pp.chain(pp.given_indices(MINIBATCHES), part), params, batches, categorical)
    assert_equal(state.params, expected)


def test_decoupled_lambdas_equal_a_loop_by_hand():
    params, batch = make_params(dtype=jnp.float64), double()
    (advantage, other), (_, target) = gae_of(batch), gae_of(batch, gae_lambda=1)
    data = data_of(batch, advantage=advantage, target=target)
    state, _ = train(given(page("decoupled_lambdas").pipeline), params, [batch], categorical)
    assert_equal(state.params, descend(lambda p, d: mean(ppo(*linear(p, d["obs"]), d), d["mask"]), params, cut(data)))
    assert np.max(np.abs(target - other)) > 0.1


# --- further observations --------------------------------------------------------------------------------------------


def test_lagrangian_equals_a_loop_by_hand():
    module, rng, limit = page("lagrangian", 1), np.random.default_rng(2), 0.45
    shapes = {"policy": (OBS, ACTIONS), "value": (OBS,), "value_cost": (OBS,)}
    params = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}
    batches = []
    for seed in range(2):
        batch = double(seed)
        extras = {name: jnp.asarray(rng.normal(size=batch.reward.shape)) for name in ("value_cost", "next_value_cost")}
        cost = jnp.asarray(rng.uniform(seed, 1, size=batch.reward.shape))  # above the limit at last
        batches.append(batch.replace(extras={"cost": cost, **extras}))

    def loss(params, d):
        critic = 0.25 * (d["obs"] @ params["value_cost"] - d["target_cost"]) ** 2
        return mean(ppo(*linear(params, d["obs"]), d, entropy=0.0) + critic, d["mask"])

    expected, multiplier, multipliers = params, 0.0, []
    for batch in batches:
        advantage, target = gae_of(batch)
        values = {name: batch.extras[f"{name}_cost"] for name in ("value", "next_value")}
        advantage_cost, target_cost = gae_of(batch, reward=batch.extras["cost"], **values)
        mask = jnp.ones(batch.reward.shape) if batch.mask is None else batch.mask
        multiplier = max(0.0, multiplier + 0.1 * (float(mean(batch.extras["cost"], mask)) - limit))
        mixed = (advantage - multiplier * advantage_cost) / (1 + multiplier)
        expected = descend(loss, expected, cut(data_of(batch, advantage=mixed, target=target, target_cost=target_cost)))
        multipliers.append(multiplier)
    assert multipliers[1] > multipliers[0]
    state, metrics = train(given(module.constrained(limit)), params, batches, module.evaluate)
    assert_equal(state.params, expected)
    np.testing.assert_allclose([m["multiplier"] for m in metrics], multipliers, rtol=1e-12)


@pytest.mark.lenient_ranks
def test_caps_equals_a_loop_by_hand():
    module, rng, size = page("caps"), np.random.default_rng(6), 2
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
    module, params, batch = page("drac"), make_params(dtype=jnp.float64), double()
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


# --- the optimizer and the stop --------------------------------------------------------------------------------------


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
    module, params, rate = page("kl_adaptive_rate"), make_params(dtype=jnp.float64), 1e-3
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


@pytest.mark.parametrize(
    ("rate", "kl", "expected"),
    [(1.2e-5, 1, 1e-5), (9e-3, 0.001, 1e-2), (1e-3, 0, 1e-3), (1e-3, 0.01, 1e-3), (1e-3, 0.021, 1e-3 / 1.5)],
)
def test_kl_adaptive_rate_keeps_its_bounds(rate, kl, expected):
    link = pp.optim.scale_by_kl_adaptive_rate(rate, target_kl=0.01)
    params = jnp.ones(())
    updates, _ = link.update(params, link.init(params), metrics={"approx_kl": jnp.asarray(kl, float)})
    np.testing.assert_allclose(updates, -expected)


def test_kl_adaptive_rate_names_the_missing_metric():
    link, params = pp.optim.scale_by_kl_adaptive_rate(1e-3, target_kl=0.01), jnp.ones(())
    for extra in ({}, {"metrics": {"loss": params}}):
        with pytest.raises(ValueError, match=r"the metric 'approx_kl' does not exist.*policy_diagnostics"):
            link.update(params, link.init(params), **extra)
    with pytest.raises(ValueError, match="target_kl must lie in"):
        pp.optim.scale_by_kl_adaptive_rate(1e-3, target_kl=0.0)


def test_kl_adaptive_rate_takes_traced_hyperparameters():
    link = optax.inject_hyperparams(pp.optim.scale_by_kl_adaptive_rate)(learning_rate=1e-3, target_kl=0.01)
    params = jnp.ones(())
    jax.eval_shape(lambda state: link.update(params, state, metrics={"approx_kl": params}), link.init(params))


def test_kl_adaptive_rate_is_nan_if_a_traced_hyperparameter_is_out_of_range():
    def first_rate(learning_rate, target_kl, low):
        return pp.optim.scale_by_kl_adaptive_rate(learning_rate, target_kl=target_kl, low=low).init(None).learning_rate

    traced = jax.jit(first_rate)
    assert np.isnan([traced(-1.0, 0.01, 1e-5), traced(1e-3, -0.01, 1e-5), traced(1e-3, 0.01, -1e-5)]).all()
    np.testing.assert_allclose([traced(1e-3, 0.01, 1e-5), jax.jit(lambda x: first_rate(1e-3, 0.01, x))(1e-5)], 1e-3)


def test_gradient_norms_equal_a_loop_by_hand():
    module, params, batch = page("gradient_norms"), make_params(dtype=jnp.float64), double()
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
    pipeline = given(page("early_stop").espo(max_deviation, least), indices=rows)
    state, metrics = train(pipeline, params, [batch], categorical)
    assert_equal(state.params, expected)
    assert (metrics[0]["minibatches"], metrics[0]["early_stopped"]) == (applied, 1)
    assert 0 < applied < 10
    np.testing.assert_allclose(metrics[0]["sample_size"], min(sizes))


# --- networks --------------------------------------------------------------------------------------------------------


def dense(layer, x, kernel, bias):
    return x @ layer[kernel] + layer[bias]


@pytest.mark.lenient_ranks
def test_nnx_equals_a_loop_by_hand():
    from flax import nnx

    module, batch = page("equinox_and_nnx"), double()
    params = in_double(module.policy.init(KEY))
    start = nnx.to_pure_dict(params)

    def loss(params, d):
        layers = {name: lambda x, layer=layer: dense(layer, x, "kernel", "bias") for name, layer in params.items()}
        features = jnp.tanh(layers["hidden"](d["obs"]))
        return mean(ppo(layers["policy"](features), layers["value"](features)[:, 0], d, entropy=0), d["mask"])

    advantage, target = gae_of(batch)
    state, _ = train(given(module.pipeline), params, [batch], module.policy)
    expected = descend(loss, start, cut(data_of(batch, advantage=advantage, target=target)))
    assert_equal(nnx.to_pure_dict(state.params), expected)
    learner = pp.learner(module.policy, module.pipeline, optax.sgd(1.0))
    with pytest.raises(TypeError, match="partition a network module first"):
        learner.init({"function": jnp.tanh})


@pytest.mark.lenient_ranks
def test_equinox_equals_a_loop_by_hand():
    pytest.importorskip("equinox")
    module, batch = types.ModuleType("equinox_and_nnx"), double()
    for source, _, _ in blocks(ROOT / "docs" / "variants" / "equinox_and_nnx.md"):
        exec(source, vars(module))
    params = in_double(module.policy.init(KEY))
    names = ("hidden", "policy", "value")
    start = {name: {"w": getattr(params, name).weight, "b": getattr(params, name).bias} for name in names}

    def loss(params, d):
        hidden, policy, value = (params[name] for name in names)
        features = jnp.tanh(d["obs"] @ hidden["w"].T + hidden["b"])
        values = features @ value["w"][0] + value["b"]
        return mean(ppo(features @ policy["w"].T + policy["b"], values, d, entropy=0), d["mask"])

    advantage, target = gae_of(batch)
    state, _ = train(given(module.pipeline), params, [batch], module.policy)
    expected = descend(loss, start, cut(data_of(batch, advantage=advantage, target=target)))
    trained = {name: {"w": getattr(state.params, name).weight, "b": getattr(state.params, name).bias} for name in names}
    assert_equal(trained, expected)


def remembered(module, **fields):
    """A rollout of the page's observations, with resets where episodes end."""
    rng, batch = np.random.default_rng(7), double()
    obs = jnp.asarray(rng.normal(size=(TIME, SEGMENTS, module.OBS)))
    ended = (rng.random(size=(TIME, SEGMENTS)) < 0.2).astype(float)
    reset = jnp.asarray(np.concatenate([[[1, 0, 0, 0]], ended[:-1]]))
    assert np.sum(reset[1:]) >= 3
    return batch.replace(obs=obs, terminated=jnp.asarray(ended), truncated=None, reset=reset, **fields)


@pytest.mark.lenient_ranks
def test_attention_equals_a_loop_by_hand():
    module, rng = page("attention"), np.random.default_rng(8)
    params, window = in_double(jax.jit(module.init)(KEY)), module.K
    carry = {
        "obs": jnp.asarray(rng.normal(size=(SEGMENTS, window - 1, module.OBS))),
        "episode": jnp.asarray([[0, 0, 3], [5, 5, 5], [1, 1, 1], [0, 1, 2]]),
    }
    batch = remembered(module, carry=carry)
    obs, reset, past = (np.asarray(x) for x in (batch.obs, batch.reset, carry["obs"]))
    seen, visible = np.zeros((TIME, SEGMENTS, window, module.OBS)), np.zeros((TIME, SEGMENTS, window))
    for n in range(SEGMENTS):
        history = list(zip(past[n], carry["episode"][n].tolist(), strict=True))
        for t in range(TIME):
            history.append((obs[t, n], history[-1][1] + int(reset[t, n])))
            for back in range(1, window + 1):
                if history[-back][1] == history[-1][1]:
                    seen[t, n, -back], visible[t, n, -back] = history[-back][0], 1
    assert 0.2 < np.mean(visible) < 0.9

    def network(params, d):
        query = d["obs"] @ params["query"]
        scores = jnp.sum(query[:, None] * (d["seen"] @ params["key"]), axis=-1) / np.sqrt(8) + params["position"]
        weights = jnp.exp(scores) * d["visible"]
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return linear(params, jnp.sum(weights[..., None] * (d["seen"] @ params["content"]), axis=1))

    advantage, target = gae_of(batch)
    data = data_of(batch, advantage=advantage, target=target, seen=seen, visible=visible)
    segments = np.array([[2, 0], [1, 3]])
    rows = [np.add.outer(np.arange(TIME) * SEGMENTS, two).ravel() for two in segments]
    state, _ = train(given(module.pipeline, "segment", segments), params, [batch], module.policy)
    expected = descend(lambda p, d: mean(ppo(*network(p, d), d), d["mask"]), params, cut(data, rows))
    assert_equal(state.params, expected)

    evaluate, values = jax.jit(module.evaluate), []
    whole = evaluate(params, pp.Batch(obs=obs, reset=reset, carry=carry))
    for t in range(TIME):  # a step at a time, as the rollout acts, is the same
        output = evaluate(params, pp.Batch(obs=obs[t : t + 1], reset=reset[t : t + 1], carry=carry))
        values, carry = [*values, output.value[0]], output.carry
    np.testing.assert_allclose(np.stack(values), whole.value, rtol=1e-9)
    np.testing.assert_array_equal(carry["episode"], whole.carry["episode"])


def test_burn_in_equals_a_loop_by_hand():
    module, length, burn_in, epochs = page("burn_in"), 2, 2, 2
    params = in_double(jax.jit(module.init)(KEY))
    carry = jnp.asarray(np.random.default_rng(9).normal(size=(SEGMENTS, module.WIDTH)))
    batch = remembered(module, carry=carry)
    # One minibatch: the order within it does not matter.
    pipeline = module.chunked(length, burn_in, num_minibatches=1, num_epochs=epochs)

    def gru(params, h, x):
        (xz, xr, xn), (hz, hr, hn) = ((w[:, :8], w[:, 8:16], w[:, 16:]) for w in (params["inputs"], params["state"]))
        z, r = 1 / (1 + jnp.exp(-(x @ xz + h @ hz))), 1 / (1 + jnp.exp(-(x @ xr + h @ hr)))
        return z * h + (1 - z) * jnp.tanh(x @ xn + r * (h @ hn))

    def loss(params, d):
        states = []
        for first in range(0, TIME, length):
            start = max(first - burn_in, 0)
            h = carry if start == 0 else jnp.zeros_like(carry)
            for t in range(start, first + length):
                h = gru(params, h * (1 - batch.reset[t])[:, None], batch.obs[t])
                states += [h] if t >= first else []
        return mean(ppo(*linear(params, jnp.concatenate(states)), d), d["mask"])

    advantage, target = gae_of(batch)
    data = data_of(batch, advantage=advantage, target=target)
    state, _ = train(pipeline, params, [batch], module.policy)
    assert_equal(state.params, descend(loss, params, [(data,)] * epochs))
