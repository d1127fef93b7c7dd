"""Errors whose message names the remedy."""

from __future__ import annotations


class UserError(Exception):
    """An error in the caller's input: the message names the value and the remedy.

    Command lines print it as one sentence, without a traceback. Catch the built-in base (`ValueError`, `TypeError`) or
    this class, as you prefer.
    """

    __module__ = "ppo_parts"  # the public module, so that tracebacks show the public name


class UserValueError(UserError, ValueError):
    """A value that cannot work."""

    __module__ = "ppo_parts"


class UserTypeError(UserError, TypeError):
    """A value of a type that cannot work."""

    __module__ = "ppo_parts"


class UserTimeoutError(UserError, TimeoutError):
    """The caller's code, such as an environment, did not return in time."""

    __module__ = "ppo_parts"


class MissingPackage(UserError, ImportError):
    """An optional package is needed but not installed; the message names the extra that installs it."""

    __module__ = "ppo_parts"
