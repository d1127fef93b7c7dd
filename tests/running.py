"""What the tests of training runs share: a tiny configuration, its command line, and what a run leaves behind."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental.compilation_cache import compilation_cache

from recipes.cleanrl_ppo import Config

ROOT = Path(__file__).parents[1]
STEPS_PER_UPDATE = 16


def tiny(updates: int = 12, **changes) -> Config:
    """CartPole with a network of 8 units and `updates` updates of 2 environments times 8 steps."""
    sizes = {"num_envs": 2, "num_steps": 8, "hidden": (8,), "num_minibatches": 2, "update_epochs": 1}
    return Config(**{"total_timesteps": updates * STEPS_PER_UPDATE, **sizes, **changes})


def arguments(config: Config) -> list[str]:
    """The command line of a `tiny` configuration."""
    names = ("total_timesteps", "num_envs", "num_steps", "num_minibatches", "update_epochs", "seed")
    given = [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(config, name)))]
    return [*given, "--hidden", *map(str, config.hidden)]


@contextlib.contextmanager
def compiled_programs_kept_in(folder: Path):
    """Compile each program once, and quickly; `start` does the same, so that processes share them and agree."""
    given = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_disable_most_optimizations": True,
    }
    before = {name: jax.config.values[name] for name in given}
    for name, value in given.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def start(*argv: str, cache: Path) -> subprocess.Popen:
    """The recipe in a process of its own; `cache` keeps compiled programs."""
    env = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    command = [sys.executable, "-m", "recipes.cleanrl_ppo", "--no-progress", *argv]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def checkpoint(folder: Path, step: int | None = None) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint (the latest), as orbax reads them, none of our code involved."""
    folder = (folder / "checkpoints").resolve()
    step = max(int(p.name) for p in folder.iterdir() if p.name.isdecimal()) if step is None else step
    with ocp.StandardCheckpointer() as reader:
        return {"step": np.asarray(step), **reader.restore(folder / str(step) / "state")}


def rows(folder: Path) -> list[dict]:
    """The rows of metrics.jsonl, each of which has to be strict JSON."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same_run(folder: Path, expected: Path) -> None:
    """Two runs ended in the same state, and left the same metrics, to the last bit."""
    one, other = checkpoint(folder), checkpoint(expected)
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)
    assert (folder / "metrics.jsonl").read_bytes() == (expected / "metrics.jsonl").read_bytes()
    one, other = (json.loads((where / "result.json").read_text()) for where in (folder, expected))
    for name in (one.keys() & other.keys()) - {"curve"}:  # `evaluation` is there where it was asked for
        assert one[name] == other[name], name
