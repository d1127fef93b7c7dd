"""`categorical_ppo_loss` as one Triton kernel, which computes the gradient as well while it has the inputs at hand.

The module is imported only where the kernel may run, because Pallas takes a while to import.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ._common import Array
from ._fused import NUMBERS, Inputs, combined, terms

ELEMENTS = 128  # per program at most: one for each thread
LOGITS = 512  # per program, padding included: few, so that a batch of a few thousand elements fills a GPU
WARPS = 4
TERMS = 5  # that `terms` returns; their sums are followed by the number of unmasked elements


def loss_and_means(x: Inputs, *, interpret: bool = False) -> tuple[Array, ...]:
    """Compute the loss and the means of all terms over the unmasked elements; only the loss has a derivative.

    Its first derivative, in both modes, is the gradient that the kernel computes along with the loss. Where nothing is
    differentiated, the kernel computes no gradient. Derivatives of higher order are those of `terms`.

    Args:
        x: the inputs, of which there is at least one element.
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
        rate = jnp.sum(by_logits.astype(sums.dtype) * change.logits) + jnp.sum(by_value.astype(sums.dtype) * change.value)
        return out, (rate / _count(sums), *(jnp.zeros_like(mean) for mean in out[1:]))

    @jax.custom_jvp
    def run_with_gradient(x: Inputs) -> tuple[Array, ...]:
        return _call(x, True, interpret)

    @run_with_gradient.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        def by_xla(x: Inputs) -> tuple[Array, ...]:
            sums, gradient = _sums_and_gradient(x)
            return (jnp.stack(sums), *gradient)

        return jax.jvp(by_xla, primals, tangents)

    return run(x)


def _means(x: Inputs, sums: Array) -> tuple[Array, ...]:
    means = tuple(sums[k] / _count(sums) for k in range(TERMS))
    return (combined(x, means), *means)


def _count(sums: Array) -> Array:
    return jnp.maximum(sums[TERMS], 1)


def _sums_and_gradient(x: Inputs) -> tuple[Sequence[Array], tuple[Array, Array]]:
    """Return the sums of all terms and of the mask, and the gradient of the summed loss in logits and value."""

    def losses(logits: Array, value: Array) -> tuple[Array, tuple[Array, ...]]:
        found = terms(x._replace(logits=logits, value=value))
        return combined(x, found), found

    loss, pullback, found = jax.vjp(losses, x.logits, x.value, has_aux=True)
    counts = jnp.ones_like(loss) if x.mask is None else x.mask.astype(loss.dtype)
    return [jnp.sum(term) for term in (*found, counts)], pullback(jnp.ones_like(loss))


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
        keep = inside
        if "mask" in given:
            keep &= plt.load(reads["mask"].at[:], mask=inside, other=jnp.zeros((), x.mask.dtype)).astype(bool)

        def read(name: str, mask: Array, padding: float) -> Array:  # masked elements are not even read
            return plt.load(reads[name].at[...], mask=mask, other=jnp.asarray(padding, given[name].dtype))

        block = {name: ref[0] if name in NUMBERS else read(name, keep, 0) for name, ref in reads.items() if name not in ("logits", "mask")}
        block["logits"] = read("logits", keep[:, None] & options, -jnp.inf)  # padding is an impossible action
        block["action"] = jnp.where(block["action"] < actions, block["action"], -1)
        sums, gradient = _sums_and_gradient(x._replace(mask=keep, **block))
        for k, total in enumerate(sums):
            writes[0][k, 0] = total
        if differentiate:
            plt.store(writes[1].at[...], gradient[0], mask=inside[:, None] & options)
            plt.store(writes[2].at[...], gradient[1], mask=inside)

    matrix = pl.BlockSpec((tall, wide), lambda i: (i, 0))
    column = pl.BlockSpec((tall,), lambda i: (i,))
    single = pl.BlockSpec((1,), lambda i: (0,))
    specs = {name: matrix if name == "logits" else single if name in NUMBERS else column for name in given}
    shapes = {name: (size, actions) if name == "logits" else (1,) if name in NUMBERS else (size,) for name in given}
    dtype = jax.eval_shape(terms, x)[0].dtype
    outs = [jax.ShapeDtypeStruct((TERMS + 1, programs), dtype)]
    out_specs = [pl.BlockSpec((TERMS + 1, 1), lambda i: (0, i))]
    if differentiate:
        outs += [jax.ShapeDtypeStruct(shapes[name], given[name].dtype) for name in ("logits", "value")]
        out_specs += [matrix, column]
    partial, *gradient = pl.pallas_call(
        kernel,
        grid=(programs,),
        in_specs=list(specs.values()),
        out_specs=out_specs,
        out_shape=outs,
        compiler_params=plt.CompilerParams(num_warps=WARPS),
        interpret=interpret,
        name="categorical_ppo_loss",
    )(*(jnp.reshape(array, shapes[name]) for name, array in given.items()))
    sums = jnp.sum(partial, axis=1)
    return (sums, gradient[0].reshape(x.logits.shape), gradient[1].reshape(shape)) if differentiate else (sums,)
