"""Population-based training against random search with as many steps: the 8 members of both draw the same first values.

    python -m benchmarks population acrobot pendulum cartpole --first-seed 101 --json mine.jsonl

Both arms report the return of 100 new episodes of the member with the highest training return after the last selection
(in random search, over as many updates). Seeds of the two arms are paired, because they are the same run until the
first selection. The recipe is `cleanrl_ppo` with its own settings except for what is searched.
Each task writes a record of benchmarks/results/population.jsonl.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ppo_parts import training
from ppo_parts.recipes import cleanrl_ppo
from ppo_parts.training._program import compiler_options, keep_compiled_programs

from ._records import claim, make_parser, write
from ._seeds import make_eval_key, make_keys, select_seeds, show_interval

MEMBERS, PERIODS = 8, 5  # a selection comes between two periods
OPTIONS = {"fraction": 0.25, "factors": (0.5, 2.0)}  # few selections need large steps
RANGES = {
    "learning_rate": training.Range(1e-5, 1e-2), "ent_coef": training.Range(1e-4, 1e-1),
    "clip_coef": training.Range(0.05, 0.5), "vf_coef": training.Range(0.1, 2.0),
}  # fmt: skip
DISCRETE, CONTINUOUS = (cleanrl_ppo.PRESETS[name] for name in ("discrete", "continuous"))
TASKS = {
    "acrobot": dataclasses.replace(DISCRETE, env_id="Acrobot-v1", total_timesteps=50_000),
    "pendulum": dataclasses.replace(CONTINUOUS, total_timesteps=50_000, num_envs=8, num_steps=128, num_minibatches=16),
    "cartpole": dataclasses.replace(DISCRETE, total_timesteps=20_000),
}


def measure(task: str, seeds: range) -> dict[str, Any]:
    """Train both arms, with all seeds of an arm in one program."""
    config, arms = TASKS[task], {}
    every = config.num_updates // PERIODS
    for arm, options in {"population": OPTIONS, "random search": OPTIONS | {"fraction": 0.0}}.items():
        make_train = training.population(cleanrl_ppo.make_train, RANGES, members=MEMBERS, every=every, **options)
        train = make_train(config)

        def run(key: jax.Array, train: training.Train = train) -> jax.Array:
            return jnp.mean(train.evaluate_policy(make_eval_key(key), train(key).state, episodes=100).episode_return)

        # Run one seed after another, because one keeps a CPU busy, and nested vmaps take twice as long to compile.
        program = jax.jit(lambda keys: jax.lax.map(run, keys), compiler_options=compiler_options())
        arms[arm] = training.summary(program(make_keys(seeds)))
        print(f"{task:9} {arm:14} {show_interval(arms[arm], 1)}", flush=True)
    found = {"task": task, "config": dataclasses.asdict(config), "ranges": {n: str(x) for n, x in RANGES.items()}}
    found |= {"members": MEMBERS, "every": every, "options": OPTIONS, "seeds": list(seeds)}
    return found | {"env_steps": train.num_updates * train.steps_per_update, "arms": arms}


def main() -> None:
    """Run the benchmark from the command line."""
    parser = make_parser(__doc__, seeds=10, first_seed=101, json="benchmarks/results/population.jsonl")
    parser.add_argument("tasks", nargs="+", choices=TASKS)
    options = parser.parse_args()
    addresses = claim(options, *(f"{task}_{options.first_seed}" for task in options.tasks))
    keep_compiled_programs()
    for task, address in zip(options.tasks, addresses, strict=True):
        write(address, measure(task, select_seeds(options)))
