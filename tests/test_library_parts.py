"""The parts of `recipes.libraries`, which are examples of parts of one's own, obey the laws of every part."""

import inspect

import jax.numpy as jnp
import pytest

import ppo_parts as pp
from ppo_parts.testing import check_part, example_batch
from recipes.libraries import parts

GAE = pp.gae(gamma=0.9, gae_lambda=0.8)
PARTS = {
    "squared_error": parts.squared_error(0.5, clip_eps=0.2),
    "truncate_at_current_value": parts.truncate_at_current_value(),
    "ignore_truncations": parts.ignore_truncations(),
    "scale_reward": parts.scale_reward(0.1),
    "one_more_step": parts.one_more_step(0.9, 0.8),
    "normalized_values": parts.normalized_values(pp.chain(parts.ignore_truncations(), GAE), eps=1e-5),
    "divergence": parts.divergence(),
    "divergence_since_last_epoch": parts.divergence_since_last_epoch((2, 6, 4, 2)),
    "evaluate_next_obs": parts.evaluate_next_obs(),
    "clip_prediction": parts.clip_prediction(0.2),
}


def continuous(seed=0, dtype=jnp.float32):
    return example_batch(seed, dtype, after_sampler=True, continuous=True).replace(current=None)


@pytest.mark.parametrize("name", PARTS)
def test_part_obeys_the_laws(name):
    gaussian = name == "divergence_since_last_epoch"
    check_part(PARTS[name], batch=continuous if gaussian else None)


def test_every_part_is_checked():
    made = {
        name
        for name, f in vars(parts).items()
        if inspect.isfunction(f) and f.__annotations__.get("return") == "pp.Part"
    }
    assert made == set(PARTS)
