"""Whole episodes with a fixed policy, at the end and while training."""

import jax
import jax.numpy as jnp
import pytest

from ppo_parts import training
from tests.common import Categorical, assert_same
from tests.envs.test_rollout import clock
from tests.runs import checkpoint, evaluations, rows, scalars


def coin(params, batch):
    return Categorical(jnp.zeros((*batch.obs.shape[:-1], 2)) + params), batch.obs[..., 0]


@pytest.mark.parametrize("kind", ["terminated", "truncated"])
def test_evaluate_plays_the_whole_first_episode_of_each_environment(kind):
    played = training.evaluate_episodes(clock(7, kind), coin, jnp.zeros(2), jax.random.key(0), 4)
    assert played.episode_return.tolist() == [21.0] * 4  # 0 + 1 + ... + 6
    assert played.episode_length.tolist() == [7] * 4
    assert played.terminated.tolist() == [kind == "terminated"] * 4
    assert played.truncated.tolist() == [kind == "truncated"] * 4
    cut = training.evaluate_episodes(clock(7, kind), coin, jnp.zeros(2), jax.random.key(0), 4, max_steps=5)
    assert cut.episode_length.tolist() == [5] * 4
    assert not (cut.terminated | cut.truncated).any()
    # Environment n ends after n + 2 steps; the short ones would have had more episodes.
    env = clock(jnp.arange(4) + 2, kind)
    played = training.evaluate_episodes(env, coin, jnp.zeros(2), jax.random.key(0), 4, max_steps=7)
    assert played.episode_length.tolist() == [2, 3, 4, 5]
    assert played.episode_return.tolist() == [1, 3, 6, 10]
    assert getattr(played, kind).all()
    with pytest.raises(TypeError, match=r"evaluate_episodes: None is not an environment: make one with envs\.make"):
        training.evaluate_episodes(None, coin, jnp.zeros(2), jax.random.key(0), 4)


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
