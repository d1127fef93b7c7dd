"""Compare chains of the index of papers with the plain chain: the same network, budget, seeds and optimizer."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

import ppo_parts as pp
from ppo_parts import envs, networks, training
from ppo_parts.recipes import cleanrl_ppo
from ppo_parts.training._files import plain

from ._options import parser
from ._pages import difference, interval, signed
from ._records import COMMIT, RESULTS, read, write
from ._runs import EPISODES, outcome, seeds_of, side_by_side
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


def compare(config: cleanrl_ppo.Config, seeds: range, names: list[str]) -> None:
    """Measure the plain chain and those of the named papers, unless recorded already; write the record after each."""
    address = f"{config.env_id}_{seeds.start}"
    same = plain({"config": dataclasses.asdict(config), "seeds": list(seeds), "episodes": EPISODES})
    record = read(RESULTS / "papers.jsonl").get(address, {"results": {}})
    arms: dict[str, Any] = {}
    if all(record["results"].get(name) == x for name, x in same.items()):
        arms = {name: {"commit": record["commit"]} | arm for name, arm in record["results"]["arms"].items()}
    for name in (PLAIN, *names):
        if name in arms:
            continue
        found = side_by_side(functools.partial(outcome, make_train(config, name)))(np.asarray(seeds))
        arm = arms[name] = {"commit": COMMIT} | {what: training.summary(x) for what, x in found.items()}
        for what in COMPARED:
            arm[what]["difference"] = difference(arm[what]["per_seed"], arms[PLAIN][what]["per_seed"])
        shown = f"{interval(arm['evaluation_return'], 1)}, {signed(arm['evaluation_return']['difference'])}"
        print(f"{config.env_id} {name:20} {shown}", flush=True)
        write(f"{RESULTS}/papers.jsonl#{address}", same | {"arms": arms})


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
