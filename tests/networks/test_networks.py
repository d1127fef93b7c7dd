"""What the package adds to network libraries."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppo_parts import networks
from ppo_parts.recipes import pufferlib_ppo

KEYS = jax.random.split(jax.random.key(0), 3)


def ranks_of_factorised(function):
    """The rank of what each LAPACK call of the vmapped function works on: 2 is a matrix, 3 a batch of them."""
    text = jax.jit(jax.vmap(function)).lower(KEYS).as_text()
    return {len(shape.split("x")) - 1 for shape in re.findall(r"@lapack_\w+\(.* : \(tensor<((?:\d+x)*)", text)}


@pytest.mark.parametrize(("shape", "outputs"), [((5,), 2), ((3, 7, 40), 2), ((7, 40), 50)])
def test_it_is_a_dense_layer(shape, outputs):
    x = jax.random.normal(jax.random.key(0), shape)
    plain, ours = nn.Dense(outputs), nn.Dense(outputs, dot_general=networks.dense_dot_general)
    params = plain.init(jax.random.key(1), x)

    def loss(layer, params, x):
        return jnp.sum(jnp.sin(layer.apply(params, x)))

    result, expected = (
        jax.jit(jax.value_and_grad(functools.partial(loss, layer), argnums=(0, 1)))(params, x)
        for layer in (ours, plain)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), result, expected)


def test_layers_can_be_stacked():
    x, kernels = jnp.ones((3, 7, 5)), jax.random.normal(jax.random.key(1), (3, 5, 2))
    contract = (((1,), (0,)), ((), ()))

    def total(kernels):
        return jnp.sum(jax.vmap(lambda x, k: networks.dense_dot_general(x, k, contract))(x, kernels) ** 2)

    gradient = jax.jit(jax.grad(total))(kernels)
    np.testing.assert_allclose(gradient, jax.grad(lambda k: jnp.sum((x @ k) ** 2))(kernels), rtol=1e-5)


def test_what_it_cannot_do_is_refused():
    x, kernel = jnp.ones((3, 5)), jnp.ones((5, 2))
    with pytest.raises(ValueError, match="only"):
        networks.dense_dot_general(x.T, kernel, (((0,), (0,)), ((), ())))
    with pytest.raises(ValueError, match="precision"):
        networks.dense_dot_general(x, kernel, (((1,), (0,)), ((), ())), precision="highest")


@pytest.mark.parametrize(("shape", "axis"), [((6, 6), -1), ((5, 3), 0), ((2, 2, 3, 4), -1)])
def test_orthogonal_has_the_numbers_of_jax(shape, axis):
    ours, theirs = (f(2**0.5, axis) for f in (networks.orthogonal, jax.nn.initializers.orthogonal))
    np.testing.assert_array_equal(ours(KEYS[0], shape, jnp.float32), theirs(KEYS[0], shape, jnp.float32))
    gains = jnp.array([0.01, 1.0, 2.0])  # of vmapped networks
    made = jax.jit(jax.vmap(lambda key, gain: networks.orthogonal(gain, axis)(key, shape)))(KEYS, gains)
    expected = [gain / 2**0.5 * theirs(key, shape) for key, gain in zip(KEYS, gains, strict=True)]
    np.testing.assert_allclose(made, jnp.stack(expected), atol=1e-6)


def test_orthogonal_computes_narrow_types_in_float32():
    narrow = networks.orthogonal(dtype=jnp.bfloat16)
    np.testing.assert_array_equal(
        narrow(KEYS[0], (4, 4)), networks.orthogonal()(KEYS[0], (4, 4)).astype(jnp.bfloat16), strict=True
    )
    assert jax.eval_shape(lambda key: narrow(key, (4, 2), jnp.float16), KEYS[0]).dtype == jnp.float16


def test_training_factorises_one_matrix_at_a_time_with_any_initialiser(monkeypatch):
    """A batch of them can block every thread of a CPU; see docs/decisions/0004-batched-lapack.md."""
    sizes = {"total_timesteps": 16, "num_envs": 2, "num_steps": 8, "num_minibatches": 2, "hidden": 8, "memory": "lstm"}
    train = pufferlib_ppo.make_train(pufferlib_ppo.Config(**sizes, update_epochs=1))
    assert ranks_of_factorised(train.policy.init) == {2}
    monkeypatch.setattr(networks._dense, "orthogonal", jax.nn.initializers.orthogonal)
    assert ranks_of_factorised(train.policy.init) == {3}
    assert ranks_of_factorised(train) == {2}
