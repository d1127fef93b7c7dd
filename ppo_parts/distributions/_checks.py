"""Checks of arguments that the distributions share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base.errors import UserTypeError, UserValueError
from ..functional._common import ShapeError, check_arrays

Array = jax.Array


def check_real(where: str, **arrays: Any) -> None:
    """Raise unless each argument is an array of real numbers that JAX computes with, or one such number."""
    for name, x in arrays.items():
        try:
            check_arrays(where, **{name: x})
        except TypeError as error:
            message = str(error).removeprefix(f"{where}: {name} ")
            raise UserTypeError(message, where=where, argument=name) from None
        dtype = jnp.result_type(x)
        if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 16:
            raise UserTypeError(
                f"must have at least 16 bits, got {dtype}; convert it first, e.g. {name}.astype(jnp.bfloat16)",
                where=where,
                argument=name,
            )


def check_floating(where: str, **arrays: Any) -> None:
    """Raise unless each argument is an array of floating numbers of at least 16 bits."""
    check_real(where, **arrays)
    for name, x in arrays.items():
        if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            raise UserTypeError(
                f"must be floating, got {jnp.result_type(x)}; convert it first, e.g. {name}.astype(jnp.float32)",
                where=where,
                argument=name,
            )


def checked_draw(where: str, seed: Any, sample_shape: Any) -> tuple[int, ...]:
    """Return `sample_shape` as a tuple, after checking it and the key."""
    if not isinstance(seed, jax.Array | np.ndarray):
        raise UserTypeError(f"must be a key, such as jax.random.key(0), got {seed!r}", where=where, argument="seed")
    sizes = tuple(sample_shape) if isinstance(sample_shape, Sequence) else (None,)
    if not all(isinstance(n, int | np.integer) and n >= 0 for n in sizes):
        raise UserTypeError(
            f"must be a tuple of whole numbers, got {sample_shape!r}", where=where, argument="sample_shape"
        )
    return sizes


def fit_to_loc(where: str, name: str, x: Any, loc: Array, dtype: Any, first: str = "loc") -> Array:
    """Broadcast `x` to the shape of `loc`; it has this shape, that of the last axis, or is a single number."""
    if jnp.shape(x) not in (loc.shape, loc.shape[-1:], ()):
        raise ShapeError(
            f"{where}: {first} has shape {loc.shape} and {name} {jnp.shape(x)}; {name} must have the shape of {first}, "
            f"{loc.shape[-1:]} or ()"
        )
    return jnp.broadcast_to(jnp.asarray(x, dtype), loc.shape)


def check_box(where: str, low: Any, high: Any, dtype: Any) -> None:
    """Raise unless a box is finite, not empty, and wide enough for actions of a dtype; traced bounds pass."""
    if any(isinstance(x, jax.core.Tracer) for x in (low, high)):
        return
    least, most = np.asarray(low, float), np.asarray(high, float)
    if not (np.all(np.isfinite(least) & np.isfinite(most)) and np.all(least < most)):
        raise UserValueError(f"{where}: the box must be finite, with low < high, got low={low}, high={high}")
    if np.any(4 * float(jnp.finfo(dtype).eps) * np.maximum(np.abs(least), np.abs(most)) > (most - least) / 4):
        raise UserValueError(f"{where}: {dtype} cannot resolve the box low={low}, high={high}: use float32")


def check_trailing_axes(where: str, whose: str, shape: tuple[int, ...], value: Any) -> None:
    """Raise unless actions are real numbers, and their trailing axes match those of the distribution."""
    check_real(where, value=value)
    given = jnp.shape(value)
    if len(given) < len(shape) or given[len(given) - len(shape) :] != shape:
        raise ShapeError(f"{where}: an action has shape {given} and {whose} {shape}, but nothing is broadcast")


def check_equal_shapes(where: str, ours: Array, theirs: Array) -> None:
    if ours.shape != theirs.shape:
        raise ShapeError(
            f"{where}.kl_divergence: the two distributions have the shapes {ours.shape} and {theirs.shape}, but "
            "nothing is broadcast"
        )
