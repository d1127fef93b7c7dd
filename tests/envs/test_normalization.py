"""The normalizing wrappers against whole-stream references, for one agent and for several, some of which are absent."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppo_parts import envs
from ppo_parts.envs._normalization import ShardMoments
from tests.common import assert_close, assert_same, refused

STEPS, ENVS, GAMMA = 22, 3, 0.9  # some agents are absent at the end
KEY = jax.random.key(0)
LAYOUTS = {"one agent": (1, False, [slice(0, 1)]), "shared": (2, False, [slice(0, 2)])}
LAYOUTS["per agent"] = (2, True, [slice(0, 1), slice(1, 2)])
"""For each layout: the number of agents, whether each has its own statistics, and which agents share statistics."""


@functools.cache
def recorded(agents):
    """Record what happens in three environments as NumPy arrays: episodes of six steps; agent 1 leaves after three.

    Numbers have different scales; what an absent agent sees and is paid is enormous.
    """
    rng = np.random.default_rng(0)
    age = (np.arange(STEPS)[:, None] + np.arange(ENVS)) % 6
    ended, alive = age == 5, np.ones((STEPS, ENVS, agents), bool)
    alive[..., 1:] = (age < 3)[..., None]
    stays = alive.copy()
    stays[..., 1:] = (age < 2)[..., None]
    over = ended[..., None]
    truncated = over & alive & (np.arange(ENVS) == 0)[:, None]
    present = np.concatenate([np.ones((1, ENVS, agents), bool), stays & ~over | over])
    obs = rng.normal(5.0, (1.0, 100.0, 0.01), (STEPS + 1, ENVS, agents, 3))
    obs[..., 1:, :] = 3 * obs[..., 1:, :] - 7
    final = np.where(over[..., None], rng.normal(-50.0, 1.0, (STEPS, ENVS, agents, 3)), obs[1:])
    obs[~present] = 1e4
    final = np.where((stays | over)[..., None], final, 1e4)
    paid = rng.normal((1.0, -20.0)[:agents], (2.0, 9.0)[:agents], (STEPS, ENVS, agents))
    reward = np.where(alive, paid, 1e6)
    terminated = (alive & ~stays | over) & ~truncated  # it says nothing of absent agents before the episode ends
    obs, final, reward = (x.astype(np.float32) for x in (obs, final, reward))
    fields = {"obs": obs, "final": final, "reward": reward, "terminated": terminated, "truncated": truncated}
    return SimpleNamespace(**fields, ended=ended, alive=alive, present=present)


def replayed(agents, **changed):
    """Replay what is recorded, apart from changes; the options of several agents are never available."""
    record = jax.tree.map(jnp.asarray, {**vars(recorded(agents)), **changed})

    def each(x):
        return x if agents > 1 else x[:, 0]

    def see(obs):
        return envs.Observation(obs, jnp.zeros((ENVS, agents, 2), bool)) if agents > 1 else each(obs)

    def reset(key, num_envs):
        return jnp.zeros((), int), see(record["obs"][0])

    def step(key, t, action):
        now = {name: x[t] for name, x in record.items()}
        ends = {"mask": now["alive"], "ended": now["ended"]} if agents > 1 else {}
        reward, terminated, truncated = (each(now[name]) for name in ("reward", "terminated", "truncated"))
        obs, final, length = see(record["obs"][t + 1]), see(now["final"]), jnp.zeros(ENVS, int)
        return t + 1, envs.Transition(obs, reward, terminated, truncated, final, reward, length, **ends)

    num_agents = agents if agents > 1 else None
    env = envs.Env(reset, step, envs.Box((3,)), envs.Discrete(2), lambda state: env, num_agents=num_agents)
    return env


def played(env, num_envs=ENVS):
    """Return the final state, the first observation, and all transitions."""

    def run():
        state, obs = env.reset(KEY, num_envs)
        end, out = jax.lax.scan(lambda state, _: env.step(KEY, state, None), state, length=STEPS)
        return end, obs, out

    return jax.jit(run)()


@pytest.fixture(scope="module", params=LAYOUTS)
def normalized(request):
    """Return the layout, the environment, its final state, and what was shown and paid, with an axis of agents."""
    agents, per_agent, groups = LAYOUTS[request.param]
    env = envs.prepare(replayed(agents), normalize=True, gamma=GAMMA, per_agent=per_agent)
    state, *seen = played(env)
    return SimpleNamespace(agents=agents, groups=groups, env=env, state=state, **with_agents(agents, *seen))


def with_agents(agents, first, out):
    several = agents > 1
    shown = np.concatenate([(first.obs if several else first)[None], out.obs.obs if several else out.obs])
    final, reward, total = out.final_obs.obs if several else out.final_obs, out.reward, out.episode_return
    if not several:
        shown, final, reward, total = (x[:, :, None] for x in (shown, final, reward, total))
    return {"shown": shown, "final": final, "reward": reward, "total": total, "out": out}


def standardized(x, mean, var):
    return np.clip((x - np.asarray(mean, float)) / np.sqrt(np.asarray(var, float) + 1e-8), -10, 10)


def test_observations_are_standardized_by_the_moments_of_the_whole_stream(normalized):
    """The stream has every observation acted on so far, including the current one, of agents that are present."""
    record = recorded(normalized.agents)
    for agents in normalized.groups:
        for t in range(STEPS + 1):
            seen = record.obs[: t + 1, :, agents][record.present[: t + 1, :, agents]]
            moments = seen.mean(0, dtype=float), seen.var(0, dtype=float)
            expected = standardized(record.obs[t, :, agents], *moments)
            np.testing.assert_allclose(normalized.shown[t, :, agents], expected, rtol=2e-3, atol=2e-3)
            if t > 0:
                expected = standardized(record.final[t - 1, :, agents], *moments)
                np.testing.assert_allclose(normalized.final[t - 1, :, agents], expected, rtol=2e-3, atol=2e-3)
    assert (np.abs(normalized.final) == 10).any()  # these are clipped
    counted = record.present.sum((0, 1))
    expected = counted.tolist() if len(normalized.groups) == 2 else [counted.sum()]
    assert normalized.state.inner.moments.seen.ravel().tolist() == expected
    if normalized.agents > 1:
        assert not any(x.available.any() for x in (normalized.out.obs, normalized.out.final_obs))
        np.testing.assert_array_equal(normalized.out.mask, record.alive)


def test_rewards_are_scaled_by_the_deviation_of_the_discounted_return(normalized):
    """A new episode owes nothing to the last: not its return, nor its last reward."""
    record, returns, running = recorded(normalized.agents), [], 0.0
    for t in range(STEPS):
        running = GAMMA * running + record.reward[t].astype(float)
        returns.append(running)
        for agents in normalized.groups:
            counted = np.stack(returns)[..., agents][record.alive[: t + 1, :, agents]]
            expected = np.clip(record.reward[t, :, agents] / np.sqrt(counted.var() + 1e-8), -10, 10)
            np.testing.assert_allclose(normalized.reward[t, :, agents], expected, rtol=1e-4, atol=1e-5)
        running = running * (record.alive[t] & ~record.terminated[t] & ~record.truncated[t])
    np.testing.assert_allclose(normalized.state.running_return.reshape(running.shape), running, rtol=1e-5)
    np.testing.assert_array_equal(normalized.total, record.reward)


def test_evaluation_has_frozen_statistics_and_unscaled_rewards(normalized):
    frozen = normalized.env.evaluation(normalized.state)
    end, first, out = played(frozen)
    again, record = with_agents(normalized.agents, first, out), recorded(normalized.agents)
    mean, var, _ = normalized.state.inner.moments
    for shown, x in ((again["shown"], record.obs), (again["final"], record.final)):
        np.testing.assert_allclose(shown, standardized(x, mean, var), rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(again["reward"], record.reward)
    assert jax.tree.structure(end).num_leaves == 1  # it has nothing but the clock of the inner environment
    raw = replayed(normalized.agents).reset(KEY, ENVS)[1]
    for env, state in ((normalized.env, normalized.state), (frozen, end), (frozen.evaluation(end), end)):
        assert_close(env.observe(state, raw), first)


def test_agents_share_statistics_as_folded_agents_do():
    def wrap(env):
        return envs.normalize_reward(envs.normalize_observation(env), gamma=GAMMA)

    folded = (wrap(envs.fold_agents(replayed(2))), envs.fold_agents(wrap(replayed(2))))
    before, after = (played(env, ENVS * 2) for env in folded)
    assert_close((before[1], before[2]._replace(info={})), (after[1], after[2]._replace(info={})))
    assert_close(before[0].inner.moments, after[0].inner.moments)


def test_wrappers_show_what_is_not_finite_and_do_not_keep_it():
    """Otherwise an infinite reward or observation, clipped to 10, would be trained on instead of being counted."""
    reward, obs, final = (np.array(x) for x in (recorded(1).reward, recorded(1).obs, recorded(1).final))
    reward[4, 1], reward[7, 0], reward[9, 2] = np.inf, -np.inf, np.nan
    for t, n, i, x in ((6, 0, 2, np.inf), (8, 1, 0, -np.inf)):
        obs[t, n, 0, i] = final[t - 1, n, 0, i] = x
    inner = replayed(1, reward=reward, obs=obs, final=final)
    state, first, out = played(envs.normalize_reward(envs.normalize_observation(inner), gamma=GAMMA))
    shown = np.concatenate([first[None], out.obs])
    for x, given in ((shown, obs[:, :, 0]), (out.reward, reward[..., 0])):
        np.testing.assert_array_equal(np.where(np.isfinite(x), 0, x), np.where(np.isfinite(given), 0, given))
        assert np.nanmax(np.abs(x[np.isfinite(x)])) <= 10
    for moments, seen in ((state.moments, ENVS * (STEPS - 3)), (state.inner.moments, ENVS * (STEPS - 1))):
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(moments))
        assert float(moments.seen) == seen


def test_moments_take_only_finite_numbers_of_the_present():
    """Numbers of absent agents may be anything, in shards too; those of present ones must have finite squares."""
    moments = envs.Moments.of(jnp.zeros(2)).updated(jnp.array([[1.0, 2.0], [3.0, 4.0]]))
    for bad in (jnp.inf, jnp.nan, 3e38):
        assert_same(moments.updated(jnp.array([[1.0, bad], [2.0, -bad]])), moments)
    spoilt = ShardMoments.of(moments, 2).updated(jnp.array([[3.0, jnp.nan], [1.0, 1.0], [5.0, 6.0], [7.0, 8.0]]))
    np.testing.assert_allclose(spoilt.of_rows(4).mean, [[2, 3]] * 2 + [[4, 5]] * 2, rtol=1e-6)  # its own shard stays
    x = jnp.array([[[1.0], [2.0]], [[3.0], [jnp.nan]], [[5.0], [jnp.inf]], [[9.0], [8.0]]])  # [N, A, 1]
    present = jnp.array([[True, True], [True, False], [True, False], [False, False]])
    empty = envs.Moments.of(x[0], per_agent=True)
    after = empty.updated(x, present)
    assert_close(after, envs.Moments(jnp.array([[3.0], [2.0]]), jnp.array([[8 / 3], [0.0]]), jnp.array([[3.0], [1.0]])))
    assert_same(after.updated(x, jnp.zeros_like(present)), after)
    assert_same(after.updated(x, jnp.ones_like(present)), after)
    shards = ShardMoments.of(empty, 2).updated(x, present)
    assert_close(shards.of_rows(4).mean[..., 0], jnp.array([[2.0, 2.0]] * 2 + [[5.0, 0.0]] * 2))
    assert_close(shards.whole(), after)


def test_moments_hold_after_float32_has_stopped_counting():
    """At 2**24 elements, one more adds nothing: the oldest are slowly forgotten, rounding shows, and nothing grows."""
    moments = envs.Moments(jnp.float32(3.0), jnp.float32(2.25), jnp.float32(2**24))
    x = 3.0 + 1.5 * jnp.array([0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, -2.0])  # with this mean and variance

    def step(moments, i):
        return moments.updated(x[i % 8][None]), None

    after, _ = jax.jit(lambda m: jax.lax.scan(step, m, jnp.arange(2_000_000)))(moments)
    assert float(after.mean) == pytest.approx(3.0, rel=1e-4)
    assert 0.85 < float(after.var) / 2.25 < 1.02


ONE, AGENTS = replayed(1), replayed(2)
PRIVILEGED = AGENTS._replace(privileged_space=envs.Box((4,)))
UNLIKE = ONE._replace(observation_space=envs.Tuple((envs.Box((3,)), envs.Box(()))))
test_arguments_of_the_wrappers_are_checked = refused(
    (lambda: envs.normalize_observation(UNLIKE).reset(KEY, ENVS), "observations have 1 arrays, but their spaces 2: "),
    (lambda: envs.normalize_reward(ONE, gamma=1.5), r"normalize_reward: gamma must lie in \[0, 1\], got 1\.5"),
    (lambda: envs.normalize_reward(ONE, gamma=lambda step: 0.9), "gamma must be a number"),
    *(
        (lambda x=x: envs.Moments.of(np.zeros(3)).updated(x), r"x must have a row axis before \(3,\), got .*x\[None\]")
        for x in (np.zeros(3), np.zeros((5, 2, 3)), np.zeros((5, 4)))
    ),
    (lambda: envs.normalize_reward(ONE, gamma=0.9, clip=-1.0), r"clip must lie in \(0, inf\]"),
    (lambda: envs.normalize_observation(ONE, eps=0.0), r"eps must lie in \(0, inf\], got 0"),
    (lambda: envs.normalize_reward(ONE, gamma=0.9, eps=0.0), r"eps must lie in \(0, inf\], got 0"),
    (lambda: envs.normalize_observation(ONE, per_agent=True), "per_agent=True needs an axis of agents"),
    (lambda: envs.normalize_reward(ONE, gamma=0.9, per_agent=True), "per_agent=True needs an axis of agents"),
    (lambda: envs.prepare(AGENTS, per_agent=True), "prepare: per_agent=True changes .* set normalize=True"),
    (lambda: envs.prepare(AGENTS, obs_clip=0.0), r"prepare: obs_clip=0\.0 changes .* set normalize=True"),
    (lambda: envs.prepare(AGENTS, normalize=True), "prepare: normalize=True needs gamma"),
    (lambda: envs.normalize_observation(PRIVILEGED), r"2 agents have a privileged part \(Box.*set privileged .* None"),
)
