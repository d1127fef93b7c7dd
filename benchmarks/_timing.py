"""Time alternatives in turn, so that their ratios within a round hold even on a machine that others use."""

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ppo_parts as pp
from ppo_parts import training

Thunk = Callable[[], Any]
Samples = dict[str, list[float]]
Quartiles = dict[str, float]


def compile_cold(function: Callable[..., Any], *args: Any, options: Any = None) -> tuple[Callable[..., Any], Quartiles]:
    """Compile from cold caches; return the compiled function, and the seconds that tracing and compiling took.

    `options` are the compiler's options; None means XLA's own.
    """
    jax.clear_caches()
    jax.jit(jnp.negative)(0.0)  # the first compilation of a process also starts the compiler
    start = time.perf_counter()
    lowered = jax.jit(function).lower(*args)
    traced = time.perf_counter()
    compiled = lowered.compile(options)
    return compiled, {"trace": traced - start, "compile": time.perf_counter() - traced}


def repeat(method: Callable[..., Any], numbered: bool = False) -> Callable[..., Any]:
    """Call `method` n times in one program; a barrier keeps the calls from being merged or moved out of the loop.

    XLA nevertheless moves calls on few numbers, unless the method is `numbered`: it takes the call's number last.
    """

    def run(n: Any, *args: Any) -> Any:
        def body(i: Any, carry: Any) -> Any:
            args, _ = jax.lax.optimization_barrier(carry)
            return args, method(*args, *([i] if numbered else ()))

        shapes = jax.eval_shape(method, *args, *([0] if numbered else ()))
        start = jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), shapes)
        return jax.lax.fori_loop(0, n, body, (args, start))[1]

    return run


def measure_seconds(thunk: Thunk, calls: int = 1) -> float:
    """Return the mean time of one call, until its results are ready."""
    began = time.perf_counter()
    for _ in range(calls):
        jax.block_until_ready(thunk())
    return (time.perf_counter() - began) / calls


def interleave(thunks: Mapping[str, Thunk], rounds: int, at_least: float = 0.0, long: float = math.inf) -> Samples:
    """Return seconds per call: one sample of each method per round, in a new random order in each round.

    A sample repeats the call until about `at_least` seconds have passed. Where one call of each takes more than `long`
    seconds, only a third of the rounds are run, and at least three.
    """
    calls, once = {}, {name: measure_seconds(thunk) for name, thunk in thunks.items()}
    for name, thunk in thunks.items():
        took = once[name] if once[name] > at_least else measure_seconds(thunk)  # a fast method's first call is slow
        calls[name] = max(1, round(at_least / took))
    if sum(once.values()) > long:
        rounds = max(3, rounds // 3)
    samples: Samples = {name: [] for name in thunks}
    names, shuffle = list(thunks), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(names)
        for name in names:
            samples[name].append(measure_seconds(thunks[name], calls[name]))
    return samples


def make_loop(method: Callable[..., Any], args: tuple[Any, ...], numbered: bool = False) -> tuple[Thunk, int]:
    """Make a program that calls `method` repeatedly; return it, and the number of calls.

    The calls take at least 5 ms, and there are at least four (one if a call takes a second). A call also allocates its
    outputs and fills them.
    """
    loop = repeat(method, numbered)
    call, n = compile_cold(loop, 1, *args)[0], 1
    for _ in range(3):
        once = measure_seconds(partial(call, n, *args)) / n
        n = max(round(0.005 / once), 4 if once < 1 else 1)
    if jax.default_backend() != "cpu":  # a loop of unknown length asks the host after each turn whether to go on
        return partial(compile_cold(partial(loop, n), *args)[0], *args), n
    return partial(call, n, *args), n


def measure_calls(cases: Mapping[str, tuple[Any, ...]], rounds: int, long: float = math.inf) -> Samples:
    """Return the seconds of a call of each method, one sample per round; `cases` has the arguments of `make_loop`."""
    loops = {name: make_loop(*case) for name, case in cases.items()}
    taken = interleave({name: loop for name, (loop, _) in loops.items()}, rounds, long=long)
    return {name: [x / loops[name][1] for x in each] for name, each in taken.items()}


def summarize(values: Sequence[float], scale: float = 1.0) -> Quartiles:
    """Return the median, first quartile and third quartile, times `scale`."""
    found = np.quantile(values, (0.5, 0.25, 0.75))
    return dict(zip(("median", "q1", "q3"), (scale * found).tolist(), strict=True))


def compare(samples: Samples, name: str, reference: str) -> Quartiles:
    """Return the median and quartiles of the paired ratios `name / reference`."""
    return summarize([a / b for a, b in zip(samples[name], samples[reference], strict=True)])


def compute_speeds(seconds: Samples, steps: Mapping[str, int], **over: str) -> dict[str, dict[str, Any]]:
    """Return the environment steps per second of each program, and its time per step relative to each in `over`."""
    each = {name: [sample / steps[name] for sample in samples] for name, samples in seconds.items()}
    found: dict[str, dict[str, Any]] = {}
    for name, samples in each.items():
        speed = {"env_steps": steps[name], "rounds": len(samples), "steps_per_second": 1 / summarize(samples)["median"]}
        found[name] = speed | {f"over_{what}": compare(each, name, other) for what, other in over.items()}
    return found


def assert_same(results: Mapping[str, Any], tolerance: float = 1e-3) -> None:
    """Raise unless all programs return what the first one does, relative to the largest number of each array."""
    first, *others = results
    for name in others:
        for x, y in zip(jax.tree.leaves(results[name]), jax.tree.leaves(results[first]), strict=True):
            x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
            off = tolerance * max(np.max(np.abs(y)), 1e-3)
            np.testing.assert_allclose(x, y, rtol=0, atol=off, err_msg=f"{name} differs from {first}")


def make_rollout(train: training.Train, key: jax.Array) -> pp.Batch:
    """Make a rollout to time updates on, with both kinds of ends, and log-probabilities a little off the policy's."""
    batch = train.collect(train.init(key))[1]
    keys = jax.random.split(key, 5)
    noise, reward, error = (jax.random.normal(key, batch.value.shape) for key in keys[:3])
    terminated, truncated = (jax.random.bernoulli(key, 0.02, batch.value.shape) for key in keys[3:])
    batch = batch.replace(log_prob=batch.log_prob + 0.1 * noise, reward=1 + reward, next_value=batch.value + error)
    return batch.replace(terminated=terminated, truncated=truncated & ~terminated)
