"""The device of a run: whether there is one, its name, and whether the run fits into its memory."""

from __future__ import annotations

import os
from typing import Any

import jax

from .._base.errors import UserValueError


def check_device() -> None:
    """Raise if JAX finds no device to run on."""
    try:
        jax.devices()
    except RuntimeError as error:
        asked = os.environ.get("JAX_PLATFORMS")
        remedy = "" if asked is None else f". JAX_PLATFORMS={asked} requests it: unset it to use what there is"
        raise UserValueError(f"JAX cannot start: {str(error).splitlines()[0].rstrip('.')}{remedy}") from error


def device_name() -> str:
    """Return the name of the device that runs use, such as "NVIDIA H100 80GB HBM3" or "cpu"."""
    return jax.devices()[0].device_kind


def check_memory(train: Any, num_seeds: int, num_devices: int = 1, limit: float | None = None) -> None:
    """Raise if a run with `num_seeds` seeds is certain not to fit into the memory of its devices.

    This counts the state of a run and one rollout. Gradients and activations need additional memory.

    Args:
        train: the run.
        num_seeds: the number of seeds that are trained at once.
        num_devices: the number of devices that share them.
        limit: memory in bytes; None: that of the devices, if they report it.
    """
    limit = _memory(num_devices) if limit is None else limit
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = train.state_shapes()
    shapes = state, jax.eval_shape(train.rollout.collect, key, state.learner.params, state.rollout)
    needed = num_seeds * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    if limit is not None and needed > limit:
        raise UserValueError(
            f"this run needs at least {needed / 2**30:,.1f} GiB of memory for its states and rollouts, but there are "
            f"{limit / 2**30:,.1f} GiB: use fewer seeds (now {num_seeds}), environments or steps, or a smaller network"
        )


def _memory(num_devices: int) -> float | None:
    """Return the memory of equal devices in bytes; for a CPU, the memory of the machine."""
    device = jax.local_devices()[0]
    statistics = device.memory_stats() if device.platform != "cpu" else None
    if statistics:
        limit = statistics.get("bytes_limit")
        return None if limit is None else num_devices * limit
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):  # this system does not report it
        return None
