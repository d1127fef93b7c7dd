"""How often is `python -m ppo_parts.doctor` right, on planted faults and on healthy runs?

    python -m benchmarks doctor --runs build/doctor --json benchmarks/results/doctor.jsonl#cpu

The rules were set on the programs of TRAINING, and measured on those of HELD_OUT, with seeds from 11100.
All faults that are numbers are planted in one program per task, which has one axis for all faults and seeds. A fault
is harmful if the run ends below every healthy run of its program; a run without a fault is healthy unless it is idle.
`--runs` keeps the metrics, so that rules can be judged again without training.
"""

import collections
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppo_parts import envs, training
from ppo_parts.recipes import cleanrl_ppo, ippo, library_ppo, mujoco_ppo, pufferlib_ppo
from ppo_parts.recipes.cleanrl_ppo import Config
from ppo_parts.training._files import make_plain, replace_file

from ._records import COMMIT, Record, make_parser, write
from ._seeds import make_eval_key, make_keys, vectorize
from .faults import FAULTS, NORMAL, TRACED, Numbers, make_train

Judged = tuple[str, list[str], bool]  # what was planted, what was found, and if it did harm (or a healthy run idled)
SETTINGS = {"epochs_many": {"update_epochs": 40}, "minibatch_small": {"num_minibatches": 128}}
"""Faults that are settings of a program. The small minibatches have 4 or 8 elements."""
DISCRETE = Config(num_envs=8, num_steps=64, learning_rate=2e-3, hidden=(32, 32))
SLOWER = {"num_steps": 128, "num_minibatches": 8, "learning_rate": 1e-3}
BOXED = dataclasses.replace(DISCRETE, ent_coef=0.0, normalize_env=True, **SLOWER)
NEEDS = {
    **dict.fromkeys((
        "statistics_frozen", "observations_vanish", "time_limit_as_end", "action_changed", "actions_saturated",
        "evaluation_apart (statistics)", "log_prob_wrong", "actions_narrow",
    ), "boxed actions"),
    "softmax_twice": "discrete actions", "value_dominates": "a shared trunk",
    # With normalized rewards, raw advantages do no harm, as in mujoco_ppo.
    "advantage_not_standardized": "discrete actions", "memory_not_reset": "a memory",
    "reward_constant": "a fixed end", "end_as_time_limit": "early ends",
}  # fmt: skip
"""What a run must have so that a fault can be planted in it."""
ENDLESS = (
    "Pendulum-v1", "Reacher-misc", "Swimmer-misc", "PointRobot-misc", "MetaMaze-misc", "Freeway-MinAtar",
    "gym:Pusher-v5", "gym:Reacher-v5", "gym:Swimmer-v5",
)  # fmt: skip
"""Tasks whose episodes end at a fixed time; with constant rewards, nothing can be learned there."""
COUNTED = ("update_epochs", "num_minibatches", "num_steps", "num_envs")


def measure(train: training.Train, key: Any, config: Any, f: Numbers = NORMAL) -> dict[str, Any]:
    """Train, and return metrics `[updates]`, together with those of an evaluation and of a probe."""

    def unless(fault: str, last: Any, first: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(f[fault] > 0, b, a), last, first)

    first = train.init(key)
    state, metrics = jax.lax.scan(lambda state, _: train.step(state), first, None, length=train.num_updates)
    params = unless("stale", state.learner.params, first.learner.params)
    env_state = unless("unnormalized", state.rollout.env_state, first.rollout.env_state)
    learner, rollout = state.learner._replace(params=params), state.rollout._replace(env_state=env_state)
    episodes = train.evaluate_policy(make_eval_key(key), state._replace(learner=learner, rollout=rollout), 32)
    evaluation = {"evaluation/episode_return": jnp.mean(episodes.episode_return)}
    return {**{name: metrics[name] for name in metrics}, **evaluation, **training.probe(train, state, config)}


def run_lanes(base: Config, names: list[str], first_seed: int, shared: bool = False, memory: bool = False) -> Record:
    """Run one lane for each name of a fault, or "healthy", in one program; seeds count up separately for each name."""
    env, normal = envs.make(base.env_id), NORMAL | {name: getattr(base, name) for name in TRACED}
    rows = [normal | FAULTS.get(name, {}) for name in names]
    for row, name in zip(rows, names, strict=True):
        row["learning_rate"] = normal["learning_rate"] * FAULTS.get(name, {}).get("learning_rate", 1.0)
    numbers = {name: np.array([row[name] for row in rows], np.float32) for name in normal}

    def run(seed: Any, f: Numbers) -> dict[str, Any]:
        config = dataclasses.replace(base, **{name: f[name] for name in TRACED})
        return measure(make_train(config, f, env, shared, memory), jax.random.key(seed), config, f)

    found = vectorize(run)(np.array([first_seed + names[:i].count(name) for i, name in enumerate(names)]), numbers)
    counts = {name: np.full(len(names), getattr(base, name)) for name in COUNTED}
    given = {f"config/{name}": x for name, x in (counts | {name: numbers[name] for name in TRACED}).items()}
    return {"name": np.array(names), **found, **given, "config": json.dumps(make_plain(dataclasses.asdict(base)))}


def join_lanes(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the runs of programs that have the same task and number of updates."""
    whole = {key: np.concatenate([part[key] for part in parts]) for key in parts[0] if key != "config"}
    return whole | {"config": parts[0]["config"]}


def run_faults(
    env_id: str, base: Config, first_seed: int, steps: int, shared: bool = False, healthy: int = 12, seeds: int = 2
) -> dict[str, Any]:
    """Run healthy lanes and every fault: those that are numbers in one program, each of SETTINGS in its own."""
    base = dataclasses.replace(base, env_id=env_id, total_timesteps=steps)
    has = {
        "boxed actions": base.normalize_env, "discrete actions": not base.normalize_env, "a shared trunk": shared,
        "a memory": False, "a fixed end": env_id in ENDLESS, "early ends": env_id not in ENDLESS,
    }  # fmt: skip
    planted = [name for name in FAULTS if name not in NEEDS or has[NEEDS[name]]]
    names = [name for name in planted for _ in range(seeds)] + ["healthy"] * healthy
    changed = [(dataclasses.replace(base, **changes), [name] * seeds) for name, changes in SETTINGS.items()]
    return join_lanes([run_lanes(*each, first_seed, shared) for each in [(base, names), *changed]])


def run_healthy(recipe: Any, preset: str, env_id: str, steps: int, first_seed: int) -> dict[str, Any]:
    """Run a recipe as it is, with ten seeds."""
    config = dataclasses.replace(recipe.PRESETS[preset], env_id=env_id, total_timesteps=steps)
    train = recipe.make_train(config)
    found = vectorize(lambda key: measure(train, key, config))(make_keys(range(first_seed, first_seed + 10)))
    return {"name": ["healthy"] * 10, **found, "config": json.dumps(make_plain(dataclasses.asdict(config)))}


KNOWN = dict.fromkeys(("MetaMaze-misc", "jumanji:Snake-v1"), "observations_large")
KNOWN |= {"gym:LunarLander-v3": "reward_scale_large", "jumanji:SlidingTilePuzzle-v0": "time_limit_as_end"}
"""By task, a finding that is right in all its runs: docs/diagnosis.md has the reasons."""
Programs = dict[str, Callable[[], dict[str, Any]]]
DISCRETE_PRESETS = ((cleanrl_ppo, "discrete"), (pufferlib_ppo, "discrete"))
BOXED_PRESETS = (
    (cleanrl_ppo, "continuous"), (pufferlib_ppo, "continuous"), (mujoco_ppo, "mujoco"), (mujoco_ppo, "tianshou"),
    *((library_ppo, library) for library in ("stable_baselines3", "rsl_rl", "rl_games", "skrl", "tianshou", "brax")),
)  # fmt: skip
SPREAD, MINATAR, POPGYM = ((ippo, "spread"),), ((pufferlib_ppo, "minatar"),), ((pufferlib_ppo, "popgym"),)
QUICK_DISCRETE, QUICK_BOXED = (dataclasses.replace(x, num_envs=16, num_steps=64) for x in (DISCRETE, BOXED))


def run_with_memory(env_id: str, first_seed: int) -> dict[str, Any]:
    """Run lanes whose policy has a memory."""
    base = dataclasses.replace(DISCRETE, env_id=env_id, num_envs=16, total_timesteps=40_960)
    short = dataclasses.replace(base, num_steps=4, num_envs=256)  # each update has as many steps
    rows = [(base, ["memory_not_reset", "healthy"] * 3), (short, ["rollout_short"] * 3)]
    return join_lanes([run_lanes(*row, first_seed, shared=True, memory=True) for row in rows])


def make_programs(first_seed: int, *rows: tuple[tuple[tuple[Any, str], ...], str, int]) -> Programs:
    """Return programs of healthy runs: presets, each with its recipe, a task and a number of steps in each row."""
    runs = [(recipe, preset, *row[1:], first_seed) for row in rows for recipe, preset in row[0]]
    return {f"{x[0].__name__.rpartition('.')[2]} {x[1]} {x[2]}": functools.partial(run_healthy, *x) for x in runs}


LANDER, GRID = "gym:LunarLanderContinuous-v3", "xminigrid:MiniGrid-EmptyRandom-8x8"


def make_planted(rows: dict[str, tuple[Any, ...]]) -> Programs:
    """Return programs with planted faults: `run_faults` with a task and the arguments in its row."""
    return {f"{task} with faults": functools.partial(run_faults, task, *row) for task, row in rows.items()}


TRAINING = make_planted({
    "craftax:Craftax-Classic-Symbolic-v1": (DISCRETE, 10_100, 98_304, True), "DeepSea-bsuite": (DISCRETE, 8100, 65_536),
    "MountainCarContinuous-v0": (QUICK_BOXED, 2100, 131_072, False, 16), "FrozenLake-misc": (DISCRETE, 2100, 131_072),
    "xminigrid:MiniGrid-DoorKey-5x5": (DISCRETE, 8100, 163_840, True), "FourRooms-misc": (DISCRETE, 3100, 65_536, True),
    "gym:LunarLander-v3": (QUICK_DISCRETE, 6100, 98_304, True), "Swimmer-misc": (QUICK_BOXED, 1300, 131_072, True, 16),
    "SpaceInvaders-MinAtar": (QUICK_DISCRETE, 1300, 131_072), "Freeway-MinAtar": (QUICK_DISCRETE, 5100, 131_072, True),
    "xminigrid:MiniGrid-Empty-8x8": (DISCRETE, 7100, 65_536), "gym:InvertedPendulum-v5": (QUICK_BOXED, 5100, 49_152),
    "gym:BipedalWalker-v3": (QUICK_BOXED, 10_100, 32_768), "gym:Walker2d-v5": (QUICK_BOXED, 6100, 49_152, True),
    "gym:Swimmer-v5": (QUICK_BOXED, 9100, 131_072, True), "PointRobot-misc": (BOXED, 2100, 131_072, True, 16),
    "gym:Reacher-v5": (QUICK_BOXED, 7100, 65_536, True), "Breakout-MinAtar": (QUICK_DISCRETE, 900, 131_072),
    "Asterix-MinAtar": (QUICK_DISCRETE, 2100, 131_072), "CartPole-v1": (DISCRETE, 0, 81_920, True, 24, 3),
    "Acrobot-v1": (DISCRETE, 500, 163_840, False, 16), "Pendulum-v1": (BOXED, 0, 81_920, False, 24, 3),
    "Reacher-misc": (BOXED, 500, 163_840, True, 16), "MetaMaze-misc": (DISCRETE, 4100, 81_920, True),
    "gym:Hopper-v5": (QUICK_BOXED, 4100, 98_304), "gym:Pusher-v5": (QUICK_BOXED, 6100, 65_536),
    LANDER: (QUICK_BOXED, 10_100, 98_304, True), "gym:Ant-v5": (QUICK_BOXED, 7100, 49_152),
}) | {f"{task} memory": functools.partial(run_with_memory, task, first_seed) for task, first_seed in {
    "CartPole-v1": 500, "Catch-bsuite": 1300, "DiscountingChain-bsuite": 2100, "UmbrellaChain-bsuite": 3100,
    "MemoryChain-bsuite": 4100, "GaussianBandit-misc": 5100, "BernoulliBandit-misc": 6100,
    "xminigrid:MiniGrid-Empty-6x6": 7100, "xminigrid:MiniGrid-Unlock": 8100, "xminigrid:MiniGrid-MemoryS8": 10_100,
}.items()} | make_programs(
    2100, (DISCRETE_PRESETS, "CartPole-v1", 65_536), (DISCRETE_PRESETS, "Acrobot-v1", 204_800),
    (DISCRETE_PRESETS, "Catch-bsuite", 65_536), (BOXED_PRESETS, "Pendulum-v1", 204_800),
    (BOXED_PRESETS, "Reacher-misc", 204_800), (SPREAD, "jaxmarl:MPE_simple_spread_v3", 204_800),
    (((ippo, "riddle"),), "jaxmarl:switch_riddle", 204_800), (MINATAR, "Asterix-MinAtar", 204_800),
    (((pufferlib_ppo, "memory"),), "MemoryChain-bsuite", 65_536), (POPGYM, "popgym:AutoencodeEasy", 204_800),
) | make_programs(
    3100, (DISCRETE_PRESETS, "FourRooms-misc", 65_536), (BOXED_PRESETS, "Swimmer-misc", 204_800),
    (POPGYM, "popgym:CountRecallEasy", 204_800),
) | make_programs(
    4100, (DISCRETE_PRESETS, "MetaMaze-misc", 65_536), (BOXED_PRESETS, "gym:InvertedDoublePendulum-v5", 102_400),
    (POPGYM, "popgym:RepeatPreviousMedium", 204_800),
) | make_programs(
    5100, (DISCRETE_PRESETS, "SimpleBandit-bsuite", 65_536), (BOXED_PRESETS, "gym:HalfCheetah-v5", 102_400),
    (MINATAR, "Freeway-MinAtar", 204_800), (POPGYM, "popgym:RepeatFirstEasy", 204_800),
) | make_programs(
    6100, (DISCRETE_PRESETS, "gym:LunarLander-v3", 102_400), (BOXED_PRESETS, "gym:Pusher-v5", 51_200),
    (SPREAD, "jaxmarl:MPE_simple_reference_v3", 204_800), (POPGYM, "popgym:CountRecallMedium", 204_800),
) | make_programs(
    7100, (DISCRETE_PRESETS, "xminigrid:MiniGrid-Empty-8x8", 65_536), (DISCRETE_PRESETS, "pgx:tic_tac_toe", 102_400),
    (DISCRETE_PRESETS, "gym:Taxi-v4", 204_800), (DISCRETE_PRESETS, "gym:Blackjack-v1", 102_400),
    (BOXED_PRESETS, "gym:Reacher-v5", 102_400),
    (SPREAD, "jaxmarl:MPE_simple_speaker_listener_v4", 204_800), (POPGYM, "popgym:RepeatPreviousEasy", 204_800),
) | make_programs(
    8100, (DISCRETE_PRESETS, "pgx:2048", 102_400), (DISCRETE_PRESETS, "xminigrid:MiniGrid-DoorKey-5x5", 204_800),
    (DISCRETE_PRESETS, "DeepSea-bsuite", 65_536), (SPREAD, "jaxmarl:MPE_simple_v3", 204_800),
    (POPGYM, "popgym:AutoencodeMedium", 204_800), (POPGYM, "popgym:RepeatFirstMedium", 204_800),
) | make_programs(
    9100, (BOXED_PRESETS[4:], "gym:Swimmer-v5", 102_400),  # those of other libraries
    (POPGYM, "popgym:CountRecallHard", 204_800), (POPGYM, "popgym:RepeatPreviousHard", 204_800),
) | make_programs(
    10_100, (DISCRETE_PRESETS, "jumanji:Snake-v1", 204_800), (DISCRETE_PRESETS, "jumanji:Knapsack-v1", 204_800),
    (DISCRETE_PRESETS, "pgx:connect_four", 204_800), (BOXED_PRESETS[4:], LANDER, 51_200),
    (POPGYM, "popgym:AutoencodeHard", 204_800), (POPGYM, "popgym:RepeatFirstHard", 204_800),
)  # fmt: skip
HELD_OUT = make_planted({  # no rule had seen their runs when they were first judged
    "Seaquest-MinAtar": (QUICK_DISCRETE, 11_100, 131_072, False, 24), GRID: (DISCRETE, 11_100, 65_536, True, 24),
}) | {"EmptyRandom-6x6 memory": lambda: run_with_memory("xminigrid:MiniGrid-EmptyRandom-6x6", 11_100)} | make_programs(
    11_100, (DISCRETE_PRESETS, "jumanji:Maze-v0", 204_800), (DISCRETE_PRESETS, "jumanji:Game2048-v1", 204_800),
    (DISCRETE_PRESETS, "jumanji:SlidingTilePuzzle-v0", 204_800), (DISCRETE_PRESETS, "gym:CliffWalking-v1", 102_400),
    (DISCRETE_PRESETS, GRID, 65_536), (((mujoco_ppo, "mujoco"),), "gym:HumanoidStandup-v5", 51_200),
    (SPREAD, "jaxmarl:MPE_simple_push_v3", 204_800), (SPREAD, "jaxmarl:MPE_simple_tag_v3", 204_800),
)  # fmt: skip
SPLITS = {"training": TRAINING, "held_out": HELD_OUT}


def read_runs(name: str, program: Callable[[], dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Return the runs of a program, from its file if there is one."""
    path = folder / f"{re.sub('[^A-Za-z0-9_]+', '-', name)}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        runs = program()
        with replace_file(path) as partial, partial.open("wb") as file:
            np.savez_compressed(file, **runs, commit=COMMIT)
    return dict(np.load(path))


def diagnose_runs(runs: dict[str, Any]) -> Iterable[tuple[str, list[str]]]:
    """Yield what was planted in each run, and what was found."""
    base = json.loads(str(runs["config"]))
    for i, name in enumerate(runs["name"]):
        metrics = {key: x[i] for key, x in runs.items() if x.ndim and key != "name" and not key.startswith("config/")}
        config = base | {key.removeprefix("config/"): float(x[i]) for key, x in runs.items() if "config/" in key}
        planted, names = str(name).partition(" ")[0], [found.name for found in training.diagnose(metrics, config)]
        yield planted, [found for found in names if found == planted or found != KNOWN.get(base["env_id"])]


def find_harmed(runs: dict[str, Any]) -> np.ndarray:
    """Return which runs end below every healthy run of their program, in training or in the evaluation."""
    returns = runs["episode_return"]
    late = np.nanmean(returns[:, -(returns.shape[1] // 4) :], axis=1)
    scores, clean = (late, runs["evaluation/episode_return"]), runs["name"] == "healthy"
    return np.any([~(x >= np.nanmin(x[clean])) for x in scores], axis=0)  # true also if no episode ended


def find_idle(runs: dict[str, Any]) -> np.ndarray:
    """Return in which runs the return does not rise by two standard errors from the first to the last quarter."""
    count = runs["episode_return"].shape[1] // 4
    first, last = runs["episode_return"][:, :count], runs["episode_return"][:, -count:]
    error = np.sqrt((np.nanvar(first, axis=1) + np.nanvar(last, axis=1)) / count)
    return ~(np.nanmean(last, axis=1) - np.nanmean(first, axis=1) > 2 * error)  # true also if no episode ended


def judge(rows: list[Judged]) -> dict[str, Any]:
    """Count runs by what was planted and by the first finding, and compute the shares of right findings."""
    matrix: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for name, names, bad in rows:
        matrix["idle" if bad and name == "healthy" else name][names[0] if names else "nothing"] += 1
    faults, clean = [row for row in rows if row[0] != "healthy"], [row for row in rows if row[0] == "healthy"]
    healthy, idle = [names for _, names, idle in clean if not idle], [names for _, names, idle in clean if idle]

    def shares(faults: list[Judged]) -> dict[str, float]:
        among = float(np.mean([name in names for name, names, _ in faults]))
        return {"faults": len(faults), "among": among, "first": float(np.mean([x[0] in x[1][:1] for x in faults]))}

    return {
        "all": shares(faults) | {"kinds": len({name for name, *_ in faults})},
        "harmful": shares([row for row in faults if row[2]]),
        "healthy": len(healthy),
        "false_alarms": sum(map(bool, healthy)),
        "idle": len(idle),
        "idle_found": sum(map(bool, idle)),
        "confusion": matrix,
    }


def main() -> None:
    """Judge the runs, and write the record."""
    command_line = make_parser(__doc__, json=None)
    command_line.add_argument("--runs", type=Path, default=Path("build/doctor"), help="folder with metrics of the runs")
    command_line.add_argument("--splits", nargs="+", choices=SPLITS, default=list(SPLITS))
    options = command_line.parse_args()
    results: dict[str, Any] = {"commits": {}}  # the commits of the runs, which may be older than the rules
    for split in options.splits:
        rows: list[Judged] = []
        for name, program in SPLITS[split].items():
            runs = read_runs(name, program, options.runs)
            results["commits"][name] = str(runs["commit"])
            bad = np.where(runs["name"] == "healthy", find_idle(runs), find_harmed(runs))
            found = [(*pair, bool(x)) for pair, x in zip(diagnose_runs(runs), bad, strict=True)]
            wrong = collections.Counter((planted, *names) for planted, names, _ in found if [planted] != names[:1])
            print(name, *(f"\n   {n} x {' > '.join(names)}" for names, n in wrong.items()), flush=True)
            rows += found
            jax.clear_caches()  # a program leaves gigabytes of compiled code
        results[split] = judge(rows)
        print(split, {name: x for name, x in results[split].items() if name != "confusion"})
    write(options.json, results)
