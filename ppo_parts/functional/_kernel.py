"""A backward `lax.scan` over independent columns in one Triton kernel, which reads and writes each array once.

The module is imported only where the kernel may run, because Pallas takes a while to import.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ._common import Array
from ._recurrence import scan

COLUMNS = 32  # per program: a float32 row is one 128-byte line, and few columns still fill a GPU
WARPS = 1  # per program: a thread for each column
ROWS = 8  # rows loaded ahead of the recursion, so that the latencies of their loads overlap


def backwards(step: Callable[..., Any], last: Any, inputs: Any, *, interpret: bool = False) -> Any:
    """Compute `_recurrence.scan` with the loop over time inside the kernel and a block of columns per program.

    Derivatives, of any order and in both modes, are those of the scan, which runs instead of the kernel.

    Args:
        step: `(later, now) -> (later, outputs)`, elementwise over columns; it must not close over traced arrays.
        last: pytree of `[...]`, the argument `later` of the last step.
        inputs: pytree of `[T, ...]`, or of numbers, which are the same at each step. T and the size of `...` are > 0.
        interpret: emulate the kernel with XLA operations, for tests on machines without a GPU.

    Returns:
        The outputs of all steps, `[T, ...]` each.
    """

    @jax.custom_jvp
    def run(last: Any, inputs: Any) -> Any:
        return _call(step, last, inputs, interpret)

    @run.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return jax.jvp(lambda last, inputs: scan(step, last, inputs), primals, tangents)

    return run(last, inputs)


def _call(step: Callable[..., Any], last: Any, inputs: Any, interpret: bool) -> Any:
    firsts, carries = jax.tree.flatten(last)
    leaves, rows = jax.tree.flatten(inputs)
    varies = [jnp.ndim(x) > 0 for x in leaves]
    shape = next(jnp.shape(x) for x in leaves if jnp.ndim(x))
    steps, columns = shape[0], math.prod(shape[1:])

    def flattened() -> Any:
        return jax.tree.map(lambda x: x.reshape(steps, columns), scan(step, last, inputs))

    # The output types are those of the scan, because inside `shard_map` they also record varying axes.
    outs, results = jax.tree.flatten(jax.eval_shape(flattened))

    def kernel(*refs: Any) -> None:
        before, reads, writes = refs[: len(firsts)], refs[len(firsts) : -len(outs)], refs[-len(outs) :]
        inside = pl.program_id(0) * COLUMNS + jnp.arange(COLUMNS) < columns
        shared = [None if varied else ref[0] for ref, varied in zip(reads, varies, strict=True)]

        def row(t: Any) -> list[Array]:
            return [plt.load(ref.at[t], mask=inside) if x is None else x for ref, x in zip(reads, shared, strict=True)]

        def some(first: Any, count: int, later: Any) -> Any:
            """Run steps first, first - 1, ... first - count + 1; all of them are loaded before any is stored."""
            loaded = [row(first - k) for k in range(count)]
            for k, now in enumerate(loaded):
                later, outputs = step(later, jax.tree.unflatten(rows, now))
                for ref, x in zip(writes, jax.tree.leaves(outputs), strict=True):
                    plt.store(ref.at[first - k], x, mask=inside)
            return later

        later = jax.tree.unflatten(carries, [plt.load(ref.at[:], mask=inside) for ref in before])
        whole, rest = divmod(steps, ROWS)
        later = jax.lax.fori_loop(0, whole, lambda i, later: some(steps - 1 - i * ROWS, ROWS, later), later)
        some(jnp.int32(rest - 1), rest, later)

    block = pl.BlockSpec((steps, COLUMNS), lambda i: (0, i))
    single = pl.BlockSpec((1,), lambda i: (0,))
    out = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(columns, COLUMNS),),
        in_specs=[pl.BlockSpec((COLUMNS,), lambda i: (i,)) for _ in firsts]
        + [block if varied else single for varied in varies],
        out_specs=[block for _ in outs],
        out_shape=outs,
        compiler_params=plt.CompilerParams(num_warps=WARPS),
        interpret=interpret,
        name="backwards",
    )(
        *(jnp.reshape(x, (columns,)) for x in firsts),
        *(jnp.reshape(x, (steps, columns) if varied else (1,)) for x, varied in zip(leaves, varies, strict=True)),
    )
    return jax.tree.unflatten(results, [x.reshape(shape) for x in out])
