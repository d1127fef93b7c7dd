"""What every array function here shares: shape checks, casts and masked reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
ArrayLike = jax.typing.ArrayLike
Axes = int | tuple[int, ...] | None


class ShapeError(ValueError, AssertionError):
    """Array shapes do not fit together; nothing is ever broadcast to make them fit."""


def present(where: str, **arrays: Array) -> None:
    """Raise `TypeError` unless each is an array, or a number that stands for one."""
    for name, x in arrays.items():
        if x is None or isinstance(x, (list, tuple)):
            got = "None" if x is None else f"a {type(x).__name__}; convert it with jnp.asarray"
            raise TypeError(f"{where}: {name} must be an array, got {got}")


def same_shape(where: str, **arrays: Array | None) -> None:
    """Raise `ShapeError` unless all arrays (None is skipped) have exactly one shape."""
    present(where, **{name: x for name, x in arrays.items() if x is not None})
    shapes = {name: jnp.shape(x) for name, x in arrays.items() if x is not None}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ShapeError(
            f"{where}: these must have one shape, got {listed}. "
            "Nothing is broadcast: index a trailing axis of size 1 away (value[..., 0]), "
            "or sum log-probabilities over the action's dimensions."
        )


def floating(where: str, **arrays: Array) -> None:
    """Raise `TypeError` unless every array has a floating dtype."""
    present(where, **arrays)
    for name, x in arrays.items():
        if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            raise TypeError(
                f"{where}: {name} must be floating, got {jnp.result_type(x)}; "
                f"convert it first, e.g. {name}.astype(jnp.float32)"
            )


def accumulator(*arrays: ArrayLike) -> jnp.dtype:
    """The dtype to compute in: float32 for anything narrower, else the widest of the inputs."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def unsqueezed(x: Array, rank: int) -> Array:
    """`x` with axes of size 1 appended until it has so many, to stand beside an array that only begins like it."""
    return x.reshape(x.shape + (1,) * (rank - x.ndim))


def stacked(scalars: Sequence[Array], dtype: Any) -> Array:
    """`jnp.stack` of small arrays along a new last axis, which XLA on a CPU compiles to one kernel.

    Of a concatenation it compiles one for each operand besides, some 10 ms; selections are fused with what they select.
    """
    position = np.arange(len(scalars))  # a constant: what is computed from it would be moved out of loops
    whole = jnp.zeros((*jnp.shape(scalars[0]), len(scalars)), dtype)
    for number, scalar in enumerate(scalars):
        whole = jnp.where(position == number, jnp.asarray(scalar, dtype)[..., None], whole)
    return whole


def masked_sum(x: Array, mask: Array | None = None, axis: Axes = None) -> Array:
    """Sum of `x` where `mask` is 1; what stands in masked places (NaN, too) has no effect."""
    return jnp.sum(x if mask is None else jnp.where(mask.astype(bool), x, 0), axis=axis)


def masked_mean(x: Array, mask: Array | None = None, axis: Axes = None, keepdims: bool = False) -> Array:
    r"""Mean over the places where `mask` is 1, :math:`\sum_i m_i x_i / \max(1, \sum_i m_i)`.

    Args:
        x: any shape.
        mask: None (all ones), or 0/1 of the shape of `x`.
        axis: axis or axes to reduce; None reduces all.
        keepdims: keep reduced axes with size 1.

    Returns:
        The mean, in the dtype of `x`; 0 where the mask is all zero.

    Example:
        >>> import jax.numpy as jnp
        >>> float(masked_mean(jnp.array([1., 3., jnp.nan]), jnp.array([1, 1, 0])))
        2.0
    """
    if mask is None:
        return jnp.mean(x, axis=axis, keepdims=keepdims)
    same_shape("masked_mean", x=x, mask=mask)
    keep = mask.astype(bool)
    dtype = accumulator(x)
    total = jnp.sum(jnp.where(keep, x, 0), axis=axis, keepdims=keepdims, dtype=dtype)
    count = jnp.sum(keep, axis=axis, keepdims=keepdims, dtype=dtype)
    return (total / jnp.maximum(count, 1)).astype(x.dtype)
