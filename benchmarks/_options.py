"""Options that benchmarks share, so that they mean the same in all of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def positive(text: str) -> int:
    """A number from the command line, "3" or "1e6"."""
    number = int(float(text))
    if number < 1:
        raise ValueError  # argparse says which option, and of what
    return number


def size(text: str) -> tuple[int, int]:
    """Steps and environments from the command line, "128x64"."""
    steps, environments = map(positive, text.split("x"))
    return steps, environments


SHARED: dict[str, tuple[Callable[[str], Any], str]] = {
    "seeds": (positive, "how many seeds"),
    "first_seed": (int, "the first of them"),
    "steps": (positive, "environment steps of each seed"),
    "rounds": (positive, "interleaved rounds; a third of them where one takes long"),
    "json": (str, "FILE#NAME: write the record here"),
}


def parser(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A command line with the shared options that have a default here."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        kind, what = SHARED[name]
        made.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=what)
    return made
