"""Errors whose message tells the user what to change."""

from __future__ import annotations


class UserError(Exception):
    """An error of the caller's making: the message names the value and the remedy.

    Command lines print it as one sentence, without a traceback. Catch the built-in base (`ValueError`, `TypeError`) or
    this class, as you prefer.
    """


class UserValueError(UserError, ValueError):
    """A value that cannot work."""


class UserTypeError(UserError, TypeError):
    """A value of a type that cannot work."""


class MissingPackage(UserError, ImportError):
    """An optional package is used and not installed; the message names the extra that installs it."""


for _error in (UserError, UserValueError, UserTypeError, MissingPackage):
    _error.__module__ = "ppo_parts"  # where users import it from, and what tracebacks should say
