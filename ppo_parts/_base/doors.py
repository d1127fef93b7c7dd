"""The check of arguments against their annotations, when a public function is called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from ..functional._arguments import is_whole
from ..functional._errors import reject_call
from .errors import UserTypeError, UserValueError

F = TypeVar("F", bound=Callable[..., Any])
WHAT: dict[Any, str] = {
    NoneType: "None",
    str: "a string",
    bool: "True or False",
    int: "a whole number",
    Path: "a path",
    Mapping: "a dictionary",
    tuple[str, ...]: "a tuple of strings",
    Callable: "a function",
}


def checked(function: F) -> F:
    """Check, in each call, the arguments with an annotation that `WHAT` lists, or with a `Literal`.

    Python checks no annotations. Without this check, `policy_gradient="no"` would count as True, and a name that is a
    number would fail far from its cause.
    """
    signature, where = inspect.signature(function), function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.cache
    def hints() -> dict[str, Any]:
        found = get_type_hints(function)
        return {name: found[name] for name in signature.parameters if name in found and is_known(found[name])}

    @functools.wraps(function)
    def checked_call(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind_partial(*args, **kwargs).arguments
        except TypeError:
            return reject_call(function, args, kwargs)
        for name in hints().keys() & given.keys():
            several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
            for value in given[name] if several else (given[name],):
                check_as(where, name, value, hints()[name])
        return function(*args, **kwargs)

    return checked_call  # type: ignore[return-value]


def check_as(where: str, name: str, value: Any, hint: Any) -> None:
    """Raise unless a value is of a type that `WHAT` lists, one of the words of a `Literal`, or of a union of these."""
    kinds = _alternatives(hint)
    if any(_admits(kind, value) for kind in kinds):
        return
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    types = [WHAT[kind] for kind in kinds if kind in WHAT]
    allowed = f"one of {', '.join([*map(repr, words), *types])}" if words else " or ".join(types)
    remedy = f": write ({value!r},)" if isinstance(value, str) and tuple[str, ...] in kinds else ""
    if int in kinds and isinstance(value, float) and value.is_integer():
        remedy = f": write {int(value)}"
    error = UserValueError if words else UserTypeError
    raise error(f"must be {allowed}, got {value!r:.200}{remedy}", where=where, argument=name)


def is_known(hint: Any) -> bool:
    """Return whether `check_as` can check this type."""
    return all(kind in WHAT or get_origin(kind) is Literal for kind in _alternatives(hint))


@functools.cache
def _alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types that a hint admits, without the arguments of dictionaries and functions."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(origin if (origin := get_origin(kind)) in (Mapping, Callable) else kind for kind in kinds)


def is_string_tuple(value: Any) -> bool:
    """Return whether a value is a tuple or list of strings."""
    return isinstance(value, (tuple, list)) and all(isinstance(x, str) for x in value)


def _admits(kind: Any, value: Any) -> bool:
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if kind == tuple[str, ...]:
        return is_string_tuple(value)
    if kind is int:
        return is_whole(value)
    return isinstance(value, (bool, np.bool_) if kind is bool else kind)
