"""The parts of `ppo_parts.recipes.libraries`, which are examples of parts of one's own, obey the laws of every part."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_parts as pp
from ppo_parts.recipes.libraries import parts
from ppo_parts.testing import check_part, example_batch

GAE = pp.gae(gamma=0.9, gae_lambda=0.8)
PARTS = {
    "squared_error": parts.squared_error(0.5, clip_eps=0.2),
    "truncate_at_current_value": parts.truncate_at_current_value(), "ignore_truncations": parts.ignore_truncations(),
    "scale_reward": parts.scale_reward(0.1), "one_more_step": parts.one_more_step(0.9, 0.8),
    "normalized_values": parts.normalized_values(pp.chain(parts.ignore_truncations(), GAE), eps=1e-5),
    "divergence": parts.divergence(), "divergence_since_last_epoch": parts.divergence_since_last_epoch((2, 6, 4, 2)),
    "evaluate_next_obs": parts.evaluate_next_obs(), "clip_prediction": parts.clip_prediction(0.2),
}  # fmt: skip


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


def test_moments_need_a_counted_element():
    before = parts.Moments(*map(jnp.asarray, (2.0, 3.0, 5.0)))
    masked = parts.added(before, jnp.ones((2, 2)), jnp.zeros((2, 2), bool), ddof=1)
    np.testing.assert_array_equal(jax.tree.leaves(masked), jax.tree.leaves(before))
    one = parts.added(before, jnp.array([[8.0, 9.0]]), jnp.array([[True, False]]), ddof=1)  # adds no spread of its own
    np.testing.assert_allclose(jax.tree.leaves(one), [3.0, (3 * 5 + 6**2 * 5 / 6) / 6, 6.0])


@pytest.mark.parametrize("name", ["truncate_at_current_value", "ignore_truncations", "one_more_step"])
def test_a_batch_without_truncations_has_none(name):
    batch = example_batch(after_sampler=name == "one_more_step")
    context = pp.Context(key=jax.random.key(0))
    outs = [
        PARTS[name].update(batch.replace(truncated=truncated), PARTS[name].init(None, None), context)[0]
        for truncated in (None, jnp.zeros_like(batch.value))
    ]
    for field in PARTS[name].provides:
        np.testing.assert_array_equal(*(getattr(out, field) for out in outs))


def test_next_observations_of_a_policy_with_memory_are_refused():
    part, batch = parts.evaluate_next_obs(), example_batch()
    with pytest.raises(pp.errors.UserValueError, match="evaluate_next_obs: the policy has a memory"):
        part.update(batch.replace(carry=jnp.zeros((1, 2))), part.init(None, None), pp.Context(key=jax.random.key(0)))
