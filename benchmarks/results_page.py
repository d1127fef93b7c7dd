"""docs/results.md, what the recipes reach: `python -m benchmarks report` writes it from benchmarks/results."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np

from recipes.mujoco_ppo import Config

from .learning import TASKS
from .report import canvas, save, table

TIANSHOU = "https://github.com/thu-ml/tianshou/tree/82dc1adf/examples/mujoco"
CLEANRL = "https://docs.cleanrl.dev/rl-algorithms/ppo/#ppo_continuous_actionpy"
PUBLISHED = {  # task: Tianshou's mean and standard deviation at 1M steps, its mean at 3M steps, CleanRL's mean at 1M
    "HalfCheetah-v5": ("5784 (1244)", "7337", "1443"),
    "Ant-v5": ("3258 (1079)", "4079", ""),
    "Walker2d-v5": ("3589 (757)", "4896", "2288"),
    "Hopper-v5": ("2609 (701)", "3128", "2383"),
    "Humanoid-v5": ("787 (194)", "1360", "716"),
}
GAMES = {"won_sampled": "won, sampled actions", "won_mode": "won, most probable actions"}


def page(results: pathlib.Path, docs: pathlib.Path) -> str:
    """The page; pictures are written on the way."""
    lines = [
        "# Results",
        "",
        "This page shows the returns that the recipes reach, compared with the highest published results that we know",
        "of. Each row links to its record, which holds the configuration, the versions, the hardware and the numbers",
        "of every seed. `python -m benchmarks report` writes this page from the records.",
        "",
        *mujoco(results, docs / "img"),
        *settings_of_mujoco(results),
        *games(results),
        "## Classic control",
        "",
        *classic(results),
        "[Benchmarks](benchmarks.md#learning) lists these records: CartPole, Acrobot, Pendulum, Breakout-MinAtar, a",
        "memory task, and three multi-agent tasks. [Hard exploration](exploration.md) has MountainCar, DeepSea",
        "and short budgets of the classic tasks. [Does it help?](study.md) compares V-trace, priorities and",
        "refreshing.",
        "",
        "## Speed",
        "",
        *hosts(results),
        "[Benchmarks](benchmarks.md) has the times of parts, updates and whole runs, compared with other",
        "implementations of the same work.",
    ]
    return "\n".join(lines) + "\n"


def mujoco(results: pathlib.Path, pictures: pathlib.Path) -> list[str]:
    """The table of Gymnasium's MuJoCo tasks, beside the published results."""
    records = [
        json.loads(path.read_text())["results"] | {"file": path.name} for path in sorted(results.glob("mujoco/*.json"))
    ]
    records = [record for record in records if record["complete"]]
    if not records:
        return []
    rows = [
        [
            f"[{record['task']}](../benchmarks/results/mujoco/{record['file']})",
            f"`{record['variant']}`{other_settings(record['config'])}",
            f"{record['env_steps']:,}",
            f"{record['seeds'][0]} - {record['seeds'][-1]}",
            interval(record["best_evaluation"]),
            f"{max(np.mean(row['evaluation']) for row in record['curve']):.0f}",
            *(interval(record[what]) for what in ("last_evaluation", "last_100_episodes")),
            *(PUBLISHED.get(record["task"], ("", "", "")) if is_long(record) else ("", "", "")),
        ]
        for record in records
    ]
    header = [
        "task",
        "variant",
        "steps",
        "seeds",
        "best of each seed",
        "best mean",
        "last",
        "last 100 training episodes",
    ]
    header += [f"[Tianshou]({TIANSHOU}), 1M", "3M", f"[CleanRL]({CLEANRL}), 1M"]
    return [
        "## Gymnasium's MuJoCo tasks",
        "",
        *table(header, rows),
        "Mean over seeds [95 % bootstrap interval]. An evaluation is the mean return of 10 episodes with the mode",
        "of the policy, 20 times in a run of 1M steps, and *last* is the one at the end. *Best of each seed* takes",
        "the highest evaluation of each seed, and *best mean* the highest mean over seeds; both favor lucky",
        "evaluations. Tianshou reports the maximum over training of about 30 evaluations in 1M steps (10 seeds,",
        "mean and standard deviation, version 3 of the environments), and CleanRL training returns (3 seeds, version",
        "4). A *variant* changes one setting of `recipes.mujoco_ppo`, and `tuned` is its preset for the task; the",
        "settings after its name differ from the recipe's. `python -m benchmarks mujoco <task> --variant <variant>`",
        "produces a row.",
        "",
        *curves([record for record in records if is_long(record)], pictures),
    ]


def is_long(record: dict[str, Any]) -> bool:
    """Whether a record has the steps of the published results; shorter ones compare variants."""
    return record["env_steps"] > 900_000


def settings_of_mujoco(results: pathlib.Path) -> list[str]:
    """The table of the main effects of settings, from two-level designs."""
    path = results / "mujoco_designs.json"
    if not path.exists():
        return []
    record = json.loads(path.read_text())
    found = {design["task"]: main_effects(design) for design in record["designs"]}
    factors = {name: levels for design in record["designs"] for name, levels in design["factors"].items()}
    rows = [
        [
            f"{name}: {low} to {high}",
            *("{:+.0f} ({:.0f})".format(*effects[name]) if name in effects else "" for effects in found.values()),
        ]
        for name, (low, high) in factors.items()
    ]
    return [
        "### Effects of settings",
        "",
        f"Change in the return after {record['steps']:,} steps, and its standard error",
        f"([record](../benchmarks/results/{path.name})):",
        "",
        *table(["from the recipe's setting to another", *found], rows),
        "Each column is a two-level design: all settings vary at once, and each effect is an average over the levels",
        "of the others (32 runs on HalfCheetah, 16 each on Hopper and Walker2d, all with seeds 1000 and above).",
        "HalfCheetah gains most from less initial noise, which hurts Hopper the most; `tuned` above is based on this.",
        "",
    ]


def main_effects(design: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """The effect of the second level of each factor and its standard error, by least squares."""
    levels = [row["levels"] for row in design["rows"] for _ in row["returns"]]
    returns = np.array([one for row in design["rows"] for one in row["returns"]])
    terms = np.column_stack([np.ones(len(returns)), np.array(levels) - 0.5])
    effects = np.linalg.lstsq(terms, returns, rcond=None)[0]
    variance = np.sum(np.square(returns - terms @ effects)) / (len(returns) - terms.shape[1])
    errors = np.sqrt(variance * np.diag(np.linalg.inv(terms.T @ terms)))
    return {name: (effects[k + 1], errors[k + 1]) for k, name in enumerate(design["factors"])}


def other_settings(config: dict[str, Any]) -> str:
    """The settings of a record that are not the recipe's."""
    now = dataclasses.asdict(Config())
    free = ("env_id", "total_timesteps", "seed", "hidden")
    other = [f"{name}={value}" for name, value in config.items() if name not in free and now.get(name) != value]
    return f", {', '.join(other)}" if other else ""


def interval(found: dict[str, Any], digits: int = 0) -> str:
    """Mean and its interval."""
    mean, low, high = (f"{number:.{digits}f}" for number in (found["mean"], *found["mean_95"]))
    return f"{mean} [{low}, {high}]"


def curves(records: list[dict[str, Any]], pictures: pathlib.Path) -> list[str]:
    """A panel for each task: the mean evaluation of each record with its interval, and Tianshou's mean as a line."""
    tasks = list(dict.fromkeys(record["task"] for record in records))
    figure, panels = canvas(len(tasks))
    for task, panel in zip(tasks, panels, strict=True):
        for color, record in enumerate(record for record in records if record["task"] == task):
            steps = [row["env_steps"] / 1e6 for row in record["curve"]]
            seen = np.array([row["evaluation"] for row in record["curve"]])
            panel.plot(steps, seen.mean(axis=1), color=f"C{color}", label=record["variant"])
            panel.fill_between(steps, *np.quantile(seen, (0.25, 0.75), axis=1), color=f"C{color}", alpha=0.2, lw=0)
        if task in PUBLISHED:
            mean = float(PUBLISHED[task][0].split()[0])
            panel.axhline(mean, color="gray", ls="--", lw=1, label="Tianshou, best of 1M")
        panel.set(title=task, xlabel="million environment steps", ylabel="return of 10 episodes")
        panel.legend(fontsize=8)
    save(figure, pictures / "results_mujoco.png")
    legend = "Lines are means over seeds; bands show the quartiles."
    return ["![Returns against steps](img/results_mujoco.png)", "", legend, ""]


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


def classic(results: pathlib.Path) -> list[str]:
    """The table of the classic tasks with short budgets, beside the highest published result of each."""
    rows = []
    for task in (name for name in TASKS if name.startswith("classic_")):
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
    if not rows:
        return []
    head = ["task", "steps", "seeds", "sampled actions", "most probable actions", "published result"]
    return [
        *table(head, rows),
        "Mean return of 100 new episodes over seeds [95 % bootstrap interval]. The settings were chosen on other",
        "seeds. `python -m benchmarks learning classic_acrobot` produces a row, and `--first-seed 101` the one below.",
        "",
    ]


def games(results: pathlib.Path) -> list[str]:
    """The table of games of two players."""
    rows = []
    for path in sorted(results.glob("games_*.json")):
        found = json.loads(path.read_text())["results"]
        shares = [" ".join(f"{100 * seed[what]:.1f} %" for seed in found["seeds"]) for what in GAMES]
        seeds = ", ".join(str(seed["seed"]) for seed in found["seeds"])
        rows.append(
            [f"[{found['game']}](../benchmarks/results/{path.name})", f"{found['env_steps']:,}", seeds, *shares]
        )
    if not rows:
        return []
    head = ["game", "steps", "seeds", *GAMES.values()]
    how = "`python -m benchmarks games <game>` produces a row: the shares of new games that were won after training."
    return ["## Games against random moves", "", *table(head, rows), how, ""]
