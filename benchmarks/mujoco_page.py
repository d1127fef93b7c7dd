"""The MuJoCo part of docs/results.md: results beside published ones, and what single choices and settings are worth."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np

from recipes.mujoco_ppo import Config

from . import differences, mujoco
from .report import canvas, save, table

TIANSHOU = "https://github.com/thu-ml/tianshou/tree/82dc1adf/examples/mujoco"
CLEANRL = "https://docs.cleanrl.dev/rl-algorithms/ppo/#ppo_continuous_actionpy"
Record = dict[str, Any]
PUBLISHED = {  # task: Tianshou's mean and standard deviation at 1M steps, its mean at 3M steps, CleanRL's mean at 1M
    "HalfCheetah-v5": ("5784 (1244)", "7337", "1443"),
    "Ant-v5": ("3258 (1079)", "4079", ""),
    "Walker2d-v5": ("3589 (757)", "4896", "2288"),
    "Hopper-v5": ("2609 (701)", "3128", "2383"),
    "Humanoid-v5": ("787 (194)", "1360", "716"),
}


def results_table(results: pathlib.Path, pictures: pathlib.Path) -> list[str]:
    """The table of whole runs beside the published results, and their curves."""
    records = [record for record in complete(results / "mujoco") if is_whole_run(record)]
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
            *PUBLISHED.get(record["task"], ("", "", "")),
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
        "mean and standard deviation, version 3 of the environments), CleanRL training returns (3 seeds, version",
        "4). A *variant* changes one thing of `recipes.mujoco_ppo`, and `tuned` is its preset for the task; settings",
        "beside its name differ from the recipe's. `python -m benchmarks mujoco <task> --variant <variant>` produces",
        "a row.",
        "",
        *curves(records, pictures),
    ]


def complete(folder: pathlib.Path) -> list[Record]:
    """The records of a folder whose runs have ended."""
    records = [json.loads(path.read_text())["results"] | {"file": path.name} for path in sorted(folder.glob("*.json"))]
    return [record for record in records if record["complete"]]


def is_whole_run(record: Record) -> bool:
    """Whether a record has the steps of the published results; shorter ones compare variants."""
    return record["env_steps"] > 900_000


def choices(results: pathlib.Path) -> list[str]:
    """The tables of runs in which one choice was exchanged: of the recipe's, and of those that differ in libraries."""
    recipe = [record for record in complete(results / "mujoco") if not is_whole_run(record)]
    libraries = complete(results / "differences")
    lines: list[str] = []
    if recipe:
        lines += [
            "### One choice at a time",
            "",
            "`mujoco_ppo` with one of its choices exchanged:",
            "",
            *changes(recipe, "mujoco", {name: f"`{name}`" for name in mujoco.VARIANTS}),
        ]
    if libraries:
        described = {name: f"{each.what} ({each.who})" for name, each in differences.DIFFERENCES.items()}
        lines += [
            "### What the differences between libraries are worth",
            "",
            "CleanRL's chain, with time limits bootstrapped from the value of the final state, and with one choice",
            "exchanged for that of [another library](libraries.md#choices):",
            "",
            *changes(libraries, "differences", described),
        ]
    if lines:
        lines += [
            "*Return* is the mean over seeds of the last evaluation. The *mean of all* evaluations, which are at equal",
            "distances, also rewards learning early and has less noise. Changes are relative to the first row.",
            "Brackets are 95 % bootstrap intervals over seeds. They are not corrected for the number of rows: where a",
            "choice makes no difference, one interval in twenty still excludes 0.",
            "",
        ]
    return lines


def changes(records: list[Record], folder: str, described: dict[str, str]) -> list[str]:
    """A table for each task and number of steps: returns, and their changes relative to the first row."""
    lines = []
    for run in dict.fromkeys((record["task"], record["env_steps"]) for record in records):
        same_run = {record["variant"]: record for record in records if (record["task"], record["env_steps"]) == run}
        found = [same_run[name] for name in described if name in same_run]
        if found[0]["variant"] != next(iter(described)):
            continue  # nothing to compare with has been recorded yet
        returns = [np.array([row["evaluation"] for row in record["curve"]]) for record in found]
        first = returns[0]
        rows = [
            [
                f"[{described[record['variant']]}](../benchmarks/results/{folder}/{record['file']})",
                interval(record["last_evaluation"]),
                *([change(now[-1], first[-1]), change(now.mean(0), first.mean(0))] if now is not first else ["", ""]),
            ]
            for record, now in zip(found, returns, strict=True)
        ]
        seeds = found[0]["seeds"]
        head = f"{run[0]}, {run[1]:,} steps, seeds {seeds[0]} - {seeds[-1]}"
        lines += table([head, "return", "change", "change of the mean of all"], rows)
    return lines


def change(now: np.ndarray, before: np.ndarray) -> str:
    """The difference of two means over seeds, and its bootstrap interval."""
    draws = np.random.default_rng(0)
    means = [draws.choice(x, (5000, len(x))).mean(axis=1) for x in (now, before)]
    low, high = np.quantile(means[0] - means[1], (0.025, 0.975))
    return f"{now.mean() - before.mean():+.0f} [{low:+.0f}, {high:+.0f}]"


def settings(results: pathlib.Path) -> list[str]:
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
        "### What settings are worth",
        "",
        f"Change of the return after {record['steps']:,} steps, and its standard error",
        f"([record](../benchmarks/results/{path.name})):",
        "",
        *table(["from the recipe's setting to another", *found], rows),
        "Each column is a two-level design: all settings vary at once, and each effect is an average over the levels",
        "of the others (32 runs in HalfCheetah, 16 in Hopper and in Walker2d, all on seeds from 1000 on). HalfCheetah",
        "gains most from less initial noise, which costs Hopper the most; `tuned` above follows from this.",
        "",
    ]


def main_effects(design: Record) -> dict[str, tuple[float, float]]:
    """The effect of the second level of each factor and its standard error, by least squares."""
    levels = [row["levels"] for row in design["rows"] for _ in row["returns"]]
    returns = np.array([one for row in design["rows"] for one in row["returns"]])
    terms = np.column_stack([np.ones(len(returns)), np.array(levels) - 0.5])
    effects = np.linalg.lstsq(terms, returns, rcond=None)[0]
    variance = np.sum(np.square(returns - terms @ effects)) / (len(returns) - terms.shape[1])
    errors = np.sqrt(variance * np.diag(np.linalg.inv(terms.T @ terms)))
    return {name: (effects[k + 1], errors[k + 1]) for k, name in enumerate(design["factors"])}


def other_settings(config: Record) -> str:
    """The settings of a record that are not the recipe's."""
    now = dataclasses.asdict(Config())
    free = ("env_id", "total_timesteps", "seed", "hidden")
    other = [f"{name}={value}" for name, value in config.items() if name not in free and now.get(name) != value]
    return f", {', '.join(other)}" if other else ""


def interval(found: Record, digits: int = 0) -> str:
    """Mean and its interval."""
    mean, low, high = (f"{number:.{digits}f}" for number in (found["mean"], *found["mean_95"]))
    return f"{mean} [{low}, {high}]"


def curves(records: list[Record], pictures: pathlib.Path) -> list[str]:
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
    return ["![Returns against steps](img/results_mujoco.png)", "", "Lines are means over seeds, bands quartiles.", ""]
