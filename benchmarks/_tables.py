"""Tables of the pages, made from the records: for each kind of block, a function of a linker and the block's words.

A page has `<!-- NAME WORD ... -->`, a table, and `<!-- end -->`; `python -m benchmarks report` writes what stands
between them. `link(text, *addresses)` is text that links to a record, with a plus sign for each further one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from ppo_parts import training

from ._pages import detected, difference, interquartile, interval, signed, span, table
from ._shared import RESULTS, Record, read
from .differences import DIFFERENCES
from .explain import explained
from .learning import task_of
from .mujoco import VARIANTS
from .train import ONE_SEED

Link = Callable[..., str]
PUBLISHED = {  # task: Tianshou's mean and standard deviation after 1M steps, and after 3M; others after 1M; one more
    "Humanoid-v5": ("787 (194)", "1360", "rl_games about 3,300", "rl_games about 6,900"),
    "Ant-v5": ("3258 (1079)", "4079", "TRPO, SB3-zoo 4,982", ""),
    "Walker2d-v5": ("3589 (757)", "4896", "TRPO, SB3-zoo 4,933", ""),
    "Hopper-v5": ("2609 (701)", "3128", "TRPO, SB3-zoo 3,618", ""),
    "HalfCheetah-v5": ("5784 (1244)", "7337", "CleanRL 1,443", ""),
    "Swimmer-v5": ("67 (99)", "81", "SB3-zoo's PPO 282, TRPO 366", ""),
    "InvertedDoublePendulum-v5": ("9231", "9231", "", ""),
    "Reacher-v5": ("-4.1", "-3.7", "", ""),
    "Pusher-v5": ("", "", "CleanRL -40.4", ""),
}


def records(benchmark: str) -> dict[str, Record]:
    """The committed records of a benchmark by name."""
    return read(RESULTS / f"{benchmark}.jsonl")


def short(x: float) -> str:
    """Three digits or so."""
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def first_to_last(seeds: list[int]) -> str:
    """The first and the last seed."""
    return f"{seeds[0]} - {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"


def grouped(found: Iterable[Any], *keys: str) -> dict[Any, list[Any]]:
    """Lists of those that have the same values under these keys."""
    groups: dict[Any, list[Any]] = {}
    for each in found:
        groups.setdefault(tuple(each[key] for key in keys), []).append(each)
    return groups


def results(benchmark: str, *names: str) -> list[Record]:
    """The results of these records of a benchmark (none named: of all), or their rows, with the address of each."""
    found = records(benchmark)
    given = {f"{benchmark}.jsonl#{name}": found[name]["results"] for name in names or found}
    listed = {address: result if isinstance(result, list) else [result] for address, result in given.items()}
    return [row | {"address": address} for address, rows in listed.items() for row in rows]


def reached(result: Record, what: str) -> str:
    """Mean (standard deviation) of a kind of return, and how many seeds reach the task's threshold."""
    threshold, found = task_of(result["task"]).threshold, result[what]
    digits, returns = 1 if abs(found["mean"]) >= 10 else 3, np.array(found["per_seed"])
    count = f"{np.sum(returns >= threshold)} of {len(returns)} >= {threshold:g}"
    return f"{found['mean']:.{digits}f} ({found['std']:.{digits}f}); {count}"


def learning(link: Link, *names: str) -> list[str]:
    """Returns of runs of `benchmarks learning`, and how many seeds reach the threshold."""
    rows = []
    for found in results("learning", *names):
        task = f"{found['config']['env_id']}, " + link("`{task}`".format(**found), found["address"])
        returns = (reached(found, f"{what}_episodes_return") for what in ("last_100", "evaluation_100"))
        rows.append([task, f"{found['env_steps']:,}", first_to_last(found["seeds"]), *returns])
    return table(
        ["task", "steps", "seeds", "return of the last 100 training episodes", "return of 100 new episodes"], rows
    )


def published(link: Link, *names: str) -> list[str]:
    """Returns of new episodes beside the published result that is the threshold of the task."""
    rows = []
    for found in results("learning", *names):
        task = task_of(found["task"])
        returns = (found[f"{how}_100_episodes_return"] for how in ("evaluation", "evaluation_mode"))
        evaluated = (interval(x, 1 if abs(task.threshold) >= 1 else 3) for x in returns)
        linked, steps = link(found["config"]["env_id"], found["address"]), f"{found['env_steps']:,}"
        rows.append([linked, steps, first_to_last(found["seeds"]), *evaluated, f"{task.threshold:g}, {task.why}"])
    return table(
        ["task", "steps", "seeds", "sampled actions", "most probable actions", "threshold, and its source"], rows
    )


def games(link: Link) -> list[str]:
    """The shares of games that were won, of records that differ only in their seeds."""
    rows = []
    for (game,), group in sorted(grouped(results("games"), "game").items()):
        seeds = [seed for found in group for seed in found["seeds"]]
        cells = []
        for what in ("won_sampled", "won_mode"):
            won = [100 * seed[what] for seed in seeds]  # each of a few, and the interval of several
            few = ", ".join(f"{x:.1f} %" for x in won)
            cells.append(few if len(won) < 5 else f"{interval(training.summary(won), 1)} %")
        linked, steps = link(game, *(found["address"] for found in group)), f"{group[0]['env_steps']:,}"
        rows.append([linked, steps, first_to_last([seed["seed"] for seed in seeds]), *cells])
    return table(["game", "steps", "seeds", "won, sampled actions", "won, most probable actions"], rows)


def atari(link: Link) -> list[str]:
    """The recipe beside CleanRL's script."""
    rows = []
    for (task, steps), group in grouped(results("atari"), "task", "env_steps").items():
        runs = {name: [run for found in group for run in found["runs"][name]] for name in ("ppo_parts", "cleanrl")}
        cells = [
            interval(training.summary([mean_return(run, part * steps) for run in each]), 2)
            for part in (0.8, 0.0)
            for each in runs.values()
        ]
        linked = link(task, *(found["address"] for found in group))
        rows.append([linked, f"{steps:,}", first_to_last([run["seed"] for run in runs["ppo_parts"]]), *cells])
    head = [f"{who}, {when}" for when in ("last 20 %", "all steps") for who in ("`atari_ppo`", "CleanRL")]
    return table(["game", "steps", "seeds", *head], rows)


def mean_return(run: Record, after: float) -> float:
    """The mean return of the games that ended after this number of steps."""
    rows = [row for row in run["games"] if row[0] > after]
    return float(np.average([row[1] for row in rows], weights=[row[2] for row in rows])) if rows else float("nan")


def runs(benchmark: str) -> list[Record]:
    """The runs of a benchmark that have ended; those that differ only in their seeds become one."""
    ended = (found for found in results(benchmark) if found["complete"])
    groups = grouped(ended, "task", "variant", "env_steps").values()
    return [merged(sorted(group, key=lambda found: int(found["seeds"][0]))) for group in groups]


def merged(group: list[Record]) -> Record:
    """One run of several that have the same configuration and other seeds."""
    names = ("evaluation", "last_100_episodes")
    rows = list(zip(*(record["curve"] for record in group), strict=True))
    curve = [row[0] | {name: [x for part in row for x in part[name]] for name in names} for row in rows]
    return group[0] | {
        "addresses": [record["address"] for record in group],
        "seeds": [seed for record in group for seed in record["seeds"]],
        "best_evaluation": training.summary(np.max([row["evaluation"] for row in curve], axis=0)),
        "last_evaluation": training.summary(curve[-1]["evaluation"]),
        "last_100_episodes": training.summary(curve[-1]["last_100_episodes"]),
        "curve": curve,
    }


def whole_runs() -> list[Record]:
    """The MuJoCo runs that have the steps of published results; shorter ones compare variants."""
    return [run for run in runs("mujoco") if run["env_steps"] > 900_000]


def mujoco(link: Link) -> list[str]:
    """The recipe beside published results."""
    variants = {"Ant-v5": "no_contact_forces", "Humanoid-v5": "no_contact_forces", "Swimmer-v5": "long_horizon"}
    ours = {
        (run["task"], round(run["env_steps"] / 1e6)): interval(run["best_evaluation"])
        for run in whole_runs()
        if run["variant"] == variants.get(run["task"], "recipe")
    }
    tianshou = "[Tianshou](https://github.com/thu-ml/tianshou/tree/82dc1adf/examples/mujoco)"
    head = ["task", "1M steps", f"{tianshou}, 1M", "others, 1M", "3M steps", f"{tianshou}, 3M", "others, 3M"]
    rows = [
        [task, ours.get((task, 1), ""), one, others, ours.get((task, 3), ""), three, more]
        for task, (one, three, others, more) in PUBLISHED.items()
    ]
    preset = interval(records("humanoid")["preset_1"]["results"]["last_evaluation"])
    own = link("`--preset humanoid`", "humanoid.jsonl#preset_1")
    rows.insert(1, [f"Humanoid-v5, {own}, last evaluation", preset, *(len(head) - 2) * [""]])
    return table(head, rows)


def mujoco_runs(link: Link) -> list[str]:
    """Every whole run."""
    rows = []
    for run in whole_runs():
        returns = (interval(run[what]) for what in ("best_evaluation", "last_evaluation"))
        linked = link(run["task"], *run["addresses"])
        rows.append([linked, f"`{run['variant']}`", f"{run['env_steps']:,}", *returns])
    return table(["task", "variant", "steps", "best of each seed", "last"], rows)


class Comparison(NamedTuple):
    """Runs of one task that differ in one choice each, by its name, and how they change from the first, the base."""

    task: str
    steps: int
    seeds: str
    runs: dict[str, Record]
    last: dict[str, Record]
    mean: dict[str, Record]

    def cell(self, link: Link, name: str) -> str:
        """The change of the last evaluation by a choice, or the last evaluation of the base; empty without a run."""
        if name not in self.runs:
            return ""
        found = signed(self.last[name]) if name in self.last else interval(self.runs[name]["last_evaluation"])
        return link(found, *self.runs[name]["addresses"])


def comparisons(benchmark: str, names: Iterable[str]) -> list[Comparison]:
    """A comparison for each task: of the short runs of a benchmark, in the order of `names`."""
    order, found = list(names), []
    short = [run for run in runs(benchmark) if run["env_steps"] < 900_000 and run["variant"] in order]
    for group in grouped(sorted(short, key=lambda run: order.index(run["variant"])), "task").values():
        curves = {run["variant"]: np.array([row["evaluation"] for row in run["curve"]]) for run in group}
        base, *others = curves
        last = {name: difference(curves[name][-1], curves[base][-1]) for name in others}
        mean = {name: difference(curves[name].mean(0), curves[base].mean(0)) for name in others}
        named, seeds = {run["variant"]: run for run in group}, first_to_last(group[0]["seeds"])
        found.append(Comparison(group[0]["task"], group[0]["env_steps"], seeds, named, last, mean))
    return found


def choices(link: Link, benchmark: str) -> list[str]:
    """The effect of each choice on the last evaluation."""
    labels = {name: f"`{name}`" for name in VARIANTS}
    if benchmark == "differences":
        labels = {name: f"{each.what} ({each.who})" for name, each in DIFFERENCES.items()}
    compared = comparisons(benchmark, labels)
    head = [f"{one.task}, seeds {one.seeds}" for one in compared]
    rows = [[label, *(one.cell(link, name) for one in compared)] for name, label in labels.items()]
    rows = [row for row in rows if any(row[1:])]
    found = [float(np.median([detected(change) for change in one.last.values()])) for one in compared]
    rows.append(["a change of this size is found with a power of 80 %", *(f"{size:.0f}" for size in found)])
    return table([f"change, {compared[0].steps:,} steps", *head], rows)


def libraries(link: Link) -> list[str]:
    """The presets of `ppo_parts.recipes.library_ppo`."""
    found = sorted(runs("libraries"), key=lambda run: -float(run["last_evaluation"]["mean"]))
    rows = []
    for run in found:
        divergence = np.mean([row["approx_kl"] for row in run["curve"]])
        returns = (interval(run[what]) for what in ("last_evaluation", "last_100_episodes"))
        rows.append([link(run["variant"], *run["addresses"]), *returns, f"{divergence:.4f}"])
    head = f"{found[0]['task']}, {found[0]['env_steps']:,} steps, seeds {first_to_last(found[0]['seeds'])}"
    return table([head, "last evaluation", "last 100 training episodes", "`approx_kl`"], rows)


def explain(link: Link, *names: str) -> list[str]:
    """What the gap between two libraries is made of, the largest effects first."""
    rows = []
    for found in results("explain", *names):
        ends = f"{found['first']} to {found['second']}, {found['config']['env_id'].rpartition(':')[2]}"
        linked = link(f"{ends}, seeds {first_to_last(found['seeds'])}", found["address"])
        rows += [["", choice, signed(change)] for choice, change in explained(found).items()]
        rows[-len(found["choices"]) - 1][0] = linked
    return table(["from, to", "choice", "effect on the return of the last 100 episodes"], rows)


def kuhn(link: Link) -> list[str]:
    """Exploitability of both arms."""
    names = {"mirror": "mirror descent, as above", "clipped": "`clipped_surrogate` in its place"}
    rows = []
    for arm in records("kuhn")["kuhn"]["results"]["arms"]:
        found = arm["exploitability"]
        rows.append([names[arm["arm"]], interval(found, 3), f"{max(found['per_seed']):.3f}"])
    return table(["surrogate", "exploitability", "worst seed"], rows)


def levels(link: Link) -> list[str]:
    """Interquartile means of returns in held-out mazes."""
    runs = results("levels")
    head = [link(f"seeds {first_to_last(run['seeds'])}", run["address"]) for run in runs]
    rows = [[arm, *(interquartile(run["arms"][arm]["held_out"], 3) for run in runs)] for arm in runs[0]["arms"]]
    return table(["levels", *head], rows)


def gallery(link: Link) -> list[str]:
    """How rows of the gallery differ from runs without them; differences whose interval excludes 0 are bold."""
    found, rows = {name: record["results"] for name, record in records("gallery").items()}, []
    for name, result in sorted(found.items(), key=lambda pair: (pair[1]["task"], pair[1]["without"] or "", pair[0])):
        if (without := result["without"]) in (None, name):
            continue
        now, before = (np.array(each["curve"], float) for each in (result, found[without]))
        cells = []
        for change in (difference(np.nanmean(now, 0), np.nanmean(before, 0)), difference(now[-1], before[-1])):
            low, high = change["95"]
            text = f"{change['mean']:+.3g} [{low:+.3g}, {high:+.3g}]"
            cells.append(f"**{text}**" if low > 0 or high < 0 else text)
        where = without if result["task"] in without else f"{without}, {result['task']}"
        rows.append([name, where, *cells])
    return table(["change", "compared with", "mean of the training", "last sixteenth"], rows)


def study(link: Link) -> list[str]:
    """Interquartile means of every arm of the study."""
    found = {task: record["results"] for task, record in records("study").items()}
    head = [x for result in found.values() for x in (result["config"]["env_id"], "last 100")]
    rows = []
    for name in next(iter(found.values()))["arms"]:
        arms = [result["arms"][name] for result in found.values()]
        measures = ("return_over_training", "last_100_episodes_return")
        rows.append([name, *(interquartile(arm[what]) for arm in arms for what in measures)])
    return table(["arm", *head], rows)


def by_size(rows: list[Record], cell: Callable[[Record], str], label: Callable[[Record], str]) -> list[str]:
    """A table with a line for each label and a column for each size."""
    sizes = {sized(row): (math.prod(row["size"]), row["size"]) for row in rows}
    order = sorted(sizes, key=sizes.__getitem__)
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        cells.setdefault(label(row), {})[sized(row)] = cell(row)
    return table(["", *order], [[name, *(found.get(size, "") for size in order)] for name, found in cells.items()])


def label_of(row: Record) -> str:
    """What a microbenchmark timed."""
    return f"`{row['part']}`" + (", gradient" if row["direction"] == "gradient" else "")


def parts(link: Link, name: str, *sizes: str) -> list[str]:
    """Ours, inside one program: microseconds, and relative to the floor."""
    ours = [row for row in results("parts", name) if row["method"] == "ours" and sized(row) in sizes]

    def times(row: Record) -> str:
        return f"{short(row['us']['median'])} (x{short(row['over_floor']['median'])}){'?' * row['disturbed']}"

    return by_size(ours, times, label_of)


def rivals(link: Link, name: str) -> list[str]:
    """Other implementations: their time relative to ours."""
    others = [row for row in results("parts", name) if row["method"] not in ("ours", "floor")]

    def ratio(row: Record) -> str:
        return short(row["over_ours"]["median"]) + "?" * row["disturbed"]

    return by_size(others, ratio, lambda row: f"{label_of(row)}: {row['method']}")


def update(link: Link, *names: str) -> list[str]:
    """A whole update against one written by hand."""
    rows = []
    for row in results("update", *names):
        linked, ours = link(f"`{row['recipe']}`", row["address"]), f"{row['run_ms']['ours']:.1f}"
        rows.append([linked, sized(row), ours, *(span(ratio) for ratio in row["ours_over"].values())])
    return table(["update", "size", "ours, ms", "over handwritten", "over it with diagnostics"], rows)


def budget(link: Link, name: str) -> list[str]:
    """The pieces of a training step: milliseconds, and relative to their floors."""

    def times(row: Record) -> str:
        digits = max(3, len(str(int(row["ms"]))))
        return f"{row['ms']:.{digits}g} (x{short(row['ms'] / row['floor_ms'])})"

    return by_size(results("budget", name), times, lambda row: row["piece"])


def sized(row: Record) -> str:
    """A size, "128x64"."""
    return "x".join(map(str, row["size"]))


def compiling(seconds: Record | None) -> str:
    """How long it took to compile a program, where that was measured."""
    return "{trace:.1f} + {compile:.1f}".format(**seconds) if seconds else ""


def speed(link: Link, *names: str) -> list[str]:
    """How many times faster the recipe is, from records of whole runs of one seed."""
    rivals = {"purejaxrl": "PureJaxRL", "rejax": "rejax", "sbx": "sbx", "sb3": "stable-baselines3"}
    ratios: dict[str, dict[str, str]] = {}  # by environments and program, the last record of each
    for row in results("train", *names):
        if row["seeds"] == 1 and row["program"] != ONE_SEED:
            where = f"{row['env']}, {row['num_envs']}"
            ratios.setdefault(where, {})[row["program"]] = span(row["over_cleanrl"])
    lines = [[name, *(found.get(rival, "") for rival in rivals)] for name, found in ratios.items()]
    return table(["environments", *rivals.values()], lines)


def train(link: Link, *names: str) -> list[str]:
    """Whole runs."""
    lines = []
    for row in results("train", *names):
        linked = link(f"{row['env']}, {row['num_envs']}", row["address"])
        seeds = f", {row['seeds']} seeds" if row["seeds"] > 1 else ""
        speed, built = f"{row['steps_per_second']:,.0f}", compiling(row.get("compile_seconds"))
        lines.append([linked + seeds, row["program"], speed, span(row["over_cleanrl"]), built])
    head = ["environments", "program", "steps/s", "time over cleanrl (quartiles)", "trace + compile, s"]
    return table(head, lines)


def hosts(link: Link, name: str) -> list[str]:
    """Steps per second with environments on the host."""
    rows = [
        [row["task"], row["program"], f"{row['steps_per_second']:,.0f}", span(row["over_recipe"])]
        for row in results("hosts", name)
    ]
    return table(["task, 8 environments", "program", "steps per second", "time relative to the recipe"], rows)


BLOCKS: dict[str, Callable[..., list[str]]] = {
    each.__name__: each
    for each in (
        learning, published, games, atari, mujoco, mujoco_runs, choices, libraries, explain, kuhn, levels,
        gallery, study, budget, parts, rivals, update, speed, train, hosts,
    )
}  # fmt: skip
