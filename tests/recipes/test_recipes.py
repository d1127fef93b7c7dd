"""The recipes of CleanRL and PufferLib: configurations, networks, switches, and the environments that they accept.

The actor that collects one rollout ahead of the learner is compared with the same program, written as a loop.
"""

import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_parts as pp
from ppo_parts import envs, networks, training
from ppo_parts.recipes import async_ppo, cleanrl_ppo, ippo, mujoco_ppo, pufferlib_ppo, trpo
from ppo_parts.recipes.cleanrl_ppo import PRESETS, Config, make_train
from tests import recipe
from tests.envs.common import echo
from tests.golden_traces import load
from tests.runs import go, tiny

pytestmark = pytest.mark.lenient_ranks  # distrax, gymnax


CHANGED = {  # by the recordings, which are short, and by the sizes of networks, which are not arguments of CleanRL
    "discrete": ("a_default", {"total_timesteps": 500_000, "num_steps": 128}),
    "continuous": ("d_continuous", {"total_timesteps": 1_000_000, "num_envs": 1, "num_steps": 2048,
                                    "num_minibatches": 32, "update_epochs": 10, "normalize_env": True}),
}  # fmt: skip


@pytest.mark.parametrize("preset", CHANGED)
def test_defaults_are_those_of_cleanrl(preset):
    case, changed = CHANGED[preset]
    ours, recorded = dataclasses.asdict(PRESETS[preset]), load(f"cleanrl_pufferlib/cleanrl_{case}")["meta"]
    theirs = {name: x for name, x in json.loads(str(recorded))["args"].items() if name in ours}
    assert len(theirs) == 18
    assert ours.items() >= {**theirs, **changed, "seed": 1, "hidden": (64, 64)}.items()


HALF = envs.Box((2,), -1.0, 0.5)


def test_continuous_actions_reach_the_environment_clipped_or_rescaled():
    """The observation is the action that arrived; evaluations are prepared in the same way."""
    key, given = jax.random.key(0), jnp.array([[9.0, -9.0], [0.25, 0.0]])
    for rescale, low, high, arrived in (
        (False, -1, 0.5, [[0.5, -1.0], [0.25, 0.0]]),
        (True, -1, 1, [[0.5, -1.0], [-0.0625, -0.25]]),
    ):
        prepared = envs.prepare(echo(HALF), rescale=rescale)
        for env in (prepared, prepared.evaluation(())):
            assert (env.action_space.low, env.action_space.high) == (low, high)
            assert env.step(key, (), given)[1].obs.tolist() == arrived
    env = envs.prepare(echo(HALF), normalize=True, gamma=0.99)
    state, _ = env.step(key, env.reset(key, 2)[0], given)
    np.testing.assert_allclose(state.inner.moments.mean, np.mean([[0, 0], [0, 0], [0.5, -1.0], [0.25, 0.0]], axis=0))
    same = jax.random.normal(key, (1000, 2)) / 3
    _, out = envs.rescale_action(echo(envs.Box((2,), -1.0, 1.0))).step(key, (), same)
    np.testing.assert_array_equal(out.obs, jnp.clip(same, -1, 1))
    assert envs.prepare(envs.make("CartPole-v1"), rescale=True).action_space.n == 2


def test_switches_change_the_chain(monkeypatch):
    metrics = jax.jit(make_train(tiny(2, target_kl=0.0, update_epochs=3)))(jax.random.key(0)).metrics
    assert metrics["epochs"].tolist() == [1, 1]  # after the first epoch, any policy has moved
    assert metrics["minibatches"].tolist() == [2, 2]
    assert metrics["early_stopped"].tolist() == [1, 1]

    def made(config, env, policy, pipeline, *_, **__):
        return SimpleNamespace(parts={part.name for part in pipeline.parts})

    monkeypatch.setattr(training.Train, "of", made)
    plain = make_train(tiny(2)).parts
    assert plain ^ make_train(tiny(2, norm_adv=False)).parts == {"advantage_normalize"}
    assert plain ^ make_train(tiny(2, clip_vloss=False)).parts == {"clipped_value_loss", "value_loss"}
    assert plain ^ make_train(tiny(2, target_kl=0.0)).parts == {"kl_early_stop"}


@pytest.mark.slow
def test_it_learns_to_balance():
    result = jax.jit(jax.vmap(make_train(Config(total_timesteps=150_000))))(jax.random.split(jax.random.key(0), 2))
    returns = training.last_episodes_return(result.metrics["episode_return"], result.metrics["episodes"])
    assert float(returns.min()) > 250, returns


TINY = {"total_timesteps": 128, "num_envs": 4, "num_steps": 16, "num_minibatches": 2, "update_epochs": 1}
SMALL = pufferlib_ppo.Config(**TINY, hidden=8)


def test_pufferlib_trains_with_a_memory_and_every_switch_changed():
    """The coefficient of the entropy falls linearly."""
    config = dataclasses.replace(
        SMALL, total_timesteps=64 * 3, env_id="MemoryChain-bsuite", memory="lstm", anneal_ent=True, ent_coef=1.0,
        normalize_env=False, activation="gelu", anneal_lr=False, microbatch=None,
    )  # fmt: skip
    metrics = jax.jit(pufferlib_ppo.make_train(config))(jax.random.key(0)).metrics
    for name in ("loss", "grad_norm", "entropy", "explained_variance"):
        assert metrics[name].shape == (3,)
        assert np.isfinite(metrics[name]).all()
    assert all(int(np.sum(x)) == 0 for name, x in metrics.items() if name.startswith("nonfinite/"))
    bonus = metrics["policy_loss"] + config.vf_coef * metrics["value_loss"] - metrics["loss"]  # the bonus is left
    np.testing.assert_allclose(bonus / metrics["entropy"], [1, 2 / 3, 1 / 3], rtol=1e-3)


@pytest.mark.parametrize("recipe", [cleanrl_ppo, pufferlib_ppo, ippo], ids=lambda recipe: recipe.__name__)
def test_presets_can_be_made(recipe):
    """`make_train` traces an update, so parts that do not fit together would fail."""
    if recipe is ippo:
        pytest.importorskip("jaxmarl")
    for preset in recipe.PRESETS.values():
        train = recipe.make_train(preset)
        assert train.num_updates * train.steps_per_update <= preset.total_timesteps
    if recipe is cleanrl_ppo:  # minibatches keep the time axis for a recurrent policy
        recurrent = networks.actor_critic(train.env, shared=True, memory="gru")
        assert recipe.make_train(dataclasses.replace(preset, num_minibatches=4), policy=recurrent).shapes


def test_a_configuration_is_checked_before_any_part_is_made_and_the_chain_can_be_another():
    with pytest.raises(pp.errors.UserValueError, match=r"^Config: gamma must lie in \[0, 1\], got 2\.0"):
        async_ppo.make_train(async_ppo.Config(gamma=2.0))
    with pytest.raises(pp.errors.UserTypeError, match="config must be an instance of a dataclass, got 3"):
        async_ppo.make_train(3)
    with pytest.raises(pp.errors.UserValueError, match="adam_eps has no effect with the optimizer muon"):
        pufferlib_ppo.make_train(pufferlib_ppo.Config(adam_eps=0.5))
    pipeline = pp.chain(pp.gae(gamma=0.9, gae_lambda=0.9), pp.segment_minibatches(2), pp.value_loss())
    _, metrics = pufferlib_ppo.make_train(SMALL, pipeline=pipeline).shapes
    assert {"value_loss", "policy_loss"} & set(metrics) == {"value_loss"}


def test_the_actor_plays_with_the_policy_from_before_the_update(tmp_path):
    config = recipe.Config(total_timesteps=64)
    train = recipe.make_train(config)
    folder, _ = go(train, tmp_path, "run", config, async_ppo.OneAhead)
    ended = training.load(folder, recipe.make_train).state

    state = train.jitted_init(jax.random.key(config.seed))
    collect, learn = jax.jit(train.collect), jax.jit(train.learn)
    collected = collect(state)
    for _ in range(train.num_updates):
        later = training.TrainState(state.keys[0], state.learner, collected[0])
        state, _ = learn(state, collected)
        collected = collect(later)
    jax.tree.map(np.testing.assert_array_equal, ended.learner.params, state.learner.params)


def test_vtrace_corrects_a_lagging_actor():
    """On a rollout of its own policy, the update is that of the recipe without a lag; on an older one it is not."""
    config = async_ppo.Config(**TINY, hidden=(8,))
    train, plain = (one.make_train(config, envs.make("CartPole-v1")) for one in (async_ppo, mujoco_ppo))
    state = train.jitted_init(jax.random.key(0))
    own = jax.jit(train.collect)(state)
    update = [jax.jit(one.learner.update) for one in (train, plain)]
    first = [one(state.key, state.learner, own[1])[1]["policy_loss"] for one in update]
    np.testing.assert_allclose(first[0], first[1], rtol=1e-3, atol=1e-5)
    older = own[1].replace(log_prob=own[1].log_prob + 1.0)  # as if the actor had considered its actions more likely
    losses = [one(state.key, state.learner, older)[1]["policy_loss"] for one in update]
    assert abs(float(losses[0] - losses[1])) > 1e-3
    assert bool(jnp.isfinite(losses[0]))


def test_trpo_moves_the_actor_as_far_as_the_divergence_allows():
    """The critic, which is trained later, does not move the actor."""
    train = trpo.make_train(trpo.Config(**TINY, env_id="Pendulum-v1", max_kl=0.02))
    state = train.jitted_init(jax.random.key(0))
    _, batch, _ = jax.jit(train.collect)(state)
    updated, metrics = jax.jit(train.learner.update)(state.key, state.learner, batch)
    distribution, value = train.policy.evaluate(updated.params, batch)[:2]
    assert 0.01 < float(jnp.mean(batch.behavior.kl_divergence(distribution))) <= 0.02
    assert float(metrics["critic/approx_kl"]) > 0.005
    assert float(jnp.min(jnp.abs(value - batch.value))) > 0
