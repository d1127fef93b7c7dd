"""The devices of a run: whether there are any, how its arrays are placed on them, and whether they fit."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._base.errors import UserValueError
from ._options import RunOptions
from ._train import Train

AXIS = "devices"
SEED_AXIS = {"state": 0, "keys": 0, "episodes": 0, "metrics": 1, "number": None}
"""The axis of the seeds in the arguments and results of a run's programs, by kind."""


class Placement(NamedTuple):
    """How the arrays of a run are divided over the devices of a mesh.

    One seed: its environments are divided, and each device has the learner. XLA makes one program that runs on all
    devices. Several seeds: each device has some of them, and runs its own program, which needs no other device.

    Attributes:
        mesh: the devices.
        state: the sharding of each leaf of the state.
        over_seeds: whether seeds are divided, and not environments.
    """

    mesh: Mesh
    state: Any
    over_seeds: bool

    def jit(self, function: Callable[..., Any], given: tuple[str, ...], result: Any, **options: Any) -> Any:
        """Apply `jax.jit` on these devices; `given` and `result` name kinds of arrays, as in `SEED_AXIS`."""
        if self.over_seeds:
            in_specs, out_specs = jax.tree.map(self._spec, (given, result))
            function = _shard_map(function, self.mesh, in_specs, out_specs)
        return jax.jit(function, out_shardings=jax.tree.map(self._sharding, result), **options)

    def put(self, state: Any) -> Any:
        """Move the state to the devices where it belongs."""
        return jax.jit(lambda state: state, out_shardings=self.state)(state)

    def gathered(self, x: Any) -> Any:
        """Replicate the arrays on each device."""
        return jax.jit(lambda x: x, out_shardings=NamedSharding(self.mesh, PartitionSpec()))(x)

    def _spec(self, kind: str) -> PartitionSpec:
        axis = SEED_AXIS[kind] if self.over_seeds else None
        return PartitionSpec() if axis is None else PartitionSpec(*(None,) * axis, AXIS)

    def _sharding(self, kind: str) -> Any:
        return self.state if kind == "state" else NamedSharding(self.mesh, self._spec(kind))


def placement(train: Train, options: RunOptions) -> Placement | None:
    """Place a run on `options.num_devices` devices, which share it equally; None: on the default device."""
    number, devices = devices_of(options), jax.devices()
    if number == 1 and jax.process_count() == 1:
        return None
    if train.rollout.restart is not None:
        raise _cannot_place(
            f"must be 1 for environments on the host, got {number}: leave it out; such environments can be divided "
            "over processes of the host instead"
        )
    mesh = Mesh(np.array(devices[:number]), (AXIS,))
    if options.num_seeds == 1:
        whole, shapes = NamedSharding(mesh, PartitionSpec()), train.state_shapes()
        shardings = jax.tree.map(lambda _: whole, shapes)._replace(rollout=train.rollout.sharding(mesh))
        return Placement(mesh, shardings, over_seeds=False)
    if options.num_seeds % number:
        raise _cannot_place(
            f"must divide the {options.num_seeds} seeds, got {number}: each device trains as many seeds as the others"
        )
    divided = NamedSharding(mesh, PartitionSpec(AXIS))
    shardings = jax.tree.map(lambda _: divided, train.state_shapes(options.num_seeds))
    return Placement(mesh, shardings, over_seeds=True)


def devices_of(options: RunOptions) -> int:
    """Return how many devices a run uses. None in the options: one, or all devices of several processes."""
    there, several = jax.device_count(), jax.process_count() > 1
    number = options.num_devices or (there if several else 1)
    if number > there:
        backend = jax.default_backend()
        simulated = f"; XLA_FLAGS=--xla_force_host_platform_device_count={number} simulates them on a CPU"
        raise _cannot_place(
            f"must be at most the {there} that JAX finds ({backend}), got {number}{simulated * (backend == 'cpu')}"
        )
    if several and number != there:
        raise _cannot_place(
            f"must be the {there} of the {jax.process_count()} processes, got {number}: leave it out to use all of "
            "them, or start fewer processes"
        )
    return number


def _cannot_place(message: str) -> UserValueError:
    return UserValueError(message, where="run", argument="num_devices")


def _shard_map(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    # Nothing is replicated between seeds, so there is nothing to check about what varies over devices.
    if hasattr(jax, "shard_map"):
        return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    from jax.experimental.shard_map import shard_map

    return shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_rep=False)


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


def check_memory(train: Train, num_seeds: int, num_devices: int = 1, limit: float | None = None) -> None:
    """Raise if a run with `num_seeds` seeds is certain not to fit into the memory of its devices, or `limit` bytes.

    This counts the state of a run and one rollout. Gradients and activations need additional memory.
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
