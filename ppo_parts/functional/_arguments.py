"""The door of the public functions: what each argument may be, by its name, and how it is prepared for the equations.

A name means the same in every function, so most rules stand once, in `KINDS`. What is known is checked here; the rest
of a function sees traced arrays, and is compiled once for each shape, also outside `jit`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from ._common import (
    Array,
    check_array,
    check_flags,
    check_floating,
    check_range,
    check_same_shape,
    check_whole,
    checked_scalar,
    is_integer,
    known_values,
    zero_masked,
)
from ._errors import ShapeError, UserTypeError, UserValueError

F = TypeVar("F", bound=Callable[..., Any])
Implementation = Literal["auto", "scan", "associative", "pallas"]
MaskMode = Literal["cut", "skip"]
Level = Literal["sequence", "token"]
Reduction = Literal["mean", "sum"]
KLEstimator = Literal["k1", "k2", "k3", "k3+"]
Baseline = Literal["mean", "leave_one_out", "length_weighted", "none"]
Scale = Literal["group", "batch"]
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]
CorrectionMode = Literal["truncate", "mask"]


@dataclasses.dataclass(frozen=True)
class Kind:
    """What an argument may be.

    Attributes:
        check: `(where, name, value) -> value`, raises where the value is known not to be of this kind.
        role: "float": an array that is cast and masked; "array": another one, of the same shape; "number": a
            hyperparameter; "static": not an array, so that another value is another program; "other": the rest.
        constant: whether gradients stop at it.
        single: whether it is one number, and not one per element.
    """

    check: Callable[[str, str, Any], Any]
    role: Literal["float", "array", "number", "static", "other"] = "array"
    constant: bool = False
    single: bool = False


def number(low: float, high: float = np.inf, *, open_low: bool = False, single: bool = False) -> Kind:
    """Return the kind of a hyperparameter in [low, high], for all elements or, unless it is single, for each."""

    def check(where: str, name: str, value: Any) -> Any:
        converted = check_array(where, name, value, "a number or an array")
        check = checked_scalar if single else check_range
        check(where, name, value if isinstance(value, int) else converted, low, high, open_low=open_low)
        return converted

    return Kind(check, "number", single=single)


def choice(words: Any, *, optional: bool = False) -> Kind:
    """Return the kind of an argument that is one of some words."""
    allowed = get_args(words)
    listed = ", ".join((*map(repr, allowed), *(["None"] if optional else [])))

    def check(where: str, name: str, value: Any) -> Any:
        if not (isinstance(value, str) and value in allowed) and not (optional and value is None):
            raise UserValueError(f"must be one of {listed}, got {value!r}", where=where, argument=name)
        return value

    return Kind(check, "static")


def _floating(where: str, name: str, value: Any) -> Any:
    value = check_array(where, name, value)
    check_floating(where, **{name: value})
    return value


def _integers(where: str, name: str, value: Any) -> Any:
    value = value if isinstance(value, int) else check_array(where, name, value)
    if not is_integer(value):
        raise UserTypeError(f"must contain whole numbers, got {jnp.result_type(value)}", where=where, argument=name)
    return value


def _switch(where: str, name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise UserTypeError(f"must be True or False, got {value!r}", where=where, argument=name)
    return bool(value)


def _axes(where: str, name: str, value: Any) -> Any:
    axes = value if isinstance(value, tuple) else () if value is None else (value,)
    if not all(isinstance(axis, (int, np.integer)) and not isinstance(axis, bool) for axis in axes):
        raise UserTypeError(
            f"must be None, a whole number or a tuple of them, got {value!r}", where=where, argument=name
        )
    if value == ():
        raise UserValueError("must name the axes of the statistics, got (); None means all", where=where, argument=name)
    return value if value is None else tuple(map(int, axes))


def _ddof(where: str, name: str, value: Any) -> int:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value not in (0, 1):
        raise UserValueError(f"must be 0 or 1, got {value!r}", where=where, argument=name)
    return int(value)


def _key(where: str, name: str, value: Any) -> Any:
    dtype = getattr(value, "dtype", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and not np.shape(value)
    if not typed and not (dtype == np.uint32 and np.ndim(value) == 1):
        raise UserTypeError(f"must be a key, such as jax.random.key(0), got {value!r}", where=where, argument=name)
    return value


def _support(where: str, name: str, value: Any) -> Any:
    if isinstance(value, jax.core.Tracer):
        return check_array(where, name, value)
    try:
        return np.asarray(value)
    except ValueError:  # a ragged list
        raise UserTypeError(f"must be a list of numbers, got {value!r}", where=where, argument=name) from None


def _mean_and_scale(where: str, name: str, value: Any) -> Any:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise UserTypeError(f"must be a mean and a scale, got {value!r}", where=where, argument=name)
    return number(-np.inf).check(where, f"the {name} mean", value[0]), POSITIVE.check(
        where, f"the {name} scale", value[1]
    )


def _baseline(where: str, name: str, value: Any) -> Any:
    return choice(Baseline).check(where, name, value) if isinstance(value, str) else _floating(where, name, value)


FLOATS = Kind(_floating, "float")
CONSTANT = Kind(_floating, "float", constant=True)
REALS = Kind(check_array)
FLAGS = Kind(check_array)
PROBABILITIES = Kind(check_array)
INTEGERS = Kind(_integers)
SWITCH = Kind(_switch, "static")
POSITIVE = number(0, open_low=True)
FROM_0 = number(0)
IN_0_1 = number(0, 1)
WHOLE = Kind(check_whole, "static")


def _each(kind: Kind, *names: str) -> dict[str, Kind]:
    return dict.fromkeys(names, kind)


KINDS = {
    **_each(FLOATS, "log_ratio", "value", "next_value", "log_prob", "reference_log_prob", "loss", "score"),
    **_each(FLOATS, "logits", "quantiles", "mean", "mirrored", "other", "kernel", "bias", "trace", "delta"),
    **_each(CONSTANT, "advantage", "target", "old_value"),
    **_each(REALS, "reward", "last_value", "final_value", "length", "x"),
    **_each(FLAGS, "mask", "truncated"),
    **_each(IN_0_1, "gamma", "gae_lambda", "pg_lambda"),
    **_each(POSITIVE, "rho_clip", "c_clip", "pg_rho_clip", "clip_eps", "clip_eps_high"),
    **_each(POSITIVE, "slope", "tau", "tau_negative", "high"),
    **_each(FROM_0, "bound", "low"),
    **_each(number(0, single=True), "eps", "kappa", "kl_coef"),
    **_each(number(-np.inf, single=True), "cov_low", "cov_high"),
    **_each(Kind(_mean_and_scale, "other"), "old", "new"),
    **_each(SWITCH, "stop_gradient", "keepdims"),
    "terminated": PROBABILITIES,
    "dual_clip": number(1, open_low=True),
    "fraction": number(0, 1, single=True),
    "sigma": number(0, open_low=True, single=True),
    "support": Kind(_support, "other"),
    "group": INTEGERS,
    "baseline": Kind(_baseline),
    "num_groups": WHOLE,
    "key": Kind(_key, "other"),
    "axis": Kind(_axes, "static"),
    "ddof": Kind(_ddof, "static"),
    "implementation": choice(Implementation),
    "mask_mode": choice(MaskMode),
    "level": choice(Level),
    "reduction": choice(Reduction),
    "estimator": choice(KLEstimator),
    "scale": choice(Scale, optional=True),
    "by": choice(Aggregation),
    "mode": choice(CorrectionMode),
}


def public(
    *, raw: bool = False, apart: str = "", also: Callable[[str, dict[str, Any]], None] | None = None, **own: Kind
) -> Callable[[F], F]:
    """Check the arguments of a function, prepare them, and compile the rest.

    The function receives its arrays in the dtype to compute in, with masked elements replaced by 0, and the
    hyperparameters in that dtype and in a shape that fits; its result is cast to the dtype of the first argument. A
    caller that is compiled sees the same operations as without `public`.

    Args:
        raw: leave the arrays as they are, for functions that prepare them in another way.
        apart: names of arrays whose shape may differ from that of the others.
        also: `(where, arguments)`, checks what concerns several arguments.
        own: the kinds of arguments that are not those in `KINDS`.
    """

    def decorate(function: F) -> F:
        where, signature = function.__name__, inspect.signature(function)
        kinds = {name: own.get(name) or KINDS[name] for name in signature.parameters}
        optional = {name for name, parameter in signature.parameters.items() if parameter.default is None}
        shaped = [name for name, kind in kinds.items() if kind.role in ("float", "array") and name not in apart.split()]
        first = next(iter(kinds))

        def run(options: tuple[tuple[str, Any], ...], arrays: dict[str, Any]) -> Any:
            if raw:
                return function(**arrays, **dict(options))
            out = function(**_prepared(where, kinds, arrays), **dict(options))
            return jax.tree.map(lambda x: x.astype(jnp.result_type(arrays[first])), out)

        run.__name__ = run.__qualname__ = where
        compiled = jax.jit(run, static_argnums=0, inline=True)

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            try:
                given = signature.bind(*args, **kwargs)
            except TypeError:
                return function(*args, **kwargs)  # which raises Python's own error
            given.apply_defaults()
            values = given.arguments
            for name, value in values.items():
                if value is not None or name not in optional:
                    values[name] = kinds[name].check(where, name, value)
            check_same_shape(where, **{name: values[name] for name in shaped if not isinstance(values[name], str)})
            flags = {name: values[name] for name, kind in kinds.items() if kind is FLAGS or kind is PROBABILITIES}
            check_flags(where, **flags)
            if also is not None:
                also(where, values)
            options = {
                name: values.pop(name)
                for name, kind in kinds.items()
                if kind.role == "static" or isinstance(values[name], str)
            }
            # What follows converts explicitly, so that it also runs where JAX does not promote dtypes.
            with jax.numpy_dtype_promotion("standard"):
                return compiled(tuple(options.items()), dict(values))

        return checked  # type: ignore[return-value]

    return decorate


def _prepared(where: str, kinds: dict[str, Kind], arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays and hyperparameters as the equations read them."""
    floats = {name: x for name, x in arrays.items() if kinds[name].role == "float" and x is not None}
    floats = {name: jax.lax.stop_gradient(x) if kinds[name].constant else x for name, x in floats.items()}
    wide = dict(zip(floats, zero_masked(where, arrays.get("mask"), *floats.values()), strict=True))
    like = next(iter(wide.values()))
    numbers = {
        name: fit(where, name, x, () if kinds[name].single else like.shape, like.dtype)
        for name, x in arrays.items()
        if kinds[name].role == "number" and x is not None
    }
    return arrays | wide | numbers


def fit(where: str, name: str, value: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return a hyperparameter as a single number, or as an array of exactly `shape` if it varies."""
    x = jnp.asarray(value, dtype)
    if not x.ndim:
        return x
    if x.ndim > len(shape) or any(a not in (1, b) for a, b in zip(x.shape[::-1], shape[::-1], strict=False)):
        raise ShapeError(
            f"{where}: {name} of shape {x.shape} does not fit arrays of shape {shape}: give a number, one per element, "
            f"one for each of the trailing axes {shape[1:]}, or one per step, [T{', 1' * len(shape[1:])}]"
        )
    return jnp.broadcast_to(x, shape)


def check_order(where: str, values: dict[str, Any], low: str, high: str, *, strict: bool = False) -> None:
    """Raise if one bound is known to exceed another, or to equal it."""
    least, most = known_values(values[low]), known_values(values[high])
    if least is not None and most is not None and np.any(least >= most if strict else least > most):
        rule = f"must be less than {high}" if strict else f"must not exceed {high}"
        raise UserValueError(
            f"{rule}, got {low}={values[low]!r} and {high}={values[high]!r}", where=where, argument=low
        )


def serializable(result: type) -> type:
    """Register a named tuple, so that `jax.export` can serialize functions that return it."""
    if hasattr(export, "register_namedtuple_serialization"):
        name = f"{result.__module__}.{result.__name__}"
        export.register_namedtuple_serialization(result, serialized_name=name)
    return result
