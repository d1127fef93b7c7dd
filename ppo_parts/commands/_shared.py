"""Arguments and loading shared by the commands that read a trained run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from .._base.command_line import positive, seed
from ..envs import host_errors
from ..envs._registry import UnknownPrefixError
from ..errors import UserValueError
from ..training import LoadedRun, load
from ..training._processes import print_messages
from ..training._program import keep_compiled_programs
from ..training._stored import import_recipe
from ..training._train import vmap_over_seeds


def make_parser(
    prog: str, description: str, *, one_seed: bool = False, of: str = "folder of the run, such as runs/first"
) -> argparse.ArgumentParser:
    """Make a parser with arguments that select a run, one of its checkpoints, and perhaps one of its seeds."""
    parser = argparse.ArgumentParser(prog=f"python -m ppo_parts.{prog}", description=description, allow_abbrev=False)
    parser.add_argument("run", type=Path, help=of)
    which = '"latest" (default), "best", or the number of an update'
    parser.add_argument("--checkpoint", type=lambda x: int(x) if x.isdecimal() else x, default="latest", help=which)
    parser.add_argument("--recipe", help="module with the make_train of the run, instead of the one in config.json")
    imports = "import any recipe, and any environment's module, that config.json names"
    parser.add_argument("--trust", action="store_true", help=imports)
    if one_seed:
        parser.add_argument("--seed-index", type=int, default=0, help="which of several seeds, from 0 (default: 0)")
    return parser


def add_episodes(parser: argparse.ArgumentParser, default: int, of: str = "") -> None:
    """Add the arguments of commands that play episodes."""
    parser.add_argument("--episodes", type=positive, default=default, help=f"episodes{of} (default: {default})")
    parser.add_argument("--mode", action="store_true", help="play the mode of the policy's distribution, not samples")
    parser.add_argument("--seed", type=seed, default=0, help="seed for environments and actions (default: 0)")


def load_run(given: argparse.Namespace) -> LoadedRun:
    """Load the run that the arguments name, and let JAX keep the command's programs like a run's."""
    report(f"loading {given.run}")
    with print_messages():
        keep_compiled_programs()
    make_train = None if given.recipe is None else import_recipe(given.recipe, given.run)
    try:
        return load(given.run, make_train, checkpoint=given.checkpoint, trust=given.trust)
    except UnknownPrefixError as error:
        raise UserValueError(f"{error}: name the module that calls envs.register, --recipe my_module") from error


def report(what: str) -> None:
    """Report a slow step of a command on stderr, because stdout has its results."""
    print(what, file=sys.stderr, flush=True)


def compute_for_each_seed(run: LoadedRun, function: Callable[..., Any], *arguments: Any) -> Any:
    """Compute `function(*arguments, state)` for each seed of a run, as NumPy arrays."""
    with host_errors():
        return jax.device_get(jax.jit(vmap_over_seeds(function, run.state.key.size))(*arguments, run.state))


def select_seed(run: LoadedRun, index: int) -> Any:
    """Return the state of one seed of a run, or of its best member if it is a population."""
    seeds = run.state.key.size
    if not 0 <= index < seeds:
        raise UserValueError(f"--seed-index must lie in [0, {seeds}), the seeds of the run, got {index}")
    if seeds > 1:
        report(f"seed {index} of 0 to {seeds - 1} (--seed-index)")
    state = jax.tree.map(lambda x: x[index], run.state) if run.state.key.ndim else run.state
    return state.acting
