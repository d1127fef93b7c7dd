"""The recipe of a run: the module whose `make_train` makes it."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .._base.errors import UserValueError

RECIPES = "ppo_parts.recipes"
"""The package whose modules a run may name as its recipe; others need the user's word."""


def recipe_of(defined: Any) -> str:
    """Return the name of the module that defines a function or a class, as it can be imported later."""
    while isinstance(defined, functools.partial):
        defined = defined.func
    name = defined.__module__
    if name != "__main__":
        return name
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:  # python -m ppo_parts.recipes.cleanrl_ppo
        return spec.name
    return name if file is None else Path(file).stem  # python my_recipe.py


def check_trusted(stored: Mapping[str, Any], folder: Path, trust: bool, *, recipe: bool = True) -> None:
    """Raise if loading a run would import a module that its `config.json` chooses, unless the user trusts the folder.

    Its recipe may be one of `ppo_parts.recipes`, and its environment one of a registered family, such as "brax:ant". A
    module that is already imported runs nothing new. `recipe` says whether the recipe is imported, too, and not only
    the module in an `env_id` like "gym:module:Env-v0".
    """
    named, env_id = stored.get("recipe"), stored["config"].get("env_id")
    module, colon, _ = str(env_id).partition(":")[2].partition(":")
    chosen = {f"the environment {env_id}": module} if colon else {}
    if recipe and isinstance(named, str) and not named.startswith(f"{RECIPES}."):
        chosen[f"the recipe {named}"] = named
    for what, module in chosen.items():
        if not trust and module not in sys.modules:
            or_name_it = ", or name the module of the recipe yourself, --recipe my_module" if recipe else ""
            raise UserValueError(
                f"{folder} asks for {what}, whose code would be imported and run: if you trust it, pass --trust "
                f"(trust=True){or_name_it}"
            )


def import_recipe(name: Any, folder: Path) -> Callable[[Any], Any]:
    """Return the `make_train` of the module that a run in `folder` names, which may be in the current folder."""
    remedy = "name the module of its recipe, --recipe my_module (or training.load(folder, make_train))"
    if not isinstance(name, str):
        raise UserValueError(f"{folder} does not say which recipe it is of: {remedy}")
    if not all(map(str.isidentifier, name.split("."))):
        raise UserValueError(f"{name!r} is not the name of a module, such as my_package.my_module: {remedy}")
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
