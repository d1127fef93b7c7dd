"""Options of the command line, which mean the same in all benchmarks."""

import argparse
from typing import Any

from ppo_parts._base.command_line import positive, seed

from ._records import show


def parse_size(text: str) -> tuple[int, int]:
    """Steps and environments from the command line, "128x64"."""
    sizes = text.split("x")
    if len(sizes) != 2:
        raise argparse.ArgumentTypeError(f"give steps and environments, such as 128x64, got {text!r}")
    return positive(sizes[0]), positive(sizes[1])


OPTIONS: dict[str, dict[str, Any]] = {
    "seeds": {"type": positive, "help": "how many seeds"},
    "first_seed": {"type": seed, "help": "the first of them"},
    "steps": {"type": positive, "help": "environment steps of each seed"},
    "sizes": {"type": parse_size, "nargs": "+", "metavar": "TxN", "help": "steps and environments"},
    "rounds": {"type": positive, "help": "interleaved rounds, fewer if they take long"},
    "cleanrl": {"nargs": 2, "metavar": ("PYTHON", "SCRIPT"), "help": "run CleanRL's script as well, with this Python"},
    "json": {"metavar": "FILE[#NAME]", "help": "write the record here, also in place of an earlier one"},
}


def make_parser(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A command line with the shared options that have a default here.

    That of `json` is the file of the benchmark's records, which `claim` reads, or None, to print only.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        settings = dict(OPTIONS[name])
        shown = " ".join(map(show, default)) if isinstance(default, tuple) else default
        if name == "json":
            made.set_defaults(records=default)
            shown, default = f"a new one in {default}" if default else "print only", None
        if shown is not None:
            settings["help"] += f" (default: {shown})"
        made.add_argument(f"--{name.replace('_', '-')}", default=default, **settings)
    return made


def select_seeds(options: Any) -> range:
    """The seeds of a command line."""
    return range(options.first_seed, options.first_seed + options.seeds)
