"""Do policies learn to win games of two players, by playing against random legal moves, or against themselves?

    python -m benchmarks games connect_four_6m --seeds 10

needs the extras `pgx` and `train`, and writes benchmarks/results/games_<game>.json (configuration, versions, hardware,
every seed), with `--first-seed 6` games_<game>_6.json. Each seed trains CleanRL's recipe, and then plays new games
against random legal moves, with sampled and with the most likely moves.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path

import jax
import numpy as np

from ppo_parts import training
from recipes import cleanrl_ppo

from ._timing import record

ROOT = Path(__file__).resolve().parent.parent
EVALUATED = 5000  # games for each seed
CONNECT_FOUR = cleanrl_ppo.Config(
    env_id="pgx:connect_four", total_timesteps=3_000_000, num_envs=256, num_steps=16, hidden=(256, 256),
    num_minibatches=8, learning_rate=1e-3, gae_lambda=0.8,
)  # fmt: skip
GAMES = {
    "connect_four": CONNECT_FOUR,
    "connect_four_6m": dataclasses.replace(CONNECT_FOUR, total_timesteps=6_000_000),
    "connect_four_self_play": dataclasses.replace(CONNECT_FOUR, env_id="pgx:connect_four,opponent=self"),
}


def measure(game: str, seeds: range) -> dict[str, object]:
    """Train the seeds one after another, and count the games that each wins."""
    config = GAMES[game]
    train = cleanrl_ppo.make_train(config)
    program = jax.jit(train).lower(jax.random.key(0)).compile()
    found = []
    for seed in seeds:
        began = time.perf_counter()
        state, metrics = jax.block_until_ready(program(jax.random.key(seed)))
        seconds = time.perf_counter() - began
        row = {
            "seed": seed,
            "seconds": seconds,
            "env_steps_per_second": train.num_updates * train.steps_per_update / seconds,
        }
        for name, mode in {"won_sampled": False, "won_mode": True}.items():
            key = jax.random.fold_in(jax.random.key(seed), 2**20 + mode)
            played = jax.jit(train.evaluate_policy, static_argnames=("episodes", "mode"))(
                key, state, EVALUATED, mode=mode
            )
            row[name] = float(np.mean(played.info["won"]))
            row[name.replace("won", "lost")] = float(np.mean(np.asarray(played.episode_return) < 0))
        each = max(1, train.num_updates // 100)
        curve = np.asarray(metrics["episode_return"])
        row["curve"] = [round(float(np.nanmean(curve[i : i + each])), 3) for i in range(0, len(curve), each)]
        print(", ".join(f"{name} {row[name]:.4g}" for name in row if name != "curve"), flush=True)
        found.append(row)
    return {
        "game": game,
        "config": dataclasses.asdict(config),
        "env_steps": train.num_updates * train.steps_per_update,
        "evaluation_games": EVALUATED,
        "seeds": found,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("games", nargs="+", choices=GAMES)
    parser.add_argument("--seeds", type=int, default=10, help="how many seeds")
    parser.add_argument("--first-seed", type=int, default=1, help="first seed (default: 1)")
    args = parser.parse_args()
    for game in args.games:
        result = measure(game, range(args.first_seed, args.first_seed + args.seeds))
        name = game if args.first_seed == 1 else f"{game}_{args.first_seed}"
        training.write_json(ROOT / f"benchmarks/results/games_{name}.json", record("benchmarks games", result))


if __name__ == "__main__":
    main()
