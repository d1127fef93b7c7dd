"""Do the recipes learn? Train many seeds in one program, and record each task in benchmarks/results/learning.jsonl.

    python -m benchmarks learning cartpole pufferlib_pendulum --seeds 10 --json mine.jsonl
    python -m benchmarks learning cartpole --first-seed 101 --set ent_coef=0.001

The second record is called "cartpole_101_ent_coef_0.001". It has three numbers for each seed: the return of the last
100 training episodes, which favors short episodes, because more of them end in the same number of steps; and the
returns of 100 new episodes with the final policy, with sampled and with the most likely actions.
"""

import ast
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ppo_parts import envs, training
from ppo_parts.errors import UserValueError
from ppo_parts.recipes import cleanrl_ppo, ippo, library_ppo, pufferlib_ppo

from . import classic, craftax, rnd
from ._records import claim, make_parser, write
from ._seeds import make_eval_key, make_keys, select_seeds, show_interval, train_in_stages, vectorize


class Task(NamedTuple):
    """A training run, and the mean return at which a seed counts as a success."""

    make_train: Callable[[Any], training.Train]
    config: Any
    threshold: float
    why: str
    episodes: int = 100  # in each evaluation


def make_task(recipe: Any, preset: str, threshold: float, why: str, episodes: int = 100, **changes: Any) -> Task:
    """Make a task from a preset of a recipe with some fields changed."""
    config = dataclasses.replace(recipe.PRESETS[preset], **changes)
    return Task(recipe.make_train, config, threshold, why, episodes)


def make_discretized(config: Any) -> training.Train:
    """Make golf with one choice among 3 clubs, 16 directions and 4 strengths, instead of a hybrid action."""
    env = envs.make(config.env_id)
    angle, strength = np.meshgrid(np.arange(16) * np.pi / 8, np.arange(1, 5) / 4)
    strokes = jnp.asarray(np.stack([strength * np.cos(angle), strength * np.sin(angle)], -1).reshape(-1, 2))

    def step(key: jax.Array, state: Any, action: jax.Array) -> Any:
        club, index = jnp.divmod(action, len(strokes))
        stroke = jnp.broadcast_to(strokes[index][:, None], (len(action), 3, 2))
        return env.step(key, state, {"club": club, "stroke": stroke})

    chosen = env._replace(step=step, action_space=envs.Discrete(3 * 64))
    chosen = chosen._replace(evaluation=lambda state: chosen)
    return cleanrl_ppo.make_train(config, chosen)


GYMNASIUM, ALL_OF_IT = "Gymnasium's reward threshold", "the largest return is 1000"
SWINGS_UP, ANSWERS = "swings up at once and stays up", "95 % of the answers are right"
GOLDIE = "PPO in Goldie et al. 2024"
DISTILLATION = "achievement distillation (Moon et al. 2023), 1M steps of Crafter, from pixels"
MINATAR = {"Asterix": 15.04, "Breakout": 50.08, "Freeway": 61.84, "SpaceInvaders": 167.09}
POPGYM: dict[str, tuple[str, int, float, dict[str, Any]]] = {
    "repeat_previous_medium": ("RepeatPreviousMedium", 1, 0.789, {}),
    "repeat_previous_hard": ("RepeatPreviousHard", 2, 0.191, {"num_steps": 155}),
    "autoencode": ("AutoencodeEasy", 3, -0.283, {}),
    "count_recall": ("CountRecallEasy", 4, 0.509, {"num_steps": 51}),
    "repeat_first": ("RepeatFirstHard", 4, 0.940, {
        "memory": "mingru", "hidden": 128, "num_envs": 32, "num_steps": 831, "ent_coef": 0.01}),
}  # fmt: skip
SIMULATED: dict[str, Any] = {"num_envs": 16, "num_steps": 128}
connect_four = functools.partial(
    make_task, cleanrl_ppo, "discrete", 0.95, "of 1", episodes=5000, env_id="pgx:connect_four", num_envs=256,
    total_timesteps=3_000_000, num_steps=16, hidden=(256, 256), num_minibatches=8, learning_rate=1e-3, gae_lambda=0.8,
)  # fmt: skip
TASKS = {
    "cartpole": make_task(cleanrl_ppo, "discrete", 475, GYMNASIUM),
    "acrobot": make_task(cleanrl_ppo, "discrete", -100, GYMNASIUM, env_id="Acrobot-v1"),
    "pendulum": make_task(cleanrl_ppo, "continuous", -200, SWINGS_UP),
    "pufferlib_cartpole": make_task(pufferlib_ppo, "discrete", 475, GYMNASIUM),
    "pufferlib_pendulum": make_task(pufferlib_ppo, "continuous", -200, SWINGS_UP),
    "pufferlib_memory": make_task(pufferlib_ppo, "memory", 0.9, ANSWERS),
    "pufferlib_memory_feedforward": make_task(pufferlib_ppo, "memory", 0.9, ANSWERS, memory=None),
    **{f"minatar_{game.lower()}": make_task(pufferlib_ppo, "minatar", threshold, GOLDIE, env_id=f"{game}-MinAtar")
       for game, threshold in MINATAR.items()},
    **{f"popgym_{name}": make_task(
        pufferlib_ppo, "popgym", best, "best of 13 memories, 15M steps", env_id=f"popgym:{game}",
        total_timesteps=millions * 1_000_000, **changes) for name, (game, millions, best, changes) in POPGYM.items()},
    "ippo_spread": make_task(ippo, "spread", -15, "untrained agents have -27"),
    "ippo_smax_3m": make_task(ippo, "smax", 1.8, "about 80 % of the episodes won"),
    "ippo_riddle": make_task(ippo, "riddle", 0.55, "better than telling on the last night without a signal, 0.48"),
    "classic_mountain_car": make_task(classic, "mountain_car", -110.4, "rl-baselines3-zoo's PPO, one agent, 1M steps"),
    "classic_mountain_car_250k": make_task(
        classic, "mountain_car_250k", -118, "gymnax-blines, as its figure shows, 250k steps"),
    "classic_acrobot": make_task(classic, "acrobot", -81.3, "SLM-Lab's PPO, 300k steps"),
    "classic_mountain_car_continuous": make_task(
        classic, "mountain_car_continuous", 91.5, "rl-baselines3-zoo's recurrent PPO, one agent, 300k steps"),
    "classic_cartpole": make_task(classic, "cartpole", 500, "the largest return"),
    "brax_inverted_pendulum": make_task(
        cleanrl_ppo, "continuous", 990, ALL_OF_IT, env_id="brax:inverted_pendulum", total_timesteps=150_000, **SIMULATED
    ),
    "playground_cartpole_balance": make_task(
        cleanrl_ppo, "continuous", 950, ALL_OF_IT, env_id="playground:CartpoleBalance", total_timesteps=500_000,
        **SIMULATED),
    "craftax_classic_memory": Task(craftax.make_train, craftax.Config(), 12.6, DISTILLATION),
    "gsde_mountain_car_continuous": make_task(
        library_ppo, "stable_baselines3", 90, GYMNASIUM, env_id="MountainCarContinuous-v0", total_timesteps=300_000,
        noise_steps=256),
    "connect_four": connect_four(), "connect_four_6m": connect_four(total_timesteps=6_000_000),
    "connect_four_self_play": connect_four(env_id="pgx:connect_four,opponent=self"),
    "hybrid_golf": make_task(cleanrl_ppo, "golf", 4, "four strokes"),
    "hybrid_golf_discretized": Task(make_discretized, cleanrl_ppo.PRESETS["golf"], 4, "four strokes"),
    "rnd_deep_sea": Task(rnd.make_train, rnd.Config(), 0.98, "finds the treasure in every episode"),
}  # fmt: skip


def evaluate_seeds(train: training.Train, keys: jax.Array, state: Any, episodes: int = 100) -> dict[str, np.ndarray]:
    """Return the mean return and the environment's own numbers of new episodes, with a separate key for each seed."""
    keys, found = jax.vmap(make_eval_key)(keys), {}
    for name, mode in {"evaluation": False, "evaluation_mode": True}.items():
        play = functools.partial(train.evaluate_policy, episodes=episodes, mode=mode)
        played = vectorize(play)(keys, state)
        for what, x in {"return": played.episode_return, **played.info}.items():
            found[f"{name}_{episodes}_episodes_{what}"] = np.mean(x.reshape(len(keys), -1), axis=1)
    return found


def find_task(name: str) -> Task:
    """Return the task of a record, whose name may also contain seeds and changed settings."""
    return TASKS[max((task for task in TASKS if name.startswith(task)), key=len)]


def change_config(config: Any, changes: Sequence[str]) -> Any:
    """Replace some fields of the configuration; read values as Python, or else as words."""
    values, known = {}, [field.name for field in dataclasses.fields(config)]
    for name, text in (change.split("=", 1) for change in changes):
        if name not in known:
            raise UserValueError(f"--set: the configuration has no field {name!r}, but {', '.join(known)}")
        try:
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[name] = text
    config = dataclasses.replace(config, **values)
    training.check_config(config)
    return config


def place_points(updates: int) -> np.ndarray:
    """Return the update that ends each point of a curve; points average equally many, except the last one."""
    each = max(1, updates // 200)
    return np.append(np.arange(each, updates, each), updates)


def measure(task: Task, seeds: range) -> dict[str, Any]:
    """Train seeds in one program, and describe how they did."""
    make_train, config, *_, evaluated = task
    train, keys = make_train(config), make_keys(seeds)
    (end,) = train_in_stages(train, keys, 1)
    returns, episodes = np.asarray(end.metrics["episode_return"]), np.asarray(end.metrics["episodes"])
    each_seed = {"last_100_episodes_return": np.asarray(training.last_episodes_return(returns, episodes))}
    each_seed |= evaluate_seeds(train, keys, end.state, evaluated)
    pieces = np.array_split(returns, place_points(train.num_updates)[:-1], axis=1)
    thin = np.stack([np.nanmean(piece, axis=1) for piece in pieces], axis=1)
    return {
        "recipe": make_train.__module__,
        "config": dataclasses.asdict(config),
        "seeds": list(seeds),
        "env_steps": end.env_steps,
        **{what: training.summary(x) for what, x in each_seed.items()},
        "curve": {"mean_return_per_seed": np.round(thin, 2)},
    }


def main() -> None:
    """Run the benchmark from the command line."""
    parser = make_parser(__doc__, seeds=10, first_seed=1, json="benchmarks/results/learning.jsonl")
    parser.add_argument("tasks", nargs="+", choices=TASKS)
    parser.add_argument("--set", nargs="*", action="extend", default=[], metavar="FIELD=VALUE", help="changed settings")
    options = parser.parse_args()
    if wrong := [change for change in options.set if "=" not in change]:
        parser.error(f"argument --set: give FIELD=VALUE, got {wrong[0]!r}")
    what = [*([] if options.first_seed == 1 else [str(options.first_seed)]), *options.set]
    named = {"_".join([name, *what]).replace("=", "_"): TASKS[name] for name in options.tasks}
    tasks = [task._replace(config=change_config(task.config, options.set)) for task in named.values()]
    for name, task, address in zip(named, tasks, claim(options, *named), strict=True):
        result = measure(task, select_seeds(options))
        write(address, {"task": name} | result)
        print(name, show_interval(result[f"evaluation_{task.episodes}_episodes_return"], 3), flush=True)
