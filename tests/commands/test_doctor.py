"""Why does a run not learn? Each rule with numbers that it is for, the measurements of a policy, and the command."""

import dataclasses
import json
import re
import runpy
import signal
import sys
import types
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from tensorboardX import SummaryWriter

import ppo_parts as pp
from ppo_parts import envs, training
from ppo_parts.commands import doctor
from ppo_parts.envs._laws import random_action
from ppo_parts.recipes import cleanrl_ppo
from ppo_parts.training import _probe
from ppo_parts.training._diagnose import RULES, Evidence
from tests import recipe
from tests.envs.common import Scripted, host
from tests.runs import altered

UPDATES = 100
HEALTHY = {
    "episode_return": np.linspace(20, 200, UPDATES) + np.sin(np.arange(UPDATES)),
    "episode_length": np.linspace(20, 200, UPDATES), "evaluation/episode_return": np.full(UPDATES, 190.0),
    "episodes": np.full(UPDATES, 3.0), "approx_kl": np.linspace(4e-3, 1e-4, UPDATES),
    "clip_fraction": np.full(UPDATES, 0.05), "entropy": np.linspace(0.69, 0.3, UPDATES),
    "explained_variance": np.linspace(0, 0.8, UPDATES), "policy_loss": np.full(UPDATES, -0.01),
    "value_loss": np.full(UPDATES, 3.0), "early_stopped": np.zeros(UPDATES), "epochs": np.full(UPDATES, 4.0),
    "nonfinite/gradient": np.zeros(UPDATES),
}  # fmt: skip
PROBED = {
    "log_ratio": 1e-6, "log_ratio_inside": 1e-6, "value_change": 1e-6, "memory_after_reset": 0.0, "same_envs": 0.0,
    "obs_rms": 1.0, "obs_std": 1.0, "obs_seen": 1.0, "action_at_bound": 0.2, "action_beyond": 0.1,
    "reward_balance": 1.0, "reward_size": 1.0, "target_rms": 20.0, "value_error": 12.0, "value_at_end": 0.9,
    "no_effect": 0.0, "terminated": 4.0, "truncated": 0.0, "jump_at_end": 9.0, "dead_units": 0.0,
    "value_dominance": 20.0, "update_direction": 0.1, "action_effect": 0.1, "score": 1.0, "actions_ignored": 0.0,
    "reward_spread": 0.2, "length_spread": 0.3, "agents_alike": 0.1, "softmax_twice": 0.0, "action_spread": 0.2,
    "mean_zero": 0.0, "action_unavailable": 0.0, "unused_parameters": 0.0, "observation_late": 0.0,
    "reward_elsewhere": 0.0, "value_spread": 0.1,
}  # fmt: skip
HEALTHY |= {f"probe/{name}": x for name, x in PROBED.items()}
CONFIG = {
    "num_envs": 8, "num_steps": 128, "num_minibatches": 4, "update_epochs": 4, "gamma": 0.99, "clip_coef": 0.2,
    "ent_coef": 0.01,
}  # fmt: skip
FLAT = {"episode_return": 20 + np.sin(np.arange(UPDATES))}
FIXED = {"episode_length": np.full(UPDATES, 200.0)}
FADING = np.where((np.arange(UPDATES) % 3 == 0) & (np.arange(UPDATES) < UPDATES // 2), 1.0, 0.0)
SMALL = {"probe/target_rms": 0.02, "probe/reward_size": 1e-3, "value_loss": np.full(UPDATES, 1e-5)}
NO_ENDS = {"probe/terminated": 0.0, "probe/truncated": 40.0}
CONSTANT = {"probe/reward_spread": 0.0, "probe/length_spread": 0.0, "probe/reward_balance": -1.0}
CONSTANT |= {"episode_return": -FIXED["episode_length"]}
SHORTER = {"episode_length": np.linspace(3, 1, UPDATES), "episode_return": np.linspace(-3, -1, UPDATES)}
SHORTER |= {"evaluation/episode_return": np.full(UPDATES, -1.0), "probe/reward_balance": -1.0, "probe/obs_std": 0.0}
PLANTED = {  # by rule: metrics and settings that trigger it
    "not_finite": ({"nonfinite/gradient": np.eye(UPDATES)[7]}, {}),
    "duplicated_seeds": ({"loss": np.ones((UPDATES, 2))}, {}),
    "duplicated_envs": ({"probe/same_envs": 1.0}, {}),
    "memory_not_reset": ({"probe/memory_after_reset": 0.2, "probe/log_ratio": 1.0, "probe/log_ratio_inside": 1.0}, {}),
    "action_unavailable": ({"probe/action_unavailable": 0.1}, {}),
    "action_changed": ({"probe/log_ratio": 3.0, "probe/action_beyond": 0.0}, {}),
    "policy_differs": ({"probe/value_change": 0.2}, {}),
    "log_prob_wrong": ({"probe/score": 30.0}, {}),
    "action_unused": ({"probe/action_effect": 0.0}, {}),
    "observation_late": (FLAT | {"probe/observation_late": 1.0}, {}),
    "reward_elsewhere": ({"probe/reward_elsewhere": 1.0}, {}),
    "reward_constant": (NO_ENDS | FIXED | CONSTANT, {}),
    "end_as_time_limit": (NO_ENDS, {}),
    "end_rewarded": (SHORTER, {}),
    "update_reversed": (FLAT | {"probe/update_direction": -0.05}, {}),
    "updates_few": ({name: x[:5] for name, x in HEALTHY.items() if np.ndim(x)} | {"episode_return": np.ones(5)}, {}),
    "rollout_short": ({}, {"num_steps": 2, "num_envs": 512}),
    "stops_at_once": ({"early_stopped": np.ones(UPDATES), "epochs": np.ones(UPDATES)}, {}),
    "flags_shifted": ({"probe/jump_at_end": 0.1}, {}),
    "time_limit_as_end": (FIXED, {}),
    "never_ends": ({"episodes": np.zeros(UPDATES), "episode_return": np.full(UPDATES, np.nan)}, {}),
    "statistics_frozen": ({"probe/obs_seen": 0.01}, {}),
    "observations_large": ({"probe/obs_rms": 300.0}, {}),
    "observations_vanish": ({"probe/obs_std": 1e-4}, {}),
    "reward_sign": ({"probe/reward_balance": -1.0}, {}),
    "reward_scale_large": ({"probe/target_rms": 2e4}, {}),
    "reward_scale_small": (SMALL, {}),
    "evaluation_apart": ({"evaluation/episode_return": np.full(UPDATES, 25.0)}, {}),
    "softmax_twice": ({"probe/softmax_twice": 0.4}, {}),
    "mean_rectified": ({"probe/mean_zero": 0.5}, {}),
    "agents_alike": ({"probe/agents_alike": 1.0}, {}),
    "actions_narrow": (FLAT | {"probe/action_spread": 0.01, "entropy": np.full(UPDATES, 0.6)}, {}),
    "parameters_unused": ({"probe/unused_parameters": 0.1}, {}),
    "inputs_shrunk": (FLAT | {"probe/value_spread": 1e-4, "probe/dead_units": 0.7}, {}),
    "dead_units": ({"probe/dead_units": 0.7}, {}),
    "actions_saturated": ({"probe/action_at_bound": 0.99, **FLAT}, {}),
    "gamma_short": ({}, {"gamma": 0.5}),
    "minibatch_small": ({}, {"num_minibatches": 256}),
    "advantage_lost": ({"policy_loss": np.zeros(UPDATES)}, {}),
    "advantage_not_standardized": ({"policy_loss": np.full(UPDATES, -8.0)}, {}),
    "epochs_many": ({}, {"update_epochs": 80}),
    "clip_large": ({}, {"clip_coef": 10.0}),
    "clip_small": ({"clip_fraction": np.full(UPDATES, 0.6), "approx_kl": np.full(UPDATES, 2e-6)}, {}),
    "entropy_bonus_large": ({"entropy": np.full(UPDATES, 0.69)}, {"ent_coef": 1.0}),
    "schedule_ends_early": ({"approx_kl": np.where(np.arange(UPDATES) < 8, 4e-3, 1e-9)}, {}),
    "learning_rate_large": ({"approx_kl": np.full(UPDATES, 0.3)}, {}),
    "learning_rate_small": (FLAT | {"approx_kl": np.full(UPDATES, 1e-7)}, {}),
    "entropy_collapsed": ({"entropy": np.geomspace(0.69, 1e-3, UPDATES), **FLAT}, {}),
    "value_dominates": (FLAT | {"probe/value_dominance": 1e5}, {}),
    "other_loss_dominates": (FLAT | {"loss": np.full(UPDATES, -6e3)}, {}),
    "value_explains_nothing": (FLAT | {"explained_variance": -np.ones(UPDATES), "value_loss": np.zeros(UPDATES)}, {}),
}


def find(metrics, **settings):
    """Return the names of what is found in a healthy run in which these metrics and settings are changed."""
    return [found.name for found in training.diagnose({**HEALTHY, **metrics}, {**CONFIG, **settings})]


def test_one_number_is_enough():
    for name, value, found in (
        ("probe/action_at_bound", 0.99, ["actions_saturated"]),  # although returns rise
        ("probe/actions_ignored", 1.0, ["action_unused"]),
        ("probe/reward_size", 1e-3, ["reward_scale_small"]),
        ("probe/terminated", 0.0, ["never_ends"]),  # although episodes end
        ("probe/reward_size", 500.0, ["reward_scale_large"]),
        ("probe/reward_balance", -0.9, []),  # few large rewards, which a wrapper clips, pay for many small costs
        ("entropy", np.linspace(2.8, 1.4, UPDATES), []),  # it is the entropy of several actions together
        ("episode_return", FADING, ["reward_sign"]),
        ("clip_coef", 1e-3, ["clip_small"]),
        ("vf_coef", 500.0, ["value_dominates"]),
        ("target_kl", 1e-5, ["learning_rate_small"]),
    ):
        changed = {name: value}  # as metrics or settings; the others ignore it
        assert find((FLAT if name == "entropy" else {}) | changed, adapt_each_epoch=False, **changed) == found, name


def test_nothing_is_found_in_a_healthy_run():
    assert find({}) == find({"probe/action_at_bound": 0.97}) == []  # nothing is found because returns rise
    without = {name: x for name, x in HEALTHY.items() if name not in ("entropy", "episode_return")}
    more = {"nonfinite/loss/entropy": np.zeros(UPDATES), "evaluation/episode_return": FADING, "approx_kl": np.zeros(0)}
    assert training.diagnose(without | more, CONFIG) == []  # none of them is the metric of a phase
    assert training.diagnose({}) == []
    with pytest.raises(ValueError, match=r"diagnose: metrics must be numbers or arrays: .*inhomogeneous"):
        training.diagnose({"entropy": [[1.0, 2.0], [3.0]]})
    assert training.diagnose({"bounds_loss": np.zeros((9, 2)), "loss": np.arange(18.0).reshape(9, 2)}) == []
    # A game of 200 steps ends when all cards are dealt, and an answer, worth 1 / 200, changes nothing that follows.
    fixed, small = (PLANTED[name][0] for name in ("time_limit_as_end", "reward_scale_small"))
    game = {**fixed, **small, "probe/reward_size": 0.005, "probe/value_error": 1.5}
    assert find({**game, "probe/no_effect": 1.0}, gamma=0.5) == []
    assert find({**game, "probe/value_at_end": 0.1}) == []  # it is the value of a clock
    assert find({**SMALL, "probe/reward_size": 1.0}) == []
    # The value function's errors do not hide the rewards.
    assert find({**SMALL, "probe/reward_size": 0.02, "probe/value_error": 4.0}) == []
    still = {"episode_return": -np.geomspace(8, 0.03, UPDATES), "probe/reward_size": 1e-4, "probe/reward_balance": -1.0}
    still["evaluation/episode_return"] = np.zeros(UPDATES)
    assert find(still) == []  # the policy avoids the costs of its actions
    solved = {**NO_ENDS, "probe/reward_spread": 0.0, "probe/length_spread": 0.0}
    assert find(solved) == []  # each step is paid, and no episode ends before its limit
    assert find({**solved, **FIXED}) == []  # no episode ever has, in a run that began with such a policy
    one_step = {"critic/minibatches": 320.0, "actor/minibatches": 1.0, "actor/policy_loss": 0.0}  # of TRPO's actor
    others = {name: x for name, x in HEALTHY.items() if name != "policy_loss"}
    assert training.diagnose(others | {name: np.full(UPDATES, x) for name, x in one_step.items()}, CONFIG) == []
    # The return rises by less than its noise, but it surely rises.
    certain = {"entropy": np.geomspace(0.69, 1e-2, UPDATES)}
    risen = np.linspace(14, 26, UPDATES) + 8 * np.sin(np.arange(UPDATES) ** 2)
    assert find({**certain, "episode_return": risen}) == []
    assert training.diagnose({name: x[::20] for name, x in (certain | FLAT).items()}) == []
    # An evaluation of few episodes says less than the many episodes of an update.
    lost = {"episode_return": risen, "evaluation/episode_return": np.full(UPDATES, 14.0)}
    for episodes, found in ((3.0, ["evaluation_apart"]), (300.0, [])):
        assert find({**lost, "episodes": np.full(UPDATES, episodes)}) == found
    assert PLANTED.keys() == {rule.name for rule in RULES}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name):
    metrics, settings = PLANTED[name]
    (found,) = training.diagnose({**HEALTHY, **metrics}, {**CONFIG, **settings})
    flags = {flag.replace("-", "_") for flag in re.findall(r"--([\w-]+)", found.advice)}
    assert (found.name, flags - {*CONFIG, "eval_mode"}) == (name, set())  # the advice names only flags that the run has
    assert found.advice[:3] not in ("", "or ", "and")


def test_a_return_that_falls_comes_first_and_a_collapse_explains_small_rewards_and_equal_environments():
    assert find({"episode_return": HEALTHY["episode_return"][::-1]}) == ["reward_sign"]
    collapsed = SMALL | {"probe/same_envs": 1.0} | PLANTED["entropy_collapsed"][0]
    assert find(collapsed) == ["entropy_collapsed"]
    assert find(collapsed | PLANTED["reward_constant"][0]) == ["reward_constant", "entropy_collapsed"]
    assert find(SMALL | {"episode_return": FADING, "probe/reward_size": 0.0}) == ["reward_sign"]


def test_a_cause_takes_the_place_of_its_consequences():
    small = FLAT | {"approx_kl": np.full(UPDATES, 1e-6), "probe/value_dominance": 1e5}
    assert find(small) == ["learning_rate_small", "value_dominates"]
    assert find(small | {"probe/target_rms": 2e4}) == ["reward_scale_large"]
    wrong = {"probe/score": 30.0, "probe/action_at_bound": 0.8}
    assert find(wrong | {"probe/action_beyond": 0.7}) == ["log_prob_wrong"]
    assert find(wrong | {"probe/action_beyond": 0.1}) == []  # squashed actions near their bounds are rounded
    still = PLANTED["schedule_ends_early"][0]
    assert find(still | {"probe/softmax_twice": 1.0}) == ["softmax_twice"]
    assert find(still | PLANTED["end_rewarded"][0]) == ["end_rewarded"]
    worse = {"entropy": np.geomspace(0.69, 1e-3, UPDATES), "episode_return": FADING}
    assert "reward_sign" in find(worse)  # it is found in addition to the collapse
    once = PLANTED["reward_constant"][0] | {"episode_length": FIXED["episode_length"] - np.eye(UPDATES)[50]}
    assert find(once) == ["reward_constant"]
    never = {"episode_return": np.zeros(UPDATES), "probe/reward_size": 0.0, "probe/reward_spread": np.nan}
    assert find(never) == ["reward_constant"]
    wrong_way = {"probe/update_direction": -0.05, "episode_return": HEALTHY["episode_return"][::-1]}
    assert find(wrong_way) == find(wrong_way | PLANTED["reward_constant"][0]) == ["update_reversed"]
    assert find(wrong_way, learning_rate=0.1) == ["learning_rate_large"]
    assert find(wrong_way | PLANTED["advantage_lost"][0]) == ["advantage_lost", "reward_sign"]
    assert find({"probe/no_effect": 1.0, "probe/reward_size": 0.0, "probe/same_envs": 1.0}) == ["action_unused"]
    slow = {**FLAT, "approx_kl": np.full(UPDATES, 5e-5)}
    for rate, found in ((1e-5, ["learning_rate_small"]), (2.5e-4, [])):
        assert find(slow, learning_rate=rate) == found
    rising = {"probe/value_spread": 1e-4, "probe/observation_late": 1.0, "entropy": np.full(UPDATES, np.nan)}
    assert find(rising | still) == []
    assert find(rising | PLANTED["dead_units"][0]) == ["inputs_shrunk"]
    assert find({"probe/obs_rms": 100.0} | PLANTED["dead_units"][0]) == ["observations_large"]
    density, hardly = np.linspace(2.5, -0.5, UPDATES), FLAT["episode_return"] + np.linspace(0, 1.3, UPDATES)
    assert 2 < Evidence({"episode_return": hardly}).rise() < 5
    assert find({"episode_return": hardly, "entropy": density}) == ["entropy_collapsed"]
    assert find({"episode_return": hardly, "entropy": density + 1}) == find({"entropy": density}) == []
    raw = {"policy_loss": np.full(UPDATES, -0.1)}
    for kl, found in ((0.015, ["advantage_not_standardized"]), (0.025, []), (0, [])):
        assert find(raw | {"approx_kl": np.full(UPDATES, kl)}) == found
    last = np.where(np.arange(UPDATES) < UPDATES // 2, HEALTHY["episode_length"], 200.0)
    assert find({"episode_length": last}) == ["time_limit_as_end"]


def test_findings_are_sorted_and_few_and_of_the_median_seed():
    chosen = ["value_explains_nothing", "dead_units", "flags_shifted", "gamma_short", "policy_differs", "reward_sign"]
    metrics, settings = ({k: x for name in chosen for k, x in PLANTED[name][i].items()} for i in (0, 1))
    five = ["policy_differs", "gamma_short", "flags_shifted", "reward_sign", "dead_units"]
    assert find(metrics, **settings) == five
    x = HEALTHY["approx_kl"]
    for seeds, names in (([x, x, 100 * x], []), ([x, 100 * x, 100 * x], ["learning_rate_large"])):
        assert [x.name for x in training.diagnose({"actor/approx_kl": np.stack(seeds, axis=1)})] == names
    (first,) = training.diagnose({"nonfinite/reward": np.eye(9)[2:4].sum(0), "nonfinite/gradient": np.eye(9)[3]})
    assert (first.value, first.cause) == (2, "in update 3: non-finite numbers arose first in reward (1 element)")


def test_a_probe_sees_a_memory_that_is_not_reset_and_actions_that_were_clipped():
    train = recipe.make_train(recipe.Config(memory="lstm", num_steps=16, total_timesteps=64))

    def with_spare(key):  # parameters that no gradient reaches are not dead units
        return dict.fromkeys(("net", "spare"), train.policy.init(key))

    def forgets_nothing(params, batch):
        return train.policy.evaluate(params["net"], batch.replace(reset=jnp.zeros_like(batch.reset)))

    def collect(key, params, state):
        state, batch, metrics = train.rollout.collect(key, params["net"], state)
        return state, batch.replace(action=jnp.clip(batch.action, -0.5, 0.5)), metrics

    policy = dataclasses.replace(train.policy, init=with_spare, evaluate=forgets_nothing)
    learner = train.learner._replace(update=lambda key, state, batch: (state, None))
    faulty = altered(train, policy=policy, learner=learner, rollout=train.rollout._replace(collect=collect))

    @jax.jit
    def probe(key):
        state = train.init(key)
        learner = state.learner._replace(params=dict.fromkeys(("net", "spare"), state.learner.params))
        return training.probe(faulty, state._replace(learner=learner), recipe.Config())

    found = probe(jax.random.key(0))
    assert [x.name for x in training.diagnose(found)][:1] == ["memory_not_reset"]
    assert found["probe/log_ratio"] > 0.1
    assert found["probe/action_at_bound"] > 0.3
    assert found["probe/jump_at_end"] > 1
    assert (found["probe/dead_units"], found["probe/unused_parameters"]) == (0, 0.5)
    assert found["probe/no_effect"] == found["probe/actions_ignored"] == 1  # the steps to the right do so
    for streams, says in ((0, "must have a critic"), (2, "not several streams")):

        def evaluate(params, batch, streams=streams):
            distribution, value, *_ = train.policy(params, batch)
            return pp.Output(distribution, jnp.stack(streams * [value], axis=-1) if streams else None)

        actor = altered(train, policy=dataclasses.replace(train.policy, evaluate=evaluate))
        with pytest.raises(pp.errors.UserError, match=says):
            jax.eval_shape(lambda key, actor=actor: training.probe(actor, train.init(key)), jax.random.key(0))


def test_a_probe_sees_that_updates_go_the_wrong_way_and_whether_values_depend_on_inputs():
    train = recipe.make_train(recipe.Config(total_timesteps=512))

    def go_back(key, state, batch):
        after, metrics = train.learner.update(key, state, batch)
        return after._replace(params=jax.tree.map(lambda x, y: 2 * x - y, state.params, after.params)), metrics

    def with_values(factor):
        def collect(*args):
            state, batch, metrics = train.rollout.collect(*args)
            return state, batch.replace(value=factor * batch.value), metrics

        return altered(train, rollout=train.rollout._replace(collect=collect))

    def measured(train):
        return _probe._run_first_update(train, jax.random.key(0), {"gamma": 0.99, "gae_lambda": 0.95})

    direction, kept, spread = measured(train)
    assert direction > 0.01
    assert not any(kept)
    assert 0.01 < spread < 1
    assert measured(altered(train, learner=train.learner._replace(update=go_back)))[0] < -0.01
    assert 1e-6 < measured(with_values(1e-4))[2] < 1e-3
    assert np.isnan(measured(with_values(0.0))[2])


@pytest.mark.parametrize("wrong", [False, True])
def test_a_probe_sees_late_observations_and_rewards_of_other_agents(wrong):
    def step(key, x, action):
        new, reward = x + action, 1.0 * action
        seen = (x if wrong else new)[:, None]
        return envs.Step(new, seen, reward=reward[::-1] if wrong else reward, terminated=jnp.zeros(2, bool))

    spaces = envs.Box((1,)), envs.Discrete(2)
    env = envs.auto_reset(lambda key: (jnp.zeros(2), jnp.zeros((2, 1))), step, *spaces, time_limit=50, num_agents=2)
    key = jax.random.key(0)
    found = _probe._change_steps_and_agents(
        types.SimpleNamespace(env=env, on_host=False), types.SimpleNamespace(key=key, rollout=env.reset(key, 4))
    )
    assert (found["observation_late"], found["reward_elsewhere"]) == (wrong, wrong)


def test_a_probe_does_not_take_new_episodes_and_other_statistics_for_effects():
    def answer(key, x, action):  # a wrong answer ends the episode, and no answer changes the question
        return envs.Step(x, x[None], reward=1.0 * action, terminated=action == 0)

    def swap(key, x, action):
        return envs.Step(x, x[:, None], reward=1.0 * action[::-1], terminated=jnp.zeros(2, bool))

    def ask(key):
        x = jax.random.uniform(key)
        return x, x[None]

    spaces = envs.Box((1,)), envs.Discrete(2)
    quiz = envs.auto_reset(ask, answer, *spaces)
    pair = envs.auto_reset(lambda key: (jnp.zeros(2), jnp.zeros((2, 1))), swap, *spaces, time_limit=99, num_agents=2)
    found = {}
    for name, env in {"quiz": quiz, "pair": envs.normalize_reward(pair, gamma=0.9)}.items():

        def step(carry, key, env=env):
            state, out = env.step(key, carry[0], random_action(env)(key, carry[1]))
            return (state, out.obs), None

        key = jax.random.key(0)
        rollout = jax.lax.scan(step, env.reset(key, 16), jax.random.split(key, 64))[0]
        train, state = types.SimpleNamespace(env=env, on_host=False), types.SimpleNamespace(key=key, rollout=rollout)
        found[name] = _probe._change_steps_and_agents(train, state)
    assert not found["quiz"]["observation_late"]
    assert found["pair"]["reward_elsewhere"] == 1


def test_a_probe_sees_that_answers_change_nothing_and_whether_values_foresee_the_end():
    for env_id, same in {"popgym:RepeatFirstEasy": 1, "CartPole-v1": 0}.items():
        config = cleanrl_ppo.Config(env_id=env_id, num_steps=51, total_timesteps=204)
        train = cleanrl_ppo.make_train(config)
        found = jax.jit(lambda key: training.probe(train, train.init(key), config))(jax.random.key(0))  # noqa: B023
        assert (found["probe/no_effect"], found["probe/actions_ignored"]) == (same, 0)
        assert found["probe/terminated"] == 84 or not same  # these are 4 games of 51 steps, until there are 1,024 steps
    ends = {"reward": jnp.ones((4, 1)), "terminated": jnp.eye(4)[3:].T}
    for value, missed in (([4.0, 3, 2, 1], 0), ([4.0, 4, 4, 4], 0.75)):
        assert _probe._measure_value_at_end(pp.Batch(value=jnp.array(value)[:, None], **ends)) == missed


def test_a_probe_sees_rewards_and_actions_without_effect_and_a_wrong_density():
    def reset(key):
        x = jax.random.uniform(key, (2,))
        return x, x

    def step(key, x, action):
        x = x + 0.1 * jnp.clip(action[0], -1, 1)
        return envs.Step(x, x, reward=1.0, terminated=False)

    env = envs.auto_reset(reset, step, envs.Box((2,)), envs.Box((2,), -1.0, 1.0), time_limit=16)
    config = cleanrl_ppo.PRESETS["continuous"]
    config = dataclasses.replace(config, num_envs=4, num_steps=64, num_minibatches=4, total_timesteps=1024)
    train = cleanrl_ppo.make_train(config, env)

    @jax.jit
    def probe(key):
        state = train.init(key)
        batch = train.rollout.collect(key, state.learner.params, state.rollout)[1]
        given = state.learner.params, batch.replace(action=3 * batch.action)
        return training.probe(train, state, config), _probe._measure_score(train, *given), given

    found, wide, given = probe(jax.random.key(0))
    np.testing.assert_allclose(_probe._measure_score(train, *given), wide, rtol=1e-3)  # also without jit
    assert found["probe/action_effect"] == found["probe/reward_spread"] == found["probe/length_spread"] == 0
    assert found["probe/score"] < 3 < 10 < wide


@pytest.mark.parametrize("weights", [(0.1, 0.1), (0.1, 0.0), (0.0, 0.1)], ids=str)
def test_a_probe_finds_unused_components_of_the_action_on_the_host(weights):
    def see(env):
        env.x = env.np_random.uniform(size=1) if env.time == 0 else env.x + np.array(weights) @ env.arrived[-1]
        return env.x

    settings = {"obs_space": spaces.Box(-9, 9, (1,)), "action_space": spaces.Box(-1, 1, (2,))}
    env = host(*[lambda: Scripted(10**6, see=see, reward=1.0, **settings)] * 2)
    config = dataclasses.replace(cleanrl_ppo.PRESETS["continuous"], num_envs=2, num_steps=64, total_timesteps=128)
    train = cleanrl_ppo.make_train(config, env)
    state = jax.jit(train.init)(jax.random.key(0))
    assert (jax.jit(lambda state: _probe._change_components(train, state))(state) > 0) == all(weights)


def test_a_probe_finds_actions_that_were_not_available():
    space = envs.Tuple((envs.Discrete(3), envs.MultiDiscrete((2, 2)), envs.Discrete(2)))
    actions = jnp.array([[0, 1, 2]]), jnp.array([[[0, 1], [1, 0], [1, 1]]]), jnp.array([[0, 0, 1]])  # of 1 x 3 steps
    masks = jnp.array([[[1, 0, 0], [0, 0, 1], [1, 1, 1]]]), jnp.ones((1, 3, 4)).at[0, 2, 3].set(0), None
    for available, share in ((masks, 2 / 3), ((None, masks[1], None), 1 / 3), (None, np.nan)):
        obs = envs.Observation(jnp.zeros((1, 3)), available)
        batch = pp.Batch(obs=obs, action=actions, log_prob=jnp.zeros((1, 3)))
        np.testing.assert_allclose(_probe._measure_unavailable(space, batch), share)


def test_a_probe_finds_a_mean_after_a_relu():
    mean = jax.random.normal(jax.random.key(0), (16, 8, 2))
    for loc, share in ((mean, 0.0), (mean.at[..., 0].set(jnp.maximum(mean[..., 0], 0)), 0.5), (0 * mean, 0.0)):
        normal = pp.distributions.Normal(loc, 1.0)
        for distribution in (normal, pp.distributions.TanhNormal(normal, -1.0, 1.0)):
            np.testing.assert_allclose(_probe._measure_mean_zero(distribution), share, atol=0.1)
    assert np.isnan(_probe._measure_mean_zero(pp.distributions.Categorical(mean)))


def test_a_probe_finds_a_second_softmax_and_agents_that_cannot_be_told_apart():
    logits = 9 * jax.random.normal(jax.random.key(0), (5, 4, 2, 3))  # logits of two agents
    same = jnp.broadcast_to(logits[:, :, :1], logits.shape)
    constant = jnp.broadcast_to(jnp.array([0.0, 0.02, 0.98]), logits.shape)  # what a bandit may have learned
    many = 2 * jax.random.normal(jax.random.key(2), (5, 4, 2, 30))  # so many that none is nearly certain
    for given, softmax_twice, agents_alike in (
        (logits, False, False), (same, False, True), (jax.nn.softmax(same), True, True), (0.01 * logits, False, False),
        (constant, False, True), (jax.nn.softmax(many), True, False), (many, False, False),
        (0.05 * many, False, False),
    ):  # fmt: skip
        distribution = pp.distributions.Categorical(given)
        assert (_probe._measure_softmax_twice(distribution) > 0.5) == softmax_twice
        train = types.SimpleNamespace(env=types.SimpleNamespace(num_agents=2))
        batch = pp.Batch(action=distribution.sample(seed=jax.random.key(1)))
        assert (_probe._compare_agents(train, batch, pp.Output(distribution)) == 1) == agents_alike
        train.env.num_agents = 1
        assert np.isnan(_probe._compare_agents(train, batch, pp.Output(distribution)))


def test_a_probe_measures_how_far_actions_are_from_the_bounds_that_there_are():
    space = {"box": envs.Box((2,), -1.0, np.array([3.0, -1.0])), "choice": envs.Discrete(2), "free": envs.Box(())}
    action = {"box": jnp.array([[2.0, -1.0], [-1.2, -1.0]]), "choice": jnp.zeros(2, int), "free": jnp.zeros(2)}
    found = _probe._measure_distance_to_bounds(envs.Dict(space), action, (2,))
    np.testing.assert_allclose(found, [[0.25, 0.0], [-0.05, 0.0]], atol=1e-6)
    assert np.isnan(jnp.mean(_probe._measure_distance_to_bounds(space["free"], action["free"], (2,)) < 0))


def status(*arguments) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["doctor", *map(str, arguments)])
        patch.delitem(sys.modules, "ppo_parts.doctor", raising=False)  # as in a new process
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("ppo_parts.doctor", run_name="__main__")
    return ended.value.code


def test_the_command_reads_a_run_and_its_checkpoint(folder, tmp_path, capsys):
    page = tmp_path / "doctor.html"
    assert status(folder, "--html", page) == 1
    said = capsys.readouterr()
    assert "policy_loss" in said.out
    assert "no checkpoint was measured" not in said.err
    assert said.out.splitlines()[0].startswith("1. ")
    assert list(doctor.read_run(folder)[0]) == sorted(doctor.read_run(folder)[0])  # the first of two phases counts
    text = page.read_text()
    assert "data:image/png;base64," in text
    assert "http" not in text.replace("<!doctype html>", "")
    assert status(folder, "--recipe", "nowhere") == 2  # without the measurements, it would look healthy
    assert "nowhere" in capsys.readouterr().err


def write_csv(folder):
    """Write a file as Excel saves it, with a byte-order mark before the first name."""
    names = "rollout/ep_rew_mean,time/started,train/approx_kl,train/entropy_loss,train/value_loss"
    rows = [f"{i},12:30,0.4,-0.5," + "2.0" * (i > 0) for i in range(20)]
    (folder / "progress.csv").write_text("\n".join([names, *rows]), "utf-8-sig")


def write_events(folder):
    with SummaryWriter(str(folder)) as writer:
        for i in range(20):
            for name, x in {"losses/approx_kl": 0.4, "losses/entropy": 0.5, "Loss/value": 2.0}.items():
                writer.add_scalar(name, x, i)


@pytest.mark.parametrize("write", [write_csv, write_events])
def test_the_command_reads_logs_of_other_libraries(write, tmp_path, capsys):
    write(tmp_path)
    [file] = tmp_path.iterdir()
    metrics, config = doctor.read_run(tmp_path)
    assert config == {}
    assert doctor.read_run(file)[0].keys() == metrics.keys()
    assert ("episode_return" in metrics) == (write is write_csv)
    np.testing.assert_allclose(metrics["entropy"], np.full(20, 0.5))
    np.testing.assert_allclose(metrics["value_loss"], np.ones(19 + (write is write_events)))
    assert status(tmp_path) == 1
    assert "learning_rate_large (likely)" in capsys.readouterr().out


def test_the_command_reads_an_unfinished_run_of_as_many_seeds_as_planned_updates(tmp_path):
    config = {"total_timesteps": 64, "num_envs": 2, "num_steps": 8}
    stored = {"config": config, "run": {"num_seeds": 4}, "versions": {}, "steps_per_update": 16}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    rows = [{"update": i, "loss": [0.1, 0.2, 0.3, 0.4]} for i in range(3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*map(json.dumps, rows), ""]))
    assert status(tmp_path) == 0


def test_what_cannot_be_read_ends_with_status_2(tmp_path, capsys, monkeypatch):
    for name in ("empty", "damaged"):
        (tmp_path / name).mkdir()
    (tmp_path / "damaged/events.out.tfevents.1").write_bytes(b"\xff" * 200)
    (tmp_path / "bytes.csv").write_bytes(b"train/approx_kl\n\xff\n")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "text.csv").write_text("train/approx_kl\nlarge\n")
    for number in "12":
        (tmp_path / f"runs/{number}").mkdir(parents=True)
        (tmp_path / f"runs/{number}/events.out.tfevents.1").touch()
    for name, says in {
        "absent": "is not a run",
        "empty": "is not a run",
        "damaged": "is not a file of TensorBoard events",
        "other.csv": "has none of the metrics",
        "bytes.csv": "must be text in UTF-8",
        "text.csv": "must be a number, got 'large'",
        "runs": f"has 2 logs, such as that in {tmp_path}/runs/1",
    }.items():
        assert status(tmp_path / name) == 2
        assert says in capsys.readouterr().err
    (tmp_path / "progress.csv").write_text("train/approx_kl,train/entropy_loss\n" + "0.005,-0.5\n" * 9)
    assert status(tmp_path, "--recipe", "mine") == 2
    assert "is a log without checkpoints: --checkpoint, --recipe, --trust need one" in capsys.readouterr().err
    assert status(tmp_path, "--html", tmp_path / "page.html") == 0
    says = "<pre>no findings: nothing in the metrics points to a fault; no checkpoint was measured\n</pre>"
    assert says in (tmp_path / "page.html").read_text()
    rows = "".join(f"{i % 2},0.005\n" for i in range(40))
    (tmp_path / "progress.csv").write_text(f"rollout/ep_rew_mean,train/approx_kl\n{rows}")
    assert status(tmp_path) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("no findings, although the return did not rise: nothing in the metrics points to a fault; ")
    monkeypatch.setattr(doctor, "read_run", unittest.mock.Mock(side_effect=KeyboardInterrupt()))
    assert status(tmp_path) == 128 + signal.SIGINT
