"""Does prioritization help, does V-trace inside PPO, does refreshing? Seven combinations, several tasks, many seeds.

    python -m benchmarks study acrobot pendulum breakout

The recipe is `pufferlib_ppo`, and an arm gives it another chain, which differs in nothing but the three. The learning
rate is chosen for each arm and task, from three, by the mean return over the whole of three seeds' training; ten other
seeds are then trained with it. Writes a record of benchmarks/results/study.jsonl for each task.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ppo_parts as pp
from ppo_parts import training
from recipes import pufferlib_ppo

from ._records import RESULTS
from ._timing import write


class Arm(NamedTuple):
    """Which of the three an arm has."""

    prioritized: bool
    advantage: Literal["gae", "vtrace"]
    refresh: Literal["rollout", "epoch", "minibatch"]

    def chain(self, config: pufferlib_ppo.Config) -> pp.Part:
        """PufferLib's chain with these of the three; without priorities, each segment comes once per epoch."""
        decay = {"gamma": config.gamma, "gae_lambda": config.gae_lambda}
        clips = {"rho_clip": config.vtrace_rho_clip, "c_clip": config.vtrace_c_clip}
        draws = {"num_minibatches": config.num_minibatches, "num_epochs": config.update_epochs, "refresh": self.refresh}
        beta = pp.linear_schedule(config.prio_beta0, 1.0, config.num_updates)
        annealed = pp.linear_schedule(config.ent_coef, 0.0, config.num_updates)
        return pp.chain(
            pp.vtrace(**decay, **clips) if self.advantage == "vtrace" else pp.gae(**decay),
            pp.prioritized_sampler(**draws, alpha=config.prio_alpha, beta=beta)
            if self.prioritized
            else pp.segment_minibatches(**draws),
            pp.advantage_normalize(ddof=1),
            pp.advantage_weight() if self.prioritized else pp.identity(),
            pp.clipped_surrogate(clip_eps=config.clip_coef),
            pp.policy_diagnostics(),
            pp.clipped_value_loss(clip_eps=config.vf_clip_coef, coef=config.vf_coef),
            pp.entropy_bonus(coef=annealed if config.anneal_ent else config.ent_coef),
        )


ARMS = {
    "plain": Arm(False, "gae", "rollout"),
    "refresh per epoch": Arm(False, "gae", "epoch"),
    "refresh": Arm(False, "gae", "minibatch"),
    "refresh + V-trace": Arm(False, "vtrace", "minibatch"),
    "priorities": Arm(True, "gae", "rollout"),
    "priorities + refresh": Arm(True, "gae", "minibatch"),
    "all three (PufferLib)": Arm(True, "vtrace", "minibatch"),
}
"""Without a refresh V-trace is GAE: the ratios before the sampler are 1."""

TUNING_SEEDS, SEEDS = 3, 10

DISCRETE, CONTINUOUS = (pufferlib_ppo.PRESETS[name] for name in ("discrete", "continuous"))
BREAKOUT = pufferlib_ppo.Config(
    env_id="Breakout-MinAtar", total_timesteps=500_000, num_envs=64, normalize_env=False, vf_coef=0.5, ent_coef=0.1,
    anneal_ent=True, activation="gelu",
)  # fmt: skip
TASKS: dict[str, tuple[pufferlib_ppo.Config, tuple[float, ...]]] = {
    "acrobot": (dataclasses.replace(DISCRETE, env_id="Acrobot-v1", total_timesteps=100_000), (2e-3, 5e-3, 1.5e-2)),
    "pendulum": (dataclasses.replace(CONTINUOUS, total_timesteps=300_000), (1e-3, 3e-3, 1e-2)),
    "breakout": (BREAKOUT, (5e-3, 1.5e-2, 4.5e-2)),
}


class Outcome(NamedTuple):
    """One number per seed: mean return of all episodes of the training, and of the last hundred."""

    whole: np.ndarray
    last: np.ndarray


def trained(config: pufferlib_ppo.Config, arm: Arm) -> Callable[[jax.Array, jax.Array], Outcome]:
    """`run(seeds, learning_rates)`, both `[SEEDS]`: that many runs in one program, compiled once."""

    def one(seed: jax.Array, learning_rate: jax.Array) -> tuple[jax.Array, jax.Array]:
        here = dataclasses.replace(config, learning_rate=learning_rate)
        train = pufferlib_ppo.make_train(here, pipeline=arm.chain(here))
        _, metrics = train(jax.random.key(seed))
        returns, episodes = metrics["episode_return"], metrics["episodes"]
        whole = jnp.sum(jnp.where(episodes > 0, returns * episodes, 0)) / jnp.sum(episodes)
        return whole, training.last_episodes_return(returns, episodes)

    program = jax.jit(jax.vmap(one)).lower(jnp.zeros(SEEDS, jnp.int32), jnp.zeros(SEEDS)).compile()
    return lambda seeds, rates: Outcome(*map(np.asarray, program(jnp.asarray(seeds), jnp.asarray(rates, jnp.float32))))


def measure(task: str) -> dict[str, Any]:
    """All arms of one task."""
    config, rates = TASKS[task]
    tuned = [(seed, rate) for rate in rates for seed in range(100, 100 + TUNING_SEEDS)]
    columns = (tuned * SEEDS)[:SEEDS]  # repeats only fill the program up
    arms = {}
    for name, arm in ARMS.items():
        began = time.perf_counter()
        run = trained(config, arm)
        whole = run(*zip(*columns, strict=True)).whole[: len(tuned)].reshape(len(rates), TUNING_SEEDS).mean(axis=1)
        rate = rates[int(np.nanargmax(whole))]
        outcome = run(range(1, 1 + SEEDS), [rate] * SEEDS)
        arms[name] = {
            **arm._asdict(),
            "learning_rate": rate,
            "tuning": {str(r): float(w) for r, w in zip(rates, whole, strict=True)},
            "return_over_training": training.summary(outcome.whole),
            "last_100_episodes_return": training.summary(outcome.last),
        }
        iqm, low, high = _interval(arms[name], "return_over_training")
        last = arms[name]["last_100_episodes_return"]["iqm"]
        print(
            f"{task:9} {name:22} learning rate {rate:g}: {iqm:8.1f} [{low:.1f}, {high:.1f}], last {last:.1f} "
            f"({time.perf_counter() - began:.0f} s)",
            flush=True,
        )
    return {"task": task, "config": dataclasses.asdict(config), "seeds": SEEDS, "arms": arms}


def _interval(arm: dict[str, Any], what: str) -> tuple[float, float, float]:
    return arm[what]["iqm"], *arm[what]["iqm_95"]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", metavar="task", help=f"of {', '.join(TASKS)}")
    tasks = parser.parse_args().tasks
    if unknown := set(tasks) - set(TASKS):
        parser.error(f"no such task: {', '.join(unknown)}; there are {', '.join(TASKS)}")
    for task in tasks:
        write(f"{RESULTS}/study.jsonl#{task}", "benchmarks study", measure(task))
