"""The hand-written rivals of the benchmarks are the same algorithms as the recipes: they end with the same parameters.

All that is random is replaced by something fixed on both sides, each in the terms it uses: initial weights, where
environments begin, actions, shuffles and draws.
"""

import distrax
import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import handwritten, train
from ppo_parts import distributions, envs, functional, networks
from ppo_parts.recipes import cleanrl_ppo, ippo, pufferlib_ppo

COMMON = {"total_timesteps": 96, "num_envs": 4, "num_steps": 8, "num_minibatches": 2}


@jax.custom_batching.custom_vmap
def number(key):
    """Which of the environments this is: vmap counts them."""
    del key
    return jnp.zeros((), jnp.int32)


@number.def_vmap
def numbered(axis_size, in_batched, key):
    del in_batched, key
    return jnp.arange(axis_size), True


class Fixed:
    """An environment with gymnax's interface in which only the actions matter: `(number, step)` is all its state."""

    default_params = None

    def observation_space(self, params):
        del params
        return gymnax.environments.spaces.Box(-1, 1, (3,))

    def action_space(self, params):
        del params
        return gymnax.environments.spaces.Discrete(3)

    def seen(self, state):
        number, step = state
        return jnp.sin(jnp.arange(1, 4) * (1 + number + 0.3 * step))

    def reset(self, key, params):
        del params
        state = number(key), jnp.zeros((), jnp.int32)
        return self.seen(state), state

    def step(self, key, state, action, params):
        del key, params
        which, step = state
        reward = jnp.cos(which + 2.0 * step) * action
        ends = step == 2 + which
        state = which, jnp.where(ends, 0, step + 1)
        obs = self.seen(state)
        return obs, state, reward, ends, jnp.zeros((), bool), {"final_observation": obs}


@pytest.fixture(autouse=True)
def nothing_random(monkeypatch):
    def orthogonal(gain):
        return lambda key, shape, dtype: gain * jnp.sin(jnp.arange(np.prod(shape), dtype=dtype)).reshape(shape)

    def shuffle(key, size):
        del key
        return jnp.arange(size) * 7 % size

    def choice(key, a, shape, replace, p):  # those that are most probable, whatever a is a power of
        del key, replace
        assert p.shape == (a,)
        return jnp.argsort(-p)[: shape[0]]

    monkeypatch.setattr(gymnax, "make", lambda env_id: (Fixed(), None))
    for module in (nn.initializers, networks._dense):
        monkeypatch.setattr(module, "orthogonal", orthogonal)
    monkeypatch.setattr(jax.random, "permutation", shuffle)
    monkeypatch.setattr(functional, "permutation", shuffle)
    monkeypatch.setattr(jax.random, "choice", choice)
    monkeypatch.setattr(
        functional, "sample_without_replacement", lambda key, p, size: (choice(key, len(p), (size,), False, p), p)
    )
    for distribution in (distrax.Categorical, distributions.Categorical):
        monkeypatch.setattr(
            distribution, "sample", lambda self, seed, sample_shape=(): jnp.argmax(self.logits, axis=-1)
        )


def cleanrl():
    config = cleanrl_ppo.Config(**COMMON, update_epochs=2, hidden=(8, 8), learning_rate=0.01)
    return cleanrl_ppo.make_train(config, envs.from_gymnax(Fixed())), handwritten.cleanrl.make_train(config)


def pufferlib():
    config = pufferlib_ppo.Config(**COMMON, update_epochs=2, hidden=8, optimizer="adam", learning_rate=0.01)
    env = envs.normalize_observation(envs.from_gymnax(Fixed()))
    env = envs.normalize_reward(env, gamma=config.gamma)
    return pufferlib_ppo.make_train(config, env), handwritten.pufferlib.make_train(config)


def two_phases():
    rates = {"actor_learning_rate": 0.01, "critic_learning_rate": 0.02}
    config = ippo.Config(**COMMON, **rates, actor_epochs=2, critic_epochs=3, hidden=8)
    env = train.one_agent(envs.from_gymnax(Fixed()))
    return ippo.make_train(config, env), handwritten.ippo.make_train(config)


@pytest.mark.lenient_ranks  # hand-written, in a style that broadcasts
@pytest.mark.parametrize("programs", [cleanrl, pufferlib, two_phases])
def test_they_end_with_the_same_parameters(programs):
    ours, theirs = programs()
    result = jax.jit(ours)(jax.random.key(0))
    params, metrics = jax.jit(theirs)(jax.random.key(0))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), result.state.learner.params, params
    )
    biases = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim == 1]
    assert min(np.abs(bias).max() for bias in biases) > 1e-3  # they were 0
    np.testing.assert_allclose(metrics["episode_return"], result.metrics["episode_return"], rtol=1e-5)
    np.testing.assert_array_equal(metrics["episodes"], result.metrics["episodes"])
