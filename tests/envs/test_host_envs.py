"""Environments that step on the host, behind the same interface as those written in JAX."""

import threading
from time import monotonic
from types import SimpleNamespace

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import ppo_parts as pp
from ppo_parts import envs, networks, training
from ppo_parts.envs._ale import _Atari, _Games
from ppo_parts.envs._gymnasium import _Environments
from ppo_parts.envs._host import from_host
from tests.common import Softmax

MODES = [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]
LIMITS = (2, 3, 100)


class Scripted(gymnasium.Env):
    """Obs = (episode, time); reward = 10 * episode + time + 1; ends after `limit` steps, by turns in two ways."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, limit):
        self.limit, self.episode = limit, -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.time = self.episode + 1, 0
        return np.array([self.episode, 0.0]), {}

    def step(self, action):
        reward = 10 * self.episode + self.time + 1
        self.time += 1
        over = self.time >= self.limit
        truncated = over and self.episode % 2 == 0
        return np.array([self.episode, self.time], float), float(reward), over and not truncated, truncated, {}


def host(*environments, mode=AutoresetMode.SAME_STEP, timeout=None, **kwargs):
    """An `Env` of these environments, however many are asked for."""
    return envs.from_gymnasium(
        lambda n: SyncVectorEnv(list(environments)[:n], autoreset_mode=mode, **kwargs), timeout=timeout
    )


def scripted(limits=LIMITS, **kwargs):
    return host(*[lambda limit=limit: Scripted(limit) for limit in limits], **kwargs)


def valued(params, batch):
    """V = 100 * episode + time, as a function of the observation."""
    return Softmax(jnp.zeros((*batch.obs.shape[:-1], 2))), batch.obs @ jnp.array([100.0, 1.0]) * params


def collected(env, num_envs, num_steps, evaluate=valued, key=0):
    rollout = pp.rollout(env, evaluate, num_envs=num_envs, num_steps=num_steps)
    collect, state = jax.jit(rollout.collect), rollout.init(jax.random.key(key))
    return collect, state


def story(limit, steps):
    """What one environment should record, step by step, and the finished episodes; written from the definition."""
    rows, episodes, episode, time, total = [], [], 0, 0, 0.0
    for _ in range(steps):
        reward = 10 * episode + time + 1
        over = time + 1 >= limit
        truncated = over and episode % 2 == 0
        rows.append((episode, time, reward, over and not truncated, truncated, 100 * episode + time + 1))
        total, time = total + reward, time + 1
        if over:
            episodes.append((total, time))
            episode, time, total = episode + 1, 0, 0.0
    return rows, episodes


class Reporting(Scripted):
    """Reports `time` in every step, and `won` in those that end an episode."""

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        won = {"won": np.bool_(terminated), "pair": (1, 2)} if terminated or truncated else {}
        return obs, reward, terminated, truncated, {"time": self.time, **won}


@pytest.fixture
def reporting():
    for limit in (2, 3):
        gymnasium.register(f"Reporting{limit}-v0", lambda limit=limit: Reporting(limit))
    yield
    for limit in (2, 3):
        del gymnasium.registry[f"Reporting{limit}-v0"]


@pytest.mark.parametrize("make", ["gym", "same_step", "disabled"])
def test_numbers_of_info_are_metrics_of_the_episodes_that_ended(make, reporting):
    if make == "gym":
        env, num_envs = envs.make("gym:Reporting3-v0", info=("time", "won")), 1
    else:
        inner = [lambda limit=limit: Reporting(limit) for limit in (2, 3)]
        env, num_envs = (
            envs.from_gymnasium(
                lambda n: SyncVectorEnv(inner[:n], autoreset_mode=AutoresetMode[make.upper()]), info=("time", "won")
            ),
            2,
        )
    rollout = pp.rollout(env, valued, num_envs=num_envs, num_steps=6, keep_info=("time",))
    _, batch, metrics = rollout.collect(jax.random.key(0), 1.0, rollout.init(jax.random.key(1)))
    every = {2: [1, 2] * 3, 3: [1, 2, 3] * 2}
    limits = (3,) if make == "gym" else (2, 3)
    np.testing.assert_array_equal(batch.extras["time"].T, [every[limit] for limit in limits])
    ended = [step for limit in limits for step in every[limit] if step == limit]
    won = [episode % 2 for limit in limits for episode in range(6 // limit)]
    assert float(metrics["episode_time"]) == pytest.approx(np.mean(ended))
    assert float(metrics["episode_won"]) == pytest.approx(np.mean(won))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("success", r"environment 0 ended an episode without a number info\['success'\].* it reports pair, time, won"),
        ("pair", r"info\['pair'\] of environment 0 must be a number, got \(1, 2\): leave it out of info="),
    ],
)
def test_numbers_of_info_that_are_missing_are_named(name, says, reporting):
    env = envs.make("gym:Reporting2-v0", info=name)

    def play_an_episode():
        state, _ = env.reset(jax.random.key(0), 1)
        for _ in range(2):
            state, _ = env.step(jax.random.key(0), state, jnp.zeros(1, int))

    with pytest.raises(pp.errors.UserError, match=says), envs.host_errors():
        play_an_episode()


@pytest.mark.parametrize("info", [3, None, ("return",), (1,)])
def test_info_must_name_numbers(info):
    with pytest.raises(
        pp.errors.UserValueError, match=r"from_gymnasium: info must be names of numbers, other than return"
    ):
        envs.make("gym:CartPole-v1", info=info)


def test_a_setting_that_an_environment_does_not_have_is_named():
    with pytest.raises(
        pp.errors.UserValueError, match=r"gym:CartPole-v1 does not have all of the settings .*'gravity'"
    ):
        envs.make("gym:CartPole-v1,gravity=1")
    for limit in ("1e2", "0", "word"):
        with pytest.raises(
            pp.errors.UserValueError, match=r"max_episode_steps must be a positive integer, or -1 .*, got"
        ):
            envs.make(f"gym:CartPole-v1,max_episode_steps={limit}")


@pytest.mark.parametrize("mode", MODES)
def test_a_rollout_records_what_happened_on_the_host(mode):
    steps, rollouts = 5, 3
    collect, state = collected(scripted(mode=mode), 3, steps)
    batches, metrics = [], []
    for i in range(rollouts):
        state, batch, measured = collect(jax.random.key(i), 1.0, state)
        batches.append(batch)
        metrics.append(measured)
    names = ("obs", "value", "reward", "terminated", "truncated", "next_value")
    joined = {name: np.concatenate([np.asarray(getattr(batch, name)) for batch in batches]) for name in names}
    finished = []
    for n, limit in enumerate(LIMITS):
        rows, episodes = story(limit, steps * rollouts)
        finished += episodes
        for t, (episode, time, reward, terminated, truncated, following) in enumerate(rows):
            assert joined["obs"][t, n].tolist() == [episode, time]
            assert joined["value"][t, n] == 100 * episode + time
            assert joined["reward"][t, n] == reward
            assert joined["terminated"][t, n] == terminated
            assert joined["truncated"][t, n] == truncated
            if not terminated:
                assert joined["next_value"][t, n] == following, (t, n)
    number = [int(m["episodes"]) for m in metrics]
    assert sum(number) == len(finished)
    for name, column in (("episode_return", 0), ("episode_length", 1)):
        total = sum(float(m[name]) * k for m, k in zip(metrics, number, strict=True) if k)
        np.testing.assert_allclose(total, sum(episode[column] for episode in finished), rtol=1e-6)


def test_environments_by_name_step_as_gymnasiums_own_vector():
    def make(num_envs):
        mode = {"autoreset_mode": AutoresetMode.SAME_STEP}
        return gymnasium.make_vec("CartPole-v1", num_envs, vectorization_mode="sync", vector_kwargs=mode)

    def batches(env):
        collect, state = collected(env, 3, 64, lambda params, batch: (Softmax(batch.obs[..., :2]), batch.obs[..., 0]))
        state, first, _ = collect(jax.random.key(0), 1.0, state)
        return first, collect(jax.random.key(1), 1.0, state)[1]

    found, expected = batches(envs.make("gym:CartPole-v1")), batches(envs.from_gymnasium(make))
    assert int(expected[0].terminated.sum()) > 3
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_vmapped_seeds_step_environments_of_their_own():
    rollout = pp.rollout(scripted((2, 3)), valued, num_envs=2, num_steps=4)

    def run(key):
        state = rollout.init(key)
        for i in range(2):
            state, batch, _ = rollout.collect(jax.random.fold_in(key, i), 1.0, state)
        return batch.obs

    keys = jax.random.split(jax.random.key(0), 3)
    alone = jax.jit(run)(keys[0])
    np.testing.assert_array_equal(jax.jit(jax.vmap(run))(keys), jnp.stack([alone] * 3))
    assert alone[-1, :, 0].tolist() == [3, 2]


class Noise(gymnasium.Env):
    """Observations drawn from the environment's own generator."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.normal(size=2).astype(np.float32), {}

    def step(self, action):
        return self.np_random.normal(size=2).astype(np.float32), 0.0, False, False, {}


def test_a_simulator_that_is_missing_is_named(monkeypatch):
    def make(*args, **kwargs):
        raise gymnasium.error.DependencyNotInstalled('MuJoCo is not installed, run `pip install "gymnasium[mujoco]"`')

    monkeypatch.setattr(gymnasium, "make", make)
    with pytest.raises(pp.errors.MissingPackage, match=r"^CartPole-v1: MuJoCo is not installed, run `pip install"):
        envs.make("gym:CartPole-v1")


def test_the_key_seeds_environments_on_the_host():
    env = host(Noise, Noise)
    collect, _ = collected(env, 2, 3)
    init = pp.rollout(env, valued, num_envs=2, num_steps=3).init
    seen = [collect(jax.random.key(0), 1.0, init(jax.random.key(seed)))[1].obs for seed in (0, 0, 1)]
    np.testing.assert_array_equal(seen[0], seen[1])
    assert not np.any(np.asarray(seen[0]) == np.asarray(seen[2]))
    assert not np.any(np.asarray(seen[0][:, 0]) == np.asarray(seen[0][:, 1]))


def test_evaluation_leaves_the_environments_of_training_alone():
    env = scripted((2, 3))
    collect, state = collected(env, 2, 3)
    state, _, _ = collect(jax.random.key(0), 1.0, state)
    frozen = env.evaluation(state.env_state)
    played = jax.jit(
        jax.vmap(lambda key: training.evaluate_episodes(frozen, valued, 1.0, key, 2).episode_return, axis_size=2)
    )(jax.random.split(jax.random.key(1), 2))
    assert played.tolist() == [[3.0, 6.0]] * 2  # the first episode of each
    _, batch, _ = collect(jax.random.key(0), 1.0, state)
    assert batch.obs[0, :, 1].tolist() == [1, 0]  # after three steps, as if there had not been an evaluation


def test_restart_begins_new_episodes_and_keeps_statistics():
    env = envs.prepare(scripted((50, 50)), normalize=True, gamma=0.9)
    key = jax.random.key(0)
    state, _ = env.reset(key, 2)
    for _ in range(3):
        state, out = env.step(key, state, jnp.zeros(2, int))
    after, obs = env.restart(key, state)
    np.testing.assert_array_equal(after.moments.var, state.moments.var)
    assert float(after.inner.moments.seen) == float(state.inner.moments.seen) + 2
    assert after.running_return.tolist() == [0, 0]
    assert obs.shape == out.obs.shape
    _, out = env.step(key, after, jnp.zeros(2, int))
    assert out.episode_length.tolist() == [1, 1]


def test_a_state_on_the_host_is_stepped_once():
    env = scripted((50,))
    key = jax.random.key(0)
    state, _ = env.reset(key, 1)
    first = env.step(key, state, jnp.zeros(1, int))
    again = env.step(key, state, jnp.zeros(1, int))  # JAX may repeat a callback
    jax.tree.map(np.testing.assert_array_equal, first, again)
    env.step(key, first[0], jnp.zeros(1, int))
    with (
        pytest.raises(pp.errors.UserValueError, match=r"from step 0, but .* is at step 2 and cannot go back"),
        envs.host_errors(),
    ):
        env.step(key, state, jnp.zeros(1, int))
    with pytest.raises(pp.errors.UserValueError, match=r"another process: .* env\.restart"), envs.host_errors():
        env.step(key, state._replace(inner=state.inner._replace(instance=jnp.int32(9))), jnp.zeros(1, int))


def test_observations_are_copied_before_an_environment_overwrites_them():
    collect, state = collected(scripted((50,), copy=False), 1, 6)
    _, batch, _ = collect(jax.random.key(0), 1.0, state)
    assert batch.obs[:, 0, 1].tolist() == [0, 1, 2, 3, 4, 5]


class Reach(gymnasium.Env):
    """A continuous action; the observation is the action that arrived."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,))
    action_space = gymnasium.spaces.Box(-0.5, 1.0, (1,))

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(np.asarray(action, np.float32))
        return np.asarray(action, np.float32), 0.0, False, False, {}


def test_actions_arrive_on_the_host_clipped_and_shifted():
    def wide(params, batch):
        return pp.distributions.Normal(jnp.zeros_like(batch.obs), 3 * jnp.ones_like(batch.obs)), batch.obs[..., 0]

    collect, state = collected(envs.prepare(host(Reach, Reach)), 2, 6, wide)
    _, batch, _ = collect(jax.random.key(0), None, state)
    assert float(jnp.abs(batch.action).max()) > 1
    np.testing.assert_array_equal(batch.obs[1:], np.clip(batch.action[:-1], -0.5, 1.0))

    arrived = []

    class FromFive(Scripted):
        action_space = gymnasium.spaces.Discrete(2, start=5)

        def step(self, action):
            arrived.append(int(action))
            return super().step(action)

    collect, state = collected(host(lambda: FromFive(50)), 1, 8)
    _, batch, _ = collect(jax.random.key(0), 1.0, state)
    assert arrived == [int(a) + 5 for a in batch.action[:, 0]]


def test_environments_that_would_be_played_wrongly_are_refused():
    with pytest.raises(pp.errors.UserTypeError, match=r"not a vector environment.*make_vec"):
        envs.from_gymnasium(lambda n: Scripted(3))
    with pytest.raises(pp.errors.UserValueError, match=r"autoreset mode is NEXT_STEP.*SAME_STEP"):
        scripted(mode=AutoresetMode.NEXT_STEP)

    class Parts(Scripted):
        observation_space = gymnasium.spaces.Dict({"a": gymnasium.spaces.Discrete(2)})

    with pytest.raises(ValueError, match="not a space of arrays"):
        host(lambda: Parts(3))

    class Table(Scripted):
        action_space = gymnasium.spaces.MultiDiscrete([[2, 3], [2, 2]])

    with pytest.raises(pp.errors.UserValueError, match=r"(?s)MultiDiscrete.* not supported: .*with one axis"):
        host(lambda: Table(3))
    with pytest.raises(pp.errors.UserValueError, match=r"timeout must lie in \(0, inf\]"):
        scripted(timeout=0)


class Unruly(Scripted):
    """Ends after three steps; `act(env)` may do something in a step before anything is written down."""

    def __init__(self, act):
        super().__init__(3)
        self.act, self.steps = act, 0

    def step(self, action):
        self.steps += 1
        self.act(self)
        return super().step(action)


def test_after_an_error_new_episodes_begin():
    def act(env):
        if env.steps == 2:
            raise RuntimeError("the simulator crashed")

    env = host(lambda: Unruly(act), lambda: Scripted(3))
    key, action = jax.random.key(0), jnp.zeros(2, int)
    state, _ = env.reset(key, 2)
    state, _ = env.step(key, state, action)
    with pytest.raises(RuntimeError, match="the simulator crashed"), envs.host_errors():
        env.step(key, state, action)
    with (
        pytest.raises(pp.errors.UserValueError, match="an earlier step of this environment failed"),
        envs.host_errors(),
    ):
        env.step(key, state, action)
    state, obs = env.restart(key, state)
    assert obs.shape == (2, 2)
    _, out = env.step(key, state, action)
    assert out.episode_length.tolist() == [1, 1]


def test_an_environment_that_hangs_is_left_after_the_timeout():
    released = threading.Event()

    def act(env):
        if env.steps == 2:
            released.wait(20)

    env = host(lambda: Unruly(act), timeout=0.3)
    key, action = jax.random.key(0), jnp.zeros(1, int)
    state, _ = env.reset(key, 1)
    state, _ = env.step(key, state, action)
    began = monotonic()
    says = r"not returned from step within timeout=0\.3 seconds: it hangs"
    with pytest.raises(pp.errors.UserTimeoutError, match=says), envs.host_errors():
        env.step(key, state, action)
    assert monotonic() - began < 10
    released.set()


class Returns:
    """A vector environment that returns what it is told to."""

    num_envs = 2
    single_observation_space, single_action_space = Scripted.observation_space, Scripted.action_space
    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, **changes):
        yes, obs = np.ones(2, bool), np.zeros((2, 2), np.float32)
        self.reset_to = changes.pop("reset", (obs, {}))
        self.out = {"obs": obs, "reward": np.zeros(2), "terminated": ~yes, "truncated": yes, "info": {"final_obs": obs}}
        self.out |= changes

    def reset(self, seed=None):
        return self.reset_to

    def step(self, action):
        return tuple(self.out.values())

    def close(self):
        pass


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"info": {"final_obs": None}}, r'info\["final_obs"\]\[0\] must be .* shape \(2,\), .*; got None.*DISABLED'),
        ({"info": {}}, r'info\["final_obs"\]\[0\] must be the final observation of environment 0'),
        ({"info": {"final_obs": np.array([None, None])}}, r'info\["final_obs"\]\[0\] must be .*; got None'),
        ({"info": {"final_obs": np.zeros((2, 3))}}, r'info\["final_obs"\]\[0\] must be .*; got shape \(3,\)'),
        ({"terminated": np.zeros(2)}, r"terminated of step must be boolean, got float64: return terminated > 0"),
        ({"truncated": np.zeros((2, 1), bool)}, r"truncated of step must have shape \(2,\), got \(2, 1\)"),
        ({"reward": np.array(["a", "b"])}, r"reward of step must be numbers, got <U1"),
        ({"reward": np.float64(1)}, r"reward of step must have shape \(2,\), got \(\)"),
        ({"obs": np.zeros((2, 3))}, r"the obs of step must have shape \(2, 2\), got \(2, 3\)"),
        ({"more": 0}, r"step must return \(obs, reward, terminated, truncated, info\).* got 6 items"),
        ({"reset": np.zeros((2, 2))}, r"reset must return \(obs, info\), got ndarray"),
        ({"reset": (np.zeros(2), {})}, r"the obs of reset must have shape \(2, 2\), got \(2,\)"),
    ],
)
def test_a_wrong_field_of_a_host_environment_is_named(changes, says):
    env = envs.from_gymnasium(lambda n: Returns(**changes))

    def play():
        state, _ = env.reset(jax.random.key(0), 2)
        env.step(jax.random.key(0), state, jnp.zeros(2, int))

    with pytest.raises((pp.errors.UserTypeError, pp.errors.ShapeError), match=says), envs.host_errors():
        play()


class Game:
    """One game of an `AtariVectorEnv`: its frames and rewards are counts of its steps, of which some cost a life."""

    single_observation_space = gymnasium.spaces.Box(0, 255, (1, 1, 1), np.uint8)
    single_action_space = gymnasium.spaces.Discrete(4)

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
    ("deaths", "settings", "log", "rows"),  # a row: obs, final_obs, reward, terminated, ended
    [
        (
            (4, 9),
            {"episodic_life": True, "use_fire_reset": True},
            ["reset", 1, 2, 3, 3, 0, 1, 2, 3, 3, "reset", 1, 2],
            [(2, 3, 2, 3, 3, 0, 0), (7, 7, 3, 4, 4 + 5 + 6 + 7, 1, 0), (7, 8, 7, 8, 8, 0, 0), (2, 2, 8, 9, 9, 1, 1)],
        ),
        ((4, 5), {"episodic_life": True, "use_fire_reset": True}, ["reset", 1, 2, 3, 3, 0, "reset", 1, 2],
         [(2, 3, 2, 3, 3, 0, 0), (2, 2, 3, 4, 4 + 5, 1, 1)]),
        ((4, 5), {"episodic_life": True, "use_fire_reset": False}, ["reset", 3, 3, 3, 3, 0, "reset"],
         [(0, 1, 0, 1, 1, 0, 0), (1, 2, 1, 2, 2, 0, 0), (2, 3, 2, 3, 3, 0, 0), (0, 0, 3, 4, 4 + 5, 1, 1)]),
        ((2, 3), {"episodic_life": False, "use_fire_reset": False}, ["reset", 3, 3, 3, "reset", 3],
         [(0, 1, 0, 1, 1, 0, 0), (1, 2, 1, 2, 2, 0, 0), (0, 0, 2, 3, 3, 1, 1), (0, 1, 0, 1, 1, 0, 0)]),
    ],
)  # fmt: skip
def test_atari_lives_begin_with_fire_and_end_no_game(deaths, settings, log, rows):
    """The second game is never interrupted; cases two and three are games that end in the frames that begin a life."""
    one, other = Game(*deaths), Game(100)
    games = _Atari(_Games([one, other], stack_num=2, **settings))
    start = 2 * settings["use_fire_reset"]
    obs, available = games.reset(seed=0)
    assert obs.ravel().tolist() == [start] * 4
    assert available is None
    for steps, row in enumerate(rows, 1):
        obs, final_obs, _, (reward, terminated, truncated, ended) = games.step(np.array([3, 3]))
        assert [*obs[0].ravel(), *final_obs[0].ravel(), reward[0], terminated[0], ended[0]] == list(row)
        assert (obs[1, -1].item(), reward[1], ended[1]) == (start + steps, start + steps, False)
        assert not truncated.any()
    assert one.log == log


def test_lost_lives_end_episodes_of_the_learner_only():
    """The observation that followed a lost life is kept, and not the one after FIRE was pressed for the next life."""

    def make(num_envs):
        games = [Game(4, 9) for _ in range(num_envs)]
        return _Atari(_Games(games, stack_num=2, episodic_life=True, use_fire_reset=True))

    env = from_host(make)
    rollout = pp.rollout(env, zero_value, num_envs=2, num_steps=5, keep_next_obs=True)
    _, batch, metrics = jax.jit(rollout.collect)(jax.random.key(0), None, rollout.init(jax.random.key(1)))
    assert batch.terminated[:, 0].astype(int).tolist() == [0, 1, 0, 1, 0]
    assert batch.next_obs[:, 0, -1].ravel().tolist() == [3, 4, 8, 9, 3]
    assert float(metrics["episodes"]) == 2
    envs.check_laws(env, num_envs=2, num_steps=20)


def zero_value(params, batch):
    shape = batch.obs.shape[:-3]
    return pp.distributions.Categorical(jnp.zeros((*shape, 4))), jnp.zeros(shape)


class Choosing(Scripted):
    """Takes several choices at once, and writes down what arrives."""

    def __init__(self, space, arrived):
        super().__init__(3)
        self.action_space, self.arrived = space, arrived

    def step(self, action):
        assert self.action_space.contains(action)
        self.arrived.append(action)
        return super().step(None)


@pytest.mark.parametrize(
    ("space", "nvec", "start"),
    [
        (gymnasium.spaces.MultiDiscrete([2, 3], start=[4, 5]), (2, 3), [4, 5]),
        (gymnasium.spaces.MultiBinary(3), (2, 2, 2), 0),
    ],
)
def test_several_choices_arrive_in_the_integers_of_the_environment(space, nvec, start):
    arrived = []
    env = host(lambda: Choosing(space, arrived))
    assert env.action_space == envs.MultiDiscrete(nvec)
    policy = networks.actor_critic(env, hidden=(4,))
    rollout = pp.rollout(env, policy, num_envs=1, num_steps=8)
    _, batch, _ = jax.jit(rollout.collect)(
        jax.random.key(0), policy.init(jax.random.key(1)), rollout.init(jax.random.key(2))
    )
    assert batch.action.shape == (8, 1, len(nvec))
    assert batch.action.dtype == jnp.int32
    np.testing.assert_array_equal(np.stack(arrived), np.asarray(batch.action)[:, 0] + start)


def test_reals_do_not_become_integers_silently():
    class Whole(Scripted):
        action_space = gymnasium.spaces.Box(0, 5, (2,), np.int64)

    env = host(lambda: Whole(3))
    state, _ = env.reset(jax.random.key(0), 1)
    with pytest.raises(pp.errors.UserTypeError, match=r"takes int64 .* actions are float32"), envs.host_errors():
        jax.block_until_ready(env.step(jax.random.key(0), state, jnp.zeros((1, 2))))
    state, _ = env.reset(jax.random.key(0), 1)
    env.step(jax.random.key(0), state, jnp.zeros((1, 2), jnp.int32))


class Masked(Choosing):
    """Two choices; only option `time % 2` of the first and option `episode % 3` of the second are available."""

    def __init__(self, arrived, report=lambda mask: mask):
        super().__init__(gymnasium.spaces.MultiDiscrete([2, 3]), arrived)
        self.report = report

    def info(self):
        mask = (np.arange(2) == self.time % 2).astype(np.int8), (np.arange(3) == self.episode % 3).astype(np.int8)
        return {"action_mask": self.report(mask)}

    def reset(self, **kwargs):
        return super().reset(**kwargs)[0], self.info()

    def step(self, action):
        return *super().step(action)[:4], self.info()


@pytest.mark.parametrize("mode", ["gym", "same_step", "disabled"])
@pytest.mark.parametrize("report", [lambda mask: mask, np.concatenate], ids=["tuple", "array"])
def test_policies_take_the_actions_that_the_environment_makes_available(mode, report):
    arrived = []
    if mode == "gym":
        gymnasium.register("Masked-v0", lambda: Masked(arrived, report))
        env = envs.make("gym:Masked-v0,action_mask=action_mask")
        del gymnasium.registry["Masked-v0"]
    else:
        env = envs.from_gymnasium(
            lambda n: SyncVectorEnv([lambda: Masked(arrived, report)] * n, autoreset_mode=AutoresetMode[mode.upper()]),
            action_mask="action_mask",
        )
    envs.check(env)
    policy = networks.actor_critic(env, hidden=(4,))
    rollout = pp.rollout(env, policy, num_envs=2, num_steps=7, keep_next_obs=True)
    state, params = rollout.init(jax.random.key(2)), policy.init(jax.random.key(1))
    _, batch, _ = jax.jit(rollout.collect)(jax.random.key(0), params, state)
    first = state.obs.obs[0, 0]  # number of the first episode
    for t in range(7):
        expected = [t % 3 % 2, int(first + t // 3) % 3]
        np.testing.assert_array_equal(batch.action[t], [expected] * 2)
    over = (batch.terminated | batch.truncated).astype(bool)
    np.testing.assert_array_equal(batch.next_obs.available[over], True)
    np.testing.assert_array_equal(batch.next_obs.available[:-1][~over[:-1]], batch.obs.available[1:][~over[:-1]])


@pytest.mark.parametrize(
    ("report", "message"),
    [
        (lambda mask: None, r"environment 0 reports no info\['action_mask'\] of reset"),
        (lambda mask: mask[0], r"0 or 1 for each of the options \(2, 3\), but that of environment 0 is array"),
        (lambda mask: np.full(5, 0.5), r"0 or 1 for each of the options"),
        (lambda mask: np.array([1, 1, 0, 0, 0]), r"leaves no action"),
    ],
)
def test_action_masks_that_would_be_misread_are_refused(report, message):
    env = envs.from_gymnasium(
        lambda n: SyncVectorEnv([lambda: Masked([], report)] * n, autoreset_mode=AutoresetMode.SAME_STEP),
        action_mask="action_mask",
    )
    with pytest.raises(pp.errors.UserValueError, match=message), envs.host_errors():
        jax.block_until_ready(env.reset(jax.random.key(0), 1))


def test_masks_need_discrete_actions():
    class Real(Scripted):
        action_space = gymnasium.spaces.Box(-1, 1, (2,))

    with pytest.raises(pp.errors.UserValueError, match="masks discrete actions"):
        envs.from_gymnasium(
            lambda n: SyncVectorEnv([lambda: Real(3)] * n, autoreset_mode=AutoresetMode.SAME_STEP),
            action_mask="action_mask",
        )


@pytest.mark.parametrize(
    ("space", "value", "flat"),
    [
        (gymnasium.spaces.Discrete(4), 2, [0, 0, 1, 0]),
        (
            gymnasium.spaces.Dict({"goal": gymnasium.spaces.Box(-1, 1, (2,)), "kind": gymnasium.spaces.Discrete(2)}),
            {"goal": np.array([0.5, -0.5], np.float32), "kind": 1},
            [0.5, -0.5, 0, 1],
        ),
    ],
)
def test_observations_that_are_not_arrays_are_flattened(space, value, flat):
    class Structured(Scripted):
        observation_space = space

        def reset(self, **kwargs):
            return value, super().reset(**kwargs)[1]

        def step(self, action):
            return value, *super().step(action)[1:]

    gymnasium.register("Structured-v0", lambda: Structured(3))
    env = envs.make("gym:Structured-v0")
    del gymnasium.registry["Structured-v0"]
    _, obs = env.reset(jax.random.key(0), 2)
    np.testing.assert_allclose(obs, [flat] * 2)


class Slow(Scripted):
    """An environment that other processes can import by its class only."""


def test_gymnasium_wrappers_processes_and_memory_go_together():
    gymnasium.register("Slow-v0", Slow, kwargs={"limit": 3})
    stack = (lambda env: gymnasium.wrappers.FrameStackObservation(env, 2),)
    env = envs.make("gym:Slow-v0", vectorization="async", wrappers=stack)
    del gymnasium.registry["Slow-v0"]
    policy = networks.actor_critic(env, hidden=(4,), shared=True, memory="gru")
    rollout = pp.rollout(env, policy, num_envs=2, num_steps=4)
    state = rollout.init(jax.random.key(0))
    params = policy.init(jax.random.key(1))
    with envs.host_errors():
        _, batch, _ = jax.block_until_ready(jax.jit(rollout.collect)(jax.random.key(0), params, state))
    assert batch.obs.shape == (4, 2, 2, 2)
    np.testing.assert_array_equal(batch.obs[:, 0, 1, 1], [0, 1, 2, 0])  # the newest frame has the time
    np.testing.assert_array_equal(batch.obs[:, 0, 0, 1], [0, 0, 1, 0])  # and the one before; the first is repeated
    np.testing.assert_array_equal(batch.truncated[:, 0] > 0, [False, False, True, False])


class Constant(gymnasium.Env):
    """Gives the same observation and reward for ever, keeps the actions, and ends episodes after `limit` steps."""

    def __init__(self, space, obs, action_space=None, reward=1.0, final=None, limit=2):
        self.observation_space, self.action_space = space, action_space or gymnasium.spaces.Discrete(2)
        self.obs, self.reward, self.final, self.limit, self.seen = np.asarray(obs), reward, final, limit, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.obs, {}

    def step(self, action):
        self.seen.append(action)
        self.time += 1
        over = self.time == self.limit
        return np.asarray(self.final) if over and self.final is not None else self.obs, self.reward, over, False, {}


def stepped_twice(one, action=0):
    env = envs.from_gymnasium(lambda n: _Environments(lambda: one, n))
    state, obs = env.reset(jax.random.key(0), 1)
    for _ in range(2):
        state, out = env.step(jax.random.key(0), state, jnp.asarray([action]))
    return obs, jax.block_until_ready(out)


def whole(low, high, dtype):
    return gymnasium.spaces.Box(low, high, (1,), dtype)


@pytest.mark.parametrize(
    ("space", "obs", "changes", "says"),
    [
        (whole(-(2**40), 2**40, np.int64), [3_000_000_000], {}, "obs of reset contains 3000000000, which int32"),
        (whole(0, 2**63, np.uint64), np.array([2**63], np.uint64), {}, "contains 9223372036854775808, which uint32"),
        (whole(0, 255, np.uint8), [0.5], {}, "contains 0.5, which uint8 does not have: the observation space is Box"),
        (whole(0, 255, np.uint8), [-1], {}, "contains -1, which uint8"),
        (whole(0, 255, np.uint8), [np.nan], {}, "contains nan, which uint8"),
        (whole(0, 1, np.float32), [2**24 + 1], {}, "contains 16777217, which float32"),
        (whole(-np.inf, np.inf, np.float64), [1e300], {}, "contains 1e.300, which float32"),
        (whole(0, 255, np.uint8), [7], {"final": [300.7]}, "step contains 300.7, which uint8"),
        (whole(0, 255, np.uint8), [7], {"reward": 1e39}, "reward of step contains 1e.39, which float32"),
    ],
)
def test_no_cast_changes_a_number_that_an_environment_gives(space, obs, changes, says):
    with pytest.raises(pp.errors.UserValueError, match=says), envs.host_errors():
        stepped_twice(Constant(space, obs, **changes))


@pytest.mark.parametrize(
    ("space", "given"),
    [
        (whole(-(2**40), 2**40, np.int64), np.array([-(2**31)])),
        (whole(0, 255, np.uint8), np.array([255.0])),
        (whole(0, 1, np.float32), np.array([3_000_000_000])),
        (whole(-np.inf, np.inf, np.float64), np.array([np.inf])),
        (whole(0, 1, np.float64), np.array([0.1])),  # floats may be rounded
    ],
)
def test_numbers_that_fit_arrive_as_they_are(space, given):
    obs, out = stepped_twice(Constant(space, given))
    expected = given.astype(np.float32) if given[0] == 0.1 else given
    assert float(obs[0, 0]) == float(out.final_obs[0, 0]) == float(expected[0])


@pytest.mark.parametrize("wrap", [envs.clip_action, envs.rescale_action, lambda env: env])
def test_actions_at_a_bound_lie_in_a_box_of_float64(wrap):
    one = Constant(whole(0, 1, np.float32), [0.0], whole(-0.1, 0.3, np.float64))
    env = wrap(envs.from_gymnasium(lambda n: _Environments(lambda: one, n)))
    state, _ = env.reset(jax.random.key(0), 1)
    raw = wrap(env) is env
    for action in (-0.1, 0.3) if raw else (-5.0, 5.0):  # raw: a bound as a bounded distribution in float32 has it
        state, _ = jax.block_until_ready(env.step(jax.random.key(0), state, jnp.array([[action]])))
    assert [x.tolist() for x in one.seen] == [[-0.1], [0.3]]
    if raw:  # any other action is passed on
        jax.block_until_ready(env.step(jax.random.key(0), state, jnp.array([[5.0]])))
        assert one.seen[-1].tolist() == [5.0]


def test_frames_in_unit_range_are_not_drawn_black():
    step = lambda key, state, action: envs.Step(state, state, 0.0, False)  # noqa: E731
    spaces = envs.Box((1,)), envs.Discrete(2)
    env = envs.auto_reset(lambda key: (jnp.zeros(1),) * 2, step, *spaces, render=lambda x: np.full((2, 2, 3), 0.5))
    with pytest.raises(pp.errors.UserValueError, match=r"image of render contains 0\.5, which uint8"):
        env.render(env.reset(jax.random.key(0), 1)[0])
