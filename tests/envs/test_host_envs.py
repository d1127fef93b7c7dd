"""Environments that step on the host have the same interface as those written in JAX."""

import contextlib
import functools
import multiprocessing
import os
import signal
from types import SimpleNamespace

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import ppo_parts as pp
from ppo_parts import envs, training
from ppo_parts.envs import _gymnasium
from ppo_parts.envs._atari import _Games
from ppo_parts.envs._host import numpy_callback
from ppo_parts.envs._vector import GymnasiumVector
from tests.common import Categorical, P, assert_same, mesh_of_all, refused
from tests.envs.common import Scripted, by_name, host

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:gymnasium")  # about what the tests make on purpose
LIMITS = (2, 3, 100)
KEY = jax.random.key(0)


def scripted(limits=LIMITS, **settings):
    return host(*[lambda limit=limit: Scripted(limit) for limit in limits], **settings)


def valued(params, batch):
    """Return V = 100 * episode + time, as a function of the observation."""
    return Categorical(jnp.zeros((*batch.obs.shape[:-1], 2))), batch.obs @ jnp.array([100.0, 1.0]) * params


def collected(env, num_envs, num_steps):
    rollout = pp.rollout(env, valued, num_envs=num_envs, num_steps=num_steps)
    return jax.jit(rollout.collect), rollout.init(KEY)


def play(env, num_envs, actions=(0, 0), key=KEY):
    """Return the first observation, and the transitions of steps with actions that all environments take."""
    outs = []
    with envs.host_errors():
        state, obs = env.reset(key, num_envs)
        for action in actions:
            given = jnp.broadcast_to(jnp.asarray(action), (num_envs, *np.shape(action)))
            state, out = env.step(KEY, state, given)
            outs.append(jax.block_until_ready(out))
    return obs, jax.tree.map(lambda *x: np.stack(x), *outs)


def test_a_rollout_records_what_happened_on_the_host():
    collect, state = collected(scripted(), 3, 5)
    batches, metrics = [], []
    for i in range(3):
        state, batch, measured = collect(jax.random.key(i), 1.0, state)
        batches.append(batch)
        metrics.append(measured)
    batch = jax.tree.map(lambda *x: np.concatenate(x), *batches)
    step, limit = np.arange(15)[:, None], np.array(LIMITS)
    episode, time = step // limit, step % limit
    over = time + 1 == limit
    np.testing.assert_array_equal(batch.obs, np.stack([episode, time], axis=-1))
    np.testing.assert_array_equal(batch.value, 100 * episode + time)
    np.testing.assert_array_equal(batch.reward, 10 * episode + time + 1)
    np.testing.assert_array_equal(batch.truncated, over & (episode % 2 == 0))
    np.testing.assert_array_equal(batch.terminated, over & (episode % 2 == 1))
    np.testing.assert_array_equal(batch.next_value[~batch.terminated], (batch.value + 1)[~batch.terminated])
    total, length = 10 * episode * limit + limit * (limit + 1) / 2, np.broadcast_to(limit, over.shape)
    for i, measured in enumerate(metrics):
        ended = over & (step // 5 == i)
        means = {"episode_return": total[ended].mean(), "episode_length": length[ended].mean()}
        assert measured == pytest.approx({"episodes": ended.sum(), **means})


def test_the_key_seeds_environments_on_the_host():
    env = host(*[lambda: Scripted(99, see=lambda env: env.np_random.normal(size=2))] * 2)
    seen = [play(env, 2, key=jax.random.key(seed))[1].obs for seed in (0, 0, 1)]
    np.testing.assert_array_equal(seen[0], seen[1])
    assert not np.any(seen[0] == seen[2])
    assert not np.any(seen[0][:, 0] == seen[0][:, 1])


def test_evaluation_leaves_the_environments_of_training_alone():
    env = scripted((2, 3))
    collect, state = collected(env, 2, 3)
    state, _, _ = collect(KEY, 1.0, state)
    frozen = env.evaluation(state.env_state)
    play = jax.jit(jax.vmap(lambda key: training.evaluate_episodes(frozen, valued, 1.0, key, 2).episode_return))
    for returns in ([3, 6], [43, 66]):  # the returns of each first episode, and of each third one, after the next reset
        assert play(jax.random.split(jax.random.key(1), 2)).tolist() == [returns] * 2
    _, batch, _ = collect(KEY, 1.0, state)
    assert batch.obs[0, :, 1].tolist() == [1, 0]  # after three steps, as if there had been no evaluation


def test_a_state_on_the_host_is_stepped_once():
    env = scripted((50,))
    action = jnp.zeros(1, int)
    state, _ = env.reset(KEY, 1)
    first = env.step(KEY, state, action)
    again = env.step(KEY, state, action)  # JAX may repeat a callback
    jax.tree.map(np.testing.assert_array_equal, first, again)
    env.step(KEY, first[0], action)
    foreign = state._replace(inner=state.inner._replace(instance=jnp.int32(9)))
    late = r"from call 1 of step and reset, but .* is at call 3 and cannot go back: .* env\.restart"
    other = r"another process, or by another Env: .* env\.restart"
    for old, says in ((state, late), (foreign, other)):
        with pytest.raises(pp.errors.UserValueError, match=says), envs.host_errors():
            env.step(KEY, old, action)
    with pytest.raises(pp.errors.UserValueError, match=other):
        env.render(foreign)


@pytest.mark.parametrize("more", [0, 1])
def test_a_state_from_before_a_reset_is_not_taken_for_one_after_it(more):
    """The same holds if the reset makes new environments because a different number is requested."""
    env, action = host(Scripted, Scripted, Scripted), jnp.zeros(2, int)
    begins = [lambda state: env.restart(KEY, state)]
    evaluating = env.evaluation(env.reset(KEY, 2)[0])
    begins.append(lambda state: evaluating.reset(KEY, 2 + more))
    for played, begin in zip((env, evaluating), begins, strict=True):
        old, _ = played.reset(KEY, 2)
        begin(old)
        with pytest.raises(pp.errors.UserValueError, match=r"from call 1 of step and reset, .* is at call 2"):
            played.step(KEY, old, action)


def test_a_restart_resets_the_environments_of_its_state():
    """Those of another state go on, and copies of one state get environments of their own."""
    made = []
    env = host(*[lambda: made.append(Scripted()) or made[-1]] * 2)
    made.clear()
    both, _ = jax.vmap(lambda key: env.reset(key, 2))(jax.random.split(KEY))
    states = [jax.tree.map(lambda x, i=i: x[i], both) for i in range(2)]
    _, obs = env.restart(KEY, states[0])
    assert (len(made), obs[:, 0].tolist()) == (4, [1, 1])
    assert env.step(KEY, states[1], jnp.zeros(2, int))[1].obs[:, 0].tolist() == [0, 0]
    copies = jax.tree.map(lambda x: jnp.stack([x] * 2), states[0])
    copies, obs = jax.vmap(env.restart)(jax.random.split(KEY), copies)
    assert (len(made), obs[:, :, 0].tolist(), copies.inner.instance.tolist()) == (6, [[2, 2], [0, 0]], [0, 2])


def test_after_an_error_a_restart_begins_new_episodes_and_keeps_statistics():
    def act(env):
        if len(env.arrived) == 2:
            raise RuntimeError("the simulator crashed")

    env = envs.prepare(host(Scripted(act=act), Scripted()), normalize=True, gamma=0.9)
    action = jnp.zeros(2, int)
    state, _ = env.reset(KEY, 2)
    state, _ = env.step(KEY, state, action)
    for error, says in ((RuntimeError, "the simulator crashed"), (pp.errors.UserValueError, "an earlier step of this")):
        with pytest.raises(error, match=says), envs.host_errors():
            env.step(KEY, state, action)

    after, obs = env.restart(KEY, state)
    np.testing.assert_array_equal(after.moments.var, state.moments.var)
    assert float(after.inner.moments.seen) == float(state.inner.moments.seen) + 2
    assert after.running_return.tolist() == [0, 0]
    assert obs.shape == (2, 2)
    _, out = env.step(KEY, after, action)
    assert out.episode_length.tolist() == [1, 1]


def test_another_error_is_not_replaced_by_an_earlier_one_of_an_environment():
    """The error of a bare `assert` has an empty text, which every text contains."""

    def call(x):
        raise AssertionError

    call_in_jit = jax.jit(lambda x: numpy_callback(call, SHAPES, x))
    for other in (ZeroDivisionError, jax.errors.JaxRuntimeError):
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.block_until_ready(call_in_jit(X))
        with pytest.raises(other), envs.host_errors():
            raise other("another error")
    with pytest.raises(AssertionError), envs.host_errors():
        jax.block_until_ready(call_in_jit(X))


def test_processes_and_wrappers_of_gymnasium_change_where_environments_step_and_what_they_show():
    """The newest frame is the observation without the wrapper, and the frame before it is that of the previous step."""
    stack = (functools.partial(gymnasium.wrappers.FrameStackObservation, stack_size=2),)
    plain, stacked = envs.make("gym:CartPole-v1"), envs.make("gym:CartPole-v1", vectorization="async", wrappers=stack)
    actions = jax.random.randint(KEY, (25, 2), 0, 2)
    (state, obs), (stacked_state, frames) = (env.reset(KEY, 2) for env in (plain, stacked))
    np.testing.assert_array_equal(frames, jnp.stack([obs, obs], axis=1))  # the first frame is repeated
    for action in actions:
        before, (state, out) = obs, plain.step(KEY, state, action)
        stacked_state, seen = stacked.step(KEY, stacked_state, action)
        obs = out.obs
        np.testing.assert_array_equal(seen.obs[:, 1], obs)
        np.testing.assert_array_equal(seen.final_obs, jnp.stack([before, out.final_obs], axis=1))
        np.testing.assert_array_equal(seen.terminated, out.terminated)
    assert out.episode_length.min() < 25
    workers = [child for child in multiprocessing.active_children() if "AsyncVectorEnv" in child.name]
    assert len(workers) >= 2
    for worker in workers:
        os.kill(worker.pid, signal.SIGINT)  # as a terminal does
    np.testing.assert_array_equal(stacked.step(KEY, stacked_state, action)[1].obs[:, 0], obs)
    vector = _gymnasium._AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")], context=_gymnasium.START_METHOD)
    vector.parent_pipes[0]._close()  # Python's garbage collection may close pipes first
    vector.__del__()


def reports(env):
    """Report `time` in every step, and `won` in steps that end an episode."""
    return {"time": env.time} | wins(env)


def wins(env):
    """Report nothing in other steps."""
    return {"won": np.bool_(env.episode % 2), "pair": (1, 2)} if env.over else {}


def masks(env):
    """Make only option `time % 2` of the first choice and option `episode % 3` of the second available."""
    return (np.arange(2) == env.time % 2).astype(np.int8), (np.arange(3) == env.episode % 3).astype(np.int8)


def masked(report=lambda mask: mask):
    space = spaces.MultiDiscrete([2, 3])
    return lambda: Scripted(action_space=space, info=lambda env: {"action_mask": report(masks(env))})


@pytest.mark.parametrize("named", [True, False])
def test_numbers_of_info_are_those_of_the_step(named):
    """They are not those of the reset after an episode ended; NaN means that the environment reports none."""
    limits, names = ((3, 3) if named else (2, 3)), ("time", "won")
    made = [lambda limit=limit: Scripted(limit, info=reports) for limit in limits]
    env = by_name(made[0], info=names) if named else host(*made, info=names)
    _, out = play(env._replace(step=jax.jit(env.step)), 2, [0] * 6)
    episode, time = np.divmod(np.arange(6)[:, None], limits)
    np.testing.assert_array_equal(out.info["time"], time + 1)
    np.testing.assert_array_equal(out.info["won"], np.where(time + 1 == limits, episode % 2, np.nan))
    if named:
        own = lambda env: wins(env) | {"_won": False}  # noqa: E731 - Gymnasium would mark an absent value like this
        _, alone = play(by_name(lambda: Scripted(3, info=own), info="won"), 2, [0] * 6)
        np.testing.assert_array_equal(alone.info["won"], out.info["won"])


@pytest.mark.parametrize("named", [True, False])
def test_masks_are_those_of_the_options_that_the_environment_makes_available(named):
    if named:
        env = by_name(masked(tuple), ",action_mask=action_mask")
    else:
        env = host(*[masked(np.concatenate)] * 2, action_mask="action_mask")
    envs.check(env)
    obs, out = play(env._replace(step=jax.jit(env.step)), 2, [(0, 0)] * 7)
    shown = np.concatenate([obs.available[None], out.obs.available])
    for t in range(8):
        np.testing.assert_array_equal(shown[t, 0], [*(np.arange(2) == t % 3 % 2), *(np.arange(3) == t // 3 % 3)])
    over = out.terminated | out.truncated
    np.testing.assert_array_equal(out.final_obs.available[over], True)
    np.testing.assert_array_equal(out.final_obs.available[~over], out.obs.available[~over])


CHOICES = [(spaces.MultiDiscrete([2, 3], start=[4, 5]), (2, 3), [4, 5]), (spaces.MultiBinary(3), (2, 2, 2), 0)]


@pytest.mark.parametrize(("space", "nvec", "start"), [*CHOICES, (spaces.Discrete(2, start=5), None, 5)])
def test_choices_arrive_in_the_integers_of_the_environment(space, nvec, start):
    one = Scripted(action_space=space)
    env = host(one)
    assert env.action_space == (envs.Discrete(2) if nvec is None else envs.MultiDiscrete(nvec))
    given = np.random.default_rng(0).integers(nvec or 2, size=(8, *env.action_space.shape)).astype(np.int32)
    play(env, 1, given)
    assert all(space.contains(action) for action in one.arrived)
    np.testing.assert_array_equal(np.stack(one.arrived), given + start)


@pytest.mark.parametrize("wrap", [envs.clip_action, envs.rescale_action, lambda env: env])
def test_actions_at_a_bound_lie_in_a_box_of_float64(wrap):
    one = Scripted(99, action_space=spaces.Box(-0.1, 0.3, (1,), np.float64))
    inner = host(one)
    env = wrap(inner)
    state, _ = env.reset(KEY, 1)
    # Without a wrapper: bounds as a bounded distribution in float32 has them, and another action, which is passed on.
    for action in (-0.1, 0.3, 5.0) if env is inner else (-5.0, 5.0):
        state, _ = jax.block_until_ready(env.step(KEY, state, jnp.array([[action]])))
    assert [x.tolist() for x in one.arrived] == [[-0.1], [0.3], [5.0]][: len(one.arrived)]
    assert len(one.arrived) == 2 + (env is inner)


YES, OBS = np.ones(2, bool), np.zeros((2, 2), np.float32)
STEP = {"obs": OBS, "reward": np.zeros(2), "terminated": ~YES, "truncated": YES, "info": {"final_obs": OBS}}


def returning(num_envs=2, *, reset=(OBS, {}), **changes):
    """Make a vector environment that returns what it is told to return."""
    return SimpleNamespace(
        num_envs=num_envs,
        single_observation_space=Scripted.observation_space,
        single_action_space=Scripted.action_space,
        metadata={"autoreset_mode": AutoresetMode.SAME_STEP},
        reset=lambda seed=None: reset,
        step=lambda action: tuple((STEP | changes).values()),
        close=lambda: None,
    )


def whole(low, high, dtype):
    return spaces.Box(low, high, (1,), dtype)


def constant(space, obs, final=None, **changes):
    """Show the same observation forever, or another one at the end of each episode of two steps."""
    see = lambda env: np.asarray(final if env.over and final is not None else obs)  # noqa: E731
    return by_name(lambda: Scripted(2, obs_space=space, see=see, **changes))


def changed(**changes):
    return lambda: envs.from_gymnasium(lambda n: returning(n, **changes))


def masked_as(report):
    return lambda: host(*[masked(report)] * 2, action_mask="action_mask")


PIXEL, REALS, INTEGERS = whole(0, 255, np.uint8), whole(-np.inf, np.inf, np.float64), whole(-(2**40), 2**40, np.int64)


class BeforeGym026(Scripted):
    def step(self, action):
        obs, reward, terminated, _, info = super().step(action)
        return obs, reward, terminated, info


test_what_a_host_environment_must_not_return_is_named = refused(
    (
        lambda: by_name(BeforeGym026, ",disable_env_checker=True"),
        r"^Fake-v0: step must return \(obs, reward, .*, as in Gymnasium 1\.0, got 4 items",
    ),
    (changed(info={"final_obs": np.array([None, None])}), r'info\["final_obs"\]\[0\], .* must have .*, got None'),
    (changed(info={"final_obs": np.zeros((2, 3))}), r'info\["final_obs"\]\[0\], .* must have shape \(2,\), got \(3,\)'),
    (changed(terminated=np.zeros(2)), r"terminated of step must be boolean, got float64: return terminated > 0"),
    (changed(truncated=np.zeros((2, 1), bool)), r"truncated of step must have shape \(2,\), got \(2, 1\)"),
    (changed(reward=np.array(["a", "b"])), r"reward of step must be numbers, got <U1, such as .*'a'"),
    (changed(reward=np.float64(1)), r"reward of step must have shape \(2,\), got \(\)"),
    (changed(obs=np.zeros((2, 3))), r"the obs of step must have shape \(2, 2\), got \(2, 3\)"),
    (changed(obs=np.full((2, 2), "a")), r"the obs of step must be numbers, got <U1"),
    (changed(more=0), r"step must return \(obs, reward, terminated, truncated, info\).* got 6 items"),
    (changed(reset=np.zeros((2, 2))), r"reset must return \(obs, info\), .* got float32\[2, 2\]"),
    (masked_as(lambda mask: None), r"info\['action_mask'\] of reset must have 0 or 1 .* of environment 0 is None"),
    (masked_as(lambda mask: mask[0]), r"0 or 1 for each of the options \(2, 3\) .* of environment 0 is array"),
    (masked_as(lambda mask: np.array([1, 1, 0, 0, 0])), r"leaves no action"),
    (lambda: by_name(masked(lambda mask: 1), ",action_mask=action_mask"), r"0 or 1 for each .* environment 0 is 1"),
    (lambda: by_name(lambda: Scripted(2, info=reports), info="success"), r"without .* info\['success'\].* time, won"),
    (lambda: by_name(lambda: Scripted(2, info=reports), info="pair"), r"info\['pair'\] .* got \(1, 2\): leave it out"),
    # Casts must not change numbers.
    (lambda: constant(INTEGERS, [3_000_000_000]), "obs of reset contains 3000000000, which int32"),
    (lambda: constant(PIXEL, [0.5]), "contains 0.5, which uint8 cannot represent: the observation space is Box"),
    (lambda: constant(REALS, [1e300]), "contains 1e.300, which float32"),
    (lambda: constant(PIXEL, [7], final=[300.7]), r"final_obs.* contains 300.7, which uint8"),
    (lambda: constant(PIXEL, [7], reward=1e39), "reward of step contains 1e.39, which float32"),
    (lambda: constant(PIXEL, [7], reward=2**24 + 1), "reward of step contains 16777217, which float"),
    by=lambda env: play(env, 2),
)


@pytest.mark.filterwarnings("ignore::UserWarning")  # from Gymnasium, about observations outside of their space
def test_numbers_that_fit_arrive_as_they_are():
    """Only floats may be rounded."""
    for space, given, arrives in (
        (INTEGERS, -(2**31), -(2**31)),
        (PIXEL, 255.0, 255),
        (whole(0, 1, np.float32), 3_000_000_000, 3e9),
        (REALS, np.inf, np.inf),
        (whole(0, 1, np.float64), 0.1, np.float32(0.1)),
    ):
        obs, out = play(constant(space, [given]), 1)
        assert obs[0, 0] == out.final_obs[-1, 0, 0] == arrives


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_environment_may_reuse_its_array_and_be_terminated_at_its_time_limit(vectorization):
    class Reuse(gymnasium.Wrapper):
        buffer, info = np.zeros(4, np.float32), {"steps": np.zeros(())}

        def reset(self, **options):
            self.buffer[:], _ = self.env.reset(**options)
            self.info["steps"][...] = 0
            return self.buffer, self.info

        def step(self, action):
            self.buffer[:], reward, terminated, truncated, _ = self.env.step(action)
            self.info["steps"] += 1
            return self.buffer, reward, terminated or truncated, truncated, self.info

    env_id = "gym:CartPole-v1,max_episode_steps=2"
    plain, reusing = (play(envs.make(env_id, wrappers=x, vectorization=vectorization), 1)[1] for x in ((), (Reuse,)))
    np.testing.assert_array_equal(reusing.final_obs, plain.final_obs)
    assert not np.any(reusing.final_obs[1] == reusing.obs[1])
    assert (plain.truncated[1], reusing.truncated[1], reusing.terminated[1]) == (True, False, True)
    counting = play(envs.make(env_id, wrappers=(Reuse,), info="steps", vectorization=vectorization), 1)[1]
    np.testing.assert_array_equal(counting.info["steps"][1], [2])


WHOLE = Scripted(action_space=spaces.Box(0, 5, (2,), np.int64))
GYM, MATRIX = "gym:CartPole-v1", spaces.MultiDiscrete([[2, 3], [2, 2]])
INFO = r"(make|from_gymnasium): info must be a string or a tuple of strings"


test_environments_that_would_be_played_wrongly_are_refused = refused(
    (lambda: envs.from_gymnasium(lambda n: Scripted()), r"not a vector environment.*make_vec"),
    (lambda: envs.from_gymnasium(lambda n: returning()), r"make\(1\) returned a vector environment of 2: pass"),
    (lambda: scripted(mode=AutoresetMode.NEXT_STEP), r"autoreset mode is NEXT_STEP.*SAME_STEP"),
    (lambda: host(Scripted(obs_space=spaces.Dict(word=spaces.Text(3)))), r"Text.*: observations must be a Discrete"),
    (lambda: host(Scripted(action_space=MATRIX)), r"(?s)MultiDiscrete.* not supported: actions .*with one axis"),
    (lambda: host(Scripted(action_space=spaces.Box(-1, 1)), action_mask="action_mask"), "masks discrete actions"),
    *((lambda info=info: envs.make(GYM, info=info), INFO) for info in (3, None, (1,))),
    (lambda: envs.make(f"{GYM},gravity=1"), r"gym:CartPole-v1 does not have all of the settings .*'gravity'"),
    (lambda: envs.make(f"{GYM},max_episode_steps=0"), "^CartPole-v1: max_episode_steps must be a positive integer"),
    (lambda: play(host(WHOLE), 1, [(0, 0), (0.0, 0.0)]), r"takes int64 .* actions are float32"),
    (lambda: envs.check_laws(changed(reward=np.float64(1))(), num_envs=2, num_steps=2), "reward of step must have sh"),
)


def test_a_simulator_that_is_missing_is_named(monkeypatch):
    def make(*args, **kwargs):
        raise gymnasium.error.DependencyNotInstalled('MuJoCo is not installed, run `pip install "gymnasium[mujoco]"`')

    monkeypatch.setattr(gymnasium, "make", make)
    with pytest.raises(pp.errors.MissingPackage, match=r"^CartPole-v1: MuJoCo is not installed, run `pip install"):
        envs.make(GYM)


class Game:
    """A game of an `AtariVectorEnv`; its frames and rewards count its steps, some of which cost a life."""

    single_observation_space = spaces.Box(0, 255, (1, 1, 1), np.uint8)
    single_action_space = spaces.Discrete(4)

    def __init__(self, *deaths):
        self.deaths, self.ale, self.log = deaths, self, []

    def close(self):
        pass

    def get_action_set(self):
        return [SimpleNamespace(name=name) for name in ("NOOP", "FIRE", "RIGHT", "LEFT")]

    def reset(self, seed):
        self.time, self.lives = 0, len(self.deaths)
        self.log.append("reset")
        return np.zeros((1, 1, 1, 1), np.uint8), {"lives": np.array([self.lives])}

    def send(self, action, strength=None):
        self.log.append(int(action[0]))

    def recv(self):
        self.time += 1
        self.lives -= self.time in self.deaths
        over, lives = np.array([self.lives == 0]), np.array([self.lives])
        return np.full((1, 1, 1, 1), self.time), np.array([self.time]), over, np.array([False]), {"lives": lives}


@pytest.mark.parametrize(
    ("deaths", "episodic_life", "use_fire_reset", "log", "rows"),  # a row: obs, final_obs, reward, terminated, ended
    [
        ((4, 9), True, True, ["reset", 1, 2, 3, 3, 0, 1, 2, 3, 3, "reset", 1, 2],
         [(2, 3, 2, 3, 3, 0, 0), (7, 7, 3, 4, 4 + 5 + 6 + 7, 1, 0), (7, 8, 7, 8, 8, 0, 0), (2, 2, 8, 9, 9, 1, 1)]),
        ((4, 5), True, True, ["reset", 1, 2, 3, 3, 0, "reset", 1, 2],
         [(2, 3, 2, 3, 3, 0, 0), (2, 2, 3, 4, 4 + 5, 1, 1)]),
        ((4, 5), True, False, ["reset", 3, 3, 3, 3, 0, "reset"],
         [(0, 1, 0, 1, 1, 0, 0), (1, 2, 1, 2, 2, 0, 0), (2, 3, 2, 3, 3, 0, 0), (0, 0, 3, 4, 4 + 5, 1, 1)]),
        ((2, 3), False, False, ["reset", 3, 3, 3, "reset", 3],
         [(0, 1, 0, 1, 1, 0, 0), (1, 2, 1, 2, 2, 0, 0), (0, 0, 2, 3, 3, 1, 1), (0, 1, 0, 1, 1, 0, 0)]),
    ],
)  # fmt: skip
def test_atari_lives_begin_with_fire_and_end_no_game(deaths, episodic_life, use_fire_reset, log, rows):
    """The second game is never interrupted; in cases two and three, games end in the frames that begin a life."""
    one, other = Game(*deaths), Game(100)
    games = GymnasiumVector(_Games([one, other], 2, episodic_life, use_fire_reset))
    start = 2 * use_fire_reset
    assert games.reset(seed=0).ravel().tolist() == [start] * 4
    for steps, row in enumerate(rows, 1):
        obs, final_obs, (reward, terminated, truncated, ended) = games.step(np.array([3, 3]))
        assert [*obs[0].ravel(), *final_obs[0].ravel(), reward[0], terminated[0], ended[0]] == list(row)
        assert (obs[1, -1].item(), reward[1], ended[1]) == (start + steps, start + steps, False)
        assert not truncated.any()
    assert one.log == log


def test_lost_lives_end_episodes_of_the_learner_only():
    """The observation after a lost life is kept, and not the one after FIRE was pressed for the next life."""
    env = envs.from_gymnasium(lambda n: _Games([Game(4, 9) for _ in range(n)], 2, True, True))
    _, out = play(env, 2, [0] * 5)
    assert out.terminated[:, 0].astype(int).tolist() == [0, 1, 0, 1, 0]
    assert out.ended[:, 0].astype(int).tolist() == [0, 0, 0, 1, 0]
    assert out.final_obs[:, 0, -1].ravel().tolist() == [3, 4, 8, 9, 3]
    envs.check_laws(env, num_envs=2, num_steps=20)


class Pool:
    """An EnvPool of three clocks whose observations are dicts."""

    observation_space = spaces.Dict(time=spaces.Box(0, 9, (1,)), limit=spaces.Discrete(9))
    action_space = spaces.Discrete(2)
    limits, every = np.array([2, 3, 9]), np.arange(3)

    def __init__(self, *args, **kwargs):
        self.time = np.zeros(3, np.float32)

    def close(self):
        pass

    def see(self, ids):
        return {"time": self.time[ids, None], "limit": self.limits[ids]}

    def reset(self, ids=every):
        self.time[ids] = 0
        return self.see(ids), {"env_id": ids}

    def step(self, action):
        self.time += 1
        over = self.time >= self.limits
        return self.see(self.every), self.time.copy(), over, over & False, {"env_id": self.every}


def test_environments_of_a_pool_begin_again_where_they_ended(monkeypatch):
    made = SimpleNamespace(make=Pool, list_all_envs=lambda: ["Clock-v0"])
    monkeypatch.setattr(_gymnasium, "require_package", lambda *_: made)
    _, out = play(_gymnasium.make_envpool("Clock-v0"), 3, [0] * 6)
    time = np.arange(6)[:, None] % Pool.limits + 1
    np.testing.assert_array_equal(out.reward, time)
    np.testing.assert_array_equal(out.terminated, time == Pool.limits)
    np.testing.assert_array_equal(out.final_obs["time"][..., 0], time)
    np.testing.assert_array_equal(out.obs["time"][..., 0], np.where(out.terminated, 0, time))
    np.testing.assert_array_equal(out.obs["limit"], np.broadcast_to(Pool.limits, (6, 3)))


SHAPES = {"sum": jax.ShapeDtypeStruct((2,), np.float32), "large": jax.ShapeDtypeStruct((2,), bool)}
X, Y = jnp.arange(24, dtype=jnp.float32).reshape(3, 4, 2), jnp.arange(1, 5, dtype=jnp.int32)


def by_hand(x, y):
    return {"sum": x + y[..., None], "large": x * y[..., None] > 20}


def called(calls):
    """Make a function of x `[2]` and y `[]` that calls the host, and notes what arrives there."""

    def function(x, y):
        calls.append((x, y))
        assert [type(array) for array in (x, y)] == [np.ndarray] * 2
        return by_hand(x, y)

    return lambda x, y: numpy_callback(function, SHAPES, x, y)


def test_a_vmapped_call_is_one_call_with_the_arrays_of_all():
    calls = []
    f = called(calls)
    inner = jax.vmap(f, in_axes=(0, 0))
    assert_same(jax.jit(jax.vmap(inner, in_axes=(0, None)))(X, Y), by_hand(X, jnp.broadcast_to(Y, (3, 4))))
    assert [(x.shape, y.shape) for x, y in calls] == [((3, 4, 2), (3, 4))]
    assert_same(jax.vmap(f, in_axes=(1, None))(X[0].T, Y[2]), by_hand(X[0], jnp.full(4, Y[2])))
    assert len(calls) == 2


def check_several_devices():
    """Check that a program over several devices calls the host once, with whole arrays."""
    calls = []
    x = jax.device_put(X[0], jax.sharding.NamedSharding(mesh_of_all("Auto"), P("d")))
    assert_same(jax.jit(jax.vmap(called(calls)))(x, Y), by_hand(X[0], Y))
    assert [x.shape for x, _ in calls] == [(4, 2)]
