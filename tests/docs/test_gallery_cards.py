"""The code of the gallery's cards, run by the learner, equals loops written by hand; see `cards.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from tests.common import ACTIONS, OBS, SEGMENTS, TIME
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
    estimated,
    gae_of,
    given,
    in_double,
    kl_of,
    linear,
    linear_params,
    log_probs,
    mean,
    normal,
    normalized,
    ppo,
    ratio_of,
    train,
    unclipped,
)


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


# --- losses.md --------------------------------------------------------------------------------------------------------

SURROGATES = {
    "dual_clip": lambda r, a: jnp.where(a < 0, jnp.minimum(clipped(r, a), -3 * a), clipped(r, a)),
    "clip_higher": lambda r, a: clipped(r, a, 0.2, 0.28),
    "spo": lambda r, a: -(r * a - jnp.abs(a) / (2 * 0.2) * (r - 1) ** 2),
}


@pytest.mark.parametrize("name", SURROGATES)
def test_surrogate_equals_a_loop_by_hand(name):
    params, batch, rng = linear_params(), double(masked=False), np.random.default_rng(4)
    raised, lowered = (rng.choice(x, size=(TIME, SEGMENTS)) for x in ([0.9, 1.1, 1.25, 2], [0.5, 0.9, 3.2, 4]))
    ratio = np.where(gae_of(batch)[0] > 0, raised, lowered)  # on both sides of every clip
    batch = batch.replace(log_prob=chosen(batch.obs @ params["policy"], batch.action) - np.log(ratio))

    def by_hand(surrogate):
        def loss(params, d):
            return mean(ppo(*linear(params, d["obs"]), d, surrogate=surrogate), d["mask"])

        return descend(loss, params, cut(estimated(batch)))

    state, metrics = train(given(getattr(card("losses", "Other surrogates"), name)), params, [batch], categorical)
    assert_equal(state.params, by_hand(SURROGATES[name]))
    ordinary = by_hand(clipped)
    assert float(jnp.max(jnp.abs(state.params["policy"] - ordinary["policy"]))) > 1e-4  # the variant is at work
    assert metrics[0]["ratio_max"] > 3


def test_adaptive_kl_penalty_equals_a_loop_by_hand():
    params, target_kl, coef, coefs, kls = linear_params(), 0.01, 1.0, [], []
    logits = [jnp.asarray(np.random.default_rng(seed).normal(size=(TIME, SEGMENTS, ACTIONS))) for seed in range(3)]
    logits[1] = double(1).obs @ params["policy"]  # close to the policy that is trained
    batches = []
    for seed, old in enumerate(logits):
        batch, behavior = double(seed), pp.distributions.Categorical(old)
        batches.append(batch.replace(log_prob=behavior.log_prob(batch.action), behavior=behavior))

    def divergence(params, d):
        return kl_of(d["old"], d["obs"] @ params["policy"])

    def loss(params, d, coef):
        losses = ppo(*linear(params, d["obs"]), d, entropy=0, surrogate=unclipped)
        return mean(losses + coef * divergence(params, d), d["mask"])

    expected = params
    for batch, old in zip(batches, logits, strict=True):
        data = estimated(batch, old=old)
        coefs.append(coef)
        expected = descend(loss, expected, [(d, coef) for (d,) in cut(data)], 0.01)
        kls.append(float(mean(divergence(expected, data), data["mask"])))
        coef = coef / 2 if kls[-1] < target_kl / 1.5 else coef * 2 if kls[-1] > 1.5 * target_kl else coef
    pipeline = given(card("losses", "Adaptive KL penalty").pipeline)
    state, metrics = train(pipeline, params, batches, categorical, optax.sgd(0.01))
    assert_equal(state.params, expected)
    np.testing.assert_allclose([m["kl_penalty_coef"] for m in metrics], coefs)
    np.testing.assert_allclose([m["kl_penalty_after"] for m in metrics], [0, *kls[:-1]], atol=1e-9)
    assert coefs == [1, 2, 1]  # it went both ways


def test_ppo_ewma_equals_a_loop_by_hand():
    params, batches, decay = linear_params(), [double(seed) for seed in range(2)], 0.889

    def loss(params, d, proximal):
        logits, value = linear(params, d["obs"])
        middle = chosen(d["obs"] @ proximal["policy"], d["action"])
        surrogate = clipped(ratio_of(logits, d | {"log_prob": middle}), normalized(d["advantage"], d["mask"]))
        policy = jnp.exp(middle - d["log_prob"]) * surrogate
        return mean(policy + 0.25 * (value - d["target"]) ** 2, d["mask"])

    expected, visited = params, []
    for batch in batches:
        for (d,) in cut(estimated(batch)):
            visited.append(expected)
            weights = decay ** np.arange(len(visited))[::-1]
            proximal = jax.tree.map(
                lambda *all, w=weights: sum(a * b for a, b in zip(w, all, strict=True)) / sum(w), *visited
            )
            expected = descend(loss, expected, [(d, proximal)])
    state, metrics = train(given(card("losses", "PPO-EWMA").pipeline), params, batches, categorical)
    assert_equal(state.params, expected)
    assert abs(float(metrics[1]["off_policy_weight"]) - 1) > 1e-3


# --- regularizers.md --------------------------------------------------------------------------------------------------


@pytest.mark.lenient_ranks
def test_caps_equals_a_loop_by_hand():
    module, rng, size = card("regularizers", "CAPS"), np.random.default_rng(6), 2
    params = normal({"policy": (OBS, size), "log_scale": (size,), "value": (OBS,)}, 6, 0.5)
    batch = double().replace(
        action=jnp.asarray(rng.normal(size=(TIME, SEGMENTS, size))),
        next_obs=jnp.asarray(rng.normal(size=(TIME, SEGMENTS, OBS))),
        log_prob=jnp.asarray(rng.normal(size=(TIME, SEGMENTS)) - 3),
    )
    # Before the sampler, the state of `record` is what the loss will read.
    record = pp.Part(lambda params, key: batch.obs, lambda b, s, c: (b, b.extras["perturbed_obs"]), "record")
    parts = given(module.pipeline).parts
    at = [part.name for part in parts].index("given_indices")
    pipeline = pp.chain(*parts[:at], record, *parts[at:])
    learner = pp.learner(module.evaluate, pipeline, optax.sgd(0.01))
    state, metrics = jax.jit(learner.update)(KEY, learner.init(params), batch)
    perturbed = pp.part_state(state, pipeline, "record")
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

    data = estimated(batch, next_obs=batch.next_obs, perturbed=perturbed)
    assert_equal(state.params, descend(loss, params, cut(data), 0.01))
    assert metrics["temporal_distance"] > metrics["spatial_distance"] > 0


def test_drac_equals_a_loop_by_hand():
    module, params, batch = card("regularizers", "DrAC"), linear_params(), double()
    augment = module.random_amplitude(0.6, 1.2)(KEY, jnp.ones((50, OBS)))
    assert 0.6 <= np.min(augment) < 0.8 < 1 < np.max(augment) <= 1.2
    np.testing.assert_array_equal(augment[:, 0], augment[:, 1])

    def loss(params, d, fixed):
        new_logits, new_value = linear(params, 1.5 * d["obs"])
        old_logits, old_value = linear(fixed, d["obs"])
        augmented = 0.1 * (kl_of(old_logits, new_logits) + 0.5 * (old_value - new_value) ** 2)
        return mean(ppo(*linear(params, d["obs"]), d) + augmented, d["mask"])

    expected = params
    for (d,) in cut(estimated(batch, gamma=0.999)):
        expected = descend(loss, expected, [(d, expected)])
    pipeline = given(module.drac(module.random_amplitude(1.5, 1.5)))  # a factor that the loop can have, too
    state, metrics = train(pipeline, params, [batch], categorical)
    assert_equal(state.params, expected)
    assert metrics[0]["augmented_kl"] > 0


# --- updates.md -------------------------------------------------------------------------------------------------------


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
    module, params, rate = card("updates", "KL-adaptive learning rate"), linear_params(), 1e-3
    batches = [double(0), double(1, behavior=params)]  # far away, and nearby

    def loss(params, d):
        return mean(ppo(*linear(params, d["obs"]), d, entropy=0.005, critic=0.5), d["mask"])

    @jax.jit
    def gradient(params, d):
        ratio = ratio_of(d["obs"] @ params["policy"], d)
        return jax.grad(loss)(params, d), mean(ratio - 1 - jnp.log(ratio), d["mask"])

    expected, moments, rates = params, (jax.tree.map(np.zeros_like, params),) * 2, []
    for (d,) in [minibatch for batch in batches for minibatch in cut(estimated(batch))]:
        g, kl = jax.tree.map(np.asarray, gradient(expected, d))
        rate = max(rate / 1.5, 1e-5) if kl > 0.02 else min(rate * 1.5, 1e-2) if 0 < kl < 0.005 else rate
        rates.append(rate)
        scale = min(1, 1 / norm_of(g))
        g = {name: scale * x for name, x in g.items()}
        direction, moments = adam(g, moments, len(rates), 1e-8)
        expected = jax.tree.map(lambda p, u, rate=rate: p - rate * u, expected, direction)
    state, _ = train(given(module.pipeline), params, batches, categorical, module.optimizer)
    assert_equal(state.params, expected)
    np.testing.assert_allclose(optax.tree.get(state.opt_state, "learning_rate"), rates[-1])
    assert rates[0] < 1e-3
    assert rates[-1] > rates[1]  # it went both ways


def test_gradient_norms_equal_a_loop_by_hand():
    module, params, batch = card("updates", "Gradient norms"), linear_params(), double()

    def loss(params, d):
        return mean(ppo(*linear(params, d["obs"]), d, entropy=0, critic=0.5), d["mask"])

    gradient, limits, norms = jax.jit(jax.grad(loss)), {"policy": 0.1, "value": 1}, {"policy": [], "value": []}
    expected, moments = params, (jax.tree.map(np.zeros_like, params),) * 2
    for step, (d,) in enumerate(cut(estimated(batch))):
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
    params = linear_params()
    batch = double(masked=False, behavior=params)
    rows = np.stack([np.roll(MINIBATCHES, shift, axis=1 - shift % 2) for shift in range(5)])  # five epochs of two

    def loss(params, d):
        return mean(ppo(*linear(params, d["obs"]), d, surrogate=unclipped), d["mask"])

    @jax.jit
    def measures(params, d):
        ratio = ratio_of(d["obs"] @ params["policy"], d)
        return jnp.mean(jnp.abs(ratio - 1)), jnp.sum(ratio) ** 2 / len(ratio) / jnp.sum(ratio**2)

    expected, applied, sizes = params, 0, []
    for (d,) in cut(estimated(batch), rows.reshape(10, -1)):
        deviation, size = measures(expected, d)
        sizes.append(size)
        if deviation > max_deviation or size < least:
            break
        expected = descend(loss, expected, [(d,)])
        applied += 1
    pipeline = given(card("updates", "Your own early stop").espo(max_deviation, least), indices=rows)
    state, metrics = train(pipeline, params, [batch], categorical)
    assert_equal(state.params, expected)
    assert (metrics[0]["minibatches"], metrics[0]["early_stopped"]) == (applied, 1)
    assert 0 < applied < 10
    np.testing.assert_allclose(metrics[0]["sample_size"], min(sizes))


# --- values.md --------------------------------------------------------------------------------------------------------


def test_decoupled_lambdas_equal_a_loop_by_hand():
    params, batch = linear_params(), double()
    (_, other), (_, target) = gae_of(batch), gae_of(batch, gae_lambda=1)
    data = estimated(batch, target=target)
    state, _ = train(given(card("values", "Decoupled lambdas", 1).pipeline), params, [batch], categorical)
    assert_equal(state.params, descend(lambda p, d: mean(ppo(*linear(p, d["obs"]), d), d["mask"]), params, cut(data)))
    assert np.max(np.abs(target - other)) > 0.1


def test_hl_gauss_equals_a_loop_by_hand():
    module, batch = card("values", "HL-Gauss"), double()
    edges = np.linspace(-10, 10, 52)
    params = {"policy": linear_params()["policy"], **normal({"value": (OBS, 51)}, 1)}
    _, target = gae_of(batch)
    probability = np.vectorize(lambda x: 0.5 * (1 + jax.scipy.special.erf(x / np.sqrt(2))))
    cdf = probability((edges - np.clip(target, -10, 10)[..., None]) / (0.75 * (edges[1] - edges[0])))
    histogram = np.diff(cdf, axis=-1) / (cdf[..., -1:] - cdf[..., :1])

    def loss(params, d):
        policy = ppo(d["obs"] @ params["policy"], 0, d, critic=0)
        value = -jnp.sum(d["histogram"] * log_probs(d["obs"] @ params["value"]), axis=-1)
        return mean(policy + 0.5 * value, d["mask"])

    state, metrics = train(given(module.pipeline), params, [batch], module.evaluate)
    assert_equal(state.params, descend(loss, params, cut(estimated(batch, histogram=histogram))))
    assert metrics[0]["outside_bins"] == 0
    far = batch.replace(reward=batch.reward.at[0, 0].set(1e6))
    _, metrics = train(given(module.pipeline), params, [far], module.evaluate)
    assert metrics[0]["outside_bins"] > 0
    assert pp.nonfinite_report(metrics[0]) is None


def test_popart_equals_a_loop_by_hand_and_keeps_values():
    module, policy = card("values", "PopArt"), linear_params()
    trained = {"policy": policy["policy"], "w": policy["value"], "b": jnp.zeros(())}
    batches = [double(seed).replace(reward=100 + 10 * double(seed).reward) for seed in range(2)]

    def params_of(trained, center, scale):
        critic = {"w": trained["w"], "b": trained["b"], "mean": jnp.asarray(center), "scale": jnp.asarray(scale)}
        return {"policy": trained["policy"], "critic": critic}

    def loss(trained, d, mean_, scale):
        n = d["obs"] @ trained["w"] + trained["b"]
        return mean(ppo(d["obs"] @ trained["policy"], n, d | {"target": (d["target"] - mean_) / scale}), d["mask"])

    first, second, center, scale = 0.0, 1.0, 0.0, 1.0
    params = params_of(trained, center, scale)
    for batch in batches:
        data = estimated(batch)
        first = 0.99 * first + 0.01 * float(mean(data["target"], data["mask"]))
        second = 0.99 * second + 0.01 * float(mean(data["target"] ** 2, data["mask"]))
        new_scale = np.sqrt(second - first**2)
        before = scale * (data["obs"] @ trained["w"] + trained["b"]) + center
        trained |= {"w": scale / new_scale * trained["w"], "b": (scale * trained["b"] + center - first) / new_scale}
        center, scale = first, new_scale
        after = scale * (data["obs"] @ trained["w"] + trained["b"]) + center
        np.testing.assert_allclose(after, before, atol=1e-9)
        trained = descend(loss, trained, [(d, center, scale) for (d,) in cut(data)])
    state, metrics = train(given(module.pipeline), params, batches, module.evaluate)
    assert_equal(state.params, params_of(trained, center, scale))
    assert metrics[1]["target_scale"] > 10


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_group_advantages_equal_a_loop_by_hand(name):
    module, segments, group = card("values", "Without a critic"), 8, 4
    batch = double(1, shape=(TIME, segments), masked=False).replace(value=None, next_value=None)
    params = {"policy": linear_params()["policy"]}
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
    module, every, epochs = card("values", "Phasic policy gradient"), 2, 3
    params = {"policy": normal({"body": (OBS, 5), "logits": (5, ACTIONS), "value": (5,)}, 0)}
    params |= normal({"value": OBS}, 1)
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
        return mean(ppo(heads(policy, d["obs"])[0], 0, d, critic=0), d["mask"])

    def value_loss(value, d):
        return mean(0.5 * (d["obs"] @ value - d["target"]) ** 2, d["mask"])

    def joint_loss(policy, d):
        logits, value = heads(policy, d["obs"])
        return mean(0.5 * (value - d["target"]) ** 2 + kl_of(d["old"], logits), d["mask"])

    policy, value, buffer = params["policy"], params["value"], []
    for batch in batches:
        data = estimated(batch, gamma=0.999)
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
    params = normal({"policy": (OBS, ACTIONS), "value": (OBS,), "value_cost": (OBS,)}, 2)
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
        values = {name: batch.extras[f"{name}_cost"] for name in ("value", "next_value")}
        advantage_cost, target_cost = gae_of(batch, reward=batch.extras["cost"], **values)
        multiplier = max(0.0, multiplier + 0.1 * (float(mean(batch.extras["cost"], batch.mask)) - limit))
        mixed = (gae_of(batch)[0] - multiplier * advantage_cost) / (1 + multiplier)
        expected = descend(loss, expected, cut(estimated(batch, advantage=mixed, target_cost=target_cost)))
        multipliers.append(multiplier)
    assert multipliers[1] > multipliers[0]
    state, metrics = train(given(module.constrained(limit)), params, batches, module.evaluate)
    assert_equal(state.params, expected)
    np.testing.assert_allclose([m["multiplier"] for m in metrics], multipliers, rtol=1e-12)


# --- imitation.md -----------------------------------------------------------------------------------------------------


def test_rnd_equals_a_loop_by_hand():
    module, size = card("imitation", "Random network distillation"), 4  # CartPole's observations
    params = normal({"policy": (size, 2), "value": (size,), "value_intrinsic": (size,)}, 0)
    params["predictor"] = normal({"hidden": (size, 5), "out": (5, 3)}, 1)
    steps, envs = 8, 4
    with jax.enable_x64(False):
        single = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        _, batch, _ = jax.jit(module.rollout.collect)(KEY, single, module.rollout.init(KEY))
    batch = in_double(batch)
    batch = batch.replace(terminated=batch.terminated.at[3, 1].set(True))  # so that there is an end to look beyond
    np.testing.assert_allclose(batch.extras["value_intrinsic"], batch.obs @ params["value_intrinsic"], rtol=1e-4)

    minibatches = np.random.default_rng(0).permutation(steps * envs).reshape(2, -1)
    pipeline = given(module.pipeline, indices=minibatches)
    learner = pp.learner(module.evaluate, pipeline, optax.sgd(0.01))
    target, other = (
        pp.part_state(learner.init(params, key), pipeline, "rnd_reward").target for key in (KEY, jax.random.key(1))
    )
    assert not np.allclose(target["out"], other["out"])  # each seed has its own

    def embed(network, obs):
        return jnp.tanh(obs @ network["hidden"]) @ network["out"]

    def loss(params, d):
        logits, value = linear(params, d["obs"])
        losses = ppo(logits, value, d, 0.001, surrogate=lambda r, a: clipped(r, a, 0.1, 0.1), normalize=False)
        intrinsic = 0.25 * (d["obs"] @ params["value_intrinsic"] - d["target_intrinsic"]) ** 2
        error = jnp.mean((embed(params["predictor"], d["next_obs"]) - embed(target, d["next_obs"])) ** 2, axis=-1)
        return jnp.mean(losses + intrinsic + error)

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
        fields = {name: batch.extras[f"{name}_intrinsic"] for name in ("value", "next_value")}
        fields |= {"reward": reward, "terminated": np.zeros((steps, envs))}
        intrinsic, intrinsic_target = gae_of(batch, **fields)
        advantage, _ = gae_of(batch, gamma=0.999)
        more = {"target_intrinsic": intrinsic_target, "next_obs": batch.next_obs}
        data = estimated(batch, gamma=0.999, advantage=2 * advantage + intrinsic, **more)
        expected = descend(loss, expected, cut(data, minibatches), 0.01)
    state, metrics = train(pipeline, params, [batch, batch], module.evaluate, optax.sgd(0.01))
    assert_equal(state.params, expected)
    np.testing.assert_allclose(metrics[1]["rnd_reward"], np.mean(reward))


def test_behavior_cloning_equals_a_loop_by_hand():
    params, rng = linear_params(), np.random.default_rng(5)
    obs, action = rng.normal(size=(8, OBS)), rng.integers(ACTIONS, size=8)
    demonstrations = jnp.asarray(obs), jnp.asarray(action)
    batches = [double(seed).replace(shared={"demonstrations": demonstrations}) for seed in range(2)]

    def loss(params, d, obs, action, coef):
        losses = ppo(*linear(params, d["obs"]), d, entropy=0, normalize=False)
        return mean(losses, d["mask"]) - coef * jnp.mean(chosen(obs @ params["policy"], action))

    expected = params
    for coef, batch in zip([1, 0.99], batches, strict=True):
        shares = [(obs[:4], action[:4], coef), (obs[4:], action[4:], coef)]
        minibatches = [(d, *share) for (d,), share in zip(cut(estimated(batch)), shares, strict=True)]
        expected = descend(loss, expected, minibatches)
    state, _ = train(given(card("imitation", "Cloning and self-imitation").cloning), params, batches, categorical)
    assert_equal(state.params, expected)


def test_self_imitation_equals_a_loop_by_hand():
    params, batches, epochs = linear_params(), [double(seed) for seed in range(3)], 2
    keep = ("obs", "action", "log_prob", "mask")
    like = pp.Batch(**{name: getattr(batches[0], name) for name in keep}, extras={"returns": batches[0].value})
    # One minibatch: the order within it does not matter.
    pipeline = card("imitation", "Cloning and self-imitation").imitating(
        like, num_rollouts=2, num_minibatches=1, num_epochs=epochs
    )

    def loss(params, d):
        return mean(ppo(*linear(params, d["obs"]), d, entropy=0, normalize=False), d["mask"])

    def imitation_loss(params, d, better):
        logits, value = linear(params, d["obs"])
        policy = -chosen(logits, d["action"]) * better
        return mean(policy + 0.005 * jnp.maximum(d["returns"] - value, 0) ** 2, d["mask"])

    expected, stored = params, []
    for batch in batches:
        data = estimated(batch, returns=gae_of(batch, gae_lambda=1)[1])
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
    module, params = card("imitation", "Distillation", 1), linear_params()  # without what it trains
    of_teacher, batches = linear_params(7)["policy"], [double(seed) for seed in range(2)]

    def teacher(params, batch):
        return pp.Output(pp.distributions.Categorical(batch.obs @ params))

    def loss(params, d, coef):
        return coef * mean(kl_of(d["obs"] @ of_teacher, d["obs"] @ params["policy"]), d["mask"])

    expected = params
    for coef, batch in zip([1, 0.75], batches, strict=True):
        expected = descend(loss, expected, [(d, coef) for (d,) in cut(data_of(batch))])
    part = module.distill(teacher, of_teacher, coef=pp.linear_schedule(1.0, 0.0, 4))
    state, _ = train(pp.chain(pp.given_indices(MINIBATCHES), part), params, batches, categorical)
    assert_equal(state.params, expected)


# --- networks.md ------------------------------------------------------------------------------------------------------


@pytest.mark.lenient_ranks
def test_nnx_equals_a_loop_by_hand():
    from flax import nnx

    module, batch = card("networks", "flax nnx and equinox", 1), double()
    params = in_double(module.policy.init(KEY))
    start = nnx.to_pure_dict(params)

    def loss(params, d):
        def dense(name, x):
            return x @ params[name]["kernel"] + params[name]["bias"]

        features = jnp.tanh(dense("hidden", d["obs"]))
        return mean(ppo(dense("policy", features), dense("value", features)[:, 0], d, entropy=0), d["mask"])

    state, _ = train(given(module.pipeline), params, [batch], module.policy)
    assert_equal(nnx.to_pure_dict(state.params), descend(loss, start, cut(estimated(batch))))
    learner = pp.learner(module.policy, module.pipeline, optax.sgd(1.0))
    with pytest.raises(TypeError, match="partition a network module first"):
        learner.init({"function": jnp.tanh})


@pytest.mark.lenient_ranks
def test_equinox_equals_a_loop_by_hand():
    pytest.importorskip("equinox")
    module, batch = card("networks", "flax nnx and equinox"), double()
    params = in_double(module.policy.init(KEY))

    def layers(params):
        found = {name: getattr(params, name) for name in ("hidden", "policy", "value")}
        return {name: {"w": layer.weight, "b": layer.bias} for name, layer in found.items()}

    def loss(params, d):
        hidden, policy, value = (params[name] for name in ("hidden", "policy", "value"))
        features = jnp.tanh(d["obs"] @ hidden["w"].T + hidden["b"])
        values = features @ value["w"][0] + value["b"]
        return mean(ppo(features @ policy["w"].T + policy["b"], values, d, entropy=0), d["mask"])

    state, _ = train(given(module.pipeline), params, [batch], module.policy)
    assert_equal(layers(state.params), descend(loss, layers(params), cut(estimated(batch))))


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

    segments = np.array([[2, 0], [1, 3]])
    rows = [np.add.outer(np.arange(TIME) * SEGMENTS, two).ravel() for two in segments]
    state, _ = train(given(module.pipeline, "segment", segments), params, [batch], module.policy)
    data = cut(estimated(batch, seen=seen, visible=visible), rows)
    assert_equal(state.params, descend(lambda p, d: mean(ppo(*network(p, d), d), d["mask"]), params, data))

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

    state, _ = train(pipeline, params, [batch], module.policy)
    assert_equal(state.params, descend(loss, params, [(estimated(batch),)] * epochs))
