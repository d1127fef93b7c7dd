"""Several choices at once: the policy, a recipe and the export."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_parts as pp
from ppo_parts import distributions, envs, networks
from ppo_parts.commands import export
from ppo_parts.recipes import cleanrl_ppo

SPACE = envs.MultiDiscrete((2, 3))


def test_a_head_is_divided_among_the_choices():
    head = jax.random.normal(jax.random.key(0), (4, 5))
    available = jnp.array([[True, False, False, True, True]] * 4)
    assert networks.action_size(SPACE) == 5
    policy = networks.action_distribution(SPACE, head, available=available)
    masked = distributions.mask_logits(head, available)
    expected = distributions.MultiCategorical([masked[:, :2], masked[:, 2:]])
    action = jnp.array([[0, 2]] * 4)
    np.testing.assert_allclose(policy.log_prob(action), expected.log_prob(action), rtol=1e-6)
    np.testing.assert_array_equal(policy.mode()[:, 0], 0)
    np.testing.assert_allclose(policy.logits[:, 2:], expected.parts[1].logits, rtol=1e-6)
    with pytest.raises(pp.errors.ShapeError, match=r"sum\(nvec\) = 6 entries for nvec=\(2, 4\), got shape \(4, 5\)"):
        distributions.MultiCategorical(head, nvec=(2, 4))


def test_a_recipe_trains_several_choices_and_exported_logits_are_those_of_all():
    step = lambda key, x, action: envs.Step(x, x, reward=jnp.sum(action) * 1.0, terminated=False)  # noqa: E731
    env = envs.auto_reset(lambda key: (jnp.zeros(6),) * 2, step, envs.Box((6,)), SPACE, time_limit=5)
    config = cleanrl_ppo.Config(total_timesteps=128, num_envs=2, num_steps=32, hidden=(16,))
    train = cleanrl_ppo.make_train(config, env=env)
    state = jax.jit(train.init)(jax.random.key(0))
    trained = jax.eval_shape(train, jax.random.key(0)).state
    assert jax.tree.map(jnp.shape, trained) == jax.tree.map(jnp.shape, state)
    model = export.to_onnx(train, state)
    assert [output.name for output in model.graph.output] == ["action", "logits"]
    assert export.largest_difference(model, train, state, 100) < 1e-6
