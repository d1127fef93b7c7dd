"""Three implementations of a backward recursion over time, and the choice between them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ._arguments import Implementation
from ._common import Array
from ._errors import UserValueError


def scan(step: Callable[..., Any], last: Any, inputs: Any) -> Any:
    """Return the outputs of every `later, outputs = step(later, inputs_t)`, from the last step to the first.

    Inputs without axes are the same at each step. The scan is not unrolled, because XLA's CPU compiler turns an
    unrolled scan into a fusion that is several times slower.
    """
    leaves, tree = jax.tree.flatten(inputs)

    def body(later: Any, rows: list[Array]) -> tuple[Any, Any]:
        row = iter(rows)
        return step(later, jax.tree.unflatten(tree, [next(row) if jnp.ndim(x) else x for x in leaves]))

    return jax.lax.scan(body, last, [x for x in leaves if jnp.ndim(x)], reverse=True)[1]


def associative(delta: Array, trace: Array) -> Array:
    """Compute every A_t = delta_t + trace_t A_{t+1} in log2(T) parallel passes."""

    def combine(later: tuple[Array, Array], now: tuple[Array, Array]) -> tuple[Array, Array]:
        return now[0] + now[1] * later[0], now[1] * later[1]

    return jax.lax.associative_scan(combine, (delta, trace), reverse=True)[0]


def choose(
    where: str,
    implementation: Implementation,
    value: Array,
    *,
    scan: Callable[[Any], Any],
    associative: Callable[[Any], Any],
    pallas: Callable[[Any], Any],
) -> Callable[[Any], Any]:
    """Choose the implementation for arrays like `value`: the requested one, or the one that suits the platform.

    "auto" chooses by the platform that a program is compiled for, not by the default platform: on a machine with a GPU,
    a computation on CPU arrays is compiled for the CPU. Without a GPU the kernel is not even traced.
    """
    if implementation == "scan":
        return scan
    if implementation == "associative":
        return associative
    if implementation == "pallas":
        if reason := unsupported(value) or (None if has("cuda") else "no NVIDIA GPU is among JAX's devices"):
            raise cannot_run(where, reason)
        return pallas
    if not (has("cuda") or has("rocm")):
        return scan
    cuda = associative if unsupported(value) else pallas
    return lambda inputs: jax.lax.platform_dependent(inputs, cuda=cuda, rocm=associative, default=scan)


def cannot_run(where: str, reason: str) -> UserValueError:
    """Return the error for a kernel that was requested by name and cannot run."""
    return UserValueError(
        f'{where}: implementation="pallas" cannot run, {reason}; leave implementation at "auto", which then computes '
        "the same numbers in another way"
    )


def has(platform: str) -> bool:
    """Return whether this process has a device of that platform."""
    try:
        return bool(jax.devices(platform))
    except RuntimeError:
        return False


def unsupported(value: Array) -> str | None:
    """Return why the kernel cannot compute arrays like `value` on any machine, or None if it can."""
    if value.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"the kernel computes in float32, but the values are {value.dtype}"
    kind = jax.typeof(value) if hasattr(jax, "typeof") else None  # JAX before 0.6 has no explicit shardings
    if any(axis is not None for axis in getattr(getattr(kind, "sharding", None), "spec", ())):
        return f"the values are sharded over an explicit mesh, {kind}, but only jax.shard_map splits a kernel"
    if 0 in value.shape:
        return f"there is nothing to compute in an array of shape {value.shape}"
    try:
        triton = importlib.import_module("jax.experimental.pallas.triton")
    except ImportError:
        triton = None
    if not hasattr(triton, "load"):
        return f"jax {jax.__version__} has no jax.experimental.pallas.triton.load"
    return None
