"""Helpers for tests: the example of `ppo_parts.testing`, comparisons of trees, and processes with several devices."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_parts as pp
from ppo_parts import distributions
from ppo_parts.testing import _example

ACTIONS, OBS, SEGMENTS, TIME = _example.ACTIONS, _example.OBS, _example.SEGMENTS, _example.TIME
evaluate, evaluate_gaussian, make_params = _example.evaluate, _example.evaluate_gaussian, _example.make_params
poisoned, rollout, Categorical = _example.poison, _example.make_rollout, distributions.Categorical


def estimator_inputs(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    """Return what estimators read, by name; a step may both terminate and be truncated."""
    rng = np.random.default_rng(seed)
    normal = {name: rng.normal(size=shape) for name in ("log_ratio", "reward", "value", "next_value")}
    shares = {"terminated": 0.2, "truncated": 0.2, "mask": 0.7}
    flags = {name: rng.random(shape) < share for name, share in shares.items()}
    return {name: jnp.asarray(x, dtype if name in normal else jnp.float32) for name, x in (normal | flags).items()}


def assert_same(actual: Any, expected: Any) -> None:
    """Check that two trees are equal to the last bit, NaN included."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, x), y in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))


def assert_close(actual: Any, expected: Any, rtol: float = 2e-5, atol: float = 1e-6) -> None:
    """Check that two trees have the same shapes and are equal except for rounding."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, x), y in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert x.shape == y.shape, jax.tree_util.keystr(path)
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))


def refused(*rows, by=lambda made: made):
    """Make a test that each row's call (or `by`, given its result) raises one of our errors with the row's message."""

    @pytest.mark.parametrize(("given", "says"), rows, ids=[says[:40] for _, says in rows])
    def test(given, says):
        with pytest.raises(pp.errors.UserError, match=says):
            by(given() if callable(given) else given)

    return test


def compiled(env):
    """Compile `reset` and `step` of an environment; one by one, their operations would be many programs."""
    return jax.jit(env.reset, static_argnums=1), jax.jit(env.step)


DEVICES = 4
P = jax.sharding.PartitionSpec


def alone(check, *args):
    """Run `check(*args)` in a process that sees `DEVICES` devices; JAX fixes their number before its first use."""
    flags = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={DEVICES}"
    flags += " --xla_backend_optimization_level=0"  # this compiles faster, and what runs is small
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    environment["NPROC"] = str(4 * DEVICES)  # XLA's threads: a collective needs one for each device, even on few cores
    program = f"from {check.__module__} import {check.__name__} as check; check(*{args!r})"
    done = subprocess.run((sys.executable, "-c", program), env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


def mesh_of_all(kind):
    """Arrange all devices along one axis, d, with explicit or automatic shardings."""
    return jax.make_mesh((DEVICES,), ("d",), axis_types=(getattr(jax.sharding.AxisType, kind),))
