"""Two solvers of the backward recurrence A_t = delta_t + c_t A_{t+1}, and the choice between them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ._arguments import Floats, Implementation, array_function
from ._common import Array, accumulator_dtype


def solve_by_scan(terms: tuple[Array, Array], times: Any = operator.mul) -> Array:
    """Compute every A_t = delta_t + trace_t A_{t+1}, one after another; `times` is the multiplication.

    The scan is not unrolled, because XLA's CPU compiler turns an unrolled one into a much slower fusion.
    """

    def step(later: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        error = now[0] + times(now[1], later)
        return error, error

    delta, trace = terms
    zeros = jnp.sum(delta[:0] + trace[:0], axis=0)  # has the sharding and (in `shard_map`) the type of the data
    return jax.lax.scan(step, zeros, terms, reverse=True)[1]


def solve_associatively(terms: tuple[Array, Array], times: Any = operator.mul) -> Array:
    """Compute every A_t = delta_t + trace_t A_{t+1} in log2(T) parallel passes."""

    def combine(later: tuple[Array, Array], now: tuple[Array, Array]) -> tuple[Array, Array]:
        return now[0] + times(now[1], later[0]), times(now[1], later[1])

    return jax.lax.associative_scan(combine, terms, reverse=True)[0]


def choose_solver(implementation: Implementation = "auto", times: Any = operator.mul) -> Callable[..., Array]:
    """Return the requested implementation; "auto" is the associative scan on GPUs, and the sequential scan elsewhere.

    "auto" follows the platform for which a program is compiled, not the default platform, because a machine with a GPU
    compiles a computation on CPU arrays for the CPU. Without a GPU, the associative scan is not even traced.
    """
    scan, associative = (functools.partial(solve, times=times) for solve in (solve_by_scan, solve_associatively))
    if implementation == "associative":
        return associative
    if implementation == "scan" or not has_gpu():
        return scan
    return lambda terms: jax.lax.platform_dependent(terms, cuda=associative, rocm=associative, default=scan)


def has_gpu() -> bool:
    """Return whether this process has a GPU."""
    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:
        return False


@array_function(raw=True, along_time=True)
def reverse_recurrence(delta: Floats, trace: Array, *, implementation: Implementation = "auto") -> Array:
    r"""Solve :math:`A_t = \delta_t + c_t A_{t+1}`, :math:`A_T = 0`, backwards along axis 0. Gradients flow.

    Args:
        delta: `[T, ...]`, floating; the result has its dtype. Narrow floats are accumulated in float32.
        trace: `[T, ...]`, :math:`c_t`; the last row has no effect but must be finite.
        implementation: the algorithm; all choices compute the same numbers. "scan" computes one step after another.
            "associative" uses `lax.associative_scan`. "auto", as in `gae` and `vtrace`, uses the associative scan if
            the program is compiled for a GPU, and the scan otherwise.

    Example:
        >>> reverse_recurrence(jnp.ones(3), jnp.full(3, .5)).tolist()
        [1.75, 1.5, 1.0]
    """
    dtype = accumulator_dtype(delta)
    return choose_solver(implementation)((delta.astype(dtype), trace.astype(dtype))).astype(delta.dtype)
