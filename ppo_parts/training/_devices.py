"""How the arrays of a run are placed on its devices."""

from __future__ import annotations

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
