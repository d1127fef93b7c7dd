"""List the recipes and their presets."""

import importlib
import pkgutil
import sys
from collections.abc import Iterator

from ppo_parts import recipes


def list_recipes() -> Iterator[str]:
    """Yield one line for each recipe and one for each of its presets."""
    line = "  --preset {:<18}{:<55}{:>12,} steps"
    for found in pkgutil.iter_modules(recipes.__path__):
        if found.name.startswith("_") or found.ispkg:  # a package is not a program
            continue
        recipe = importlib.import_module(f"ppo_parts.recipes.{found.name}")
        title, *_ = (recipe.__doc__ or "").splitlines()
        yield f"python -m ppo_parts.recipes.{found.name}: {title}"
        for name, config in recipe.PRESETS.items():
            yield line.format(name, config.env_id, config.total_timesteps)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1:] not in (["--help"], ["-h"]):
        name = "NAME" if sys.argv[1].startswith("-") else sys.argv[1]
        remedy = f"to train, write python -m ppo_parts.recipes.{name}"
        raise SystemExit(f"error: python -m ppo_parts.recipes lists the recipes, and takes no arguments: {remedy}")
    print("\n".join(list_recipes()))
    print("Each has its own --help. --env-id and the other options modify a preset; the first preset is the default.")
