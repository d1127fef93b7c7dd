"""Types of command-line arguments."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def seed(text: str) -> int:
    """Parse a seed, a whole number in [0, 2**32): JAX would use only the last 32 bits of a larger one."""
    number = int(text)
    if not 0 <= number < 2**32:
        raise argparse.ArgumentTypeError(f"must lie in [0, 2**32), got {number}")
    return number
