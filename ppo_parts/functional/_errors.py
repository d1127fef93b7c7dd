"""Errors whose messages name the value and the remedy."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any


class UserError(Exception):
    """An error in the caller's input, whose message names the value and the remedy.

    Command lines print it as one sentence, without a traceback, and name the flag in place of the argument.

    Args:
        message: what is wrong, and the remedy.
        where: the function or class that rejects its input.
        argument: the name of the argument that is rejected.

    Example:
        >>> str(UserValueError("must lie in [0, 1], got 2.0", where="gae", argument="gamma"))
        'gae: gamma must lie in [0, 1], got 2.0'
    """

    def __init__(self, message: str = "", *, where: str = "", argument: str = "") -> None:
        self.message, self.where, self.argument = message, where, argument
        super().__init__(": ".join(filter(None, (where, " ".join(filter(None, (argument, message)))))))


class UserValueError(UserError, ValueError):
    """An argument has an invalid value."""


class UserTypeError(UserError, TypeError):
    """An argument has an invalid type."""


class ShapeError(UserValueError, AssertionError):
    """Array shapes do not match; arrays are never broadcast to make them match."""


def did_you_mean(name: str, known: Iterable[str], most: int = 1) -> str:
    """Return the end of a message about an unknown name, which suggests the most similar known names, ignoring case."""
    lowered = {each.lower(): each for each in known}
    if name in ("done", "dones") and "terminated" in lowered:
        return ": pass terminated, and truncated for time limits"
    near = difflib.get_close_matches(name.lower(), lowered, n=most)
    near = near or [each for each in lowered if len(name) > 2 and name.lower() in each][:most]
    return f"; did you mean {' or '.join(repr(lowered[each]) for each in near)}?" if near else ""


def reject_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Make an invalid call so that Python raises its error, and add a remedy: a similar name, or naming arguments."""
    try:
        return function(*args, **kwargs)
    except TypeError as error:
        known = inspect.signature(function).parameters
        unknown = next((name for name in kwargs if name not in known), "")
        nearest = "" if "Did you mean" in str(error) else did_you_mean(unknown, known)  # Python 3.13 adds it itself
        positional = sum(x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD) for x in known.values())
        named = [f"{name}=..." for name, x in known.items() if x.kind is x.KEYWORD_ONLY]
        if 0 < (more := len(args) - positional) <= len(named):
            nearest = f": name them, as in {', '.join(named[:more])}"
        raise UserTypeError(f"{error}{nearest}") from None
