"""Optional packages: the core works without them, and each is imported when it is first used."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from .doors import checked
from .errors import MissingPackage


@checked
def require_package(name: str, extra: str) -> Any:
    """Import a module of an optional package.

    Args:
        name: the module, for example "orbax.checkpoint".
        extra: the extra of `ppo_parts` that installs its package.

    Returns:
        The module.

    Raises:
        MissingPackage: it is not installed, or something that it imports is not.

    Example:
        >>> require_package("absent", "envs")
        Traceback (most recent call last):
        ...
        ppo_parts.errors.MissingPackage: absent is not installed: install it with pip install "ppo_parts[envs]"
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package, missing = name.partition(".")[0], error.name or name
        absent = missing.partition(".")[0] == package
        what = f"{package} is not installed" if absent else f"{package} needs {missing}, which is not installed"
        raise MissingPackage(f'{what}: install it with pip install "ppo_parts[{extra}]"') from error


@contextlib.contextmanager
def deferred(*names: str) -> Iterator[None]:
    """Defer the import of these modules by modules that are imported in this context, until they use them.

    Packages of environments import libraries of plots, which take longer than all the rest, and training never draws.
    """
    stand_ins = {name: _Deferred(name) for name in names if name not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for module in stand_ins.values():
            module.step_aside()


class _Deferred(ModuleType):
    """A module that is imported when one of its attributes is first used."""

    def step_aside(self) -> None:
        """Let the next import of this name find the module itself."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]

    def __getattr__(self, attribute: str) -> Any:
        self.step_aside()
        return getattr(importlib.import_module(self.__name__), attribute)
