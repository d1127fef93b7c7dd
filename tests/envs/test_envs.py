"""Environments: gymnax by name, the wrappers against whole-stream references, and Gymnasium vectors from the host."""

from types import SimpleNamespace

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from ppo_parts import envs, networks
from tests.common import Softmax, assert_same

TYPICAL = ("CartPole-v1", "Pendulum-v1", "Breakout-MinAtar", "FourRooms-misc", "FrozenLake-misc")


@pytest.mark.lenient_ranks  # gymnax
@pytest.mark.parametrize(
    "env_id",
    [name if name in TYPICAL else pytest.param(name, marks=pytest.mark.slow) for name in gymnax.registered_envs],
)
def test_every_gymnax_environment_steps(env_id):
    try:
        env = envs.make(env_id)
        seen = envs.check_laws(env, num_envs=2, num_steps=120)
    except OSError as error:
        pytest.skip(f"needs a download: {error}")
    assert seen.terminated + seen.truncated == seen.episodes


def test_an_unknown_environment_or_parameter_names_what_there_is():
    with pytest.raises(ValueError, match=r"gymnax has no environment 'Cartpole'; did you mean CartPole-v1"):
        envs.make("Cartpole")
    with pytest.raises(
        pp.errors.UserValueError, match=r"tests\.env_fakes:Nothing-v1: Environment `Nothing` doesn't exist"
    ):
        envs.make("gym:tests.env_fakes:Nothing-v1")
    with pytest.raises(ValueError, match=r"CartPole-v1 has no parameter 'max_steps'; it has .*max_steps_in_episode"):
        envs.make("CartPole-v1", max_steps=3)


def test_settings_may_follow_the_name():
    given = []
    envs.register("given", lambda name, **settings: given.append((name, settings)) or envs.make(name))
    env_id = "given:CartPole-v1,flag=False,word=async,pair=(-inf, 2.5),words=(async, a),text='a=in, b',times=3"
    expected = {"flag": False, "word": "async", "pair": (-np.inf, 2.5), "words": ("async", "a"), "text": "a=in, b"}
    expected |= {"times": 3, "more": 4}
    envs.make(env_id, more=4)
    assert given == [("CartPole-v1", expected)]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("a=false", "false after the name .*: write True, False or None, or quote the word"),
        *(
            (text, r"look like 'a=1,b=True")
            for text in ("", "a", "a=", "a=b-c", "a=-b", "a=1,a=2", "**{'a': 1}", "a=f(1)")
        ),
        ("gravity=1", "gravity is also given as an argument"),
        ("max_steps=3", "CartPole-v1 has no parameter 'max_steps'"),
        ("max_steps_in_episode=abc", "max_steps_in_episode must be a number, such as 500, got 'abc'"),
        ("length=None", "length must be a number"),
        ("max_steps_in_episode=0", "max_steps_in_episode must be a whole number of at least 1, got 0"),
    ],
)
def test_wrong_settings_after_the_name_are_named(settings, says):
    with pytest.raises((pp.errors.UserValueError, pp.errors.UserTypeError), match=says):
        envs.make(f"CartPole-v1,{settings}", gravity=9.8)


@pytest.mark.parametrize(
    ("env_id", "says"),
    [
        ("HalfCheetah-v5", r"no environment 'HalfCheetah-v5', but Gymnasium has: .* is 'gym:HalfCheetah-v5'"),
        ("CartPole-v0", r"Gymnasium has: .*; gymnax has CartPole-v1"),
        ("walker", r"gymnax has no environment 'walker'; it has .*CartPole-v1.*Pendulum-v1"),
        (3, r"gymnax has no environment 3; it has"),
    ],
)
def test_what_is_said_of_an_unknown_environment_is_true(env_id, says):
    with pytest.raises(pp.errors.UserValueError, match=says):
        envs.make(env_id)


def test_what_is_not_a_gymnax_environment_is_named():
    with pytest.raises(pp.errors.UserTypeError, match=r"from_gymnax: 'CartPole-v1' has no default_params"):
        envs.from_gymnax("CartPole-v1")

    class Old(type(gymnax.make("CartPole-v1")[0])):
        def step(self, *args):
            obs, state, reward, terminated, _, info = super().step(*args)
            return obs, state, reward, terminated, info

    env = envs.from_gymnax(Old())
    state, _ = env.reset(jax.random.key(0), 1)
    with pytest.raises(pp.errors.UserTypeError, match=r"from_gymnax: step must return .* it returned 5 items"):
        env.step(jax.random.key(0), state, jnp.zeros(1, int))


def test_time_limits_are_truncations_and_falls_terminations():
    env = envs.make("CartPole-v1", max_steps_in_episode=3)
    state, _ = env.reset(jax.random.key(0), 2)
    step = jax.jit(env.step)
    for t in range(1, 7):
        state, out = step(jax.random.key(t), state, jnp.array([0, 1]))
        assert out.truncated.tolist() == [t % 3 == 0] * 2
        assert not out.terminated.any()
        assert out.episode_length.tolist() == [(t - 1) % 3 + 1] * 2
        assert bool((out.obs == out.final_obs).all()) == (t % 3 != 0)
    env = envs.make("CartPole-v1", max_steps_in_episode=50)
    state, _ = env.reset(jax.random.key(0), 1)
    while not out.terminated.any() or out.terminated.shape != (1,):
        state, out = step_once(env, state)
    assert not out.truncated.any()
    assert abs(float(out.final_obs[0, 2])) > 12 * np.pi / 180
    assert abs(float(out.obs[0, 2])) < 0.05


def step_once(env, state):
    return jax.jit(env.step)(jax.random.key(0), state, jnp.ones(1, int))


# --- wrappers ------------------------------------------------------------------------------------------------------


def script(rewards, lengths, num_envs, dtype=np.float32):
    """Observations and rewards of a fixed stream, [S, N], with episodes of `lengths`."""
    rng = np.random.default_rng(3)
    stream = jnp.asarray(rng.normal(5.0, (1.0, 100.0, 1e-2), size=(len(rewards) + 1, num_envs, 3)), dtype)
    finals = jnp.asarray(rng.normal(-50.0, 1.0, size=stream.shape), dtype)
    rewards = jnp.asarray(rewards, jnp.float32)
    ends = jnp.zeros(len(rewards), int).at[jnp.cumsum(jnp.asarray(lengths)) - 1].set(1 + jnp.arange(len(lengths)) % 2)

    def reset(key, n):
        assert n == num_envs
        return jnp.zeros((), int), stream[0]

    def step(key, t, action):
        kind = jnp.full(num_envs, ends[t])
        nothing = jnp.zeros(num_envs)
        final = jnp.where(kind[:, None] > 0, finals[t], stream[t + 1])
        out = envs.Transition(stream[t + 1], rewards[t], kind == 1, kind == 2, final, nothing, nothing.astype(int))
        return t + 1, out

    spaces = gymnax.environments.spaces
    env = envs.Env(reset, step, spaces.Box(-jnp.inf, jnp.inf, (3,)), spaces.Discrete(2), lambda state: env)
    return env, np.asarray(stream, np.float64), np.asarray(finals, np.float64), np.asarray(ends)


def play(env, steps, num_envs=2):
    """Final state, first observation, and all transitions."""

    def run():
        state, obs = env.reset(jax.random.key(0), num_envs)
        end, out = jax.lax.scan(lambda state, _: env.step(jax.random.key(0), state, None), state, length=steps)
        return end, obs, out

    return jax.jit(run)()


@pytest.mark.parametrize("num_envs", [1, 4])
def test_observations_are_standardised_by_the_moments_of_the_whole_stream(num_envs):
    steps = 60
    inner, stream, finals, ends = script(np.zeros((steps, num_envs)), (7, 20, 13, 9, 11), num_envs)
    state, first, out = play(envs.normalize_observation(inner), steps, num_envs)
    shown = np.concatenate([first[None], out.obs])
    for t in range(steps + 1):
        so_far = stream[: t + 1].reshape(-1, 3)  # every observation acted on so far, this one too
        mean, deviation = so_far.mean(0), np.sqrt(so_far.var(0) + 1e-8)
        np.testing.assert_allclose(shown[t], np.clip((stream[t] - mean) / deviation, -10, 10), rtol=2e-3, atol=2e-3)
        if t > 0:
            raw = finals[t - 1] if ends[t - 1] else stream[t]
            expected = np.clip((raw - mean) / deviation, -10, 10)
            np.testing.assert_allclose(out.final_obs[t - 1], expected, rtol=2e-3, atol=2e-3)
    assert (np.asarray(out.final_obs) == -10).any()  # the clip
    moments = state.moments
    np.testing.assert_allclose(moments.mean, stream.reshape(-1, 3).mean(0), rtol=1e-5)
    np.testing.assert_allclose(moments.var, stream.reshape(-1, 3).var(0), rtol=1e-4)
    assert float(moments.seen) == (steps + 1) * num_envs


@pytest.mark.parametrize("num_envs", [1, 4])
def test_rewards_are_scaled_by_the_deviation_of_the_discounted_return(num_envs):
    steps, gamma = 60, 0.9
    rewards = np.random.default_rng(0).normal(2.0, 3.0, size=(steps, num_envs))
    inner, _, _, ends = script(rewards, (7, 20, 13, 9, 11), num_envs)
    rewards = rewards.astype(np.float32).astype(np.float64)
    state, _, out = play(envs.normalize_reward(inner, gamma=gamma), steps, num_envs)
    returns, running = [], np.zeros(num_envs)
    for t in range(steps):
        running = gamma * running + rewards[t]
        returns.append(running)
        expected = np.clip(rewards[t] / np.sqrt(np.var(returns) + 1e-8), -10, 10)
        np.testing.assert_allclose(out.reward[t], expected, rtol=1e-4, atol=1e-5)
        if ends[t]:  # a new episode owes nothing to the last: not its return, nor its last reward
            running = np.zeros(num_envs)
    np.testing.assert_allclose(state.running_return, running, rtol=1e-5)
    assert (ends > 0).sum() == 5


def test_evaluation_has_frozen_statistics_and_unscaled_rewards():
    steps = 20
    rewards = np.full((steps, 2), 7.0)
    inner, stream, _, _ = script(rewards, (20,), 2)
    env = envs.normalize_reward(envs.normalize_observation(inner), gamma=0.9)
    state, _, out = play(env, steps)
    assert float(out.reward[-1, 0]) != 7.0
    end, first, out = play(env.evaluation(state), steps)
    np.testing.assert_array_equal(out.reward, rewards)
    moments = state.inner.moments
    expected = np.clip((stream - np.asarray(moments.mean)) / np.sqrt(np.asarray(moments.var) + 1e-8), -10, 10)
    np.testing.assert_allclose(np.concatenate([first[None], out.obs]), expected, rtol=1e-3, atol=1e-3)
    assert_same(jax.tree.structure(end).num_leaves, 1)  # nothing but the clock of the inner environment
    clipped = envs.clip_action(envs.normalize_observation(envs.make("Pendulum-v1")))
    state, _ = clipped.reset(jax.random.key(0), 2)
    assert isinstance(clipped.evaluation(state), envs.Env)


def test_numbers_that_are_not_finite_do_not_stay_in_the_statistics():
    steps = 12
    rewards = np.ones((steps, 2), np.float32)
    rewards[4, 1] = np.nan
    inner, *_ = script(rewards, (3, 9), 2)
    state, _, out = play(envs.normalize_reward(inner, gamma=0.9), steps)
    assert np.isnan(out.reward).sum() == 1  # reported, where it arose
    assert np.isnan(out.reward[4, 1])
    assert float(state.moments.seen) == 2 * (steps - 1)
    moments = envs.Moments.of(jnp.zeros(2)).updated(jnp.array([[1.0, 2.0], [3.0, 4.0]]))
    for bad in (jnp.inf, jnp.nan, 3e38):  # the last one's square
        assert_same(moments.updated(jnp.array([[1.0, bad], [2.0, -bad]])), moments)


def test_wrappers_show_what_is_not_finite_so_that_the_learner_counts_it():
    """An infinite reward, clipped to 10, would be trained on; an infinite observation, too."""
    steps = 12
    rewards = np.ones((steps, 2), np.float32)
    rewards[4, 1], rewards[7, 0] = np.inf, -np.inf
    inner, stream, *_ = script(rewards, (3, 9), 2)
    seen = jnp.asarray(stream[1:], jnp.float32).at[5, 0, 2].set(jnp.inf).at[6, 1, 0].set(-jnp.inf)

    def step(key, t, action):
        after, out = inner.step(key, t, action)
        return after, out._replace(obs=seen[t], final_obs=jnp.where(out.final_obs == out.obs, seen[t], out.final_obs))

    env = envs.normalize_reward(envs.normalize_observation(inner._replace(step=step)), gamma=0.9)
    state, _, out = play(env, steps)
    assert out.reward[4, 1] == jnp.inf
    assert out.reward[7, 0] == -jnp.inf
    assert np.isfinite(out.reward).sum() == 2 * steps - 2
    assert out.obs[5, 0, 2] == jnp.inf
    assert out.obs[6, 1, 0] == -jnp.inf
    assert np.isfinite(out.obs).sum() == out.obs.size - 2
    assert np.abs(out.obs[np.isfinite(out.obs)]).max() <= 10
    for moments, seen_elements in ((state.moments, 2 * steps - 4), (state.inner.moments, 2 * (steps + 1) - 4)):
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(moments))
        assert float(moments.seen) == seen_elements

    def evaluate(params, batch):
        return Softmax(batch.obs[..., :2] * params), batch.obs[..., 2] * params

    collected = pp.rollout(env, evaluate, num_envs=2, num_steps=steps)
    params = jnp.ones(())
    _, batch, _ = jax.jit(collected.collect)(jax.random.key(0), params, collected.init(jax.random.key(0)))
    pipeline = pp.chain(pp.gae(gamma=0.9, gae_lambda=0.9), pp.full_batch(), pp.value_loss())
    learner = pp.learner(evaluate, pipeline, optax.sgd(0.1))
    _, metrics = jax.jit(learner.update)(jax.random.key(0), learner.init(params), batch)
    assert int(metrics["nonfinite/reward"]) == 2
    assert int(metrics["nonfinite/value"]) == 1


@pytest.mark.parametrize(
    ("wrap", "says"),
    [
        (lambda env: envs.normalize_reward(env, gamma=1.5), r"normalize_reward: gamma must lie in \[0, 1\], got 1\.5"),
        (lambda env: envs.normalize_reward(env, gamma=lambda step: 0.9), "gamma must be a number"),
        (lambda env: envs.normalize_reward(env, gamma=0.9, clip=-1.0), r"clip must lie in \(0, inf\]"),
        (lambda env: envs.normalize_observation(env, eps=-1.0), r"normalize_observation: eps must lie in \[0, inf\]"),
    ],
)
def test_numbers_of_wrappers_are_checked(wrap, says):
    with pytest.raises((pp.errors.UserTypeError, pp.errors.UserValueError), match=says):
        wrap(envs.make("CartPole-v1"))


# --- environments of one's own ---------------------------------------------------------------------------------------


def own(**changes):
    """An environment in which everything is 0, but for the fields of its transitions that are given."""

    def reset(key, num_envs):
        return jnp.zeros(num_envs), jnp.zeros((num_envs, 3))

    def step(key, state, action):
        nothing, no = jnp.zeros_like(state), jnp.zeros(state.shape, bool)
        out = envs.Transition(
            jnp.zeros((*state.shape, 3)), nothing, no, no, jnp.zeros((*state.shape, 3)), nothing, nothing
        )
        return state, out._replace(**changes)

    spaces = gymnax.environments.spaces
    env = envs.Env(reset, step, spaces.Box(-1, 1, (3,)), spaces.Discrete(2), lambda state: env)
    return env


WRONG = {
    "final_obs": (None, r"final_obs must be like the observation before, float32\[2, 3\], got None.*equals obs"),
    "obs": (jnp.zeros((2, 4)), r"obs must be like the observation before, float32\[2, 3\], got float32\[2, 4\]"),
    "terminated": (jnp.zeros(2), r"terminated must be boolean, got float32: return terminated > 0"),
    "truncated": (False, r"truncated must "),
    "reward": (jnp.zeros((2, 1)), r"reward must have shape \(2,\), got \(2, 1\)"),
    "episode_return": (jnp.zeros(2, int), r"episode_return must be floating, got int32"),
    "episode_length": (None, r"episode_length must be an array of shape \(2,\), got None"),
    "mask": (jnp.ones(2), r"mask must be boolean, got float32"),
    "info": ({"won": jnp.zeros((2, 2))}, r"info\['won'\] must have shape \(2,\), got \(2, 2\)"),
}


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_field_of_a_transition_is_named_by_the_check_and_by_the_rollout(field):
    value, says = WRONG[field]
    env = own(**{field: value})
    with pytest.raises((pp.errors.UserTypeError, pp.errors.ShapeError), match=says):
        envs.check(env)
    collector = pp.rollout(
        env, lambda params, batch: (Softmax(batch.obs[..., :2]), batch.obs[..., 0]), num_envs=2, num_steps=2
    )
    with pytest.raises((pp.errors.UserTypeError, pp.errors.ShapeError), match=says):
        jax.eval_shape(lambda key: collector.collect(key, None, collector.init(key)), jax.random.key(0))


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (3, r"check: 3 is not an environment: make one with envs\.make"),
        (own()._replace(reset=lambda key, n: jnp.zeros((n, 3))), r"reset must return \(state, obs\), got"),
        (
            own()._replace(step=lambda key, state, action: (state, 0, 1)),
            r"step must return \(state, Transition\), got 3",
        ),
        (
            own()._replace(step=lambda key, state, action: (state, None)),
            r"\(state, Transition\), got \(state, NoneType\)",
        ),
        (
            own()._replace(step=lambda key, state, action: (state.astype(int), own().step(key, state, action)[1])),
            r"step must keep .* the state",
        ),
        (
            own()._replace(observation_space=gymnax.environments.spaces.Box(-1, 1, (4,))),
            r"shape \(4,\), .* have \(3,\)",
        ),
        (own()._replace(evaluation=lambda state: None), r"evaluation\(state\) must return the Env .* got NoneType"),
    ],
)
def test_the_check_of_an_environment_says_what_is_wrong(env, says):
    with pytest.raises((pp.errors.UserTypeError, pp.errors.ShapeError), match=says):
        envs.check(env)


def test_sound_environments_pass_the_check():
    envs.check(own())
    normalized = envs.normalize_reward(envs.normalize_observation(envs.make("Pendulum-v1")), gamma=0.9)
    envs.check(envs.clip_action(normalized), num_envs=3)


def test_moments_hold_after_float32_has_ended_counting():
    """At 2**24 elements one more is no more: the oldest are slowly forgotten, rounding shows, and nothing grows."""
    moments = envs.Moments(jnp.float32(3.0), jnp.float32(2.25), jnp.float32(2**24))
    x = 3.0 + 1.5 * jnp.array([0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, -2.0])  # of that mean and variance

    def step(moments, i):
        return moments.updated(x[i % 8][None]), None

    after, _ = jax.jit(lambda m: jax.lax.scan(step, m, jnp.arange(2_000_000)))(moments)
    assert float(after.mean) == pytest.approx(3.0, rel=1e-4)
    assert 0.85 < float(after.var) / 2.25 < 1.02


def test_wrappers_refuse_what_they_cannot_wrap():
    with pytest.raises(ValueError, match=r"clip_action: .* discrete"):
        envs.clip_action(envs.make("CartPole-v1"))
    with pytest.raises(ValueError, match=r"rescale_action: .* discrete"):
        envs.rescale_action(envs.make("CartPole-v1"))
    for space in (
        envs.Box((1,), -1.0, np.inf),
        envs.Box((1,), -1e300, 1e300),
        SimpleNamespace(low=1, high=-1, shape=(1,)),
    ):
        other = envs.make("Pendulum-v1")._replace(action_space=space)
        with pytest.raises(ValueError, match=r"rescale_action: bounds must be finite, with low <= high, got low="):
            envs.rescale_action(other)
    with pytest.raises(ValueError, match=r"Box: low must not be above high, got low=1\.0 and high=-1\.0"):
        envs.Box((1,), 1.0, -1.0)
    whole = envs.make("Pendulum-v1")._replace(action_space=gymnax.environments.spaces.Box(0, 9, (1,), jnp.int32))
    with pytest.raises(ValueError, match=r"rescale_action: the actions are integers"):
        envs.rescale_action(whole)
    parts = gymnax.environments.spaces.Dict({"a": gymnax.environments.spaces.Discrete(2)})
    with pytest.raises(ValueError, match="not a space of arrays"):
        envs.normalize_observation(envs.make("CartPole-v1")._replace(observation_space=parts))
    assert envs.size(gymnax.environments.spaces.Discrete(3)) == 1
    assert envs.size(gymnax.environments.spaces.Box(0, 1, (10, 10, 4))) == 400


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: envs.Discrete("x"), "n must be a whole number"),
        (lambda: envs.Discrete(0), "n must be at least 1"),
        (lambda: envs.MultiDiscrete(None), "nvec must be a tuple"),
        (lambda: envs.MultiDiscrete(()), "nvec must be a tuple"),
        (lambda: envs.MultiDiscrete((2, 1.5)), "nvec must be a whole number"),
        (lambda: envs.Box(("a",)), "shape must be a whole number"),
        (lambda: envs.Box((-1,)), "shape must be at least 0"),
        (lambda: envs.Box((2,), "a"), "low must be a number"),
        (lambda: envs.Box((2,), 0.0, np.nan), "high must lie in"),
        (lambda: envs.Box((2,), np.zeros(3), 1.0), r"low must fit the shape \(2,\), got shape \(3,\)"),
        (lambda: envs.register(0, lambda name: None), "a prefix consists of letters"),
        (lambda: envs.from_gymnasium(None), "make must be a function"),
        (lambda: envs.from_brax(None, time_limit=1), "None has no reset"),
        (lambda: envs.from_jaxmarl(None), "None has no name"),
        (lambda: envs.from_gymnax(None), "None has no default_params"),
        *(
            (lambda wrap=wrap: wrap(3), "3 is not an environment")
            for wrap in (
                envs.clip_action, envs.rescale_action, envs.flatten_action, envs.clip_reward, envs.prepare, envs.check,
                envs.normalize_observation, lambda env: envs.normalize_reward(env, gamma=0.9), envs.fold_agents,
                envs.check_laws, networks.actor_critic, networks.multi_agent_actor_critic, networks.nature_cnn,
                lambda env: pp.rollout(env, lambda params, batch: None, num_envs=1, num_steps=1),
            )
        ),
    ],
)  # fmt: skip
def test_what_is_no_space_or_environment_is_refused_at_the_door(make, says):
    with pytest.raises(pp.errors.UserError, match=says):
        make()


def matrix_env(low=-2.0, high=2.0):
    """The reward is the sum of the first row of an action [2, 3] minus that of the second."""
    step = lambda key, state, action: envs.Step(state, state, jnp.sum(action[0] - action[1]), False)  # noqa: E731
    return envs.auto_reset(lambda key: (jnp.zeros(2),) * 2, step, envs.Box((2,)), envs.Box((2, 3), low, high))


def test_actions_of_any_shape_are_flattened_for_distributions():
    with pytest.raises(
        pp.errors.UserValueError, match=r"have shape \(2, 3\): wrap the environment in envs.flatten_action"
    ):
        networks.actor_critic(matrix_env())
    env = envs.prepare(matrix_env(high=np.arange(6.0).reshape(2, 3)))
    assert env.action_space.shape == (6,)
    assert env.action_space.high.tolist() == [0, 1, 2, 3, 4, 5]
    policy = networks.actor_critic(env, (4,))
    rollout = pp.rollout(env, policy, num_envs=3, num_steps=2)
    _, batch, _ = rollout.collect(jax.random.key(0), policy.init(jax.random.key(1)), rollout.init(jax.random.key(2)))
    assert (batch.action.shape, batch.log_prob.shape) == ((2, 3, 6), (2, 3))
    clipped = np.clip(np.asarray(batch.action), -2, np.arange(6.0))
    np.testing.assert_allclose(batch.reward, clipped[..., :3].sum(-1) - clipped[..., 3:].sum(-1), rtol=1e-5)


def test_actions_that_are_trees_need_a_function_of_your_own():
    parts = gymnax.environments.spaces.Dict({"a": gymnax.environments.spaces.Discrete(2)})
    env = envs.make("CartPole-v1")._replace(action_space=parts)
    for function in (envs.check, envs.check_laws):
        with pytest.raises(pp.errors.UserValueError, match=r"not a space of arrays.*check\(env, action="):
            function(env)


def test_clipped_rewards_are_signs_and_returns_are_not():
    env = envs.clip_reward(envs.make("Pendulum-v1"))
    state, _ = env.reset(jax.random.key(0), 2)
    _, out = env.step(jax.random.key(1), state, jnp.zeros((2, 1)))
    assert out.reward.tolist() == [-1, -1]
    assert bool(jnp.all((out.episode_return < 0) & (out.episode_return != -1)))


def test_clipped_rewards_that_are_not_finite_are_counted():
    rewards = jnp.array([jnp.inf, jnp.nan, -3.0, 0.0])

    def step(key, state, action):
        return envs.Step(state + 1, jnp.zeros(1), reward=rewards[state], terminated=False)

    env = envs.auto_reset(lambda key: (jnp.zeros((), int), jnp.zeros(1)), step, envs.Box((1,)), envs.Discrete(2))
    clipped = envs.clip_reward(env)
    state, seen = clipped.reset(jax.random.key(0), 1)[0], []
    for _ in rewards:
        state, out = clipped.step(jax.random.key(0), state, jnp.zeros(1, int))
        seen.append(float(out.reward[0]))
    np.testing.assert_array_equal(seen, [np.inf, np.nan, -1, 0])
