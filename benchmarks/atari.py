"""Atari games: `ppo_parts.recipes.atari_ppo` beside CleanRL's own `ppo_atari.py`.

    python -m benchmarks atari ale:breakout --steps 200_000 --seeds 1 --json mine.jsonl
    python -m benchmarks atari ale:pong --cleanrl ../cleanrl/.venv/bin/python ../cleanrl/cleanrl/ppo_atari.py

Both train one seed after another on this machine; the script runs as in `hosts`. Its ale-py 0.8.1 comes without games:
`ale-import-roms <folder>` imports them from `ale_py/roms` of a newer one. A record of benchmarks/results/atari.jsonl
has the returns of whole games against environment steps.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax

from ppo_parts import envs
from ppo_parts.recipes import atari_ppo

from . import _rivals
from ._records import claim, make_parser, write
from ._seeds import select_seeds


def train_ours(config: atari_ppo.Config) -> dict[str, Any]:
    """Train a seed with the recipe; a row has the steps so far, the mean return of ended games, and their number."""
    train = atari_ppo.make_train(config)
    with envs.host_errors():
        state = jax.block_until_ready(jax.jit(train.init)(jax.random.key(config.seed)))
        step = jax.jit(train.step)
        rows = []
        for update in range(1, train.num_updates + 1):
            state, metrics = jax.block_until_ready(step(state))
            if games := int(metrics["episodes"]):
                rows.append([update * train.steps_per_update, float(metrics["episode_return"]), games])
    return {"seed": config.seed, "games": rows}


def train_cleanrl(python: str, script: str, config: atari_ppo.Config) -> dict[str, Any]:
    """Train a seed with CleanRL's script; a row has the steps so far, the return of a game, and 1."""
    game = "".join(map(str.capitalize, config.env_id.removeprefix("ale:").split("_")))
    given = {"env-id": f"{game}NoFrameskip-v4", "seed": config.seed, "total-timesteps": config.total_timesteps}
    printed = _rivals.run_cleanrl(python, script, given)
    found = re.findall(r"global_step=(\d+), episodic_return=\[?([-+.e\d]+)", printed)
    rows = [[int(step), float(reward), 1] for step, reward in found]
    return {"seed": config.seed, "games": rows}


def measure(config: atari_ppo.Config, seeds: range, script: list[str] | None, address: str) -> None:
    """Train the seeds in turn, and write the record after each; `script` is a Python and CleanRL's script."""
    programs: dict[str, Callable[[atari_ppo.Config], dict[str, Any]]] = {"ppo_parts": train_ours}
    result: dict[str, Any] = {"task": config.env_id, "config": dataclasses.asdict(config)}
    result["env_steps"] = config.num_updates * config.num_envs * config.num_steps
    if script:
        programs["cleanrl"] = functools.partial(train_cleanrl, *script)
    runs = result["runs"] = {program: [] for program in programs}
    for seed, program in itertools.product(seeds, programs):
        run = programs[program](dataclasses.replace(config, seed=seed))
        runs[program].append(run)
        result["complete"] = all(len(each) == len(seeds) for each in runs.values())
        write(address, result)
        print(f"{config.env_id} seed {seed}, {program}: {len(run['games'])} games", flush=True)


def main() -> None:
    """Run the benchmark from the command line."""
    records = "benchmarks/results/atari.jsonl"
    parser = make_parser(__doc__, steps=200_000, seeds=1, first_seed=1, cleanrl=None, json=records)
    parser.add_argument("task", help="ale:breakout, ale:pong, ...")
    options = parser.parse_args()
    fields = {"env_id": options.task, "total_timesteps": options.steps, "seed": options.first_seed}
    config = dataclasses.replace(atari_ppo.PRESETS["atari"], **fields)
    [address] = claim(options, f"{options.task.removeprefix('ale:')}_{options.steps}_{options.first_seed}")
    measure(config, select_seeds(options), options.cleanrl, address)
