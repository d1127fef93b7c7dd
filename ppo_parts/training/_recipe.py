"""The recipe of a run: the module whose `make_train` makes it."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .._base.errors import UserValueError


def recipe_of(defined: Any) -> str:
    """Return the name of the module that defines a function or a class, as it can be imported later."""
    while isinstance(defined, functools.partial):
        defined = defined.func
    name = defined.__module__
    if name != "__main__":
        return name
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:  # python -m recipes.cleanrl_ppo
        return spec.name
    return name if file is None else Path(file).stem  # python my_recipe.py


def import_recipe(name: Any, folder: Path) -> Callable[[Any], Any]:
    """Return the `make_train` of a module, which may be in the current folder.

    Args:
        name: name of the module; None if the run does not name one.
        folder: folder of the run, for messages.

    Raises:
        UserValueError: there is no such module, or it has no `make_train`.
    """
    remedy = "name the module of its recipe, --recipe my_module (or training.load(folder, make_train))"
    if not isinstance(name, str):
        raise UserValueError(f"{folder} does not say which recipe it is of: {remedy}")
    if os.getcwd() not in sys.path:  # as `python -m` does
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the recipe exists, but something that it imports does not
        raise UserValueError(
            f"the recipe of {folder}, {name}, cannot be imported from here: change to its folder, or {remedy}"
        ) from None
    make_train = getattr(module, "make_train", None)
    if make_train is None:
        raise UserValueError(f"the recipe of {folder}, {name}, has no make_train: {remedy}")
    return make_train
