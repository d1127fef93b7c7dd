"""Errors in how the library is used; each is a `UserError`, and a `ValueError` or `TypeError` as well."""

from ._base.errors import MissingPackage as MissingPackage
from ._base.errors import ShapeError as ShapeError
from ._base.errors import UserError as UserError
from ._base.errors import UserTypeError as UserTypeError
from ._base.errors import UserValueError as UserValueError
