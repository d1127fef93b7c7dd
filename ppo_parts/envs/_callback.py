"""Callbacks on NumPy arrays from compiled programs, and the errors that they raise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._env import Array

try:
    from jax.experimental.buffer_callback import buffer_callback
except ImportError:  # an old JAX
    buffer_callback = None  # type: ignore[assignment]


def numpy_callback(function: Callable[..., Any], shapes: Any, *args: Array) -> Any:
    """Compute `jax.pure_callback(function, shapes, *args, vmap_method="broadcast_all")`, faster on a CPU.

    That function first converts its arguments to JAX arrays on the host: with four environments of CartPole, a step of
    a rollout took 1.5 ms, and 0.4 ms without. It is called on other devices, in processes with several devices, and by
    an old JAX. The function must not keep the NumPy arrays that it receives, or write to them, and it must
    return the shapes that are declared.
    """
    leaves, structure = jax.tree.flatten(shapes)

    def call(*args: Any) -> list[Any]:
        try:
            return jax.tree.leaves(function(*(np.asarray(x) for x in args)))
        except BaseException as error:
            _raised[:] = [error]
            raise

    def write(context: Any, out: Any, *args: Any) -> None:
        for buffer, x in zip(out, call(*args), strict=True):
            np.asarray(buffer)[...] = x

    if not any(isinstance(x, jax.core.Tracer) for x in args):
        results = [jnp.asarray(x) for x in call(*args)]
    elif buffer_callback is None or jax.default_backend() != "cpu" or jax.device_count() > 1:
        results = jax.pure_callback(call, leaves, *args, vmap_method="broadcast_all")
    else:
        results = buffer_callback(write, leaves, vmap_method="broadcast_all")(*args)
    return jax.tree.unflatten(structure, results)


_raised: list[BaseException] = []  # the latest error of a function, which XLA reports as text only


@contextlib.contextmanager
def host_errors() -> Iterator[None]:
    """Raise the original error of an environment on the host, instead of XLA's report of it."""
    try:
        yield
    except Exception as error:
        raised = _raised.pop() if _raised else None
        says = f"{type(raised).__name__}: {raised}"
        # It may be another error, as of an environment that steps in another thread.
        if raised is None or not isinstance(error, jax.errors.JaxRuntimeError) or says not in str(error):
            raise
        raise raised from None
