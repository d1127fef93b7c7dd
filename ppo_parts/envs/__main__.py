"""Check an environment: `python -m ppo_parts.envs check brax:ant`, or `my_module:my_env`."""

from __future__ import annotations

import argparse
import os
import pkgutil
import sys

from .._base.command_line import seed
from .._base.errors import ShapeError, UserError, UserValueError
from .._base.hyperparameters import check_takes
from ._callback import host_errors
from ._env import Env
from ._laws import check_laws
from ._registry import make, prefixes, split_id


def load(name: str) -> Env:
    """Make the environment "prefix:name", or import "module:attribute": an `Env`, or a function that returns one."""
    if split_id(name)[0] in prefixes():
        return make(name)
    sys.path.insert(0, os.getcwd())
    try:
        env = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserValueError(f"{error}; the prefixes of environments are {', '.join(prefixes())}") from error
    if callable(env) and not isinstance(env, type):
        check_takes("check", name, env, ())
        env = env()
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
