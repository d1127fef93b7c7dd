"""Multi-agent environments: rollouts, masks, layouts, evaluation, on a game whose solution is known."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from ppo_parts import envs, networks, training
from ppo_parts.envs import _registry
from ppo_parts.recipes import ippo
from tests.common import compiled, refused
from tests.envs.common import AGENTS, altered, bit_game

pytestmark = pytest.mark.lenient_ranks  # flax adds biases [H] to [T, N, H]
SMALL = ippo.Config(total_timesteps=8 * 16 * 60, num_envs=8, num_steps=16, hidden=16, num_minibatches=2)


def test_the_game_is_solved():
    """By networks that agents share, which remember, and a critic that sees all of them."""
    layout = {"critic": "central", "agent_id": True, "memory": "gru", "num_steps": 8}
    config = dataclasses.replace(SMALL, actor_learning_rate=0.01, critic_learning_rate=0.01, **layout)
    train = ippo.make_train(config, bit_game())
    result = jax.jit(train)(jax.random.key(0))
    assert float(training.last_episodes_return(result.metrics["episode_return"], result.metrics["episodes"])) > 3.8
    assert set(result.metrics) >= {"actor/policy_loss", "critic/value_loss", "actor/epochs", "episode_first"}
    assert all(int(np.sum(x)) == 0 for name, x in result.metrics.items() if "nonfinite" in name)
    played = jax.jit(lambda state: train.evaluate_policy(jax.random.key(1), state, 3, mode=True))(result.state)
    assert played.episode_return.tolist() == [[4, 4]] * 3
    assert played.episode_length.tolist() == [4] * 3
    assert played.truncated.all()
    assert not played.terminated.any()
    assert played.info["first"].all()


def test_a_rollout_has_an_axis_of_agents():
    """Agent 1 is gone after the second step of each episode."""
    train = ippo.make_train(dataclasses.replace(SMALL, agent_id=True), bit_game(mortal=True))
    state = jax.jit(train.init)(jax.random.key(0))
    _, batch, metrics = jax.jit(train.rollout.collect)(jax.random.key(1), state.learner.params, state.rollout)
    assert batch.obs.obs.shape == (16, 8, 2, 1)
    assert batch.log_prob.shape == batch.value.shape == batch.next_value.shape == batch.mask.shape == (16, 8, 2)
    np.testing.assert_array_equal(batch.mask[:, :, 0], True)
    np.testing.assert_array_equal(batch.mask[:, 0, 1], np.arange(16) % 4 < 2)
    np.testing.assert_array_equal(batch.truncated[:, 0, 0], np.arange(16) % 4 == 3)
    assert int(metrics["episodes"]) == 8 * 4
    assert float(metrics["episode_length"]) == 4


def test_clipping_per_agent_is_each_agents_own():
    clip, updates = optax.clip_by_global_norm(1.0), {"w": jnp.array([[30.0, 40.0], [0.3, 0.4]])}
    optimizer = pp.agents.per_agent(clip)
    clipped, _ = optimizer.update(updates, optimizer.init(updates))
    np.testing.assert_allclose(clipped["w"], [[0.6, 0.8], [0.3, 0.4]], rtol=1e-6)
    with pytest.raises(ValueError, match="agents share"):
        optimizer.init({"w": jnp.ones((2, 3)), "b": jnp.ones(3)})
    with pytest.raises(TypeError, match="optax transformation"):
        pp.agents.per_agent(optax.adam)
    step = pp.agents.per_agent(pp.optim.scale_by_update_schedule(lambda step: 0.1 * step))
    scaled, _ = step.update(updates, step.init(updates), step=jnp.array(2))
    np.testing.assert_allclose(scaled["w"], -0.2 * updates["w"], rtol=1e-6)
    own = optax.GradientTransformationExtraArgs(lambda p: (), lambda u, s, p=None, *, grad=None: (grad or u, s))
    kept, _ = pp.agents.per_agent(own).update(updates, (), grad={"w": 0 * updates["w"]})  # that of all agents
    np.testing.assert_array_equal(kept["w"], updates["w"])


def test_folded_agents_are_environments_of_their_own():
    env = envs.fold_agents(bit_game(mortal=True), agent_id=True)
    assert env.num_agents is None
    assert env.observation_space.shape == (3,)
    reset, step = compiled(env)
    state, obs = reset(jax.random.key(0), 6)
    assert obs.shape == (6, 3)
    np.testing.assert_array_equal(obs[:, 1:], np.tile(np.eye(2), (3, 1)))
    for _ in range(3):
        state, out = step(jax.random.key(1), state, jnp.abs(obs[:, 0] - obs[:, 2]).astype(int))
        obs = out.obs
        np.testing.assert_array_equal(out.reward, 1)
    assert out.reward.shape == out.episode_return.shape == out.ended.shape == (6,)
    assert out.mask.tolist() == [True, False] * 3


def showing(agents, shape):
    """An environment that shows zeros of this shape to each agent."""

    def reset(key, num_envs):
        return (), envs.Observation(jnp.zeros((num_envs, agents, *shape)))

    env = envs.Env(reset, None, envs.Box(shape), envs.Discrete(2), lambda state: env, num_agents=agents)
    return env


def test_agents_are_folded_without_a_change_of_observations_or_with_a_number_appended():
    """Then a policy can be exported: there is nothing to apply to an observation."""
    env = showing(1, (3,))
    for agent_id in (False, True):
        folded = envs.fold_agents(env._replace(act=jnp.negative), agent_id=agent_id)
        assert folded.observe is None
        assert folded.act is jnp.negative
    normalized = envs.fold_agents(envs.normalize_observation(env), agent_id=True)
    state, obs = normalized.reset(jax.random.key(0), 5)
    for given in (jnp.zeros((5, 1, 3)), envs.Observation(jnp.zeros((5, 1, 3)))):
        np.testing.assert_array_equal(normalized.observe(state, given), obs)
    for obs in (jnp.zeros((5, 4)), envs.Observation(jnp.zeros((5, 4)), jnp.ones((5, 2), bool))):
        with pytest.raises(ValueError, match="observe takes the observations of all agents"):
            normalized.observe(state, obs)
    env = showing(3, (3, 4, 1))
    assert envs.fold_agents(env).reset(jax.random.key(0), 3)[1].shape == (3, 3, 4, 1)
    with pytest.raises(ValueError, match=r"those of an agent have shape \(3, 4, 1\): flatten them first"):
        envs.fold_agents(env, agent_id=True)


def test_observations_of_agents_may_be_plain_arrays_or_have_what_only_the_critic_sees():
    def seen(change, **spaces):
        def reset(key, num_envs):
            state, obs = bit_game().reset(key, num_envs)
            return state, change(obs)

        env = bit_game()._replace(reset=reset, **spaces)
        return env, env.reset(jax.random.key(0), 3)[1], envs.fold_agents(env).reset(jax.random.key(0), 3 * AGENTS)[1]

    env, obs, folded = seen(lambda obs: obs.obs)
    np.testing.assert_array_equal(folded, obs.reshape(-1, 1))
    policy = networks.multi_agent_actor_critic(env)
    params = jax.jit(policy.init)(jax.random.key(0))
    plain, wrapped = (policy(params, pp.Batch(obs=x)) for x in (obs[None], envs.Observation(obs[None])))
    np.testing.assert_array_equal(plain.value, wrapped.value)
    privileged = jnp.arange(12.0 * AGENTS).reshape(3, AGENTS, 4)
    change = lambda obs: obs._replace(privileged=privileged[: len(obs.obs)])  # noqa: E731
    _, _, folded = seen(change, privileged_space=envs.Box((4,)))
    np.testing.assert_array_equal(folded.privileged, privileged.reshape(-1, 4))


test_what_does_not_fit_several_agents_is_refused = refused(
    (lambda: envs.fold_agents(envs.fold_agents(bit_game())), "one agent already"),
    (lambda: envs.fold_agents(bit_game()).reset(jax.random.key(0), 5), "counts agents .* multiple of 2, got 5: give 6"),
    (lambda: envs.check(altered(bit_game(), ended=lambda out: None)), r"ended must be .* got None: where the episode"),
)


def test_the_recipe_normalizes_with_the_statistics_of_its_networks(monkeypatch):
    monkeypatch.setattr(_registry, "_registered", {})
    envs.register("mine", lambda name: bit_game(mortal=True))
    config = dataclasses.replace(SMALL, env_id="mine:bits", total_timesteps=2 * 8 * 16, normalize_env=True)
    for parameters, shape in (("shared", (1,)), ("independent", (AGENTS, 1))):
        train = ippo.make_train(dataclasses.replace(config, parameters=parameters))
        env_state = jax.eval_shape(train.init, jax.random.key(0)).rollout.env_state
        assert (env_state.inner.moments.mean.shape, env_state.moments.mean.shape) == (shape, shape[:-1])
    plain = ippo.make_train(dataclasses.replace(config, normalize_env=False))
    assert not hasattr(jax.eval_shape(plain.init, jax.random.key(0)).rollout.env_state, "moments")
