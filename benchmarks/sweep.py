"""A sweep as one program: learning rate x clip range x entropy coefficient, all runs of IPPO side by side.

    python -m benchmarks sweep

Numbers of a `Config` may be traced arrays, so a sweep is `vmap` over `make_train`. Writes benchmarks/results/sweep.json
and docs/img/sweep.png.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ppo_parts import training
from recipes import ippo

from ._timing import record

ROOT = Path(__file__).resolve().parent.parent
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


def draw(returns: np.ndarray, path: Path) -> None:
    """One heat map per entropy coefficient."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rates, clips, entropies = GRID.values()
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(entropies), sharey=True)
    for k, axes in enumerate(panels):
        image = axes.imshow(returns[..., k], vmin=returns.min(), vmax=returns.max(), cmap="viridis", aspect="auto")
        for (i, j), value in np.ndenumerate(returns[..., k]):
            light = value < (returns.min() + returns.max()) / 2
            axes.text(j, i, f"{value:.1f}", ha="center", va="center", color="white" if light else "black")
        axes.set(title=f"ent_coef {entropies[k]:g}", xlabel="clip_coef", xticks=range(len(clips)), xticklabels=clips)
    panels[0].set(ylabel="actor_learning_rate", yticks=range(len(rates)), yticklabels=[f"{r:g}" for r in rates])
    figure.colorbar(image, ax=panels, label="return, last 100 episodes")
    figure.savefig(path, dpi=130)


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
    training.write_json(ROOT / "benchmarks/results/sweep.json", record("benchmarks sweep", result))
    draw(returns, ROOT / "docs/img/sweep.png")
    best = np.unravel_index(np.argmax(returns), returns.shape)
    print("best:", {name: values[i] for (name, values), i in zip(GRID.items(), best, strict=True)}, returns.max())
