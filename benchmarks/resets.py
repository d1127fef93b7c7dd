"""Craftax-Classic for a million steps, with and without optimistic resets: steps per second, and what is learned.

    python -m benchmarks resets

needs the extras `craftax` and `train`, and writes benchmarks/results/resets.json. CleanRL's recipe is trained once with
each ratio, in turns of a few updates, so that both share whatever else the machine does. The time to compile is not
counted.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ppo_parts import envs, training
from recipes import cleanrl_ppo

from . import _timing

ROOT = Path(__file__).resolve().parent.parent
RATIOS = (1, 16)  # of environments to new episodes in a step: 1 gives every episode a world of its own
CONFIG = cleanrl_ppo.Config(
    env_id="craftax:Craftax-Classic-Symbolic-v1", total_timesteps=1_000_000, num_envs=64, num_steps=64,
    num_minibatches=8, learning_rate=1e-3, gae_lambda=0.8, max_grad_norm=1.0,
)  # fmt: skip


class Run:
    """A training run that advances a few updates at a time."""

    def __init__(self, config: cleanrl_ppo.Config, ratio: int) -> None:
        self.train = cleanrl_ppo.make_train(config, env=envs.make(config.env_id, reset_ratio=ratio))
        self.state = jax.block_until_ready(jax.jit(self.train.init)(jax.random.key(config.seed)))
        self.step = self.train.compiled_step.lower(self.state).compile()
        self.rows: list[dict[str, Any]] = []

    def advance(self, updates: int) -> None:
        """Run some updates, and keep their metrics."""
        for _ in range(updates):
            self.state, metrics = self.step(self.state)
            self.rows.append(jax.device_get(metrics))

    def mean(self, name: str, last: int) -> float:
        """The mean of a number about episodes, over all that ended in the last updates; NaN if none did."""
        found, episodes = (np.array([row[x] for row in self.rows[-last:]]) for x in (name, "episodes"))
        return float(np.nansum(found * episodes) / np.sum(episodes)) if np.any(episodes) else float("nan")


def measure(config: cleanrl_ppo.Config, pieces: int) -> dict[str, Any]:
    """Train with each ratio, a piece of the run of each in turn."""
    runs = {str(ratio): Run(config, ratio) for ratio in RATIOS}
    train = runs["1"].train
    sizes = [len(piece) for piece in np.array_split(np.arange(train.num_updates), pieces)]
    walls, cpus, curves = ({name: [] for name in runs} for _ in range(3))
    for updates in sizes:
        for name, run in runs.items():
            wall, cpu = _timing.seconds(lambda run=run, updates=updates: run.advance(updates))
            walls[name].append(wall / updates)
            cpus[name].append(cpu / updates)
            curves[name].append({what: run.mean(what, updates) for what in ("episode_return", "episode_achievements")})
            speed = train.steps_per_update * updates / wall
            print(f"reset_ratio {name:>2}: {speed:7,.0f} steps/s", curves[name][-1], flush=True)
    return {
        "config": dataclasses.asdict(config),
        "env_steps": train.num_updates * train.steps_per_update,
        "steps_of_a_piece": sizes[0] * train.steps_per_update,
        "ratios": {
            name: {
                "steps_per_second": train.steps_per_update / _timing.quartiles(walls[name])[0],
                "steps_per_cpu_second": train.steps_per_update / _timing.quartiles(cpus[name])[0],
                "time_over_1": _timing.ratio(walls, name, "1"),
                "cpu_time_over_1": _timing.ratio(cpus, name, "1"),
                "curve": curves[name],
            }
            for name in runs
        },
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=float, default=CONFIG.total_timesteps, help="environment steps of each run")
    parser.add_argument("--pieces", type=_timing.positive, default=20, help="turns that each run takes")
    args = parser.parse_args()
    config = dataclasses.replace(CONFIG, total_timesteps=int(args.steps))
    found = measure(config, args.pieces)
    training.write_json(ROOT / "benchmarks/results/resets.json", _timing.record("benchmarks resets", found))


if __name__ == "__main__":
    main()
