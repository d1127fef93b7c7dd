"""`categorical_ppo_loss` as one Triton kernel, which also computes the gradient while the inputs are in registers.

The module is imported only where the kernel may run, because Pallas takes a while to import.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ._common import Array
from ._fused_terms import NUMBERS, Inputs, combined, terms

ELEMENTS = 128  # per program at most: one for each thread
LOGITS = 512  # per program, padding included: few, so that a batch of a few thousand elements fills a GPU
WARPS = 4
COUNT, COLUMNS = 5, 8  # a row for each program: the sums of five terms, the number of unmasked elements, padding


def loss_and_means(x: Inputs, *, interpret: bool = False) -> tuple[Array, ...]:
    """Compute the loss and the means of all terms over the unmasked elements; only the loss has a derivative.

    Its first derivative, in both modes, is the gradient that the kernel computes along with the loss. Where nothing is
    differentiated, the kernel computes no gradient. Derivatives of higher order are those of `terms`.

    Args:
        x: the inputs, with at least one element.
        interpret: emulate the kernel with XLA operations, for tests on machines without a GPU.
    """

    @jax.custom_jvp
    def run(x: Inputs) -> tuple[Array, ...]:
        return _means(x, _call(x, False, interpret)[0])

    @run.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (x,), (change,) = primals, tangents
        sums, by_logits, by_value = run_with_gradient(x)
        out = _means(x, sums)
        pairs = ((by_logits, change.logits), (by_value, change.value))
        rate = sum(jnp.sum(slope.astype(sums.dtype) * tangent) for slope, tangent in pairs)
        return out, (rate / _count(sums), *(jnp.zeros_like(mean) for mean in out[1:]))

    @jax.custom_jvp
    def run_with_gradient(x: Inputs) -> tuple[Array, ...]:
        return _call(x, True, interpret)

    @run_with_gradient.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        def by_xla(x: Inputs) -> tuple[Array, ...]:
            table, *gradient = _table_and_gradient(x)
            return jnp.sum(table.reshape(-1, COLUMNS), axis=0), *gradient

        return jax.jvp(by_xla, primals, tangents)

    return run(x)


def _means(x: Inputs, sums: Array) -> tuple[Array, ...]:
    means = tuple(sums[k] / _count(sums) for k in range(COUNT))
    return (combined(x, means), *means)


def _count(sums: Array) -> Array:
    return jnp.maximum(sums[COUNT], 1)


def _table_and_gradient(x: Inputs) -> tuple[Array, Array, Array]:
    """Return a column for each term and for the mask, and the gradient of the summed loss in logits and value."""

    def losses(logits: Array, value: Array) -> tuple[Array, tuple[Array, ...]]:
        found = terms(x._replace(logits=logits, value=value))
        return combined(x, found), found

    loss, pullback, found = jax.vjp(losses, x.logits, x.value, has_aux=True)
    counts = jnp.ones_like(loss) if x.mask is None else x.mask.astype(loss.dtype)
    table = jnp.zeros((*loss.shape, COLUMNS), loss.dtype)
    position = jax.lax.broadcasted_iota(jnp.int32, table.shape, table.ndim - 1)
    for number, column in enumerate((*found, counts)):
        table = jnp.where(position == number, column[..., None], table)
    return table, *pullback(jnp.ones_like(loss))


def _call(x: Inputs, differentiate: bool, interpret: bool) -> tuple[Array, ...]:
    """Return the sums and, with `differentiate`, the gradient in logits and value."""
    shape, actions = x.value.shape, x.logits.shape[-1]
    size, wide = math.prod(shape), pl.next_power_of_2(actions)
    tall = min(ELEMENTS, max(1, LOGITS // wide))
    programs = pl.cdiv(size, tall)
    given = {name: array for name, array in x._asdict().items() if array is not None}

    def kernel(*refs: Any) -> None:
        reads, writes = dict(zip(given, refs, strict=False)), refs[len(given) :]
        inside = pl.program_id(0) * tall + jnp.arange(tall) < size
        options = (jnp.arange(wide) < actions)[None, :]

        def read(name: str, mask: Array, padding: float = 0) -> Array:
            return plt.load(reads[name].at[...], mask=mask, other=jnp.asarray(padding, given[name].dtype))

        keep = inside if x.mask is None else inside & read("mask", inside).astype(bool)
        block = {name: read(name, keep) for name in given if name not in ("logits", "mask", *NUMBERS)}
        action = block["action"].astype(jnp.int32)
        block["action"] = jnp.where(action < actions, action, -1)  # the columns of padding are not actions
        block["logits"] = read("logits", keep[:, None] & options, -jnp.inf)
        numbers = {name: reads[name][0] for name in given if name in NUMBERS}
        table, by_logits, by_value = _table_and_gradient(x._replace(mask=keep, **block, **numbers))
        plt.store(writes[0].at[...], jnp.sum(table, axis=0, keepdims=True))
        if differentiate:
            plt.store(writes[1].at[...], by_logits, mask=inside[:, None] & options)
            plt.store(writes[2].at[...], by_value, mask=inside)

    matrix = pl.BlockSpec((tall, wide), lambda i: (i, 0))
    column = pl.BlockSpec((tall,), lambda i: (i,))
    single = pl.BlockSpec((1,), lambda i: (0,))
    specs = {name: matrix if name == "logits" else single if name in NUMBERS else column for name in given}
    shapes = {name: (size, actions) if name == "logits" else (1,) if name in NUMBERS else (size,) for name in given}

    def results() -> tuple[Array, ...]:
        table, by_logits, by_value = _table_and_gradient(x)
        sums = jnp.broadcast_to(jnp.sum(table.reshape(-1, COLUMNS), axis=0), (programs, COLUMNS))
        return sums, by_logits.reshape(shapes["logits"]), by_value.reshape(shapes["value"])

    # The output types are those of the computation, because inside `shard_map` they also record varying axes.
    outs = jax.eval_shape(results)[: 3 if differentiate else 1]
    table, *gradient = pl.pallas_call(
        kernel,
        grid=(programs,),
        in_specs=list(specs.values()),
        out_specs=[pl.BlockSpec((1, COLUMNS), lambda i: (i, 0)), matrix, column][: len(outs)],
        out_shape=outs,
        compiler_params=plt.CompilerParams(num_warps=WARPS),
        interpret=interpret,
        name="categorical_ppo_loss",
    )(*(jnp.reshape(array, shapes[name]) for name, array in given.items()))
    return jnp.sum(table, axis=0), *(g.reshape(y.shape) for g, y in zip(gradient, (x.logits, x.value), strict=False))
