"""Checks of shapes and boxes that the distributions share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base.errors import UserValueError
from ..functional._common import ShapeError

Array = jax.Array


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
    """Raise `ShapeError` unless the trailing axes of actions match those of the distribution."""
    given = jnp.shape(value)
    if len(given) < len(shape) or given[len(given) - len(shape) :] != shape:
        raise ShapeError(f"{where}: an action has shape {given} and {whose} {shape}, but nothing is broadcast")


def check_equal_shapes(where: str, ours: Array, theirs: Array) -> None:
    if ours.shape != theirs.shape:
        raise ShapeError(
            f"{where}.kl_divergence: the two distributions have the shapes {ours.shape} and {theirs.shape}, but "
            "nothing is broadcast"
        )
