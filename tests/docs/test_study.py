"""The study's arms are PufferLib's recipe with other chains."""

import jax
import pytest

from benchmarks import study
from ppo_parts.recipes import pufferlib_ppo

pytestmark = pytest.mark.lenient_ranks
CONFIG = pufferlib_ppo.Config(total_timesteps=64, num_envs=4, num_steps=8, num_minibatches=2, hidden=4, anneal_ent=True)


def program(pipeline=None):
    return str(jax.make_jaxpr(pufferlib_ppo.make_train(CONFIG, pipeline=pipeline))(jax.random.key(0)))


def test_study_arm_with_all_three_is_the_recipe():
    assert program(study.ARMS["all three (PufferLib)"].chain(CONFIG)) == program()


def test_study_arms_differ_in_the_three():
    chains = {name: str(arm.chain(CONFIG)) for name, arm in study.ARMS.items()}
    assert ("prioritized_sampler" in chains["plain"], "vtrace" in chains["plain"]) == (False, False)
    assert "prioritized_sampler" in chains["priorities"]
    assert "vtrace" in chains["refresh + V-trace"]
    shapes = jax.eval_shape(
        pufferlib_ppo.make_train(CONFIG, pipeline=study.ARMS["plain"].chain(CONFIG)), jax.random.key(0)
    )
    assert {"loss", "early_stopped"} & set(shapes.metrics) == {"loss"}
