"""Errors in the use of the library; each is a `UserError`, and also a `ValueError` or `TypeError`."""

from __future__ import annotations

from .functional._errors import ShapeError as ShapeError
from .functional._errors import UserError as UserError
from .functional._errors import UserTypeError as UserTypeError
from .functional._errors import UserValueError as UserValueError


class MissingPackage(UserError, ImportError):
    """An optional package is needed but not installed; the message names the extra that installs it."""


for _error in (UserError, UserValueError, UserTypeError, ShapeError):
    _error.__module__ = __name__  # the public module, so that tracebacks show the public name
