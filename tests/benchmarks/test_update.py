"""Updates written by hand are those of the recipes: they end with the same parameters, and report the same metrics."""

import jax
import numpy as np
import pytest

from benchmarks import update

SIZES = {"num_envs": 4, "num_steps": 8, "total_timesteps": 96, "num_minibatches": 2}
EPOCHS = {"cleanrl": {"update_epochs": 2, "hidden": (8, 8)}, "pufferlib": {"update_epochs": 2, "hidden": 8}}
EPOCHS["ippo"] = {"actor_epochs": 2, "critic_epochs": 3, "hidden": 8, "actor_learning_rate": 1e-2}


@pytest.mark.lenient_ranks  # written in a style that broadcasts
@pytest.mark.parametrize("recipe", update.RECIPES)
def test_two_updates_by_hand_are_those_of_the_recipe(recipe):
    """The second one has other learning rates, and another exponent of PufferLib's weights."""
    train, theirs, by_hand = update.both(recipe, **SIZES, **EPOCHS[recipe])
    ours, by_hand, learn = train.learner.init(theirs.params), jax.jit(by_hand), jax.jit(train.learner.update)
    for number in range(2):
        key = jax.random.key(number)
        batch, before = update.rollout(train, key), theirs.params
        ours, metrics = learn(key, ours, batch)
        theirs, same = by_hand(key, theirs, batch)
        assert metrics.keys() == same.keys()
        for name, x in same.items():
            np.testing.assert_allclose(metrics[name], x, rtol=1e-4, atol=1e-5, err_msg=name)
        for x, y, z in zip(*map(jax.tree.leaves, (ours.params, theirs.params, before)), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
            assert np.abs(y - z).max() > 1e-4
