"""Tables and pictures of everything in benchmarks/results: docs/benchmarks.md and docs/img.

`python -m benchmarks report`

The same files give the same page. What has not been recorded yet is left out. Tables of results in other pages
(`PAGES`), between `<!-- learning task ... -->` and `<!-- end -->`, are written again, too, so that
they cannot differ from the records.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from . import results_page
from ._pages import canvas, save, table
from .learning import TASKS, success
from .train import ONE_SEED, RECIPES

Record = dict[str, Any]
Row = dict[str, Any]
ROOT = pathlib.Path(__file__).parent.parent
PUBLISHED = [
    "For comparison, [CleanRL's documentation](https://docs.cleanrl.dev/rl-algorithms/ppo/#experiment-results) reports",
    "these returns, after 500,000 steps and over three seeds:",
    "",
    "| | CartPole-v1 | Acrobot-v1 |",
    "|---|---|---|",
    "| CleanRL, `ppo.py` | 490.0 (6.1) | -86.4 (1.3) |",
    "| openai/baselines, PPO2 | 497.5 (4.0) | -81.8 (5.6) |",
    "",
    "The conditions differ: these numbers come from Gym's environments instead of gymnax's, treat time limits as",
    "terminations, and average training returns over a window that is not stated. The comparison shows that the recipe",
    "learns what CleanRL's does. It does not show that the recipe learns more, and the result of openai/baselines on",
    "Acrobot is better than ours.",
]
"""Published results, which the page sets beside ours."""
PAGES = ("docs/pufferlib.md", "docs/agents.md", "docs/exploration.md")  # with tables of results


def provenance(record: Record) -> list[str]:
    """Where the numbers come from."""
    hardware, versions = record["hardware"], record["versions"]
    load = ", ".join(f"{x:.1f}" for x in hardware["load_average"])
    changed = " (and uncommitted changes)" if record["uncommitted"] else ""
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    cores = f"{hardware['cores']} cores" + (f", {hardware['cores_used']} used" if "cores_used" in hardware else "")
    return [
        f"`{record['command']}`, {record['date'][:10]}, commit {record['commit'][:10]}{changed}. "
        f"{hardware['cpu']}, {cores}, device: {hardware['device']}; load average at the end {load}. "
        f"{listed}.",
        "",
    ]


def short(x: float) -> str:
    """Three digits or so."""
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def by_size(rows: list[Row], cell: Callable[[Row], str], label: Callable[[Row], str], head: str) -> list[str]:
    """A table with a line per label and a column per size."""
    sizes = sorted({tuple(row["size"]) for row in rows}, key=lambda size: (math.prod(size), size))
    cells: dict[str, dict[tuple[int, ...], str]] = {}
    for row in rows:
        cells.setdefault(label(row), {})[tuple(row["size"])] = cell(row)
    lines = [[name, *(found.get(size, "") for size in sizes)] for name, found in cells.items()]
    return table([head, *("x".join(map(str, size)) for size in sizes)], lines)


def parts(records: dict[str, Record], pictures: pathlib.Path) -> list[str]:
    """The microbenchmarks."""
    page = [
        "Sizes have time first: 128x4 is 128 steps of 4 environments. *Inside* is the cost of a function within one",
        "compiled program; *alone* is the time until one compiled call has returned its result. The *floor* is a",
        "program that reads and writes the same number of arrays, of the same sizes, and computes almost nothing. A ?",
        "marks a timing that other work on the machine disturbed: its quartiles are more than a factor of 1.5 apart,",
        "or it is longer inside a program than alone by a quarter or more.",
        "",
    ]
    for name, record in records.items():
        rows = record["results"]
        suspect = disturbed(rows)
        page += [f"### {name}", "", *provenance(record)]

        def label(row: Row) -> str:
            return f"`{row['part']}`" + (", gradient" if row["direction"] == "gradient" else "")

        def times(row: Row, suspect: set[tuple[Any, ...]] = suspect) -> str:
            doubt = "?" * (measured(row) in suspect)
            return f"{short(row['us']['median'])} (x{short(row['over_floor']['median'])}){doubt}"

        def built(row: Row, suspect: set[tuple[Any, ...]] = suspect) -> str:
            doubt = "?" * (measured(row) in suspect)
            return f"{short(row['us']['median'])}{doubt}; {row['compile_seconds']:.2f}"

        for dtype in sorted({row["dtype"] for row in rows}, reverse=True):
            ours = [row for row in rows if (row["method"], row["clock"], row["dtype"]) == ("ours", "inside", dtype)]
            if ours:
                page += [f"Inside, {dtype}: median microseconds (relative to the floor)", ""]
                page += by_size(ours, times, label, "")
        rivals = [row for row in rows if row["method"] not in ("ours", "floor") and row["dtype"] == "float32"]
        if rivals:
            page += ["Other implementations, float32: their time relative to ours (median and quartiles)", ""]
            page += by_size(
                rivals,
                lambda row: "{median:.2f} ({q1:.2f} - {q3:.2f})".format(**row["over_ours"]),
                lambda row: f"{label(row)}: {row['method']}, {row['clock']}",
                "",
            )
        alone = [row for row in rows if (row["method"], row["clock"], row["dtype"]) == ("ours", "alone", "float32")]
        if alone:
            page += ["Alone, float32: median microseconds; seconds to trace and compile", ""]
            page += by_size(alone, built, label, "")
        inside = [row for row in rows if row["clock"] == "inside" and row["dtype"] == "float32"]
        if draw_parts(pictures / f"{name}.png", inside):
            page += [f"![gae and vtrace inside one program, time against size](img/{name}.png)", ""]
    return page


def measured(row: Row) -> tuple[Any, ...]:
    """Describe what a microbenchmark timed, and by which clock."""
    return row["part"], row["direction"], tuple(row["size"]), row["dtype"], row["clock"]


def disturbed(rows: list[Row]) -> set[tuple[Any, ...]]:
    """Which of our timings were taken while something else used the machine.

    Their quartiles are far apart, or they are longer within a program than alone, where a call comes on top.
    """
    times = {measured(row): row["us"] for row in rows if row["method"] == "ours"}
    wide = {what for what, us in times.items() if us["q3"] > 1.5 * us["q1"]}
    alone = {what[:-1]: us["median"] for what, us in times.items() if what[-1] == "alone"}
    inside = {what for what in times if what[-1] == "inside" and what[:-1] in alone}
    return wide | {what for what in inside if times[what]["median"] > 1.25 * alone[what[:-1]]}


def draw_parts(path: pathlib.Path, rows: list[Row]) -> bool:
    """Time against the number of elements, for the two estimators and their rivals; nothing of a single size."""
    drawn = [part for part in ("gae", "vtrace") if any(row["part"] == part for row in rows)]
    if not drawn or len({tuple(row["size"]) for row in rows}) < 2:
        return False
    figure, axes = canvas(len(drawn))
    for axis, part in zip(axes, drawn, strict=True):
        chosen = [row for row in rows if row["part"] == part]
        for method in dict.fromkeys(row["method"] for row in chosen):
            line = sorted((math.prod(row["size"]), row["us"]["median"]) for row in chosen if row["method"] == method)
            style = {"color": "black", "linestyle": ":"} if method == "floor" else {"marker": "."}
            axis.plot(*zip(*line, strict=True), label=method, **style)
        axis.set(xscale="log", yscale="log", xlabel="steps x environments", ylabel="microseconds", title=part)
        axis.legend(frameon=False)
    save(figure, path)
    return True


def update(records: dict[str, Record], pictures: pathlib.Path) -> list[str]:
    """A whole update against one written by hand."""
    del pictures
    page = [
        "`learner.update`, CleanRL's (GAE, 4 epochs of 4 shuffled minibatches) and PufferLib's (V-trace, priorities",
        "and written-back values before each of 16 minibatches), compared with the same update written by hand, which",
        "ends with the same parameters; *with diagnostics*, it also reports the same metrics.",
        "",
    ]
    for name, record in records.items():
        lines = []
        for row in record["results"]:
            ratios = ["{median:.2f} ({q1:.2f} - {q3:.2f})".format(**ratio) for ratio in row["ours_over"].values()]
            compiled = row["compile_seconds"]["ours"]
            cost = f"{compiled['trace']:.1f} + {compiled['compile']:.1f}"
            lines.append(["x".join(map(str, row["size"])), f"{row['run_ms']['ours']:.1f}", *ratios, cost])
        rivals = [f"over {rival}" for rival in record["results"][0]["ours_over"]] if lines else []
        page += [f"### {name}", "", *provenance(record)]
        page += table(["size", "ours, ms", *rivals, "trace + compile, s"], lines)
    return page


def growth(records: dict[str, Record], pictures: pathlib.Path) -> list[str]:
    """Describe the cost of an update as a function of one quantity at a time."""
    page = [
        "This section times the update above while one quantity grows at a time. *Power* is the exponent from the",
        "previous value to this one; 1 means proportional. *Memory*, as the compiler reports it, is temporaries +",
        "inputs and outputs. *Beyond a minibatch* is the memory that the update needs in addition to that of one",
        "gradient step on one minibatch, in multiples of the size of the rollout.",
        "",
    ]
    for name, record in records.items():
        sweeps: dict[str, list[Row]] = {}
        for row in record["results"]:
            sweeps.setdefault(row["quantity"], []).append(row)
        lines = []
        for quantity, rows in sweeps.items():
            for before, row in zip([None, *rows], rows, strict=False):
                power = ""
                if before:
                    more = math.log(row["ms"]["median"] / before["ms"]["median"])
                    power = f"{more / math.log(row[quantity] / before[quantity]):.2f}"
                size = row["bytes"]
                memory = (size["temp"], size["argument"] + size["output"]) if size else ()
                lines.append(
                    [
                        f"{row[quantity]} {quantity}",
                        f"{row['ms']['median']:.1f} ({row['ms']['q1']:.1f} - {row['ms']['q3']:.1f})",
                        power,
                        " + ".join(f"{x / 2**20:.2f}" for x in memory),
                        "" if row.get("beyond") is None else f"{row['beyond']:.2f}",
                        f"{row['trace_seconds'] + row['compile_seconds']:.1f}",
                    ]
                )
        page += [f"### {name}", "", *provenance(record)]
        head = ["", "ms per update (quartiles)", "power", "memory, MiB", "beyond a minibatch", "trace and compile, s"]
        page += table(head, lines)
        if sweeps:
            draw_growth(pictures / f"{name}.png", sweeps)
            page += [f"![milliseconds per update against each quantity; dotted: proportional](img/{name}.png)", ""]
    return page


def draw_growth(path: pathlib.Path, sweeps: dict[str, list[Row]]) -> None:
    """Time against each quantity, all logarithmic; dotted: proportional to the last point."""
    figure, axes = canvas(len(sweeps), width=3.2)
    for axis, (quantity, rows) in zip(axes, sweeps.items(), strict=True):
        x, y = [row[quantity] for row in rows], [row["ms"]["median"] for row in rows]
        axis.plot(x, y, marker=".")
        axis.plot(x, [y[-1] * value / x[-1] for value in x], color="black", linestyle=":")
        axis.set(xscale="log", yscale="log", xlabel=quantity)
    axes[0].set(ylabel="milliseconds per update")
    save(figure, path)


def train(records: dict[str, Record], pictures: pathlib.Path) -> list[str]:
    """Whole runs."""
    del pictures
    page = [
        "Environment steps per second of whole training runs, with the same network, batch and epochs for all programs",
        "(but *pufferlib* has one trunk for both heads); [benchmarks/train.py](../benchmarks/train.py) describes them.",
        "*Time over cleanrl* is per environment step, so a number above 1 is slower than the recipe. *All at once*:",
        "large minibatches are not evaluated in pieces (`microbatch=None`). *ippo* trains one agent here. A program",
        "written by hand also has its time relative to its recipe, and the compile time of the recipe relative to its",
        "own.",
        "",
    ]
    for name, record in records.items():
        lines = []
        quartiles = "{median:.2f} ({q1:.2f} - {q3:.2f})"
        for row in record["results"]:
            compiling = row.get("compile_seconds")
            ratios = [quartiles.format(**row["over_cleanrl"])]
            if "over_recipe" in row and row["over_recipe"] != row["over_cleanrl"]:
                ratios.append(f"its recipe: {quartiles.format(**row['over_recipe'])}")
            built = "" if compiling is None else f"{compiling['trace']:.1f} + {compiling['compile']:.1f}"
            if "compile_of_recipe_over_this" in row:
                built += " (its recipe: {median:.2f} times that)".format(**row["compile_of_recipe_over_this"])
            lines.append(
                [
                    f"{row['env']}, {row['num_envs']}" + (f", {row['seeds']} seeds" if row["seeds"] > 1 else ""),
                    row["program"],
                    f"{row['steps_per_second']:,.0f}",
                    ", ".join(ratios),
                    built,
                    f"{row['temporary_bytes'] / 2**20:,.0f}" if row.get("temporary_bytes") else "",
                ]
            )
        page += [f"### {name}", "", *provenance(record)]
        head = ["environments", "program", "steps/s", "time over cleanrl (quartiles)", "trace + compile, s", "MiB"]
        page += table(head, lines)
    return page


def span(ratio: dict[str, float]) -> str:
    """Median and quartiles of a ratio."""
    return "{median:.2f} ({q1:.2f} - {q3:.2f})".format(**ratio)


def overview(results: pathlib.Path) -> list[str]:
    """How many times faster the recipes are, from all records of whole runs of one seed: the top of the page."""
    rows = [row for path in sorted(results.glob("train_*.json")) for row in json.loads(path.read_text())["results"]]
    rows = [row for row in rows if row["seeds"] == 1 and row["program"] != ONE_SEED]
    rivals = [*RECIPES, "rejax", "sbx", "sb3"]
    faster, whole = [], []
    for env, number in dict.fromkeys((row["env"], row["num_envs"]) for row in rows):
        here = {row["program"]: row for row in rows if (row["env"], row["num_envs"]) == (env, number)}
        ratios = {program: span(row.get("over_recipe", row["over_cleanrl"])) for program, row in here.items()}
        faster.append([f"{env}, {number}", *(ratios.get(rival, "") for rival in rivals)])
        host = [rival for rival in ("sbx", "sb3") if rival in here]
        if host and "cleanrl" in here:
            took = whole_run(here["cleanrl"])
            theirs = [whole_run(here[rival]) for rival in host]
            cells = [f"{seconds:.0f} s, {seconds / took:.1f} times ours" for seconds in theirs]
            whole.append([f"{env}, {number}", f"{took:.1f} s", *cells])
    if not faster:
        return []
    head = [f"`{recipe}` against the same written by hand" for recipe in RECIPES.values()]
    page = [
        "This table shows how many times faster the recipes are ([why](training.md#speed)); the recipe is `cleanrl`",
        "unless another is named. Cells are medians and quartiles; where the quartiles include 1, there is no clear",
        "difference. Compile time is excluded. `ippo` has one agent here.",
        "",
        *table(["environments", *head, "rejax", "sbx", "stable-baselines3"], faster),
    ]
    if whole:
        page += [
            "sbx and stable-baselines3 step Gymnasium's environment in Python, whereas the recipe compiles gymnax's:",
            "these two columns compare environments as much as they compare PPO. The next table has the time of a",
            f"whole run of {WHOLE:,} steps, including the compile time of `cleanrl`; that of the others was not",
            "recorded:",
            "",
            *table(["environments", "`cleanrl`", "sbx", "stable-baselines3"], whole),
        ]
    return page


WHOLE = 500_000  # environment steps of a usual run


def whole_run(row: Row) -> float:
    """Seconds of a run of `WHOLE` steps, with tracing and compiling where they were recorded."""
    return WHOLE / row["steps_per_second"] + sum((row.get("compile_seconds") or {}).values())


def earlier(result: Row) -> str:
    """Return the earlier result of the same task, if that run had the same length."""
    before = result.get("before")
    if before is None or before["env_steps"] != result["env_steps"]:
        return ""
    last = before["last_100_episodes_return"]
    digits = 1 if abs(last["mean"]) >= 10 else 3
    return f"{last['mean']:.{digits}f} ({last['std']:.{digits}f}), {before['commit'][:10]}"


RETURNS = ("last_100_episodes_return", "evaluation_100_episodes_return")


def reached(result: Row) -> list[str]:
    """Mean (standard deviation), and how many seeds reach the task's threshold, of each kind of return."""
    threshold = TASKS[max((task for task in TASKS if result["task"].startswith(task)), key=len)].threshold
    cells = []
    for what in RETURNS:
        found = result[what]
        digits = 1 if abs(found["mean"]) >= 10 else 3
        number = len(found["per_seed"])
        share = f"{round(success(np.array(found['per_seed']), threshold) * number)} of {number}"
        cells.append(f"{found['mean']:.{digits}f} ({found['std']:.{digits}f}); {share} >= {threshold:g}")
    return cells


def learning(records: dict[str, Record], pictures: pathlib.Path) -> list[str]:
    """Learning curves."""
    lines, page = [], []
    for name, record in records.items():
        result = record["results"]
        env_id, seeds = result["config"]["env_id"], result["seeds"]
        lines.append(
            [
                f"{env_id} (`{name.removeprefix('learning_')}`)",
                f"{result['env_steps']:,}",
                f"{seeds[0]} - {seeds[-1]}",
                *reached(result),
                earlier(result),
                f"{result['env_steps_per_second_all_seeds']:,.0f}",
                f"{record['date'][:10]}, {record['commit'][:10]}",
            ]
        )
        if (pictures / f"{name}.png").exists():
            page += [f"![{env_id}: return against steps](img/{name}.png)", ""]
    header = [
        "task",
        "steps",
        "seeds",
        "return of the last 100 training episodes",
        "return of 100 new episodes",
        "last 100, before",
        "steps per second, all seeds",
        "commit",
    ]
    where = [
        "Mean over seeds (standard deviation), and how many seeds reach the threshold of the task. Training returns",
        "favor short episodes, because more of them end in the same number of steps; new episodes are all played to",
        "their end, with sampled actions. *Before* is the result of an earlier version of the code, with its commit.",
        "The machine was shared, so the speeds of two rows cannot be compared. Configurations, versions, hardware and",
        "the curves of all seeds are in the files of these names, thresholds and their reasons in",
        "[benchmarks/learning.py](../benchmarks/learning.py).",
        "",
        *PUBLISHED,
        "",
    ]
    return [*table(header, lines), *where, *page]


def filled(page: str, results: pathlib.Path, link: str) -> str:
    """`page` with its tables of results as the records have them; `link` leads from the page to `results`."""

    def block(found: re.Match[str]) -> str:
        lines = []
        for name in found[1].split():
            path = results / f"learning_{name}.json"
            if not path.exists():
                continue
            result = json.loads(path.read_text())["results"]
            seeds = result["seeds"]
            task = f"{result['config']['env_id']}, [`{name}`]({link}/{path.name})"
            lines.append([task, f"{result['env_steps']:,}", f"{seeds[0]} - {seeds[-1]}", *reached(result)])
        head = ["task", "steps", "seeds", "return of the last 100 training episodes", "return of 100 new episodes"]
        return "\n".join([f"<!-- learning {found[1]} -->", *table(head, lines)[:-1], "<!-- end -->"])

    return re.sub(r"<!-- learning (.*?) -->.*?<!-- end -->", block, page, flags=re.DOTALL)


SECTIONS: dict[str, tuple[str, Callable[[dict[str, Record], pathlib.Path], list[str]]]] = {
    # the first word of a file's name: title, and a function of the records by name and of the folder for pictures
    "parts": ("Parts and functions", parts),
    "update": ("A whole update", update),
    "train": ("Training, end to end", train),
    "growth": ("Growth", growth),
    "learning": ("Learning", learning),
}


def report(results: pathlib.Path, docs: pathlib.Path) -> str:
    """The page; pictures are written on the way."""
    page = [
        "# Benchmarks",
        "",
        "This page shows what single functions, whole updates and training runs cost, compared with other libraries.",
        "`python -m benchmarks report` writes it from [benchmarks/results](../benchmarks/results), and",
        "`python -m benchmarks` lists what can be measured. Times are medians of interleaved rounds; ratios are taken",
        "within a round. Unless stated otherwise, nothing was measured on a GPU.",
        "",
    ]
    page += overview(results)
    for prefix, (title, section) in SECTIONS.items():
        paths = sorted(results.glob(f"{prefix}_*.json"))
        if paths:
            records = {path.stem: json.loads(path.read_text()) for path in paths}
            page += [f"## {title}", "", *section(records, docs / "img")]
    return "\n".join(page).rstrip() + "\n"


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--results", type=pathlib.Path, default=ROOT / "benchmarks/results", help="folder of JSON files"
    )
    parser.add_argument("--docs", type=pathlib.Path, default=ROOT / "docs", help="folder for benchmarks.md and img/")
    options = parser.parse_args()
    options.docs.mkdir(parents=True, exist_ok=True)
    (options.docs / "benchmarks.md").write_text(report(options.results, options.docs))
    print(f"wrote {options.docs / 'benchmarks.md'}")
    (options.docs / "results.md").write_text(results_page.page(options.results, options.docs))
    if options.docs == ROOT / "docs":
        for name in PAGES:
            page = ROOT / name
            page.write_text(filled(page.read_text(), options.results, "../benchmarks/results"))
