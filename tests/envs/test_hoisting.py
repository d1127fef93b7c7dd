"""The loop of a rollout draws its random numbers before it begins, and draws the same ones."""

import jax
import jax.numpy as jnp
import pytest

from ppo_parts.envs import _hoisting
from ppo_parts.envs._hoisting import scan_hoisted
from tests.common import assert_close

KEYS = jax.random.split(jax.random.key(0), 5)


@jax.jit
def on_host(x):
    return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((3,), jnp.float32), x)  # without a `vmap_method`


def step(carry, key):
    """Run operations of each kind: on the key, on nothing, on both, and on both inside a jitted function."""
    own, other = jax.random.split(key)
    noise = jax.random.uniform(own, (3,))
    moved, bits = jax.jit(lambda carry, key: (carry + jax.random.normal(key, (3,)), jax.random.bits(key)))(carry, other)
    rows = jnp.zeros(3) + jnp.arange(3.0)
    kept = jax.lax.cond(noise[0] > 0.5, lambda: moved, lambda: rows)
    return jnp.where(noise > 0.5, kept, rows), (moved, bits, noise, own, on_host(noise))


@pytest.mark.parametrize(("seeds", "generator"), [(None, "threefry2x32"), (2, "threefry2x32"), (None, "rbg")])
def test_a_hoisted_scan_is_a_scan(seeds, generator):
    keys = jax.random.split(jax.random.key(0, impl=generator), 5)
    start = jnp.ones(3) if seeds is None else jnp.ones((seeds, 3))
    results = []
    for scan in (scan_hoisted, jax.lax.scan):

        def run(start, scan=scan):
            carry, (*numbers, key, seen) = scan(step, start, keys)
            return carry, *numbers, jax.random.key_data(key), seen

        results.append(jax.jit(run if seeds is None else jax.vmap(run))(start))
    assert_close(*results)
    assert_close(*(scan(lambda carry, key: (carry + 1, carry), 0, keys) for scan in (scan_hoisted, jax.lax.scan)))


def test_only_what_needs_the_carry_stays_in_the_loop(monkeypatch):
    def loop():
        program = jax.make_jaxpr(lambda start: scan_hoisted(step, start, KEYS))(jnp.ones(3))
        (found,) = (x for x in program.jaxpr.eqns if x.primitive.name == "scan")
        return str(found.params["jaxpr"])

    inside = loop()
    assert "random" not in inside
    assert "callback" in inside
    assert "iota" in inside  # constants need no memory
    monkeypatch.setattr(_hoisting, "MAX_BYTES", 100)
    assert "random" in loop()
