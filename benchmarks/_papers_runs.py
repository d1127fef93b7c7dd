"""Compare chains of the index of papers with the plain chain: the same network, budget, seeds and optimizer."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ppo_parts as pp
from ppo_parts import envs, networks, training
from recipes import cleanrl_ppo

from . import papers
from ._timing import record

RESULTS = Path(__file__).resolve().parent / "results" / "papers"
EPISODES = 100
PLAIN = "plain"


def make_train(config: cleanrl_ppo.Config, function: Callable[..., Any] | None) -> training.Train:
    """Make the recipe's training run with the chain of a paper; None: the plain chain."""
    env = envs.prepare(envs.make(config.env_id), normalize=config.normalize_env, gamma=config.gamma)
    policy = networks.actor_critic(env, config.hidden, "tanh")
    rate = pp.linear_schedule(config.learning_rate, 0.0, config.num_updates)
    made: Any = papers.ppo()
    if function is not None:
        known = {"updates": config.num_updates, "rate": rate}
        made = function(**{name: known[name] for name in inspect.signature(function).parameters if name in known})
    setup = made if isinstance(made, papers.Setup) else papers.Setup(made)
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


def difference(arm: dict[str, Any], plain: dict[str, Any], samples: int = 5000) -> dict[str, Any]:
    """The difference of the means over seeds, with its 95 % bootstrap interval; the seeds are not pairs."""
    draws, generator = [], np.random.default_rng(0)
    for result in (arm, plain):
        x = np.asarray(result["per_seed"])
        draws.append(np.mean(generator.choice(x, (samples, len(x))), axis=1))
    low, high = np.quantile(draws[0] - draws[1], [0.025, 0.975])
    return {"mean": arm["mean"] - plain["mean"], "95": [float(low), float(high)]}


def compare(config: cleanrl_ppo.Config, seeds: range, names: list[str]) -> None:
    """Measure the plain chain and those of the named papers, unless recorded already; write the record after each."""
    path = RESULTS / f"{config.env_id}_{seeds.start}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    same = {"config": json.loads(json.dumps(dataclasses.asdict(config))), "seeds": list(seeds), "episodes": EPISODES}
    recorded = json.loads(path.read_text())["results"] if path.exists() else {}
    arms = recorded.pop("arms", {}) if {name: recorded.get(name) for name in same} == same else {}
    for name in (PLAIN, *names):
        if name in arms:
            continue
        began = time.perf_counter()
        arms[name] = measure(make_train(config, getattr(papers, name, None)), seeds)
        arms[name]["seconds"] = time.perf_counter() - began
        for what in ("evaluation_return", "return_over_training"):
            arms[name][what]["difference"] = difference(arms[name][what], arms[PLAIN][what])
        evaluated = arms[name]["evaluation_return"]
        print(f"{config.env_id} {name:20} {evaluated['mean']:8.1f} {evaluated['difference']}", flush=True)
        training.write_json(path, record("benchmarks papers", same | {"arms": arms}))
