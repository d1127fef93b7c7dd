"""PureJaxRL's `ppo.py` before and after the changes of docs/migration/purejaxrl.md, on the seeds that are given.

    python -m benchmarks migration ../purejaxrl/before.py ../purejaxrl/after.py --seeds 20

`before.py` is `ppo.py`, ported to the six values of gymnax 1.0's `step` with `done = terminated | truncated`, and
`after.py` the same file with all changes of the page. Each defines `make_train(config)`, and may import files next to
it. The record, benchmarks/results/migration_purejaxrl.json, has the sum of the returns and the number of the training
episodes of every seed in each twentieth of the run, and the digests of both files.

    python -m benchmarks migration ../purejaxrl/before.py ../purejaxrl/after.py --rounds 15

compares their speeds instead: both train in alternation with 64 environments, compiled before. The record,
benchmarks/results/migration_purejaxrl_speed.json, has the seconds of CPU time of every run, because the wall-clock time
of a shared machine says little.
"""

from __future__ import annotations

import argparse
import hashlib
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppo_parts import training

from ._timing import positive, ratio, record

RESULTS = Path(__file__).resolve().parent / "results"
CONFIG = {  # of the original
    "LR": 2.5e-4, "NUM_ENVS": 4, "NUM_STEPS": 128, "TOTAL_TIMESTEPS": 500_000, "UPDATE_EPOCHS": 4, "NUM_MINIBATCHES": 4,
    "GAMMA": 0.99, "GAE_LAMBDA": 0.95, "CLIP_EPS": 0.2, "ENT_COEF": 0.01, "VF_COEF": 0.5, "MAX_GRAD_NORM": 0.5,
    "ACTIVATION": "tanh", "ENV_NAME": "CartPole-v1", "ANNEAL_LR": True, "DEBUG": False,
}  # fmt: skip
TWENTIETHS = 20
PARTS = {"whole run": 0, "second half": 10, "last tenth": 18}
"""The twentieth of a run in which each part begins."""


def episodes(script: Path, seeds: range) -> np.ndarray:
    """Train one seed after another; return the sum of returns and the number of episodes, `[2, seeds, twentieths]`."""
    sys.path.insert(0, str(script.parent))
    train = runpy.run_path(str(script))["make_train"](dict(CONFIG))

    @jax.jit
    def run(key: jax.Array) -> jax.Array:
        info = train(key)["metrics"]
        ended = info["returned_episode"]
        return jnp.stack([jnp.where(ended, x, 0).sum((1, 2)) for x in (info["returned_episode_returns"], 1.0)])

    updates = np.stack([np.asarray(run(jax.random.key(seed)), np.float64) for seed in seeds], axis=1)
    return np.stack([part.sum(-1) for part in np.array_split(updates, TWENTIETHS, axis=-1)], axis=-1)


def mean_returns(counted: np.ndarray, first: int) -> np.ndarray:
    """The mean return of each seed's episodes from a twentieth of the run on."""
    returns, number = counted[..., first:].sum(-1)
    return returns / number


def speeds(scripts: dict[str, Path], rounds: int, config: dict[str, Any]) -> dict[str, Any]:
    """Train the programs in alternation; return the CPU seconds of each run, and the ratio of the speeds."""
    key, programs = jax.random.key(0), {}
    for name, script in scripts.items():
        sys.path.insert(0, str(script.parent))
        train = runpy.run_path(str(script))["make_train"](dict(config))
        programs[name] = jax.jit(lambda key, train=train: train(key)["metrics"]).lower(key).compile()
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            began = time.process_time()
            jax.block_until_ready(program(key))
            seconds[name].append(time.process_time() - began)
    return {"config": config, "cpu_seconds": seconds, "speed_after_over_before": ratio(seconds, "before", "after")}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--seeds", type=positive, default=20, help="how many seeds")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--rounds", type=positive, help="compare the speeds, in so many rounds, and not the returns")
    args = parser.parse_args()
    scripts = {"before": args.before, "after": args.after}
    digests = {name: hashlib.sha256(script.read_bytes()).hexdigest() for name, script in scripts.items()}
    if args.rounds is not None:
        measured = speeds(scripts, args.rounds, CONFIG | {"NUM_ENVS": 64, "TOTAL_TIMESTEPS": 200_000})
        print(measured["speed_after_over_before"], flush=True)
        found = record("benchmarks migration", {"sha256": digests, **measured})
        training.write_json(RESULTS / "migration_purejaxrl_speed.json", found)
        return
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    result: dict[str, Any] = {"config": CONFIG, "seeds": list(seeds), "programs": {}}
    for name, script in scripts.items():
        counted = episodes(script, seeds)
        result["programs"][name] = {
            "sha256": digests[name],
            "returns_and_episodes": counted.tolist(),
            "mean_return": {part: training.summary(mean_returns(counted, first)) for part, first in PARTS.items()},
        }
        print(
            name, {part: f"{x['mean']:.1f}" for part, x in result["programs"][name]["mean_return"].items()}, flush=True
        )
    training.write_json(RESULTS / "migration_purejaxrl.json", record("benchmarks migration", result))


if __name__ == "__main__":
    main()
