"""Many updates in one device call, as many as fit into a few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._metrics import Metrics

SECONDS = 2.0
"""How long a device call is to take: nothing on the host, such as saving after a signal, happens in between."""
ROWS = 1024
"""Metrics of at most this many updates and seeds are kept on the device."""

Advance = Callable[[Any, int], tuple[Any, dict[str, np.ndarray]]]
"""`advance(state, most) -> (state, metrics)`: some updates, at most so many; each metric has one value for each."""


class Pace:
    """How many updates to do in one call, so that it takes about `seconds`."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds, self.updates = seconds, 1

    def took(self, updates: int, seconds: float) -> None:
        """Learn from a call; slowly upwards, since the first updates may not be typical."""
        fitting = int(updates * self.seconds / max(seconds, 1e-9))
        self.updates = min(max(1, fitting), 10 * updates)


def compiled(step: Callable[[Any], Any], state: Any, num_updates: int, num_seeds: int, pace: Pace) -> Advance:
    """Compile `advance` for states such as `state`, which it takes over.

    The number of updates is a run-time argument, so there is one program whatever the pieces: cutting a run elsewhere
    (a checkpoint, an interruption, a slower machine) does not change a single bit.
    """
    size = min(num_updates, max(1, ROWS // num_seeds))
    shapes = jax.eval_shape(step, state)[1]

    def updates(state: Any, number: jax.Array) -> tuple[Any, Metrics]:
        def body(i: jax.Array, carry: Any) -> Any:
            state, buffer = carry
            state, measured = step(state)
            return state, jax.tree.map(lambda buffer, x: buffer.at[i].set(x), buffer, measured)

        buffer = jax.tree.map(lambda s: jnp.zeros((size, *s.shape), s.dtype), shapes)
        return jax.lax.fori_loop(0, number, body, (state, buffer))

    print("compiling ... ", end="", flush=True)
    began = time.perf_counter()
    program = jax.jit(updates, donate_argnums=0).lower(state, jnp.zeros((), jnp.int32)).compile()
    print(f"{time.perf_counter() - began:.1f} s", flush=True)

    def advance(state: Any, most: int) -> tuple[Any, dict[str, np.ndarray]]:
        number, began = min(most, size, pace.updates), time.perf_counter()
        state, measured = program(state, jnp.asarray(number, jnp.int32))
        values = np.asarray(measured.array)[:number]
        pace.took(number, time.perf_counter() - began)
        return state, {name: values[..., measured.names.index(name)] for name in sorted(measured)}

    return advance
