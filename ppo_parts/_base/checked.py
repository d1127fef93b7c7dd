"""A decorator that checks the arguments of public functions against their annotations."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from ..functional._arguments import check_as, is_known
from ..functional._common import Range
from ..functional._errors import reject_call
from .hyperparameters import check_count

F = TypeVar("F", bound=Callable[..., Any])
Count = Annotated[int, Range(1)]
"""The annotation of an integer of at least 1."""


def checked(function: F) -> F:
    """Make a function check the arguments whose annotations `check_as` knows.

    Python does not check annotations. Without this, `policy_gradient="no"` would count as True, and a name that is a
    number would fail far from its cause.
    """
    signature, where = inspect.signature(function), function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.cache
    def hints() -> dict[str, tuple[Any, bool]]:
        """Return the annotation of each checked argument, and whether it is a `Count`."""
        found, declared = get_type_hints(function), get_type_hints(function, include_extras=True)
        names = [name for name in signature.parameters if name in found and is_known(found[name])]
        return {name: (found[name], Count in (declared[name], *get_args(declared[name]))) for name in names}

    @functools.wraps(function)
    def checked_call(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind_partial(*args, **kwargs).arguments
        except TypeError:
            return reject_call(function, args, kwargs)
        for name in filter(hints().get, given):
            hint, counts = hints()[name]
            several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
            for value in given[name] if several else (given[name],):
                check_as(where, name, value, hint)
                if counts and not isinstance(value, str | None):
                    check_count(where, name, value)
        return function(*args, **kwargs)

    return checked_call  # type: ignore[return-value]
