"""The actor that collects one rollout ahead of the learner, compared with the same program written as a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import mujoco
from ppo_parts import envs, training
from ppo_parts.recipes import async_ppo, mujoco_ppo
from tests.commands import recipe


def test_the_actor_plays_with_the_policy_from_before_the_update(tmp_path):
    config = recipe.Config(total_timesteps=64)
    train = recipe.make_train(config)
    options = training.RunOptions(directory=tmp_path, name="run", tensorboard=False, progress=False)
    training.run(train, config, options, make_program=async_ppo.OneAhead)
    ended = training.load(tmp_path / "run", recipe.make_train).state

    state = train.compiled_init(jax.random.key(config.seed))
    collect, learn = jax.jit(train.collect), jax.jit(train.learn)
    collected = collect(state)
    for _ in range(train.num_updates):
        later = training.TrainState(jax.random.split(state.key, 3)[0], state.learner, collected[0])
        state, _ = learn(state, collected)
        collected = collect(later)
    jax.tree.map(np.testing.assert_array_equal, ended.learner.params, state.learner.params)


@pytest.mark.lenient_ranks  # gymnax
def test_vtrace_corrects_a_lagging_actor():
    """On a rollout of its own policy the update is that of the recipe without a lag; on an older one it is not."""
    config = async_ppo.Config(
        total_timesteps=64, num_envs=2, num_steps=8, num_minibatches=2, update_epochs=1, hidden=(8,)
    )
    train, plain = (one.make_train(config, envs.make("CartPole-v1")) for one in (async_ppo, mujoco_ppo))
    state = train.compiled_init(jax.random.key(0))
    own = jax.jit(train.collect)(state)
    update = [jax.jit(one.learner.update) for one in (train, plain)]
    first = [one(state.key, state.learner, own[1])[1]["policy_loss"] for one in update]
    np.testing.assert_allclose(first[0], first[1], rtol=1e-3, atol=1e-5)
    older = own[1].replace(log_prob=own[1].log_prob + 1.0)  # as if the actor had found its actions more likely
    losses = [one(state.key, state.learner, older)[1]["policy_loss"] for one in update]
    assert abs(float(losses[0] - losses[1])) > 1e-3
    assert bool(jnp.isfinite(losses[0]))


def test_variants_of_the_mujoco_benchmark_change_one_part(monkeypatch):
    monkeypatch.setattr(mujoco_ppo, "make_train", lambda config, pipeline: pipeline)
    parts = {
        name: [*mujoco.VARIANTS[name](mujoco.Config()).parts]
        for name in ("refresh_rollout", "refresh_minibatch", "value_clip", "advantage_normalize")
    }
    plain = [*mujoco_ppo.chain(mujoco.Config()).parts]
    names = {name: [part.name for part in changed] for name, changed in parts.items()}
    expected = [part.name for part in plain]
    assert names["refresh_rollout"] == names["refresh_minibatch"] == expected
    assert (plain[1].refresh, parts["refresh_rollout"][1].refresh) == ("epoch", "rollout")
    assert parts["refresh_minibatch"][1].refresh == "minibatch"
    assert names["value_clip"] == [*expected[:4], "clipped_value_loss", expected[5]]
    assert names["advantage_normalize"] == [*expected[:2], "advantage_normalize", *expected[2:]]
