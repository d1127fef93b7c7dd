"""State that all environments share: `reset` sees it, it is in the state once, and it can be replaced from outside."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from ppo_parts import envs

KEY, N = jax.random.key(0), 4
SHARED = {"start": jnp.arange(4.0) * 10, "log_weight": jnp.zeros(4)}


def walk(shared=SHARED):
    """Episodes of two steps from a start that is drawn."""

    def reset(key, shared):
        x = shared["start"][jax.random.categorical(key, shared["log_weight"])]
        return x, x[None]

    def step(key, x, action):
        return envs.Step(x + 1, x[None] + 1, reward=x, terminated=False)

    return envs.auto_reset(reset, step, envs.Box((1,)), envs.Discrete(2), time_limit=2, shared=shared)


def test_what_is_replaced_is_seen_by_later_episodes_only_without_tracing_again():
    env, action = walk(), jnp.zeros(N, int)
    state, first = env.reset(KEY, N)
    assert set(first[:, 0].tolist()) <= {0, 10, 20, 30}
    step = jax.jit(env.step)
    state, _ = step(KEY, state, action)
    new = SHARED | {"start": 0 * SHARED["start"] + 100}
    state, out = step(KEY, optax.tree.set(state, shared=new), action)
    np.testing.assert_array_equal(out.final_obs, first + 2)  # the old episode goes on, to its end
    np.testing.assert_array_equal(out.obs, 100)
    np.testing.assert_array_equal(optax.tree.get(state, "shared")["start"], 100)
    assert step._cache_size() == 1
    np.testing.assert_array_equal(env.evaluation(state).reset(KEY, N)[1], 100)
    np.testing.assert_array_equal(env.reset(KEY, N)[1], first)


def test_it_stays_whole_when_environments_are_divided_over_devices():
    rollout = pp.rollout(walk(), lambda params, batch: None, num_envs=N, num_steps=3)
    spec = jax.tree.map(lambda x: x.spec, rollout.sharding(jax.sharding.Mesh(np.array(jax.devices()[:1]), "d")))
    assert set(jax.tree.leaves(spec.env_state.shared)) == {jax.sharding.PartitionSpec()}
    assert spec.env_state.inner == jax.sharding.PartitionSpec("d")


def test_it_must_stay_alike():
    state, _ = walk().reset(KEY, N)
    for other in (None, SHARED | {"start": jnp.zeros(3)}):
        with pytest.raises(pp.errors.UserTypeError, match=r"^auto_reset: shared must stay like .*float32\[4\].*, got"):
            walk().step(KEY, state._replace(shared=other), jnp.zeros(N, int))
