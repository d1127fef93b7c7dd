"""State-dependent noise (gSDE): the numbers of Stable-Baselines3, the rollout that holds its noise, and the network."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_parts as pp
from ppo_parts import envs, networks


def test_gsde_keeps_a_noise_matrix_for_some_steps():
    num_steps, held = 7, 3
    env = envs.prepare(envs.make("MountainCarContinuous-v0"))
    policy = networks.actor_critic(env, (16, 8), log_std=-1.0, gsde=True)
    settings = {"num_envs": 5, "num_steps": num_steps, "keep_distribution": True}
    rollout = pp.rollout(env, policy, **settings, noise_steps=held)
    params, key = jax.jit(policy.init)(jax.random.key(0)), jax.random.key(2)
    _, batch, _ = jax.jit(rollout.collect)(key, params, jax.jit(rollout.init)(jax.random.key(1)))

    # The same matrix theta explains the noise of every step in which it was held, and of no other step.
    noise, features = batch.action - batch.behavior.loc, np.asarray(batch.behavior.features)
    keys = jax.random.split(key, (num_steps, 2))[:, 0]
    theta = [np.exp(-1) * jax.random.normal(keys[begin], (5, 8, 1)) for begin in range(0, num_steps, held)]
    for step in range(num_steps):
        expected = np.einsum("nl,nld->nd", features[step], theta[step // held])
        np.testing.assert_allclose(noise[step], expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(batch.log_prob, batch.behavior.log_prob(batch.action), rtol=1e-4, atol=1e-5)


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


def test_gsde_from_the_network_trains_the_deviation_and_not_the_features():
    env = envs.make("Pendulum-v1")
    policy = networks.actor_critic(env, (4,), log_std=-1.0, squash=True, gsde=True)
    params, batch = jax.jit(policy.init)(jax.random.key(0)), pp.Batch(obs=jnp.ones((6, 3)))
    distribution = jax.jit(policy.evaluate)(params, batch).distribution
    assert isinstance(distribution, pp.distributions.StateDependentTanhNormal)
    u = distribution.base.sample(seed=jax.random.key(1))
    np.testing.assert_allclose(distribution.sample(seed=jax.random.key(1)), 2 * np.tanh(u), rtol=1e-6)  # in [-2, 2]
    scale = np.sqrt(np.square(np.asarray(distribution.base.features) * np.exp(-1)).sum(axis=-1) + 1e-6)
    np.testing.assert_allclose(distribution.base.scale[:, 0], scale, rtol=1e-5)
    assert params["params"]["log_std"].shape == (4, 1)
    slope = jax.jit(jax.grad(lambda p: jnp.sum(policy(p, batch).distribution.base.entropy())))(params)["params"]
    assert np.all(np.asarray(slope["log_std"]) > 0)
    assert all(not np.any(leaf) for name, layer in slope.items() if name != "log_std" for leaf in layer.values())
