"""`Train`, a whole run as a pure function of a key; and whole episodes with a fixed policy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_parts as pp
from ppo_parts import envs, training
from ppo_parts._base.batching import sequential_vmap_on_cpu
from ppo_parts.recipes import cleanrl_ppo
from tests.common import assert_same
from tests.envs.common import clock, uniform
from tests.runs import UPDATES, checkpoint, evaluations, rows, scalars, tiny


def test_train_is_a_pure_function_of_its_key_and_of_numbers_in_the_configuration(train, whole):
    """Map one program over keys and hyperparameters; with the run's own, it does what the host loop did."""
    config = tiny()

    def swept(key, learning_rate, clip_coef, ent_coef):
        changes = {"learning_rate": learning_rate, "clip_coef": clip_coef, "ent_coef": ent_coef}
        return cleanrl_ppo.make_train(dataclasses.replace(config, **changes))(key)

    own = (1, config.learning_rate, config.clip_coef, config.ent_coef)
    columns = zip(own, (2, *own[1:]), (1, 0.02, *own[2:]), (1, *own[1:3], 1.0), (1, 0.02, 0.01, own[3]), strict=True)
    keys, *numbers = (jnp.array(column) for column in columns)
    result = jax.jit(jax.vmap(swept))(jax.vmap(jax.random.key)(keys), *numbers)
    metrics = {name: np.asarray(x) for name, x in result.metrics.items()}
    assert set(metrics) >= {"episode_return", "episode_length", "episodes", "loss", "approx_kl", "minibatches"}
    assert {x.shape for x in metrics.values()} == {(5, UPDATES)}
    assert result.state.learner.step.tolist() == [UPDATES] * 5
    for row in rows(whole[0]):
        for name in train.shapes[1]:
            expected = np.nan if row[name] is None else row[name]
            np.testing.assert_allclose(metrics[name][0, row["update"]], expected, rtol=1e-3, atol=1e-5, err_msg=name)
    ratio_differs = 2  # number of updates before the effect of the first minibatch shows
    for other in range(1, 5):
        assert np.abs(metrics["loss"][other, ratio_differs:] - metrics["loss"][0, ratio_differs:]).max() > 1e-4, other
    assert np.abs(metrics["clip_fraction"][4] - metrics["clip_fraction"][2]).max() > 0.1
    alone = jax.eval_shape(jax.jit(train), jax.random.key(0))
    assert jax.tree.structure(alone.state) == jax.tree.structure(result.state)
    of_traced = {"clipped_surrogate/clip_eps", "clipped_value_loss/clip_eps", "entropy_bonus/coef"}
    assert metrics.keys() - alone.metrics.keys() == {f"nonfinite/range/{name}" for name in of_traced}
    assert {x.shape for x in alone.metrics.values()} == {(UPDATES,)}


def test_updates_of_many_seeds_take_turns_on_a_cpu(monkeypatch):
    """They also do so if the function holds something that vmap maps over."""
    x, factor = jnp.arange(6.0).reshape(2, 3), jnp.array([2.0, 3.0])
    for backend, shape in (("cpu", "3"), ("gpu", "2,3")):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        scaled = jax.vmap(lambda x, factor: sequential_vmap_on_cpu(lambda x: (factor * jnp.sin(x), x))(x))
        found = jax.jit(scaled)(x, factor)
        np.testing.assert_allclose(found[0], factor[:, None] * jnp.sin(x), rtol=1e-6)
        np.testing.assert_array_equal(found[1], x)
        assert f"f32[{shape}] = sin" in str(jax.make_jaxpr(scaled)(x, factor))


def test_train_takes_one_key_and_traces_one_update_when_it_is_made(monkeypatch, train):
    """It does not trace a whole run. Neither compiling the update later nor making a run in a sweep traces it again."""
    traced, step = [], training.Train.step
    monkeypatch.setattr(training.Train, "step", lambda self, state: traced.append(1) or step(self, state))
    train = cleanrl_ppo.make_train(tiny(updates=100_000))
    jax.eval_shape(train.jitted_step, train.shapes[0])
    assert traced == [1]
    assert train.shapes[1]["loss"].shape == ()
    jax.eval_shape(lambda key: cleanrl_ppo.make_train(tiny())(key), jax.random.key(0))
    assert traced == [1, 1]
    for keys, says in ((0, r"got 0"), (jax.random.split(jax.random.key(0)), r"got keys of shape \(2,\)")):
        with pytest.raises(TypeError, match=rf"train: key must be one key, such as jax\.random\.key\(0\), {says}"):
            train(keys)


@pytest.mark.parametrize("kind", ["terminated", "truncated"])
def test_evaluate_plays_the_whole_first_episode_of_each_environment(kind):
    played = training.evaluate_episodes(clock(7, kind), uniform, 1.0, jax.random.key(0), 4)
    assert played.episode_return.tolist() == [21.0] * 4  # 0 + 1 + ... + 6
    assert played.episode_length.tolist() == [7] * 4
    assert played.terminated.tolist() == [kind == "terminated"] * 4
    assert played.truncated.tolist() == [kind == "truncated"] * 4
    cut = training.evaluate_episodes(clock(7, kind), uniform, 1.0, jax.random.key(0), 4, max_steps=5)
    assert cut.episode_length.tolist() == [5] * 4
    assert not (cut.terminated | cut.truncated).any()
    # Environment n ends after n + 2 steps, so the short ones would have had more episodes.
    env = clock(jnp.arange(4) + 2, kind)
    played = training.evaluate_episodes(env, uniform, 1.0, jax.random.key(0), 4, max_steps=7)
    assert played.episode_length.tolist() == [2, 3, 4, 5]
    assert played.episode_return.tolist() == [1, 3, 6, 10]
    assert getattr(played, kind).all()
    with pytest.raises(TypeError, match=r"evaluate_episodes: None is not an environment: make one with envs\.make"):
        training.evaluate_episodes(None, uniform, 1.0, jax.random.key(0), 4)
    with pytest.raises(TypeError, match=r"evaluate_episodes: .* got a LearnerState: pass its \.params"):
        training.evaluate_episodes(env, uniform, pp.LearnerState(1.0, (), (), 0), jax.random.key(0), 4)
    with pytest.raises(ValueError, match=r"begin anew with its running statistics: give the one that env\.eval"):
        training.evaluate_episodes(envs.normalize_observation(env), uniform, 1.0, jax.random.key(0), 4)


def test_evaluate_changes_nothing_and_adds_metrics(evaluated, whole):
    folder, result = evaluated
    found = evaluations(folder)
    assert list(found) == [5, 10, 12]
    assert len({tuple(metrics.values()) for metrics in found.values()}) == 3
    assert_same(checkpoint(folder, 12), checkpoint(whole[0], 12))
    for mine, alone in zip(rows(folder), rows(whole[0]), strict=True):
        assert {k: x for k, x in mine.items() if not k.startswith("evaluation/")} == alone
    final = {name: result["evaluation"][name] for name in ("terminated", "truncated", "episode_length")}
    final["episode_return"] = result["evaluation"]["episode_return"]["mean"]
    assert {f"evaluation/{name}": x for name, x in final.items()} == found[12]
    assert final["terminated"] + final["truncated"] == 5
    seen = scalars(folder)
    for name in found[12]:
        assert seen[name] == pytest.approx({16 * update: metrics[name] for update, metrics in found.items()}), name


def test_a_custom_rollout_may_return_metrics_as_a_dict(train):
    def collect(*given):
        state, batch, metrics = train.rollout.collect(*given)
        return state, batch, {**metrics, "own": jnp.float32(3)}

    own = dataclasses.replace(train, rollout=train.rollout._replace(collect=collect))
    assert own.shapes[1].keys() == train.shapes[1].keys() | {"own"}
