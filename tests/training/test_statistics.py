"""Summaries over seeds, and the learning curve's picture."""

import dataclasses
import types

import jax
import numpy as np
import pytest
import scipy.stats

import ppo_parts as pp
from ppo_parts import training
from ppo_parts.errors import UserTypeError, UserValueError
from ppo_parts.recipes import cleanrl_ppo
from ppo_parts.training import _statistics


def slow_last_episodes(returns, episodes, last):
    total, number = 0.0, 0
    for mean, count in reversed(list(zip(returns, episodes, strict=True))):
        if number >= last:
            break
        if count > 0 and np.isfinite(mean):
            total, number = total + mean * count, number + count
    return total / number if number else np.nan


def test_statistics_of_the_last_episodes_against_a_loop():
    rng = np.random.default_rng(0)
    episodes = rng.integers(0, 4, size=(5, 30)) * (rng.random((5, 30)) < 0.7)
    episodes[3] = 0
    episodes = np.where(np.arange(30) % 7, episodes, np.nan)  # some rows are lost
    returns = np.where(episodes > 0, rng.normal(size=(5, 30)), np.nan)
    returns[4, ::3] = np.nan  # these rewards were not numbers
    for last in (1, 5, 20, 1000):
        expected = [slow_last_episodes(r, e, last) for r, e in zip(returns, episodes, strict=True)]
        np.testing.assert_allclose(training.last_episodes_return(returns, episodes, last), expected, rtol=1e-5)


def test_statistics_interquartile_mean_and_intervals():
    rng = np.random.default_rng(0)
    assert training.iqm([3.0]) == 3.0
    for n in (2, 3, 5, 10):  # a quarter of the weight is cut off on each side, including fractions of values
        x = rng.normal(size=n)
        repeated = np.repeat(np.sort(x), 4)
        assert training.iqm(x) == pytest.approx(repeated[n : 3 * n].mean())
    x = rng.normal(5, 2, size=400)
    low, high = training.bootstrap(x)
    exact = scipy.stats.norm.interval(0.95, x.mean(), scipy.stats.sem(x))
    assert (low, high) == pytest.approx(exact, abs=0.03)
    assert training.bootstrap(x) == [low, high]
    few = x[:9]
    exact = scipy.stats.t.interval(0.95, 8, few.mean(), scipy.stats.sem(few))
    assert training.summary(few)["mean_95"] == pytest.approx(exact)
    for statistic in (np.mean, training.iqm):
        one_by_one = training.bootstrap(few, lambda draw, statistic=statistic: statistic(draw), samples=200)
        assert training.bootstrap(few, statistic, samples=200) == pytest.approx(one_by_one)
    assert training.bootstrap(x, training.iqm, level=0.5)[0] > training.bootstrap(x, training.iqm)[0]
    for n, whole in ((2, True), (3, True), (4, True), (5, False)):  # the printed summary says so
        assert (training.summary(few[:n])["iqm_95"] == pytest.approx([few[:n].min(), few[:n].max()])) == whole
        assert ("[range: " in _statistics.format_summary(training.summary(few[:n]))) == whole
    assert [training.summary(np.array([2.0]))[what] for what in ("iqm_95", "mean_95", "std")] == [None] * 3
    assert training.summary(np.array([2.0, 4.0]))["std"] == pytest.approx(np.sqrt(2))


SUMMARIES = (training.iqm, training.bootstrap, training.summary)
CONFIG = training.Config(env_id="a", total_timesteps=1, num_envs=1, num_steps=1)
CARTPOLE = cleanrl_ppo.Config(total_timesteps=1024)
BAD = {
    "x": [lambda x=x, f=f: f(x) for f in SUMMARIES for x in ([], None, "3", True, [[1.0], [2.0]])],
    "metrics": [lambda: training.diagnose({"loss": np.ones((2, 8))}, dataclasses.replace(CONFIG, total_timesteps=8))],
    "level": [lambda: training.bootstrap([1.0], level=0)],
    "statistic": [lambda x=x: training.bootstrap([1.0], x) for x in ("mean", lambda draw: draw)],
    "rows": [lambda x=x: training.select_metric(x, "loss") for x in (None, [3])],
    "total_timesteps": [lambda: dataclasses.replace(CONFIG, num_steps=2).num_updates],
    "config": [lambda: training.Train.of(None, None, None, None, None)]
    + [lambda x=x: training.diagnose({}, x) for x in (types.SimpleNamespace(clip_coef=5.0), training.Config)],
    "policy": [lambda f=f: f(abs) for f in (
        lambda policy: training.Train.of(CONFIG, None, policy, None, None),
        lambda policy: cleanrl_ppo.make_train(CARTPOLE, policy=policy),
    )],
    "key": [lambda: cleanrl_ppo.make_train(CARTPOLE).evaluate_policy(CARTPOLE, jax.random.key(0), 1)],
    "low": [lambda x=x: training.Range(x) for x in ("a", float("nan"))],
    "high": [lambda: training.Range(2, 1)],
    "directory": [lambda: training.Checkpoints(3)],
    "keep": [lambda: training.Checkpoints("c", keep=0)],
    "step": [lambda: training.Checkpoints("c").save(-1, {})],
    "train": [lambda: training.run(None, None)],
    "presets": [lambda x=x: training.main(abs, x, []) for x in ({}, None, {"a": 1})],
}  # fmt: skip


def test_bad_arguments_of_public_functions_are_named():
    for name, functions in BAD.items():
        for function in functions:
            with pytest.raises((UserValueError, UserTypeError), match=rf"\w+: {name} must "):
                function()
    says = "policy must be a ppo_parts.Policy, got the part 'full_batch': pass it as"
    with pytest.raises(UserTypeError, match=says):
        training.Train.of(CONFIG, None, pp.full_batch(), None, None)


def test_statistics_smoothing_and_the_picture_take_what_is_missing(tmp_path):
    returns = np.array([[np.nan, np.nan], [1.0, np.nan], [3.0, 2.0], [np.nan, np.nan], [np.nan, 8.0], [np.nan, 1.0]])
    smooth = _statistics.smooth(returns, 3)
    for t in range(6):
        for seed in range(2):
            window = returns[max(0, t - 2) : t + 1, seed]
            expected = np.mean(window[np.isfinite(window)]) if np.isfinite(window).any() else np.nan
            np.testing.assert_allclose(smooth[t, seed], expected)
    np.testing.assert_array_equal(_statistics.smooth(np.array([1e20, 1.0, 2.0, 3.0]), 2), [1e20, 5e19, 1.5, 2.5])
    steps = np.arange(0.0, _statistics.POINTS)  # curves have no gaps, up to the end of the shorter one
    table = np.where(np.isin(steps[:, None], [50, 150]), steps[:, None], [np.nan, np.nan])
    table[:, 1] = np.nan
    grid, values = _statistics.resample([(steps, table), (2 * steps, 2 * steps[:, None])])
    np.testing.assert_array_equal(grid, steps)
    np.testing.assert_allclose(values[:, 0], np.where(steps < 50, np.nan, np.minimum(steps, 150)))
    assert np.isnan(values[:, 1]).all()
    np.testing.assert_allclose(values[:, 2], steps)
    for name, data in {"seeds.png": returns, "one.png": returns[:, 0]}.items():
        _statistics.plot_curve(tmp_path / name, np.arange(6.0), data, "title")
        assert (tmp_path / name).stat().st_size > 1000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.png", "seeds.png"]
