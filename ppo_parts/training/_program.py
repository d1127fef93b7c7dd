"""The computations of a run on its device: its first state, its updates and its evaluations."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.metrics import Metrics
from ..envs import host_errors
from ._devices import Placement, placement
from ._evaluate import metrics_of
from ._options import RunOptions
from ._processes import agree
from ._train import Train, seed_keys, vmap_over_seeds

SECONDS = 0.5
"""Intended duration of a device call. During a call the host can do nothing else, for example save after a signal."""
ROWS = 1024
"""Largest number of updates times seeds whose metrics are kept on the device."""

Advance = Callable[[Any, int], tuple[Any, dict[str, np.ndarray]]]
"""`advance(state, most) -> (state, metrics)` runs at most `most` updates; each metric has one value per update."""


class Pace:
    """Chooses how many updates to run in one call, so that the call takes about `seconds`."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds, self.updates = seconds, 1

    def took(self, updates: int, seconds: float) -> None:
        """Adapt to the duration of a call; the number grows slowly, because the first updates may not be typical."""
        fitting = int(updates * self.seconds / max(seconds, 1e-9))
        self.updates = min(max(1, fitting), 10 * updates)


def compile_program(
    step: Callable[[Any], Any],
    state: Any,
    num_updates: int,
    num_seeds: int,
    pace: Pace,
    donate: bool = True,
    placed: Placement | None = None,
) -> Advance:
    """Compile `advance` for states like `state`, on the devices where it is `placed`.

    With `donate`, the state that it is called with is overwritten. The number of updates is a run-time argument, so a
    single program serves calls of any length. Dividing a run into different calls (because of a checkpoint, an
    interruption or a slower machine) does not change a single bit.
    """
    size = min(num_updates, max(1, ROWS // num_seeds))

    def updates(state: Any, number: jax.Array) -> tuple[Any, Metrics]:
        shapes = jax.eval_shape(step, state)[1]

        def body(i: jax.Array, carry: Any) -> Any:
            state, buffer = carry
            state, measured = step(state)
            return state, jax.tree.map(lambda buffer, x: buffer.at[i].set(x), buffer, measured)

        buffer = jax.tree.map(lambda s: jnp.zeros((size, *s.shape), s.dtype), shapes)
        return jax.lax.fori_loop(0, number, body, (state, buffer))

    program = _jit(placed, updates, ("state", "number"), ("state", "metrics"), donate_argnums=(0,) if donate else ())
    program = program.lower(state, np.int32(0)).compile()

    def advance(state: Any, most: int) -> tuple[Any, dict[str, np.ndarray]]:
        number, began = min(most, size, pace.updates), time.perf_counter()
        with host_errors():
            state, measured = program(state, np.int32(number))
            values = np.asarray(_whole(placed, measured.array))[:number]
        pace.took(number, *agree(time.perf_counter() - began))
        return state, {name: values[..., measured.names.index(name)] for name in sorted(measured)}

    return advance


@dataclasses.dataclass
class Program:
    """The computations of a run on its device, for all its seeds at once.

    The host loop computes nothing itself: it calls `start`, `advance_from` and `evaluate`. Another class with these
    methods can train in a different way.

    Attributes:
        train, seed, options: the run, its first seed, and its options.
        compile: makes the program that runs updates; see `compile_program`.
    """

    train: Train
    seed: int
    options: RunOptions
    compile: Callable[..., Advance] = compile_program

    def __post_init__(self) -> None:
        _ = self.placed, self._keys  # a run that cannot be divided, or has no such seeds, fails before it has a folder

    @functools.cached_property
    def placed(self) -> Placement | None:
        """How the run is divided over devices; None: it runs on one device."""
        return placement(self.train, self.options)

    def start(self, restored: Any = None) -> Any:
        """Return the state before the first update, or put a restored state where updates need it."""
        if restored is not None and self.train.rollout.restart is None:
            return restored if self.placed is None else self.placed.put(restored)
        num_seeds = self.options.num_seeds
        if restored is not None:
            with host_errors():
                return jax.block_until_ready(jax.jit(vmap_over_seeds(self.train.continued, num_seeds))(restored))
        init = _jit(self.placed, vmap_over_seeds(self.train.compiled_init, num_seeds), ("keys",), "state")
        with host_errors():
            return jax.block_until_ready(init(self._keys))

    def advance_from(self, state: Any) -> Advance:
        """Compile `advance(state, most) -> (state, metrics)` for states like this one."""
        # After an error of an environment on the host, the run saves the state from before the call.
        donate, num_seeds = self.train.rollout.restart is None, self.options.num_seeds
        step = vmap_over_seeds(self.train.compiled_step, num_seeds)
        return self.compile(step, state, self.train.num_updates, num_seeds, Pace(), donate, self.placed)

    def whole(self, state: Any) -> Any:
        """Return the state as this process can read it; all processes of the run must call this."""
        return _whole(self.placed, state)

    def evaluate(self, state: Any, update: int) -> dict[str, Any]:
        """Return the metrics of an evaluation after an update, each a number, or `[seeds]`.

        Its keys depend only on the seed and the update, so an evaluation does not affect training and can be repeated.
        On several devices, each one plays all episodes of a run with one seed, and those of its own seeds otherwise.
        """
        with host_errors():
            played = jax.device_get(_whole(self.placed, self._play(self._keys, state, np.int32(update))))
        return metrics_of(played, seed_axes=int(self.options.num_seeds > 1))

    @functools.cached_property
    def _play(self) -> Callable[[jax.Array, Any, Any], Any]:
        """One compiled program for all evaluations."""

        def play(keys: jax.Array, state: Any, update: jax.Array) -> Any:
            def of_seed(seed: tuple[jax.Array, Any]) -> Any:
                key, state = seed
                key = jax.random.fold_in(jax.random.fold_in(key, 2**20), update)
                return self.train.evaluate_policy(key, state, self.options.eval_episodes, mode=self.options.eval_mode)

            return vmap_over_seeds(of_seed, self.options.num_seeds)((keys, state))

        return _jit(self.placed, play, ("keys", "state", "number"), "episodes")

    @functools.cached_property
    def _keys(self) -> jax.Array:
        return seed_keys(self.seed, self.options.num_seeds)


def _whole(placed: Placement | None, x: Any) -> Any:
    """Return arrays as this process can read them: gathered, if other processes have parts of them."""
    return x if placed is None or jax.process_count() == 1 else placed.gathered(x)


def compiler_options() -> dict[str, Any]:
    """Return the options of `jax.jit` with which runs are compiled.

    On CPUs, the second level of LLVM's optimizations compiles a training run in about two thirds of the time of the
    third, the default, and its programs are equally fast.
    """
    return {"xla_backend_optimization_level": 2} if jax.default_backend() == "cpu" else {}


def _jit(
    placed: Placement | None, function: Callable[..., Any], given: tuple[str, ...], result: Any, **options: Any
) -> Any:
    """Apply `jax.jit`, on the devices of a placement if there is one; see `Placement.jit`."""
    options["compiler_options"] = compiler_options()
    return jax.jit(function, **options) if placed is None else placed.jit(function, given, result, **options)
