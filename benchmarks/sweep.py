"""A sweep as one program: learning rate x clip range x entropy coefficient, all runs of IPPO side by side.

    python -m benchmarks sweep

Numbers of a `Config` may be traced arrays, so a sweep is `vmap` over `make_train`. Writes
benchmarks/results/sweep.jsonl.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ppo_parts.recipes import ippo

from ._records import RESULTS, write
from ._runs import outcome
from ._timing import compile_cold, seconds

CONFIG = dataclasses.replace(ippo.PRESETS["spread"], total_timesteps=200_000)
GRID = {
    "actor_learning_rate": (1e-4, 3e-4, 1e-3, 3e-3),
    "clip_coef": (0.1, 0.2, 0.4),
    "ent_coef": (0.0, 0.01, 0.1),
}
RETURN = "last_100_episodes_return"


def final_return(numbers: dict[str, jax.Array]) -> jax.Array:
    """One run: mean return of its last hundred episodes."""
    return outcome(ippo.make_train(dataclasses.replace(CONFIG, **numbers)), CONFIG.seed)[RETURN]


def main() -> None:
    """Command line."""
    points = [x.ravel() for x in jnp.meshgrid(*map(jnp.array, GRID.values()), indexing="ij")]
    numbers = dict(zip(GRID, points, strict=True))
    program, compiling = compile_cold(jax.vmap(final_return), numbers)
    took, _ = seconds(lambda: program(numbers))
    returns = np.asarray(program(numbers)).reshape([len(values) for values in GRID.values()])
    result = {"config": dataclasses.asdict(CONFIG), "grid": GRID, RETURN: returns}
    result |= {"compile_seconds": sum(compiling.values()), "run_seconds": took}
    write(f"{RESULTS}/sweep.jsonl#sweep", result)
    best = np.unravel_index(np.argmax(returns), returns.shape)
    print("best:", {name: values[i] for (name, values), i in zip(GRID.items(), best, strict=True)}, returns.max())
