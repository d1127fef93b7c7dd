"""Measure whole training runs: environment steps per second and compile time of the recipes and of other programs.

    python -m benchmarks train --json benchmarks/results/train.jsonl#cpu

All train in turn, in one process: rollouts of 128 steps, 4 epochs of 4 minibatches, Adam, two tanh layers of 64 units
(one pair for the actor and one for the critic; PufferLib's PPO shares one). rejax, sbx and stable-baselines3 take part
if they are installed (`pip install rejax sbx-rl stable-baselines3`); the last two step gymnasium's environments in
Python. PureJaxRL takes part if it is cloned, with distrax: `--purejaxrl path/to/purejaxrl`. Recipes are compiled with
the options of `training.main`, the others with XLA's own, and PureJaxRL with both. Settings with more than 2,048
environments are for GPUs, and do not run by default.
"""

import dataclasses
import functools
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from ppo_parts._base.command_line import positive
from ppo_parts._core.pieces import MIN_ELEMENTS
from ppo_parts.recipes import cleanrl_ppo, pufferlib_ppo
from ppo_parts.training._program import compiler_options

from . import _timing
from ._records import Record, collect, make_parser
from ._rivals import EPOCHS, HIDDEN, MINIBATCHES, STEPS, Run, is_installed, make_on_host, make_purejaxrl, make_rejax

CARTPOLE, BREAKOUT = "CartPole-v1", "Breakout-MinAtar"
SETTINGS = {  # name: environment, number of copies, seeds trained at once, updates
    **{
        f"cartpole-{number}" + f"-seeds-{seeds}" * (seeds > 1): (CARTPOLE, number, seeds, updates)
        for number, updates in {4: 100, 64: 10, 2048: 1}.items()
        for seeds in (1, 8, 32)
    },
    "breakout-64": (BREAKOUT, 64, 1, 5),
    "breakout-1024": (BREAKOUT, 1024, 1, 1),
    "cartpole-65536": (CARTPOLE, 65536, 1, 4),
    "cartpole-16384-seeds-8": (CARTPOLE, 16384, 8, 4),
    "breakout-8192": (BREAKOUT, 8192, 1, 4),
}
ON_CPUS = [name for name, (_, number, *_) in SETTINGS.items() if number <= 2048]
HOST_RIVALS = ("sbx", "sb3")  # these step the environments in Python
ONE_SEED, SAME_OPTIONS = "cleanrl, one seed", "purejaxrl, same options"
OURS = ("cleanrl", "cleanrl, all at once", "pufferlib", ONE_SEED)


def make_programs(env_id: str, num_envs: int, updates: int, seeds: int, clone: str | None = None) -> dict[str, Run]:
    """Make `train(key)` of every program that can take part in a setting."""
    common = {"env_id": env_id, "total_timesteps": updates * num_envs * STEPS, "num_envs": num_envs, "num_steps": STEPS}
    config = cleanrl_ppo.Config(**common)
    found: dict[str, Run] = {"cleanrl": cleanrl_ppo.make_train(config)}
    if clone is not None:
        found["purejaxrl"] = found[SAME_OPTIONS] = make_purejaxrl(clone, env_id, num_envs, updates)
    if seeds > 1:
        return found
    if num_envs * STEPS // MINIBATCHES >= MIN_ELEMENTS and env_id == CARTPOLE:  # by default in pieces, on one core
        found["cleanrl, all at once"] = cleanrl_ppo.make_train(dataclasses.replace(config, microbatch=None))
    epochs = {"update_epochs": EPOCHS, "num_minibatches": MINIBATCHES}
    puffer = pufferlib_ppo.Config(**common, **epochs, hidden=HIDDEN, optimizer="adam")
    found["pufferlib"] = pufferlib_ppo.make_train(puffer)
    if is_installed("rejax"):
        found["rejax"] = make_rejax(env_id, num_envs, updates)
    return found


def compile_in_turn(calls: dict[str, tuple[Run, jax.Array]], times: int) -> tuple[dict[str, _timing.Thunk], Any]:
    """Compile each program with its argument several times, in a new order each time; return calls and seconds."""
    thunks: dict[str, Callable[[], Any]] = {}
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in calls}
    order, shuffle = list(calls.items()), random.Random(0).shuffle
    for _ in range(times):
        shuffle(order)
        for name, (train, argument) in order:
            as_ours = name in (*OURS, SAME_OPTIONS)
            call, took = _timing.compile_cold(train, argument, options=compiler_options() if as_ours else None)
            seconds[name].append(took)
            thunks[name] = functools.partial(call, argument)
    return thunks, seconds


def measure(setting: str, rounds: int, compilations: int, clone: str | None, only: Sequence[str]) -> list[Record]:
    """Return a row for each program of a setting (cleanrl and `only`, if any), compiled and timed in turn."""
    env_id, num_envs, seeds, updates = SETTINGS[setting]
    each, key = num_envs * STEPS, jax.random.key(0)
    chosen = make_programs(env_id, num_envs, updates, seeds, clone)
    chosen = {name: train for name, train in chosen.items() if not only or name in ("cleanrl", *only)}
    calls = {name: (train, key) for name, train in chosen.items()}
    if seeds > 1:
        keys = jax.random.split(key, seeds)
        calls = {name: (jax.vmap(train), keys) for name, train in chosen.items()}
        calls[ONE_SEED] = (chosen["cleanrl"], key)
    steps = {name: each * updates * argument.size for name, (_, argument) in calls.items()}
    thunks, compiling = compile_in_turn(calls, compilations)
    rows: dict[str, dict[str, Any]] = {}
    for name, found in compiling.items():
        medians = {step: statistics.median(took[step] for took in found) for step in ("trace", "compile")}
        total = _timing.summarize([sum(took.values()) for took in found])
        rows[name] = {"compile_seconds": medians | {"total": total}}
    fewer = max(1, updates // 10)
    for name in HOST_RIVALS if env_id == CARTPOLE and seeds == 1 and num_envs <= 64 else ():
        if is_installed(name) and (name in only or not only):
            thunks[name], steps[name], rows[name] = make_on_host(name, env_id, num_envs, fewer), each * fewer, {}
    walls = _timing.interleave(thunks, rounds, long=20)
    for name, found in _timing.compute_speeds(walls, steps, cleanrl="cleanrl").items():
        rows[name] |= found
    where = {"setting": setting, "env": env_id, "num_envs": num_envs}
    return [where | {"seeds": 1 if name == ONE_SEED else seeds, "program": name} | row for name, row in rows.items()]


def main() -> None:
    """Print a row for each program; write them with `--json`."""
    parser = make_parser(__doc__, rounds=7, json=None)
    parser.add_argument("--settings", nargs="+", choices=tuple(SETTINGS), default=ON_CPUS, help="(default: for CPUs)")
    programs = (*OURS, "purejaxrl", SAME_OPTIONS, "rejax", *HOST_RIVALS)
    alone = "only these, and cleanrl to compare them with"
    parser.add_argument("--programs", nargs="+", default=(), choices=programs, metavar="PROGRAM", help=alone)
    parser.add_argument("--compilations", type=positive, default=3, help="compilations of each program (default: 3)")
    parser.add_argument("--purejaxrl", metavar="PATH", help="a clone of PureJaxRL")
    options = parser.parse_args()
    absent = {name: "it is not installed" for name in ("rejax", *HOST_RIVALS) if not is_installed(name)}
    if options.purejaxrl is None:
        absent |= dict.fromkeys(("purejaxrl", SAME_OPTIONS), "--purejaxrl gives no clone")
    elif not (Path(options.purejaxrl) / "purejaxrl/ppo.py").exists():
        parser.error(f"argument --purejaxrl: {options.purejaxrl} has no purejaxrl/ppo.py")
    for name, why in absent.items():
        if name in options.programs:
            parser.error(f"argument --programs: {name} cannot take part, {why}")
        print(f"{name}: left out, {why}")
    how = (options.rounds, options.compilations, options.purejaxrl, options.programs)
    collect(options.json, (row for setting in options.settings for row in measure(setting, *how)))
