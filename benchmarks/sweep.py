"""A sweep as one program: learning rate x clip range x entropy coefficient, all runs of IPPO side by side.

    python -m benchmarks sweep

Numbers of a `Config` may be traced arrays, so a sweep is `vmap` over `make_train`. Writes
benchmarks/results/sweep.jsonl.
"""

from __future__ import annotations

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np

from ppo_parts import training
from recipes import ippo

from ._records import RESULTS
from ._timing import write

CONFIG = dataclasses.replace(ippo.PRESETS["spread"], total_timesteps=200_000)
GRID = {
    "actor_learning_rate": (1e-4, 3e-4, 1e-3, 3e-3),
    "clip_coef": (0.1, 0.2, 0.4),
    "ent_coef": (0.0, 0.01, 0.1),
}


def final_return(seed: jax.Array, **numbers: jax.Array) -> jax.Array:
    """One run: mean return of its last hundred episodes."""
    _, metrics = ippo.make_train(dataclasses.replace(CONFIG, **numbers))(jax.random.key(seed))
    return training.last_episodes_return(metrics["episode_return"], metrics["episodes"])


def main() -> None:
    """Command line."""
    points = [x.ravel() for x in jnp.meshgrid(*map(jnp.array, GRID.values()), indexing="ij")]
    seeds = jnp.full(len(points[0]), CONFIG.seed)
    began = time.perf_counter()
    program = jax.jit(jax.vmap(final_return)).lower(seeds, **dict(zip(GRID, points, strict=True))).compile()
    compiled = time.perf_counter()
    returns = np.asarray(program(seeds, **dict(zip(GRID, points, strict=True))))
    returns = returns.reshape([len(values) for values in GRID.values()])
    result = {
        "config": dataclasses.asdict(CONFIG),
        "grid": GRID,
        "last_100_episodes_return": returns,
        "compile_seconds": compiled - began,
        "run_seconds": time.perf_counter() - compiled,
    }
    write(f"{RESULTS}/sweep.jsonl#sweep", "benchmarks sweep", result)
    best = np.unravel_index(np.argmax(returns), returns.shape)
    print("best:", {name: values[i] for (name, values), i in zip(GRID.items(), best, strict=True)}, returns.max())
