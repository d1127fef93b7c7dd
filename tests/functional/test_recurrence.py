"""The ways to run the backward recursion, each against the float64 reference, and the choice between them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppo_parts import functional as f
from ppo_parts.functional import _recurrence
from tests import reference
from tests.common import estimator_inputs

WAYS = ("scan", "associative")
CLIPS = {"rho_clip": 1.5, "c_clip": 0.8}
HYPERPARAMETERS = {"gae": {"gamma": 0.9, "gae_lambda": 0.8}, "vtrace": {"gamma": 0.9, "gae_lambda": 0.8} | CLIPS}


@pytest.fixture
def pretended(monkeypatch):
    """As if there were a GPU: programs can be lowered for it, but not run."""
    monkeypatch.setattr(_recurrence, "has_gpu", lambda: True)
    # What is patched is not part of the key of jit's caches, but the precision of products is, and there are none here:
    # no other test has this one, so none is given a program that was traced here, or the reverse.
    with jax.default_matmul_precision("bfloat16"):
        yield


def arrays(name, shape, dtype=jnp.float32, given=("truncated", "mask"), seed=0):
    """What the estimator reads, with these flags."""
    left_out = {"truncated", "mask"} - {*given} | ({"log_ratio"} if name == "gae" else set())
    inputs = estimator_inputs(*shape, seed=seed, dtype=dtype)
    return {field: x for field, x in inputs.items() if field not in left_out}


def estimator(name):
    """A new function each time, because what a fixture patches is not part of jit's key."""
    return jax.jit(lambda named: getattr(f, name)(**named, **HYPERPARAMETERS[name]))


LAYOUTS = (  # shape, dtype, the flags that are given, and how many batches
    ((1, 1), jnp.float32, (), 4),
    ((5, 2), jnp.float32, ("truncated", "mask"), 20),
    ((4, 2, 3), jnp.bfloat16, ("truncated", "mask"), 20),
    ((11, 3, 13), jnp.float32, ("truncated",), 3),  # ragged blocks of rows and columns
    ((8, 64), jnp.float32, ("mask",), 3),  # wide rows
)


@pytest.mark.parametrize("name", HYPERPARAMETERS)
def test_equals_the_reference(name):
    rng, estimate = np.random.default_rng(0), jax.jit(getattr(f, name))
    for shape, dtype, given, count in LAYOUTS:
        # In bfloat16 the sums are float32: one rounding, of 2^-9, at the end.
        tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == jnp.float32 else {"rtol": 2**-8, "atol": 1e-3}
        for seed in range(count):
            chosen = dict(zip(("gamma", "gae_lambda"), rng.choice((0.0, 0.5, 0.95, 1.0), 2).tolist(), strict=True))
            if name == "vtrace":
                chosen |= dict(zip(CLIPS, rng.choice((0.5, 1.0, 4.0), 2).tolist(), strict=True))
            named = arrays(name, shape, dtype, given, seed)
            expected = getattr(reference, name)(**named, **chosen)
            for x, y in zip(estimate(**named, **chosen), expected, strict=True):
                assert x.dtype == dtype
                np.testing.assert_allclose(np.asarray(x, float), y, **tolerance)


def test_hyperparameters_may_vary_from_step_to_step():
    named, rng = arrays("vtrace", (8, 64)), np.random.default_rng(1)
    per_step = {field: jnp.asarray(rng.uniform(0.3, 1, (8, 64)), jnp.float32) for field in HYPERPARAMETERS["vtrace"]}
    for x, y in zip(f.vtrace(**named, **per_step), reference.vtrace(**named, **per_step), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_both_ways_equal_a_loop_and_accumulate_bfloat16_in_float32(way):
    ones = jnp.ones(512, jnp.bfloat16)  # a bfloat16 sum stays at 256
    assert jax.jit(lambda x: f.reverse_recurrence(x, x, implementation=way))(ones)[0] == 512
    delta, trace = np.random.default_rng(0).normal(size=(2, 11, 35)).astype(np.float32)
    expected, later = np.zeros_like(delta), 0.0
    for t in reversed(range(11)):
        expected[t] = later = delta[t] + trace[t] * later
    got = f.reverse_recurrence(jnp.asarray(delta), jnp.asarray(trace), implementation=way)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_auto_follows_the_platform_of_the_program(pretended):
    """For a GPU it is the associative scan; for the CPU of the same machine it is the scan, which runs here."""
    for name, dtype in (("vtrace", jnp.bfloat16), ("gae", jnp.float32)):
        named = arrays(name, (11, 35), dtype)
        traced = estimator(name).trace(named)
        texts = [traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cuda", "rocm", "cpu")]
        assert ["while" in text for text in texts] == [False, False, True]
        expected = getattr(reference, name)(**named, **HYPERPARAMETERS[name])
        for x, y in zip(estimator(name)(named), expected, strict=True):
            np.testing.assert_allclose(np.asarray(x, float), y, rtol=2**-8, atol=1e-3)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_auto_without_a_gpu_is_the_scan():
    jaxprs = {way: str(jax.make_jaxpr(lambda x, way=way: f.reverse_recurrence(x, x, implementation=way))(jnp.ones(4)))
              for way in ("auto", *WAYS)}  # fmt: skip
    assert jaxprs["auto"] == jaxprs["scan"] != jaxprs["associative"]
    with pytest.raises(ValueError, match=r"implementation must be one of 'auto', .* got 'triton'"):
        f.reverse_recurrence(jnp.ones(4), jnp.ones(4), implementation="triton")
