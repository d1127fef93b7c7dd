"""The backward recursion A_t = delta_t + c_t A_{t+1}: three ways, the choice between them, and the public function."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ._arguments import REALS, Implementation, public
from ._common import Array, accumulator_dtype
from ._errors import UserValueError


def recur(later: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
    """Take one step of the recursion."""
    delta, trace = now
    error = delta + trace * later
    return error, error


def zeros_like_rows(delta: Array, trace: Array) -> Array:
    """Return the zeros that the recursion starts from, with the sharding of the data and, in `shard_map`, its type.

    Summing zero rows of the data creates such zeros.
    """
    return jnp.sum(delta[:0] + trace[:0], axis=0)


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

    # As in a scan, the last trace multiplies A_T = 0: it may be NaN, because of a flag that is neither 0 nor 1.
    return jax.lax.associative_scan(combine, (delta + 0 * trace, trace), reverse=True)[0]


def choose(
    where: str, implementation: Implementation, value: Array, ways: Mapping[str, Callable[[Any], Any]]
) -> Callable[[Any], Any]:
    """Choose the implementation for arrays like `value`: the requested one, or the one that suits the platform.

    "auto" chooses by the platform that a program is compiled for, not by the default platform: on a machine with a GPU,
    a computation on CPU arrays is compiled for the CPU. Without a GPU the kernel is not even traced.
    """
    if implementation == "pallas" and (
        reason := unsupported(value) or (None if has_device("cuda") else "no NVIDIA GPU is among JAX's devices")
    ):
        raise UserValueError(
            f'{where}: implementation="pallas" cannot run, {reason}; leave implementation at "auto", which then '
            "computes the same numbers in another way"
        )
    if implementation != "auto":
        return ways[implementation]
    if not (has_device("cuda") or has_device("rocm")):
        return ways["scan"]
    cuda = ways["associative" if unsupported(value) else "pallas"]
    return lambda inputs: jax.lax.platform_dependent(inputs, cuda=cuda, rocm=ways["associative"], default=ways["scan"])


def has_device(platform: str) -> bool:
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


@public(raw=True, along_time=True, trace=REALS)
def reverse_recurrence(delta: Array, trace: Array, *, implementation: Implementation = "auto") -> Array:
    r"""Solve :math:`A_t = \delta_t + c_t A_{t+1}`, :math:`A_T = 0`, backwards along axis 0. Gradients flow.

    Args:
        delta: `[T, ...]`, floating; its dtype is that of the result. Narrow dtypes are accumulated in float32.
        trace: `[T, ...]`, :math:`c_t`; the last row has no effect, but must be finite.
        implementation: as in `gae`.

    Example:
        >>> reverse_recurrence(jnp.ones(3), jnp.full(3, .5)).tolist()
        [1.75, 1.5, 1.0]
    """
    dtype = accumulator_dtype(delta)

    def widened(inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        return inputs[0].astype(dtype), inputs[1].astype(dtype)

    def step(later: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        later, _ = recur(later, widened(now))
        return later, later.astype(delta.dtype)

    def by_kernel(inputs: tuple[Array, Array]) -> Array:
        from . import _kernel  # on demand, because Pallas takes a while to import

        return _kernel.backwards(step, zeros, inputs)

    zeros = zeros_like_rows(*widened((delta, trace)))
    ways = {
        "scan": lambda inputs: scan(recur, zeros, widened(inputs)).astype(delta.dtype),
        "associative": lambda inputs: associative(*widened(inputs)).astype(delta.dtype),
        "pallas": by_kernel,
    }
    return choose("reverse_recurrence", implementation, delta, ways)((delta, trace))
