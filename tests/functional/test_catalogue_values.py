"""The catalogue's critics and advantages: every entry is checked as in `catalogue.py`, and against rlax's functions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from benchmarks import rnd
from ppo_parts import envs, networks
from ppo_parts.testing import check_part, example_batch
from tests import reference
from tests.catalogue import Entry, Law, check_golden, check_laws, check_reference
from tests.common import OBS, evaluate, make_params, rollout

f = pp.functional
SUPPORT = np.array([-4.0, -1.0, 0.0, 1.5, 4.0])
ATOMS = len(SUPPORT)


def values_and_targets():
    """Errors on both sides of every bound."""
    value, target = np.meshgrid([-1e4, -2.1, -0.3, 0.02, 0.7, 3.2, 1e4], [-5.0, -0.1, 0.0, 2.6])
    return {"value": value, "target": target}


def quantiles_and_targets():
    steps = np.random.default_rng(0).normal(size=(5, 4, 3))
    steps[0] *= 1e4
    return {"quantiles": steps, "target": np.random.default_rng(1).normal(size=(5, 4))}


def logits_and_targets():
    logits = np.random.default_rng(0).normal(size=(6, 4, ATOMS))
    logits[0] *= 1e4
    target = np.random.default_rng(1).normal(size=(6, 4))
    target[:, 0] = [-9.0, -4.0, -1.0, 0.0, 1.5, 30.0]  # beyond the support, and at its atoms
    return {"logits": logits, "target": target}


def three_values():
    rng = np.random.default_rng(2)
    return {name: scale * rng.normal(size=(20, 3)) for name, scale in (("value", 1), ("old_value", 1), ("target", 2))}


def half_square(value, target):
    return (value - target) ** 2 / 2


def clipped_error(value, old_value, target, *, clip_eps):
    near = np.clip(value, old_value - clip_eps, old_value + clip_eps)
    return np.maximum(half_square(value, target), half_square(near, target))


def huber(value, target, delta):
    error = np.abs(value - target)
    return np.where(error <= delta, error**2 / 2, delta * (error - delta / 2))


def quantile(quantiles, target, kappa):
    error = target[..., None] - quantiles
    tau = (np.arange(quantiles.shape[-1]) + 0.5) / quantiles.shape[-1]
    size = huber(error, 0, kappa) / kappa if kappa else np.abs(error)
    return np.mean(np.where(error < 0, 1 - tau, tau) * size, axis=-1)


def two_hot(target):
    y = np.clip(target, SUPPORT[0], SUPPORT[-1])
    above = np.clip(np.searchsorted(SUPPORT, y), 1, ATOMS - 1)
    share = (y - SUPPORT[above - 1]) / (SUPPORT[above] - SUPPORT[above - 1])
    eye = np.eye(ATOMS)
    return eye[above - 1] * (1 - share)[..., None] + eye[above] * share[..., None]


def gaussian(target, sigma):
    edges = np.array([-5.5, -2.5, -0.5, 0.75, 2.75, 5.25])
    y = np.clip(target, edges[0], edges[-1])[..., None]
    below = np.vectorize(reference.normal_cdf)((edges - y) / sigma)
    return np.diff(below, axis=-1) / (below[..., -1:] - below[..., :1])


def cross_entropy(logits, target, support, sigma=None):
    del support
    high = logits.max(axis=-1, keepdims=True)
    log_probs = logits - high - np.log(np.sum(np.exp(logits - high), axis=-1, keepdims=True))
    return -np.sum((two_hot(target) if sigma is None else gaussian(target, sigma)) * log_probs, axis=-1)


def nearest_atom(logits, target):
    label = jnp.argmin(jnp.abs(target[..., None] - SUPPORT.reshape(1, 1, -1)), axis=-1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


def pinball(quantiles, target):
    error = jax.lax.stop_gradient(target)[..., None] - quantiles
    tau = jnp.array([1, 3, 5]).reshape(1, 1, 3) / 6
    return jnp.mean(jnp.maximum(tau * error, (tau - 1) * error), axis=-1)


def critic(function, golden, expected, slow, settings, samples, *laws, note=""):
    return Entry(function, golden, expected, slow, settings, (next(iter(golden)),), samples, laws, note=note)


def plain(value, target, old_value=None):
    return f.value_loss(value, target)


def small(quantiles, target):
    return np.all(np.abs(quantiles) < 3, axis=-1)


LOGITS = {"logits": np.log([[0.1, 0.2, 0.3, 0.2, 0.2]])}
ENTRIES = (
    critic(f.value_loss, {"value": [2.0, 2.0, -1.0], "target": [2.0, 5.0, -3.0]}, [0.0, 4.5, 2.0], half_square, {},
           values_and_targets),
    # clipped to [-.5, .5]: .5*1.5^2 > 0; .5*4.5^2 > 4.5; .5*2.5^2 > 2; away from the target: .5*3^2 > .5*1.5^2
    critic(f.clipped_value_loss,
           {"value": [2.0, 2.0, -1.0, 2.0], "old_value": [0.0] * 4, "target": [2.0, 5.0, -3.0, -1.0]},
           [1.125, 10.125, 3.125, 4.5], clipped_error, {"clip_eps": 0.5}, three_values,
           Law(plain, {"clip_eps": np.inf})),
    critic(f.huber_value_loss, {"value": [0.5, 3.0, -3.0], "target": [0.0, 0.0, 1.0]}, [0.125, 2.5, 3.5], huber,
           {"delta": 1.0}, values_and_targets, Law(plain, {"delta": 1e3})),
    # .5 * (.25 + .75) * (2 - .5), .5 * .75 * .5
    critic(f.quantile_value_loss, {"quantiles": [[0.0, 0.0], [3.0, 2.0]], "target": [2.0, 2.0]}, [0.75, 0.1875],
           quantile, {"kappa": 1.0}, quantiles_and_targets, Law(pinball, {"kappa": 0.0}, where=small)),
    critic(f.categorical_value_loss, LOGITS | {"target": [-0.25]}, [-0.25 * np.log(0.2) - 0.75 * np.log(0.3)],
           cross_entropy, {"support": SUPPORT}, logits_and_targets, note="two-hot"),
    # with Phi at -10/3, -2/3, 1 and 11/3: .0004, .2525, .8413, .9999
    critic(f.categorical_value_loss, LOGITS | {"target": [0.0]}, [1.370976], cross_entropy,
           {"support": SUPPORT, "sigma": 0.75}, logits_and_targets,
           Law(nearest_atom, {"sigma": 1e-4}, where=lambda logits, target: np.isin(target, SUPPORT)), note="HL-Gauss"),
)  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)
def test_entry(entry):
    check_golden(entry)
    check_reference(entry)
    check_laws(entry)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)
def test_gradients_are_finite_up_to_float_range(entry):
    prediction, squares = entry.differentiable[0], entry.function in (f.value_loss, f.clipped_value_loss)
    given = {name: jnp.asarray(x, jnp.float32) for name, x in entry.samples().items()}
    for size in (1e30, -1e38 if entry.function is f.value_loss else -3e38):
        extreme = given | {prediction: jnp.sign(given[prediction]) * size}

        def total(x, extreme=extreme):
            losses = entry.function(**extreme | {prediction: x}, **entry.hyperparameters)
            return jnp.sum(losses if squares else losses / 1e3)

        loss, gradient = jax.value_and_grad(total)(extreme[prediction])
        assert np.isfinite(loss) or squares or abs(size) > 1e38
        assert np.isfinite(gradient).all()


def test_target_distributions_have_the_mean_of_the_target():
    target = jnp.asarray(logits_and_targets()["target"], jnp.float32)
    probs = f.two_hot(target, SUPPORT)
    np.testing.assert_allclose(probs, two_hot(np.asarray(target)), atol=1e-6)
    inside = jnp.clip(target, -4, 4)
    np.testing.assert_allclose(f.categorical_value(jnp.log(probs), SUPPORT), inside, atol=1e-5)
    fine = jnp.linspace(-8, 8, 161)
    smooth = f.hl_gauss(inside, fine, sigma=0.3)
    np.testing.assert_allclose(jnp.sum(smooth, -1), 1, atol=1e-6)
    np.testing.assert_allclose(f.categorical_value(jnp.log(smooth), fine), inside, atol=1e-4)


def test_bad_supports_are_refused():
    target, logits = jnp.zeros(3), jnp.zeros((3, ATOMS))
    for support in ([1.0], [0.0, 0.0], [[0.0, 1.0]], 3.0):
        with pytest.raises(ValueError, match="at least two increasing, finite numbers"):
            f.two_hot(target, support)
    with pytest.raises(pp.errors.ShapeError, match=r"logits \(3, 5\) and support \(4,\)"):
        f.categorical_value_loss(logits, target, support=SUPPORT[:4])
    with pytest.raises(pp.errors.ShapeError, match="Nothing is broadcast"):
        f.quantile_value_loss(logits, logits)
    with pytest.raises(ValueError, match=r"sigma must lie in \(0, inf\]"):
        f.hl_gauss(target, SUPPORT, sigma=0.0)


# --- parts -----------------------------------------------------------------------------------------------------------


def with_aux(params, batch):
    distribution, value = evaluate(params, batch)
    aux = {"logits": batch.obs @ params["logits"], "quantiles": batch.obs @ params["quantiles"]}
    statistics = jax.lax.stop_gradient(params["statistics"])
    return pp.Output(distribution, statistics["scale"] * value + statistics["mean"], aux=aux | {"normalized": value})


def write(params, old, new):
    w = f.rescale_head(params["value"], jnp.zeros(()), old, new)[0]
    return params | {"value": w, "statistics": new._asdict()}


def test_a_chain_learns_with_every_critic():
    params = make_params() | {"logits": jnp.zeros((OBS, ATOMS)), "quantiles": jnp.zeros((OBS, 3))}
    params |= {"statistics": {"mean": jnp.zeros(()), "scale": jnp.ones(())}}
    pipeline = pp.chain(
        pp.gae(gamma=0.9, gae_lambda=0.8),
        pp.critics.normalize_target(write, rate=lambda step: 1 / (step + 1)),
        pp.shuffled_minibatches(2),
        pp.clipped_surrogate(clip_eps=0.2),
        pp.critics.critic_loss(f.huber_value_loss, delta=lambda step: 1.0 + step, coef=0.5),
        pp.critics.critic_loss(f.quantile_value_loss, prediction="aux.quantiles", name="quantiles"),
        pp.critics.critic_loss(
            f.categorical_value_loss, prediction="aux.logits", name="logits", support=SUPPORT, sigma=0.75
        ),
        pp.within(
            pp.value_loss(),
            name="normalized",
            read={"value": "current.aux.normalized", "target": "extras.target_normalized"},
        ),
    )
    learner = pp.learner(with_aux, pipeline, optax.sgd(0.1))
    state, metrics = jax.jit(learner.update)(jax.random.key(0), learner.init(params), rollout())
    for name in ("value", "logits", "quantiles"):
        assert np.any(state.params[name] != params[name]), name
        assert np.isfinite(state.params[name]).all()
    assert {"value_loss", "quantiles_loss", "logits_loss", "normalized/value_loss"} <= set(metrics)
    assert state.params["statistics"]["scale"] == metrics["target_scale"] != 1
    assert pp.nonfinite_report(metrics) is None


def test_normalize_target_averages_over_rollouts():
    rng = np.random.default_rng(0)
    targets = 1000 + rng.normal(size=(4, 6, 3)).astype(np.float32)
    mask = np.ones((6, 3), np.float32)
    mask[0] = 0
    for rate, weights in {"mean": np.full(4, 0.25), 0.5: np.array([0.0625, 0.125, 0.25, 0.5])}.items():
        part = pp.critics.normalize_target(write, rate=(lambda step: 1 / (step + 1)) if rate == "mean" else rate)
        state = part.init(None)
        for step, target in enumerate(targets):
            poisoned = jnp.where(mask > 0, target, jnp.nan)
            batch = pp.Batch(target=poisoned, mask=mask)
            batch, state = part.update(batch, state, pp.Context(key=jax.random.key(0), step=jnp.int32(step)))
        kept = targets[:, 1:].astype(np.float64)
        first = 0.0 if rate == "mean" else 0.0625  # what is left of the first statistics, 0 and 1
        mean = np.sum(weights * kept.mean((1, 2)))
        square = np.sum(weights * np.square(kept).mean((1, 2))) + first
        np.testing.assert_allclose(state.mean, mean, rtol=1e-6)
        np.testing.assert_allclose(state.scale, np.sqrt(square - mean**2), rtol=1e-4)
        normalized = batch.extras["target_normalized"][1:]
        np.testing.assert_allclose(normalized, (kept[-1] - mean) / np.sqrt(square - mean**2), rtol=1e-3, atol=2e-3)


def test_critic_loss_refuses_what_it_cannot_compute():
    with pytest.raises(TypeError, match="unexpected keyword argument 'clip_eps'"):
        pp.critics.critic_loss(f.huber_value_loss, clip_eps=0.2)
    with pytest.raises(TypeError, match="missing a required argument: 'clip_eps'"):
        pp.critics.critic_loss(lambda value, target, *, clip_eps, mask: value)
    with pytest.raises(ValueError, match='prediction must be "value" or "aux'):
        pp.critics.critic_loss(f.huber_value_loss, prediction="logits")
    part = pp.critics.critic_loss(f.huber_value_loss, prediction="aux.logits")
    learner = pp.learner(evaluate, pp.chain(pp.gae(gamma=0.9, gae_lambda=0.8), pp.full_batch(), part), optax.sgd(0.1))
    with pytest.raises(ValueError, match="the policy returns no aux"):
        jax.eval_shape(learner.update, jax.random.key(0), learner.init(make_params()), rollout())


def test_rescale_head_keeps_the_value():
    rng = np.random.default_rng(0)
    kernel, bias, x = rng.normal(size=(4, 1)), rng.normal(size=1), rng.normal(size=(5, 4))
    with jax.enable_x64(True):
        w, b = map(np.asarray, f.rescale_head(jnp.asarray(kernel), jnp.asarray(bias), (3.0, 2.0), (-1.0, 7.0)))
    np.testing.assert_allclose(7 * (x @ w + b) - 1, 2 * (x @ kernel + bias) + 3, rtol=1e-12)


# --- advantages ------------------------------------------------------------------------------------------------------


def test_vtrace_mixes_only_inside_an_episode():
    batch = rollout()
    names = ("reward", "value", "next_value", "terminated", "truncated", "mask")
    given = {name: np.asarray(getattr(batch, name), np.float64) for name in names}
    log_ratio = np.random.default_rng(0).normal(size=given["value"].shape)
    settings = {"gamma": 0.9, "gae_lambda": 0.7, "pg_rho_clip": 1.4, "pg_lambda": 0.3}
    with jax.enable_x64(True):
        ours = f.vtrace(log_ratio, **given, **settings)
        plain = f.vtrace(log_ratio, **given, gamma=0.9, gae_lambda=0.7)
        same = f.vtrace(log_ratio, **given, gamma=0.9, gae_lambda=0.7, pg_rho_clip=1.0, pg_lambda=1.0)
    expected = reference.vtrace(log_ratio, **given, **settings)
    np.testing.assert_allclose(ours.policy_advantage, expected[2], atol=1e-9)
    np.testing.assert_array_equal(ours.error, plain.error)
    np.testing.assert_allclose(same.policy_advantage, plain.policy_advantage, atol=1e-12)
    with pytest.raises(ValueError, match="only with policy_gradient=True"):
        pp.vtrace(gamma=0.9, pg_lambda=0.5)
    with pytest.raises(ValueError, match=r"pg_lambda must lie in \[0, 1\], got 1.5"):
        f.vtrace(log_ratio, **given, gamma=0.9, pg_lambda=1.5)


def test_each_segment_may_have_its_own_lambda():
    batch = rollout()
    names = ("reward", "value", "next_value", "terminated", "truncated", "mask")
    given = {name: getattr(batch, name) for name in names}
    lengths = jnp.array([10.0 + 30 * n for n in range(given["value"].shape[1])])
    decay = jnp.maximum(0, 1 - 1 / (0.05 * lengths))  # VAPO
    together = f.gae(**given, gamma=1.0, gae_lambda=decay)
    for n, gae_lambda in enumerate(decay):
        alone = f.gae(**{name: x[:, n] for name, x in given.items()}, gamma=1.0, gae_lambda=gae_lambda)
        np.testing.assert_allclose(together.advantage[:, n], alone.advantage, rtol=1e-6)


# --- exploration: what docs/exploration.md composes ------------------------------------------------------------------


def test_gsde_keeps_a_noise_matrix_for_some_steps():
    num_steps, held = 7, 3
    env = envs.prepare(envs.make("MountainCarContinuous-v0"))
    policy = networks.actor_critic(env, (16, 8), log_std=-1.0, gsde=True)
    settings = {"num_envs": 5, "num_steps": num_steps, "keep_distribution": True}
    rollouts = [pp.rollout(env, policy, **settings, noise_steps=n) for n in (held, 1)]
    params, key = policy.init(jax.random.key(0)), jax.random.key(2)
    first = rollouts[0].init(jax.random.key(1))
    (_, batch, _), (_, white, _) = (jax.jit(each.collect)(key, params, first) for each in rollouts)

    # The same matrix theta explains the noise of every step in which it was held, and of no other step.
    noise, features = batch.action - batch.behavior.loc, np.asarray(batch.behavior.features)
    keys = jax.random.split(key, (num_steps, 2))[:, 0]
    for step in range(num_steps):
        theta = [np.exp(-1) * jax.random.normal(keys[begin], (5, 8, 1)) for begin in range(0, num_steps, held)]
        expected = np.einsum("nl,nld->nd", features[step], theta[step // held])
        np.testing.assert_allclose(noise[step], expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(batch.action[0], white.action[0])
    assert np.all(white.action[1] != batch.action[1])
    np.testing.assert_allclose(batch.log_prob, batch.behavior.log_prob(batch.action), rtol=1e-4, atol=1e-5)


def test_gsde_is_a_gaussian_whose_deviation_depends_on_the_state():
    rng = np.random.default_rng(0)
    loc, features, std = rng.normal(size=(5, 2)), rng.normal(size=(5, 3)), rng.uniform(0.5, 2, (3, 2))
    policy = pp.distributions.StateDependentNormal(*(jnp.asarray(x, jnp.float32) for x in (loc, features, std)))
    scale = np.array([[np.sqrt(sum((features[n] * std[:, d]) ** 2) + 1e-6) for d in range(2)] for n in range(5)])
    action = rng.normal(size=(5, 2))
    noise = (np.asarray(policy.sample(seed=jax.random.key(0), sample_shape=(20_000,))) - loc) / scale
    np.testing.assert_allclose(noise.mean(axis=0), 0, atol=0.04)
    np.testing.assert_allclose(noise.std(axis=0), 1, atol=0.03)
    without = pp.distributions.StateDependentNormal(policy.loc, jnp.zeros((5, 3)), policy.std)
    np.testing.assert_allclose(without.scale, 1e-3, rtol=1e-6)
    white = pp.distributions.StateDependentNormal(policy.loc, jnp.ones((5, 1)), jnp.ones((1, 2)), eps=0.0)
    np.testing.assert_allclose(white.log_prob(action), pp.distributions.Normal(policy.loc, 1.0).log_prob(action))


@pytest.mark.parametrize("squash", [False, True])
def test_gsde_is_that_of_stable_baselines3(squash, monkeypatch):
    # StateDependentNoiseDistribution(2, learn_features=False, epsilon=1e-6, squash_output=...) of 2.9.2, in float64.
    std = jnp.exp(jnp.array([[-1.0, 0.5], [0.0, -0.5], [0.25, 1.0]]))
    loc, features = jnp.array([[0.1, -0.2], [1.0, 0.0]]), jnp.array([[0.5, -1.0, 0.25], [2.0, 0.0, -0.75]])
    if squash:
        policy, action = pp.distributions.StateDependentTanhNormal(loc, features, std), [[0.5, 0.75], [-0.9, 0.3]]
        # It adds 1e-6 to the slope of tanh, 1 - a^2, which is undone here.
        expected = np.array([-1.538052973435159, -3.7138797325069266])
        expected += np.log1p(1e-6 / (1 - np.square(action))).sum(axis=-1)
        sample = [[-0.8536681923742047, -0.5752668833044345], [0.9557936116007979, -0.9999303099647209]]
    else:
        policy, action = pp.distributions.StateDependentNormal(loc, features, std), [[0.5, 1.0], [-2.0, 0.3]]
        np.testing.assert_allclose(policy.entropy(), [3.1078328762841476, 4.385088732166956], rtol=1e-6)
        expected = [-2.6552537054240153, -6.45191712618385]
        sample = [[-1.2695225317446384, -0.6553594878318323], [1.8948410084639296, -5.132282775610112]]
    np.testing.assert_allclose(policy.log_prob(jnp.array(action)), expected, rtol=1e-6)
    theta = jnp.broadcast_to(jnp.array([[0.3, -1.0], [1.2, 0.4], [-0.7, 0.9]]), (2, 3, 2))
    monkeypatch.setattr(jax.random, "normal", lambda *_: theta)
    np.testing.assert_allclose(policy.sample(seed=jax.random.key(0)), sample, rtol=1e-6)


def test_gsde_trains_the_deviation_and_not_the_features():
    env = envs.make("MountainCarContinuous-v0")
    policy = networks.actor_critic(env, (4,), gsde=True)
    params, batch = policy.init(jax.random.key(0)), pp.Batch(obs=jnp.ones((6, 2)))
    assert params["params"]["log_std"].shape == (4, 1)
    slope = jax.grad(lambda p: jnp.sum(policy(p, batch).distribution.entropy()))(params)["params"]
    assert np.all(np.asarray(slope["log_std"]) > 0)
    assert all(not np.any(leaf) for name, layer in slope.items() if name != "log_std" for leaf in layer.values())


def test_squashed_gsde_from_the_network():
    env = envs.make("Pendulum-v1")
    policy = networks.actor_critic(env, (4,), log_std=-1.0, squash=True, gsde=True)
    params, batch = policy.init(jax.random.key(0)), pp.Batch(obs=jnp.ones((6, 3)))
    distribution = policy(params, batch).distribution
    assert isinstance(distribution, pp.distributions.StateDependentTanhNormal)
    action = distribution.sample(seed=jax.random.key(1))
    u = distribution.base.sample(seed=jax.random.key(1))
    np.testing.assert_allclose(action, 2 * np.tanh(u), rtol=1e-6)  # the torque is in [-2, 2]
    features = np.asarray(distribution.base.features)
    np.testing.assert_allclose(
        distribution.base.scale[:, 0], np.sqrt(np.square(features * np.exp(-1)).sum(axis=-1) + 1e-6), rtol=1e-5
    )


@pytest.mark.parametrize("option", ["gsde", "squash"])
def test_options_of_continuous_actions_are_refused_for_discrete_ones(option):
    env = envs.make("CartPole-v1")
    with pytest.raises(ValueError, match=rf"actor_critic: {option} must be False, because the actions are discrete"):
        networks.actor_critic(env, **{option: True})
    settings = {"squash": True} if option == "squash" else {"features": jnp.zeros((3, 4))}
    with pytest.raises(ValueError, match=r"action_distribution: \w+ must be \w+, because the actions are"):
        networks.action_distribution(env.action_space, jnp.zeros((3, 2)), **settings)


@pytest.mark.parametrize("shapes", [((5, 2), (5, 3), (3, 1)), ((5, 2), (4, 3), (3, 2)), ((5, 2), (3,), (3, 2))])
def test_gsde_broadcasts_nothing(shapes):
    with pytest.raises(pp.errors.ShapeError, match=r"StateDependentNormal: loc must be \[..., D\], features"):
        pp.distributions.StateDependentNormal(*map(jnp.zeros, shapes))


def embed(network, obs):
    return jnp.tanh(obs @ network)


def draw(key):
    return jax.random.normal(key, (OBS, 2))


def test_rnd_leaves_masked_steps_out():
    part, batch = pp.exploration.rnd_reward(draw, embed, num_envs=4, gamma=0.5), example_batch()
    keep = np.asarray(batch.mask, bool)
    batch = batch.replace(next_obs=jnp.where(keep[..., None], batch.next_obs, jnp.nan))
    params = {"predictor": draw(jax.random.key(0))}
    state = part.init(params, jax.random.key(1))
    out, after = part.update(batch, state, pp.Context(key=jax.random.key(2), params=params))
    error = jnp.mean(jnp.square(embed(params["predictor"], batch.next_obs) - embed(state.target, batch.next_obs)), -1)
    totals, sums = np.zeros(4), np.zeros((6, 4))
    for t in range(6):
        totals = np.where(keep[t], 0.5 * totals + error[t], totals)
        sums[t] = totals
    np.testing.assert_allclose(after.discounted, totals, rtol=1e-6)
    np.testing.assert_allclose(after.moments.var, np.var(sums[keep]), rtol=1e-5)
    expected = np.where(keep, error, 0) / np.std(sums[keep])
    np.testing.assert_allclose(out.extras["rnd_reward"], expected, rtol=1e-5)


def test_two_rewards_of_rnd_have_names_of_their_own():
    params = {name: draw(jax.random.key(seed)) for seed, name in enumerate(("near", "far"))}
    rewards = pp.chain(
        *(pp.exploration.rnd_reward(draw, embed, num_envs=4, predictor=name, name=name) for name in params)
    )
    context = pp.Context(key=jax.random.key(2), params=params)
    batch, _ = rewards.update(example_batch(), rewards.init(params, jax.random.key(1)), context)
    assert not np.array_equal(batch.extras["near_target"], batch.extras["far_target"])
    for name, predictor in params.items():
        loss = pp.exploration.rnd_loss(embed, predictor=name, name=name)
        after, _ = loss.update(batch, loss.init(params), context)
        error = embed(predictor, batch.next_obs) - batch.extras[f"{name}_target"]
        np.testing.assert_allclose(after.losses[name], jnp.mean(jnp.square(error), axis=-1), rtol=1e-6)
        assert f"{name}_reward" in batch.metrics


def test_the_loss_of_rnd_obeys_the_laws_and_what_cannot_work_is_refused():
    def batch(seed=0, dtype=jnp.float32):
        given = example_batch(seed, dtype, after_sampler=True).replace(current=None)
        return given.replace(extras={**given.extras, "rnd_target": embed(jnp.ones((OBS, 2), dtype), given.obs)})

    check_part(pp.exploration.rnd_loss(embed, predictor="policy"), batch=batch)
    reward, params = pp.exploration.rnd_reward(draw, embed, num_envs=3), {"predictor": jnp.ones((OBS, 2))}
    with pytest.raises(pp.errors.UserTypeError, match="rnd_reward: embed must be a function, got None"):
        pp.exploration.rnd_reward(draw, None, num_envs=3)
    with pytest.raises(
        pp.errors.UserValueError, match=r"an entry 'predictor' for the predictor, got \['policy', 'value'\]"
    ):
        reward.init(make_params(), jax.random.key(0))
    with pytest.raises(pp.errors.UserValueError, match=r"drawn with a key: call learner\.init\(params, key\)"):
        reward.init(params)
    state = reward.init(params, jax.random.key(0))
    flat = pp.exploration.rnd_reward(draw, lambda network, obs: jnp.sum(embed(network, obs), axis=-1), num_envs=4)
    with pytest.raises(
        pp.errors.UserValueError, match=r"embed must return an array \[6, 4, K\] here, got shape \(6, 4\)"
    ):
        flat.update(batch(), state, pp.Context(key=jax.random.key(0), params=params))
    with pytest.raises(pp.errors.UserValueError, match=r"num_envs=3, but the rollout has the axes \(6, 4\)"):
        reward.update(batch(), state, pp.Context(key=jax.random.key(0), params=params))


@pytest.mark.lenient_ranks
def test_rnd_rewards_what_it_has_not_seen():
    config = rnd.Config(size=4, num_envs=2)
    cells, network = jnp.eye(16).reshape(16, 4, 4), rnd.Embedding()
    part = pp.chain(
        rnd.standardized_next_obs((4, 4)),
        pp.within(
            pp.exploration.rnd_reward(lambda key: network.init(key, cells[0]), network.apply, num_envs=2),
            read={"next_obs": "extras.novel_obs"}, write={"extras.rnd_reward": "extras.intrinsic"}, name="novelty",
        ),
    )  # fmt: skip
    seen, new = cells[jnp.zeros((6, 2), int)], cells[jnp.zeros((6, 2), int).at[-1, 1].set(5)]
    params = {"predictor": network.init(jax.random.key(0), cells[0])}
    state = part.init(params, jax.random.key(1))
    context = pp.Context(key=jax.random.key(2), params=params)
    _, state = part.update(pp.Batch(next_obs=seen, log_prob=jnp.zeros((6, 2))), state, context)
    batch, _ = part.update(pp.Batch(next_obs=new, log_prob=jnp.zeros((6, 2))), state, context)
    reward = batch.extras["intrinsic"]
    assert reward[-1, 1] > 2 * reward[-1, 0]
    plain, full = (rnd.make_train(dataclasses.replace(config, rnd=used)) for used in (False, True))
    assert "novelty/rnd_reward" in full.shapes[1]
    assert "novelty/rnd_reward" not in plain.shapes[1]
