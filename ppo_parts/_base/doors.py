"""The check of words, switches, tuples of words and dictionaries, at the door of each public function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from .errors import UserTypeError, UserValueError

F = TypeVar("F", bound=Callable[..., Any])
WHAT: dict[Any, str] = {
    NoneType: "None",
    str: "a string",
    bool: "True or False",
    Mapping: "a dictionary",
    tuple[str, ...]: "a tuple of strings",
}


def checked(function: F) -> F:
    """Check, in each call, the arguments with an annotation that `WHAT` lists, or with a `Literal`.

    Python checks no annotations. Without this check, `replacement="no"` would count as True, and a name that is a
    number would fail far from its cause.
    """
    signature = inspect.signature(function)

    @functools.cache
    def hints() -> dict[str, tuple[Any, ...]]:
        found = {name: _alternatives(hint) for name, hint in get_type_hints(function).items() if name != "return"}
        return {name: kinds for name, kinds in found.items() if all(x in WHAT or get_args(x) for x in kinds)}

    @functools.wraps(function)
    def door(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind_partial(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # which raises Python's own error
        for name in hints().keys() & given.keys():
            several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
            for value in given[name] if several else (given[name],):
                _check(function.__name__, name, value, hints()[name])
        return function(*args, **kwargs)

    return door  # type: ignore[return-value]


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types that a hint admits; those that are not checked become `object`."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = tuple(Mapping if get_origin(kind) is Mapping else kind for kind in kinds)
    return tuple(kind if kind in WHAT or get_origin(kind) is Literal else object for kind in kinds)


def is_text_tuple(value: Any) -> bool:
    """Return whether a value is a tuple or list of strings."""
    return isinstance(value, (tuple, list)) and all(isinstance(x, str) for x in value)


def _admits(kind: Any, value: Any) -> bool:
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if kind == tuple[str, ...]:
        return is_text_tuple(value)
    return isinstance(value, (bool, np.bool_) if kind is bool else kind)


def _check(where: str, name: str, value: Any, kinds: tuple[Any, ...]) -> None:
    if any(_admits(kind, value) for kind in kinds):
        return
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    types = [WHAT[kind] for kind in kinds if kind in WHAT]
    allowed = f"one of {', '.join([*map(repr, words), *types])}" if words else " or ".join(types)
    remedy = f": write ({value!r},)" if isinstance(value, str) and tuple[str, ...] in kinds else ""
    error = UserValueError if words else UserTypeError
    raise error(f"must be {allowed}, got {value!r}{remedy}", where=where, argument=name)
