"""The adapter to JaxMARL: with a stand-in that has its interface, and with the real ones where they are installed."""

import collections
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppo_parts import envs
from tests.common import refused

pytestmark = pytest.mark.lenient_ranks


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
    np.testing.assert_array_equal(out.obs.obs[0, 0], [[1, -1], [1, 0]])  # padded with zeros
    np.testing.assert_array_equal(obs.available[0], [[1, 1, 1], [1, 1, 0]])
    np.testing.assert_array_equal(out.reward[0, 0], [2, 10])
    np.testing.assert_array_equal(out.ended[:, 0], [0, 0, 0, 1, 0, 0])
    np.testing.assert_array_equal(out.mask[:, 0], [[1, 1], [1, 1], [1, 0], [1, 0], [1, 1], [1, 1]])
    np.testing.assert_array_equal(out.terminated[:, 0, 0], [0, 0, 0, 1, 0, 0])
    np.testing.assert_array_equal(out.terminated[:2, 0, 1], [0, 1])
    assert not out.truncated.any()
    np.testing.assert_array_equal(out.final_obs.obs[3, 0, 0], [4, -4])
    np.testing.assert_array_equal(out.obs.obs[3, 0, 0], [0, 0])  # the first of a new episode
    np.testing.assert_array_equal(out.episode_length[:, 0], [1, 2, 3, 4, 1, 2])
    np.testing.assert_array_equal(out.reward[:4, 0, 1], [10, 10, 0, 0])  # it is still given 10
    np.testing.assert_array_equal(out.episode_return[3, 0], [8, 20])
    jax.effects_barrier()
    assert len(dwindling.resets) == 2  # at first, and in the one step in which an episode ended


def test_a_time_limit_is_what_the_caller_says():
    """An agent that is gone as the time is up has died, then or before."""
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
    """Ends by a fall after 2 steps, or by the time limit of Brax's wrapper after 4, when its state says so."""

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


def changed(base=Dwindling, **spaces):
    """An environment whose spaces are those of each agent."""
    functions = {name: (lambda self, agent, of=of: of[agent]) for name, of in spaces.items()}
    return type(base.__name__, (base,), functions)()


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
    """The first to die in SMAX is credited with what its team does later, as in JaxMARL's own baselines."""
    moving = np.asarray(out.obs.available[..., 0])
    ended = np.asarray(out.ended)[..., None]
    assert np.any(~moving & ~ended & np.any(moving, axis=-1, keepdims=True))  # some were dead while others were not
    assert out.mask is None
    assert set(out.info) == {"won"}
    assert not np.any(np.asarray(out.info["won"]) & ended[..., 0])  # whoever walks into the wall dies
    np.testing.assert_array_equal(out.terminated | out.truncated, np.broadcast_to(ended, moving.shape))


def nothing_can_be_done_outside_the_room(out):
    inside = np.asarray(out.obs.obs[..., 0]).astype(bool)
    assert np.all(inside.sum(-1) == 1)
    np.testing.assert_array_equal(out.obs.available, np.stack([inside | True, inside, inside], -1))


REAL = {
    "switch_riddle": ((3, 2), (3, 3), {"terminated"}, nothing_can_be_done_outside_the_room),
    "SMAX/3m": ((3, 75), (3, 8), {"terminated", "truncated"}, the_dead_are_paid),  # all walk into the wall
}


@pytest.mark.parametrize("env_id", REAL)
def test_real_environments_by_name(env_id):
    pytest.importorskip("jaxmarl")
    seen, available, ends, holds = REAL[env_id]
    env = envs.make(f"jaxmarl:{env_id}")
    obs, out = jax.jit(lambda: played(env, 40, [0] * env.num_agents))()
    assert obs.obs.shape[1:] == seen
    assert (None if obs.available is None else obs.available.shape[1:]) == available
    ended = np.asarray(out.ended)
    assert ended.any()
    for name in ("terminated", "truncated"):
        if name not in ends:
            assert not np.asarray(getattr(out, name))[ended].any()
    assert np.all(np.asarray(out.terminated | out.truncated)[ended])
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
    """As a sweep does, which makes its run inside a vmapped function."""
    pytest.importorskip("jaxmarl")

    def length(scale):
        env = envs.make("jaxmarl:MPE_simple_spread_v3")
        state, _ = env.reset(jax.random.key(0), 1)
        return scale * env.step(jax.random.key(1), state, jnp.zeros((1, 3), int))[1].episode_length

    assert jax.jit(jax.vmap(length))(jnp.array([2, 3])).ravel().tolist() == [2, 3]
