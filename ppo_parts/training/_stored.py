"""The content of `config.json`, and the recipe that makes the run again."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import json
import os
import platform
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from .. import __version__
from .._core.pieces import count_cores
from ..errors import UserTypeError, UserValueError
from ..functional._errors import did_you_mean
from ._config import RunOptions, check_config
from ._files import RunNotFoundError, make_plain
from ._processes import logger
from ._train import Train

JAX_SETTINGS = ("jax_enable_x64", "jax_default_prng_impl", "jax_threefry_partitionable", "jax_default_matmul_precision")
"""JAX settings that change the arrays of a state, or the last bits of its numbers."""
NOT_KEPT = {"name", "directory", "resume", "init_from", "checkpoint", "progress"}
NOT_KEPT |= {"num_devices", "distributed", "heartbeat_timeout"}  # a run may be resumed on another machine
KEPT_ON_RESUME = tuple(field.name for field in dataclasses.fields(RunOptions) if field.name not in NOT_KEPT)
"""Options that a resumed run inherits; all except `num_seeds` may be given again."""


def read_options(stored: Mapping[str, Any]) -> RunOptions:
    """Return the options in the `config.json` of a run, after checking them."""
    if unknown := [name for name in stored["run"] if name not in KEPT_ON_RESUME]:
        hint = did_you_mean(unknown[0], KEPT_ON_RESUME) or ": use the version of ppo_parts that wrote it, or remove it"
        raise UserValueError(f"config.json: run has no option {unknown[0]!r}{hint}")
    options = RunOptions(**stored["run"])
    check_config(options, where="config.json: run")
    return options


def read_config(folder: Path) -> dict[str, Any]:
    """Read `config.json`: config, run (options), versions, recipe, and the run that it continues, if any."""
    path = folder / "config.json"
    try:
        stored = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        around = folder if folder.is_dir() else folder.parent
        runs = sorted(found.parent.name for found in around.glob("*/config.json"))
        there = f"; {around} has {', '.join([*['...'] * (len(runs) > 8), *runs[-8:]])}" if runs else ""
        raise RunNotFoundError(f"{folder} holds no run: it has no config.json{there}") from None
    except (ValueError, RecursionError) as error:
        raise UserValueError(f"{path} cannot be read: {error}") from None
    kinds = {"config": dict, "run": dict, "versions": dict, "steps_per_update": int}
    wrong = [name for name, kind in kinds.items() if not isinstance(stored, dict) or type(stored.get(name)) is not kind]
    if wrong or "num_seeds" not in stored["run"]:
        raise UserValueError(
            f"{path} is damaged: it has no valid {(*wrong, 'num_seeds')[0]}; replace it by the config.json of a "
            "run with the same configuration"
        )
    return stored


def restore_config(kind: type, stored: Mapping[str, Any]) -> Any:
    fields = {field.name for field in dataclasses.fields(kind)}
    if set(stored["config"]) != fields:
        differing = sorted(set(stored["config"]) ^ fields)
        named = ", ".join(differing[:3]) + f" and {len(differing) - 3} more" * (len(differing) > 3)
        raise UserValueError(
            f"the run is of another recipe, or of another version of it: it records {stored.get('recipe')}, and fields "
            f"differ ({named}): use the command of this recipe, or the version that made it"
        )
    return kind(**{name: tuple(x) if isinstance(x, list) else x for name, x in stored["config"].items()})


def name_recipe(defined: Any) -> str:
    """Return the name under which the module that defines a function or class can be imported later."""
    name = "__main__" if isinstance(defined, functools.partial) else defined.__module__
    if name != "__main__":
        return name
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)  # for `python -m ppo_parts.recipes.cleanrl_ppo`
    return Path(getattr(main, "__file__", name)).stem if spec is None else spec.name


def describe_run(config: Any, train: Train) -> dict[str, Any]:
    """Return the `config.json` of a new run, without its options; raise if JSON cannot represent the configuration."""
    check_encodable(config)
    return {
        "config": encode_config(config),
        "steps_per_update": train.steps_per_update,
        "num_updates": train.num_updates,
        "recipe": train.recipe,
        "versions": read_versions(),
    }


def check_encodable(config: Any) -> None:
    """Raise if JSON cannot represent the configuration."""
    back = restore_config(type(config), {"config": encode_config(config)})
    for field in dataclasses.fields(config):
        if getattr(value := getattr(config, field.name), "shape", ()) or getattr(back, field.name) != value:
            flatten = "make its fields those of Config, or " * dataclasses.is_dataclass(value)
            says = f"{value!r} cannot be stored in config.json: {flatten}use finite numbers, strings, None, and tuples "
            raise UserValueError(f"{says}or dicts of them", where="config", argument=field.name)


def encode_config(config: Any) -> dict[str, Any]:
    return json.loads(json.dumps(make_plain(dataclasses.asdict(config)), default=str))


def find_changes(stored: Mapping[str, Any], config: Any, options: RunOptions) -> dict[str, tuple[Any, Any]]:
    now = {**encode_config(config), "num_seeds": options.num_seeds}
    return compare_settings({**stored["config"], "num_seeds": stored["run"]["num_seeds"]}, now)


def compare_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    pairs = {name: (then.get(name, "(absent)"), now.get(name, "(absent)")) for name in {**then, **now}}
    return {name: (was, is_now) for name, (was, is_now) in pairs.items() if was != is_now}


def format_changes(changed: Mapping[Any, tuple[Any, Any]]) -> str:
    return "; ".join(f"{name} was {was!r}, is {now!r}" for name, (was, now) in changed.items())


def check_made_from(train: Train, config: Any) -> None:
    """Raise if a run was made from a configuration that differs in more than its seed and the name of a custom env."""
    if train.config is not None:
        free = {"seed": 0} if train.recipe else {"seed": 0, "env_id": ""}
        made, given = (encode_config(each) | free for each in (train.config, config))
        if changed := compare_settings(made, given):
            remedy = "make the run again; if your own make_train changes its config, decorate it with training.recipe"
            says = f"must be the one that make_train was given; {format_changes(changed)}: {remedy}"
            raise UserValueError(says, where="run", argument="config")


def check_recipe(stored: Mapping[str, Any], recipe: str | None) -> None:
    """Raise unless a run is resumed with its own recipe."""
    if (own := stored.get("recipe")) != recipe:
        raise UserValueError(
            f"the run was made by the recipe {own}, and this is {recipe}: resume it with the module, or with the "
            'environment, chain or policy of your own, that made it; if the module was renamed, change "recipe" in '
            "config.json"
        )


def check_unchanged(stored: Mapping[str, Any], config: Any, options: RunOptions, recipe: str | None) -> None:
    """Raise unless a run is resumed with its own configuration and recipe; warn about changed versions."""
    check_recipe(stored, recipe)
    if changed := find_changes(stored, config, options):
        raise UserValueError(
            f"a resumed run keeps its configuration; {format_changes(changed)}. A new run with --init-from starts from "
            "its state and may have other settings, except for env_id, seed, num_seeds, num_envs, num_steps and those "
            "that shape the network"
        )
    pairs = ({name: getattr(x, name) for name in KEPT_ON_RESUME} for x in (read_options(stored), options))
    if changed := compare_settings(*pairs):
        logger.warning(f"options that differ from those of the run: {format_changes(changed)}")
    if changed := compare_settings(stored["versions"], read_versions()):
        logger.warning(f"results may differ in the last bits from those of the run: {format_changes(changed)}")


def read_versions() -> dict[str, Any]:
    """Return what affects the last bits of a run: package versions, JAX settings, and whether there is one core."""
    found = {"python": platform.python_version(), "ppo_parts": __version__, "one_core": count_cores() == 1}
    found |= {name: getattr(jax.config, name) for name in JAX_SETTINGS}
    for name in ("jax", "jaxlib", "optax", "flax", "gymnax", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def recipe(make_train: Callable[..., Train]) -> Callable[..., Train]:
    """Decorate the `make_train` of a module, so that configurations are checked and runs record their recipe.

    `training.main` does the same. If a run was given more than the configuration, such as your own environment, it
    records no recipe, because `load` and the commands would play the configured environment instead.
    """

    @functools.wraps(make_train)
    def make(config: Any, *own: Any, **named: Any) -> Train:
        check_config(config)
        alone = all(x is None for x in (*own, *named.values()))
        if alone:
            find_config_type(make_train)  # raises if the run could not be loaded later
        made = make_train(config, *own, **named)
        if made is None:
            raise UserTypeError("make_train must return a training.Train, got None: return training.Train.of(...)")
        train = copy.copy(made)  # frozen, and `dataclasses.replace` would trace it
        object.__setattr__(train, "recipe", name_recipe(make_train) if alone else None)
        object.__setattr__(train, "config", config)
        return train

    return make


def find_config_type(make_train: Callable[[Any], Train]) -> type:
    names = list(inspect.signature(make_train).parameters)
    kind = typing.get_type_hints(getattr(make_train, "func", make_train)).get(names[0]) if names else None
    if not isinstance(kind, type):
        raise UserTypeError("make_train must say what its configuration is: def make_train(config: Config)")
    return kind


def check_trusted(stored: Mapping[str, Any], folder: Path, trust: bool, *, recipe: bool = True) -> None:
    """Raise if loading a run would import a module that its `config.json` chooses, unless the folder is trusted.

    Such modules are a recipe outside `ppo_parts.recipes` (unless `recipe=False`, which imports no recipe), and the
    module in an `env_id` like "gym:module:Env-v0". A module that is already imported runs nothing new.
    """
    named, env_id = stored.get("recipe"), stored["config"].get("env_id")
    module, colon, _ = str(env_id).partition(",")[0].partition(":")[2].partition(":")
    chosen = {f"the environment {env_id}": module} if colon else {}
    if recipe and isinstance(named, str) and not named.startswith("ppo_parts.recipes."):
        chosen[f"the recipe {named}"] = named
    for what, module in chosen.items():
        if not trust and module not in sys.modules:
            or_name_it = ", or name the module of the recipe yourself, --recipe my_module" if module == named else ""
            raise UserValueError(
                f"{folder} asks for {what}, whose code would be imported and run: if you trust it, pass --trust "
                f"(trust=True){or_name_it}"
            )


def import_recipe(name: Any, folder: Path) -> Callable[[Any], Any]:
    """Return the `make_train` of the module that a run in `folder` names; it may be in the current folder."""
    remedy = "name the module of its recipe, --recipe my_module (or training.load(folder, make_train))"
    if not isinstance(name, str) or name.endswith(".py") or not all(map(str.isidentifier, name.split("."))):
        if (path := Path(str(name))).suffix == ".py":
            outside = path.is_absolute() or ".." in path.parts
            called = path.stem if outside else ".".join(path.with_suffix("").parts)
            remedy = f"add {path.parent} to PYTHONPATH, and " * outside + f"write --recipe {called}"
        raise UserValueError(f"the recipe of {folder}, {name!r}, is not the name of a module: {remedy}")
    if os.getcwd() not in sys.path:  # as `python -m` does
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the recipe exists, but something that it imports does not
        raise UserValueError(
            f"the recipe of {folder}, {name}, cannot be imported from here: change to its folder, add it to "
            f"PYTHONPATH, or {remedy}"
        ) from None
    if not hasattr(module, "make_train"):
        raise UserValueError(f"the recipe of {folder}, {name}, has no make_train: {remedy}")
    return module.make_train
