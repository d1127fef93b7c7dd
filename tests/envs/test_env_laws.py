"""Every environment follows one set of laws: each adapter on a stand-in of its package, and the real packages.

tests/envs/test_envs.py plays those of gymnax, tests/envs/test_jaxmarl.py a stand-in of JaxMARL's.
"""

import importlib
import itertools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_parts as pp
from ppo_parts import envs
from ppo_parts.envs import __main__ as command
from ppo_parts.envs._check import notes_on
from tests import env_fakes
from tests.env_fakes import LIMIT

pytestmark = pytest.mark.lenient_ranks  # the packages'


@pytest.fixture
def fakes(monkeypatch):
    env_fakes.install(monkeypatch)


FAKES = {
    "brax:walk": {"time_limit": LIMIT},
    "playground:Walk": {},
    "craftax:Craftax-Symbolic-v1": {"reset_ratio": 2},
    "jumanji:Walk-v0": {},
    "pgx:nim": {},
    "xminigrid:Walk-v0": {},
}


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("env_id", FAKES)
def test_each_adapter_follows_the_laws(env_id):
    """Both ends occur where the stand-in has both; Nim ends only by terminations."""
    seen = envs.check_laws(envs.make(env_id, **FAKES[env_id]), num_steps=60)
    assert seen.terminated > 0
    assert (seen.truncated > 0) == (env_id != "pgx:nim")
    assert seen.notes == ()


def test_normalised_environments_follow_the_laws():
    """Their evaluation has unscaled rewards, and frozen statistics."""
    env = envs.prepare(envs.make("gymnax:Pendulum-v1", max_steps_in_episode=9), normalize=True, gamma=0.9)
    seen = envs.check_laws(env, num_steps=60)
    assert (seen.terminated, seen.truncated) == (0, 24)


REAL = {
    "brax:inverted_pendulum": ({"backend": "spring", "time_limit": 12}, 40),
    "playground:CheetahRun": ({"time_limit": 8}, 20),
    "craftax:Craftax-Symbolic-v1": ({"max_timesteps": 40}, 100),
    "craftax:Craftax-Classic-Symbolic-v1": ({"max_timesteps": 40}, 100),
    "jumanji:Snake-v1": ({"time_limit": 30}, 100),
    "jumanji:Tetris-v0": ({}, 100),
    "pgx:connect_four": ({}, 100),
    "pgx:tic_tac_toe": ({}, 100),
    "xminigrid:MiniGrid-DoorKey-8x8": ({"max_steps": 30}, 100),
    "gym:HalfCheetah-v5": ({"max_episode_steps": 12}, 40),
    "envpool:HalfCheetah-v4": ({"max_episode_steps": 12}, 40),
    "ale:pong": ({"max_num_frames_per_episode": 120}, 60),
    "jaxmarl:MPE_simple_spread_v3": ({"max_steps": 12}, 40),
}


@pytest.mark.envs
@pytest.mark.parametrize("env_id", REAL)
def test_the_real_packages_follow_the_laws(env_id):
    """Run with `-m envs` where the packages are installed."""
    settings, steps = REAL[env_id]
    try:
        env = envs.make(env_id, **settings)
    except pp.errors.MissingPackage as error:
        pytest.skip(str(error))
    assert envs.check_laws(env, num_steps=steps).episodes > 0


# --- each law finds what breaks it ---


def walk(**broken):
    """Two places, an obs of (place, time), a time limit of 4; `broken` changes the fields of each `Transition`."""
    limit = 4

    def see(x, steps):
        return jnp.stack([x, steps], axis=-1).astype(jnp.float32)

    def reset(key, num_envs):
        x, steps = jax.random.randint(key, (num_envs,), 0, 100), jnp.zeros(num_envs, jnp.int32)
        return (x, steps, jnp.zeros(num_envs)), see(x, steps)

    def step(key, state, action):
        x, steps, total = state[0] + action.astype(int), state[1] + 1, state[2] + action
        over = steps == limit
        new = jax.random.randint(key, x.shape, 0, 100)
        after = jnp.where(over, new, x), jnp.where(over, 0, steps), jnp.where(over, 0.0, total)
        out = envs.Transition(see(*after[:2]), action * 1.0, over & False, over, see(x, steps), total, steps)
        return after, out._replace(**{name: change(out) for name, change in broken.items()})

    made = envs.Env(reset, step, envs.Box((2,)), envs.Discrete(2), lambda state: made)
    return made


def test_an_environment_that_follows_the_laws_is_counted():
    seen = envs.check_laws(walk(), num_envs=3, num_steps=9)
    assert seen == (envs.check_laws(walk(), num_envs=3, num_steps=9, seed=1))
    assert (seen.episodes, seen.terminated, seen.truncated, seen.notes) == (6, 0, 6, ())


def masked(available):
    def see(obs):
        return envs.Observation(obs, jnp.broadcast_to(available(obs[:, :1]), (obs.shape[0], 2)))

    def reset(key, num_envs):
        state, obs = env.reset(key, num_envs)
        return state, see(obs)

    env = walk(obs=lambda out: see(out.obs), final_obs=lambda out: see(out.final_obs))
    made = env._replace(reset=reset, evaluation=lambda state: made)
    return made


def reset_alike(env):
    """All environments begin with the same draw."""

    def reset(key, num_envs):
        state, obs = env.reset(key, 1)
        return jax.tree.map(lambda x: jnp.repeat(x, num_envs, axis=0), (state, obs))

    return env._replace(reset=reset)


def scaled_evaluation():
    return walk()._replace(evaluation=lambda state: walk(reward=lambda out: 3 * out.reward))


def impure():
    numbers = itertools.count()
    return walk(reward=lambda out: out.reward + next(numbers))


def impure_inside():
    """Its random numbers are constants of a function that the step calls."""
    numbers = itertools.count()
    return walk(
        reward=lambda out: jax.jit(lambda x: x + jnp.asarray(np.full(4, next(numbers), np.float32)))(out.reward)
    )


def game(seat=lambda seat: seat, next_seat=lambda seat: seat):
    """The players move in turn; `seat` and `next_seat` change what is told of them."""

    def info(out):
        moved = 2.0 * (out.episode_length % 2) - 1
        return {"seat": seat(moved), "next_seat": next_seat(-moved)}

    env = walk(info=info)._replace(zero_sum=True)
    return env._replace(evaluation=lambda state: env)


def test_a_game_tells_whose_turn_it_is():
    assert envs.check_laws(game(), num_steps=24).episodes == 24
    with pytest.raises(
        pp.errors.UserValueError, match=r"plays both sides of this game .* info has no 'seat': return 1"
    ):
        envs.check(walk()._replace(zero_sum=True))


BROKEN = {
    "seat is a number of a player": (lambda: game(seat=lambda x: (1 - x) / 2), r"info\['seat'\] is 0 in step 0 .* -1"),
    "next_seat is a number of a player": (
        lambda: game(next_seat=lambda x: 2 * x),
        r"info\['next_seat'\] is -2 in step 0",
    ),
    "next_seat is who moved": (
        lambda: game(next_seat=lambda x: -x),
        r"'next_seat'\] in step 0 .* not the info\['seat'\]",
    ),
    "reproducible": (impure, r"step returns different results .* same key: draw all random numbers from the key"),
    "reproducible inside": (impure_inside, r"step returns different results .* same key"),
    "separate": (lambda: reset_alike(walk()), r"same first observation.*jax\.random\.split"),
    "finite": (lambda: walk(reward=lambda out: out.reward / 0), r"reward contains NaN or an infinity"),
    "masks": (lambda: masked(lambda x: x % 2 > 0), r"obs\.available leaves no action"),
    "final_obs is of the next": (lambda: walk(final_obs=lambda out: out.obs), r"final_obs equals obs .* reset"),
    "final_obs differs": (lambda: walk(final_obs=lambda out: out.final_obs + 1), r"differs from obs in step 0 .* 0"),
    "length from 0": (
        lambda: walk(episode_length=lambda out: out.episode_length - 1),
        r"episode_length is 0 in step 0",
    ),
    "return of a step": (lambda: walk(episode_return=lambda out: out.reward), r"episode_return is .* add up to"),
    "scaled": (scaled_evaluation, r"add up to .*evaluation\(state\) must not scale"),
    "ended without an end": (
        lambda: walk(ended=lambda out: out.truncated, truncated=lambda out: out.truncated & False),
        r"ended is True in step 3 .* set terminated, or",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_a_law_is_named_with_the_remedy(name):
    make, says = BROKEN[name]
    with pytest.raises(pp.errors.UserValueError, match=says):
        envs.check_laws(make(), num_steps=24)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"obs": lambda x: x[None].astype(int)}, r"an observation like that of reset, float32\[1\], got int32\[1\]"),
        ({"state": lambda x: (x, x)}, r"a state like that of reset, float32\[\], got .*float32\[\].*float32\[\]"),
        ({"reward": lambda x: jnp.zeros(2)}, r"step must return one number as reward, got shape \(2,\)"),
        ({"truncated": lambda x: jnp.zeros((1,), bool)}, r"return one number as truncated, got shape \(1,\)"),
        ({"terminated": lambda x: 0.3}, r"step must return terminated as bool, got float32: return terminated > 0"),
        ({"info": lambda x: {"return": x}}, r"info\['return'\] has the name of a metric of every episode"),
    ],
)
def test_a_step_returns_what_reset_does_and_reports_no_other_return(changed, says):
    def step(key, x, action):
        out = envs.Step(x, x[None], reward=x, terminated=x > 3)
        return out._replace(**{name: change(x) for name, change in changed.items()})

    env = envs.auto_reset(lambda key: (jnp.zeros(()), jnp.zeros(1)), step, envs.Box((1,)), envs.Discrete(2))
    with pytest.raises((pp.errors.UserError, pp.errors.ShapeError), match=says):
        envs.check(env)


def test_a_mask_has_one_flag_for_each_action():
    with pytest.raises(pp.errors.ShapeError, match=r"obs\.available must be boolean of shape \(4, 2\).* int32"):
        envs.check_laws(masked(lambda x: x.astype(int)))
    with pytest.raises(pp.errors.UserTypeError, match=r"action_space is not discrete"):
        envs.check(masked(lambda x: x > 0)._replace(action_space=envs.Box(())))


def test_an_end_with_both_flags_counts_as_a_termination():
    seen = envs.check_laws(walk(terminated=lambda out: out.truncated), num_envs=3, num_steps=9)
    assert (seen.episodes, seen.terminated, seen.truncated) == (6, 6, 0)


@pytest.mark.parametrize("swapped", [False, True])
def test_flags_that_may_be_swapped_are_noted(swapped):
    length, ended = np.array([1, 2, 1, 2, 3, 4] * 4)[:, None], np.array([0, 1, 0, 0, 0, 1] * 4, bool)[:, None]
    cut = ended & ((length == 4) != swapped)
    ones = np.ones((24, 1), np.float32)
    out = envs.Transition(ones, ones, ended & ~cut, cut, ones, ones, length, ended=ended)
    notes = notes_on(SimpleNamespace(ended=ended, out=out, first=ones[0]))
    assert [("swapped" in note, "all 4 episodes of 4 steps" in note) for note in notes] == [(True, True)] * swapped


@pytest.mark.parametrize("share", [2, 9])
def test_a_time_limit_that_is_reported_as_a_failure_is_noted(share):
    """Some episodes end earlier; the note needs most of them to end at the same step."""
    length = np.tile([1, 2, 3, 4], 8)[:, None]
    ended = length == 4
    early = np.flatnonzero(~ended[:, 0])[:share]
    length[early], ended[early] = 1, True
    ones = np.ones((32, 1), np.float32)
    out = envs.Transition(ones, ones, ended, ended & False, ones, ones, length, ended=ended)
    notes = notes_on(SimpleNamespace(ended=ended, out=out, first=ones[0]))
    assert [note.partition(" were")[0] for note in notes] == {2: ["8 of 10 episodes"], 9: []}[share]


def test_what_is_often_a_mistake_is_noted():
    ends = {"terminated": lambda out: out.truncated, "truncated": lambda out: out.truncated & False}
    (note,) = envs.check_laws(walk(**ends), num_steps=24).notes
    assert note.startswith("24 of 24 episodes were terminated after 4 steps, and none lasted longer: if that is a time")
    (note,) = envs.check_laws(walk(), num_steps=3).notes
    assert "no episode ended in 3 steps" in note


# --- automatic resets ---


def test_only_as_many_new_episodes_are_computed_as_asked_for():
    """Six environments end in turn or together; with a ratio of 3 two new states serve all that end in a step."""

    def reset(key):
        x = jax.random.uniform(key)
        return x, x[None]

    def step(key, x, action):
        return envs.Step(x, x[None], reward=x, terminated=action == 1)

    env = envs.auto_reset(reset, step, envs.Box((1,)), envs.Discrete(2), reset_ratio=3)
    state, obs = env.reset(jax.random.key(0), 6)
    assert len(set(obs[:, 0].tolist())) == 6
    _, out = env.step(jax.random.key(1), state, jnp.array([0, 1, 0, 0, 1, 0]))
    assert len(set(out.obs[:, 0].tolist())) == 6  # two ended, and two are new
    np.testing.assert_array_equal(out.obs[jnp.array([0, 2, 3, 5])], obs[jnp.array([0, 2, 3, 5])])
    _, out = env.step(jax.random.key(1), state, jnp.ones(6, int))
    assert len(set(out.obs[:, 0].tolist())) == 2
    np.testing.assert_array_equal(out.final_obs, obs)


def test_new_episodes_are_computed_only_where_one_ended_also_under_vmap():
    calls = []

    def reset(key):
        jax.debug.callback(lambda: calls.append(1))
        return jnp.zeros(()), jnp.zeros(1)

    def step(key, x, action):
        return envs.Step(x + 1, x[None], reward=0.0, terminated=action == 1)

    env = envs.auto_reset(reset, step, envs.Box((1,)), envs.Discrete(2))
    state, _ = jax.vmap(lambda key: env.reset(key, 2))(jax.random.split(jax.random.key(0)))
    stepped = jax.jit(jax.vmap(env.step))
    keys = jax.random.split(jax.random.key(1))
    for action, expected in ((jnp.zeros((2, 2), int), 0), (jnp.array([[0, 1], [0, 0]]), 1)):
        jax.effects_barrier()
        calls.clear()
        after, out = stepped(keys, state, action)
        jax.effects_barrier()
        assert len(calls) == expected
    np.testing.assert_array_equal(after.inner, [[1, 0], [1, 1]])
    np.testing.assert_array_equal(out.terminated, [[False, True], [False, False]])


@pytest.mark.parametrize(
    ("settings", "says"), [({"time_limit": 0}, "time_limit must be at least 1"), ({"reset_ratio": 0}, "reset_ratio")]
)
def test_limits_and_ratios_are_checked(settings, says):
    with pytest.raises(ValueError, match=says):
        envs.auto_reset(lambda key: 0, lambda key, state, action: 0, None, None, **settings)


@pytest.mark.parametrize(
    ("reset", "step", "says"),
    [
        (lambda: 0, lambda key, state, action: 0, r"reset must take \(key\); this one takes \(\)"),
        (None, lambda key, state, action: 0, r"reset must be a function \(key\), got None"),
        (lambda key: 0, lambda state, action: 0, r"step must take \(key, state, action\); .* \(state, action\)"),
    ],
)
def test_functions_of_one_environment_take_keys(reset, step, says):
    with pytest.raises(pp.errors.UserTypeError, match=f"^auto_reset: {says}"):
        envs.auto_reset(reset, step, envs.Box((1,)), envs.Discrete(2))


def test_a_termination_at_the_time_limit_is_a_termination():
    env = envs.auto_reset(
        lambda key: (jnp.zeros(()), jnp.zeros(1)),
        lambda key, x, action: envs.Step(x, x[None], 0.0, action == 1),
        envs.Box((1,)),
        envs.Discrete(2),
        time_limit=1,
    )
    state, _ = env.reset(jax.random.key(0), 2)
    _, out = env.step(jax.random.key(0), state, jnp.array([0, 1]))
    assert (out.terminated.tolist(), out.truncated.tolist()) == ([False, True], [True, False])


# --- adapters ---


@pytest.mark.usefixtures("fakes")
def test_the_policy_sees_one_entry_of_a_dict():
    env = envs.make("playground:Walk", obs_key="privileged_state")
    state, obs = env.reset(jax.random.key(0), 2)
    np.testing.assert_array_equal(obs, -state.inner.obs["state"])
    with pytest.raises(
        pp.errors.UserValueError, match="obs_key='pixels': the observations have the entries state, privileged_state"
    ):
        envs.make("playground:Walk", obs_key="pixels")


@pytest.mark.usefixtures("fakes")
def test_combinations_of_choices_become_one_action():
    env = envs.make("jumanji:Walk-v0")
    assert (env.action_space.n, env.observation_space.shape) == (6, (2,))
    state, obs = env.reset(jax.random.key(0), 6)
    assert obs.available[0].tolist() == [True, True, True, True, True, False]
    _, out = env.step(jax.random.key(0), state, jnp.arange(6))
    np.testing.assert_allclose(out.reward, [-0.5, -0.4, -0.3, 0.5, 0.6, 0.7], atol=1e-6)
    assert out.obs.available.any(axis=-1).all()  # where nothing is left, everything is available


@pytest.mark.usefixtures("fakes")
def test_the_opponent_acts_between_the_turns_of_the_policy():
    """In Nim with 5 matches, an opponent who always takes 1 loses against: take 2 at 5 or 2, and 1 at 4 or 1."""
    taken = []

    def takes_one(key, obs):
        assert obs.available.shape == (2,)
        taken.append(1)
        return jnp.zeros((), jnp.int32)

    env = envs.make("pgx:nim", opponent=takes_one)
    state, obs = env.reset(jax.random.key(0), 32)
    assert set(obs.obs[:, 0].tolist()) == {4.0, 5.0}  # in some games the opponent began
    outs = []
    for t in range(6):
        left = obs.obs[:, 0]
        action = ((left == 5) | (left == 2)).astype(jnp.int32)
        state, out = env.step(jax.random.key(t), state, action)
        obs = out.obs
        outs.append(out)
    ended = np.stack([out.terminated for out in outs])
    assert ended.sum() >= 64
    assert np.stack([out.info["won"] for out in outs])[ended].all()
    assert (np.stack([out.reward for out in outs])[ended] == 1).all()
    assert taken


@pytest.mark.usefixtures("fakes")
def test_a_policy_that_is_frozen_plays_the_opponent():
    def always_two(params, batch):
        logits = jnp.broadcast_to(params, (*batch.obs.obs.shape[:-1], 2))
        return pp.distributions.Categorical(pp.distributions.mask_logits(logits, batch.obs.available)), None

    params = jnp.array([0.0, 50.0])
    env = envs.make("pgx:nim", opponent=envs.frozen_opponent(always_two, params))
    _, obs = env.reset(jax.random.key(0), 16)
    assert set(obs.obs[:, 0].tolist()) == {3.0, 5.0}
    with pytest.raises(pp.errors.UserValueError, match="a policy with memory"):
        envs.frozen_opponent(pp.Policy(None, None, lambda n: None), params)


@pytest.mark.usefixtures("fakes")
def test_standard_policies_play_with_masks_and_flattened_observations():
    """The recipes' policy, on normalized observations: no action is taken that is not available."""
    networks = importlib.import_module("ppo_parts.networks")
    env = envs.prepare(envs.make("jumanji:Walk-v0"), normalize=True, gamma=0.9)
    policy = networks.actor_critic(env, (8,))
    rollout = pp.rollout(env, policy, num_envs=4, num_steps=16)
    batch = jax.jit(lambda key: rollout.collect(key, policy.init(key), rollout.init(key))[1])(jax.random.key(0))
    taken = np.take_along_axis(np.asarray(batch.obs.available), np.asarray(batch.action)[..., None], axis=-1)
    assert taken.all()
    assert not np.asarray(batch.obs.available).all()
    assert batch.obs.obs.shape == (16, 4, 2)
    assert abs(float(batch.obs.obs[..., 1].mean())) < 0.9  # of the time, 0 to 4, if it were not normalized: 1.5 or more


def test_a_policy_for_one_agent_refuses_many():
    networks = importlib.import_module("ppo_parts.networks")
    with pytest.raises(
        pp.errors.UserValueError, match=r"an axis of 2 agents: use multi_agent_actor_critic, or envs\.fold"
    ):
        networks.actor_critic(walk()._replace(num_agents=2))


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(
    ("env_id", "says"),
    [
        ("brax:Walk", "Brax has no environment 'Walk'; did you mean walk"),
        ("playground:Run", "MuJoCo Playground has no environment 'Run'; it has Walk"),
        ("craftax:Craftax-v1", "Craftax has no environment 'Craftax-v1'; did you mean Craftax-"),
        ("jumanji:Walk", "Jumanji has no environment 'Walk'; did you mean Walk-v0"),
        ("pgx:go", "Pgx has no environment 'go'; it has nim"),
        ("xminigrid:Walk", "XLand-MiniGrid has no environment 'Walk'; did you mean Walk-v0"),
    ],
)
def test_an_unknown_name_is_said_with_those_there_are(env_id, says):
    with pytest.raises(pp.errors.UserValueError, match=says):
        envs.make(env_id)


@pytest.mark.usefixtures("fakes")
def test_what_an_adapter_cannot_take_is_refused(monkeypatch):
    monkeypatch.setattr(env_fakes.Jumanji, "action_spec", SimpleNamespace(num_values=jnp.array([4])))
    with pytest.raises(pp.errors.UserValueError, match="Walk-v0 has several agents, or actions"):
        envs.make("jumanji:Walk-v0")
    monkeypatch.setattr(env_fakes.Nim, "num_players", 4)
    with pytest.raises(pp.errors.UserValueError, match="nim has 4 players"):
        envs.make("pgx:nim")
    monkeypatch.setattr(env_fakes.XMiniGrid, "observation_shape", lambda self, params: {"img": (2,)})
    with pytest.raises(pp.errors.UserValueError, match=r"has observations \{'img'"):
        envs.make("xminigrid:Walk-v0")


# --- prefixes ---


@pytest.mark.parametrize(
    ("prefix", "package", "extra"),
    [(prefix, source.package, source.extra) for prefix, source in envs._registry.SOURCES.items()],
)
def test_a_missing_package_is_named_with_its_extra(prefix, package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package.partition(".")[0], None)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(pp.errors.MissingPackage, match=rf'pip install "ppo_parts\[{extra}\]"'):
        envs.make(f"{prefix}:anything")


def test_every_extra_of_a_prefix_exists():
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert {source.extra for source in envs._registry.SOURCES.values()} <= set(project["optional-dependencies"])


def test_a_prefix_of_your_own(monkeypatch):
    monkeypatch.setattr(envs._registry, "_registered", {})
    with pytest.raises(pp.errors.UserValueError, match=r"'mine' is not a prefix of environments; .*envs\.register"):
        envs.make("mine:walk")
    envs.register("mine", lambda name, **settings: walk() if name == "walk" else settings)
    assert envs.make("mine:walk").observation_space.shape == (2,)
    assert "mine" in envs.prefixes()
    with pytest.raises(pp.errors.UserTypeError, match=r"the prefix 'mine' must return an envs\.Env, got {'size': 3}"):
        envs.make("mine:other", size=3)
    with pytest.raises(pp.errors.UserValueError, match="did you mean 'brax'"):
        envs.make("braks:ant")
    for prefix, make, says in (
        ("brax", walk, "comes with ppo_parts"),
        ("a:b", walk, "consists of letters"),
        ("b", 3, r"make must be a function"),
    ):
        with pytest.raises((pp.errors.UserValueError, pp.errors.UserTypeError), match=says):
            envs.register(prefix, make)


# --- the command line ---


def test_the_command_line_checks_a_module_of_yours(tmp_path, monkeypatch, capsys):
    (tmp_path / "walks.py").write_text(
        "from ppo_parts import envs\nfrom tests.envs.test_env_laws import walk\n"
        "from tests.envs.test_host_envs import Returns\n"
        "good = walk\nbad = walk(final_obs=lambda out: out.obs)\nnumber = 3\n"
        "def needs(x):\n    return good\nclass Kind:\n    pass\n"
        "column = lambda: walk(reward=lambda out: out.reward[:, None])\n"
        "host = lambda: envs.from_gymnasium(lambda n: Returns(reward=0))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    command.main(["check", "walks:good", "--num-steps", "24"])
    printed = capsys.readouterr().out
    assert printed.count("ok  ") == 6
    assert "available" not in printed  # observations without masks: the law does not apply
    assert "24 episodes ended: 0 terminated, 24 truncated" in printed
    for name, says in (
        ("walks:bad", r"^error: walks:bad: check_laws: final_obs equals obs wherever"),
        ("walks:column", r"^error: walks:column: Transition: reward must have shape \(2,\), got \(2, 1\)"),
        ("walks:host", r"^error: walks:host: from_gymnasium: reward of step must have shape \(2,\), got \(\)"),
        ("walks:number", r"^error: walks:number: must be an envs\.Env"),
        ("walks:needs", r"needs must take \(\); this one takes \(x\)"),
        ("walks:Kind", "got the class Kind: register a Gymnasium class and check gym:walks:<its id>"),
        ("walks", "walks is a module: write walks:<an environment or a function in it>"),
        ("walks:none", "the module walks has no none"),
        ("nowhere:none", "'nowhere' is neither a module .* prefixes gymnax, jaxmarl, brax"),
        ("CartPole-v3", "gymnax has no environment 'CartPole-v3'"),
    ):
        with pytest.raises(SystemExit, match=says):
            command.main(["check", name, "--num-steps", "24", "--num-envs", "2"])


@pytest.mark.slow
def test_the_command_line_as_typed():
    arguments = ["-m", "ppo_parts.envs", "check", "CartPole-v1", "--num-steps", "100"]
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "terminated" in done.stdout


def test_the_critic_may_see_another_entry_of_the_observations(fakes):
    env = envs.make("playground:Walk,critic_obs_key=privileged_state")
    assert (env.observation_space.shape, env.privileged_space.shape) == ((2,), (2,))
    normalized = envs.normalize_observation(env)
    assert envs.check_laws(normalized, num_envs=3, num_steps=30).episodes > 0
    state, obs = normalized.reset(jax.random.key(0), 4)
    np.testing.assert_allclose(obs.privileged, -obs.obs)  # the stand-in's entries are each other's negative
    np.testing.assert_allclose(state.moments.mean[:2], jnp.mean(env.reset(jax.random.key(0), 4)[1].obs, axis=0))
    assert state.moments.mean.shape == (4,)
    with pytest.raises(ValueError, match=r"critic_obs_key='secret': the observations have the entries state, pri"):
        envs.make("playground:Walk", critic_obs_key="secret")
    with pytest.raises(pp.errors.ShapeError, match=r"privileged_space has shape None, but obs.privileged \(2, 2\)"):
        envs.check(env._replace(privileged_space=None))


def test_an_action_of_brax_lasts_for_several_steps_but_not_beyond_the_end():
    env = envs.from_brax(env_fakes.Brax(), time_limit=3, action_repeat=3)
    state, _ = env.reset(jax.random.key(0), 2)
    start = np.asarray(state.inner.x)
    state, out = jax.jit(env.step)(jax.random.key(1), state, jnp.array([[0.1], [1.0]]))
    steps = np.array([3, np.ceil((1.5 - start[1]) / 1.0 + 1e-6)])  # an episode ends beyond 1.5
    np.testing.assert_allclose(out.reward, steps * [0.1, 1.0], rtol=1e-5)
    np.testing.assert_allclose(out.final_obs[:, 0], start + out.reward, rtol=1e-5)
    assert out.terminated.tolist() == [False, True]
    _, out = env.step(jax.random.key(2), env.step(jax.random.key(2), state, jnp.zeros((2, 1)))[0], jnp.zeros((2, 1)))
    assert out.truncated.tolist() == [True, False]  # after three actions


@pytest.mark.envs
@pytest.mark.parametrize("name", ["brax:inverted_pendulum", "playground:CartpoleBalance"])
def test_mujoco_draws_the_first_environment(name, monkeypatch):
    pytest.importorskip("brax" if name.startswith("brax") else "mujoco_playground")
    monkeypatch.setenv("MUJOCO_GL", "egl")  # read when mujoco is first imported
    env = envs.make(name)
    state, _ = jax.jit(env.reset, static_argnums=1)(jax.random.key(0), 2)
    try:
        first = env.evaluation(state).render(state)
    except pp.errors.UserValueError as error:
        pytest.skip(str(error))
    state, _ = jax.jit(env.step)(jax.random.key(1), state, jnp.ones((2, 1)))
    assert first.shape == (240, 320, 3)
    assert np.any(first != env.render(state))  # it moves
