"""Calls of functions on NumPy arrays from compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np

from ppo_parts.envs._callback import numpy_callback
from tests.common import P, assert_same, mesh_of_all

SHAPES = {"sum": jax.ShapeDtypeStruct((2,), np.float32), "large": jax.ShapeDtypeStruct((2,), bool)}
X, Y = jnp.arange(24, dtype=jnp.float32).reshape(3, 4, 2), jnp.arange(1, 5, dtype=jnp.int32)


def by_hand(x, y):
    return {"sum": x + y[..., None], "large": x * y[..., None] > 20}


def called(calls):
    """A function of x `[2]` and y `[]` that calls the host, and notes what arrives there."""

    def function(x, y):
        calls.append((x, y))
        assert [type(array) for array in (x, y)] == [np.ndarray] * 2
        return by_hand(x, y)

    return lambda x, y: numpy_callback(function, SHAPES, x, y)


def test_a_vmapped_call_is_one_call_with_the_arrays_of_all():
    calls = []
    f = called(calls)
    inner = jax.vmap(f, in_axes=(0, 0))
    assert_same(jax.jit(jax.vmap(inner, in_axes=(0, None)))(X, Y), by_hand(X, jnp.broadcast_to(Y, (3, 4))))
    assert [(x.shape, y.shape) for x, y in calls] == [((3, 4, 2), (3, 4))]
    assert_same(jax.vmap(f, in_axes=(1, None))(X[0].T, Y[2]), by_hand(X[0], jnp.full(4, Y[2])))
    assert len(calls) == 2


def check_several_devices():
    """A program over several devices calls once, with whole arrays."""
    calls = []
    x = jax.device_put(X[0], jax.sharding.NamedSharding(mesh_of_all("Auto"), P("d")))
    assert_same(jax.jit(jax.vmap(called(calls)))(x, Y), by_hand(X[0], Y))
    assert [x.shape for x, _ in calls] == [(4, 2)]
