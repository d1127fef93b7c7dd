"""The code of the cards on values.md, run by the learner, equals loops written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from tests.common import ACTIONS, OBS, TIME, make_params
from tests.docs.cards import (
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


def test_decoupled_lambdas_equal_a_loop_by_hand():
    params, batch = make_params(dtype=jnp.float64), double()
    (advantage, other), (_, target) = gae_of(batch), gae_of(batch, gae_lambda=1)
    data = data_of(batch, advantage=advantage, target=target)
    state, _ = train(given(card("values", "Decoupled lambdas", 1).pipeline), params, [batch], categorical)
    assert_equal(state.params, descend(lambda p, d: mean(ppo(*linear(p, d["obs"]), d), d["mask"]), params, cut(data)))
    assert np.max(np.abs(target - other)) > 0.1


def test_hl_gauss_equals_a_loop_by_hand():
    module, batch = card("values", "HL-Gauss"), double()
    edges = np.linspace(-10, 10, 52)
    params = {
        "policy": make_params(dtype=jnp.float64)["policy"],
        "value": jnp.asarray(np.random.default_rng(1).normal(size=(OBS, 51))),
    }
    advantage, target = gae_of(batch)
    normal = np.vectorize(lambda x: 0.5 * (1 + jax.scipy.special.erf(x / np.sqrt(2))))
    cdf = normal((edges - np.clip(target, -10, 10)[..., None]) / (0.75 * (edges[1] - edges[0])))
    histogram = np.diff(cdf, axis=-1) / (cdf[..., -1:] - cdf[..., :1])

    def loss(params, d):
        logits = d["obs"] @ params["policy"]
        ratio = jnp.exp(chosen(logits, d["action"]) - d["log_prob"])
        policy = clipped(ratio, normalized(d["advantage"], d["mask"])) - 0.01 * entropy_of(logits)
        value = -jnp.sum(d["histogram"] * log_probs(d["obs"] @ params["value"]), axis=-1)
        return mean(policy + 0.5 * value, d["mask"])

    state, metrics = train(given(module.pipeline), params, [batch], module.evaluate)
    assert_equal(state.params, descend(loss, params, cut(data_of(batch, advantage=advantage, histogram=histogram))))
    assert metrics[0]["outside_bins"] == 0
    far = batch.replace(reward=batch.reward.at[0, 0].set(1e6))
    _, metrics = train(given(module.pipeline), params, [far], module.evaluate)
    assert metrics[0]["outside_bins"] > 0
    assert pp.nonfinite_report(metrics[0]) is None


def test_popart_equals_a_loop_by_hand_and_keeps_values():
    module, policy = card("values", "PopArt"), make_params(dtype=jnp.float64)
    start = {"w": policy["value"], "b": jnp.zeros(()), "mean": jnp.zeros(()), "scale": jnp.ones(())}
    params = {"policy": policy["policy"], "critic": jax.tree.map(lambda x: x.astype(jnp.float64), start)}
    batches = [double(seed).replace(reward=100 + 10 * double(seed).reward) for seed in range(2)]

    def loss(trained, d, mean_, scale):
        logits = d["obs"] @ trained["policy"]
        n = d["obs"] @ trained["w"] + trained["b"]
        ratio = jnp.exp(chosen(logits, d["action"]) - d["log_prob"])
        policy = clipped(ratio, normalized(d["advantage"], d["mask"])) - 0.01 * entropy_of(logits)
        return mean(policy + 0.25 * (n - (d["target"] - mean_) / scale) ** 2, d["mask"])

    trained = {"policy": policy["policy"], "w": policy["value"], "b": jnp.zeros(())}
    first, second, center, scale = 0.0, 1.0, 0.0, 1.0
    for batch in batches:
        advantage, target = gae_of(batch)
        data = data_of(batch, advantage=advantage, target=target)
        first = 0.99 * first + 0.01 * float(mean(data["target"], data["mask"]))
        second = 0.99 * second + 0.01 * float(mean(data["target"] ** 2, data["mask"]))
        new_scale = np.sqrt(second - first**2)
        before = scale * (data["obs"] @ trained["w"] + trained["b"]) + center
        trained |= {"w": scale / new_scale * trained["w"], "b": (scale * trained["b"] + center - first) / new_scale}
        center, scale = first, new_scale
        after = scale * (data["obs"] @ trained["w"] + trained["b"]) + center
        np.testing.assert_allclose(after, before, atol=1e-9)
        trained = descend(loss, trained, [(d, center, scale) for (d,) in cut(data)])
    expected = {
        "policy": trained["policy"],
        "critic": {"w": trained["w"], "b": trained["b"], "mean": jnp.asarray(center), "scale": jnp.asarray(scale)},
    }
    state, metrics = train(given(module.pipeline), params, batches, module.evaluate)
    assert_equal(state.params, expected)
    assert metrics[1]["target_scale"] > 10


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_group_advantages_equal_a_loop_by_hand(name):
    module, segments, group = card("values", "Without a critic"), 8, 4
    batch = double(1, shape=(TIME, segments), masked=False).replace(value=None, next_value=None)
    params = {"policy": make_params(dtype=jnp.float64)["policy"]}
    lengths, returns = [], []
    for n in range(segments):
        ends = np.flatnonzero(np.maximum(batch.terminated[:, n], batch.truncated[:, n]))
        lengths.append(int(ends[0]) + 1 if len(ends) else TIME)
        returns.append(float(jnp.sum(batch.reward[: lengths[n], n])))
    assert len(set(lengths)) > 2
    advantage = np.zeros(segments)
    for n in range(segments):
        members = [m for m in range(segments) if m // group == n // group]
        others = [returns[m] for m in members if m != n]
        all_of_them = [returns[m] for m in members]
        if name == "grpo":
            advantage[n] = (returns[n] - np.mean(all_of_them)) / (np.std(all_of_them) + 1e-8)
        else:
            advantage[n] = returns[n] - np.mean(others)

    def segment_loss(params, n):
        obs, action, old = (x[: lengths[n], n] for x in (batch.obs, batch.action, batch.log_prob))
        log_prob = chosen(obs @ params["policy"], action)
        if name == "rloo":
            return -advantage[n] * jnp.sum(log_prob)
        to_reference = chosen(obs @ reference_policy, action) - log_prob
        kl = jnp.exp(to_reference) - to_reference - 1
        return jnp.mean(clipped(jnp.exp(log_prob - old), advantage[n]) + 0.04 * kl)

    reference_policy, expected = params["policy"], params
    order = [[5, 0, 3, 6], [1, 7, 2, 4]]
    for indices in order if name == "grpo" else [range(segments)]:
        expected = descend(lambda p, rows=indices: sum(segment_loss(p, n) for n in rows) / len(rows), expected, [()])
    pipeline = given(module.grpo, "segment", order) if name == "grpo" else module.rloo
    state, _ = train(pipeline, params, [batch], module.evaluate)
    assert_equal(state.params, expected)


def test_ppg_equals_a_loop_by_hand():
    module, rng, every, epochs = card("values", "Phasic policy gradient"), np.random.default_rng(0), 2, 3
    shapes = {"body": (OBS, 5), "logits": (5, ACTIONS), "value": (5,)}
    params = {"policy": {name: rng.normal(size=shape) for name, shape in shapes.items()}, "value": rng.normal(size=OBS)}
    params = jax.tree.map(jnp.asarray, params)
    batches = [double(seed) for seed in range(4)]
    like = jax.eval_shape(
        lambda b: pp.Batch(obs=b.obs, action=b.action, log_prob=b.log_prob, target=b.value, mask=b.mask), batches[0]
    )
    # One minibatch: the order within it does not matter.
    pipeline = module.phasic(like, num_rollouts=every, num_minibatches=1, auxiliary_epochs=epochs)
    rates = {"policy": 0.3, "value": 0.2, "auxiliary": 0.1}

    def heads(policy, obs):
        features = jnp.tanh(obs @ policy["body"])
        return features @ policy["logits"], features @ policy["value"]

    def policy_loss(policy, d):
        logits, _ = heads(policy, d["obs"])
        ratio = jnp.exp(chosen(logits, d["action"]) - d["log_prob"])
        loss = clipped(ratio, normalized(d["advantage"], d["mask"])) - 0.01 * entropy_of(logits)
        return mean(loss, d["mask"])

    def value_loss(value, d):
        return mean(0.5 * (d["obs"] @ value - d["target"]) ** 2, d["mask"])

    def joint_loss(policy, d):
        logits, value = heads(policy, d["obs"])
        old, new = log_probs(d["old"]), log_probs(logits)
        clone = jnp.sum(jnp.exp(old) * (old - new), axis=-1)
        return mean(0.5 * (value - d["target"]) ** 2 + clone, d["mask"])

    policy, value, buffer = params["policy"], params["value"], []
    for batch in batches:
        advantage, target = gae_of(batch, gamma=0.999)
        data = data_of(batch, advantage=advantage, target=target)
        policy = descend(policy_loss, policy, [(data,)], rates["policy"])
        value = descend(value_loss, value, [(data,)], rates["value"])
        buffer.append(data)
        if len(buffer) == every:
            stored = {name: jnp.concatenate([d[name] for d in buffer]) for name in data}
            stored["old"] = heads(policy, stored["obs"])[0]
            policy = descend(joint_loss, policy, [(stored,)] * epochs, rates["auxiliary"])
            value = descend(value_loss, value, [(stored,)] * epochs, rates["auxiliary"])
            buffer = []
    optimizer = {name: optax.sgd(rate) for name, rate in rates.items()}
    state, metrics = train(pipeline, params, batches, module.evaluate, optimizer)
    assert_equal(state.params, {"policy": policy, "value": value})
    assert [int(m["auxiliary/minibatches"]) for m in metrics] == [0, epochs, 0, epochs]
    assert metrics[1]["auxiliary/kl_penalty"] > 0


def test_lagrangian_equals_a_loop_by_hand():
    module, rng, limit = card("values", "Constraints", 1), np.random.default_rng(2), 0.45
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
