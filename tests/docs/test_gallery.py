"""The gallery: the lines of its tables build what they say, and the code of its cards, run by the learner, equals
handwritten loops in plain JAX and float64: explicit losses, `jax.grad` and gradient descent.

The loops use nothing of the package. Cards that only set arguments of parts are left to the tests of those parts.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize
import scipy.stats
from flax import nnx

import ppo_parts as pp
from benchmarks._cards import load_card
from ppo_parts import envs, training
from tests import reference
from tests.common import ACTIONS, OBS, SEGMENTS, TIME, assert_close, make_params, rollout
from tests.common import evaluate as categorical
from tests.core.common import KEY, run
from tests.docs.test_docs import FENCE, ROOT, blocks

pytestmark = pytest.mark.usefixtures("double_precision")
RATE = 0.3
MINIBATCHES = np.random.default_rng(3).permutation(TIME * SEGMENTS).reshape(2, -1)


def given(pipeline, axis="step", indices=MINIBATCHES):
    """Give a card's chain minibatches that the handwritten loop can have, too."""
    known = pp.given_indices(indices, axis)
    return pp.chain(*(known if isinstance(part, type(known)) else part for part in pipeline.parts))


def train(pipeline, params, batches, evaluate=categorical, optimizer=None):
    """Update once for each batch; return the last state and all metrics."""
    state, *metrics = run(pipeline, *batches, params=params, policy=evaluate, optimizer=optimizer or optax.sgd(RATE))
    return state, metrics


def assert_equal(actual, expected):
    """Check equality in double precision, where only the order of sums differs."""
    assert {x.dtype for x in jax.tree.leaves(actual)} == {jnp.dtype(float)}
    assert_close(actual, expected, 1e-9, 1e-9)


def check(element, pipeline, params, batches, steps, evaluate=categorical):
    """Check that updates descend the mean of `element(params, d)`, where `d` is each of the minibatches `steps`."""
    state, metrics = train(pipeline, params, batches, evaluate)
    assert_equal(state.params, descend(element, params, steps))
    return metrics


# --- what handwritten loops are made of -------------------------------------------------------------------------------


def double(seed=0, **options):
    return rollout(seed, dtype=jnp.float64, **options)


def linear_params(seed=0):
    return make_params(seed, jnp.float64)


def normal(shapes, seed, scale=1.0):
    """Draw parameters of these shapes in double precision."""
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(scale * rng.normal(size=shape)) for name, shape in shapes.items()}


def in_double(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def data_of(batch, **more):
    """Return a rollout as plain arrays `[T * N, ...]`."""
    fields = {name: getattr(batch, name) for name in ("obs", "action", "log_prob", "value", "reward")}
    fields["mask"] = np.ones(batch.log_prob.shape) if batch.mask is None else batch.mask
    return {name: np.asarray(x).reshape(-1, *np.shape(x)[2:]) for name, x in (fields | more).items() if x is not None}


def gae_of(batch, gamma=0.99, gae_lambda=0.95, **other):
    fields = {name: getattr(batch, name) for name in ("reward", "value", "next_value", "terminated", "truncated")}
    return reference.gae(**{**fields, **other}, mask=batch.mask, gamma=gamma, gae_lambda=gae_lambda)


def estimated(batch, gamma=0.99, gae_lambda=0.95, **more):
    """Return the same with the advantages and targets of the reference."""
    advantage, target = gae_of(batch, gamma, gae_lambda)
    return data_of(batch, **{"advantage": advantage, "target": target, **more})


def cut(data, minibatches=MINIBATCHES):
    return [{name: x[rows] for name, x in data.items()} for rows in minibatches]


def rows_of(segments, number=SEGMENTS):
    """Return the rows of minibatches of segments."""
    return [np.add.outer(np.arange(TIME) * number, some).ravel() for some in segments]


@functools.cache
def slope_of(element):
    """Return the gradient of the mean, compiled once for all steps; what differs between steps must be in `d`."""
    return jax.jit(jax.grad(lambda params, d: jnp.average(element(params, d), weights=d["mask"])))


def descend(element, params, steps, rate=RATE):
    for d in steps:
        params = optax.tree.add_scale(params, -rate, slope_of(element)(params, d))
    return params


def normalized(advantage, mask):
    centred = advantage - jnp.average(advantage, weights=mask)
    return centred / (jnp.sqrt(jnp.average(centred**2, weights=mask)) + 1e-8)


def chosen(logits, action):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], axis=-1)[..., 0]


def kl_of(first, second):
    """Return the divergence of two categorical distributions from their logits."""
    return jnp.sum(jax.nn.softmax(first) * (jax.nn.log_softmax(first) - jax.nn.log_softmax(second)), axis=-1)


def ratio_of(logits, d):
    return jnp.exp(chosen(logits, d["action"]) - d["log_prob"])


def clipped(ratio, advantage, low=0.2, high=0.2):
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - low, 1 + high) * advantage)


def ppo(logits, value, d, entropy=0.01, critic=0.25, eps=0.2, normalize=True):
    """Return the sum of PPO's three losses for each element; `d` may have its own clips."""
    advantage = normalized(d["advantage"], d["mask"]) if normalize else d["advantage"]
    policy = clipped(ratio_of(logits, d), advantage, d.get("low", eps), d.get("high", eps))
    minus_entropy = jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits), axis=-1)
    return policy + entropy * minus_entropy + critic * (value - d["target"]) ** 2


def linear(params, d):
    return d["obs"] @ params["policy"], d["obs"] @ params["value"]


def ppo_of(network=linear, **settings):
    return lambda params, d: ppo(*network(params, d), d, **settings)


def value_loss(value, d):
    return 0.5 * (d["obs"] @ value - d["target"]) ** 2


# --- the cards --------------------------------------------------------------------------------------------------------


def lines(page):
    """Return the code in the tables of a page."""
    rows = re.findall(r"^\|.*\|$", FENCE.sub("", (ROOT / page).read_text()), re.MULTILINE)
    return [code for row in rows for code in re.findall(r"`((?:pp|optax)\.[^`]*\(.*?\))`", row)]


@pytest.mark.parametrize("page", ["docs/gallery/README.md", "docs/tokens.md"])
def test_lines_build_parts_and_transformations(page):
    names = {"pp": pp, "optax": optax, "F": pp.functional}
    exec(blocks(ROOT / page)[0][0], names)  # the lines use these names
    found = lines(page)
    assert len(found) >= 20
    for line in found:
        made = eval(line, names)
        for each in made if type(made) is tuple else (made,):
            assert isinstance(each, pp.Part) or hasattr(each, "update"), line


def test_ppo_ewma_equals_a_loop_by_hand():
    params, batches, decay = linear_params(), [double(seed) for seed in range(2)], 0.889

    def element(params, d):
        logits, value = linear(params, d)
        middle = chosen(d["obs"] @ d["proximal"], d["action"])
        surrogate = clipped(ratio_of(logits, d | {"log_prob": middle}), normalized(d["advantage"], d["mask"]))
        return jnp.exp(middle - d["log_prob"]) * surrogate + 0.25 * (value - d["target"]) ** 2

    expected, visited = params, []
    for d in [d for batch in batches for d in cut(estimated(batch))]:
        visited.append(expected["policy"])
        proximal = np.average(visited, axis=0, weights=decay ** np.arange(len(visited))[::-1])
        expected = descend(element, expected, [d | {"proximal": proximal}])
    state, metrics = train(given(load_card("losses", "PPO-EWMA").pipeline), params, batches)
    assert_equal(state.params, expected)
    assert abs(float(metrics[1]["off_policy_weight"]) - 1) > 1e-3


def test_trgppo_equals_a_loop_by_hand():
    batch = double(masked=False, behavior=linear_params())

    def excess(x, p):
        return p * np.log(1 / x) + (1 - p) * np.log((1 - p) / (1 - p * x)) - 0.03

    roots = np.array([
        [scipy.optimize.brentq(excess, *ends, args=(p,), xtol=1e-14) for ends in ((1e-12, 1), (1, 1 / p - 1e-12))]
        for p in np.exp(np.ravel(batch.log_prob))
    ])  # fmt: skip
    low, high = np.maximum(1 - roots[:, 0], 0.2), np.maximum(roots[:, 1] - 1, 0.2)
    assert min(np.ptp(low), np.ptp(high)) > 0.05
    pipeline = given(load_card("losses", "A clip for each element").trgppo)
    check(ppo_of(), pipeline, linear_params(), [batch], cut(estimated(batch, low=low, high=high)))


def drawn(batch, actions, draw):
    """Add continuous actions to a batch, and keys of a policy that draws; return what it draws with each key, too."""
    keys = jax.random.split(KEY, (TIME, SEGMENTS))
    action = jnp.asarray(np.random.default_rng(6).normal(size=(TIME, SEGMENTS, actions)))
    numbers = jax.vmap(jax.vmap(draw))(keys)
    return batch.replace(action=action).add_extras(policy_key=keys), numbers


@pytest.mark.lenient_ranks
def test_fpo_equals_a_loop_by_hand():
    module, actions, draws, steps = load_card("losses", "Flow policies"), 2, 8, 10
    shapes = {"obs": (OBS, 5), "action": (actions, 5), "tau": (5,), "velocity": (5, actions), "value": (OBS,)}
    params, old = normal(shapes, 0, 0.3), normal(shapes, 1, 0.3)

    def draw(key):
        first, second = jax.random.split(key)
        return jax.random.uniform(first, (draws, 1)), jax.random.normal(second, (draws, actions))

    batch, (taus, noises) = drawn(double(), actions, draw)

    def velocity(params, obs, x, tau):
        return jnp.tanh(obs @ params["obs"] + x @ params["action"] + tau * params["tau"]) @ params["velocity"]

    def matching(params, d):
        action, tau, noise = d["action"][:, None], d["taus"], d["noises"]
        error = velocity(params, d["obs"][:, None], tau * action + (1 - tau) * noise, tau) - (action - noise)
        return jnp.mean(error[..., 0] ** 2 + error[..., 1] ** 2, axis=1)

    def element(params, d):
        policy = clipped(jnp.exp(d["old"] - matching(params, d)), normalized(d["advantage"], d["mask"]), 0.05, 0.05)
        return policy + 0.5 * value_loss(params["value"], d)

    data = estimated(batch, taus=taus, noises=noises)
    data["old"] = matching(old, data)
    batch = batch.replace(log_prob=-data["old"].reshape(TIME, SEGMENTS))
    check(element, given(module.fpo), params, [batch], cut(data), module.policy)

    x = jax.random.normal(KEY, (TIME, SEGMENTS, actions))
    sample = module.evaluate(params, batch)[0].sample(seed=KEY)
    for k in range(steps):
        x = x + velocity(params, batch.obs, x, k / steps) / steps
    np.testing.assert_allclose(sample, x, rtol=1e-9, atol=1e-9)


def test_drac_equals_a_loop_by_hand():
    module, batch = load_card("regularizers", "DrAC"), double()
    augment = module.random_amplitude(0.6, 1.2)(KEY, jnp.ones((50, OBS)))
    assert 0.6 <= np.min(augment) < 0.8 < 1 < np.max(augment) <= 1.2
    np.testing.assert_array_equal(augment[:, 0], augment[:, 1])

    def element(params, d):
        new_logits, new_value = linear(params, {"obs": 1.5 * d["obs"]})
        old_logits, old_value = jax.lax.stop_gradient(linear(params, d))
        augmented = kl_of(old_logits, new_logits) + 0.5 * (old_value - new_value) ** 2
        return ppo(*linear(params, d), d) + 0.1 * augmented

    pipeline = given(module.drac(module.random_amplitude(1.5, 1.5)))  # the loop can have this factor, too
    metrics = check(element, pipeline, linear_params(), [batch], cut(estimated(batch, gamma=0.999)))
    assert metrics[0]["augmented_kl"] > 0


def test_sam_equals_a_loop_by_hand():
    [line] = [line for line in lines("docs/gallery/README.md") if "contrib.sam" in line]
    batch, params = double(), linear_params()
    pipeline = pp.chain(pp.gae(gamma=0.99, gae_lambda=0.95), pp.given_indices(MINIBATCHES), pp.value_loss())
    state, _ = train(pipeline, params, [batch], optimizer=eval(line, {"optax": optax}))
    slope = slope_of(lambda params, d: value_loss(params["value"], d))
    for d in cut(estimated(batch)):
        gradient = slope(params, d)
        worst = optax.tree.add_scale(params, 0.05 / optax.tree.norm(gradient), gradient)
        params = optax.tree.add_scale(params, -0.1, slope(worst, d))
    assert_equal(state.params, params)


@pytest.mark.parametrize(("max_kl", "damping", "backtracks"), [(1e-3, 0.1, 0), (0.02, 1e-3, 1)])
def test_trpo_equals_a_step_by_hand(max_kl, damping, backtracks):
    """The reference uses the Hessian as a matrix; the step with the larger radius is shortened."""
    params = linear_params()
    batch = double(behavior=params)
    batch = batch.replace(behavior=pp.distributions.Categorical(batch.obs @ params["policy"]))
    surrogate = pp.policy_loss(pp.functional.importance_weighted_surrogate)
    divergence = pp.kl_penalty(coef=1.0, estimator="analytic")
    pipeline = pp.chain(pp.gae(gamma=0.99, gae_lambda=0.95), pp.full_batch(), surrogate, divergence)
    state, _ = train(pipeline, params, [batch], optimizer=pp.optim.natural_gradient(max_kl, damping=damping))
    d, old = estimated(batch), params["policy"]

    def kl(policy):
        return jnp.average(kl_of(d["obs"] @ old, d["obs"] @ policy), weights=d["mask"])

    def objective(policy):
        return jnp.average(-ratio_of(d["obs"] @ policy, d) * d["advantage"], weights=d["mask"])

    damped = jax.hessian(kl)(old).reshape(old.size, old.size) + damping * np.eye(old.size)
    x = np.linalg.solve(damped, jax.grad(objective)(old).ravel())
    step, n = (np.sqrt(2 * max_kl / (x @ damped @ x)) * x).reshape(old.shape), 0
    while not (kl(old - step) <= max_kl and objective(old - step) < objective(old)):
        step, n = 0.8 * step, n + 1
    assert n == backtracks
    assert_equal(state.params, {**params, "policy": old - step})


def test_redo_equals_a_step_by_hand():
    """Every unit is dormant, so all parameters and moments are reset before the second step of Adam."""
    module, batch = load_card("updates", "Dormant units"), double(masked=False)
    params = normal({"hidden": (OBS, 5), "policy": (5, ACTIONS), "value": (5,)}, 0)
    whole, part = MINIBATCHES.reshape(1, -1), module.redo(share=1e9, every=2)
    pipeline = pp.chain(*(part if each.name == "redo" else each for each in module.plastic.parts))

    def learner(rate):
        return pp.learner(module.tanh_policy, given(pipeline, indices=whole), optax.adam(rate))

    update = jax.jit(lambda rate, state: learner(rate).update(KEY, state, batch)[0])
    kept, first = (update(rate, learner(0.1).init(params)) for rate in (0.0, 0.1))
    reset, second = update(0.0, kept), update(0.1, first)
    assert_equal(kept.params, params)  # the reset is not due
    assert float(jnp.min(jnp.abs(reset.params["hidden"] - params["hidden"]))) > 0
    assert jax.tree.all(jax.tree.map(lambda x: bool(jnp.all(x == 0)), {**reset.params, "hidden": jnp.zeros(1)}))
    assert float(jnp.min(jnp.abs(first.opt_state[0].mu["hidden"]))) > 0

    network = lambda params, d: linear(params, {"obs": jnp.tanh(d["obs"] @ params["hidden"])})  # noqa: E731
    gradient = slope_of(ppo_of(network, entropy=0))(reset.params, estimated(batch))
    moved = jax.tree.map(lambda g: 0.1 * (0.1 * g / 0.19) / (jnp.sqrt(0.001 * g**2 / 0.001999) + 1e-8), gradient)
    assert_equal(second.params, jax.tree.map(jnp.subtract, reset.params, moved))


def test_happo_equals_a_loop_by_hand():
    module, agents, key = load_card("updates", "Agents in sequence"), 3, jax.random.key(2)
    batches, params = [double(seed) for seed in range(agents)], [linear_params(seed) for seed in range(agents)]

    def stacked(trees, axis):
        return jax.tree.map(lambda *x: jnp.stack(x, axis), *trees)

    expected, factor, order = [None] * agents, 1.0, np.asarray(jax.random.permutation(key, agents))
    assert list(order) != sorted(order)
    element = ppo_of(entropy=0, normalize=False)
    for agent in order:
        d = estimated(batches[agent])
        advantage = factor * normalized(d["advantage"], d["mask"])
        expected[agent] = descend(element, params[agent], cut(d | {"advantage": advantage}))
        factor = factor * ratio_of(d["obs"] @ expected[agent]["policy"], d)
    learner = pp.learner(categorical, given(module.happo), optax.sgd(RATE))
    update = jax.jit(module.in_sequence(learner, categorical))
    batch = stacked(batches, 2).add_extras(cost=batches[0].reward)  # as `keep_info` records it
    states, metrics = update(key, jax.vmap(learner.init)(stacked(params, 0)), batch)
    assert_equal(states.params, stacked(expected, 0))
    assert metrics["loss"].shape == (agents,)


def test_geppo_equals_a_loop_by_hand():
    params, kept, eps, rate = linear_params(), 2, 0.1, 0.05
    batches = [double(seed, behavior=linear_params(seed + 5)) for seed in range(3)]
    pipeline = load_card("updates", "Earlier rollouts").geppo(batches[0], kept, eps)
    expected, element = params, ppo_of(entropy=0, normalize=False)
    for last in range(3):
        each = []
        for batch in batches[max(0, last + 1 - kept) : last + 1]:
            log_ratio = chosen(batch.obs @ expected["policy"], batch.action) - batch.log_prob
            fields = [getattr(batch, x) for x in ("reward", "value", "next_value", "terminated", "truncated", "mask")]
            numbers = {"gamma": 0.99, "gae_lambda": 0.95, "pg_rho_clip": np.inf}
            _, target, weighted = reference.vtrace(log_ratio, *fields, **numbers)
            c = jnp.exp(log_ratio)  # around which the ratio is clipped
            each.append(data_of(batch, advantage=weighted / c, target=target, low=1 - c + eps, high=c + eps - 1))
        d = {name: jnp.concatenate([one[name] for one in each]) for name in each[0]}
        expected = descend(element, expected, [d] * 2, rate)
    whole = np.arange(kept * TIME * SEGMENTS).reshape(1, 1, -1).repeat(2, axis=0)  # two epochs of one minibatch
    state, _ = train(given(pipeline, indices=whole), params, batches, optimizer=optax.sgd(rate))
    assert_equal(state.params, expected)


def test_imagination_equals_a_loop_by_hand():
    """Compare the model's gradient step, its environment, and the policy's update on what was imagined."""
    module, batch = load_card("updates", "Learning in imagination"), double().replace(mask=None)
    batch = batch.replace(action=batch.action % 2)
    model = normal({"change": (OBS + 2, OBS), "reward": OBS + 2}, 3, 0.1)
    params = normal({"policy": (OBS, 2), "value": OBS}, 4)

    def known_of(batch):
        return jnp.concatenate([batch.obs, jnp.eye(2)[batch.action]], axis=-1)

    def error(model):
        off = (batch.obs + known_of(batch) @ model["change"])[:-1] - batch.obs[1:]
        each = (off**2).sum(-1) + (known_of(batch) @ model["reward"] - batch.reward)[:-1] ** 2
        return jnp.mean((1 - batch.terminated[:-1]) * (1 - batch.truncated[:-1]) * each)

    chain = pp.chain(pp.gae(gamma=0.99, gae_lambda=0.95), pp.full_batch(), pp.clipped_surrogate(clip_eps=0.2))
    learner = pp.learner(categorical, chain, optax.sgd(RATE))
    improve = jax.jit(functools.partial(module.improve, learner, categorical, num_envs=SEGMENTS))
    (state, _), learned, dreamed = improve(KEY, learner.init(params), model, batch)
    assert_equal(learned, optax.tree.add_scale(model, -0.1, jax.grad(error)(model)))
    assert np.isclose(dreamed.obs[0][:, None], batch.obs.reshape(1, -1, OBS)).all(-1).any(1).all()  # they begin there
    known = known_of(dreamed)
    np.testing.assert_allclose(dreamed.obs[1:], (dreamed.obs + known @ learned["change"])[:-1], rtol=1e-5)
    np.testing.assert_allclose(dreamed.reward, known @ learned["reward"], rtol=1e-5, atol=1e-6)
    assert dreamed.truncated[-1].all()
    assert not dreamed.truncated[:-1].any()
    expected = descend(ppo_of(entropy=0, critic=0, normalize=False), params, [estimated(dreamed)])
    np.testing.assert_allclose(state.params["policy"], expected["policy"], rtol=1e-5)


@pytest.mark.parametrize(("max_deviation", "least"), [(0.05, 0.0), (10.0, 0.99)])
def test_early_stop_equals_a_loop_by_hand(max_deviation, least):
    params = linear_params()
    batch = double(masked=False, behavior=params)
    rows = np.stack([np.roll(MINIBATCHES, shift, axis=1 - shift % 2) for shift in range(5)])  # five epochs of two
    expected, sizes, element = params, [], ppo_of(eps=np.inf)
    for d in cut(estimated(batch), rows.reshape(10, -1)):
        ratio = ratio_of(d["obs"] @ expected["policy"], d)
        sizes.append(jnp.sum(ratio) ** 2 / len(ratio) / jnp.sum(ratio**2))
        if jnp.mean(jnp.abs(ratio - 1)) > max_deviation or sizes[-1] < least:
            break
        expected = descend(element, expected, [d])
    pipeline = given(load_card("updates", "Your own early stop").espo(max_deviation, least), indices=rows)
    state, [metrics] = train(pipeline, params, [batch])
    assert_equal(state.params, expected)
    assert (metrics["minibatches"], metrics["early_stopped"]) == (len(sizes) - 1, 1)
    assert 0 < len(sizes) - 1 < 10
    np.testing.assert_allclose(metrics["sample_size"], min(sizes))


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_group_advantages_equal_a_loop_by_hand(name):
    module, segments, group = load_card("values", "Without a critic"), 8, 4
    batch = double(1, shape=(TIME, segments), masked=False).replace(value=None, next_value=None)
    params = {"policy": linear_params()["policy"]}
    ended = np.maximum(batch.terminated, batch.truncated)
    length = np.where(ended.any(axis=0), ended.argmax(axis=0) + 1, TIME)
    assert len(set(length)) > 2
    returns = np.array([batch.reward[: length[n], n].sum() for n in range(segments)]).reshape(-1, group)
    center, scale = returns.mean(axis=1, keepdims=True), returns.std(axis=1, keepdims=True) + 1e-8
    others = (returns.sum(axis=1, keepdims=True) - returns) / (group - 1)
    advantage = np.ravel((returns - center) / scale if name == "grpo" else returns - others)

    def element(params, d):
        log_prob = chosen(d["obs"] @ params["policy"], d["action"])
        if name == "rloo":
            return -d["advantage"] * d["length"] * log_prob  # the sum over the steps of a sequence
        to_reference = chosen(d["obs"] @ reference_policy, d["action"]) - log_prob
        kl = jnp.exp(to_reference) - to_reference - 1
        return clipped(jnp.exp(log_prob - d["log_prob"]), d["advantage"]) + 0.04 * kl

    reference_policy = params["policy"]
    weight = (np.arange(TIME)[:, None] < length) / length  # with these weights, a mean over steps is one over sequences
    each = {"advantage": advantage, "length": length}
    d = data_of(batch, mask=weight, **{key: np.broadcast_to(x, weight.shape) for key, x in each.items()})
    order = [[5, 0, 3, 6], [1, 7, 2, 4]]
    grpo, rloo = given(module.grpo, "segment", order), module.rloo
    pipeline, steps = (grpo, cut(d, rows_of(order, segments))) if name == "grpo" else (rloo, [d])
    [metrics] = check(element, pipeline, params, [batch], steps, module.evaluate)
    assert "nonfinite/value" not in metrics  # there are no values


def test_ppg_equals_a_loop_by_hand():
    module, every, epochs = load_card("values", "Phasic policy gradient"), 2, 3
    params = {"policy": normal({"body": (OBS, 5), "logits": (5, ACTIONS), "value": (5,)}, 0)}
    params |= normal({"value": OBS}, 1)
    batches = [double(seed) for seed in range(4)]
    kept = {"obs": "obs", "action": "action", "log_prob": "log_prob", "target": "value", "mask": "mask"}
    like = jax.eval_shape(lambda b: pp.Batch(**{name: getattr(b, x) for name, x in kept.items()}), batches[0])
    # There is one minibatch, so the order within it does not matter.
    pipeline = module.phasic(like, num_rollouts=every, num_minibatches=1, auxiliary_epochs=epochs)
    rates = {"policy": 0.3, "value": 0.2, "auxiliary": 0.1}

    def heads(policy, obs):
        features = jnp.tanh(obs @ policy["body"])
        return features @ policy["logits"], features @ policy["value"]

    def policy_loss(policy, d):
        return ppo(heads(policy, d["obs"])[0], 0, d, critic=0)

    def joint_loss(policy, d):
        logits, value = heads(policy, d["obs"])
        return 0.5 * (value - d["target"]) ** 2 + kl_of(d["old"], logits)

    policy, value, buffer = params["policy"], params["value"], []
    for batch in batches:
        buffer.append(estimated(batch, gamma=0.999))
        policy = descend(policy_loss, policy, buffer[-1:], rates["policy"])
        value = descend(value_loss, value, buffer[-1:], rates["value"])
        if len(buffer) == every:
            stored = {name: jnp.concatenate([d[name] for d in buffer]) for name in buffer[0]}
            stored["old"] = heads(policy, stored["obs"])[0]
            policy = descend(joint_loss, policy, [stored] * epochs, rates["auxiliary"])
            value = descend(value_loss, value, [stored] * epochs, rates["auxiliary"])
            buffer = []
    optimizer = {name: optax.sgd(rate) for name, rate in rates.items()}
    state, metrics = train(pipeline, params, batches, module.evaluate, optimizer)
    assert_equal(state.params, {"policy": policy, "value": value})
    assert [int(m["auxiliary/minibatches"]) for m in metrics] == [0, epochs, 0, epochs]
    assert metrics[1]["auxiliary/kl_penalty"] > 0


@pytest.mark.parametrize("hides", [False, True])
def test_daac_and_idaac_equal_a_loop_by_hand(hides):
    module, batch = load_card("values", "Decoupled advantages"), double(masked=not hides)
    shapes = {"body": (OBS, 5), "logits": (5, ACTIONS), "advantage": (5, ACTIONS)}
    params = {"policy": normal(shapes | ({"order": 10} if hides else {}), 0), **normal({"value": OBS}, 1)}
    other = (3 * np.arange(TIME) + 1) % TIME

    def policy_loss(policy, d):
        features = jnp.tanh(d["obs"] @ policy["body"])
        predicted = jnp.take_along_axis(features @ policy["advantage"], d["action"][:, None], axis=1)[:, 0]
        own = ppo(features @ policy["logits"], 0, d, critic=0, normalize=False)
        own += 0.25 * (predicted - d["advantage"]) ** 2
        if hides:
            both = jnp.concatenate([features, jnp.tanh(d["other"] @ policy["body"])], axis=1)
            later = 1 / (1 + jnp.exp(-jax.lax.stop_gradient(both) @ policy["order"]))
            unclear = 1 / (1 + jnp.exp(-both @ jax.lax.stop_gradient(policy["order"])))
            right = jnp.where(d["later"], later, 1 - later)
            own -= d["same"] * (jnp.log(right) + 0.0005 * (jnp.log(unclear) + jnp.log(1 - unclear)))
        return own

    d = estimated(batch, gamma=0.999)
    d["advantage"] = normalized(d["advantage"], d["mask"])
    ended = np.maximum(batch.terminated, batch.truncated)
    episode = np.stack([ended[:t].sum(axis=0) for t in range(TIME)])
    same = (episode[other] == episode) & (other != np.arange(TIME))[:, None]
    later = np.repeat(other > np.arange(TIME), SEGMENTS)
    d |= {"other": batch.obs[other].reshape(-1, OBS), "later": later, "same": same.reshape(-1)}
    chain = module.decoupled([module.paired(lambda key, length: other)], [module.order]) if hides else module.daac
    *head, phases = chain.parts
    known = pp.chain(*head, pp.phases(**{name: given(pp.chain(*x.parts)) for name, x in phases.phases.items()}))
    state, _ = train(known, params, [batch], module.evaluate, dict.fromkeys(phases.phases, optax.sgd(RATE)))
    losses = {"policy": policy_loss, "value": value_loss}
    assert_equal(state.params, {name: descend(loss, params[name], cut(d)) for name, loss in losses.items()})


def test_popart_writes_the_statistics_and_keeps_the_values():
    module, batch = load_card("values", "PopArt"), double()
    critic = normal({"w": (OBS,), "b": ()}, 1) | {"mean": jnp.zeros(()), "scale": jnp.ones(())}
    params = normal({"policy": (OBS, ACTIONS)}, 0) | {"critic": critic}
    state, [metrics] = train(given(module.pipeline), params, [batch], module.evaluate, optax.sgd(0.0))
    assert state.params["critic"]["scale"] == metrics["target_scale"] != 1
    assert_equal(module.evaluate(state.params, batch).value, module.evaluate(params, batch).value)


def two_streams(seed):
    """Return parameters, a batch with a cost and a critic for each of two streams, and their advantages and targets."""
    batch, rng = double(seed), np.random.default_rng(seed)
    values = {name: jnp.asarray(rng.normal(size=(TIME, SEGMENTS, 2))) for name in ("value", "next_value")}
    cost = jnp.asarray(rng.uniform(seed, 1, size=batch.reward.shape))
    streams = [
        gae_of(batch, reward=reward, **{name: x[..., k] for name, x in values.items()})
        for k, reward in enumerate((batch.reward, cost))
    ]
    advantage, target = (np.stack(x, axis=-1) for x in zip(*streams, strict=True))
    params = normal({"policy": (OBS, ACTIONS), "value": (OBS, 2)}, 2)
    return params, batch.replace(extras={"cost": cost}, **values), advantage, target


def with_two_critics(params, d):
    logits, values = linear(params, d)
    return ppo(logits, 0, d | {"target": 0}, entropy=0) + 0.25 * jnp.sum((values - d["target"]) ** 2, axis=1)


def test_lagrangian_equals_a_loop_by_hand():
    module, limit, multipliers, batches, steps = load_card("values", "Constraints", 1), 0.45, [0.0], [], []
    for seed in range(2):  # at the end, the cost is above the limit
        params, batch, advantage, target = two_streams(seed)
        above = float(jnp.average(batch.extras["cost"], weights=batch.mask)) - limit
        multipliers.append(last := max(0.0, multipliers[-1] + 0.1 * above))
        mixed = (advantage[..., 0] - last * advantage[..., 1]) / (1 + last)
        steps += cut(data_of(batch, advantage=mixed, target=target))
        batches.append(batch)
    assert multipliers[2] > multipliers[1]
    metrics = check(with_two_critics, given(module.constrained(limit)), params, batches, steps, module.evaluate)
    np.testing.assert_allclose([m["multiplier"] for m in metrics], multipliers[1:], rtol=1e-12)


def test_several_objectives_equal_a_loop_by_hand():
    with jax.enable_x64(False):
        module = load_card("values", "Several objectives")
    best = 1 / (2 * module.weights)
    np.testing.assert_allclose(module.front[:, 0], best, atol=0.06)
    np.testing.assert_allclose(module.front[:, 1], best**2, atol=0.1)
    params, batch, advantage, target = two_streams(0)
    weights = jnp.asarray(np.random.default_rng(4).normal(size=(TIME, SEGMENTS, 2)))
    d = data_of(batch, advantage=np.sum(weights * advantage, axis=-1), target=target)
    pipeline = given(module.weighted(pp.field("extras.weights")))
    check(with_two_critics, pipeline, params, [batch.add_extras(weights=weights)], cut(d))


def test_reppo_equals_a_loop_by_hand():
    module, actions, sizes = load_card("values", "Pathwise gradients"), 2, {"log_alpha": (), "log_beta": ()}
    sizes |= {"policy": (OBS, actions), "log_std": (actions,), "hidden": (OBS + actions, 5), "q": (5,)}
    params = normal(sizes, 0, 0.3)
    old = jax.tree.map(jnp.add, params, normal(sizes, 1, 0.15))
    batch, noise = drawn(double(), actions, lambda key: jax.random.normal(key, (actions,)))

    def gaussian(params, obs):
        loc = obs @ params["policy"]
        return loc, jnp.broadcast_to(jnp.exp(params["log_std"]), loc.shape)

    def log_density(action, loc, scale):
        terms = -0.5 * ((action - loc) / scale) ** 2 - jnp.log(scale) - 0.5 * np.log(2 * np.pi)
        return terms[..., 0] + terms[..., 1]

    def critic(params, obs, action):
        hidden = obs @ params["hidden"][:OBS] + action @ params["hidden"][OBS:]
        return (hidden / (1 + jnp.exp(-hidden))) @ params["q"]

    loc, scale = gaussian(old, batch.obs)
    batch = batch.replace(log_prob=log_density(batch.action, loc, scale), behavior=pp.distributions.Normal(loc, scale))
    target, onward = [], batch.next_value[-1]
    for t in reversed(range(TIME)):
        keep = 0.95 * (1 - batch.truncated[t]) * batch.mask[min(t + 1, TIME - 1)]
        after = (1 - keep) * batch.next_value[t] + keep * onward
        target.insert(0, batch.reward[t] + 0.99 * (1 - batch.terminated[t]) * after)
        onward = target[0] - jnp.exp(params["log_alpha"]) * batch.log_prob[t]

    def divergence(params, d):
        loc, scale = gaussian(params, d["obs"])
        terms = jnp.log(scale / d["scale"]) + (d["scale"] ** 2 + (d["loc"] - loc) ** 2) / (2 * scale**2) - 0.5
        return terms[:, 0] + terms[:, 1]

    def element(params, d):
        (loc, scale), fixed = gaussian(params, d["obs"]), jax.lax.stop_gradient(params)
        own = loc + scale * d["noise"]
        ascended = critic(fixed, d["obs"], own) - jnp.exp(fixed["log_alpha"]) * log_density(own, loc, scale)
        kl, entropy = divergence(params, d), jnp.sum(jnp.log(scale) + 0.5 * np.log(2 * np.pi * np.e), axis=-1)
        policy = jnp.where(kl < 0.1, -ascended, jnp.exp(fixed["log_beta"]) * kl)
        kl, entropy = jax.lax.stop_gradient((kl, entropy))
        multipliers = jnp.exp(params["log_alpha"]) * (entropy + 0.5) - jnp.exp(params["log_beta"]) * (kl - 0.1)
        return 0.5 * (critic(params, d["obs"], d["action"]) - d["target"]) ** 2 + policy + multipliers

    data = data_of(batch, target=jnp.stack(target), noise=noise, loc=loc, scale=scale)
    assert 0.2 < jnp.mean(divergence(params, data) < 0.1) < 0.8
    check(element, given(module.reppo), params, [batch], cut(data), module.evaluate)


def test_rnd_equals_a_loop_by_hand():
    module, size = load_card("imitation", "Random network distillation"), 4  # CartPole's observations
    params = normal({"policy": (size, 2), "value": (size,), "value_intrinsic": (size,)}, 0)
    params["predictor"] = normal({"hidden": (size, 5), "out": (5, 3)}, 1)
    steps, envs = 8, 4
    with jax.enable_x64(False):
        single = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        _, batch, _ = jax.jit(module.rollout.collect)(KEY, single, module.rollout.init(KEY))
    batch = in_double(batch)
    keep = np.random.default_rng(1).random((steps, envs)) < 0.7
    batch = batch.replace(terminated=batch.terminated.at[3, 1].set(True), mask=keep)  # an end to look beyond
    np.testing.assert_allclose(batch.extras["value_intrinsic"], batch.obs @ params["value_intrinsic"], rtol=1e-4)

    minibatches = np.random.default_rng(0).permutation(steps * envs).reshape(2, -1)
    pipeline = given(module.pipeline, indices=minibatches)
    learner = pp.learner(module.evaluate, pipeline, optax.sgd(0.01))
    states = (learner.init(params, key) for key in (KEY, jax.random.key(1)))
    target, other = (pp.part_state(state, pipeline, "rnd_reward").target for state in states)
    assert not np.allclose(target["out"], other["out"])  # each seed has its own network

    def embed(network, obs):
        return jnp.tanh(obs @ network["hidden"]) @ network["out"]

    def error_of(predictor, obs):
        return jnp.mean((embed(predictor, obs) - embed(target, obs)) ** 2, axis=-1)

    def element(params, d):
        losses = ppo(*linear(params, d), d, entropy=0.001, eps=0.1, normalize=False)
        intrinsic = 0.25 * (d["obs"] @ params["value_intrinsic"] - d["target_intrinsic"]) ** 2
        return losses + intrinsic + error_of(params["predictor"], d["next_obs"])

    expected, discounted, moments = params, np.zeros(envs), []
    for _ in range(2):
        error, returns = np.asarray(error_of(expected["predictor"], batch.next_obs)), []
        for t in range(steps):
            discounted = np.where(keep[t], 0.99 * discounted + error[t], discounted)
            returns.append(discounted)
        moments.append([np.mean(np.stack(returns)[keep] ** power) for power in (1, 2)])
        first, second = np.mean(moments, axis=0)
        reward = error / np.sqrt(second - first**2 + 1e-8)
        fields = {name: batch.extras[f"{name}_intrinsic"] for name in ("value", "next_value")}
        fields |= {"reward": reward, "terminated": np.zeros((steps, envs))}
        intrinsic, intrinsic_target = gae_of(batch, **fields)
        advantage, _ = gae_of(batch, gamma=0.999)
        more = {"target_intrinsic": intrinsic_target, "next_obs": batch.next_obs}
        data = estimated(batch, gamma=0.999, advantage=2 * advantage + intrinsic, **more)
        expected = descend(element, expected, cut(data, minibatches), 0.01)
    state, metrics = train(pipeline, params, [batch, batch], module.evaluate, optax.sgd(0.01))
    assert_equal(state.params, expected)
    np.testing.assert_allclose(metrics[1]["rnd_reward"], np.mean(reward[keep]))


def test_behavior_cloning_equals_a_loop_by_hand():
    rng = np.random.default_rng(5)
    obs, action = rng.normal(size=(8, OBS)), rng.integers(ACTIONS, size=8)
    demonstrations = jnp.asarray(obs), jnp.asarray(action)
    batches = [double(seed).replace(shared={"demonstrations": demonstrations}) for seed in range(2)]

    def element(params, d):
        cloning = jnp.mean(chosen(d["shown"] @ params["policy"], d["done"]))
        return ppo(*linear(params, d), d, entropy=0, normalize=False) - d["coef"] * cloning

    steps = []
    for coef, batch in zip([1, 0.99], batches, strict=True):
        for d, share in zip(cut(estimated(batch)), (slice(4), slice(4, 8)), strict=True):
            steps.append(d | {"shown": obs[share], "done": action[share], "coef": coef})
    check(element, given(load_card("imitation", "Cloning and self-imitation").cloning), linear_params(), batches, steps)


def test_distillation_equals_a_loop_by_hand():
    module, of_teacher = load_card("imitation", "Distillation", 1), linear_params(7)["policy"]  # without what it trains
    batches = [double(seed) for seed in range(2)]

    def teacher(params, batch):
        return pp.Output(pp.distributions.Categorical(batch.obs @ params))

    def element(params, d):
        return d["coef"] * kl_of(d["obs"] @ of_teacher, d["obs"] @ params["policy"])

    steps = [d | {"coef": coef} for coef, batch in zip([1, 0.75], batches, strict=True) for d in cut(data_of(batch))]
    part = module.distill(teacher, of_teacher, coef=pp.linear_schedule(1.0, 0.0, 4))
    check(element, pp.chain(pp.given_indices(MINIBATCHES), part), linear_params(), batches, steps)


@pytest.mark.lenient_ranks
def test_nnx_equals_a_loop_by_hand():
    module, batch = load_card("networks", "flax nnx and equinox", 1), double()

    def network(params, d):
        layers = nnx.to_pure_dict(params)
        dense = lambda name, x: x @ layers[name]["kernel"] + layers[name]["bias"]  # noqa: E731
        features = jnp.tanh(dense("hidden", d["obs"]))
        return dense("policy", features), dense("value", features)[:, 0]

    params = in_double(module.policy.init(KEY))
    check(ppo_of(network, entropy=0), given(module.pipeline), params, [batch], cut(estimated(batch)), module.policy)
    with pytest.raises(TypeError, match="partition a network module"):
        module.learner.init({"function": jnp.tanh})


def remembered(module, **fields):
    """Make a rollout of the page's observations, with resets where episodes end."""
    rng, batch = np.random.default_rng(7), double()
    obs = jnp.asarray(rng.normal(size=(TIME, SEGMENTS, module.OBS)))
    ended = (rng.random(size=(TIME, SEGMENTS)) < 0.2).astype(float)
    reset = jnp.asarray(np.concatenate([[[1, 0, 0, 0]], ended[:-1]]))
    assert np.sum(reset[1:]) >= 3
    return batch.replace(obs=obs, terminated=jnp.asarray(ended), truncated=None, reset=reset, **fields)


@pytest.mark.lenient_ranks
def test_attention_equals_a_loop_by_hand():
    module, rng = load_card("networks", "Attention over history"), np.random.default_rng(8)
    params, window = in_double(jax.jit(module.init)(KEY)), module.K
    carry = {
        "obs": jnp.asarray(rng.normal(size=(SEGMENTS, window - 1, module.OBS))),
        "episode": jnp.asarray([[0, 0, 3], [5, 5, 5], [1, 1, 1], [0, 1, 2]]),
    }
    batch = remembered(module, carry=carry)
    obs, reset, past, episode = (np.asarray(x) for x in (batch.obs, batch.reset, carry["obs"], carry["episode"]))
    history = np.concatenate([past, np.swapaxes(obs, 0, 1)], axis=1)
    episode = np.concatenate([episode, episode[:, -1:] + np.cumsum(reset, axis=0).T], axis=1)
    back = np.arange(TIME)[:, None] + np.arange(window)  # the steps that each step sees, of which the last is its own
    seen, visible = (np.swapaxes(x[:, back], 0, 1) for x in (history, episode))
    visible = visible == visible[..., -1:]
    assert 0.2 < np.mean(visible) < 0.9

    def network(params, d):
        query = d["obs"] @ params["query"]
        scores = jnp.sum(query[:, None] * (d["seen"] @ params["key"]), axis=-1) / np.sqrt(8) + params["position"]
        weights = jnp.exp(scores) * d["visible"]
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return linear(params, {"obs": jnp.sum(weights[..., None] * (d["seen"] @ params["content"]), axis=1)})

    segments = np.array([[2, 0], [1, 3]])
    steps = cut(estimated(batch, seen=seen, visible=visible), rows_of(segments))
    check(ppo_of(network), given(module.pipeline, "segment", segments), params, [batch], steps, module.policy)

    evaluate, values = jax.jit(module.evaluate), []
    whole = evaluate(params, pp.Batch(obs=obs, reset=reset, carry=carry))
    for t in range(TIME):  # stepping one at a time, as the rollout does, is the same
        output = evaluate(params, pp.Batch(obs=obs[t : t + 1], reset=reset[t : t + 1], carry=carry))
        values, carry = [*values, output.value[0]], output.carry
    np.testing.assert_allclose(np.stack(values), whole.value, rtol=1e-9)
    np.testing.assert_array_equal(carry["episode"], whole.carry["episode"])


def test_burn_in_equals_a_loop_by_hand():
    module, length, burn_in, epochs = load_card("networks", "Time chunks with burn-in"), 2, 2, 2
    params = in_double(jax.jit(module.init)(KEY))
    carry = jnp.asarray(np.random.default_rng(9).normal(size=(SEGMENTS, module.WIDTH)))
    batch = remembered(module, carry=carry)

    def gru(params, h, x):
        (xz, xr, xn), (hz, hr, hn) = ((w[:, :8], w[:, 8:16], w[:, 16:]) for w in (params["inputs"], params["state"]))
        z, r = 1 / (1 + jnp.exp(-(x @ xz + h @ hz))), 1 / (1 + jnp.exp(-(x @ xr + h @ hr)))
        return z * h + (1 - z) * jnp.tanh(x @ xn + r * (h @ hn))

    def network(params, d):
        states = []
        for first in range(0, TIME, length):
            start = max(first - burn_in, 0)
            h = carry if start == 0 else jnp.zeros_like(carry)
            for t in range(start, first + length):
                h = gru(params, h * (1 - batch.reset[t])[:, None], batch.obs[t])
                states += [h] if t >= first else []
        return linear(params, {"obs": jnp.concatenate(states)})

    # There is one minibatch, so the order within it does not matter.
    pipeline = module.chunked(length, burn_in, num_minibatches=1, num_epochs=epochs)
    check(ppo_of(network), pipeline, params, [batch], [estimated(batch)] * epochs, module.policy)


def test_the_second_head_depends_on_the_first():
    module, rng, rows = load_card("networks", "Heads that depend on each other"), np.random.default_rng(3), np.arange(7)
    logits, means = jnp.asarray(rng.normal(size=(7, ACTIONS))), jnp.asarray(rng.normal(size=(7, ACTIONS, 2)))
    move, strength = rng.integers(ACTIONS, size=7), rng.normal(size=(7, 2))
    density = scipy.stats.norm(means[rows, move], 0.5).logpdf(strength).sum(axis=1)
    found = module.MoveThenStrength(logits, means).log_prob({"move": jnp.asarray(move), "strength": strength})
    assert_equal(found, chosen(logits, move) + density)


def test_options_equal_a_loop_by_hand():
    module, rng = load_card("networks", "Options"), np.random.default_rng(4)
    params = in_double(jax.jit(module.init)(KEY))
    option, move = (jnp.asarray(rng.integers(2, size=(TIME, SEGMENTS))) for _ in range(2))
    carry = jnp.asarray(rng.integers(2, size=SEGMENTS))
    batch = remembered(module, carry=carry, action={"option": option, "move": move}, mask=None)

    def element(params, d):
        def of(name, option):
            return jnp.take_along_axis(d["obs"] @ params[name], option[:, None], axis=1)[:, 0]

        beta = jnp.where(d["reset"] == 1, 1, 1 / (1 + jnp.exp(-of("stop", d["before"]))))
        begins, stays = jnp.exp(chosen(d["obs"] @ params["option"], d["option"])), d["option"] == d["before"]
        logits = jnp.where(d["option"][:, None] == 1, *(d["obs"] @ params["move"][:, k] for k in (1, 0)))
        log_prob = jnp.log(beta * begins + (1 - beta) * stays) + chosen(logits, d["move"])
        surrogate = clipped(jnp.exp(log_prob - d["log_prob"]), normalized(d["advantage"], d["mask"]))
        return surrogate + 0.25 * (of("value", d["before"]) - d["target"]) ** 2

    more = {"option": option, "move": move, "before": jnp.append(carry[None], option[:-1], axis=0)}
    d = estimated(batch.replace(action=None), reset=batch.reset, **more)
    pipeline = given(module.optioned, "segment", np.arange(SEGMENTS).reshape(1, -1))
    check(element, pipeline, params, [batch], [d], module.options)
    collected = jax.jit(lambda key, params: module.rollout.collect(key, params, module.rollout.init(key))[1])
    acted = collected(KEY, module.init(KEY))
    log_prob = module.evaluate(module.init(KEY), acted).distribution.log_prob(acted.action)
    np.testing.assert_allclose(log_prob, acted.log_prob, rtol=1e-5)


def test_level_replay_equals_a_loop_by_hand(monkeypatch):
    """Compare episodes in the maze, the scores of their levels, and the levels that are kept."""
    monkeypatch.setattr(training.Train, "shapes", None)  # whole runs are traced where the page runs
    module = load_card("levels", "Prioritized Level Replay")
    vars(module).update(K=6, M=3, P=0.5)
    config = dataclasses.replace(module.config, total_timesteps=128, num_envs=8, num_steps=16, hidden=(8,))
    train = module.make_train(config, jax.tree.map(lambda x: x[:9], module.first), module.edited, robust=True)
    params, state, collect = in_double(train.policy.init(KEY)), train.rollout.init(KEY), jax.jit(train.rollout.collect)
    playing, side = np.asarray(state.env_state.inner.number), module.SIDE
    for count in range(1, 4):
        before = jax.device_get(optax.tree.get(state, "shared"))
        state, batch, _ = jax.device_get(collect(jax.random.key(count), params, state))
        after = optax.tree.get(state, "shared")
        level, value, obs = batch.extras["level"], batch.value, batch.obs
        np.testing.assert_array_equal(level[0], playing)  # these are as the last rollout left them
        playing = state.env_state.inner.number
        walls, goal, cell = np.moveaxis(obs.reshape(*level.shape, 3, -1), 2, 0)
        goal, cell = goal.argmax(-1), cell.argmax(-1)
        row, column = np.array(np.divmod(cell, side)) + np.array([(-1, 0, 1, 0), (0, 1, 0, -1)])[:, batch.action]
        grid = np.pad(walls.reshape(*level.shape, side, side), 2 * [(0, 0)] + 2 * [(1, 1)], constant_values=1)
        blocked = grid[*np.indices(level.shape), row + 1, column + 1] > 0
        cell = np.where(blocked, cell, row * side + column)
        for x in (batch.reward, batch.terminated):
            np.testing.assert_array_equal(x, cell == goal)
        goes_on = ~(batch.terminated | batch.truncated)[:-1]
        for x, following in ((cell, obs[1:, :, 2 * side**2 :].argmax(-1)), (level, level[1:])):
            np.testing.assert_array_equal(following[goes_on], x[:-1][goes_on])
        score, played = (dict(zip(before.number, x, strict=True)) for x in (before.score, before.played))
        for number, known, highest in zip(before.number, before.level.walls, before.highest, strict=True):
            if (there := level == number).any():
                assert np.all(walls[there] == known)
                score[number] = max(highest, batch.reward[there].max()) - value[there].mean()
                played[number] = count
        np.testing.assert_array_equal(batch.mask, np.isin(level, before.number[:6]))
        best = sorted(score, key=lambda i: -score[i])[:6]
        np.testing.assert_array_equal(after.number[:6], best)
        np.testing.assert_allclose(after.score[:6], [score[i] for i in best], rtol=1e-9)
        age = np.array([count - played[i] for i in best])
        rank = 1 / np.arange(1, 7)
        p = 0.7 * rank / rank.sum() + 0.3 * age / max(age.sum(), 1)
        np.testing.assert_allclose(np.exp(after.log_weight), [*(0.5 * p), *(0.5 / 3 for _ in range(3))], rtol=1e-6)
        assert after.number[6:].min() > before.number.max()
        for walls, start, goal in zip(*(x[6:] for x in after.level), strict=True):  # edits of levels that were kept
            changed = (after.level.walls[:6] != walls).sum(axis=1)[after.level.start[:6] == start]
            assert changed.min() <= 4
            assert not walls[[start, goal]].any()


def test_pqn_equals_a_loop_by_hand():
    module, batch = load_card("values", "Q-learning"), double()
    params = normal({"hidden": (OBS, 6), "q": (6, ACTIONS)}, 1)

    def q_of(params, obs):
        hidden = obs @ params["hidden"]
        centred = hidden - hidden.mean(-1, keepdims=True)
        hidden = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return jnp.maximum(hidden, 0) @ params["q"]

    def element(params, d):
        return 0.5 * (q_of(params, d["obs"])[jnp.arange(len(d["action"])), d["action"]] - d["target"]) ** 2

    out = module.epsilon_greedy(params, batch)
    q = q_of(params, batch.obs)
    assert_equal(out.value, q.max(-1))
    assert_equal(jnp.exp(out.distribution.logits), 0.1 / ACTIONS + 0.9 * (q == q.max(-1, keepdims=True)))
    check(element, given(module.pqn), params, [batch], cut(estimated(batch, gae_lambda=0.65)), module.epsilon_greedy)


def test_action_chunks_equal_steps_by_hand():
    """Compare three actions at once, which stop when the episode ends at 2, with single steps."""
    module, gamma = load_card("networks", "Action chunks"), 0.9

    def step(key, x, action):
        return envs.Step(x + action, x[None], reward=10 * x + action, terminated=x + action >= 2)

    play = module.in_chunks(step, gamma)
    for start, actions in ((0.0, [1.0, 0.0, 0.5]), (1.0, [0.5, 0.5, 7.0]), (1.5, [1.0, 7.0, 7.0])):
        x, reward, discount, ended = start, 0.0, 1.0, False
        for action in actions:
            if not ended:
                reward, discount, last = reward + discount * (10 * x + action), discount * gamma, x
                x, ended = x + action, x + action >= 2
        out = play(KEY, jnp.float64(start), jnp.asarray(actions))
        assert_equal((out.state, out.obs, out.reward), (jnp.float64(x), jnp.array([last]), jnp.float64(reward)))
        assert_equal(out.info["discount"], jnp.float64(discount))
        assert out.terminated == ended
    discount = jnp.asarray(np.random.default_rng(0).uniform(0.5, 1, (TIME, SEGMENTS)))
    batch = double().replace(mask=None).add_extras(discount=discount)
    written = module.chunked_gae.update(batch, (), pp.Context(key=KEY))[0]
    np.testing.assert_allclose((written.advantage, written.target), gae_of(batch, gamma=discount), rtol=1e-9)


def test_trials_keep_their_task_and_show_what_happened():
    """Compare episodes of one or two steps of a task with a hidden number."""

    def step(key, task, state, action):
        return envs.Step(state + 1, task[None] + state, reward=task * action, terminated=(state + 1) * action >= 2)

    trials = load_card("networks", "Memory across episodes").trials
    reset = lambda key, task: (1.0, jnp.zeros(1))  # noqa: E731
    begin, play = trials(jax.random.uniform, reset, step, episodes=2, num_actions=3)
    trial, obs = begin(KEY)
    task, ends = float(trial[0]), []
    np.testing.assert_array_equal(obs, [0, 0, 0, 0, 0, 0])
    for action, ended in ((0, False), (1, True), (2, True)):
        out = play(KEY, trial, action)
        (_, state, _), trial = out.state, out.state
        expected = [0.0 if ended else task + 1, *np.eye(3)[action], task * action, ended]
        np.testing.assert_allclose(out.obs, expected, rtol=1e-9)
        assert (float(trial[0]), float(state)) == (task, 1.0 if ended else 2.0)
        ends.append(bool(out.terminated))
    assert ends == [False, False, True]


@jax.enable_x64(False)
def test_a_pool_plays_the_opponents_that_win_most():
    """The second opponent never takes two matches, the third always does, and the first is always beaten."""
    module = load_card("self_play", "A pool of opponents", 1)
    module.__dict__.update(vars(load_card("self_play", "A game of your own", 1)))

    def policy(params, batch):
        return pp.Output(pp.distributions.Categorical(jnp.where(batch.obs.available, params, -jnp.inf)), None)

    logits = jnp.array([[0.0, 0.0], [50.0, 0.0], [0.0, 50.0]])
    pool = {"params": logits, "beaten": jnp.array([1.0, 0.5, 0.0])}
    env = module.against_pool(policy, pool)
    state, _ = env.reset(KEY, 500)
    found = jax.jit(env.step)(KEY, state, jnp.zeros(500, int))  # one match of five is taken, so four are left
    index = np.asarray(found[1].info["opponent"])
    np.testing.assert_allclose(np.bincount(index, minlength=3) / 500, [0, 0.2, 0.8], atol=0.06)
    left = np.argmax(found[1].obs.obs, axis=-1)
    np.testing.assert_array_equal(left, np.where(index == 1, 3, 2))
    last = jax.jit(env.step)(KEY, found[0], jnp.ones(500, int))[1]  # it takes the last two, or leaves one
    np.testing.assert_array_equal(last.reward, np.where(index == 2, 1.0, -1.0))
    assert last.terminated.all()
    with jax.enable_x64(True):
        pool, reward = in_double((pool, last.reward[None]))
        batch = pp.Batch(terminated=last.terminated[None], reward=reward).add_extras(opponent=index[None])
        after = module.renewed(pool, jnp.array([7.0, 8.0]), batch, rate=0.1)
        assert_equal(after["beaten"], jnp.array([0.5, 0.45, 0.1]))
        np.testing.assert_array_equal(after["params"], [[7.0, 8.0], *logits[1:]])
