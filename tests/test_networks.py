"""What the package adds to network libraries."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppo_parts import networks


@pytest.mark.parametrize(("shape", "outputs"), [((5,), 2), ((7, 5), 6), ((3, 7, 40), 2), ((7, 40), 50), ((7, 130), 3)])
def test_it_is_a_dense_layer(shape, outputs):
    x = jax.random.normal(jax.random.key(0), shape)
    plain, ours = nn.Dense(outputs), nn.Dense(outputs, dot_general=networks.dense_dot_general)
    params = plain.init(jax.random.key(1), x)

    def loss(layer, params, x):
        return jnp.sum(jnp.sin(layer.apply(params, x)))

    expected = jax.value_and_grad(lambda *args: loss(plain, *args), argnums=(0, 1))(params, x)
    result = jax.value_and_grad(lambda *args: loss(ours, *args), argnums=(0, 1))(params, x)
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
