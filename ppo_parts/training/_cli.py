"""The command line of a recipe, made from the fields of its `Config` and of `RunOptions`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ._folder import stored_config, stored_run
from ._options import RunOptions, stored_options
from ._run import run
from ._train import Train


def main(
    make_train: Callable[[Any], Train], presets: Mapping[str, Any], argv: Sequence[str] | None = None, prog: str = ""
) -> dict[str, Any]:
    """The command line of a recipe: fields of its `Config`, `RunOptions`, and `--preset`.

    With `--resume` or `--init-from`, what is not given is as it was in that run.

    Args:
        make_train: `make_train(config) -> Train`.
        presets: configurations by name, the first being the default.
        argv: arguments; None: those of the process.
        prog: the command's name, for its help.

    Returns:
        The result that is also written to `result.json`.
    """
    import tyro

    first = argparse.ArgumentParser(prog, add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default=next(iter(presets)))
    first.add_argument("--resume", "--init-from", "--init_from", type=Path, dest="before", metavar="FOLDER")
    known, _ = first.parse_known_args(argv)
    if known.preset not in presets:
        first.error(f"--preset {known.preset}: there are {', '.join(presets)}")
    config, options = presets[known.preset], RunOptions()
    if known.before is not None:
        with _said():
            stored = stored_run(known.before)
            config, options = stored_config(type(config), stored), stored_options(stored)
    names = Literal[tuple(presets)]  # type: ignore[valid-type]
    fields = [("config", type(config)), ("run", RunOptions), ("preset", names, dataclasses.field(default=known.preset))]
    arguments = dataclasses.make_dataclass("Arguments", fields)  # type: ignore[arg-type]
    default = arguments(config=config, run=options, preset=known.preset)
    args = tyro.cli(
        arguments,
        config=(tyro.conf.OmitArgPrefixes,),
        default=default,
        args=argv,
        prog=prog or None,
        description=sys.modules[make_train.__module__].__doc__,
    )
    with _said():
        result = run(make_train(args.config), args.config, args.run)
    if "interrupted_by" in result:
        raise SystemExit(128 + signal.Signals[result["interrupted_by"]])
    return result


@contextlib.contextmanager
def _said() -> Iterator[None]:
    """Our own errors say what to do: they end the process with that sentence. Others keep their traceback."""
    try:
        yield
    except (ValueError, TypeError, FloatingPointError, OSError) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        raised_in = str(frame.f_globals.get("__name__", ""))
        if isinstance(error, OSError) or raised_in.startswith(f"{Train.__module__.partition('.')[0]}."):
            raise SystemExit(f"error: {error}") from error
        raise
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
