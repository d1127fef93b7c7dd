"""The protocol of Tianshou's benchmark: train many seeds of a variant, and stop at equal intervals to evaluate them."""

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ppo_parts import training
from ppo_parts._base.command_line import positive
from ppo_parts.recipes import mujoco_ppo

from ._records import claim, make_parser, write
from ._seeds import make_eval_key, make_keys, select_seeds, show_interval, train_in_stages

EPISODES = 10  # in each evaluation
WITH_FORCES = ("Ant-v5", "Humanoid-v5")  # tasks that observe contact forces, unless they are told not to


class Variant(NamedTuple):
    """The function that makes a run, its configuration, and whether tasks `WITH_FORCES` observe contact forces."""

    make_train: Callable[[Any], training.Train]
    config: Any = mujoco_ppo.Config()
    contact_forces: bool = True


def measure(variant: Variant, options: argparse.Namespace) -> None:
    """Train the seeds of a command line in one program, and write the results after each evaluation."""
    task, name = options.task, options.variant
    [address] = claim(options, f"{task}_{options.steps}_{name}_{options.first_seed}")
    without = ",include_cfrc_ext_in_observation=False"  # as in version 3, where they were always 0
    env_id = f"gym:{task}" + without * (task in WITH_FORCES and not variant.contact_forces)
    fields = {"env_id": env_id, "total_timesteps": options.steps, "seed": options.first_seed}
    config, seeds = dataclasses.replace(variant.config, **fields), select_seeds(options)
    train, keys = variant.make_train(config), make_keys(seeds)
    [kl] = (metric for metric in train.shapes[1] if metric.split("/")[-1] == "approx_kl")  # perhaps prefixed by a phase

    def play(key: jax.Array, state: Any, number: jax.Array) -> jax.Array:
        key = jax.random.fold_in(make_eval_key(key), number)
        return jnp.mean(train.evaluate_policy(key, state, EPISODES, mode=True).episode_return)

    evaluate = jax.jit(jax.vmap(play, in_axes=(0, 0, None)))
    result = {"task": task, "variant": name, "config": dataclasses.asdict(config), "seeds": list(seeds)}
    rows = result["curve"] = []
    seen: list[tuple[np.ndarray, np.ndarray]] = []  # returns and numbers of episodes, each `[seeds, updates]`
    for stage in train_in_stages(train, keys, options.evaluations):
        seen.append((np.asarray(stage.metrics["episode_return"]), np.asarray(stage.metrics["episodes"])))
        returns, episodes = (np.concatenate(x, axis=1) for x in zip(*seen, strict=True))
        row = {
            "env_steps": stage.env_steps,
            "evaluation": np.asarray(evaluate(keys, stage.state, jnp.int32(stage.number))),
            "last_100_episodes": np.asarray(training.last_episodes_return(returns, episodes)),
            "approx_kl": float(np.nanmean(stage.metrics[kl])),
        }
        rows.append(row)
        result |= {"env_steps": stage.env_steps, "complete": stage.last}
        write(address, result)
        shown = show_interval(training.summary(row["evaluation"]))
        print(f"{task} {name} {stage.env_steps:>9,}: {shown}", flush=True)


def run(description: str | None, variants: Mapping[str, Variant], benchmark: str) -> None:
    """Read the command line of a benchmark with these variants, whose first is the default, and run it."""
    records = f"benchmarks/results/{benchmark}.jsonl"
    parser = make_parser(description, steps=1_000_000, seeds=10, first_seed=1, json=records)
    parser.add_argument("task", help="HalfCheetah-v5, Ant-v5, Walker2d-v5, Hopper-v5, Humanoid-v5, ...")
    parser.add_argument("--evaluations", type=positive, default=20, help="how many, at equal intervals (default: 20)")
    parser.add_argument("--variant", choices=variants, default=next(iter(variants)), help="(default: %(default)s)")
    options = parser.parse_args()
    measure(variants[options.variant], options)
