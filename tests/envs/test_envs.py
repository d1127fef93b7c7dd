"""Environments by name, spaces, images, and the wrappers of actions and rewards."""

from types import SimpleNamespace

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_parts as pp
from ppo_parts import envs, networks
from ppo_parts.envs import _registry
from ppo_parts.envs._laws import play
from ppo_parts.envs._rendering import draw_grid, opengl_errors, rendering
from tests import env_fakes
from tests.common import refused
from tests.envs.common import altered, clock


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    """Use stand-ins of packages, and forget the prefixes that a test registers."""
    env_fakes.install(monkeypatch)
    monkeypatch.setattr(_registry, "_registered", dict(_registry._registered))


TYPICAL = ("Breakout-MinAtar", "FrozenLake-misc")  # other tests play CartPole-v1 and Pendulum-v1
OTHERS = [name for name in gymnax.registered_envs if name not in TYPICAL]


@pytest.mark.lenient_ranks  # gymnax
@pytest.mark.parametrize("env_id", [*TYPICAL, *(pytest.param(x, marks=pytest.mark.slow) for x in OTHERS)])
def test_every_gymnax_environment_steps(env_id):
    try:
        seen = envs.check_laws(envs.make(env_id), num_envs=2, num_steps=120)
    except OSError as error:
        pytest.skip(f"needs a download: {error}")
    assert seen.terminated + seen.truncated == seen.episodes


LOOK = r"look like 'a=1,b=True"
NUMBER = "max_steps_in_episode must be a"
test_a_wrong_name_or_setting_is_named_with_the_existing_ones = refused(
    ("Cartpole", r"gymnax has no environment 'Cartpole'; did you mean 'CartPole-v1"),
    ("HalfCheetah-v5", r"no environment 'HalfCheetah-v5'; it has Cart.*; names .* need a prefix, as in gym:Half"),
    ("Hopper", "need a prefix, as in brax:ant"),
    ("gym:tests.env_fakes:Nothing-v1", r"tests\.env_fakes:Nothing-v1: Environment `Nothing` doesn't exist"),
    ("brax:Walk", "Brax has no environment 'Walk'; did you mean 'walk"),
    ("playground:Run", "MuJoCo Playground has no environment 'Run'; it has Walk"),
    ("playground:Walk,action_repeet=4", "Walk has no setting 'action_repeet'; it has time_limit, "),
    ("craftax:Craftax-v1", "Craftax has no environment 'Craftax-v1'; did you mean 'Craftax-"),
    ("jumanji:Walk", "Jumanji has no environment 'Walk'; did you mean 'Walk-v0"),
    ("pgx:go", "Pgx has no environment 'go'; it has nim"),
    ("xminigrid:Walk", "XLand-MiniGrid has no environment 'Walk'; did you mean 'Walk-v0"),
    ("popgym:RepeatPreviousEasi", "popgym has no environment 'RepeatPreviousEasi'; did you mean 'RepeatPreviousEasy"),
    ("mine:walk", r"'mine' is not a prefix of environments; .*envs\.register"),
    ("gymnasium:CartPole-v1", "'gymnasium' is not a prefix of environments; did you mean 'gym'"),
    ("BRAKS:ant", "did you mean 'brax'"),
    ("CartPole-v1,max_steps=3", r"CartPole-v1 has no parameter 'max_steps'; it has .*max_steps_in_episode"),
    ("CartPole-v1,a=false", "false after the name .*: write True, False or None, or quote the word"),
    *((f"CartPole-v1,{x}", LOOK) for x in ("", "a", "a,b=1", "a=", "a=b-c", "a=-b", "a=1,a=2", "**{'a': 1}", "a=f(1)")),
    ("CartPole-v1,max_steps_in_episode=abc", f"{NUMBER} number, such as 500, got 'abc'"),
    ("CartPole-v1,max_steps_in_episode=0", f"{NUMBER}n integer of at least 1, got 0"),
    ("CartPole-v1,length=None", "length must be a number"),
    ("tasks:golf,noise=-1", r"^tasks:golf: noise must lie in \[0, inf\], got -1"),
    by=envs.make,
)


def test_a_prefix_of_your_own_and_settings_after_the_name():
    envs.register("mine", lambda name, **settings: envs.make("CartPole-v1") if name == "walk" else settings)
    assert envs.make("mine:walk").observation_space.shape == (4,)
    assert "mine" in envs.list_prefixes()
    with pytest.raises(pp.errors.UserTypeError, match=r"^mine:other: {'size': 3} is not an environment"):
        envs.make("mine:other", size=3)
    envs.register("mine", lambda name: envs.Box((1,), lo=0))
    with pytest.raises(TypeError, match=r"^Box.* unexpected keyword argument 'lo'"):
        envs.make("mine:walk")
    with pytest.raises(pp.errors.UserValueError, match=r"^mine:walk does not have .* settings {'size': 3}: .*'size'"):
        envs.make("mine:walk", size=3)
    given = []
    envs.register("given", lambda name, **settings: given.append((name, settings)) or envs.make(name))
    env_id = "given:CartPole-v1,flag=False,word=async,pair=(-inf, 2.5),words=(async, a),text='a=in, b',times=3"
    expected = {"flag": False, "word": "async", "pair": (-np.inf, 2.5), "words": ("async", "a"), "text": "a=in, b"}
    expected |= {"times": 3, "more": 4}
    envs.make(env_id, more=4)
    assert given == [("CartPole-v1", expected)]
    with pytest.raises(pp.errors.UserValueError, match="times is also given as an argument"):
        envs.make(env_id, times=9.8)


class Old(type(gymnax.make("CartPole-v1")[0])):
    """An environment of an older gymnax."""

    def step(self, *args):
        obs, state, reward, terminated, _, info = super().step(*args)
        return obs, state, reward, terminated, info


def pendulum(**changed):
    return envs.make("Pendulum-v1")._replace(**changed)


GYMNAX = gymnax.environments.spaces
TREES, WHOLE = GYMNAX.Dict({"a": GYMNAX.Discrete(2)}), GYMNAX.Box(0, 9, (1,), jnp.int32)
FINITE = r"rescale_action: bounds must be finite, with low <= high, got low="
NO_ENVIRONMENT = (
    envs.clip_action, envs.rescale_action, envs.flatten_action, envs.clip_reward, envs.prepare, envs.check,
    envs.normalize_observation, lambda env: envs.normalize_reward(env, gamma=0.9), envs.fold_agents, envs.check_laws,
    networks.actor_critic, networks.multi_agent_actor_critic, networks.nature_cnn,
    lambda env: pp.rollout(env, lambda params, batch: None, num_envs=1, num_steps=1),
)  # fmt: skip
test_what_cannot_be_made_or_wrapped_is_refused_at_once = refused(
    (lambda: envs.Discrete("x"), "n must be an integer"),
    (lambda: envs.Discrete(0), "n must be at least 1"),
    (lambda: envs.MultiDiscrete(()), "nvec must be a tuple"),
    (lambda: envs.MultiDiscrete((2, 1.5)), "nvec must be an integer"),
    (lambda: envs.Box(("a",)), "shape must be an integer"),
    (lambda: envs.Box((-1,)), "shape must be at least 0"),
    (lambda: envs.Box((2,), "a"), "low must be a number"),
    (lambda: envs.Box((2,), 0.0, np.nan), "high must lie in"),
    (lambda: envs.Box((2,), np.zeros(3), 1.0), r"low must fit the shape \(2,\), got shape \(3,\)"),
    (lambda: envs.Box((1,), 1.0, -1.0), r"Box: low must not exceed high, got low=1\.0 and high=-1\.0"),
    (lambda: envs.register("a:b", lambda name: None), "a prefix consists of letters"),
    *((lambda x=x: envs.register(x, lambda name: None), "comes with ppo_parts") for x in ("brax", "tasks", "popgym")),
    (lambda: envs.from_gymnasium(None), "make must be a function"),
    (lambda: envs.from_brax(None, time_limit=1), "None has no reset"),
    (lambda: envs.from_brax(env_fakes.Brax(), time_limit=3, obs_key="a"), "obs_key='a': the .* single array: leave"),
    (lambda: envs.from_jaxmarl(None), "None has no name"),
    (lambda: envs.from_jaxmarl(None, timed_out=3), "timed_out must be a function, got 3"),
    *((lambda x=x: envs.make("CartPole-v1", max_steps_in_episode=x), NUMBER) for x in (np.int64(-3), np.nan)),
    (lambda: envs.from_gymnax("CartPole-v1"), "from_gymnax: 'CartPole-v1' has no default_params"),
    (lambda: envs.check(envs.from_gymnax(Old())), "from_gymnax: step must return .* it returned 5 items"),
    *((lambda wrap=wrap: wrap(3), "3 is not an environment") for wrap in NO_ENVIRONMENT),
    (lambda: envs.clip_action(envs.make("CartPole-v1")), "clip_action needs a box, .* discrete"),
    (lambda: envs.rescale_action(envs.make("CartPole-v1")), "rescale_action needs a box, .* discrete"),
    (lambda: envs.rescale_action(pendulum(action_space=envs.Box((1,), -1.0, np.inf))), FINITE),
    (lambda: envs.rescale_action(pendulum(action_space=SimpleNamespace(low=1, high=-1, shape=(1,)))), FINITE),
    (lambda: envs.rescale_action(pendulum(action_space=WHOLE)), "rescale_action: .* has integers, a policy floats"),
    (lambda: envs.normalize_observation(pendulum(observation_space=TREES)), "has nothing to standardize: leave it out"),
    (lambda: networks.actor_critic(pendulum(num_agents=2)), r"an axis of 2 agents: use multi_.* or envs\.fold"),
    (lambda: networks.actor_critic(pendulum(action_space=envs.Box((2, 3)))), r"shape \(2, 3\): wrap .* in envs.flat"),
)


def test_spaces_have_sizes_and_are_equal_if_their_bounds_are():
    box, same = envs.Box((2,), np.zeros(2), 1.0), envs.Box((2,), 0.0, np.ones(1))
    assert {box, same} == {box} != {envs.Box((2,), 0.0, np.array([1.0, 2.0]))}
    assert {envs.Dict({"a": box, "b": same}), envs.Dict({"b": box, "a": same})} == {envs.Dict({"a": same, "b": box})}
    assert envs.count_numbers(GYMNAX.Discrete(3)) == 1
    assert envs.count_numbers(GYMNAX.Box(0, 1, (10, 10, 4))) == 400


def test_clipped_rewards_are_signs_and_returns_are_not():
    """A reward that is not finite is passed on, so that the learner counts it."""
    rewards = jnp.array([-3.0, 0.0, jnp.inf, jnp.nan])
    env = envs.clip_reward(altered(clock(9), reward=lambda out: rewards[out.episode_length - 1]))
    out = play(env, lambda key, obs: jnp.zeros(1, int), 1, len(rewards), seed=0).out
    np.testing.assert_array_equal(out.reward[:, 0], [-1, 0, np.inf, np.nan])
    np.testing.assert_array_equal(out.episode_return[:, 0], [0, 1, 3, 6])  # the returns of the clock


@pytest.mark.lenient_ranks
def test_minatar_is_drawn_from_its_channels():
    env = envs.prepare(envs.make("Breakout-MinAtar"), normalize=True, gamma=0.9)
    state, _ = env.reset(jax.random.key(0), 2)
    frame = env.render(state)
    assert frame.shape == (320, 320, 3)
    grid = np.asarray(envs.make("Breakout-MinAtar").reset(jax.random.key(0), 2)[1][0])
    np.testing.assert_array_equal(frame[::32, ::32].any(-1), grid.any(-1))
    shown = np.unique(np.max((grid > 0) * np.arange(1, 5), axis=-1))  # the ball hides its trail
    assert len(np.unique(frame.reshape(-1, 3), axis=0)) == len(shown) == 3
    grid = np.zeros((2, 1, 2))  # the last channel is on top
    grid[0, 0, 0] = grid[1, 0, :] = 1
    top, bottom = draw_grid(grid)[[0, 32], 0]
    assert top.tolist() == [255, 89, 89]
    assert bottom.tolist() == [89, 255, 255]


@pytest.mark.parametrize("env_id", ["CartPole-v1", "gym:CartPole-v1"])
def test_gymnasium_draws(env_id):
    pytest.importorskip("pygame")
    made, on_host = [], env_id.startswith("gym:")
    with rendering():
        env = envs.make(env_id, **({"wrappers": (lambda env: made.append(env) or env,)} if on_host else {}))
    state, _ = env.reset(jax.random.key(0), 2)
    for other in made[-1:]:
        other.render = None  # it is not called
    frame = env.render(state)
    assert frame.shape == (400, 600, 3)
    assert len(np.unique(frame.reshape(-1, 3), axis=0)) > 3
    if on_host:
        env = envs.make(env_id)
        state, _ = env.reset(jax.random.key(0), 1)
        with pytest.raises(pp.errors.UserValueError, match='render_mode="rgb_array"'):
            env.render(state)


def test_the_error_says_how_to_draw_without_a_display():
    for says in ("an OpenGL platform library has not been loaded", "Cannot initialize a EGL device display."):
        with pytest.raises(ValueError, match=f"{says.rstrip('.')}. Without a display, set"), opengl_errors():
            raise ImportError(says)
    with pytest.raises(ImportError), opengl_errors():
        raise ImportError("another")
