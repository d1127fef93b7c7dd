"""Numeric hyperparameters, each a float, a traced array, a schedule `step -> value` or a field of the batch."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import UserTypeError, UserValueError
from ..functional._arguments import ANY, RANGES, check_as
from ..functional._common import Range, check_range, is_real, nan_where

Array = jax.Array
VALUE_NEEDED = (
    jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError,
)  # fmt: skip
"""The errors that JAX raises if a traced function needs the value of an array."""


@dataclasses.dataclass(frozen=True)
class Field:
    """The result of `field`, with the range of the hyperparameter for which it stands."""

    path: str
    factor: float | Array = 1.0
    limits: Range = ANY

    def __mul__(self, factor: float | Array) -> Field:
        number = check_number("field", "factor", factor, ANY, schedule=False)
        return dataclasses.replace(self, factor=number * self.factor)

    __rmul__ = __mul__

    def scale(self, x: Any) -> Array:
        """Return the field's numbers times the factor, with NaN where they are out of range."""
        return _mark_outside(self.factor * x, self.limits)


Numeric = float | Array | Callable[[Any], Any] | Field
"""A float, an array (possibly traced, for sweeps with vmap), a schedule of the update count, or a `field`."""


def field(path: str) -> Field:
    """Name a field of the batch as a hyperparameter, so that it varies over the batch.

    The arguments `gamma`, `gae_lambda`, `rho_clip`, `c_clip`, `pg_rho_clip`, `pg_lambda`, `clip_eps`, `clip_eps_high`,
    `dual_clip` and `coef` of the parts that compute one number per element, and the coefficients of
    `combine_advantages`, may be fields, which the part then requires. If the number of an unmasked element is out of
    the argument's range, it becomes NaN, which the learner counts. Gradients flow to fields of `current`. A field can
    be multiplied by a number, as in `0.5 * pp.field("weight")`.

    Args:
        path: a field of `Batch`: "extras.low" has one number per element, "per_segment.weight" one per segment,
            "shared.scale" one for all, "weight" the sampler's weights, and "current.aux.coef" numbers that the policy
            returns.

    Example:
        An option that lasts k steps discounts what follows by the k-th power of the discount factor:

        >>> import ppo_parts as pp
        >>> part = pp.gae(gamma=pp.field("extras.discount"), gae_lambda=.95)

    Reference: Sutton, Precup and Singh 1999, Between MDPs and semi-MDPs, section 3, for the example.
    """
    check_as("field", "path", path, str)
    return Field(path)


LATE = (np.int32(2**29), np.int32(2**30))
"""Steps that no run reaches; a schedule with equal values at both counts as constant from some step on."""


def check_number(
    where: str, name: str, value: Any, limits: Range | None = None, *, schedule: bool = True, field: bool = False
) -> Any:
    """Return `value` after checking that it is, or can become, a number in `limits` (`RANGES[name]`).

    A concrete number is checked at once. A schedule is checked at step 0, and at its final value if it becomes
    constant. A value that is known only at run time (a traced number, or a later value of a schedule) is wrapped so
    that it is NaN outside the range; the learner counts such NaNs, see `Part.numbers`. Schedules raise an error with
    `schedule=False`, and fields raise one without `field=True`.
    """
    limits, place = RANGES[name] if limits is None else limits, {"where": where, "argument": name}
    if isinstance(value, Field):
        if not field:
            message = f"must be one number for the whole batch, and cannot be the field {value.path!r} of it"
            raise UserTypeError(message, **place)
        return dataclasses.replace(value, limits=limits)
    if callable(value):
        if not schedule:
            raise UserTypeError(f"must be a number or an array, and cannot follow a schedule; got {value!r}", **place)
        _check_schedule(where, name, value, limits)
        return lambda step: _bound_scheduled(value(step), limits)
    what = "a number, an array or a schedule step -> value" if schedule else "a number or an array"
    check_range(where, name, value, limits, what=what)
    if np.shape(value) != ():
        raise UserValueError(
            f"must be one number, got an array of shape {np.shape(value)}; to sweep it, build the chain inside a "
            "function and vmap that; if it varies over the batch, write it into extras, and pass pp.field(...)",
            **place,
        )
    return _mark_outside(value, limits) if isinstance(value, jax.core.Tracer) else value


def _check_schedule(where: str, name: str, schedule: Callable[[Any], Any], limits: Range) -> None:
    """Raise unless the known values of a schedule are single numbers in the range."""
    place = {"where": where, "argument": name}
    # If a schedule closes over a traced number (in a sweep), its values are not known yet.
    with jax.ensure_compile_time_eval(), np.errstate(all="ignore"):
        try:
            first, *late = (schedule(step := x) for x in (np.int32(0), *LATE))
        except Exception as error:  # any error of a user's function, such as a table that ends
            message = f"must be a number or a schedule step -> value for all steps, and {schedule!r} failed at {step}: "
            raise UserTypeError(message + str(error), **place) from error
    ends = [("at step 0", first, limits)]
    if not any(isinstance(x, jax.core.Tracer) for x in late) and np.array_equal(*late):
        ends.append(("at the end", late[0], dataclasses.replace(limits, open_low=False)))  # it may be annealed to 0
    for when, end, allowed in ends:
        known = not isinstance(end, jax.core.Tracer)
        if known and not is_real(np.asarray(end)):
            raise UserTypeError(f"must be a number, but its schedule is {end!r} {when}", **place)
        if jnp.shape(end) != ():
            message = f"must be one number at every step, but its schedule returns shape {jnp.shape(end)}"
            raise UserValueError(message, **place)
        if known and np.float64(end) not in _widen(allowed):
            raise UserValueError(f"must lie in {limits}, but its schedule is {float(end):g} {when}", **place)
    try:
        jax.eval_shape(schedule, jax.ShapeDtypeStruct((), jnp.int32))
    except VALUE_NEEDED as error:
        message = f"must be a schedule that JAX can trace: write {schedule!r} with jax.numpy, and without `if`"
        raise UserTypeError(message, **place) from error


def _bound_scheduled(x: Any, limits: Range) -> Array:
    """Return a schedule's value, or NaN outside the range; an excluded bound becomes the next normal number."""
    x = _mark_outside(jnp.asarray(x), dataclasses.replace(limits, open_low=False))
    above = max(jnp.finfo(x.dtype).tiny, jnp.finfo(x.dtype).eps * abs(limits.low)) if limits.open_low else 0
    return jnp.clip(x, limits.low + float(above), limits.high)  # against rounding errors, which functions would reject


def _mark_outside(x: Any, limits: Range) -> Array:
    return nan_where(~_widen(limits).holds(x), x)


def _widen(limits: Range) -> Range:
    """Widen a range by float32's rounding error, as a schedule from 1 to 0 may go from 1.0000001 to -1e-9."""
    below = 1e-6 * (abs(limits.low) if limits.open_low else max(abs(limits.low), 0.1))
    return Range(limits.low - below, limits.high + 1e-6 * max(abs(limits.high), 0.1), limits.open_low)


def _is_floating(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.floating))


def find_nan(hyperparameters: Mapping[Any, Any]) -> dict[Any, Array]:
    """Return whether each hyperparameter that is not a Python number is NaN because it is out of range."""
    arrays = {name: x for name, x in hyperparameters.items() if isinstance(x, jax.Array) and _is_floating(x)}
    return {name: jnp.any(jnp.isnan(x)) for name, x in arrays.items()}  # others were checked when the part was made


def spread_nan(tree: Any, *hyperparameters: Any) -> Any:
    """Return the tree, with NaN in all its floats if a hyperparameter is NaN because it is out of range."""
    numbers = find_nan(dict(enumerate(hyperparameters))).values()
    if not numbers:
        return tree
    bad = functools.reduce(jnp.logical_or, numbers)
    return jax.tree.map(lambda x: nan_where(bad, x).astype(x.dtype) if _is_floating(x) else x, tree)


def check_count(where: str, name: str, value: Any, low: int | None = 1) -> int:
    """Return `value` after checking that it is an integer of at least `low` (if None, any integer)."""
    check_as(where, name, value, int)
    if low is not None and value < low:
        raise UserValueError(f"must be at least {low}, got {value!r}", where=where, argument=name)
    return int(value)


def check_takes(
    where: str, name: str, function: Callable[..., Any], arguments: tuple[str, ...], keywords: Iterable[str] = ()
) -> None:
    """Raise unless a function can be called with these positional and keyword arguments."""
    check_as(where, name, function, Callable)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a callable without a signature
        return
    try:
        bound = signature.bind(*arguments, **dict.fromkeys(keywords)).arguments
        fits = all(bound.get(argument, argument) == argument for argument in arguments)  # in this order
    except TypeError:
        fits = False
    if not fits:
        call = ", ".join((*arguments, *(f"{keyword}=..." for keyword in keywords)))
        raise UserTypeError(f"{where}: {name} must take ({call}); this one takes {signature}")


def value_at(value: Numeric, step: Any) -> Any:
    """Return the value of a hyperparameter at learner update `step`."""
    return jnp.asarray(value(step)) if callable(value) else value
