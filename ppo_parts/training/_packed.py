"""Metrics as few arrays while they are collected: XLA compiles a kernel for each, about 10 ms on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..functional._common import Array, stacked


def groups(metrics: Mapping[str, Any]) -> dict[str, list[str]]:
    """The names of metrics of the same dtype and shape."""
    names: dict[str, list[str]] = {}
    for name, x in metrics.items():
        names.setdefault(f"{jnp.result_type(x)}{jnp.shape(x)}", []).append(name)
    return names


def pack(metrics: Mapping[str, Array]) -> dict[str, Array]:
    """One array for each group, with a last axis for its names."""
    return {
        group: stacked([metrics[name] for name in names], jnp.result_type(metrics[names[0]]))
        for group, names in groups(metrics).items()
    }


def unpack(packed: Mapping[str, Array], names: Mapping[str, list[str]]) -> dict[str, Array]:
    """Metrics by name again.

    Indexing would be a kernel for each column. Rotating each to the front is the same two kernels for all of them.
    """
    metrics = {}
    for group, x in packed.items():
        for name in names[group]:
            metrics[name] = x[..., 0]
            x = jax.lax.optimization_barrier(jnp.roll(x, -1, axis=-1))
    return metrics
