"""Types of command-line arguments."""

from __future__ import annotations

import argparse
import contextlib
import math


def whole_number(text: str) -> int:
    """Parse an integer such as "1000000", "1_000_000" or "1e6"."""
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        if (number := float(text)).is_integer():
            return int(number)
    raise ValueError(f"{text!r} is not an integer")


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    return _parse(text, 1, math.inf, "must be at least 1")


def seed(text: str) -> int:
    """Parse a seed, an integer in [0, 2**32), because JAX uses only the last 32 bits of a larger one."""
    return _parse(text, 0, 2**32, "must lie in [0, 2**32)")


def _parse(text: str, low: int, end: float, says: str) -> int:
    """Parse an integer in [low, end), with errors whose text `argparse` shows."""
    try:
        number = whole_number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not low <= number < end:
        raise argparse.ArgumentTypeError(f"{says}, got {number}")
    return number
