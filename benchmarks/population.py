"""Population-based training against random search with the same steps: 8 members draw the same first hyperparameters.

    python -m benchmarks population acrobot pendulum --first-seed 101

Both arms report the return of 100 new episodes of the member with the best training return. The recipe is `cleanrl_ppo`
with its own settings except for what is searched. Writes a record of benchmarks/results/population.jsonl for each task.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ppo_parts import training
from ppo_parts.recipes import cleanrl_ppo
from ppo_parts.training._program import compiler_options

from ._options import parser
from ._pages import difference, interval
from ._records import RESULTS, write
from ._runs import EPISODES, evaluation_key, keys_of, seeds_of

MEMBERS, FRACTION, SELECTIONS = 8, 0.25, 20
RANGES = {
    "learning_rate": training.between(1e-5, 1e-2), "ent_coef": training.between(1e-4, 1e-1),
    "clip_coef": training.between(0.05, 0.5), "vf_coef": training.between(0.1, 2.0),
}  # fmt: skip
DISCRETE, CONTINUOUS = (cleanrl_ppo.PRESETS[name] for name in ("discrete", "continuous"))
TASKS = {
    "acrobot": dataclasses.replace(DISCRETE, env_id="Acrobot-v1", total_timesteps=50_000),
    "pendulum": dataclasses.replace(CONTINUOUS, total_timesteps=50_000, num_envs=8, num_steps=128, num_minibatches=16),
}


def measure(task: str, seeds: range) -> dict[str, Any]:
    """Both arms, all seeds of an arm in one program."""
    config, arms = TASKS[task], {}
    make_train = training.population(cleanrl_ppo.make_train, RANGES, members=MEMBERS, fraction=FRACTION)
    population = make_train(config)

    def run(every: jax.Array, key: jax.Array) -> jax.Array:
        train = dataclasses.replace(population, every=every)  # traced, so that both arms are the same program
        return jnp.mean(train.evaluate_policy(evaluation_key(key), train(key).state, EPISODES).episode_return)

    # One seed after another, because a CPU is busy with one, and nested vmaps compile for twice as long.
    program = jax.jit(
        lambda every, keys: jax.lax.map(functools.partial(run, every), keys),
        compiler_options=compiler_options(),
    )
    for arm, every in {"population": config.num_updates // SELECTIONS, "random search": config.num_updates}.items():
        arms[arm] = training.summary(program(every, keys_of(seeds)))
        print(f"{task:9} {arm:14} {interval(arms[arm], 1)}", flush=True)
    change = difference(*(arm["per_seed"] for arm in arms.values()))
    steps = population.num_updates * population.steps_per_update
    found = {"task": task, "config": dataclasses.asdict(config), "ranges": {n: str(x) for n, x in RANGES.items()}}
    found |= {"members": MEMBERS, "fraction": FRACTION, "selections": SELECTIONS, "seeds": list(seeds)}
    return found | {"env_steps": steps, "arms": arms, "difference": change}


def main() -> None:
    """Command line."""
    options = parser(__doc__, seeds=10, first_seed=1)
    options.add_argument("tasks", nargs="+", choices=TASKS)
    given = options.parse_args()
    for task in given.tasks:
        name = task if given.first_seed == 1 else f"{task}_{given.first_seed}"
        write(f"{RESULTS}/population.jsonl#{name}", measure(task, seeds_of(given)))
