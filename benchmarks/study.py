"""Do prioritization, V-trace inside PPO and refreshing help? Seven combinations, several tasks, many seeds.

    python -m benchmarks study acrobot pendulum breakout --json mine.jsonl

The recipe is `pufferlib_ppo`, and an arm gives it a chain that differs in nothing but these three. The learning rate is
chosen from three for each arm and task, by the mean return over the whole training of three seeds; then ten other seeds
are trained with it. Each task writes a record of benchmarks/results/study.jsonl.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

import ppo_parts as pp
from ppo_parts import training
from ppo_parts.recipes import pufferlib_ppo

from ._records import claim, make_parser, write
from ._seeds import measure_training, show_iqm, vectorize


class Arm(NamedTuple):
    """Which of prioritization, V-trace and refreshing an arm uses."""

    prioritized: bool
    advantage: Literal["gae", "vtrace"]
    refresh: Literal["rollout", "epoch", "minibatch"]

    def make_chain(self, config: pufferlib_ppo.Config) -> pp.Part:
        """Make PufferLib's chain with the arm's choices; without priorities, each segment comes once per epoch."""
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
"""Without refreshing, V-trace is GAE: the ratios before the sampler are 1."""

TUNING_SEEDS, SEEDS = 3, 10
WHOLE, LAST = "return_over_training", "last_100_episodes_return"
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


def measure(task: str) -> dict[str, Any]:
    """Train all arms of a task: run `SEEDS` seeds in one program, first to choose the learning rate, then with it."""
    config, rates = TASKS[task]
    tuned = np.repeat(np.float32(rates), TUNING_SEEDS)
    arms: dict[str, Any] = {}
    for name, arm in ARMS.items():

        def trained(seed: jax.Array, rate: jax.Array, arm: Arm = arm) -> dict[str, jax.Array]:
            here = dataclasses.replace(config, learning_rate=rate)
            return measure_training(pufferlib_ppo.make_train(here, pipeline=arm.make_chain(here)), seed)

        run = vectorize(trained)
        # Repeat seeds, so that tuning runs the same program, which is compiled for the number of seeds in the record.
        found = run(np.resize(100 + np.arange(len(tuned)) % TUNING_SEEDS, SEEDS), np.resize(tuned, SEEDS))
        whole = found[WHOLE][: len(tuned)].reshape(len(rates), TUNING_SEEDS).mean(axis=1)
        rate = rates[int(np.nanargmax(whole))]
        found = run(np.arange(1, 1 + SEEDS), np.full(SEEDS, rate, np.float32))
        summaries = {what: training.summary(x) for what, x in found.items()}
        tuning = {str(r): float(w) for r, w in zip(rates, whole, strict=True)}
        arms[name] = {**arm._asdict(), "learning_rate": rate, "tuning": tuning, **summaries}
        shown = ", last ".join(show_iqm(arms[name][what]) for what in (WHOLE, LAST))
        print(f"{task:9} {name:22} learning rate {rate:g}: {shown}", flush=True)
    return {"task": task, "config": dataclasses.asdict(config), "seeds": list(range(1, 1 + SEEDS)), "arms": arms}


def main() -> None:
    """Run the benchmark from the command line."""
    parser = make_parser(__doc__, json="benchmarks/results/study.jsonl")
    parser.add_argument("tasks", nargs="+", choices=TASKS)
    options = parser.parse_args()
    for task, address in zip(options.tasks, claim(options, *options.tasks), strict=True):
        write(address, measure(task))
