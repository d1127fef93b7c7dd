"""The chains, games and handwritten updates of benchmarks run, and are what pages, records and recipes say."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import _tables, _timing, choices, differences, gallery, kuhn, mujoco, rnd, study, update
from benchmarks._protocol import Variant, measure
from ppo_parts import envs
from ppo_parts.recipes import mujoco_ppo, pufferlib_ppo


@pytest.mark.lenient_ranks  # the cards' policies need this
@pytest.mark.parametrize("name", gallery.VARIANTS)
def test_every_variant_of_the_gallery_is_traced(name):
    """`Train` traces a step of each variant; a step has to accept the state that the previous one returned."""
    train = gallery.make_train(gallery.VARIANTS[name]())
    begun = jax.eval_shape(train.init, jax.random.key(0))
    assert jax.tree.map(jnp.shape, train.shapes[0]) == jax.tree.map(jnp.shape, begun)


CONFIG = pufferlib_ppo.Config(total_timesteps=64, num_envs=4, num_steps=8, num_minibatches=2, hidden=4, anneal_ent=True)


def program(pipeline=None):
    return str(jax.make_jaxpr(pufferlib_ppo.make_train(CONFIG, pipeline=pipeline))(jax.random.key(0)))


@pytest.mark.lenient_ranks
def test_study_arms_differ_in_the_three_and_all_three_are_the_recipe():
    assert program(study.ARMS["all three (PufferLib)"].make_chain(CONFIG)) == program()
    chains = {name: str(arm.make_chain(CONFIG)) for name, arm in study.ARMS.items()}
    assert ("prioritized_sampler" in chains["plain"], "vtrace" in chains["plain"]) == (False, False)
    assert "prioritized_sampler" in chains["priorities"]
    assert "vtrace" in chains["refresh + V-trace"]


def test_kuhn_poker_pays_what_its_exploitability_assumes():
    """Compare every deal and every line of play, step by step, with the recursion of the benchmark."""
    for cards in ((0, 1), (2, 1), (0, 2)):
        for line in ((0, 0), (0, 1, 0), (0, 1, 1), (1, 0), (1, 1)):
            state, seats, total = (jnp.array(cards), jnp.int32(0)), [], 0.0
            table = np.full((3, 4), np.nan)
            for action in line:
                node = int(state[1])
                table[cards[0 if kuhn.FIRST[node] else 1], node] = action
                out = kuhn.step(jax.random.key(0), state, action)
                seats.append(float(out.info["seat"]))
                total, state = total + float(out.reward), out.state
            assert out.terminated
            assert seats == [1.0, -1.0, 1.0][: len(line)]
            assert total == kuhn.play_deal(cards, np.nan_to_num(table), np.nan_to_num(table))


SIZES = {"num_envs": 4, "num_steps": 8, "total_timesteps": 96, "num_minibatches": 2}
EPOCHS = {"cleanrl": {"update_epochs": 2, "hidden": (8, 8)}, "pufferlib": {"update_epochs": 2, "hidden": 8}}
EPOCHS["ippo"] = {"actor_epochs": 2, "critic_epochs": 3, "hidden": 8, "actor_learning_rate": 1e-2}


@pytest.mark.lenient_ranks  # written in a style that broadcasts
@pytest.mark.parametrize("recipe", update.RECIPES)
def test_two_updates_by_hand_are_those_of_the_recipe(recipe):
    """The second update has other learning rates, and another exponent of PufferLib's weights."""
    train, theirs, by_hand = update.make_both(recipe, **SIZES, **EPOCHS[recipe])
    ours, by_hand, learn = train.learner.init(theirs.params), jax.jit(by_hand), jax.jit(train.learner.update)
    for number in range(2):
        key = jax.random.key(number)
        batch, before = _timing.make_rollout(train, key), theirs.params
        ours, metrics = learn(key, ours, batch)
        theirs, same = by_hand(key, theirs, batch)
        assert metrics.keys() == same.keys()
        for name, x in same.items():
            np.testing.assert_allclose(metrics[name], x, rtol=1e-4, atol=1e-5, err_msg=name)
        for x, y, z in zip(*map(jax.tree.leaves, (ours.params, theirs.params, before)), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
            assert np.abs(y - z).max() > 1e-4


PENDULUM = choices.Config(env_id="Pendulum-v1", update_epochs=2, **SIZES | {"hidden": (8,)})


@pytest.mark.lenient_ranks
def test_variants_of_benchmarks_fit_together():
    """`make_train` traces an update. The gallery's variants, which another test traces, are those of the records."""
    assert gallery.VARIANTS.keys() == _tables.read_records("gallery").keys()
    for name in ("none", "time_limit_ignored", "value_normalize", "separate_norms", "adaptive_rate"):
        assert "loss" in differences.VARIANTS[name].make_train(PENDULUM, envs.make("Pendulum-v1")).shapes[1]
    assert "novelty/rnd_reward" in rnd.make_train(rnd.Config(size=4, num_envs=2, rnd=True)).shapes[1]


def test_variants_of_the_mujoco_benchmark_change_one_part(monkeypatch):
    monkeypatch.setattr(mujoco_ppo, "make_train", lambda config, pipeline: pipeline)
    changed = ("refresh_rollout", "refresh_minibatch", "value_clip", "advantage_normalize")
    parts = {name: [*mujoco.VARIANTS[name].make_train(mujoco_ppo.Config()).parts] for name in changed}
    plain = [*mujoco_ppo.make_chain(mujoco_ppo.Config()).parts]
    names = {name: [part.name for part in changed] for name, changed in parts.items()}
    expected = [part.name for part in plain]
    assert names["refresh_rollout"] == names["refresh_minibatch"] == expected
    assert (plain[1].refresh, parts["refresh_rollout"][1].refresh) == ("epoch", "rollout")
    assert parts["refresh_minibatch"][1].refresh == "minibatch"
    assert names["value_clip"] == [*expected[:4], "clipped_value_loss", expected[5]]
    assert names["advantage_normalize"] == [*expected[:2], "advantage_normalize", *expected[2:]]


def test_only_tasks_with_contact_forces_are_told_to_leave_them_out(tmp_path):
    def make_train(config):
        raise RuntimeError(config.env_id)

    given = {"variant": "none", "steps": 1, "seeds": 1, "first_seed": 1, "json": str(tmp_path)}
    for task, settings in {"Ant-v5": ",include_cfrc_ext_in_observation=False", "Hopper-v5": ""}.items():
        with pytest.raises(RuntimeError, match=rf"^gym:{task}{settings}$"):
            measure(Variant(make_train, contact_forces=False), argparse.Namespace(task=task, **given))
