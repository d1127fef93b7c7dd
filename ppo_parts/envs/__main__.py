"""Check an environment from the command line: `python -m ppo_parts.envs check brax:ant`, or `my_module:my_env`."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys

from .._base.command_line import seed
from .._base.errors import UserError, UserTypeError, UserValueError
from .._base.hyperparameters import check_takes
from ..functional import ShapeError
from ._callback import host_errors
from ._env import Env
from ._laws import check_laws
from ._registry import make, prefixes, split_id


def load(name: str) -> Env:
    """Make the environment "prefix:name", or import "module:attribute": an `Env`, or a function that returns one."""
    prefix, attribute = split_id(name)
    sys.path.insert(0, os.getcwd())
    if prefix in prefixes():
        try:
            return make(name)
        except UserValueError as error:
            if ":" in name or importlib.util.find_spec(name) is None:
                raise
            raise UserValueError(f"{name} is a module: write {name}:<an environment or a function in it>") from error
    if importlib.util.find_spec(prefix.partition(".")[0]) is None:
        raise UserValueError(
            f"{prefix!r} is neither a module that can be imported from here nor one of the prefixes "
            f"{', '.join(prefixes())}"
        )
    if (found := getattr(importlib.import_module(prefix), attribute, None)) is None:
        raise UserValueError(f"the module {prefix} has no {attribute}")
    if isinstance(found, type):
        raise UserTypeError(
            f"must be an envs.Env or a function that returns one, got the class {attribute}: register a "
            f"Gymnasium class and check gym:{prefix}:<its id>, or return envs.from_gymnasium(...) from a function"
        )
    if callable(found):
        check_takes("check", attribute, found, ())
        found = found()
    if not isinstance(found, Env):
        raise UserTypeError(f"must be an envs.Env or a function that returns one, got {type(found).__name__}")
    return found


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; a broken law ends it with one sentence and exit status 1."""
    parser = argparse.ArgumentParser(prog="python -m ppo_parts.envs", description="Check environments.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="play an environment and check that it follows the laws of environments")
    check.add_argument("env", help='an id, "brax:ant", or "module:attribute", an Env or a function that returns one')
    check.add_argument("--num-envs", type=int, default=4, help="environments to play (default: 4)")
    check.add_argument("--num-steps", type=int, default=1000, help="steps of each environment (default: 1000)")
    check.add_argument("--seed", type=seed, default=0, help="seed of the random actions (default: 0)")
    given = parser.parse_args(arguments)
    try:
        with host_errors():
            seen = check_laws(load(given.env), num_envs=given.num_envs, num_steps=given.num_steps, seed=given.seed)
    except (UserError, ShapeError) as error:
        raise SystemExit(f"error: {given.env}: {error}") from error
    for law in seen.laws:
        print(f"ok    {law}")
    print(f"{seen.episodes} episodes ended: {seen.terminated} terminated, {seen.truncated} truncated")
    for note in seen.notes:
        print(f"note: {note}")


if __name__ == "__main__":
    main()
