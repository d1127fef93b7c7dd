"""Numeric hyperparameters: a float, a traced array or a schedule `step -> value`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .functional._common import within

Array = jax.Array
Numeric = float | Array | Callable[[Any], Any]
"""A float, an array (a traced one too, so that sweeps vmap) or a schedule of the learner's update count."""


def number(where: str, name: str, value: Any, low: float, high: float = np.inf, *, open_low: bool = False) -> Any:
    """Return `value` if it can be what it should; concrete numbers are checked against [low, high] at once."""
    if callable(value):
        return value
    within(where, name, value, low, high, open_low=open_low, what="a number, an array or a schedule step -> value")
    if np.shape(value) != ():
        raise ValueError(
            f"{where}: {name} must be one number, got an array of shape {np.shape(value)}; to sweep it, build the "
            "chain inside a function and vmap that"
        )
    return value


def count(where: str, name: str, value: Any) -> int:
    """Return `value` if it is a positive whole number."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{where}: {name} must be a whole number, got {value!r}")
    if value < 1:
        raise ValueError(f"{where}: {name} must be at least 1, got {value!r}")
    return int(value)


def choice(where: str, name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Return `value` if it is one of the allowed words."""
    if value not in allowed:
        raise ValueError(f"{where}: {name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return value


def at(value: Numeric, step: Any) -> Any:
    """The value of a hyperparameter at learner update `step`."""
    return jnp.asarray(value(step)) if callable(value) else value
