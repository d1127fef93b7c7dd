"""The code of the cards on imitation.md and networks.md, run by the learner, equals loops written by hand."""

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
    in_double,
    linear,
    log_probs,
    mean,
    ppo,
    train,
)

pytestmark = pytest.mark.usefixtures(double_precision.__name__)


def test_rnd_equals_a_loop_by_hand():
    module, size = card("imitation", "Random network distillation"), 4  # CartPole's observations
    rng = np.random.default_rng(0)
    shapes = {"policy": (size, 2), "value": (size,), "value_intrinsic": (size,)}
    networks = {"hidden": (size, 5), "out": (5, 3)}
    params = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    params = jax.tree.map(jnp.asarray, params | {"predictor": {n: rng.normal(size=s) for n, s in networks.items()}})
    steps, envs = 8, 4
    with jax.enable_x64(False):
        single = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        state = module.rollout.init(KEY)
        _, batch, _ = jax.jit(module.rollout.collect)(KEY, single, state)
        batch = jax.tree.map(np.asarray, batch)
    batch = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64 if x.dtype == np.float32 else x.dtype), batch)
    batch = batch.replace(terminated=batch.terminated.at[3, 1].set(True))  # so that there is an end to look beyond
    np.testing.assert_allclose(batch.extras["value_intrinsic"], batch.obs @ params["value_intrinsic"], rtol=1e-4)

    minibatches = rng.permutation(steps * envs).reshape(2, -1)
    pipeline = given(module.pipeline, indices=minibatches)
    learner = pp.learner(module.evaluate, pipeline, optax.sgd(0.01))
    start = learner.init(params, KEY)
    target = pp.part_state(start, pipeline, "rnd_reward").target
    other = pp.part_state(learner.init(params, jax.random.key(1)), pipeline, "rnd_reward").target
    assert not np.allclose(target["out"], other["out"])  # each seed has its own

    def embed(network, obs):
        return jnp.tanh(obs @ network["hidden"]) @ network["out"]

    def loss(params, d):
        logits = d["obs"] @ params["policy"]
        ratio = jnp.exp(chosen(logits, d["action"]) - d["log_prob"])
        policy = clipped(ratio, d["advantage"], 0.1, 0.1) - 0.001 * entropy_of(logits)
        extrinsic = 0.25 * (d["obs"] @ params["value"] - d["target"]) ** 2
        intrinsic = 0.25 * (d["obs"] @ params["value_intrinsic"] - d["target_intrinsic"]) ** 2
        error = jnp.mean((embed(params["predictor"], d["next_obs"]) - embed(target, d["next_obs"])) ** 2, axis=-1)
        return jnp.mean(policy + extrinsic + intrinsic + error)

    expected, discounted, moments = params, np.zeros(envs), []
    for _ in range(2):
        error = embed(expected["predictor"], batch.next_obs) - embed(target, batch.next_obs)
        error, returns = np.mean(np.square(error), axis=-1), []
        for t in range(steps):
            discounted = 0.99 * discounted + error[t]
            returns.append(discounted)
        moments.append((np.mean(returns), np.mean(np.square(returns))))
        first, second = np.mean(moments, axis=0)
        reward = error / np.sqrt(second - first**2 + 1e-8)
        advantage, value_target = gae_of(batch, gamma=0.999)
        intrinsic, intrinsic_target = gae_of(
            batch,
            reward=reward,
            value=batch.extras["value_intrinsic"],
            next_value=batch.extras["next_value_intrinsic"],
            terminated=np.zeros((steps, envs)),
        )
        data = data_of(
            batch,
            advantage=2 * advantage + intrinsic,
            target=value_target,
            target_intrinsic=intrinsic_target,
            next_obs=batch.next_obs,
        )
        expected = descend(loss, expected, cut(data, minibatches), 0.01)
    state, metrics = train(pipeline, params, [batch, batch], module.evaluate, optax.sgd(0.01))
    assert_equal(state.params, expected)
    np.testing.assert_allclose(metrics[1]["rnd_reward"], np.mean(reward))


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
    state, _ = train(given(card("imitation", "Cloning and self-imitation").cloning), params, batches, categorical)
    assert_equal(state.params, expected)


def test_self_imitation_equals_a_loop_by_hand():
    params, batches, epochs = make_params(dtype=jnp.float64), [double(seed) for seed in range(3)], 2
    keep = ("obs", "action", "log_prob", "mask")
    like = pp.Batch(**{name: getattr(batches[0], name) for name in keep}, extras={"returns": batches[0].value})
    # One minibatch: the order within it does not matter.
    pipeline = card("imitation", "Cloning and self-imitation").imitating(
        like, num_rollouts=2, num_minibatches=1, num_epochs=epochs
    )

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
    assert 0 < metrics[-1]["imitation/own/self_imitation_fraction"] < 1


def test_distillation_equals_a_loop_by_hand():
    module, params = card("imitation", "Distillation", 1), make_params(dtype=jnp.float64)  # without what it trains
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


def dense(layer, x, kernel, bias):
    return x @ layer[kernel] + layer[bias]


@pytest.mark.lenient_ranks
def test_nnx_equals_a_loop_by_hand():
    from flax import nnx

    module, batch = card("networks", "flax nnx and equinox", 1), double()
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
    module, batch = card("networks", "flax nnx and equinox"), double()
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
    module, rng = card("networks", "Attention over history"), np.random.default_rng(8)
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
    module, length, burn_in, epochs = card("networks", "Time chunks with burn-in"), 2, 2, 2
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
