"""Multi-agent environments: rollouts, masks, layouts, and evaluation on a game with a known solution; and JaxMARL's."""

import collections
import dataclasses
from types import SimpleNamespace

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

pytestmark = pytest.mark.lenient_ranks  # flax adds biases [H] to [T, N, H]; JaxMARL
SMALL = ippo.Config(total_timesteps=8 * 16 * 60, num_envs=8, num_steps=16, hidden=16, num_minibatches=2)


def test_the_game_is_solved():
    """Agents share recurrent networks, and a critic sees all agents."""
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


def test_per_agent_transformations_treat_agents_separately():
    clip, updates = optax.clip_by_global_norm(1.0), {"w": jnp.array([[30.0, 40.0], [0.3, 0.4]])}
    optimizer = pp.agents.per_agent(clip)
    clipped, _ = optimizer.update(updates, optimizer.init(updates))
    np.testing.assert_allclose(clipped["w"], [[0.6, 0.8], [0.3, 0.4]], rtol=1e-6)
    step = pp.agents.per_agent(pp.optim.scale_by_update_schedule(lambda step: 0.1 * step))
    scaled, _ = step.update(updates, step.init(updates), step=jnp.array(2))
    np.testing.assert_allclose(scaled["w"], -0.2 * updates["w"], rtol=1e-6)
    own = optax.GradientTransformationExtraArgs(lambda p: (), lambda u, s, p=None, *, grad=None: (grad or u, s))
    kept, _ = pp.agents.per_agent(own).update(updates, (), grad={"w": 0 * updates["w"]})  # `grad` is that of all agents
    np.testing.assert_array_equal(kept["w"], updates["w"])


def test_folded_agents_are_environments_of_their_own():
    env = envs.fold_agents(bit_game(mortal=True), agent_id=True)
    assert env.num_agents is None
    assert env.observation_space.shape == (3,)
    reset, step = compiled(env)
    state, obs = reset(jax.random.key(0), 6)
    np.testing.assert_array_equal(obs[:, 1:], np.tile(np.eye(2), (3, 1)))
    for _ in range(3):
        state, out = step(jax.random.key(1), state, jnp.abs(obs[:, 0] - obs[:, 2]).astype(int))
        obs = out.obs
        np.testing.assert_array_equal(out.reward, 1)
    assert out.reward.shape == out.episode_return.shape == out.ended.shape == (6,)
    assert out.mask.tolist() == [True, False] * 3


def showing(agents, shape):
    """Make an environment that shows each agent zeros of this shape."""
    reset = lambda key, num_envs: ((), envs.Observation(jnp.zeros((num_envs, agents, *shape))))  # noqa: E731
    return envs.Env(reset, None, envs.Box(shape), envs.Discrete(2), None, num_agents=agents)


IMAGES = showing(3, (3, 4, 1))


def test_agents_are_folded_without_a_change_of_observations_or_with_a_number_appended():
    """Then a policy can be exported, because there is nothing to apply to an observation."""
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
    assert envs.fold_agents(IMAGES).reset(jax.random.key(0), 3)[1].shape == (3, 3, 4, 1)


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
    (lambda: pp.agents.per_agent(optax.sgd(1.0)).init({"w": jnp.ones((2, 3)), "b": jnp.ones(3)}), "agents share"),
    (lambda: pp.agents.per_agent(optax.adam), "optax transformation"),
    (lambda: envs.fold_agents(IMAGES, agent_id=True), r"those of an agent have shape \(3, 4, 1\): flatten them first"),
    (lambda: envs.fold_agents(envs.fold_agents(bit_game())), "one agent already"),
    (lambda: envs.fold_agents(bit_game()).reset(jax.random.key(0), 5), "counts agents .* multiple of 2, got 5: give 6"),
    (
        lambda: pp.rollout(envs.fold_agents(bit_game()), abs, num_envs=8, num_steps=2, shards=8),
        "shards=8 must be an integer that divides num_envs / 2 agents = 4",
    ),
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


# --- JaxMARL: a stand-in with its interface, and the real environments where they are installed -----------------------


class Dwindling:
    """Agent "a" stays to the end, "b" leaves after step 2; "b" sees less and has fewer actions.

    It counts how often new episodes are computed.
    """

    name, agents = "Dwindling", ["a", "b"]

    def __init__(self, end=4):
        self.end, self.resets = end, []

    def observation_space(self, agent):
        return SimpleNamespace(shape=(2,) if agent == "a" else (1,))

    def action_space(self, agent):
        return SimpleNamespace(n=3 if agent == "a" else 2, shape=())

    def see(self, time):
        time = jnp.asarray(time, jnp.float32)
        return {"a": jnp.stack([time, -time]), "b": time[None]}

    def reset(self, key):
        jax.debug.callback(lambda: self.resets.append(1))
        return self.see(0), {"time": 0}

    def step_env(self, key, state, action):
        time = state["time"] + 1
        done = {"a": time == 4, "b": time >= 2, "__all__": time == self.end}
        return self.see(time), {"time": time}, {"a": 1.0 * action["a"], "b": 10.0 * action["b"]}, done, {}


def played(env, steps, action):
    def step(state, key):
        state, out = env.step(key, state, jnp.broadcast_to(jnp.array(action), (3, len(action))))
        return state, out

    state, obs = env.reset(jax.random.key(0), 3)
    return obs, jax.lax.scan(step, state, jax.random.split(jax.random.key(1), steps))[1]


def test_dicts_by_agent_become_arrays_and_agents_that_leave_are_absent_until_the_next_episode():
    dwindling = Dwindling()
    env = envs.from_jaxmarl(dwindling)
    assert (env.num_agents, env.observation_space.shape, env.action_space.n) == (2, (2,), 3)
    obs, out = played(env, 6, [2, 1])
    assert obs.obs.shape == (3, 2, 2)
    np.testing.assert_array_equal(out.obs.obs[0, 0], [[1, -1], [1, 0]])  # the second agent's is padded with zeros
    np.testing.assert_array_equal(obs.available[0], [[1, 1, 1], [1, 1, 0]])
    np.testing.assert_array_equal(out.ended[:, 0], [0, 0, 0, 1, 0, 0])
    np.testing.assert_array_equal(out.mask[:, 0], [[1, 1], [1, 1], [1, 0], [1, 0], [1, 1], [1, 1]])
    np.testing.assert_array_equal(out.terminated[:, 0, 0], [0, 0, 0, 1, 0, 0])
    np.testing.assert_array_equal(out.terminated[:2, 0, 1], [0, 1])
    assert not out.truncated.any()
    np.testing.assert_array_equal(out.final_obs.obs[3, 0, 0], [4, -4])
    np.testing.assert_array_equal(out.obs.obs[3, 0, 0], [0, 0])  # the first observation of a new episode
    np.testing.assert_array_equal(out.episode_length[:, 0], [1, 2, 3, 4, 1, 2])
    np.testing.assert_array_equal(out.reward[:4, 0], [[2, 10], [2, 10], [2, 0], [2, 0]])  # the last step still pays 10
    np.testing.assert_array_equal(out.episode_return[3, 0], [8, 20])
    jax.effects_barrier()
    assert len(dwindling.resets) == 2  # once at first, and once in the only step in which an episode ended


def test_a_time_limit_is_what_the_caller_says():
    """An agent that is gone when the time is up has died, then or earlier."""
    for end in (4, 2):
        env = envs.from_jaxmarl(Dwindling(end), timed_out=lambda state: state["time"] == end)  # noqa: B023
        _, out = played(env, end, [0, 0])
        assert not out.truncated[:-1].any()
        np.testing.assert_array_equal(out.truncated[-1, 0], [1, 0])
        np.testing.assert_array_equal(out.terminated[-1, 0], [0, 1])
        seen = envs.check_laws(env, num_steps=4)
        assert (seen.terminated, seen.truncated) == (0, seen.episodes) == (0, 16 // end)


SimpleState = collections.namedtuple("SimpleState", "time falls info")


class MABraxEnv(Dwindling):
    """An episode ends by a fall after 2 steps or, if its state says so, by the time limit of Brax's wrapper after 4."""

    auto_reset = False

    def reset(self, key):
        return self.see(0), SimpleState(jnp.zeros((), int), jax.random.bernoulli(key), {"truncation": jnp.zeros(())})

    def step_env(self, key, state, action):
        time = state.time + 1
        fell, late = state.falls & (time == 2), time == 4
        done = dict.fromkeys(("a", "b", "__all__"), fell | late)
        state = SimpleState(time, state.falls, {"truncation": jnp.where(late & ~fell, 1.0, 0.0)})
        return self.see(time), state, dict.fromkeys(self.agents, 1.0), done, {}


def test_mabrax_truncates_where_brax_does():
    _, out = played(envs.from_jaxmarl(MABraxEnv()), 12, [0, 0])
    ended = np.asarray(out.ended)
    late = np.asarray(out.episode_length) == 4
    assert (ended & late).any()
    assert (ended & ~late).any()
    np.testing.assert_array_equal(out.truncated, np.repeat((ended & late)[..., None], 2, axis=-1))
    np.testing.assert_array_equal(out.terminated, np.repeat((ended & ~late)[..., None], 2, axis=-1))
    np.testing.assert_array_equal(out.final_obs.obs[..., 0, 0], out.episode_length)


def changed(**spaces):
    """Make an environment whose spaces are those of each agent."""
    functions = {name: (lambda self, agent, of=of: of[agent]) for name, of in spaces.items()}
    return type("Dwindling", (Dwindling,), functions)()


TWO = SimpleNamespace(n=2, shape=())
WRAP = r"Dwindling: action_space\(agent\) .*Wrap it so that they do"


def box(*shape):
    return SimpleNamespace(shape=shape, low=0.0, high=1.0)


test_what_does_not_fit_into_arrays_is_refused = refused(
    (changed(action_space={"a": box(2), "b": box(1)}), r"actions of agents differ .*b: Box\(shape=\(1,\)"),
    (changed(action_space={"a": box(2), "b": TWO}), "actions of agents differ .*b: discrete"),
    (changed(observation_space={"a": {"image": box(2)}, "b": {"image": box(1)}}), WRAP),
    (changed(action_space={0: TWO}), WRAP),
    (type("Resetting", (MABraxEnv,), {"auto_reset": True})(), r"final observations .* are lost.*auto_reset=False"),
    by=envs.from_jaxmarl,
)


def the_dead_are_paid(out):
    """Like JaxMARL's own baselines, SMAX credits the first to die with what its team does later."""
    moving = np.asarray(out.obs.available[..., 0])
    ended = np.asarray(out.ended)[..., None]
    assert np.any(~moving & ~ended & np.any(moving, axis=-1, keepdims=True))  # some were dead while others lived
    assert out.mask is None
    assert set(out.info) == {"won"}
    assert not np.any(np.asarray(out.info["won"]) & ended[..., 0])  # an agent that walks into the wall dies
    np.testing.assert_array_equal(out.terminated | out.truncated, np.broadcast_to(ended, moving.shape))


def nothing_can_be_done_outside_the_room(out):
    inside = np.asarray(out.obs.obs[..., 0]).astype(bool)
    assert np.all(inside.sum(-1) == 1)
    assert not out.truncated.any()
    np.testing.assert_array_equal(out.obs.available, np.stack([inside | True, inside, inside], -1))


REAL = {
    "switch_riddle": ((3, 2), (3, 3), nothing_can_be_done_outside_the_room),
    "SMAX/3m": ((3, 75), (3, 8), the_dead_are_paid),  # all agents walk into the wall
}


@pytest.mark.parametrize("env_id", REAL)
def test_real_environments_by_name(env_id):
    pytest.importorskip("jaxmarl")
    seen, available, holds = REAL[env_id]
    env = envs.make(f"jaxmarl:{env_id}")
    obs, out = jax.jit(lambda: played(env, 40, [0] * env.num_agents))()
    assert (obs.obs.shape[1:], obs.available.shape[1:]) == (seen, available)
    assert out.ended.any()
    assert np.all((out.terminated | out.truncated)[out.ended])
    holds(out)


def make(name):
    pytest.importorskip("jaxmarl")
    return envs.make(f"jaxmarl:{name}")


UNPLAYABLE = ("hanabi", "storm", "storm_np", "LearnedPolicyEnemySMAX")


test_names_that_are_unknown_or_cannot_be_played_are_refused = refused(
    *((name, f"{name} cannot be played with the settings") for name in UNPLAYABLE),
    ("MPE_simple_spread", "MPE_simple_spread_v3"),
    ("SMAX/3marines", "SMAX has no environment '3marines'; .*3m"),
    ("CartPole-v1", "JaxMARL has no environment 'CartPole-v1'; it has MPE_simple_v3"),
    by=make,
)


def test_an_environment_can_be_made_while_tracing():
    """A sweep does so, because it makes its run inside a vmapped function."""
    pytest.importorskip("jaxmarl")

    def length(scale):
        env = envs.make("jaxmarl:MPE_simple_spread_v3")
        state, _ = env.reset(jax.random.key(0), 1)
        return scale * env.step(jax.random.key(1), state, jnp.zeros((1, 3), int))[1].episode_length

    assert jax.jit(jax.vmap(length))(jnp.array([2, 3])).ravel().tolist() == [2, 3]
