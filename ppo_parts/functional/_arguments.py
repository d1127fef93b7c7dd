"""Checks of the arguments of public functions, and the conversions that prepare them for the equations.

The annotation of an argument states its kind, and `RANGES` gives the range of each hyperparameter. Concrete values are
checked here; the body of a function sees traced arrays, and is compiled once for each shape, even outside `jit`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np

from ._common import (
    Array,
    Number,
    Range,
    check_array,
    check_flags,
    check_floating,
    check_range,
    check_same_shape,
    is_real,
    known_values,
    zero_masked,
)
from ._errors import ShapeError, UserTypeError, UserValueError, reject_call

F = TypeVar("F", bound=Callable[..., Any])
Implementation = Literal["auto", "scan", "associative"]
MaskMode = Literal["cut", "skip"]
Level = Literal["sequence", "token"]
Reduction = Literal["mean", "sum"]
KLEstimator = Literal["k1", "k2", "k3", "k3+"]
Baseline = Literal["mean", "leave_one_out", "length_weighted", "none"]
Scale = Literal["group", "batch"]
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]
CorrectionMode = Literal["truncate", "mask"]


WHAT: dict[Any, str] = {
    NoneType: "None",
    str: "a string",
    bool: "True or False",
    int: "an integer",
    Path: "a path",
    Mapping: "a dictionary",
    tuple[str, ...]: "a tuple of strings",
    Callable: "a function",
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """The values that an argument may have.

    The role says what it is: "float", an array that is cast and masked; "array", another array of the same shape;
    "number", a hyperparameter; "static", a value that is fixed at compile time; or "other", anything else, such as an
    array of another shape.
    """

    check: Callable[[str, str, Any], Any]  # (where, name, value) -> value; raises if the value is known to be invalid
    role: Literal["float", "array", "number", "static", "other"] = "array"
    constant: bool = False  # whether gradients are stopped at it
    wide: bool = False  # whether it has one more (last) axis than the other arrays
    single: bool = False  # whether it is one number for all elements
    limits: Range | None = None  # of a number


ANY, FROM_0, POSITIVE, IN_0_1 = Range(-np.inf), Range(0), Range(0, open_low=True), Range(0, 1)
RANGES: dict[str, Range] = {
    **dict.fromkeys(("gamma", "gae_lambda", "pg_lambda", "fraction", "decay", "rate", "beta"), IN_0_1),
    **dict.fromkeys(("rho_clip", "c_clip", "pg_rho_clip", "clip_eps", "clip_eps_high", "max_grad_norm"), POSITIVE),
    **dict.fromkeys(("slope", "tau", "tau_negative", "high", "sigma", "length"), POSITIVE),
    **dict.fromkeys(("coef", "value_coef", "kl_coef", "learning_rate", "target_kl", "alpha", "eps", "kappa"), FROM_0),
    **dict.fromkeys(("bound", "low", "temporal", "spatial", "noise_scale", "scale"), FROM_0),
    **dict.fromkeys(("cov_low", "cov_high", "target_entropy", "limit", "log_std"), ANY),
    "dual_clip": Range(1, open_low=True),
}
"""The range of each hyperparameter in functions, parts and configurations, unless one of them states its own range."""


def number(limits: Range, *, single: bool = False) -> Kind:
    """Return the kind of a hyperparameter in a range; unless it is `single`, there may be a number per element."""

    def check(where: str, name: str, value: Any) -> Any:
        x = check_array(where, name, value, "a number or an array")
        check_range(where, name, value if isinstance(value, int) else x, limits)
        if single and np.shape(x):
            raise ShapeError(f"must be one number, got an array of shape {np.shape(x)}", where=where, argument=name)
        return x

    return Kind(check, "number", single=single, limits=limits)


def whole(limits: Range) -> Kind:
    """Return the kind of an integer in a range that must be known at compile time."""

    def check(where: str, name: str, value: Any) -> int:
        if not is_whole(value) or value not in limits:
            error = UserValueError if is_whole(value) else UserTypeError
            raise error(f"must be an integer in {limits}, got {value!r}", where=where, argument=name)
        return int(value)

    return Kind(check, "static")


def is_whole(value: Any) -> bool:
    """Return whether a value is an integer and not a boolean."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_as(where: str, name: str, value: Any, hint: Any) -> Any:
    """Return a value if its hint admits it: a type in `WHAT`, a `Literal`, or a union of these; else raise."""
    kinds = _alternatives(hint)
    if any(_admits(kind, value) for kind in kinds):
        return value.item() if isinstance(value, np.generic) else value
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    types = [WHAT[kind] for kind in kinds if kind in WHAT]
    allowed = f"one of {', '.join([*map(repr, words), *types])}" if words else " or ".join(types)
    remedy = f": write ({value!r},)" if isinstance(value, str) and tuple[str, ...] in kinds else ""
    if int in kinds and isinstance(value, float) and value.is_integer() and value:  # 0 is often the wrong argument
        remedy = f": write {int(value)}"
    if Path in kinds and isinstance(value, str):
        remedy = f": write pathlib.Path({value!r})"
    error = UserValueError if words else UserTypeError
    raise error(f"must be {allowed}, got {value!r:.200}{remedy}", where=where, argument=name)


def is_known(hint: Any) -> bool:
    """Return whether `check_as` can check this type."""
    return all(kind in WHAT or get_origin(kind) is Literal for kind in _alternatives(hint))


@functools.cache
def _alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types that a hint admits, without the type arguments of dictionaries and functions."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(origin if (origin := get_origin(kind)) in (Mapping, Callable) else kind for kind in kinds)


def _admits(kind: Any, value: Any) -> bool:
    if get_origin(kind) is Literal:
        return (isinstance(value, str) or is_whole(value)) and value in get_args(kind)
    if kind == tuple[str, ...]:
        return isinstance(value, (tuple, list)) and all(isinstance(x, str) for x in value)
    if kind is int:
        return is_whole(value)
    return isinstance(value, (bool, np.bool_) if kind is bool else kind)


def _integers(where: str, name: str, value: Any) -> Any:
    value = value if isinstance(value, int) else check_array(where, name, value)
    if not jnp.issubdtype(jnp.result_type(value), jnp.integer):
        raise UserTypeError(f"must contain integers, got {jnp.result_type(value)}", where=where, argument=name)
    return value if isinstance(value, int) or value.dtype.itemsize >= 4 else value.astype(np.int32)  # N may not fit


def _axes(where: str, name: str, value: Any) -> Any:
    axes = value if isinstance(value, tuple) else () if value is None else (value,)
    if not all(map(is_whole, axes)):
        what = "None, an integer or a tuple of them"
        raise UserTypeError(f"must be {what}, got {value!r}", where=where, argument=name)
    if isinstance(value, tuple) and not value:
        raise UserValueError("must name the axes of the statistics, got (); None means all", where=where, argument=name)
    return value if value is None else tuple(map(int, axes))


def check_key(where: str, name: str, value: Any) -> Any:
    """Return `value` after checking that it is a single JAX key, typed or raw."""
    dtype, shape = getattr(value, "dtype", None), np.shape(value) if hasattr(value, "shape") else None
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if shape is None or len(shape) != (0 if typed else 1) or not (typed or dtype == np.uint32):
        got = value if isinstance(value, (int, float, str)) else type(value).__name__
        if shape is not None:
            got = f"keys of shape {shape}" if typed else f"{dtype} of shape {shape}"
        raise UserTypeError(f"must be one key, such as jax.random.key(0), got {got}", where=where, argument=name)
    return value


def _support(where: str, name: str, value: Any) -> Any:
    if isinstance(value, jax.core.Tracer):
        return check_array(where, name, value)
    try:
        atoms = np.asarray(value if is_real(np.asarray(value)) else (), np.float32)  # two may become equal
    except (TypeError, ValueError, OverflowError):
        atoms = np.zeros(0, np.float32)
    if atoms.ndim != 1 or len(atoms) < 2 or not (np.isfinite(atoms).all() and (np.diff(atoms) > 0).all()):
        what = "a list of at least two finite numbers that increase even when rounded to float32"
        raise UserValueError(f"must be {what}, got {value!r}", where=where, argument=name)
    return np.asarray(value, float)


def _mean_and_scale(where: str, name: str, value: Any) -> Any:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise UserTypeError(f"must be a mean and a scale, got {value!r}", where=where, argument=name)
    mean = number(ANY, single=True).check(where, f"the {name} mean", value[0])
    return mean, number(POSITIVE, single=True).check(where, f"the {name} scale", value[1])


def _baseline(where: str, name: str, value: Any) -> Any:
    return check_as(where, name, value, Baseline) if isinstance(value, str) else check_floating(where, name, value)


Floats = Annotated[Array, Kind(check_floating, "float")]
Fixed = Annotated[Array, Kind(check_floating, "float", constant=True)]
Wide = Annotated[Array, Kind(check_floating, "float", wide=True)]
WideFixed = Annotated[Array, Kind(check_floating, "float", constant=True, wide=True)]
Real = Annotated[Array, Kind(check_array, "float")]
"""Arrays of floats of one shape. `Wide` arrays have one more axis, and `Fixed` arrays receive no gradient. A `Real`
array may also hold integers or flags. So may an `Array` of that shape, which is neither cast nor masked."""

AnyFloats = Annotated[Array, Kind(check_floating, "other")]
AnyArray = Annotated[Array, Kind(check_array, "other")]
Indices = Annotated[Array, Kind(_integers, "other")]
"""Arrays of another shape."""

Groups = Annotated[Array, Kind(_integers)]
AnyBaseline = Annotated[Baseline | Array, Kind(_baseline)]
MeanAndScale = Annotated[tuple[Array, Array], Kind(_mean_and_scale, "other")]
Support = Annotated[Any, Kind(_support, "other")]
Key = Annotated[Array, Kind(check_key, "other")]
Size = Annotated[int, whole(Range(1))]
AXIS, DDOF = Kind(_axes, "static"), whole(IN_0_1)
Axes = Annotated[int | tuple[int, ...] | None, AXIS]
Ddof = Annotated[int, DDOF]

Positive = Annotated[Number, number(POSITIVE)]
Single = Annotated[Number, "single"]
"""Hyperparameters: `RANGES` gives the range of a `Number`; a `Single` one is the same for all elements."""


def kind_of(name: str, hint: Any) -> Kind:
    """Return the kind of an argument from its name and annotation."""
    hints = _alternatives(hint)
    said = [x for each in hints for x in getattr(each, "__metadata__", ())]
    for kind in said:
        if isinstance(kind, Kind):
            return kind
    if said == ["single"] or float in hints:
        return number(RANGES[name], single=said == ["single"])
    if Array in hints:
        return Kind(check_array)
    return Kind(functools.partial(check_as, hint=hint), "static")


def array_function(
    *,
    raw: bool = False,
    like: str | None = None,
    along_time: bool = False,
    axes: Mapping[str, str] | None = None,
    also: Callable[[str, dict[str, Any]], None] | None = None,
) -> Callable[[F], F]:
    """Decorate a function: check and prepare its arguments by their annotations, and compile its body.

    The function receives its arrays in the dtype in which it computes. Masked elements are replaced by 0, so the
    function does not need to read `mask`, but it must return 0 for zeros. Gradients are stopped at fixed arrays, and at
    all arrays if the argument `stop_gradient` is true. Hyperparameters have the same dtype and a shape that fits. The
    result has the dtype of the argument `like`, by default the first. Inside `jit`, the decorator adds no operations.

    With `raw`, the arguments are not changed. With `along_time`, axis 0 must exist and is time, and a sampler before
    such a loss must keep it. `axes` gives the axes of arrays with a fixed number of axes, such as "[T, N]".
    `also(where, arguments)` checks conditions on several arguments together.
    """

    def decorate(function: F) -> F:
        where, signature = function.__name__, inspect.signature(function)
        hints = get_type_hints(function, include_extras=True)
        kinds = {name: kind_of(name, hints[name]) for name in signature.parameters}
        optional = {name for name, parameter in signature.parameters.items() if parameter.default is None}
        shaped = [name for name, kind in kinds.items() if kind.role in ("float", "array")]
        model = like or next(iter(kinds))

        def prepared(**arguments: Any) -> Any:
            out = function(**_prepared(where, kinds, arguments))
            return jax.tree.map(lambda x: x.astype(jnp.result_type(arguments[model])), out)

        prepared.__name__ = prepared.__qualname__ = where

        @functools.cache
        def compiled(static: tuple[str, ...]) -> Callable[..., Any]:
            return jax.jit(function if raw else prepared, static_argnames=static, inline=True)

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            try:
                given = signature.bind(*args, **kwargs)
            except TypeError:
                return reject_call(function, args, kwargs)
            given.apply_defaults()
            values = given.arguments
            for name, value in values.items():
                if value is not None or name not in optional:
                    values[name] = kinds[name].check(where, name, value)
            arrays = {name: values[name] for name in shaped if not isinstance(values[name], (str, type(None)))}
            _check_shapes(where, kinds, arrays, along_time)
            for name, named in (axes or {}).items():
                if jnp.ndim(values[name]) != len(named.split(",")):
                    raise ShapeError(f"{where}: {name} must be {named}, got shape {jnp.shape(values[name])}")
            check_flags(where, **{name: x for name, x in values.items() if name in ("mask", "terminated", "truncated")})
            if also is not None:
                also(where, values)
            static = [name for name, x in values.items() if kinds[name].role == "static" or isinstance(x, str)]
            # The code that follows converts explicitly, so it also runs under JAX's strict dtype promotion.
            with jax.numpy_dtype_promotion("standard"):
                return compiled(tuple(static))(**values)

        checked.along_time = along_time  # type: ignore[attr-defined]
        checked.limits = {name: kind.limits for name, kind in kinds.items() if kind.limits}  # type: ignore[attr-defined]
        return checked  # type: ignore[return-value]

    return decorate


def _check_shapes(where: str, kinds: dict[str, Kind], arrays: dict[str, Any], along_time: bool) -> None:
    """Raise unless the arrays have the same shape (wide ones plus one axis), and a time axis if they need one."""
    broad, narrow = ({name: x for name, x in arrays.items() if kinds[name].wide == wide} for wide in (True, False))
    check_same_shape(where, **broad)
    check_same_shape(where, **narrow)
    for name, x in broad.items():
        if not jnp.ndim(x):
            raise ShapeError(f"{where}: {name} must have a last axis, got a single number: add one with {name}[None]")
        for other, y in narrow.items():
            if jnp.shape(x)[:-1] != jnp.shape(y):
                raise ShapeError(
                    f"{where}: {name} must have the axes of {other} and one more, the last; got {name} {jnp.shape(x)} "
                    f"and {other} {jnp.shape(y)}. Nothing is broadcast."
                )
    if along_time and not jnp.ndim(next(iter(arrays.values()))):
        raise ShapeError(f"{where} works along axis 0, time, but {next(iter(arrays))} is a single number")


def _prepared(where: str, kinds: dict[str, Kind], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays and hyperparameters in the form in which the equations use them."""

    stops = arguments.get("stop_gradient", False)  # stopped at the inputs, so JAX traces no derivatives
    fixed = [k for k, kind in kinds.items() if kind.constant or (stops and kind.role != "static")]
    arguments = arguments | {k: jax.lax.stop_gradient(arguments[k]) for k in fixed}

    def given(role: str) -> dict[str, Any]:
        return {k: arguments[k] for k, kind in kinds.items() if kind.role == role and arguments[k] is not None}

    floats = given("float")
    ready = dict(zip(floats, zero_masked(arguments.get("mask"), *floats.values()), strict=True))
    like = next(iter(ready.values()))
    numbers = {
        k: fit(where, k, x, () if kinds[k].single else like.shape, like.dtype) for k, x in given("number").items()
    }
    return arguments | ready | numbers


def fit(where: str, name: str, value: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return a hyperparameter as a single number, or as an array of exactly `shape` if it varies."""
    x = jnp.asarray(value, dtype)
    if not x.ndim:
        return x
    if x.ndim > len(shape) or any(a not in (1, b) for a, b in zip(x.shape[::-1], shape[::-1], strict=False)):
        raise ShapeError(
            f"{where}: {name} of shape {x.shape} does not fit arrays of shape {shape}: give a number, or an array of "
            f"that shape, of its trailing axes {shape[1:]}, or with one number per step, [T{', 1' * len(shape[1:])}]"
        )
    return jnp.broadcast_to(x, shape)


def check_below(where: str, name: str, x: Any, size: int, *, mask: Any = None, remedy: str = "") -> None:
    """Raise if an unmasked index is known to lie outside [0, size), because JAX would clamp or wrap it."""
    known, counts = known_values(x), known_values(True if mask is None else mask)
    if known is None or counts is None:
        return
    if (outside := ((known < 0) | (known >= size)) & counts.astype(bool)).any():
        message = f"must lie in [0, {size}), got {known[outside].flat[0]}{remedy}"
        raise UserValueError(message, where=where, argument=name)


def check_axes(where: str, values: dict[str, Any]) -> None:
    """Raise unless `axis` names axes of the first argument, each at most once."""
    axes, rank = values["axis"] or (), jnp.ndim(next(iter(values.values())))
    if len({axis % rank for axis in axes if -rank <= axis < rank}) < len(axes):
        raise UserValueError(f"must name distinct axes in [-{rank}, {rank}), got {axes}", where=where, argument="axis")


def check_order(where: str, values: dict[str, Any], low: str, high: str, *, strict: bool = False) -> None:
    """Raise if the lower bound is known to exceed the upper one or, with `strict`, to equal it."""
    least, most = known_values(values[low]), known_values(values[high])
    try:
        wrong = least is not None and most is not None and np.any(least >= most if strict else least > most)
    except ValueError:  # `fit` will reject their shapes
        return
    if wrong:
        rule, got = "be less than" if strict else "not exceed", f"{low}={values[low]} and {high}={values[high]}"
        raise UserValueError(f"must {rule} {high}, got {got}", where=where, argument=low)
