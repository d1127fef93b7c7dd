"""Helpers for the array functions: shape checks, casts and masked reductions."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._errors import ShapeError, UserTypeError, UserValueError

Array = jax.Array
ArrayLike = jax.typing.ArrayLike
Number = float | Array
"""A hyperparameter: one number, or an array whose shape fits the other arrays."""


def check_arrays(where: str, /, **arrays: Any) -> None:
    """Raise `TypeError` unless each argument is a real number, a flag, or a JAX or NumPy array of these."""
    for name, x in arrays.items():
        check_array(where, name, x)


def check_array(where: str, name: str, x: Any, what: str = "an array") -> Any:
    """Return a real number, a flag, or an array of these in a form that `jit` accepts."""
    if hasattr(x, "__jax_array__"):
        x = jnp.asarray(x)
    hidden = isinstance(x, np.ma.MaskedArray)
    if isinstance(x, (jax.Array, np.ndarray, np.generic)) and not hidden:
        kind = getattr(x.dtype, "kind", "V")
        if x.dtype == jnp.bfloat16 or (kind in "biuf" and x.dtype.itemsize <= 8 and x.dtype.isnative):
            return x
        narrow = jnp.issubdtype(x.dtype, np.floating) or jnp.issubdtype(x.dtype, np.integer)  # float8, int4
        remedy = f"; convert it with {name}.astype(jnp.float32)" if narrow else ""
        says = f"must hold real numbers of 16 to 64 bits, got {x.dtype}{remedy}"
        raise UserTypeError(says, where=where, argument=name)
    if isinstance(x, (bool, float)):
        return x
    if isinstance(x, int):
        return float(x) if abs(x) < 2**1023 else np.inf if x > 0 else -np.inf
    if x is None or isinstance(x, (str, bytes, complex)):
        raise UserTypeError(f"must be {what}, got {x!r}", where=where, argument=name)
    if inspect.isroutine(x):
        raise UserTypeError(f"must be {what}, got a function: call it, as in {name}(step)", where=where, argument=name)
    library, remedy = type(x).__module__.partition(".")[0], f"{name}.filled(0)" if hidden else f"jnp.asarray({name})"
    if hasattr(x, "__dlpack__") and not hidden:  # this shares memory, while `asarray` would copy it or fail
        remedy = f"jnp.from_dlpack({name}{'.detach()' if library == 'torch' else ''})"
    if getattr(x, "requires_grad", False):
        remedy += ", or keep this computation in PyTorch: no gradient would flow back into it"
    kind = type(x).__name__ if library == "builtins" else f"{library}.{type(x).__name__}"
    raise UserTypeError(f"must be {what}, got a {kind}; convert it with {remedy}", where=where, argument=name)


def check_same_shape(where: str, /, **arrays: Any) -> None:
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
        rank, more = len(shape), longer[len(shape) :]
        if rank > 1 and shape == (*longer[1::-1], *longer[2:]) != longer:
            return f": transpose {name} or {other}"
        if shape and longer == (shape[0] + 1, *shape[1:]):
            if len(shapes) > 2 and all(x == longer for key, x in shapes.items() if key != name):
                return f": {name} has one row fewer than the others"
            with_last = other == "value" and "next_value" in shapes  # the value after the last step
            own = "value=value[:-1] and next_value=next_values(value[:-1], value[-1])"
            cut = {"value": "value[:-1]", "next_value": "next_value[1:]"}.get(other, f"{other}[:-1] or {other}[1:]")
            return f": {other} has one row more than {name}; pass {own if with_last else cut}"
        if name == "next_value" and shape == longer[1:]:
            return ": if that is the value after the last step, pass next_values(value, next_value)"
        if more and shape == longer[:rank]:
            if set(more) == {1}:
                return f": drop the trailing axis of size 1 with {other}[...{', 0' * len(more)}]"
            if {name, other} <= {"reward", "value", "next_value"}:
                return f": for {more[-1]} streams, all of them need {more[-1]} numbers per element"
            if other == "advantage":
                return ": combine the streams of the advantage first, as the part combine_advantages does"
            if name == "group" and not shape:
                return ": give the number of the group of each element, such as jnp.arange(n) // size"
            wider = f"{name}[...{', None' * len(more)}]"
            meant = f"use jnp.broadcast_to({wider}, {other}.shape)"
            if "log_" in other:
                return f": sum {other} over the action's dimensions, or, with one {name} for each row of it, {meant}"
            return f": if that is intended, {meant}"
        if 0 < rank < len(longer) and shape == longer[-rank:]:
            lengths = f"; if it holds lengths, pass jnp.arange({longer[0]})[:, None] < mask"
            remedy = f": if that is intended, use jnp.broadcast_to({name}, {other}.shape)"
            return remedy + lengths if name == "mask" and len(longer) == 2 else remedy
    return ""


def check_floating(where: str, name: str, x: Any) -> Any:
    """Return a floating-point number or array in a form that `jit` accepts."""
    x = check_array(where, name, x)
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        says = f"must be floating, got {jnp.result_type(x)}; convert it first, e.g. {name}.astype(jnp.float32)"
        raise UserTypeError(says, where=where, argument=name)
    return x


def nan_where(wrong: Any, x: Array) -> Array:
    """Replace elements by NaN where `wrong` is true; the NaN is computed from the array.

    On CPUs, `jnp.exp(jnp.where(wrong, jnp.nan, x))` returns an arbitrary number if one condition covers several
    elements, because to evaluate `exp` of a constant, the compiler converts to an integer, which is undefined for NaN.
    """
    negative = -1 - jnp.square(jax.lax.stop_gradient(x))
    return jnp.where(wrong, jnp.sqrt(jnp.where(wrong, negative, 1)), x)


def known_values(x: Any) -> np.ndarray | None:
    """Return the values of `x`, or None if `x` is traced or is not wholly in this process."""
    if isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True):
        return None
    return np.asarray(x)


def is_real(x: Any) -> bool:
    """Return whether an array contains real numbers, not booleans, text or complex numbers."""
    return any(jnp.issubdtype(x.dtype, kind) for kind in (jnp.floating, jnp.integer))


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`, including both ends; `open_low` excludes `low`."""

    low: float
    high: float = np.inf
    open_low: bool = False

    def __post_init__(self) -> None:
        for name, x in (("low", self.low), ("high", self.high)):
            if not isinstance(x, (int, float, np.number)) or np.isnan(x):
                raise UserTypeError(f"must be a number, got {x!r}", where="Range", argument=name)
        if self.low > self.high:
            raise UserValueError(f"must be at least low={self.low}, got {self.high}", where="Range", argument="high")

    def __str__(self) -> str:
        """Format the range, for example as "[0, 1]" or "(0, inf]"."""
        written = (str(x) if isinstance(x, int) else f"{x:g}" for x in (self.low, self.high))
        return f"{'(' if self.open_low else '['}{', '.join(written)}]"

    def __contains__(self, x: Any) -> bool:
        return bool(np.all(self.holds(x)))

    def holds(self, x: Any) -> Any:
        """Return whether each number lies in the range."""
        return (x > self.low if self.open_low else x >= self.low) & (x <= self.high)


def check_range(where: str, name: str, value: Any, limits: Range, *, what: str = "a number or an array") -> None:
    """Raise unless all numbers lie in a range; if they are traced, only their dtype is checked."""
    traced = isinstance(value, jax.core.Tracer)
    try:
        numbers = value if traced else known_values(value)
    except ValueError:  # a ragged list
        numbers = np.asarray(None)
    if numbers is None:
        return
    if not is_real(numbers):
        got = value.dtype if traced else repr(value)
        raise UserTypeError(f"must be {what}, got {got}", where=where, argument=name)
    if not traced and numbers.astype(np.float64) not in limits:
        raise UserValueError(f"must lie in {limits}, got {value!r}", where=where, argument=name)


def valid_flags(name: str, x: Any) -> Any:
    """Return whether each flag is 0 or 1; `terminated` may also be a probability."""
    return (x >= 0) & (x <= 1) if name == "terminated" else (x == 0) | (x == 1)


def check_flags(where: str, *, mask: Any = None, **flags: Any) -> None:
    """Raise if the mask, or an unmasked flag, is known to be neither 0 nor 1; `terminated` may hold probabilities."""
    counts: Any = np.True_
    for name, x in {"mask": mask, **flags}.items():
        numbers = None if x is None else known_values(x)
        if numbers is not None and counts is not None and numbers.dtype != bool:
            odd = ~valid_flags(name, numbers) & counts
            if odd.any():
                what = "0 and 1, or probabilities between them" if name == "terminated" else "0 and 1"
                raise UserValueError(f"must hold {what}, got {numbers[odd].flat[0]}", where=where, argument=name)
        if name == "mask" and x is not None:
            counts = None if numbers is None else numbers.astype(bool)


def boolean_mask(mask: Any, like: Array) -> Array:
    """Return a mask or another flag as booleans; None gives True everywhere."""
    return jnp.ones_like(like, bool) if mask is None else jnp.asarray(mask).astype(bool)


def zero_where(flag: Array | None, x: Array) -> Array:
    """Compute `(1 - flag) * x` with `where`, because x may be anything where the flag is 1, including NaN.

    None means that no flag is set. A flag may be a probability.
    """
    if flag is None or flag.dtype == bool:
        return x if flag is None else jnp.where(flag, 0, x)
    keep = 1 - flag.astype(x.dtype)
    return keep * jnp.where(keep <= 0, 0, x)


def zero_masked(mask: Any, *arrays: Any) -> tuple[Array, ...]:
    """Cast arrays to the accumulator dtype and replace masked elements by 0; they may have more axes than the mask.

    If the results were masked instead, the gradient would contain 0 * NaN where an input is not finite.
    """
    dtype = accumulator_dtype(*arrays)

    def prepared(x: Any) -> Array:
        x = jnp.asarray(x).astype(dtype)
        if mask is None:
            return x
        return jnp.where(unsqueeze(boolean_mask(mask, x), x.ndim), x, 0)

    return tuple(map(prepared, arrays))


def accumulator_dtype(*arrays: ArrayLike) -> jnp.dtype:
    """Return the dtype in which to compute: the widest dtype of the inputs, but at least float32."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def unsqueeze(x: Any, rank: int) -> Array:
    """Append axes of size 1 to `x` until it has `rank` axes, so that it can be combined with a larger array."""
    return x.reshape(x.shape + (1,) * (rank - x.ndim))


def stack_scalars(scalars: Sequence[Array], dtype: Any) -> Array:
    """Stack small arrays along a new last axis, like `jnp.stack`, in a form that XLA on a CPU compiles to one kernel.

    XLA compiles a concatenation to one additional kernel per operand, and each takes about 10 ms to compile.
    """
    position = np.arange(len(scalars))  # a constant, because XLA would hoist a computed array out of loops
    whole = jnp.zeros((*jnp.shape(scalars[0]), len(scalars)), dtype)
    for number, scalar in enumerate(scalars):
        whole = jnp.where(position == number, jnp.asarray(scalar, dtype)[..., None], whole)
    return whole


def masked_sum(x: Array, mask: Array | None = None, axis: int | tuple[int, ...] | None = None) -> Array:
    """Sum the elements of `x` where `mask` is 1; masked elements have no effect, even if they are NaN."""
    return jnp.sum(x if mask is None else jnp.where(boolean_mask(mask, x), x, 0), axis=axis)
