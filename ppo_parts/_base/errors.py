"""Errors whose messages name the remedy."""

from __future__ import annotations

from ..functional._errors import ShapeError as ShapeError
from ..functional._errors import UserError as UserError
from ..functional._errors import UserTypeError as UserTypeError
from ..functional._errors import UserValueError as UserValueError


class MissingPackage(UserError, ImportError):
    """An optional package is needed but not installed; the message names the extra that installs it."""


for _error in (UserError, UserValueError, UserTypeError, ShapeError, MissingPackage):
    _error.__module__ = "ppo_parts.errors"  # the public module, so that tracebacks show the public name
