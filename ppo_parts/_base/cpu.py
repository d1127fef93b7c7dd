"""Operations that run differently on a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax

from .branches import hoisted


def sequential_vmap_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that `jax.vmap` calls it for one element after another if the backend is a CPU.

    There are two reasons. A single update keeps a core busy: many at once take longer, because their activations fill
    the cache, and none of them can stop early. In addition, a program deadlocks if it factorizes batches of matrices in
    two places at once and they block every thread of the CPU; see docs/decisions/0004-batched-lapack.md.
    """

    def run(*args: Any) -> Any:
        if jax.default_backend() != "cpu":
            return function(*args)
        # custom_vmap does not see batched values that a closure captures from an outer vmap, such as a swept learning
        # rate: they must be arguments.
        call, constants = hoisted(function, args)
        return jax.custom_batching.sequential_vmap(call)(constants, *args)

    return run


def usable_cores() -> int:
    """Return how many cores this process may use; on a CPU, XLA distributes its work over as many threads."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # this system does not have the function
        return os.cpu_count() or 1
