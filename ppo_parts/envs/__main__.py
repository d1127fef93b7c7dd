"""Check an environment: `python -m ppo_parts.envs check brax:ant`, or `my_module:my_env`."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys

from .._base.command_line import seed
from .._base.errors import ShapeError, UserError, UserTypeError, UserValueError
from .._base.hyperparameters import check_takes
from ._callback import host_errors
from ._env import Env
from ._laws import check_laws
from ._registry import make, prefixes, split_id


def is_importable(module: str) -> bool:
    """Return whether the package of a module is there, without importing it."""
    package = module.partition(".")[0]
    return package != "" and importlib.util.find_spec(package) is not None


def load(name: str) -> Env:
    """Make the environment "prefix:name", or import "module:attribute": an `Env`, or a function that returns one."""
    prefix, attribute = split_id(name)
    sys.path.insert(0, os.getcwd())
    if prefix in prefixes():
        try:
            return make(name)
        except UserValueError as error:
            if ":" in name or not is_importable(name):
                raise
            raise UserValueError(f"{name} is a module: write {name}:<an environment or a function in it>") from error
    if not is_importable(prefix):
        raise UserValueError(
            f"{prefix!r} is neither a module that can be imported from here nor one of the prefixes "
            f"{', '.join(prefixes())}"
        )
    if (env := getattr(importlib.import_module(prefix), attribute, None)) is None:
        raise UserValueError(f"the module {prefix} has no {attribute}")
    if callable(env) and not isinstance(env, type):
        check_takes("check", attribute, env, ())
        env = env()
    if not isinstance(env, Env):
        raise UserTypeError(
            f"must be an envs.Env or a function that returns one, got {env!r:.200}: register a Gymnasium class and "
            f"check gym:{prefix}:<its id>, or return envs.from_gymnasium(...) from a function"
        )
    return env


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; a broken law ends it with one sentence and exit status 1."""
    parser = argparse.ArgumentParser(prog="python -m ppo_parts.envs", description=__doc__)
    parser.add_argument("command", choices=["check"], help="play an environment, and check that it follows the laws")
    parser.add_argument("env", help='an id, "brax:ant", or "module:attribute", an Env or a function that returns one')
    parser.add_argument("--num-envs", type=int, default=4, help="environments to play (default: 4)")
    parser.add_argument("--num-steps", type=int, default=1000, help="steps of each environment (default: 1000)")
    parser.add_argument("--seed", type=seed, default=0, help="seed of the random actions (default: 0)")
    options = parser.parse_args(arguments)
    try:
        with host_errors():
            env = load(options.env)
            report = check_laws(env, num_envs=options.num_envs, num_steps=options.num_steps, seed=options.seed)
    except (UserError, ShapeError) as error:
        raise SystemExit(f"error: {options.env}: {error}") from error
    for law in report.laws:
        print(f"ok    {law}")
    print(f"{report.episodes} episodes ended: {report.terminated} terminated, {report.truncated} truncated")
    for note in report.notes:
        print(f"note: {note}")


if __name__ == "__main__":
    main()
