"""Errors whose messages name the value and the remedy."""

from __future__ import annotations


class UserError(Exception):
    """An error in the caller's input: the message names the value and the remedy.

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
