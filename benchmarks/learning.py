"""Do the recipes learn? Many seeds in one program, results kept as a file.

    python -m benchmarks learning cartpole pufferlib_pendulum --seeds 10
    python -m benchmarks learning cartpole --first-seed 101

writes a record of benchmarks/results/learning.jsonl (configuration, versions, hardware, seeds, curve) for each task;
`--first-seed 101` adds "_101" to its name, so that the seeds which the hyperparameters were chosen on and others stand
next to each other, and so does `--set ent_coef=0.001` with "_ent_coef_0.001". What the record said before is kept in
it, so that a change of the hot path shows.

Three numbers are recorded for each seed: the return of the last 100 training episodes, as other projects report it;
and the returns of 100 new episodes with the final policy, with sampled and with the most likely actions. The training
return favors short episodes, because more of them end in the same number of steps; the evaluations play each episode
to its end. Pages say which share of the seeds reaches the task's threshold.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ppo_parts import training
from recipes import cleanrl_ppo, ippo, library_ppo, pufferlib_ppo

from . import classic, rnd
from ._records import RESULTS, read
from ._timing import write

CLEANRL, PUFFERLIB = cleanrl_ppo.PRESETS, pufferlib_ppo.PRESETS


class Task(NamedTuple):
    """A training run, and the mean return at which a seed counts as a success."""

    make_train: Callable[[Any], training.Train]
    config: Any
    threshold: float
    why: str
    episodes: int = 100  # of each evaluation


GYMNASIUM = "Gymnasium's reward threshold"
SIMULATED: dict[str, Any] = {"num_envs": 16, "num_steps": 128}
CONNECT_FOUR = cleanrl_ppo.Config(
    env_id="pgx:connect_four", total_timesteps=3_000_000, num_envs=256, num_steps=16, hidden=(256, 256),
    num_minibatches=8, learning_rate=1e-3, gae_lambda=0.8,
)  # fmt: skip
TASKS = {
    "cartpole": Task(cleanrl_ppo.make_train, CLEANRL["discrete"], 475, GYMNASIUM),
    "acrobot": Task(
        cleanrl_ppo.make_train, dataclasses.replace(CLEANRL["discrete"], env_id="Acrobot-v1"), -100, GYMNASIUM
    ),
    "pendulum": Task(cleanrl_ppo.make_train, CLEANRL["continuous"], -200, "swings up at once and stays up"),
    "pufferlib_cartpole": Task(pufferlib_ppo.make_train, PUFFERLIB["discrete"], 475, GYMNASIUM),
    "pufferlib_pendulum": Task(
        pufferlib_ppo.make_train, PUFFERLIB["continuous"], -200, "swings up at once and stays up"
    ),
    "pufferlib_memory": Task(pufferlib_ppo.make_train, PUFFERLIB["memory"], 0.9, "95 % of the answers are right"),
    "pufferlib_memory_feedforward": Task(
        pufferlib_ppo.make_train,
        dataclasses.replace(PUFFERLIB["memory"], memory=None),
        0.9,
        "95 % of the answers are right",
    ),
    **{
        f"minatar_{game.lower()}": Task(
            pufferlib_ppo.make_train,
            dataclasses.replace(PUFFERLIB["minatar"], env_id=f"{game}-MinAtar"),
            threshold,
            "PPO in Goldie et al. 2024",
        )
        for game, threshold in {"Asterix": 15.04, "Breakout": 50.08, "Freeway": 61.84, "SpaceInvaders": 167.09}.items()
    },
    "ippo_spread": Task(ippo.make_train, ippo.PRESETS["spread"], -15, "untrained agents have -27"),
    "ippo_smax_3m": Task(ippo.make_train, ippo.PRESETS["smax"], 1.8, "about 80 % of the episodes won"),
    "ippo_riddle": Task(
        ippo.make_train, ippo.PRESETS["riddle"], 0.55, "better than telling on the last night without a signal, 0.48"
    ),
    "classic_mountain_car": Task(
        classic.make_train, classic.PRESETS["mountain_car"], -110.4, "rl-baselines3-zoo's PPO, one agent, 1M steps"
    ),
    "classic_mountain_car_250k": Task(
        classic.make_train,
        classic.PRESETS["mountain_car_250k"],
        -118,
        "gymnax-blines, as its figure shows, 250k steps",
    ),
    "classic_acrobot": Task(classic.make_train, classic.PRESETS["acrobot"], -81.3, "SLM-Lab's PPO, 300k steps"),
    "classic_mountain_car_continuous": Task(
        classic.make_train,
        classic.PRESETS["mountain_car_continuous"],
        91.5,
        "rl-baselines3-zoo's recurrent PPO, one agent, 300k steps",
    ),
    "classic_cartpole": Task(classic.make_train, classic.PRESETS["cartpole"], 500, "the largest return"),
    "brax_inverted_pendulum": Task(
        cleanrl_ppo.make_train,
        dataclasses.replace(
            CLEANRL["continuous"], env_id="brax:inverted_pendulum", total_timesteps=150_000, **SIMULATED
        ),
        990,
        "the largest return is 1000",
    ),
    "playground_cartpole_balance": Task(
        cleanrl_ppo.make_train,
        dataclasses.replace(
            CLEANRL["continuous"], env_id="playground:CartpoleBalance", total_timesteps=500_000, **SIMULATED
        ),
        950,
        "the largest return is 1000",
    ),
    "craftax_classic": Task(
        cleanrl_ppo.make_train,
        cleanrl_ppo.Config(
            env_id="craftax:Craftax-Classic-Symbolic-v1,reset_ratio=16",
            total_timesteps=1_000_000,
            num_envs=64,
            num_steps=64,
            num_minibatches=8,
            learning_rate=1e-3,
            gae_lambda=0.8,
            max_grad_norm=1.0,
        ),
        4.2,
        "PPO in Hafner 2021, 1M steps of Crafter, from pixels",
    ),
    "gsde_mountain_car_continuous": Task(
        library_ppo.make_train,
        dataclasses.replace(
            library_ppo.PRESETS["stable_baselines3"],
            env_id="MountainCarContinuous-v0",
            total_timesteps=300_000,
            noise_steps=256,
        ),
        90,
        GYMNASIUM,
    ),
    **{
        name: Task(cleanrl_ppo.make_train, dataclasses.replace(CONNECT_FOUR, **changes), 0.95, "of 1", episodes=5000)
        for name, changes in {
            "connect_four": {},
            "connect_four_6m": {"total_timesteps": 6_000_000},
            "connect_four_self_play": {"env_id": "pgx:connect_four,opponent=self"},
        }.items()
    },
    "rnd_deep_sea": Task(rnd.make_train, rnd.Config(), 0.98, "finds the treasure in every episode"),
}


def evaluations(train: training.Train, keys: jax.Array, state: Any, episodes: int = 100) -> dict[str, np.ndarray]:
    """Return the mean return and the environment's own numbers of new episodes, with a separate key for each seed."""
    keys = jax.vmap(lambda key: jax.random.fold_in(key, 2**20))(keys)
    found = {}
    for name, mode in {"evaluation": False, "evaluation_mode": True}.items():

        def play(key: jax.Array, state: Any, mode: bool = mode) -> Any:
            return train.evaluate_policy(key, state, episodes, mode=mode)

        played = jax.jit(jax.vmap(play))(keys, state)
        for what, x in {"return": played.episode_return, **played.info}.items():
            each_seed = np.mean(np.asarray(x).reshape(len(keys), -1), axis=1)
            found[f"{name}_{episodes}_episodes_{what}"] = each_seed
    return found


def task_of(name: str) -> Task:
    """The task of a record, whose name may also say seeds and changes of settings."""
    return TASKS[max((task for task in TASKS if name.startswith(task)), key=len)]


def changed(config: Any, changes: Sequence[str]) -> Any:
    """The configuration with some fields replaced; values are read as Python, or else as words."""
    values = {}
    for name, text in (change.split("=", 1) for change in changes):
        try:
            values[name] = ast.literal_eval(text)
        except ValueError:
            values[name] = text
    return dataclasses.replace(config, **values)


def measure(task: str, seeds: int, first_seed: int | None = None, changes: Sequence[str] = ()) -> dict[str, object]:
    """Train `seeds` seeds, from `first_seed` (the configuration's own if None) on, and describe how they did.

    `changes` are fields of the configuration and their values, as in "ent_coef=0.001".
    """
    make_train, config, threshold, why, episodes = TASKS[task]
    config = changed(config, changes)
    first_seed = config.seed if first_seed is None else first_seed
    name = "_".join([task, *([] if first_seed == config.seed else [str(first_seed)]), *changes]).replace("=", "_")
    train = make_train(config)
    keys = jnp.stack([jax.random.key(first_seed + i) for i in range(seeds)])
    began = time.perf_counter()
    program = jax.jit(jax.vmap(train)).lower(keys).compile()
    compiled = time.perf_counter()
    state, metrics = jax.block_until_ready(program(keys))
    finished = time.perf_counter()
    returns, episodes = np.asarray(metrics["episode_return"]), np.asarray(metrics["episodes"])
    each_seed = {"last_100_episodes_return": np.asarray(training.last_episodes_return(returns, episodes))}
    each_seed |= evaluations(train, keys, state, episodes)
    env_steps = (1 + np.arange(train.num_updates)) * train.steps_per_update
    each = max(1, train.num_updates // 200)
    pieces = np.array_split(returns, range(each, returns.shape[1], each), axis=1)
    thin = np.stack([np.nanmean(piece, axis=1) for piece in pieces], axis=1)
    return {
        "task": name,
        "recipe": make_train.__module__,
        "config": dataclasses.asdict(config),
        "seeds": list(range(first_seed, first_seed + seeds)),
        "env_steps": int(env_steps[-1]),
        **{what: training.summary(x) for what, x in each_seed.items()},
        "threshold": {"return": threshold, "why": why},
        "compile_seconds": compiled - began,
        "run_seconds": finished - compiled,
        "env_steps_per_second_all_seeds": seeds * int(env_steps[-1]) / (finished - compiled),
        "curve": {"env_steps": env_steps[::each], "mean_return_per_seed": np.round(thin, 2)},
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", choices=TASKS)
    parser.add_argument("--seeds", type=int, default=10, help="how many seeds")
    parser.add_argument("--first-seed", type=int, help="the first of them; by default the configuration's own")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="changes of the configuration")
    args = parser.parse_args()
    for task in args.tasks:
        result = measure(task, args.seeds, args.first_seed, args.set)
        last = read(RESULTS / "learning.jsonl").get(str(result["task"]))
        if last:
            result["before"] = {key: last[key] for key in ("commit", "date")} | {
                key: last["results"][key] for key in ("env_steps", "last_100_episodes_return")
            }
        write(f"{RESULTS}/learning.jsonl#{result['task']}", "benchmarks learning", result)
        print(f"{result['task']}: {result['env_steps']:,} steps, {args.seeds} seeds, {result['run_seconds']:.0f} s")
        for what in ("last_100_episodes_return", f"evaluation_{TASKS[task].episodes}_episodes_return"):
            found = result[what]
            share = np.mean(np.array(found["per_seed"]) >= TASKS[task].threshold)
            print(f"  {what}: mean {found['mean']:.3f} ({found['std']}), at or above the threshold: {share:.0%}")
