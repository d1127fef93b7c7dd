"""`config.json`: the configuration of a run, and its comparison with the one with which the run is continued."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from .. import __version__
from .._base.errors import UserValueError
from ._errors import RunNotFoundError
from ._files import parse_json, plain
from ._messages import logger
from ._options import RunOptions, kept_options
from ._recipe import recipe_of


def stored_run(folder: Path) -> dict[str, Any]:
    """Read `config.json`: config, run (options), versions, recipe, and the run it was continued from, if any."""
    path = folder / "config.json"
    try:
        stored = parse_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise RunNotFoundError(f"{folder} holds no run: {_why_no_run(folder)}") from None
    except ValueError as error:  # not JSON, or not text at all
        raise UserValueError(f"{path} cannot be read: {error}; {DAMAGED}") from None
    groups = {"config": dict, "run": dict, "versions": dict, "steps_per_update": int}
    wrong = [
        name for name, kind in groups.items() if not isinstance(stored, dict) or type(stored.get(name)) is not kind
    ]
    if not wrong:
        wrong = ["num_seeds"] * ("num_seeds" not in stored["run"])
        source = stored.get("continued_from", {"folder": "", "update": 0})
        valid = isinstance(source, dict) and isinstance(source.get("folder"), str) and type(source.get("update")) is int
        wrong += ["continued_from"] * (not valid) + ["jax"] * (not isinstance(stored.get("jax", {}), dict))
    if wrong:
        raise UserValueError(f"{path} is damaged: it has no valid {wrong[0]}; {DAMAGED}")
    return stored


def _why_no_run(folder: Path) -> str:
    """Return what is there instead; of a folder that does not exist, the runs beside it."""
    if folder.exists():
        return "it has no config.json" if folder.is_dir() else "it is not a folder"
    runs = sorted(path.parent.name for path in folder.parent.glob("*/config.json"))
    return "there is no such folder" + (f"; {folder.parent} has {', '.join(runs[-8:])}" if runs else "")


DAMAGED = "the checkpoints are not affected: write the file of a run with the same configuration in its place"


def stored_config(kind: type, stored: Mapping[str, Any]) -> Any:
    """Return the configuration of a run as an instance of its dataclass."""
    fields = {field.name for field in dataclasses.fields(kind)}
    if set(stored["config"]) != fields:
        differing = sorted(set(stored["config"]) ^ fields)
        named = ", ".join(differing[:3]) + f" and {len(differing) - 3} more" * (len(differing) > 3)
        raise UserValueError(
            f"the run is of another recipe, or of another version of it: it records {stored.get('recipe')}, and fields "
            f"differ ({named}): use the version that made it, or edit these fields in config.json"
        )
    return kind(**{name: tuple(x) if isinstance(x, list) else x for name, x in stored["config"].items()})


def describe(config: Any, options: RunOptions, steps_per_update: int, recipe: str | None) -> dict[str, Any]:
    """Describe a new run for `config.json`; raise if JSON cannot represent the configuration or the options."""
    own = {"config": plain(dataclasses.asdict(config)), "run": kept_options(options)}
    whole = {**own, "steps_per_update": steps_per_update, "recipe": recipe or recipe_of(type(config))}
    stored = json.loads(json.dumps(plain(whole), default=str))
    for where, given, back in (
        ("config", config, stored_config(type(config), stored)),
        ("run", options, dataclasses.replace(options, **stored["run"])),
    ):
        for field in dataclasses.fields(given):
            if getattr(back, field.name) != (value := getattr(given, field.name)):
                raise UserValueError(
                    f"{value!r} could not be read back from config.json: use numbers that are finite, strings, None, "
                    "and tuples of them", where=where, argument=field.name,
                )  # fmt: skip
    return {**whole, "versions": versions(), "jax": jax_settings()}


def changes(stored: Mapping[str, Any], config: Any, options: RunOptions) -> dict[str, tuple[Any, Any]]:
    """Return the changed fields of the configuration (and `num_seeds`), with their old and their new values."""
    now = {**json.loads(json.dumps(plain(dataclasses.asdict(config)))), "num_seeds": options.num_seeds}
    then = {**stored["config"], "num_seeds": stored["run"]["num_seeds"]}
    return {
        name: (then.get(name, "(absent)"), now.get(name, "(absent)"))
        for name in {**then, **now}
        if name not in then or name not in now or then[name] != now[name]
    }


def listed(changed: Mapping[Any, tuple[Any, Any]]) -> str:
    """List changed fields for a message."""
    return "; ".join(f"{name} was {was!r}, is {now!r}" for name, (was, now) in changed.items())


def check_recipe(stored: Mapping[str, Any], recipe: str | None) -> None:
    """Raise unless a run is resumed with its own recipe; None passes."""
    own = str(stored.get("recipe", recipe))
    if recipe is not None and own.rpartition(".")[2] != recipe.rpartition(".")[2]:  # a package may have moved
        raise UserValueError(
            f"the run records the recipe {own}, and a resumed run keeps its recipe, got {recipe}: resume it with "
            f"python -m {own}; but if {recipe} made it (older versions recorded the module of its Config), or the "
            f'module was renamed, set "recipe" to "{recipe}" in config.json'
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
    before = stored["versions"]
    updated = [f"{name} {before.get(name)} (now {x})" for name, x in versions().items() if before.get(name) != x]
    then, now = stored.get("jax", {}), jax_settings()
    updated += [f"{name}={then[name]} (now {now[name]})" for name in ROUNDING if then.get(name, now[name]) != now[name]]
    if updated:
        logger.warning(f"begun with {', '.join(updated)}: the last bits may differ")


SHAPING = ("jax_enable_x64", "jax_default_prng_impl")
ROUNDING = ("jax_threefry_partitionable", "jax_default_matmul_precision")
"""JAX's settings that change the arrays of a state, and those that change only numbers."""


def jax_settings() -> dict[str, Any]:
    """Return the settings of JAX that affect the state and the numbers of a run."""
    return {name: getattr(jax.config, name) for name in (*SHAPING, *ROUNDING)}


def check_jax_settings(stored: Mapping[str, Any]) -> None:
    """Raise if a setting of JAX is not the one with which the arrays of a run were made."""
    before, now = stored.get("jax", {}), jax_settings()
    for name in SHAPING:
        if name in before and before[name] != now[name]:
            raise UserValueError(
                f"the run was made with {name}={before[name]!r}, and it is {now[name]!r} now: set "
                f"{name.upper()}={before[name]}, or call jax.config.update({name!r}, {before[name]!r}) first"
            )


def digest(stored: Mapping[str, Any]) -> str:
    """Hash the configuration and the number of seeds, to mark the checkpoints made with them."""
    made_from = [stored["config"], stored["run"]["num_seeds"]]
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that affect the numbers of a run."""
    found = {"python": platform.python_version(), "ppo_parts": __version__}
    for name in ("jax", "jaxlib", "optax", "flax", "gymnax", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
