"""Helpers that the array functions share: shape checks, casts and masked reductions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
ArrayLike = jax.typing.ArrayLike
Axes = int | tuple[int, ...] | None
F = TypeVar("F", bound=Callable[..., Any])


class ShapeError(ValueError, AssertionError):
    """Array shapes do not match; arrays are never broadcast to make them match."""


def along_time(function: F) -> F:
    """Mark a loss that works along axis 0, so that a sampler before it must keep the time axis."""
    function.along_time = True  # type: ignore[attr-defined]
    return function


def check_arrays(where: str, **arrays: Any) -> None:
    """Raise `TypeError` unless each argument is a JAX or NumPy array of real numbers or flags, or one such number."""
    for name, x in arrays.items():
        if isinstance(x, (jax.Array, np.ndarray, np.generic, bool, int, float)) or hasattr(x, "__jax_array__"):
            dtype = getattr(x, "dtype", np.dtype(float))
            if not any(jnp.issubdtype(dtype, kind) for kind in (np.bool_, np.integer, np.floating)):
                raise TypeError(f"{where}: {name} must hold real numbers, got {dtype}")
            continue
        if x is None:
            raise TypeError(f"{where}: {name} must be an array, got None")
        library, remedy = type(x).__module__.partition(".")[0], f"jnp.asarray({name})"
        if hasattr(x, "__dlpack__"):  # this shares memory, while `asarray` would copy it or fail
            remedy = f"jnp.from_dlpack({name}{'.detach()' if library == 'torch' else ''})"
        kind = type(x).__name__ if library == "builtins" else f"{library}.{type(x).__name__}"
        raise TypeError(f"{where}: {name} must be an array, got a {kind}; convert it with {remedy}")


def check_same_shape(where: str, **arrays: Any) -> None:
    """Raise `ShapeError` unless all arrays (None is skipped) have exactly the same shape."""
    arrays = {name: x for name, x in arrays.items() if x is not None}
    check_arrays(where, **arrays)
    shapes = {name: jnp.shape(x) for name, x in arrays.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ShapeError(
            f"{where}: these must have the same shape, got {listed}. Nothing is broadcast{_remedy(shapes)}."
        )


def _remedy(shapes: dict[str, tuple[int, ...]]) -> str:
    """Suggest a remedy for the first two shapes that differ in a known way."""
    for (name, shape), (other, longer) in itertools.permutations(shapes.items(), 2):
        rank = len(shape)
        if shape and longer == (shape[0] + 1, *shape[1:]):
            if "value" in other:
                return (
                    f": {other} has one row more than {name}, V of the observation after the last step. Pass "
                    f"value=value[:-1] and next_value=next_values(value[:-1], value[-1])"
                )
            return f": {other} has one row more than {name}; drop the row that is not of a step, e.g. {other}[:-1]"
        if rank < len(longer) and shape == longer[:rank]:
            if set(longer[rank:]) == {1}:
                zeros = ", 0" * (len(longer) - rank)
                return f": drop the trailing axis of size 1 with {other}[...{zeros}]"
            added = ", None" * (len(longer) - rank)
            meant = f"use jnp.broadcast_to({name}[...{added}], {other}.shape)"
            if "log_" in other:
                return f": sum {other} over the action's dimensions, or, with one {name} for each row of it, {meant}"
            return f": if that is intended, {meant}"
        if 0 < rank < len(longer) and shape == longer[-rank:]:
            return f": if that is intended, use jnp.broadcast_to({name}, {other}.shape)"
    return ""


def check_floating(where: str, **arrays: Any) -> None:
    """Raise `TypeError` unless every array has a floating dtype."""
    check_arrays(where, **arrays)
    for name, x in arrays.items():
        if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            raise TypeError(
                f"{where}: {name} must be floating, got {jnp.result_type(x)}; "
                f"convert it first, e.g. {name}.astype(jnp.float32)"
            )


def known_values(x: Any) -> np.ndarray | None:
    """Return the values of `x`, or None if it is traced, or not all of it is in this process."""
    if isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True):
        return None
    return np.asarray(x)


def is_real(x: np.ndarray) -> bool:
    """Return whether an array contains real numbers, not booleans, text or complex numbers."""
    return any(jnp.issubdtype(x.dtype, kind) for kind in (jnp.floating, jnp.integer))


def check_ddof(where: str, ddof: Any) -> None:
    """Raise `ValueError` unless `ddof` is 0 or 1."""
    if ddof not in (0, 1) or isinstance(ddof, bool):
        raise ValueError(f"{where}: ddof must be 0 or 1, got {ddof!r}")


def bounds(low: float, high: float = np.inf, open_low: bool = False) -> str:
    """Format a range: "[0, 1]", "(0, inf]"."""
    written = (str(x) if isinstance(x, int) else f"{x:g}" for x in (low, high))
    return f"{'(' if open_low else '['}{', '.join(written)}]"


def range_error(
    value: Any, low: float, high: float = np.inf, *, open_low: bool = False, what: str = "a number or an array"
) -> TypeError | ValueError | None:
    """Return what is wrong with numbers that must lie in [low, high]; None if they are valid or traced."""
    refused = TypeError(f"must be {what}, got {value!r}")
    try:
        known = known_values(value)
    except ValueError:  # a ragged list
        return refused
    if known is None:
        return None
    if not is_real(known):
        return refused
    numbers = known.astype(np.float64)
    if np.all((numbers > low if open_low else numbers >= low) & (numbers <= high)):
        return None
    return ValueError(f"must lie in {bounds(low, high, open_low)}, got {value!r}")


def check_range(where: str, name: str, value: Any, low: float, high: float = np.inf, *, open_low: bool = False) -> None:
    """Raise unless `value` contains numbers in [low, high]; see `range_error`."""
    if (error := range_error(value, low, high, open_low=open_low)) is not None:
        raise type(error)(f"{where}: {name} {error}")


def checked_scalar(
    where: str, name: str, value: Any, low: float, high: float = np.inf, *, open_low: bool = False
) -> Any:
    """Return `value`, after checking that it is a single number in [low, high]."""
    check_range(where, name, value, low, high, open_low=open_low)
    if np.shape(value):
        raise ShapeError(f"{where}: {name} must be one number, got an array of shape {np.shape(value)}")
    return value


def checked_hyperparameter(
    where: str,
    name: str,
    value: Any,
    shape: tuple[int, ...],
    low: float,
    high: float = np.inf,
    *,
    open_low: bool = False,
    dtype: Any,
) -> Array:
    """Return a hyperparameter in [low, high] as a single number, or as an array of exactly `shape` if it varies."""
    check_range(where, name, value, low, high, open_low=open_low)
    x = jnp.asarray(value, dtype)
    if not x.ndim:
        return x
    if x.ndim > len(shape) or any(a not in (1, b) for a, b in zip(x.shape[::-1], shape[::-1], strict=False)):
        raise ShapeError(
            f"{where}: {name} of shape {x.shape} does not fit arrays of shape {shape}: give a number, one per element, "
            f"one for each of the trailing axes {shape[1:]}, or one per step, [T{', 1' * len(shape[1:])}]"
        )
    return jnp.broadcast_to(x, shape)


def check_flags(where: str, *, mask: Any = None, **arrays: Any) -> None:
    """Raise `ValueError` if the mask, or an unmasked element of a flag array, is known to be neither 0 nor 1.

    None is skipped.
    """
    _check_flag(where, "mask", mask, np.True_)
    counts = known_values(True if mask is None else mask)
    for name, x in arrays.items() if counts is not None else ():
        _check_flag(where, name, x, counts)


def _check_flag(where: str, name: str, x: Any, counts: Any) -> None:
    numbers = None if x is None else known_values(x)
    if numbers is None:
        return
    odd = (numbers != 0) & (numbers != 1) & counts.astype(bool)
    if odd.any():
        raise ValueError(f"{where}: {name} must hold 0 and 1, got {numbers[odd].flat[0]}")


def zero_masked(where: str, mask: Any, *arrays: Any) -> tuple[Array, ...]:
    """Return the arrays in the accumulator dtype, with masked elements replaced by 0.

    Masking the inputs makes the gradient of a masked element exactly 0. Masking the results instead would leave 0 * NaN
    in the gradient where an input is not finite.
    """
    dtype = accumulator_dtype(*arrays)
    wide = tuple(jnp.asarray(x).astype(dtype) for x in arrays)
    if mask is None:
        return wide
    check_flags(where, mask=mask)
    keep = jnp.asarray(mask).astype(bool)
    return tuple(jnp.where(keep, x, 0) for x in wide)


def accumulator_dtype(*arrays: ArrayLike) -> jnp.dtype:
    """Return the dtype to compute in: float32 for anything narrower, else the widest dtype of the inputs."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def unsqueezed(x: Array, rank: int) -> Array:
    """Append axes of size 1 to `x` until it has `rank` axes, to combine it with an array of the same leading axes."""
    return x.reshape(x.shape + (1,) * (rank - x.ndim))


def stacked(scalars: Sequence[Array], dtype: Any) -> Array:
    """Stack small arrays along a new last axis, like `jnp.stack`, in a form that XLA on a CPU compiles to one kernel.

    For a concatenation, XLA compiles an additional kernel for each operand, which takes about 10 ms each. Selections
    are fused with the computation of their operands.
    """
    position = np.arange(len(scalars))  # a constant, because XLA would move a computed array out of loops
    whole = jnp.zeros((*jnp.shape(scalars[0]), len(scalars)), dtype)
    for number, scalar in enumerate(scalars):
        whole = jnp.where(position == number, jnp.asarray(scalar, dtype)[..., None], whole)
    return whole


def masked_sum(x: Array, mask: Array | None = None, axis: Axes = None) -> Array:
    """Sum `x` where `mask` is 1; masked elements have no effect, even if they are NaN."""
    return jnp.sum(x if mask is None else jnp.where(jnp.asarray(mask).astype(bool), x, 0), axis=axis)


def masked_mean(x: Array, mask: Array | None = None, axis: Axes = None, keepdims: bool = False) -> Array:
    r"""Compute the mean over the elements where `mask` is 1. Gradients flow to `x`; they are 0 for masked elements.

    .. math:: \bar x = \frac{\sum_i m_i x_i}{\max(1, \sum_i m_i)}

    Args:
        x: any shape.
        mask: None (all ones), or 0/1 of the shape of `x`.
        axis: axis or axes to reduce; None reduces all.
        keepdims: keep reduced axes with size 1.

    Returns:
        The mean, in the dtype of `x` (float32 for integers and booleans); 0 where the mask is all zero; NaN, as from
        `jnp.mean`, if there is no mask and `x` is empty.

    Raises:
        ShapeError: `mask` has another shape. ValueError: a known mask contains anything other than 0 and 1.

    Example:
        >>> import jax.numpy as jnp
        >>> float(masked_mean(jnp.array([1., 3., jnp.nan]), jnp.array([1, 1, 0])))
        2.0
        >>> float(masked_mean(jnp.array([1, 2]), jnp.array([1, 1])))
        1.5
    """
    if mask is None:
        return jnp.mean(x, axis=axis, keepdims=keepdims)
    check_same_shape("masked_mean", x=x, mask=mask)
    check_flags("masked_mean", mask=mask)
    x, keep = jnp.asarray(x), jnp.asarray(mask).astype(bool)
    dtype = accumulator_dtype(x)
    total = jnp.sum(jnp.where(keep, x, 0), axis=axis, keepdims=keepdims, dtype=dtype)
    count = jnp.sum(keep, axis=axis, keepdims=keepdims, dtype=dtype)
    mean = total / jnp.maximum(count, 1)
    return mean.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else mean
