"""The PufferLib-style recipe: recurrent and plain, from the same learner and rollout."""

import dataclasses

import jax
import numpy as np
import pytest

import ppo_parts as pp
from ppo_parts.recipes import cleanrl_ppo, ippo, pufferlib_ppo
from ppo_parts.recipes.pufferlib_ppo import Config, make_train

pytestmark = pytest.mark.lenient_ranks  # flax adds biases [H] to [T, N, H]
SMALL = Config(total_timesteps=128, num_envs=4, num_steps=16, num_minibatches=2, update_epochs=1, hidden=8)


def test_a_variant_trains():
    """With a memory and every switch turned; the coefficient of the entropy falls linearly."""
    config = dataclasses.replace(
        SMALL, total_timesteps=64 * 3, env_id="MemoryChain-bsuite", memory="lstm", anneal_ent=True, ent_coef=1.0,
        normalize_env=False, activation="gelu", anneal_lr=False, microbatch=None,
    )  # fmt: skip
    metrics = jax.jit(make_train(config))(jax.random.key(0)).metrics
    for name in ("loss", "grad_norm", "entropy", "explained_variance"):
        assert metrics[name].shape == (3,)
        assert np.isfinite(metrics[name]).all()
    assert all(int(np.sum(x)) == 0 for name, x in metrics.items() if name.startswith("nonfinite/"))
    bonus = metrics["policy_loss"] + config.vf_coef * metrics["value_loss"] - metrics["loss"]  # what is left is it
    np.testing.assert_allclose(bonus / metrics["entropy"], [1, 2 / 3, 1 / 3], rtol=1e-3)


@pytest.mark.parametrize("recipe", [cleanrl_ppo, pufferlib_ppo, ippo], ids=lambda recipe: recipe.__name__)
def test_presets_can_be_made(recipe):
    """`make_train` traces the whole run, so what does not fit together would fail."""
    if recipe is ippo:
        pytest.importorskip("jaxmarl")
    for preset in recipe.PRESETS.values():
        train = recipe.make_train(preset)
        assert train.num_updates * train.steps_per_update <= preset.total_timesteps


def test_an_option_of_another_optimizer_is_refused():
    with pytest.raises(pp.errors.UserValueError, match="adam_eps has no effect with the optimizer muon"):
        make_train(Config(adam_eps=0.5))


def test_the_chain_can_be_another():
    pipeline = pp.chain(pp.gae(gamma=0.9, gae_lambda=0.9), pp.segment_minibatches(2), pp.value_loss())
    _, metrics = make_train(SMALL, pipeline=pipeline).shapes
    assert {"value_loss", "policy_loss"} & set(metrics) == {"value_loss"}
