"""Tables of the pages, made from the records: for each kind of table, a function of a linker and the block's words.

A page has `<!-- NAME WORD ... -->`, a table, and `<!-- end -->`. `python -m benchmarks report` writes the table
between them from the rows that `tabulate_NAME` yields; the first row is the header. `link(text, *addresses)` returns
the text as a link to the first record, followed by a plus sign that links to each further one.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ppo_parts import training

from ._records import RESULTS, Record, read, show, show_quartiles
from ._seeds import compare_means, compare_pairs, show_change, show_interval, show_iqm, show_visible
from .choices import DIFFERENCES
from .explain import explain_gap
from .learning import find_task
from .mujoco import VARIANTS
from .study import ARMS, LAST, WHOLE
from .train import ONE_SEED

Link = Callable[..., str]
Rows = Iterator[Sequence[str]]
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


def read_records(benchmark: str) -> dict[str, Record]:
    """Return the committed records of a benchmark by name."""
    return read(RESULTS / f"{benchmark}.jsonl")


def show_number(x: float) -> str:
    """Format a number with about three digits."""
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def show_seeds(seeds: list[int]) -> str:
    """Format seeds as ranges of consecutive ones."""
    ordered = np.sort(seeds)
    ranges = np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1)
    return ", ".join(f"{each[0]} - {each[-1]}" if len(each) > 1 else f"{each[0]}" for each in ranges)


def group_by(found: Iterable[Any], *keys: str) -> dict[Any, list[Any]]:
    """Group records by their values under these keys."""
    groups: dict[Any, list[Any]] = {}
    for each in found:
        groups.setdefault(tuple(each[key] for key in keys), []).append(each)
    return groups


def read_results(benchmark: str, *names: str) -> list[Record]:
    """Return the results of these records (by default, of all of a benchmark), or their rows, each with its address."""
    found = read_records(benchmark)
    given = {f"{benchmark}.jsonl#{name}": found[name]["results"] for name in names or found}
    listed = {address: result if isinstance(result, list) else [result] for address, result in given.items()}
    return [row | {"address": address} for address, rows in listed.items() for row in rows]


def show_reached(result: Record, what: str) -> str:
    """Format the mean and standard deviation of a kind of return, and how many seeds reach the task's threshold."""
    threshold, found = find_task(result["task"]).threshold, result[what]
    digits, returns = 1 if abs(found["mean"]) >= 10 else 3, np.array(found["per_seed"])
    count = f"{np.sum(returns >= threshold)} of {len(returns)} >= {threshold:g}"
    return f"{found['mean']:.{digits}f} ({found['std']:.{digits}f}); {count}"


def tabulate_learning(link: Link, *names: str) -> Rows:
    """Tabulate the returns of runs of `benchmarks learning`, and how many seeds reach the threshold."""
    yield ["task", "steps", "seeds", "return of the last 100 training episodes", "return of 100 new episodes"]
    for found in read_results("learning", *names):
        task = f"{found['config']['env_id']}, " + link("`{task}`".format(**found), found["address"])
        returns = (show_reached(found, f"{what}_episodes_return") for what in ("last_100", "evaluation_100"))
        yield [task, f"{found['env_steps']:,}", show_seeds(found["seeds"]), *returns]


def tabulate_published(link: Link, *names: str) -> Rows:
    """Tabulate the returns of new episodes beside the published result that is the task's threshold."""
    yield ["task", "steps", "seeds", "sampled actions", "most probable actions", "threshold, and its source"]
    for found in read_results("learning", *names):
        task = find_task(found["task"])
        returns = (found[f"{how}_100_episodes_return"] for how in ("evaluation", "evaluation_mode"))
        evaluated = (show_interval(x, 1 if abs(task.threshold) >= 1 else 3) for x in returns)
        linked, steps = link(found["config"]["env_id"], found["address"]), f"{found['env_steps']:,}"
        yield [linked, steps, show_seeds(found["seeds"]), *evaluated, f"{task.threshold:g}, {task.why}"]


def tabulate_games(link: Link) -> Rows:
    """Tabulate the shares of games that were won; records that differ only in their seeds share a row."""
    yield ["game", "steps", "seeds", "won, sampled actions", "won, most probable actions"]
    for (game,), group in sorted(group_by(read_results("games"), "game").items()):
        seeds = [seed for found in group for seed in found["seeds"]]
        cells = []
        for what in ("won_sampled", "won_mode"):
            won = [100 * seed[what] for seed in seeds]  # show each of a few, or the interval of several
            few = ", ".join(f"{x:.1f} %" for x in won)
            cells.append(few if len(won) < 5 else f"{show_interval(training.summary(won), 1)} %")
        linked, steps = link(game, *(found["address"] for found in group)), f"{group[0]['env_steps']:,}"
        yield [linked, steps, show_seeds([seed["seed"] for seed in seeds]), *cells]


def tabulate_atari(link: Link) -> Rows:
    """Tabulate the recipe beside CleanRL's script."""
    head = [f"{who}, {when}" for when in ("last 20 %", "all steps") for who in ("`atari_ppo`", "CleanRL")]
    yield ["game", "steps", "seeds", *head]
    for (task, steps), group in group_by(read_results("atari"), "task", "env_steps").items():
        runs = {name: [run for found in group for run in found["runs"][name]] for name in ("ppo_parts", "cleanrl")}
        cells = [
            show_interval(training.summary([average_returns(run, part * steps) for run in each]), 2)
            for part in (0.8, 0.0)
            for each in runs.values()
        ]
        linked = link(task, *(found["address"] for found in group))
        yield [linked, f"{steps:,}", show_seeds([run["seed"] for run in runs["ppo_parts"]]), *cells]


def average_returns(run: Record, after: float) -> float:
    """Return the mean return of the games that ended after this number of steps."""
    rows = [row for row in run["games"] if row[0] > after]
    return float(np.average([row[1] for row in rows], weights=[row[2] for row in rows])) if rows else float("nan")


def read_runs(benchmark: str) -> list[Record]:
    """Return the completed runs of a benchmark; runs that differ only in their seeds are merged into one."""
    ended = (found for found in read_results(benchmark) if found["complete"])
    groups = group_by(ended, "task", "variant", "env_steps").values()
    return [merge(sorted(group, key=lambda found: int(found["seeds"][0]))) for group in groups]


def merge(group: list[Record]) -> Record:
    """Merge runs that have the same configuration and different seeds."""
    addresses, seeds = [found["address"] for found in group], [seed for found in group for seed in found["seeds"]]
    if len({*seeds}) < len(seeds):
        raise ValueError(f"a seed would count twice: {', '.join(addresses)} have the seeds {seeds}")
    # The oldest runs do not record whether values were in units of their moments; at that time, they always were.
    settings = [{"normalize_value": True} | found["config"] | {"seed": 0} for found in group]
    if any(config != settings[0] for config in settings):
        raise ValueError(f"runs of the same name and length have different settings: {', '.join(addresses)}")
    names = ("evaluation", "last_100_episodes")
    rows = list(zip(*(record["curve"] for record in group), strict=True))
    curve = [row[0] | {name: [x for part in row for x in part[name]] for name in names} for row in rows]
    best = max(curve, key=lambda row: float(np.mean(row["evaluation"])))  # of all seeds at once, as Tianshou reports it
    return group[0] | {
        "addresses": addresses,
        "seeds": seeds,
        "best_evaluation": training.summary(best["evaluation"]),
        "last_evaluation": training.summary(curve[-1]["evaluation"]),
        "last_100_episodes": training.summary(curve[-1]["last_100_episodes"]),
        "curve": curve,
    }


def read_whole_runs() -> list[Record]:
    """Return the MuJoCo runs that are as long as published ones; shorter runs compare variants."""
    return [run for run in read_runs("mujoco") if run["env_steps"] > 900_000]


def read_preset_runs() -> list[Record]:
    """Return the runs of Humanoid's preset with seeds 1 to 10: those of one and of three million steps."""
    long = [x for x in read_records("humanoid") if x.startswith("preset_3M") and int(x.rpartition("_")[2]) <= 10]
    return [merge(read_results("humanoid", *names)) for names in (["preset_1"], long)]


def tabulate_mujoco(link: Link) -> Rows:
    """Tabulate the recipes beside published results."""
    variants = {
        "Ant-v5": "no_contact_forces", "Humanoid-v5": "no_contact_forces", "Swimmer-v5": "long_horizon",
        "InvertedDoublePendulum-v5": "tianshou",
    }  # fmt: skip
    found = {
        (run["task"], run["variant"], round(run["env_steps"] / 1e6)): show_interval(run["best_evaluation"])
        for run in read_whole_runs()
    }
    tianshou = "[Tianshou](https://github.com/thu-ml/tianshou/tree/82dc1adf/examples/mujoco)"
    ours = "`mujoco_ppo`, {0}", "`trpo`, {0}", tianshou + ", {0}", "others, {0}"
    yield ["task", *(head.format("1M") for head in ours), *(head.format("3M") for head in (ours[0], *ours[2:]))]
    for task, (one, three, others, more) in PUBLISHED.items():
        name = variants.get(task, "recipe")
        first, last = (found.get((task, name, millions), "") for millions in (1, 3))
        yield [task, first, found.get((task, "trpo", 1), ""), one, others, last, three, more]
        if task == "Humanoid-v5":
            runs = read_preset_runs()
            own = link("`--preset humanoid`", *(address for run in runs for address in run["addresses"]))
            first, last = (f"{show_interval(run['last_evaluation'])}, seeds {show_seeds(run['seeds'])}" for run in runs)
            yield [f"{task}, {own}, last evaluation", first, "", "", "", last, "", ""]


def tabulate_mujoco_runs(link: Link) -> Rows:
    """Tabulate every whole run of the MuJoCo tasks."""
    yield ["task", "variant", "steps", "best evaluation", "last"]
    for run in read_whole_runs():
        returns = (show_interval(run[what]) for what in ("best_evaluation", "last_evaluation"))
        linked = link(run["task"], *run["addresses"])
        yield [linked, f"`{run['variant']}`", f"{run['env_steps']:,}", *returns]


class Comparison(NamedTuple):
    """Runs of one task by the one choice in which they differ from the first, the base, and how that changes them."""

    task: str
    steps: int
    seeds: str
    runs: dict[str, Record]
    last: dict[str, Record]
    mean: dict[str, Record]

    def show_cell(self, link: Link, name: str) -> str:
        """Format how a choice changes the last evaluation, or that of the base; return "" if there is no run."""
        if name not in self.runs:
            return ""
        found = show_change(self.last[name]) if name in self.last else show_interval(self.runs[name]["last_evaluation"])
        return link(found, *self.runs[name]["addresses"])


def compare_runs(benchmark: str, names: Iterable[str]) -> list[Comparison]:
    """Compare the short runs of a benchmark, separately for each task, in the order of `names`."""
    order, found = list(names), []
    short = [run for run in read_runs(benchmark) if run["env_steps"] < 900_000 and run["variant"] in order]
    for group in group_by(sorted(short, key=lambda run: order.index(run["variant"])), "task", "env_steps").values():
        curves = {run["variant"]: np.array([row["evaluation"] for row in run["curve"]]) for run in group}
        base, *others = order[0], *(name for name in curves if name != order[0])
        last = {name: compare_means(curves[name][-1], curves[base][-1]) for name in others}
        mean = {name: compare_means(curves[name].mean(0), curves[base].mean(0)) for name in others}
        named, seeds = {run["variant"]: run for run in group}, show_seeds(group[0]["seeds"])
        found.append(Comparison(group[0]["task"], group[0]["env_steps"], seeds, named, last, mean))
    return found


def tabulate_choices(link: Link, benchmark: str) -> Rows:
    """Tabulate the effect of each choice on the last evaluation."""
    labels = {name: f"`{name}`" for name in VARIANTS}
    if benchmark == "differences":
        labels = {name: f"{each.what} ({each.who})" for name, each in DIFFERENCES.items()}
    compared = compare_runs(benchmark, labels)
    yield [f"change, {compared[0].steps:,} steps", *(f"{one.task}, seeds {one.seeds}" for one in compared)]
    for name, label in labels.items():
        if any(name in one.runs for one in compared):
            yield [label, *(one.show_cell(link, name) for one in compared)]
    found = [float(np.median([change["detectable"] for change in one.last.values()])) for one in compared]
    yield ["change that is detected with a power of 80 % (median)", *(f"{size:.0f}" for size in found)]


def tabulate_libraries(link: Link) -> Rows:
    """Tabulate the presets of `ppo_parts.recipes.library_ppo`."""
    found = sorted(read_runs("libraries"), key=lambda run: -float(run["last_evaluation"]["mean"]))
    head = f"{found[0]['task']}, {found[0]['env_steps']:,} steps, seeds {show_seeds(found[0]['seeds'])}"
    yield [head, "last evaluation", "last 100 training episodes", "`approx_kl`"]
    for run in found:
        divergence = np.mean([row["approx_kl"] for row in run["curve"]])
        returns = (show_interval(run[what]) for what in ("last_evaluation", "last_100_episodes"))
        yield [link(run["variant"], *run["addresses"]), *returns, f"{divergence:.4f}"]


def tabulate_explain(link: Link, *names: str) -> Rows:
    """Tabulate what the gap between two libraries is made of, the largest effects first."""
    yield ["from, to", "choice", "effect on the return of the last 100 episodes"]
    for found in (each for each in read_results("explain", *names) if each["complete"]):
        ends = f"{found['first']} to {found['second']}, {found['config']['env_id'].rpartition(':')[2]}"
        linked = link(f"{ends}, seeds {show_seeds(found['seeds'])}", found["address"])
        for number, (choice, change) in enumerate(explain_gap(found).items()):
            yield ["" if number else linked, choice, show_change(change)]


def tabulate_kuhn(link: Link) -> Rows:
    """Tabulate the exploitability of both arms."""
    names = {"mirror": "mirror descent, as above", "clipped": "`clipped_surrogate` in its place"}
    yield ["surrogate", "exploitability", "worst seed"]
    for arm in read_records("kuhn")["kuhn"]["results"]["arms"]:
        found = arm["exploitability"]
        yield [names[arm["arm"]], show_interval(found, 3), f"{max(found['per_seed']):.3f}"]


def tabulate_levels(link: Link) -> Rows:
    """Tabulate the interquartile means of returns in held-out mazes."""
    runs = read_results("levels")
    yield ["levels", *(link(f"seeds {show_seeds(run['seeds'])}", run["address"]) for run in runs)]
    for arm in runs[0]["arms"]:
        yield [arm, *(show_iqm(run["arms"][arm]["held_out"], 3) for run in runs)]


def tabulate_gallery(link: Link) -> Rows:
    """Tabulate how rows of the gallery differ from runs without them; bold ones have intervals that exclude 0."""
    yield ["change", "compared with", "mean of the training", "last sixteenth"]
    found = {name: record["results"] for name, record in read_records("gallery").items()}
    for name, result in sorted(found.items(), key=lambda pair: (pair[1]["task"], pair[1]["without"] or "", pair[0])):
        if (without := result["without"]) in (None, name):
            continue
        now, before = (np.array(each["curve"], float) for each in (result, found[without]))
        changes = compare_means(np.nanmean(now, 0), np.nanmean(before, 0)), compare_means(now[-1], before[-1])
        where = without if result["task"] in without else f"{without}, {result['task']}"
        yield [name, where, *(show_visible(change, now.shape[1]) for change in changes)]


def tabulate_study(link: Link) -> Rows:
    """Tabulate the interquartile means of every arm of the study."""
    found = read_results("study")
    yield ["arm", *(x for result in found for x in (result["config"]["env_id"], "last 100"))]
    for name in ARMS:
        yield [name, *(show_iqm(result["arms"][name][what]) for result in found for what in (WHOLE, LAST))]


def tabulate_study_changes(link: Link) -> Rows:
    """Tabulate how the return over the training changes from one arm of the study to another, paired by seed."""
    pairs = [(name, "plain") for name in [*ARMS][1:]]
    pairs += [("refresh + V-trace", "refresh"), ("all three (PufferLib)", "refresh + V-trace")]
    found = read_results("study")
    yield ["arm", "compared with", *(result["config"]["env_id"] for result in found)]
    for pair in pairs:
        each = ([result["arms"][name][WHOLE]["per_seed"] for name in pair] for result in found)
        yield [*pair, *(show_visible(compare_pairs(*returns), len(returns[0])) for returns in each)]


def tabulate_population(link: Link, *names: str) -> Rows:
    """Tabulate the returns of a population and of random search over all seeds of a task, and their paired change."""
    yield ["task, steps of a member", "seeds", "population", "random search", "difference"]
    for (task,), group in group_by(read_results("population", *names), "task").items():
        arms = [[x for run in group for x in run["arms"][arm]["per_seed"]] for arm in group[0]["arms"]]
        linked = link(f"{task}, {group[0]['config']['total_timesteps']:,}", *(run["address"] for run in group))
        shown = (show_interval(training.summary(arm), 0) for arm in arms)
        seeds = ", ".join(show_seeds(run["seeds"]) for run in group)
        yield [linked, seeds, *shown, show_change(compare_pairs(*arms))]


def arrange_by_size(cells: Iterable[tuple[str, list[int], str]]) -> Rows:
    """Arrange `cells` of label, size and text in a row for each label, with a column for each size."""
    rows: dict[str, dict[tuple[int, ...], str]] = {}
    for label, size, text in cells:
        rows.setdefault(label, {})[tuple(size)] = text
    sizes = sorted({size for row in rows.values() for size in row}, key=lambda size: (math.prod(size), size))
    yield ["", *map(show, sizes)]
    yield from ([label, *(row.get(size, "") for size in sizes)] for label, row in rows.items())


def show_label(row: Record) -> str:
    """Say what a microbenchmark timed."""
    return f"`{row['part']}`" + (", gradient" if row["direction"] == "gradient" else "")


def tabulate_parts(link: Link, name: str, *sizes: str) -> Rows:
    """Tabulate the time of ours inside one program, in microseconds and relative to the floor."""
    cells = []
    for row in read_results("parts", name):
        if row["method"] == "ours" and show(row["size"]) in sizes:
            us, floor = show_number(row["us"]["median"]), row.get("over_floor")  # None: it was miscounted
            text = us if floor is None else f"{us} (x{show_number(floor['median'])})"
            cells.append((show_label(row), row["size"], text + "?" * row["disturbed"]))
    return arrange_by_size(cells)


def tabulate_rivals(link: Link, name: str) -> Rows:
    """Tabulate the time of other implementations relative to ours."""
    others = [row for row in read_results("parts", name) if row["method"] not in ("ours", "floor")]
    ratios = [show_number(row["over_ours"]["median"]) + "?" * row["disturbed"] for row in others]
    labels = [f"{show_label(row)}: {row['method']}" for row in others]
    return arrange_by_size(zip(labels, [row["size"] for row in others], ratios, strict=True))


def tabulate_update(link: Link, *names: str) -> Rows:
    """Tabulate a whole update against one written by hand."""
    yield ["update", "size", "ours, ms", "over handwritten", "over handwritten with diagnostics"]
    for row in read_results("update", *names):
        linked, ours = link(f"`{row['recipe']}`", row["address"]), f"{row['run_ms']['ours']:.1f}"
        yield [linked, show(row["size"]), ours, *(show_quartiles(ratio) for ratio in row["ours_over"].values())]


def tabulate_budget(link: Link, name: str) -> Rows:
    """Tabulate the pieces of a training step, in milliseconds and relative to their floors."""
    cells = []
    for row in read_results("budget", name):
        digits = max(3, len(str(int(row["ms"]))))
        text = f"{row['ms']:.{digits}g} (x{show_number(row['ms'] / row['floor_ms'])})"
        cells.append((row["piece"], row["size"], text))
    return arrange_by_size(cells)


def tabulate_speed(link: Link, *names: str) -> Rows:
    """Tabulate how many times faster the recipe is, from records of whole runs of one seed."""
    rivals = {"purejaxrl": "PureJaxRL", "rejax": "rejax", "sbx": "sbx", "sb3": "stable-baselines3"}
    ratios: dict[str, dict[str, str]] = {}  # by environments and program; the last record of each counts
    for row in read_results("train", *names):
        if row["seeds"] == 1 and row["program"] != ONE_SEED:
            where = f"{row['env']}, {row['num_envs']}"
            ratios.setdefault(where, {})[row["program"]] = show_quartiles(row["over_cleanrl"])
    yield ["environments", *rivals.values()]
    yield from ([name, *(found.get(rival, "") for rival in rivals)] for name, found in ratios.items())


def tabulate_train(link: Link, *names: str) -> Rows:
    """Tabulate the steps per second and compile times of whole runs."""
    yield ["environments", "program", "steps/s", "time over cleanrl (quartiles)", "trace + compile, s"]
    for row in read_results("train", *names):
        linked = link(f"{row['env']}, {row['num_envs']}", row["address"])
        seeds = f", {row['seeds']} seeds" if row["seeds"] > 1 else ""
        speed, seconds = f"{row['steps_per_second']:,.0f}", row.get("compile_seconds")
        built = "{trace:.1f} + {compile:.1f}".format(**seconds) if seconds else ""
        yield [linked + seeds, row["program"], speed, show_quartiles(row["over_cleanrl"]), built]


def tabulate_devices(link: Link) -> Rows:
    """Tabulate what each of four devices sends and computes with many shards and, in parentheses, with one."""
    yield ["recipe", "megabytes sent", "FLOPs of a device, relative to those of one alone"]
    for (recipe,), rows in group_by(read_results("devices", "devices"), "recipe").items():
        found = {(row["scaling"], row["devices"]): row for row in rows}
        alone, *both = (found[key] for key in (("strong", 1), ("strong", 4), ("one shard", 4)))
        sent = (sum(row["bytes"].values()) / 1e6 for row in both)
        work = (row["flops"] / alone["flops"] for row in both)
        yield [recipe, "{:.2f} ({:.2f})".format(*sent), "{:.3f} ({:.3f})".format(*work)]


def tabulate_hosts(link: Link, name: str) -> Rows:
    """Tabulate steps per second with environments on the host."""
    yield ["task, 8 environments", "program", "steps per second", "time relative to the recipe"]
    for row in read_results("hosts", name):
        yield [row["task"], row["program"], f"{row['steps_per_second']:,.0f}", show_quartiles(row["over_recipe"])]


BLOCKS: dict[str, Callable[..., Rows]] = {
    name.removeprefix("tabulate_"): each for name, each in [*globals().items()] if name.startswith("tabulate_")
}
