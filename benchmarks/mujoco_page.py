"""The MuJoCo part of docs/results.md: results, published results, and the effects of single choices and settings."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from ppo_parts import training
from recipes.mujoco_ppo import Config

from . import differences, mujoco
from ._pages import canvas, difference, interval, save, signed, table

TIANSHOU = "https://github.com/thu-ml/tianshou/tree/82dc1adf/examples/mujoco"
NO_FORCES = "https://github.com/openai/gym/issues/1541"
RL_GAMES = "https://github.com/Denys88/rl_games/tree/master/docs/pictures/mujoco"
ZOO = "https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/benchmark.md"
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
    """The table of whole runs with the published results, and their curves."""
    records = [record for record in runs(results / "mujoco") if is_whole_run(record)]
    if not records:
        return []
    details = [
        [
            link(record),
            f"`{record['variant']}`{other_settings(record['config'])}",
            f"{record['env_steps']:,}",
            f"{record['seeds'][0]} - {record['seeds'][-1]}",
            interval(record["best_evaluation"]),
            f"{max(np.mean(row['evaluation']) for row in record['curve']):.0f}",
            *(interval(record[what]) for what in ("last_evaluation", "last_100_episodes")),
        ]
        for record in records
    ]
    what = ["task", "variant", "steps", "seeds", "best of each seed", "best mean", "last", "last 100 training episodes"]
    return [
        "## Gymnasium's MuJoCo tasks",
        "",
        "`recipes.mujoco_ppo` with the same settings for all tasks (*best of each seed*, see below), beside PPO in",
        "Tianshou and CleanRL:",
        "",
        *headline(records),
        "These are not the highest published results. On Humanoid, the curve of",
        f"[rl_games]({RL_GAMES}) (envpool's Humanoid-v4, one seed, training returns) reads about 3,300 after 1M steps,",
        "6,900 after 3M and 10,000 after 16M, far above ours. On Ant, Hopper and Walker2d, the best on-policy results",
        f"after 1M steps that we know of are those of TRPO in [Stable-Baselines3's zoo]({ZOO}), one selected agent",
        "each: 4,982, 3,618 and 4,933.",
        "",
        "On Humanoid, some seeds learn to run and the others do not: four of ten in 1M steps, and three of ten in 3M,",
        "so the intervals are wide, and Tianshou's result after 3M lies within that of ours. Ant and Humanoid are",
        "played without contact forces in their observations, as in version 3. With them, Ant reaches less (the row",
        "with the variant `recipe` below), unless observations are clipped at one standard deviation instead of ten",
        "(`obs_clip_1`); these forces are 0 most of the time, with rare peaks. On HalfCheetah, [this clipping costs",
        "return](#one-choice-at-a-time), so it is not the default.",
        "",
        "Every run, with a link to its record:",
        "",
        *table(what, details),
        "Mean over seeds [95 % bootstrap interval]. An evaluation is the mean return of 10 episodes with the mode",
        "of the policy, 20 times in a run of 1M steps and 61 times in 3M (Humanoid: 20 times), and *last* is the one",
        "at the end. *Best of each seed* takes the highest evaluation of each seed, and *best mean* the highest mean",
        "over seeds; both favor lucky evaluations. Tianshou reports the maximum over training of about 30",
        "evaluations in 1M steps (10 seeds, mean and standard deviation, version 3 of the environments), and CleanRL",
        "training returns (3 seeds, version 4). `recipe` is `recipes.mujoco_ppo` as it stands, the same for all tasks.",
        "`no_contact_forces` is the same recipe without the contact forces in the observations (Gymnasium's",
        "`include_cfrc_ext_in_observation=False`):",
        f"in version 3 of Ant and Humanoid they [are always 0]({NO_FORCES}) with MuJoCo 2.0 and later; in version 5",
        "they are not. `obs_clip_1` observes them, clipped (`--obs-clip 1`). `tianshou` is the recipe's preset with",
        "the settings after its name.",
        "`python -m benchmarks mujoco <task> --variant <variant>` produces a row.",
        "",
        *curves(records, pictures),
    ]


def headline(records: list[Record]) -> list[str]:
    """The table of the recipe's results beside the published ones."""
    ours = {
        (record["task"], round(record["env_steps"] / 1e6)): interval(record["best_evaluation"])
        for record in records
        if record["variant"] == ("no_contact_forces" if record["task"] in mujoco.WITH_FORCES else "recipe")
    }
    rows = [
        [task, ours.get((task, 1), ""), one, cleanrl, ours.get((task, 3), ""), three]
        for task, (one, three, cleanrl) in PUBLISHED.items()
    ]
    tianshou = f"[Tianshou]({TIANSHOU})"
    return table(
        ["task", "1M steps", f"{tianshou}, 1M", f"[CleanRL]({CLEANRL}), 1M", "3M steps", f"{tianshou}, 3M"], rows
    )


def complete(folder: pathlib.Path) -> list[Record]:
    """The records of a folder whose runs have ended."""
    records = [json.loads(path.read_text())["results"] | {"file": path.name} for path in sorted(folder.glob("*.json"))]
    return [record for record in records if record["complete"]]


def runs(folder: pathlib.Path) -> list[Record]:
    """The records of a folder whose runs have ended; those that differ only in their seeds become one."""
    groups = grouped(folder, lambda x: (x["task"], x["variant"], x["env_steps"]), lambda x: int(x["seeds"][0]))
    return [merged(group) for group in groups]


def grouped(folder: pathlib.Path, same: Callable[[Record], Any], seed: Callable[[Record], int]) -> list[list[Record]]:
    """The records of a folder whose runs have ended, in groups with equal `same`, each in the order of its seeds."""
    groups: dict[Any, list[Record]] = {}
    for record in complete(folder):
        groups.setdefault(same(record), []).append(record)
    return [sorted(group, key=seed) for group in groups.values()]


def merged(group: list[Record]) -> Record:
    """One record of several that have the same configuration and other seeds."""
    names = ("evaluation", "last_100_episodes")
    rows = list(zip(*(record["curve"] for record in group), strict=True))
    curve = [row[0] | {name: [x for part in row for x in part[name]] for name in names} for row in rows]
    return group[0] | {
        "files": [record["file"] for record in group],
        "seeds": [seed for record in group for seed in record["seeds"]],
        "best_evaluation": training.summary(np.max([row["evaluation"] for row in curve], axis=0)),
        "last_evaluation": training.summary(np.array(curve[-1]["evaluation"])),
        "last_100_episodes": training.summary(np.array(curve[-1]["last_100_episodes"])),
        "curve": curve,
    }


def link(record: Record) -> str:
    """The task with a link to its record, and to the records of further seeds."""
    return linked(record["task"], [f"mujoco/{file}" for file in record["files"]])


def linked(text: str, files: list[str]) -> str:
    """Text that links to the first of some records, and a plus sign for each further one."""
    first, *further = (f"../benchmarks/results/{file}" for file in files)
    return f"[{text}]({first})" + "".join(f" [+]({file})" for file in further)


def is_whole_run(record: Record) -> bool:
    """Whether a record has the steps of the published results; shorter ones compare variants."""
    return record["env_steps"] > 900_000


def choices(results: pathlib.Path, pictures: pathlib.Path) -> list[str]:
    """Runs in which one choice was changed: one of the recipe's, or one in which libraries differ."""
    recipe = [record for record in runs(results / "mujoco") if not is_whole_run(record)]
    recipe_names = {name: name for name in mujoco.VARIANTS}
    library_names = {name: f"{each.what} ({each.who})" for name, each in differences.DIFFERENCES.items()}
    of_recipe = comparisons("mujoco_ppo", recipe, recipe_names, "mujoco")
    of_libraries = comparisons("CleanRL's chain", runs(results / "differences"), library_names, "differences")
    lines: list[str] = []
    if of_recipe:
        lines += ["### One choice at a time", "", "`mujoco_ppo` with one of its choices changed:", ""]
        lines += [line for comparison in of_recipe for line in comparison.table()]
    if of_libraries:
        lines += [
            "### Effects of the differences between libraries",
            "",
            "CleanRL's chain, with time limits bootstrapped from the value of the final state, with the other settings",
            "of `mujoco_ppo`, and with one choice replaced by that of [another library](libraries.md#choices):",
            "",
            *(line for comparison in of_libraries for line in comparison.table()),
        ]
    if lines:
        forest([*of_recipe, *of_libraries], pictures / "results_choices.png")
        lines += [
            "*Return* is the mean over seeds of the last evaluation. The *mean of all* evaluations, which are equally",
            "spaced, also rewards fast learning and has less noise. Changes are relative to the first row.",
            "Brackets are 95 % bootstrap intervals over seeds. They are not corrected for the number of rows: where a",
            "choice makes no difference, one interval in twenty still excludes 0.",
            "",
            "![Change of the return with each choice](img/results_choices.png)",
            "",
        ]
    return lines


def defaults_of_libraries(results: pathlib.Path) -> list[str]:
    """The table of the presets of `recipes.library_ppo`, whose update and hyperparameters are those of a library."""
    lines: list[str] = []
    records = runs(results / "libraries")
    for task, steps in dict.fromkeys((record["task"], record["env_steps"]) for record in records):
        chosen = [record for record in records if (record["task"], record["env_steps"]) == (task, steps)]
        chosen.sort(key=lambda record: -float(record["last_evaluation"]["mean"]))
        rows = [
            [
                f"[{record['variant']}](../benchmarks/results/libraries/{record['file']})",
                interval(record["last_evaluation"]),
                interval(record["last_100_episodes"]),
                f"{np.mean([row['approx_kl'] for row in record['curve']]):.4f}",
            ]
            for record in chosen
        ]
        seeds = f"seeds {chosen[0]['seeds'][0]} - {chosen[0]['seeds'][-1]}"
        what = [f"{task}, {steps:,} steps, {seeds}", "last evaluation", "last 100 training episodes", "`approx_kl`"]
        lines += table(what, rows)
    if not lines:
        return []
    return [
        "### Each library with its default hyperparameters",
        "",
        "The presets of [`recipes.library_ppo`](libraries.md#train-with-them): environments, normalization of",
        "observations and rewards, and network are the same for all, and the update is the library's.",
        "",
        *lines,
        "`approx_kl` is the mean over all gradient steps of the run.",
        "",
    ]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Runs of one task that differ in one choice each; the first is what the others are compared with.

    Attributes:
        chain: what the first one trains.
        title: the task, steps and seeds.
        names: what differs, for each run.
        files: paths of the records of each run, from the folder of results; several if they have different seeds.
        returns: intervals of the last evaluation, as text.
        changes: for each run, of the last evaluation and of the mean of all.
    """

    chain: str
    title: str
    names: list[str]
    files: list[list[str]]
    returns: list[str]
    changes: list[list[Record]]

    def table(self) -> list[str]:
        """A row for each run."""
        rows = [
            [linked(name, files), returns, *(signed(change) if row else "" for change in changes)]
            for row, (name, files, returns, changes) in enumerate(
                zip(self.names, self.files, self.returns, self.changes, strict=True)
            )
        ]
        return table([self.title, "return", "change", "change of the mean of all"], rows)


def comparisons(chain: str, records: list[Record], names: dict[str, str], folder: str) -> list[Comparison]:
    """A comparison for each task and number of steps, if the first of `names` was recorded."""
    found = []
    for run in dict.fromkeys((record["task"], record["env_steps"]) for record in records):
        same_run = {record["variant"]: record for record in records if (record["task"], record["env_steps"]) == run}
        chosen = [same_run[name] for name in names if name in same_run]
        if chosen[0]["variant"] != next(iter(names)):
            continue
        returns = [np.array([row["evaluation"] for row in record["curve"]]) for record in chosen]
        first, seeds = returns[0], chosen[0]["seeds"]
        found.append(
            Comparison(
                chain=chain,
                title=f"{run[0]}, {run[1]:,} steps, seeds {seeds[0]} - {seeds[-1]}",
                names=[names[record["variant"]] for record in chosen],
                files=[[f"{folder}/{file}" for file in record["files"]] for record in chosen],
                returns=[interval(record["last_evaluation"]) for record in chosen],
                changes=[[difference(x[-1], first[-1]), difference(x.mean(0), first.mean(0))] for x in returns],
            )
        )
    return found


def forest(compared: list[Comparison], path: pathlib.Path) -> None:
    """A panel for each comparison, with a line for the interval of each change."""
    figure, panels = canvas(len(compared), width=8, columns=2)
    figure.set_figheight(-(-len(compared) // 2) * (1.5 + 0.34 * max(len(comparison.names) for comparison in compared)))
    for comparison, panel in zip(compared, panels, strict=True):
        for column, label in enumerate(("last evaluation", "mean of all evaluations")):
            shown = [changes[column] for changes in comparison.changes[1:]]
            middle, low, high = np.array([[change["mean"], *change["95"]] for change in shown]).T
            places = np.arange(len(middle)) + 0.2 * column
            panel.errorbar(middle, places, xerr=[middle - low, high - middle], fmt="o", ms=4, lw=1.2, label=label)
        panel.axvline(0, color="gray", lw=1)
        panel.set_title(f"{comparison.chain}: {comparison.title}", fontsize=9, loc="right")
        panel.locator_params(axis="x", nbins=6)
        panel.set_xlabel("change of the return, and its 95 % interval")
        panel.set_yticks(places, comparison.names[1:], fontsize=8)
        panel.invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    save(figure, path)


def settings(results: pathlib.Path) -> list[str]:
    """The table of the main effects of settings, from two-level designs."""
    path = results / "mujoco_designs.json"
    if not path.exists():
        return []
    record = json.loads(path.read_text())
    found = {}  # of each task, the effects by what was changed
    for design in record["designs"]:
        effects, factors = main_effects(design), design["factors"].items()
        found[design["task"]] = {f"{name}: {low} to {high}": effects[name] for name, (low, high) in factors}
    rows = [
        [change, *("{:+.0f} ({:.0f})".format(*x[change]) if change in x else "" for x in found.values())]
        for change in dict.fromkeys(change for x in found.values() for change in x)
    ]
    return [
        "### Effects of settings",
        "",
        f"Change in the return after {record['steps']:,} steps, and its standard error",
        f"([record](../benchmarks/results/{path.name})):",
        "",
        *table(["from the setting of the preset `tianshou` to another", *found], rows),
        "Each column is a two-level design: all settings vary at once, and each effect is an average over the levels",
        "of the others (32 runs on HalfCheetah, 16 each on the others, all with seeds 1000 and above). The recipe's",
        "trace and initial noise come from these runs. On Hopper they cost return after 300,000 steps, but hardly any",
        "after a million (above).",
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


def curves(records: list[Record], pictures: pathlib.Path) -> list[str]:
    """A panel for each task: the mean evaluation of each record with its quartiles, and Tianshou's means as lines."""
    tasks = list(dict.fromkeys(record["task"] for record in records))
    figure, panels = canvas(len(tasks), columns=3)
    for task, panel in zip(tasks, panels, strict=True):
        for color, record in enumerate(record for record in records if record["task"] == task):
            steps = [row["env_steps"] / 1e6 for row in record["curve"]]
            seen = np.array([row["evaluation"] for row in record["curve"]])
            label = f"{record['variant']}, {steps[-1]:.0f}M"
            panel.plot(steps, seen.mean(axis=1), color=f"C{color}", label=label)
            panel.fill_between(steps, *np.quantile(seen, (0.25, 0.75), axis=1), color=f"C{color}", alpha=0.2, lw=0)
        for text, style, budget in zip(PUBLISHED.get(task, ()), ("--", ":"), ("1M", "3M"), strict=False):
            mean = float(text.split()[0])
            panel.axhline(mean, color="gray", ls=style, lw=1, label=f"Tianshou, best of {budget}")
        panel.set(title=task, xlabel="million environment steps", ylabel="return of 10 episodes")
        panel.legend(fontsize=8)
    save(figure, pictures / "results_mujoco.png")
    legend = "Lines are means over seeds; bands show the quartiles."
    return ["![Returns against steps](img/results_mujoco.png)", "", legend, ""]
