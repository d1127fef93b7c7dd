"""Optional packages, without which the core works, and which are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import MissingPackage
from .checked import checked


@checked
def require_package(name: str, extra: str) -> Any:
    """Import a module, such as "orbax.checkpoint", of a package that an extra of `ppo_parts` installs.

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
