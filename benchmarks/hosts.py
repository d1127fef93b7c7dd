"""Environments on the host: steps per second of the environments alone, of collecting, and of whole training runs.

    python -m benchmarks hosts --json benchmarks/results/hosts.jsonl#cpu
    python -m benchmarks hosts --cleanrl ../cleanrl/.venv/bin/python ../cleanrl/cleanrl/ppo_continuous_action.py

All train the same network on the same task with the same settings. `recipe` is `mujoco_ppo`; `cleanrl's settings` is
`cleanrl_ppo`, which computes advantages once per rollout, like CleanRL and Stable-Baselines3. These two take part if
they are given or installed. CleanRL's own script runs unchanged, under its own Python because it needs Gymnasium
0.29, and on version 4 of the task. Programs run in turn; compile time does not count.
"""

import concurrent.futures
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ppo_parts import training
from ppo_parts._base.command_line import positive
from ppo_parts.recipes import async_ppo, cleanrl_ppo, mujoco_ppo
from ppo_parts.training._program import compiler_options

from . import _timing
from ._records import collect, make_parser
from ._rivals import is_installed, make_on_host, run_cleanrl

ENVS, STEPS, EPOCHS, MINIBATCHES = 8, 256, 10, 32


def make_alone(task: str, updates: int) -> Callable[[], Any]:
    """Make a function that steps Gymnasium's own vector environment with random actions."""
    import gymnasium

    mode = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
    env = gymnasium.make_vec(task, ENVS, vectorization_mode="sync", vector_kwargs=mode)
    env.reset(seed=0)
    actions = np.random.default_rng(0).uniform(-1, 1, (STEPS, *env.action_space.shape)).astype(np.float32)

    def play() -> None:
        for _ in range(updates):
            for action in actions:
                env.step(action)

    return play


def make_runner(advance: Callable[[Any], Any], state: Any, updates: int) -> Callable[[], None]:
    """Make a function that calls `state = advance(state)` for each update; the next call continues from there."""

    def run() -> None:
        nonlocal state
        for _ in range(updates):
            state = jax.block_until_ready(advance(state))

    return run


def make_ours(train: training.Train, updates: int, learn: bool = True) -> Callable[[], Any]:
    """Make a function that runs `updates` rollouts, each followed by an update if `learn`."""
    one = jax.jit(train.step if learn else train.collect, compiler_options=compiler_options())
    state = jax.jit(train.init)(jax.random.key(0))
    return make_runner(lambda x: one(x)[0] if learn else x._replace(rollout=one(x)[0]), state, updates)


def make_ahead(config: mujoco_ppo.Config, updates: int) -> Callable[[], Any]:
    """Make the same function for `ppo_parts.recipes.async_ppo`, whose actor is one rollout ahead of the learner."""
    program = async_ppo.OneAhead(async_ppo.make_train(config), 0, training.RunOptions())
    state = program.start()
    advance = program.advance_from(state)
    loop = make_runner(lambda x: advance(x, 1)[0], state, updates)

    def run() -> None:
        loop()
        concurrent.futures.wait(program.ahead)  # so that updates have their rollouts, and other programs run alone

    return run


def measure(task: str, updates: int, rounds: int, script: list[str] | None) -> list[dict[str, Any]]:
    """Return a row per program: median steps per second, and ratios to the recipe and to the environments, paired."""
    settings: dict[str, Any] = {
        "env_id": f"gym:{task}", "num_envs": ENVS, "num_steps": STEPS, "total_timesteps": 10**9,
        "update_epochs": EPOCHS, "num_minibatches": MINIBATCHES,
    }  # fmt: skip
    config = mujoco_ppo.Config(**settings)
    other = dataclasses.replace(cleanrl_ppo.PRESETS["continuous"], **settings)
    train = mujoco_ppo.make_train(config)
    thunks = {
        "environments alone": make_alone(task, updates),
        "collecting": make_ours(train, updates, learn=False),
        "recipe": make_ours(train, updates),
        "cleanrl's settings": make_ours(cleanrl_ppo.make_train(other), updates),
        "one rollout ahead": make_ahead(config, updates),
    }
    steps, fewer = dict.fromkeys(thunks, updates * ENVS * STEPS), max(2, updates // 4)
    if is_installed("sb3"):
        minibatches = {"n_steps": STEPS, "batch_size": ENVS * STEPS // MINIBATCHES, "n_epochs": EPOCHS}
        others = {"normalize": True, "learning_rate": 3e-4, "ent_coef": 0.0}
        steps["stable-baselines3"] = fewer * ENVS * STEPS
        thunks["stable-baselines3"] = make_on_host("sb3", task, ENVS, fewer, **minibatches, **others)
    if script:
        speeds: list[float] = []  # the script times itself, excluding startup, and prints its speed so far
        steps["cleanrl"] = fewer * ENVS * STEPS
        given = {name.replace("_", "-"): x for name, x in settings.items()}
        given |= {"env-id": task.replace("-v5", "-v4"), "total-timesteps": steps["cleanrl"]}
        thunks["cleanrl"] = lambda: speeds.append(float(re.findall(r"SPS: (\d+)", run_cleanrl(*script, given))[-1]))
    walls = _timing.interleave(thunks, rounds)
    if script:
        walls["cleanrl"] = [steps["cleanrl"] / speed for speed in speeds[-rounds:]]
    found = _timing.compute_speeds(walls, steps, recipe="recipe", environments="environments alone")
    return [{"task": task, "num_envs": ENVS, "program": name} | row for name, row in found.items()]


def main() -> None:
    """Print a row for each program; write them with `--json`."""
    parser = make_parser(__doc__, rounds=5, cleanrl=None, json=None)
    parser.add_argument("--tasks", nargs="+", default=["HalfCheetah-v5"], help="MuJoCo tasks (default: HalfCheetah-v5)")
    parser.add_argument("--updates", type=positive, default=20, help="updates in each sample (default: 20)")
    options = parser.parse_args()
    how = (options.updates, options.rounds, options.cleanrl)
    collect(options.json, (row for task in options.tasks for row in measure(task, *how)))
