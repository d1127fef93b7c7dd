"""`config.json`: the configuration of a run, and its comparison with the one with which the run is continued."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from .. import __version__
from .._base.errors import UserValueError
from ._files import plain
from ._messages import RunNotFoundError, logger
from ._options import RunOptions, kept_options
from ._train import Train

JAX_SETTINGS = (
    *("jax_enable_x64", "jax_default_prng_impl"),  # they change the arrays of a state
    *("jax_threefry_partitionable", "jax_default_matmul_precision"),
)


def stored_run(folder: Path) -> dict[str, Any]:
    """Read `config.json`: config, run (options), versions, recipe, and the run it was continued from, if any."""
    path = folder / "config.json"
    try:
        stored = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        what = "it has no config.json" if folder.is_dir() else "there is no such folder"
        beside = [] if folder.is_dir() else sorted(found.parent.name for found in folder.parent.glob("*/config.json"))
        there = f"; {folder.parent} has {', '.join(beside[-8:])}" if beside else ""
        raise RunNotFoundError(f"{folder} holds no run: {what}{there}") from None
    except (ValueError, RecursionError) as error:
        raise UserValueError(f"{path} cannot be read: {error}") from None
    kinds = {"config": dict, "run": dict, "versions": dict, "steps_per_update": int}
    wrong = [name for name, kind in kinds.items() if not isinstance(stored, dict) or type(stored.get(name)) is not kind]
    if wrong or "num_seeds" not in stored["run"]:
        raise UserValueError(
            f"{path} is damaged: it has no valid {(*wrong, 'num_seeds')[0]}; the checkpoints are not affected: write "
            "the file of a run with the same configuration in its place"
        )
    return stored


def stored_config(kind: type, stored: Mapping[str, Any]) -> Any:
    fields = {field.name for field in dataclasses.fields(kind)}
    if set(stored["config"]) != fields:
        differing = sorted(set(stored["config"]) ^ fields)
        named = ", ".join(differing[:3]) + f" and {len(differing) - 3} more" * (len(differing) > 3)
        raise UserValueError(
            f"the run is of another recipe, or of another version of it: it records {stored.get('recipe')}, and fields "
            f"differ ({named}): use the version that made it, or edit these fields in config.json"
        )
    return kind(**{name: tuple(x) if isinstance(x, list) else x for name, x in stored["config"].items()})


def recipe_of(defined: Any) -> str:
    """Return the name of the module that defines a function or a class, as it can be imported later."""
    name = None
    while isinstance(defined, functools.partial):
        if defined.args or defined.keywords:  # another function, which the program that runs defines
            name = "__main__"
        defined = defined.func
    name = name or defined.__module__
    if name != "__main__":
        return name
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:  # python -m ppo_parts.recipes.cleanrl_ppo
        return spec.name
    return name if file is None else Path(file).stem  # python my_recipe.py


def recipe(make_train: Callable[..., Train]) -> Callable[..., Train]:
    """Decorate the `make_train` of a module, so that runs record whether the module can make them again.

    A run that was given more than the configuration, such as an environment of your own, records no recipe: otherwise
    `load` and the commands would play the configured environment in its place. They ask for a `make_train` instead.
    """

    @functools.wraps(make_train)
    def make(config: Any, *own: Any, **named: Any) -> Train:
        alone = all(x is None for x in (*own, *named.values()))
        return make_train(config, *own, **named).of_recipe(recipe_of(make_train) if alone else "")

    return make


def describe(config: Any, options: RunOptions, train: Train) -> dict[str, Any]:
    """Describe a new run for `config.json`; raise if JSON cannot represent the configuration."""
    stored = {
        "config": in_json(config),
        "steps_per_update": train.steps_per_update,
        "num_updates": train.num_updates,
        "recipe": recipe_of(type(config)) if train.recipe is None else train.recipe or None,
    }
    back = stored_config(type(config), stored)
    for field in dataclasses.fields(config):
        if getattr(back, field.name) != (value := getattr(config, field.name)):
            raise UserValueError(
                f"{value!r} could not be read back from config.json: use numbers that are finite, strings, None, and "
                "tuples of them",
                where="config",
                argument=field.name,
            )
    return {**stored, "run": kept_options(options), "versions": versions(), "jax": _jax_settings()}


def in_json(config: Any) -> dict[str, Any]:
    return json.loads(json.dumps(plain(dataclasses.asdict(config)), default=str))


def changes(stored: Mapping[str, Any], config: Any, options: RunOptions) -> dict[str, tuple[Any, Any]]:
    now = {**in_json(config), "num_seeds": options.num_seeds}
    then = {**stored["config"], "num_seeds": stored["run"]["num_seeds"]}
    pairs = {name: (then.get(name, "(absent)"), now.get(name, "(absent)")) for name in {**then, **now}}
    return {name: (was, is_now) for name, (was, is_now) in pairs.items() if was != is_now}


def listed(changed: Mapping[Any, tuple[Any, Any]]) -> str:
    return "; ".join(f"{name} was {was!r}, is {now!r}" for name, (was, now) in changed.items())


def check_recipe(stored: Mapping[str, Any], recipe: str | None) -> None:
    """Raise unless a run is resumed with its own recipe; None passes."""
    own = stored.get("recipe", recipe) or ""
    if recipe is None or own.rpartition(".")[2] == recipe.rpartition(".")[2]:  # a package may have moved
        return
    if not own or not recipe:
        raise UserValueError(
            f"the run records the recipe {own or None}, got {recipe or None}: a run with an environment, a chain or a "
            "policy of your own is resumed with the same ones, training.run(make_train(config, ...), config, options)"
        )
    raise UserValueError(
        f"the run records the recipe {own}, and a resumed run keeps its recipe, got {recipe}: resume it with "
        f'python -m {own}; if the module was renamed, set "recipe" to "{recipe}" in config.json'
    )


def check_unchanged(stored: Mapping[str, Any], config: Any, options: RunOptions, recipe: str | None) -> None:
    """Raise unless a run is resumed with its own configuration and recipe; warn about versions that have changed."""
    check_recipe(stored, recipe)
    if changed := changes(stored, config, options):
        raise UserValueError(
            f"a resumed run keeps its configuration; {listed(changed)}. A new run with --init-from starts from "
            "its state and may have other settings, except for env_id, seed, num_seeds, num_envs, num_steps and those "
            "that shape the network"
        )
    before, now = {**stored["versions"], **stored.get("jax", {})}, {**versions(), **_jax_settings()}
    if updated := [f"{name} {before.get(name)} (now {x})" for name, x in now.items() if before.get(name) != x]:
        logger.warning(f"begun with {', '.join(updated)}: the last bits may differ")


def _jax_settings() -> dict[str, Any]:
    return {name: getattr(jax.config, name) for name in JAX_SETTINGS}


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that affect the numbers of a run."""
    found = {"python": platform.python_version(), "ppo_parts": __version__}
    for name in ("jax", "jaxlib", "optax", "flax", "gymnax", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
