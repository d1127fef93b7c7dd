"""Large networks in small recordings: parameters that a seed gives, and a few signed sums instead of all numbers."""

import numpy as np

SUMS = 16


def drawn(shape: tuple[int, ...], gain: float, seed: int) -> np.ndarray:
    """Draw weights `[out, in, ...]`; NumPy guarantees that `RandomState` gives the same numbers in every version."""
    numbers = np.random.RandomState(seed).standard_normal(shape)
    return (gain * numbers / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


def sketch(x: np.ndarray) -> np.ndarray:
    """Add up all numbers in `SUMS` groups, with random signs: a difference of any of them changes a sum.

    Reference: Charikar et al. 2002, Finding Frequent Items in Data Streams (count sketch).
    """
    random = np.random.RandomState(0)
    groups, signs = random.randint(SUMS, size=x.size), random.choice([-1.0, 1.0], size=x.size)
    return np.bincount(groups, signs * np.ravel(x).astype(np.float64), SUMS)
