"""Do the recipes learn? Many seeds in one program, results kept as a file.

    python -m benchmarks learning cartpole pufferlib_pendulum --seeds 10

writes benchmarks/results/learning_<task>.json (configuration, versions, hardware, seeds, curve) and
docs/img/learning_<task>.png for each task. What the file said before is kept beside it, so that a change of the hot
path shows in the same table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppo_parts import training
from recipes import cleanrl_ppo, ippo, pufferlib_ppo

from ._timing import record

ROOT = Path(__file__).resolve().parent.parent
CLEANRL, PUFFERLIB = cleanrl_ppo.PRESETS, pufferlib_ppo.PRESETS
TASKS: dict[str, tuple[Callable[[Any], training.Train], Any]] = {
    "cartpole": (cleanrl_ppo.make_train, CLEANRL["discrete"]),
    "acrobot": (cleanrl_ppo.make_train, dataclasses.replace(CLEANRL["discrete"], env_id="Acrobot-v1")),
    "pendulum": (cleanrl_ppo.make_train, CLEANRL["continuous"]),
    "pufferlib_cartpole": (pufferlib_ppo.make_train, PUFFERLIB["discrete"]),
    "pufferlib_pendulum": (pufferlib_ppo.make_train, PUFFERLIB["continuous"]),
    "pufferlib_memory": (pufferlib_ppo.make_train, PUFFERLIB["memory"]),
    "pufferlib_memory_feedforward": (
        pufferlib_ppo.make_train,
        dataclasses.replace(PUFFERLIB["memory"], memory=None),
    ),
    "pufferlib_breakout": (pufferlib_ppo.make_train, PUFFERLIB["minatar"]),
    "ippo_spread": (ippo.make_train, ippo.PRESETS["spread"]),
    "ippo_smax_3m": (ippo.make_train, ippo.PRESETS["smax"]),
    "ippo_riddle": (ippo.make_train, ippo.PRESETS["riddle"]),
}


def measure(task: str, seeds: int) -> dict[str, object]:
    """Train `seeds` seeds (config.seed, config.seed + 1, ...) and describe how they did."""
    make_train, config = TASKS[task]
    train = make_train(config)
    keys = jnp.stack([jax.random.key(config.seed + i) for i in range(seeds)])
    began = time.perf_counter()
    program = jax.jit(jax.vmap(train)).lower(keys).compile()
    compiled = time.perf_counter()
    state, metrics = jax.block_until_ready(program(keys))
    finished = time.perf_counter()
    returns, episodes = np.asarray(metrics["episode_return"]), np.asarray(metrics["episodes"])

    evaluations = {}
    for name, mode in {"evaluation": False, "evaluation_mode": True}.items():
        play = jax.jit(jax.vmap(lambda state, m=mode: train.evaluate_policy(jax.random.key(2**20), state, 100, mode=m)))
        played = play(state)
        for what, x in {"return": played.episode_return, **played.info}.items():
            each_seed = np.mean(np.asarray(x).reshape(seeds, -1), axis=1)
            evaluations[f"{name}_100_episodes_{what}"] = training.summary(each_seed)
    env_steps = (1 + np.arange(train.num_updates)) * train.steps_per_update
    training.plot_curve(ROOT / f"docs/img/learning_{task}.png", env_steps, returns.T, config.env_id)
    each = max(1, train.num_updates // 200)
    pieces = np.array_split(returns, range(each, returns.shape[1], each), axis=1)
    thin = np.stack([np.nanmean(piece, axis=1) for piece in pieces], axis=1)
    return {
        "task": task,
        "recipe": make_train.__module__,
        "config": dataclasses.asdict(config),
        "seeds": [config.seed + i for i in range(seeds)],
        "env_steps": int(env_steps[-1]),
        "last_100_episodes_return": training.summary(np.asarray(training.last_episodes_return(returns, episodes))),
        **evaluations,
        "compile_seconds": compiled - began,
        "run_seconds": finished - compiled,
        "env_steps_per_second_all_seeds": seeds * int(env_steps[-1]) / (finished - compiled),
        "curve": {"env_steps": env_steps[::each], "mean_return_per_seed": np.round(thin, 2)},
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", choices=TASKS)
    parser.add_argument("--seeds", type=int, default=10)
    args = parser.parse_args()
    for task in args.tasks:
        result = measure(task, args.seeds)
        path = ROOT / f"benchmarks/results/learning_{task}.json"
        if path.exists():
            last = json.loads(path.read_text())
            result["before"] = {key: last[key] for key in ("commit", "date")} | {
                key: last["results"][key] for key in ("env_steps", "last_100_episodes_return")
            }
        training.write_json(path, record("benchmarks learning", result))
        last, played = result["last_100_episodes_return"], result["evaluation_100_episodes_return"]
        print(f"{task}: {result['env_steps']:,} steps, {args.seeds} seeds; return of the last 100 episodes: {last}")
        print(f"{task}: evaluation: {played}")
