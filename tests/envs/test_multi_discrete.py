"""Several choices at once: the space, the policy, the laws, a recipe and the export."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_parts as pp
from ppo_parts import distributions, envs, networks
from ppo_parts.commands import export
from ppo_parts.recipes import cleanrl_ppo

NVEC = (2, 3)
SPACE = envs.MultiDiscrete(NVEC)


def matching(masked=False):
    """Each step, a number is shown, and every choice that equals it, modulo its options, is rewarded by 1."""

    def seen(number):
        obs = jax.nn.one_hot(number, 6)
        if not masked:
            return obs
        return envs.Observation(obs, jnp.concatenate([jnp.arange(n) == number % n for n in NVEC]))

    def reset(key):
        number = jax.random.randint(key, (), 0, 6)
        return number, seen(number)

    def step(key, number, action):
        reward = sum((action[i] == number % n).astype(jnp.float32) for i, n in enumerate(NVEC))
        after, obs = reset(key)
        return envs.Step(after, obs, reward, jnp.zeros((), bool))

    return envs.auto_reset(reset, step, envs.Box((6,)), SPACE, time_limit=5)


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


@pytest.mark.parametrize("masked", [False, True])
def test_an_environment_with_several_choices_follows_the_laws(masked):
    report = envs.check_laws(matching(masked), num_envs=2, num_steps=20)
    assert report.truncated == 8
    assert not masked or report.notes == ()
    if masked:
        with pytest.raises(pp.errors.ShapeError, match=r"available must be boolean of shape \(2, 7\), one for each"):
            envs.check(matching(masked)._replace(action_space=envs.MultiDiscrete((3, 4))))


def test_a_recipe_trains_several_choices_and_exported_logits_are_those_of_all():
    config = cleanrl_ppo.Config(total_timesteps=128, num_envs=2, num_steps=32, hidden=(16,))
    train = cleanrl_ppo.make_train(config, env=matching())
    state = jax.jit(train.init)(jax.random.key(0))
    trained = jax.eval_shape(train, jax.random.key(0)).state
    assert jax.tree.map(jnp.shape, trained) == jax.tree.map(jnp.shape, state)
    model = export.to_onnx(train, state)
    assert [output.name for output in model.graph.output] == ["action", "logits"]
    assert export.largest_difference(model, train, state, 100) < 1e-6
