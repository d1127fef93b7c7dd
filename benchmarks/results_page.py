"""docs/results.md, what the recipes reach: `python -m benchmarks report` writes it from benchmarks/results."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np

from ppo_parts import training

from . import atari, mujoco_page
from ._pages import interval, table
from .learning import TASKS

GAMES = {"won_sampled": "won, sampled actions", "won_mode": "won, most probable actions"}


def page(results: pathlib.Path, docs: pathlib.Path) -> str:
    """The page; pictures are written on the way."""
    lines = [
        "# Results",
        "",
        "This page shows the returns that the recipes reach, beside published results. Tables of single runs link each",
        "row to its record, which holds the configuration, the versions, the hardware and the numbers of every seed.",
        "`python -m benchmarks report` writes this page from the records.",
        "",
        *mujoco_page.results_table(results, docs / "img"),
        *mujoco_page.choices(results, docs / "img"),
        *mujoco_page.defaults_of_libraries(results),
        *mujoco_page.settings(results),
        *minatar(results),
        *atari.section(results, docs / "img"),
        *games(results),
        *packages(results),
        "## Classic control",
        "",
        *classic(results),
        "[Benchmarks](benchmarks.md#learning) lists these records: CartPole, Acrobot, Pendulum, a memory task, and",
        "three multi-agent tasks. [Hard exploration](exploration.md) has MountainCar, DeepSea and short budgets of",
        "the classic tasks. [Does it help?](study.md) compares V-trace, priorities and refreshing.",
        "",
        "## Speed",
        "",
        *hosts(results),
        "[Benchmarks](benchmarks.md) has the times of parts, updates and whole runs, compared with other",
        "implementations of the same work.",
    ]
    return "\n".join(lines) + "\n"


def hosts(results: pathlib.Path) -> list[str]:
    """The table of steps per second with environments on the host."""
    path = results / "hosts_cpu.json"
    if not path.exists():
        return []
    record = json.loads(path.read_text())
    rows = [
        [
            row["task"],
            row["program"],
            f"{row['steps_per_second']:,.0f}",
            "{median:.2f} ({q1:.2f} - {q3:.2f})".format(**row["over_recipe"]),
        ]
        for row in record["results"]
    ]
    header = ["task, 8 environments", "program", "steps per second", "time relative to the recipe"]
    return [
        "Whole training runs with environments on the host, with the same settings",
        f"([record](../benchmarks/results/{path.name})):",
        "",
        *table(header, rows),
        "Medians (and quartiles) of interleaved rounds, without compile time. `recipe` is `mujoco_ppo`,",
        "`one rollout ahead` is `async_ppo`. Stable-Baselines3 and CleanRL are their own code, unchanged; CleanRL's",
        "needs Gymnasium 0.29, and runs version 4 of the task. `python -m benchmarks hosts` makes the record.",
        "",
    ]


def minatar(results: pathlib.Path) -> list[str]:
    """The table of MinAtar's games."""
    found = learned(results, "minatar_")
    if not found:
        return []
    return [
        "## MinAtar",
        "",
        *found,
        "Mean return of 100 new episodes over seeds [95 % bootstrap interval], by `pufferlib_ppo --preset minatar`,",
        "[whose settings](pufferlib.md#minatar) were chosen on other seeds. These are gymnax's games, which have no",
        "sticky actions, the minimal sets of actions, and a limit of 1000 steps (Freeway: 2500). The thresholds are",
        "the returns of PPO in the",
        "[code of Goldie et al. 2024](https://github.com/AlexGoldie/rl-learned-optimization/blob/main/rl_optimizer/configs.py)",
        "on the same games after 10M steps (for Breakout, the file does not make the number of steps clear).",
        "`python -m benchmarks learning minatar_asterix` produces a row.",
        "",
    ]


def classic(results: pathlib.Path) -> list[str]:
    """The table of the classic tasks with short budgets, beside the highest published result of each."""
    found = learned(results, "classic_")
    if not found:
        return []
    return [
        *found,
        "Mean return of 100 new episodes over seeds [95 % bootstrap interval]. The settings were chosen on other",
        "seeds. The thresholds are published results of",
        "[rl-baselines3-zoo](https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/benchmark.md),",
        "[gymnax-blines](https://github.com/RobertTLange/gymnax-blines) and",
        "[SLM-Lab](https://github.com/kengz/SLM-Lab/blob/master/docs/BENCHMARKS.md).",
        "`python -m benchmarks learning classic_acrobot` produces a row, and `--first-seed 101` the one below it.",
        "",
    ]


def learned(results: pathlib.Path, *prefixes: str) -> list[str]:
    """A table of the tasks of `benchmarks learning` whose names begin with one of `prefixes`."""
    rows = []
    for task in (name for name in TASKS if name.startswith(prefixes)):
        for name in (task, f"{task}_101"):
            path = results / f"learning_{name}.json"
            if not path.exists():
                continue
            found = json.loads(path.read_text())["results"]
            rows.append(
                [
                    f"[{found['config']['env_id']}](../benchmarks/results/{path.name})",
                    f"{found['env_steps']:,}",
                    f"{found['seeds'][0]} - {found['seeds'][-1]}",
                    *(interval(found[f"{how}_100_episodes_return"], 1) for how in ("evaluation", "evaluation_mode")),
                    f"{TASKS[task].threshold:g}, {TASKS[task].why}",
                ]
            )
    head = ["task", "steps", "seeds", "sampled actions", "most probable actions", "threshold, and its source"]
    return table(head, rows) if rows else []


def packages(results: pathlib.Path) -> list[str]:
    """The tables of environments of other packages: one task each, and Craftax with and without optimistic resets."""
    lines = learned(results, "brax_", "playground_", "craftax_")
    if lines:
        lines += [
            "Mean return of 100 new episodes over seeds [95 % bootstrap interval], by CleanRL's recipe. At first",
            "CartpoleBalance had 150,000 steps, with which seeds 1 to 3 reached 940, 926 and 399 with sampled actions;",
            "after that, only the budget was changed. `python -m benchmarks learning brax_inverted_pendulum` produces",
            "a row.",
            "",
        ]
    path = results / "resets.json"
    if path.exists():
        lines += resets(json.loads(path.read_text())["results"], path.name)
    return ["## Environments of other packages", "", *lines] if lines else []


def resets(found: dict[str, Any], file: str) -> list[str]:
    """The table of Craftax-Classic with and without optimistic resets."""
    rows = [
        [
            ratio,
            f"{run['steps_per_second']:,.0f}",
            *("{median:.2f} ({q1:.2f} - {q3:.2f})".format(**run[f"{clock}time_over_1"]) for clock in ("", "cpu_")),
            *(f"{run['curve'][-1][what]:.2f}" for what in ("episode_return", "episode_achievements")),
        ]
        for ratio, run in found["ratios"].items()
    ]
    head = ["`reset_ratio`", "steps per second", "time, over that of 1", "CPU time, over that of 1"]
    head += ["return", "achievements"]
    return [
        f"Craftax-Classic, {found['env_steps']:,} steps of {found['config']['num_envs']} environments with and without",
        f"optimistic resets, one seed each ([record](../benchmarks/results/{file})):",
        "",
        *table(head, rows),
        "Medians (and quartiles) of pieces of whole training runs, in turn, without the time to compile. Return and",
        f"achievements are means over the training episodes of the last {found['steps_of_a_piece']:,} steps.",
        "`python -m benchmarks resets` produces the record.",
        "",
    ]


def games(results: pathlib.Path) -> list[str]:
    """The table of games of two players."""
    files: dict[str, list[tuple[str, dict[str, Any]]]] = {}  # those of a game differ only in their seeds
    for path in results.glob("games_*.json"):
        found = json.loads(path.read_text())["results"]
        files.setdefault(found["game"], []).append((path.name, found))
    rows = []
    for game, found_in in sorted(files.items()):
        found_in.sort(key=lambda item: item[1]["seeds"][0]["seed"])
        seeds = [seed for _, found in found_in for seed in found["seeds"]]
        shares = [share([100 * seed[what] for seed in seeds]) for what in GAMES]
        steps = f"{found_in[0][1]['env_steps']:,}"
        rows.append(
            [
                mujoco_page.linked(game, [file for file, _ in found_in]),
                steps,
                f"{seeds[0]['seed']} - {seeds[-1]['seed']}",
                *shares,
            ]
        )
    if not rows:
        return []
    head = ["game", "steps", "seeds", *GAMES.values()]
    how = "`python -m benchmarks games <game>` produces a row: the shares of new games that were won after training."
    how += " Several seeds: mean [95 % bootstrap interval]."
    return ["## Games against random moves", "", *table(head, rows), how, ""]


def share(percentages: list[float]) -> str:
    """Percentages of the seeds: each of a few, and the interval of several."""
    if len(percentages) < 5:
        return ", ".join(f"{x:.1f} %" for x in percentages)
    return f"{interval(training.summary(np.array(percentages)), 1)} %"
