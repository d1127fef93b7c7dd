"""Compare chains of the index of papers with the plain chain: the same network, budget, seeds and optimizer."""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ppo_parts as pp
from ppo_parts import envs, networks, training
from ppo_parts.recipes import cleanrl_ppo

from ._options import parser
from ._pages import difference
from ._records import RESULTS, read, write
from ._runs import EPISODES, outcome, seeds_of
from .paper_index import PAPERS, PLAIN, papers

COMPARED = ("evaluation_return", "return_over_training")


def make_train(config: cleanrl_ppo.Config, name: str) -> training.Train:
    """Make the recipe's training run with the chain of a paper, or with the plain chain."""
    env = envs.prepare(envs.make(config.env_id), normalize=config.normalize_env, gamma=config.gamma)
    policy = networks.actor_critic(env, config.hidden, "tanh")
    rate = pp.linear_schedule(config.learning_rate, 0.0, config.num_updates)
    paper = papers(config.num_updates, rate)[name]
    optimizer = paper.optimizer or pp.clipped_adam(rate, config.max_grad_norm)
    return training.Train.of(config, env, policy, paper.chain, optimizer)


def measure(config: cleanrl_ppo.Config, name: str, seeds: range) -> dict[str, Any]:
    """Train and evaluate all seeds in one program."""
    began = time.perf_counter()
    numbers = jax.jit(jax.vmap(functools.partial(outcome, make_train(config, name))))(jnp.asarray(seeds))
    found = {what: training.summary(np.asarray(x)) for what, x in numbers.items()}
    return found | {"seconds": time.perf_counter() - began}


def compare(config: cleanrl_ppo.Config, seeds: range, names: list[str]) -> None:
    """Measure the plain chain and those of the named papers, unless recorded already; write the record after each."""
    name_of_record = f"{config.env_id}_{seeds.start}"
    same = {"config": dataclasses.asdict(config) | {"hidden": list(config.hidden)}, "seeds": list(seeds)}
    same |= {"episodes": EPISODES}
    recorded = read(RESULTS / "papers.jsonl").get(name_of_record, {"results": {}})["results"]
    arms = recorded["arms"] if {name: recorded.get(name) for name in same} == same else {}
    for name in (PLAIN, *names):
        if name in arms:
            continue
        arms[name] = measure(config, name, seeds)
        for what in COMPARED:
            now, plain = (arms[arm][what]["per_seed"] for arm in (name, PLAIN))
            arms[name][what]["difference"] = difference(now, plain)
        evaluated = arms[name]["evaluation_return"]
        print(f"{config.env_id} {name:20} {evaluated['mean']:8.1f} {evaluated['difference']}", flush=True)
        write(f"{RESULTS}/papers.jsonl#{name_of_record}", same | {"arms": arms})


def main() -> None:
    """Command line."""
    options = parser(__doc__, seeds=10, first_seed=1, steps=100_000)
    options.add_argument("names", nargs="*", metavar="paper", help=f"of {', '.join(PAPERS)}; none: all of them")
    options.add_argument("--task", default="Acrobot-v1", help="name of an environment")
    given = options.parse_args()
    if unknown := set(given.names) - set(PAPERS):
        options.error(f"not among those that are compared: {', '.join(sorted(unknown))}")
    config = cleanrl_ppo.Config(env_id=given.task, total_timesteps=given.steps)
    compare(config, seeds_of(given), given.names or list(PAPERS))
