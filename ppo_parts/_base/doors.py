"""The check of words and switches, at the door of each public function that takes them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from .errors import UserTypeError, UserValueError

F = TypeVar("F", bound=Callable[..., Any])
WHAT = {str: "text", bool: "True or False", NoneType: "None"}


def checked(function: F) -> F:
    """Check, in each call, the arguments that are annotated `str`, `bool` or `Literal`, alone or with None.

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
    """Return the types that a hint admits, with other types than words and switches as `object`."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(kind if kind in WHAT or get_origin(kind) is Literal else object for kind in kinds)


def _check(where: str, name: str, value: Any, kinds: tuple[Any, ...]) -> None:
    words = tuple(word for kind in kinds for word in get_args(kind))
    switch = bool in kinds and isinstance(value, np.bool_)
    if switch or isinstance(value, tuple(kind for kind in kinds if kind in WHAT)):
        return
    if isinstance(value, str) and value in words:
        return
    allowed = " or ".join([*map(repr, words), *(WHAT[kind] for kind in kinds if kind in WHAT)])
    raise (UserValueError if words else UserTypeError)(f"must be {allowed}, got {value!r}", where=where, argument=name)
