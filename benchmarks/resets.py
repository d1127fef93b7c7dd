"""Craftax-Classic for a million steps, with and without optimistic resets: steps per second, and what is learned.

    python -m benchmarks resets

needs the extras `craftax` and `train`, and writes benchmarks/results/resets.json. CleanRL's recipe is trained once with
each ratio, in turns of a few updates, so that both share whatever else the machine does. The time to compile is not
counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
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
    env_id="craftax:Craftax-Classic-Symbolic-v1", total_timesteps=1_000_000, num_envs=256, num_steps=16,
    num_minibatches=8, learning_rate=1e-3, gae_lambda=0.8, max_grad_norm=1.0, hidden=(256, 256),
)  # fmt: skip


class Run:
    """A training run that advances a few updates at a time."""

    def __init__(self, config: cleanrl_ppo.Config, ratio: int) -> None:
        self.train = cleanrl_ppo.make_train(config, env=envs.make(config.env_id, reset_ratio=ratio))
        key = jax.random.key(config.seed)
        self.state = jax.block_until_ready(jax.jit(self.train.init)(key))
        self.step = self.train.compiled_step.lower(self.state).compile()
        self.curve: list[dict[str, float]] = []

    def advance(self, updates: int) -> None:
        """Run some updates, and keep the means of what their episodes were worth."""
        rows = []
        for _ in range(updates):
            self.state, metrics = self.step(self.state)
            rows.append(metrics)
        named = ("episode_return", "achievements", "episodes")
        self.curve.append({name: float(np.nanmean([row[name] for row in rows])) for name in named})

    def evaluate(self, episodes: int) -> dict[str, float]:
        """Play new episodes with the last policy."""
        key = jax.random.fold_in(jax.random.key(0), 2**20)
        played = jax.jit(functools.partial(self.train.evaluate_policy, episodes=episodes))(key, self.state)
        every = {"return": played.episode_return, "length": played.episode_length, **played.info}
        return {name: float(np.mean(x)) for name, x in every.items()}


def measure(config: cleanrl_ppo.Config, pieces: int, episodes: int) -> dict[str, Any]:
    """Train with each ratio, `pieces` times in turn."""
    runs = {str(ratio): Run(config, ratio) for ratio in RATIOS}
    train = runs["1"].train
    sizes = [len(piece) for piece in np.array_split(np.arange(train.num_updates), pieces)]
    walls, cpus = ({name: [] for name in runs} for _ in range(2))
    for updates in sizes:
        for name, run in runs.items():
            wall, cpu = _timing.seconds(lambda run=run, updates=updates: run.advance(updates))
            walls[name].append(wall / updates)
            cpus[name].append(cpu / updates)
            print(f"reset_ratio {name:3} {train.steps_per_update / walls[name][-1]:8,.0f} steps/s", run.curve[-1], flush=True)
    return {
        "config": dataclasses.asdict(config),
        "env_steps": train.num_updates * train.steps_per_update,
        "evaluation_episodes": episodes,
        "ratios": {
            name: {
                "steps_per_second": train.steps_per_update / _timing.quartiles(walls[name])[0],
                "time_over_1": _timing.ratio(walls, name, "1"),
                "cpu_time_over_1": _timing.ratio(cpus, name, "1"),
                "seconds": float(np.dot(walls[name], sizes)),
                "evaluation": run.evaluate(episodes),
                "curve": run.curve,
            }
            for name, run in runs.items()
        },
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=float, default=CONFIG.total_timesteps, help="environment steps of each run")
    parser.add_argument("--pieces", type=_timing.positive, default=20, help="turns that each run takes")
    parser.add_argument("--episodes", type=_timing.positive, default=100, help="new episodes after training")
    args = parser.parse_args()
    config = dataclasses.replace(CONFIG, total_timesteps=int(args.steps))
    found = measure(config, args.pieces, args.episodes)
    training.write_json(ROOT / "benchmarks/results/resets.json", _timing.record("benchmarks resets", found))


if __name__ == "__main__":
    main()
