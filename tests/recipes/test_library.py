"""The recipe with other libraries' updates: presets, errors, and what a run records.

Its parts are examples of custom parts, and obey the laws of every part.
"""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from ppo_parts import envs, training
from ppo_parts.recipes import libraries, library_ppo, mujoco_ppo
from ppo_parts.recipes.libraries import parts
from ppo_parts.testing import check_part, example_batch
from ppo_parts.training import _train
from tests.common import assert_close, evaluate_gaussian, refused

TINY = {"env_id": "Pendulum-v1", "num_envs": 4, "num_steps": 8, "num_minibatches": 2, "hidden": (8,)}


def tiny(preset, **changes):
    return dataclasses.replace(library_ppo.PRESETS[preset], **{**TINY, "total_timesteps": 64, **changes})


@pytest.mark.parametrize("preset", library_ppo.PRESETS)
def test_hyperparameters_of_presets_reach_the_libraries(preset, monkeypatch):
    config = library_ppo.PRESETS[preset]
    training.check_config(config)
    update = getattr(libraries, config.library)
    parameters = inspect.signature(update).parameters
    monkeypatch.setattr(libraries, config.library, functools.wraps(update)(lambda **given: given))
    given = library_ppo.make_update(config, envs.make("Pendulum-v1"))
    fields = {"num_epochs": "update_epochs", "clip_eps": "clip_coef"}
    fields |= {"value_coef": "vf_coef", "entropy_coef": "ent_coef"}
    assert {*fields, "gamma", "gae_lambda"} <= given.keys() <= parameters.keys()
    for name in given.keys() - {"num_actions"}:
        assert given[name] == getattr(config, fields.get(name, name)), name
        assert preset != config.library or parameters[name].default in (inspect.Parameter.empty, given[name]), name


@pytest.mark.parametrize("preset", ["rl_games", "skrl", "stable_baselines3", "tianshou"])
def test_presets_that_no_other_test_trains_make_a_run(preset):
    _, metrics = library_ppo.make_train(tiny(preset)).shapes  # traced when it is made
    assert {"policy_loss", "value_loss", "entropy", "approx_kl", "learning_rate"} <= set(metrics)


def test_rates_that_follow_the_divergence_are_recorded_one_for_each_phase():
    """rsl_rl's rate is in the optimizer's state, and its divergence needs the distribution that acted."""
    config = tiny("rsl_rl", update_epochs=1, learning_rate=1e-4)
    result = jax.jit(library_ppo.make_train(config))(jax.random.key(0))
    rate = np.asarray(result.metrics["learning_rate"])
    ratios = np.log(rate / config.learning_rate) / np.log(1.5)
    assert rate[0] == np.float32(config.learning_rate)  # it is the rate at the beginning of the update
    assert rate[1] != rate[0]
    np.testing.assert_allclose(ratios, np.round(ratios), atol=1e-4)
    assert set(result.state.learner.params) == {"policy", "value"}
    scheduled = optax.inject_hyperparams(optax.adam)(learning_rate=pp.linear_schedule(0.1, 0.0, 10))
    states = {"actor": scheduled.init({}), "critic": optax.adam(1e-3).init({})}  # or the links of optax.named_chain
    of_phases, of_one = (pp.LearnerState({}, states, ((), pipeline), 0) for pipeline in ({}, ()))
    assert _train._find_rates(of_phases, names=()).names == ("actor/learning_rate",)
    assert _train._find_rates(of_one, names=()).names == ("learning_rate",)
    assert _train._find_rates(of_one, names=("learning_rate",)).names == ()


def test_rl_games_configuration_of_humanoid():
    """This is rl_games' `configs/mujoco/humanoid_envpool.yaml` in small: one trunk, and a rate adapted each epoch."""
    config = tiny("humanoid", update_epochs=3, target_kl=1e9, reward_scale=1e6)
    result = jax.jit(library_ppo.make_train(config))(jax.random.key(0))
    learner, metrics = result.state.learner, result.metrics
    assert set(learner.params["params"]) == {"Dense_0", "Dense_1", "Dense_2", "log_std"}
    np.testing.assert_allclose(metrics["learning_rate"][1] / config.learning_rate, 1.5**3, rtol=1e-5)
    assert np.all(metrics["bounds_loss"] > 0)  # although no mean is larger than 1.1
    assert optax.tree_utils.tree_get(learner, "mean") < -1e5  # the running mean of targets


def test_gsde_keeps_a_noise_matrix_for_some_steps_of_a_preset():
    """The same matrix theta explains the noise of every step in which it was held, and of no other step."""
    run, key, held = library_ppo.make_train(tiny("rsl_rl", noise_steps=3)), jax.random.key(1), 3
    params = jax.jit(run.policy.init)(jax.random.key(0))
    assert params["policy"]["log_std"].shape == (8, 1)
    assert [sorted(params[name]) for name in params] == [["Dense_0", "Dense_1", "log_std"], ["Dense_2", "Dense_3"]]
    _, batch, _ = jax.jit(run.rollout.collect)(key, params, run.rollout.init(jax.random.key(2)))
    for step, begin in enumerate(np.arange(8) // held * held):
        theta = batch.behavior.std[step] * jax.random.normal(jax.random.split(key, (8, 2))[begin, 0], (4, 8, 1))
        noise = jnp.einsum("nl,nld->nd", batch.behavior.features[step], theta)
        np.testing.assert_allclose(batch.action[step], batch.behavior.loc[step] + noise, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(batch.log_prob, batch.behavior.log_prob(batch.action), rtol=1e-4, atol=1e-5)


def test_segments_of_brax_that_are_shorter_than_the_rollout():
    """Segments of half the rollout's length are those of two rollouts."""
    params = {"policy": 0.1 * jnp.ones((3, 1)), "value": 0.1 * jnp.ones(3)}
    env = envs.make("Pendulum-v1", max_steps_in_episode=3)
    rollout = pp.rollout(env, evaluate_gaussian, num_envs=4, num_steps=8, keep_next_obs=True)
    _, batch, _ = jax.jit(rollout.collect)(jax.random.key(0), params, rollout.init(jax.random.key(1)))
    halves = jax.tree.map(lambda x: jnp.concatenate([x[:4], x[4:]], axis=1), batch)
    after = []
    for given, length in ((batch, 4), (halves, None), (batch, None)):
        chain, optimizer = libraries.brax(num_minibatches=1, num_epochs=1, entropy_coef=0.0, segment_length=length)
        learner = pp.learner(evaluate_gaussian, chain, optimizer)
        state, _ = jax.jit(learner.update)(jax.random.key(2), learner.init(params), given)
        after.append(optax.tree_utils.tree_get(state.opt_state, "mu"))  # this is a tenth of the gradient
    assert_close(after[0], after[1], 1e-5, 0)
    assert np.all(np.abs(after[0]["value"] / after[2]["value"] - 1) > 1e-3)


test_options_that_a_library_does_not_have_are_refused = refused(
    (tiny("tianshou", target_kl=0.1), r"target_kl must be None, because tianshou has no such option, got 0\.1"),
    (tiny("skrl", reward_scale=2.0), r"reward_scale must be 1\.0, because skrl has no such option, got 2\.0"),
    (tiny("rsl_rl", shared=True), "shared must be False, because rsl_rl clips the gradients of two networks"),
    (tiny("rl_games", env_id="CartPole-v1"), r"the actions of CartPole-v1 are Discrete\(2"),
    (tiny("rl_games", squash=True), "squash must be False, because rl_games measures"),
    (tiny("rl_games", target_kl=None, adapt_each_epoch=True), "adapt_each_epoch must be False without target_kl"),
    (tiny("rl_games", soft_bound=0.5), r"soft_bound must be 1\.1 with bounds_coef=0, got 0\.5"),
    (tiny("brax", segment_length=5), "segment_length must divide the 8 steps of a rollout, got 5"),
    (tiny("rl_games", num_minibatches=3), "num_minibatches must divide the 4 environments, got 3"),
    (tiny("skrl", env_id="CartPole-v1", noise_steps=4), "noise_steps must be None, because gSDE is for cont"),
    (lambda: parts.clip_each_network(1.0).update({"params": 1.0}, ()), r"an entry for each network.*got \['params'\]"),
    (lambda: library_ppo.make_train(tiny("rsl_rl"), None, libraries.rsl_rl()), "expected parts, got a tuple of them"),
    by=library_ppo.make_train,
)


def test_a_library_takes_the_hyperparameters_of_another_and_a_chain_of_your_own():
    library_ppo.make_train(tiny("stable_baselines3", library="skrl"))
    library_ppo.make_train(tiny("brax", env_id="tasks:golf"))  # its actions are matrices
    own = pp.chain(pp.gae(gamma=0.9, gae_lambda=0.9), pp.full_batch(), pp.value_loss())
    config = tiny("rl_games", env_id="CartPole-v1", target_kl=None)
    assert "policy_loss" not in library_ppo.make_train(config, pipeline=own).shapes[1]


def test_the_gradient_need_not_be_clipped():
    params = {"policy": jnp.ones(2), "value": jnp.ones(2)}
    metrics = {"kl": jnp.ones(()), "approx_kl": jnp.ones(())}
    for preset in library_ppo.PRESETS:
        _, optimizer = library_ppo.make_update(tiny(preset, max_grad_norm=None), envs.make("Pendulum-v1"))
        moments = []
        for scale in (1.0, 100.0):
            updates = jax.tree.map(lambda x, scale=scale: scale * x, params)
            _, state = optimizer.update(updates, optimizer.init(params), params, metrics=metrics, step=0)
            moments.append(optax.tree_utils.tree_get(state, "mu")["policy"])
        np.testing.assert_allclose(moments[1], 100 * moments[0], rtol=1e-5, err_msg=preset)


def test_the_target_of_the_divergence_may_be_traced():
    """A sweep over the target makes the run inside `vmap`."""

    def rates(target_kl):
        return library_ppo.make_train(tiny("rsl_rl", target_kl=target_kl))(jax.random.key(0)).metrics["learning_rate"]

    assert jax.eval_shape(jax.vmap(rates), jnp.array([1e-4, 1e-1])).shape == (2, 2)


def test_a_run_keeps_what_the_chain_requires():
    """The fields that a rollout writes on demand are kept if, and only if, a part of the chain requires them."""
    config = mujoco_ppo.Config(total_timesteps=64, **{**TINY, "env_id": "Pendulum-v1"})
    env = envs.prepare(envs.make("Pendulum-v1"))
    fields = {"next_obs": pp.regularizers.smoothness_loss(), "behavior": pp.kl_penalty(coef=1.0, estimator="analytic")}
    for field, part in fields.items():
        train = mujoco_ppo.make_train(config, env, pp.chain(mujoco_ppo.make_chain(config), part))
        _, batch, _ = jax.eval_shape(train.collect, train.shapes[0])
        assert [name for name in fields if getattr(batch, name) is not None] == [field]


GAE = pp.gae(gamma=0.9, gae_lambda=0.8)
PARTS = {
    "squared_error": parts.squared_error(0.5, clip_eps=0.2),
    "truncate_at_current_value": parts.truncate_at_current_value(), "ignore_truncations": parts.ignore_truncations(),
    "scale_reward": parts.scale_reward(0.1), "one_more_step": parts.one_more_step(0.9, 0.8),
    "normalized_values": parts.normalized_values(GAE, eps=1e-5),
    "divergence": parts.divergence(), "divergence_since_last_epoch": parts.divergence_since_last_epoch((2, 6, 4, 2)),
    "evaluate_next_obs": parts.evaluate_next_obs(), "clip_prediction": parts.clip_prediction(0.2),
}  # fmt: skip


def continuous(seed=0, dtype=jnp.float32):
    return example_batch(seed, dtype, after_sampler=True, continuous=True).replace(current=None)


def test_every_part_obeys_the_laws():
    for name, part in PARTS.items():
        check_part(part, batch=continuous if name == "divergence_since_last_epoch" else None)
    functions = {name: f.__annotations__ for name, f in vars(parts).items() if inspect.isfunction(f)}
    assert {name for name, hints in functions.items() if hints.get("return") == "pp.Part"} == set(PARTS)


def test_moments_need_a_counted_element_and_next_values_a_policy_without_memory():
    before = parts.Moments(*map(jnp.asarray, (2.0, 3.0, 5.0)))
    masked = parts.append_sample(before, jnp.ones((2, 2)), jnp.zeros((2, 2), bool), ddof=1)
    np.testing.assert_array_equal(jax.tree.leaves(masked), jax.tree.leaves(before))
    one = parts.append_sample(before, jnp.array([[8.0, 9.0]]), jnp.array([[True, False]]), ddof=1)  # it has no spread
    np.testing.assert_allclose(jax.tree.leaves(one), [3.0, (3 * 5 + 6**2 * 5 / 6) / 6, 6.0])
    part, batch = parts.evaluate_next_obs(), example_batch()
    with pytest.raises(pp.errors.UserValueError, match="evaluate_next_obs: the policy has a memory"):
        part.update(batch.replace(carry=jnp.zeros((1, 2))), part.init(None, None), pp.Context(key=jax.random.key(0)))


@pytest.mark.parametrize("name", ["truncate_at_current_value", "ignore_truncations", "one_more_step"])
def test_a_batch_without_truncations_has_none(name):
    batch = example_batch(after_sampler=name == "one_more_step")
    context = pp.Context(key=jax.random.key(0))
    batches = [batch.replace(truncated=x) for x in (None, jnp.zeros_like(batch.value))]
    outs = [PARTS[name].update(each, PARTS[name].init(None, None), context)[0] for each in batches]
    for field in PARTS[name].provides:
        np.testing.assert_array_equal(*(getattr(out, field) for out in outs))
