"""Errors in the use of the library; each is a `UserError`, and also a `ValueError` or `TypeError`."""

from ._base.errors import MissingPackage as MissingPackage
from ._base.errors import ShapeError as ShapeError
from ._base.errors import UserError as UserError
from ._base.errors import UserTypeError as UserTypeError
from ._base.errors import UserValueError as UserValueError
