"""Types of command-line arguments."""

from __future__ import annotations

import argparse


def whole_number(text: str) -> int:
    """Parse a whole number: "1000000", "1_000_000" or "1e6"."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
    if not number.is_integer():
        raise ValueError(f"{text!r} is not a whole number")
    return int(number)


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    number = whole_number(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def seed(text: str) -> int:
    """Parse a seed, a whole number in [0, 2**32): JAX would use only the last 32 bits of a larger one."""
    number = whole_number(text)
    if not 0 <= number < 2**32:
        raise argparse.ArgumentTypeError(f"must lie in [0, 2**32), got {number}")
    return number
