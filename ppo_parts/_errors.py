"""Errors whose message tells the user what to change."""

from __future__ import annotations


class UserError(Exception):
    """An error of the caller's making: the message names the value and the remedy.

    Command lines print it as one sentence, without a traceback. Catch the built-in base (`ValueError`, `TypeError`) or
    this class, as you prefer.
    """

    __module__ = "ppo_parts"  # where it is public, and so what a traceback calls it


class UserValueError(UserError, ValueError):
    """A value that cannot work."""

    __module__ = "ppo_parts"


class UserTypeError(UserError, TypeError):
    """A value of a type that cannot work."""

    __module__ = "ppo_parts"


class UserTimeoutError(UserError, TimeoutError):
    """Something of the caller's did not return in time."""

    __module__ = "ppo_parts"


class MissingPackage(UserError, ImportError):
    """An optional package is used and not installed; the message names the extra that installs it."""

    __module__ = "ppo_parts"
