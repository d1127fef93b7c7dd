"""The computations of a run on its devices: the initial state, updates and evaluations."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._base.extras import require_package
from .._core.metrics import Metrics
from ..envs import host_errors
from ._config import RunOptions, refuse
from ._evaluate import compute_metrics
from ._processes import logger, take_largest
from ._train import Train, make_keys, vmap_over_seeds

CALL_SECONDS = 0.5
"""Intended duration of a device call. During a call, the host cannot do anything else, such as save after a signal."""
MAX_ROWS = 1024
"""Largest number of updates times seeds for which metrics are kept on the device."""

AXIS = "devices"
SEEDS, SEEDS_OF_ROWS, WHOLE = PartitionSpec(AXIS), PartitionSpec(None, AXIS), PartitionSpec()
"""Specifications for arrays whose first or second axis is the seed axis, and for others."""

CACHE_LIMIT = 2**30
"""Bytes of compiled programs that JAX keeps; it deletes the least recently used ones."""

Advance = Callable[[Any, int], tuple[Any, dict[str, np.ndarray]]]
"""`advance(state, most) -> (state, metrics)` runs at most `most` updates; each metric has one value per update."""


@dataclasses.dataclass
class Program:
    """The computations of a run on its devices, for all its seeds at once.

    The host loop calls `start`, `advance_from` and `evaluate`, which a subclass may override. `seed` is the first seed,
    `mesh` holds the devices (None means only the default device), and `sharding` tells how the state is divided over
    them.
    """

    train: Train
    seed: int
    options: RunOptions
    updates = 1  # number of updates in the next call, to take about `CALL_SECONDS`

    def __post_init__(self) -> None:
        self.mesh, self.sharding = make_mesh(self.train, self.options)
        self._keys = make_keys(self.seed, self.options.num_seeds)
        self._rows = min(self.train.num_updates, max(1, MAX_ROWS // self.options.num_seeds))
        episodes, mode = self.options.eval_episodes, self.options.eval_mode
        play = functools.partial(self.train.evaluate_policy, episodes=episodes, mode=mode)
        self._play = self.jit(vmap_over_seeds(play, self.options.num_seeds))  # compiled once for all evaluations
        whole = None if self.mesh is None else NamedSharding(self.mesh, WHOLE)
        self._gather = jax.jit(lambda x: x, out_shardings=whole)

    def jit(self, function: Callable[..., Any], given: Any = SEEDS, result: Any = SEEDS, **options: Any) -> Any:
        """Apply `jax.jit` on these devices; `given` and `result` tell which axis of arguments and results has seeds."""
        if self.mesh is not None and self.options.num_seeds > 1:
            # Nothing is replicated between seeds, so there is no need to check what varies over devices.
            function = jax.shard_map(function, mesh=self.mesh, in_specs=given, out_specs=result, check_vma=False)
        return jax.jit(function, compiler_options=compiler_options(), **options)

    def gather(self, x: Any) -> Any:
        """Return arrays that each process can read; all processes of the run must call this."""
        return x if self.mesh is None or jax.process_count() == 1 else self._gather(x)

    def start(self, restored: Any = None) -> Any:
        """Return the state before the first update, or a restored state on the right devices."""
        function = self.train.jitted_init if restored is None else self.train.restart_host_envs
        over_seeds = vmap_over_seeds(function, self.options.num_seeds)
        begin = self.jit(over_seeds, out_shardings=self.sharding)
        with host_errors():
            return jax.block_until_ready(begin(self._keys if restored is None else restored))

    def advance_from(self, state: Any) -> Advance:
        """Compile `advance(state, most) -> (state, metrics)`; dividing a run into calls changes no bit of it."""
        program = self.compile_updates(state)

        def advance(state: Any, most: int) -> tuple[Any, dict[str, np.ndarray]]:
            number, began = min(most, self._rows, self.updates), time.perf_counter()
            with host_errors():
                state, measured = program(state, np.int32(number))
                values = np.asarray(self.gather(measured.array))[:number]
            self.adapt(number, *take_largest(time.perf_counter() - began))
            return state, {name: values[..., measured.names.index(name)] for name in sorted(measured)}

        return advance

    def adapt(self, updates: int, seconds: float) -> None:
        """Adapt the number of updates to the duration of a call, slowly, because the first calls may not be typical."""
        self.updates = min(max(1, int(updates * CALL_SECONDS / max(seconds, 1e-9))), 10 * updates)

    def compile_updates(self, state: Any) -> Callable[[Any, np.int32], tuple[Any, Metrics]]:
        """Compile a loop of updates whose number is an argument, so that one program serves calls of any length."""
        step = vmap_over_seeds(self.train.jitted_step, self.options.num_seeds)

        def updates(state: Any, number: jax.Array) -> tuple[Any, Metrics]:
            def body(i: jax.Array, carry: Any) -> Any:
                state, buffer = carry
                state, measured = step(state)
                return state, jax.tree.map(lambda buffer, x: buffer.at[i].set(x), buffer, measured)

            shapes = jax.eval_shape(step, state)[1]
            buffer = jax.tree.map(lambda s: jnp.zeros((self._rows, *s.shape), s.dtype), shapes)
            return jax.lax.fori_loop(0, number, body, (state, buffer))

        # After an error in an environment on the host, the run saves the state from before the call.
        donated = () if self.train.on_host else (0,)
        options: dict[str, Any] = {"out_shardings": (self.sharding, None), "donate_argnums": donated}
        program = self.jit(updates, (SEEDS, WHOLE), (SEEDS, SEEDS_OF_ROWS), **options)
        return program.lower(state, np.int32(0)).compile()

    def evaluate(self, state: Any, update: int) -> dict[str, Any]:
        """Return the metrics of an evaluation after an update, which are numbers or have shape `[seeds]`.

        The keys depend only on the seed and the update, so an evaluation does not affect training and can be repeated.
        """
        seeds = self.options.num_seeds
        key_of = vmap_over_seeds(lambda key: jax.random.fold_in(jax.random.fold_in(key, 2**20), update), seeds)
        with host_errors():
            played = jax.device_get(self.gather(self._play(key_of(self._keys), state)))
        return compute_metrics(played, seed_axes=int(seeds > 1))


def compiler_options() -> dict[str, Any]:
    """Return `jax.jit` options for runs, an LLVM level that compiles in 3/4 of the time and runs as fast."""
    by_default = jax.default_backend() == "cpu" and not jax.config.values["jax_disable_most_optimizations"]
    return {"xla_backend_optimization_level": 2} if by_default else {}


def keep_compiled_programs() -> None:
    """Let JAX keep compiled programs in the user's cache folder, unless its environment variables say otherwise."""
    settings = jax.config.values
    if settings["jax_compilation_cache_dir"] is not None or not settings["jax_enable_compilation_cache"]:
        return
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ppo_parts" / "jax"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # code is loaded from it, so nobody else may write to it
    except (OSError, RuntimeError) as error:  # RuntimeError if the user has no home
        logger.warning(f"compiled programs are not kept: {error}; XDG_CACHE_HOME names another folder for them")
        return
    require_package("filelock", "train")  # JAX needs it to limit the size and to share the folder
    options = {"persistent_cache_min_compile_time_secs": 0.0, "compilation_cache_max_size": CACHE_LIMIT}
    for name, value in {"compilation_cache_dir": str(folder), **options}.items():
        if f"JAX_{name.upper()}" not in os.environ:
            jax.config.update(f"jax_{name}", value)


def make_mesh(train: Train, options: RunOptions) -> tuple[Mesh | None, Any]:
    """Return a mesh of `options.num_devices` devices (None for the default device) and the shardings of the state.

    For one seed, see `Train.sharding`; XLA makes one program that runs on all devices. Of several seeds, each device
    has an equal number, and runs its own program, which does not need the other devices.
    """
    number = count_devices(options)
    if number == 1 and jax.process_count() == 1:
        return None, None
    if train.on_host:
        refuse("num_devices", f"must be 1 for environments on the host, got {number}: leave it out")
    mesh = Mesh(np.array(jax.devices()[:number]), (AXIS,))
    if options.num_seeds == 1:
        return mesh, train.sharding(mesh)
    if options.num_seeds % number:
        refuse("num_devices", f"must divide the {options.num_seeds} seeds, got {number}")
    return mesh, NamedSharding(mesh, SEEDS)


def count_devices(options: RunOptions) -> int:
    """Return the number of devices of a run; None in the options means one, or all devices of several processes."""
    there, processes = jax.device_count(), jax.process_count()
    number = options.num_devices or (there if processes > 1 else 1)
    if number > there:
        simulated = f"XLA_FLAGS=--xla_force_host_platform_device_count={number} simulates them on a CPU"
        refuse("num_devices", f"must be at most the {there} that JAX finds, got {number}; {simulated}")
    if processes > 1 and number != there:
        refuse("num_devices", f"must be {there}, all devices of the {processes} processes, got {number}: leave it out")
    return number
