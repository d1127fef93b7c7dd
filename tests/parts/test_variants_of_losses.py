"""The first ten pages of docs/variants: their very code, run by the learner, is equal to loops written by hand.

The loops are plain JAX in float64: explicit losses, `jax.grad` and gradient descent. Nothing of the package is in them.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from tests import reference
from tests.common import ACTIONS, OBS, SEGMENTS, TIME, make_params, rollout
from tests.docs.test_docs import ROOT, blocks

KEY, RATE = jax.random.key(0), 0.3
MINIBATCHES = np.random.default_rng(3).permutation(TIME * SEGMENTS).reshape(2, -1)


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def page(name, number=None):
    """What the code of a page defines, or the first blocks of it."""
    module = types.ModuleType(name)
    for source, _, _ in blocks(ROOT / "docs" / "variants" / f"{name}.md")[:number]:
        exec(source, vars(module))
    return module


def given(pipeline, axis="step", indices=MINIBATCHES):
    """The chain of a page with minibatches that the loop by hand can have, too."""
    known = pp.given_indices(indices, axis)
    return pp.chain(*(known if isinstance(part, type(known)) else part for part in pipeline.parts))


def train(pipeline, params, batches, evaluate, optimizer=None):
    """One update for each batch: the last state and all metrics."""
    learner = pp.learner(evaluate, pipeline, optimizer or optax.sgd(RATE))
    state, update, metrics = learner.init(params, KEY), jax.jit(learner.update), []
    for batch in batches:
        state, measured = update(KEY, state, batch)
        metrics.append(measured)
    return state, metrics


def assert_equal(actual, expected):
    """To 1e-6, and much closer where nothing but the order of sums differs."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert x.dtype == jnp.float64
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9)


def double(seed=0, **options):
    return rollout(seed, dtype=jnp.float64, **options)


def data_of(batch, **more):
    """A rollout as plain arrays `[T * N, ...]`, with the advantages and targets of the reference."""
    fields = ("obs", "action", "log_prob", "value", "reward", "mask")
    data = {name: getattr(batch, name) for name in fields} | more
    if batch.mask is None:
        data["mask"] = jnp.ones(batch.log_prob.shape)
    return {name: jnp.asarray(x).reshape(-1, *np.shape(x)[2:]) for name, x in data.items()}


def gae_of(batch, gamma=0.99, gae_lambda=0.95, **other):
    fields = {name: getattr(batch, name) for name in ("reward", "value", "next_value", "terminated", "truncated")}
    return reference.gae(**{**fields, **other}, mask=batch.mask, gamma=gamma, gae_lambda=gae_lambda)


def mean(x, mask):
    return jnp.sum(x * mask) / jnp.sum(mask)


def normalized(advantage, mask):
    centred = advantage - mean(advantage, mask)
    return centred / (jnp.sqrt(mean(centred**2, mask)) + 1e-8)


def log_probs(logits):
    return logits - jax.scipy.special.logsumexp(logits, axis=-1, keepdims=True)


def chosen(logits, action):
    return jnp.take_along_axis(log_probs(logits), action[..., None], axis=-1)[..., 0]


def entropy_of(logits):
    return -jnp.sum(jnp.exp(log_probs(logits)) * log_probs(logits), axis=-1)


def clipped(ratio, advantage, low=0.2, high=0.2):
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - low, 1 + high) * advantage)


@functools.cache
def step_of(loss):
    """A step of gradient descent, which is compiled once for all descents of a loss."""
    return jax.jit(
        lambda params, rate, *data: jax.tree.map(lambda p, g: p - rate * g, params, jax.grad(loss)(params, *data))
    )


def descend(loss, params, minibatches, rate=RATE):
    """Gradient descent, one step for each minibatch; what differs between descents has to be data of the loss."""
    for data in minibatches:
        params = step_of(loss)(params, rate, *data)
    return params


def cut(data, minibatches=MINIBATCHES):
    return [({name: x[rows] for name, x in data.items()},) for rows in minibatches]


def categorical(params, batch):
    return pp.distributions.Categorical(batch.obs @ params["policy"]), batch.obs @ params["value"]


# --- other surrogates ------------------------------------------------------------------------------------------------

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

    state, metrics = train(given(page(name).pipeline), params, [batch], categorical)
    assert_equal(state.params, by_hand(SURROGATES[name]))
    ordinary = by_hand(clipped)
    assert float(jnp.max(jnp.abs(state.params["policy"] - ordinary["policy"]))) > 1e-4  # the variant is at work
    assert metrics[0]["ratio_max"] > 3


# --- parts with a state ----------------------------------------------------------------------------------------------


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
    module = page("adaptive_kl_penalty")
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
    state, metrics = train(given(page("ppo_ewma").pipeline), params, batches, categorical)
    assert_equal(state.params, expected)
    assert abs(float(metrics[1]["off_policy_weight"]) - 1) > 1e-3


def test_popart_equals_a_loop_by_hand_and_keeps_values():
    module, policy = page("popart"), make_params(dtype=jnp.float64)
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


# --- networks that return more ---------------------------------------------------------------------------------------


def test_hl_gauss_equals_a_loop_by_hand():
    module, batch = page("hl_gauss"), double()
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


def test_rnd_equals_a_loop_by_hand():
    module, size = page("rnd"), 4  # CartPole's observations
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


def test_ppg_equals_a_loop_by_hand():
    module, rng, every, epochs = page("ppg"), np.random.default_rng(0), 2, 3
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
    assert metrics[1]["auxiliary/clone_kl"] > 0


# --- no critic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_group_advantages_equal_a_loop_by_hand(name):
    module, segments, group = page("grpo_and_rloo"), 8, 4
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
