"""Folded agents and recurrent policies in unusual shapes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_parts as pp
from ppo_parts import envs


def test_agents_whose_observations_are_pictures_have_no_number_appended():
    def reset(key, num_envs):
        obs = jnp.zeros((num_envs, 3, 3, 4, 1))
        return (), envs.Observation(obs)

    env = envs.Env(reset, None, envs.Box((3, 4, 1)), envs.Discrete(2), lambda state: env, num_agents=3)
    assert envs.fold_agents(env).reset(jax.random.key(0), 3)[1].shape == (3, 3, 4, 1)
    with pytest.raises(ValueError, match=r"those of an agent have shape \(3, 4, 1\): flatten them first"):
        envs.fold_agents(env, agent_id=True)


def test_agents_can_be_folded_without_a_change_of_observations():
    """Then a policy can be exported: there is nothing to apply to an observation."""

    def reset(key, num_envs):
        return (), envs.Observation(jnp.zeros((num_envs, 1, 3)))

    env = envs.Env(reset, None, envs.Box((3,)), envs.Discrete(2), lambda state: env, num_agents=1)
    assert envs.fold_agents(env).observe is None
    assert envs.fold_agents(env).act is None
    named = envs.fold_agents(env, agent_id=True)
    assert named.observe((), envs.Observation(jnp.zeros((5, 1, 3)))).shape == (5, 4)
    for obs in (jnp.zeros((5, 4)), envs.Observation(jnp.zeros((5, 4)), jnp.ones((5, 2), bool))):
        with pytest.raises(ValueError, match="observe takes the observations of all agents"):
            named.observe((), obs)
    doubled = envs.fold_agents(env._replace(act=lambda action: 2 * action))
    assert doubled.act(jnp.ones(5, int)).tolist() == [[2]] * 5


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Shared:
    """A Gaussian whose standard deviation `[D]` all elements share."""

    loc: jax.Array
    scale: jax.Array

    def log_prob(self, value):
        return jax.scipy.stats.norm.logpdf(value, self.loc, self.scale).sum(-1)

    def sample(self, *, seed):
        return self.loc + self.scale * jax.random.normal(seed, self.loc.shape)


@pytest.mark.lenient_ranks
@pytest.mark.parametrize("scale", [[0.1, 2.0], [[[0.1, 2.0]]]], ids=["[D]", "[1, 1, D]"])
def test_recurrent_policies_may_share_a_leaf_of_their_distribution(scale):
    def evaluate(params, batch):
        mean = jnp.zeros((*batch.obs.shape[:-1], 2))
        return Shared(mean, jnp.array(scale)), mean[..., 0], batch.carry

    def step(key, state, action):
        return envs.Step(state, jnp.ones(1), reward=0.0, terminated=False)

    env = envs.auto_reset(lambda key: (jnp.zeros(()), jnp.ones(1)), step, envs.Box((1,)), envs.Box((2,)), time_limit=9)
    policy = pp.Policy(lambda key: {}, evaluate, lambda num_envs: jnp.zeros((num_envs, 1)))
    rollout = pp.rollout(env, policy, num_envs=4, num_steps=200)
    _, batch, _ = jax.jit(rollout.collect)(jax.random.key(1), {}, rollout.init(jax.random.key(0)))
    np.testing.assert_allclose(batch.action.std((0, 1)), [0.1, 2.0], rtol=0.1)
    np.testing.assert_allclose(evaluate({}, batch)[0].log_prob(batch.action), batch.log_prob, rtol=1e-5)
