"""Recipes: which one a run records, whether that may be imported, and `load`, which makes a run of it again."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from .._base.doors import checked
from .._base.errors import UserTypeError, UserValueError
from ._files import Row, column
from ._folder import RunFolder, recipe_of, stored_config
from ._train import Train, TrainState

RECIPES = "ppo_parts.recipes"
"""The package whose modules a run may name as its recipe; the user has to trust any other."""


def recipe(make_train: Callable[..., Train]) -> Callable[..., Train]:
    """Decorate the `make_train` of a module, so that runs record whether the module can make them again.

    A run that was given more than the configuration, such as an environment of your own, records no recipe: otherwise
    `load` and the commands would play the configured environment in its place. They ask for a `make_train` instead.
    """

    @functools.wraps(make_train)
    def make(config: Any, *own: Any, **named: Any) -> Train:
        alone = all(x is None for x in (*own, *named.values()))
        return make_train(config, *own, **named).of_recipe(recipe_of(make_train) if alone else None)

    return make


class LoadedRun(NamedTuple):
    """A run after `update` updates.

    Attributes:
        config: its configuration.
        train: the result of `make_train(config)`.
        state: the whole state; with several seeds, the seeds are its first axis.
        metrics: every metric up to this update by name, `[update]` or `[update, seeds]`; NaN where it was not measured
            or its row is lost. Empty if the whole log is lost.
        update: number of updates.
    """

    config: Any
    train: Train
    state: TrainState
    metrics: dict[str, np.ndarray]
    update: int


@checked
def load(
    folder: str | Path,
    make_train: Callable[[Any], Train] | None = None,
    *,
    checkpoint: Literal["latest", "best"] | int = "latest",
    trust: bool = False,
) -> LoadedRun:
    """Load a run from its folder. The folder is only read, and another process may be writing to it.

    A lost or damaged `metrics.jsonl` causes only a warning, because the policy does not depend on it.

    Args:
        folder: folder of the run.
        make_train: the recipe's function; the annotation of its argument names the class of the configuration. None:
            the `make_train` of the module that `config.json` names.
        checkpoint: the latest, the best (of a run with a `best_metric`), or the number of an update.
        trust: whether `config.json` may choose what is imported: a recipe outside `ppo_parts.recipes`, or the module
            of an environment like "gym:module:Env-v0", that is not imported yet.

    Returns:
        `LoadedRun`.

    Raises:
        FileNotFoundError: the run or the checkpoint does not exist.
        ValueError: the run does not belong to this recipe; the message names the difference. Or its recipe cannot be
            imported.
    """
    run = RunFolder(Path(folder))
    check_trusted(run.stored, run.path, trust, recipe=make_train is None)
    if make_train is None:
        make_train = import_recipe(run.stored.get("recipe"), run.path)
    config = stored_config(config_type(make_train), run.stored)
    train = make_train(config)
    update, state = run.restore(train, checkpoint)
    rows: list[Row] = [{}] * update
    for row, _ in run.rows(update):
        rows[row["update"]] = row
    metrics = {name: column(rows, name) for name in sorted(set().union(*rows))}
    return LoadedRun(config, train, state, metrics, update)


def config_type(make_train: Callable[[Any], Train]) -> type:
    names = list(inspect.signature(make_train).parameters)
    while isinstance(make_train, functools.partial):
        make_train = make_train.func
    kind = typing.get_type_hints(make_train).get(names[0]) if names else None
    if not isinstance(kind, type):
        raise UserTypeError(
            "load: the argument of make_train has no annotation that says what the configuration is: "
            "write def make_train(config: Config)"
        )
    return kind


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
    if not hasattr(module, "make_train"):
        raise UserValueError(f"the recipe of {folder}, {name}, has no make_train: {remedy}")
    return module.make_train
