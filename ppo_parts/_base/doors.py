"""The check of arguments against their annotations, when a public function is called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

from ..functional._arguments import check_as, is_known
from ..functional._errors import reject_call

F = TypeVar("F", bound=Callable[..., Any])


def checked(function: F) -> F:
    """Check, in each call, the arguments with an annotation that `check_as` knows.

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
