"""Compare chains of the index of papers with the plain chain: the same network, budget, seeds and optimizer."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ppo_parts as pp
from ppo_parts import envs, networks, training
from recipes import cleanrl_ppo

from . import _pages
from . import paper_index as index
from ._records import RESULTS, read
from ._timing import write

EPISODES = 100
PLAIN = "plain"


def make_train(config: cleanrl_ppo.Config, function: Callable[..., Any] | None) -> training.Train:
    """Make the recipe's training run with the chain of a paper; None: the plain chain."""
    env = envs.prepare(envs.make(config.env_id), normalize=config.normalize_env, gamma=config.gamma)
    policy = networks.actor_critic(env, config.hidden, "tanh")
    rate = pp.linear_schedule(config.learning_rate, 0.0, config.num_updates)
    made: Any = index.ppo()
    if function is not None:
        known = {"updates": config.num_updates, "rate": rate}
        made = function(**{name: known[name] for name in inspect.signature(function).parameters if name in known})
    setup = made if isinstance(made, index.Setup) else index.Setup(made)
    optimizer = setup.optimizer or pp.clipped_adam(rate, config.max_grad_norm)
    return training.Train.of(config, env, policy, setup.chain, optimizer)


def outcome(train: training.Train, seed: jax.Array) -> dict[str, jax.Array]:
    """Train one seed, and evaluate it with keys that training does not use: a number for each measure."""
    state, metrics = train(jax.random.key(seed))
    returns, episodes = metrics["episode_return"], metrics["episodes"]
    played = train.evaluate_policy(jax.random.fold_in(jax.random.key(seed), 2**20), state, EPISODES)
    return {
        "return_over_training": jnp.sum(jnp.where(episodes > 0, returns * episodes, 0)) / jnp.sum(episodes),
        "last_100_episodes_return": training.last_episodes_return(returns, episodes),
        "evaluation_return": jnp.mean(played.episode_return),
    }


def measure(train: training.Train, seeds: range) -> dict[str, Any]:
    """Train and evaluate all seeds in one program."""
    numbers = jax.jit(jax.vmap(functools.partial(outcome, train)))(jnp.arange(seeds.start, seeds.stop))
    return {name: training.summary(np.asarray(x)) for name, x in numbers.items()}


def compare(config: cleanrl_ppo.Config, seeds: range, names: list[str]) -> None:
    """Measure the plain chain and those of the named papers, unless recorded already; write the record after each."""
    name_of_record = f"{config.env_id}_{seeds.start}"
    same = {"config": json.loads(json.dumps(dataclasses.asdict(config))), "seeds": list(seeds), "episodes": EPISODES}
    recorded = read(RESULTS / "papers.jsonl").get(name_of_record, {"results": {}})["results"]
    arms = recorded.pop("arms", {}) if {name: recorded.get(name) for name in same} == same else {}
    for name in (PLAIN, *names):
        if name in arms:
            continue
        began = time.perf_counter()
        arms[name] = measure(make_train(config, getattr(index, name, None)), seeds)
        arms[name]["seconds"] = time.perf_counter() - began
        for what in ("evaluation_return", "return_over_training"):
            returns = (arms[arm][what]["per_seed"] for arm in (name, PLAIN))
            arms[name][what]["difference"] = _pages.difference(*returns)
        evaluated = arms[name]["evaluation_return"]
        print(f"{config.env_id} {name:20} {evaluated['mean']:8.1f} {evaluated['difference']}", flush=True)
        write(f"{RESULTS}/papers.jsonl#{name_of_record}", "benchmarks papers", same | {"arms": arms})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Compare chains of the index of papers with the plain chain.")
    known = [function.__name__ for function in index.COMPARED]
    parser.add_argument("names", nargs="*", metavar="paper", help=f"of {', '.join(known)}; none: all of them")
    parser.add_argument("--task", default="Acrobot-v1", help="name of an environment")
    parser.add_argument("--steps", type=int, default=100_000, help="environment steps of each run")
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=1, help="the seeds are this one and those after it")
    options = parser.parse_args()
    if unknown := set(options.names) - set(known):
        parser.error(f"not among those that are compared: {', '.join(sorted(unknown))}")
    config = cleanrl_ppo.Config(env_id=options.task, total_timesteps=options.steps)
    compare(config, range(options.first_seed, options.first_seed + options.seeds), options.names or known)
