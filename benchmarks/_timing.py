"""Interleaved timing, paired ratios, and records of the measurements and the machine."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import os
import pathlib
import platform
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from . import _records

Thunk = Callable[[], Any]
Samples = dict[str, list[float]]
ROOT = pathlib.Path(__file__).parent.parent


def git(*args: str) -> str:
    """Return the output of a git command in this checkout; nothing if it fails."""
    return subprocess.run(("git", "-C", ROOT, *args), capture_output=True, text=True, check=False).stdout.strip()


# Asked when a benchmark starts, because it does not measure what is committed while it runs.
COMMIT = git("rev-parse", "HEAD")
UNCOMMITTED = git("status", "--porcelain", "--untracked-files=no", "--", "ppo_parts", "recipes", "benchmarks/*.py")


def positive(text: str) -> int:
    """A number of rounds from the command line."""
    number = int(text)
    if number < 1:
        raise ValueError  # argparse says which option, and of what
    return number


def size(text: str) -> tuple[int, int]:
    """Steps and environments from the command line, "128x64"."""
    steps, environments = map(positive, text.split("x"))
    return steps, environments


def compile_cold(function: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], float, float]:
    """The compiled function, and the seconds that tracing and compiling it took, from cold caches."""
    jax.clear_caches()
    start = time.perf_counter()
    lowered = jax.jit(function).lower(*args)
    traced = time.perf_counter()
    return lowered.compile(), traced - start, time.perf_counter() - traced


def seconds(thunk: Thunk, calls: int = 1) -> tuple[float, float]:
    """Mean wall-clock and CPU time (of all threads) of one call; every call is waited for."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        jax.block_until_ready(thunk())
    return (time.perf_counter() - wall) / calls, (time.process_time() - cpu) / calls


def interleaved(
    thunks: dict[str, Thunk], rounds: int, at_least: float = 0.02, long: float = math.inf, seed: int = 0
) -> tuple[Samples, Samples]:
    """Wall-clock and CPU seconds per call, one sample of each method per round, in a new random order each round.

    A sample repeats the call until about `at_least` seconds have passed. Where one call of each takes more than `long`
    seconds, a third of the rounds have to do, and at least three. Numbers of one round were taken under the same
    load, so that ratios within a round mean something on a machine that others use, too; CPU time suffers less from
    that, but leaves out waiting.
    """
    calls, once = {}, {name: seconds(thunk)[0] for name, thunk in thunks.items()}
    for name, thunk in thunks.items():
        took = once[name] if once[name] > at_least else seconds(thunk)[0]  # the first call of a fast one is slow
        calls[name] = max(1, round(at_least / took))
    if sum(once.values()) > long:
        rounds = max(3, rounds // 3)
    walls: Samples = {name: [] for name in thunks}
    cpus: Samples = {name: [] for name in thunks}
    names, shuffle = list(thunks), random.Random(seed).shuffle
    for _ in range(rounds):
        shuffle(names)
        for name in names:
            wall, cpu = seconds(thunks[name], calls[name])
            walls[name].append(wall)
            cpus[name].append(cpu)
    return walls, cpus


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, first and third quartile."""
    low, _, high = np.quantile(values, (0.25, 0.5, 0.75))
    return statistics.median(values), float(low), float(high)


def ratio(samples: Samples, name: str, reference: str) -> dict[str, float]:
    """Median and quartiles of the paired ratios `name / reference`."""
    pairs = zip(samples[name], samples[reference], strict=True)
    median, low, high = quartiles([a / b for a, b in pairs])
    return {"median": median, "q1": low, "q3": high}


def record(module: str, results: Any) -> dict[str, Any]:
    """`results` with commit, date, hardware, versions and command."""

    cpu = platform.processor()
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        models = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = models[0] if models else cpu
    installed = {d.metadata["Name"] for d in importlib.metadata.distributions()}
    names = (
        "jax jaxlib optax flax distrax ale-py gymnasium gymnax jaxmarl brax craftax mujoco mujoco-mjx pgx playground "
        "rejax rlax numpy sbx-rl stable_baselines3 torch torchrl ppo_parts"
    )
    packages = [p for p in names.split() if p in installed]
    given = [os.path.basename(text) if os.path.isabs(text) else text for text in sys.argv[1:]]  # without local folders
    return {
        "command": shlex.join(["python", "-m", *module.split(), *given]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": COMMIT,
        "uncommitted": UNCOMMITTED,
        "hardware": {
            "cpu": cpu,
            "cores": os.cpu_count(),
            "cores_used": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "device": jax.devices()[0].device_kind,
            "load_average": os.getloadavg(),
        },
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "versions": {"python": platform.python_version(), **{p: importlib.metadata.version(p) for p in packages}},
        "results": results,
    }


def write(address: str | None, module: str, results: Any) -> None:
    """Store the record under an address, if one is given."""
    _records.store(address, record(module, results))
