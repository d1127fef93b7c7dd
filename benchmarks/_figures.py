"""Figures of the pages, drawn from the records: for each file of docs/img, a function that takes its path."""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit

from ._records import ROOT
from ._tables import PUBLISHED, compare_runs, group_by, read_preset_runs, read_records, read_results, read_whole_runs
from .choices import DIFFERENCES
from .explain import explain_gap
from .learning import POPGYM, find_task, place_points


def make_canvas(panels: int, width: float = 5, columns: int | None = None) -> tuple[Any, Any]:
    """Make a figure and its axes, in rows of `columns` (None: all in one row), without a display."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rc_file(ROOT / "docs/matplotlibrc")
    columns = min(columns or panels, panels)
    rows = -(-panels // columns)
    figure = Figure(figsize=(width * columns, 4 * rows))
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes[panels:]:
        axis.remove()
    return figure, axes[:panels]


def save(figure: Any, path: Path) -> None:
    """Write a figure without the date and matplotlib's version, so that the same data give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi="figure", metadata={"Software": None})


def compute_band(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the 95 % interval of the mean over seeds (Student's t) of values `[points, seeds]`."""
    middle, known = np.nanmean(values, axis=1), np.isfinite(values).sum(axis=1)
    half = stdtrit(known - 1, 0.975) * np.nanstd(values, axis=1, ddof=1) / np.sqrt(known)
    return middle - half, middle + half


def draw_mean(axes: Any, x: Any, values: np.ndarray, color: Any, label: str | None = None, style: str = "-") -> None:
    """Draw the mean over seeds of values `[points, seeds]`, and its 95 % interval."""
    axes.plot(x, np.nanmean(values, axis=1), style, color=color, label=label)
    axes.fill_between(x, *compute_band(values), color=color, alpha=0.2, linewidth=0)


def draw_learning(path: Path, names: Sequence[str], published: str = "") -> None:
    """Draw the learning curves of records of `benchmarks learning`: every seed, and the mean with its interval."""
    figure, panels = make_canvas(len(names), width=7 if len(names) == 1 else 4.6, columns=3)
    for name, axes in zip(names, panels, strict=True):
        result = read_records("learning")[name]["results"]
        returns = np.array(result["curve"]["mean_return_per_seed"], float).T
        each_update = result["config"]["num_envs"] * result["config"]["num_steps"]
        steps = each_update * place_points(result["env_steps"] // each_update)
        ended = np.isfinite(returns).all(axis=1)  # an update may be shorter than the episodes
        steps, returns = steps[ended], returns[ended]
        axes.plot(steps, returns, color="C0", alpha=0.15, linewidth=0.7)
        draw_mean(axes, steps, returns, "C0", f"mean of {returns.shape[1]} seeds, and its 95 % interval")
        axes.plot([], [], color="C0", alpha=0.3, linewidth=0.7, label="each seed")
        if published:
            axes.axhline(find_task(name).threshold, color="gray", ls=":", lw=1, label=published)
        axes.set(title=result["config"]["env_id"], xlabel="environment steps", ylabel="episode return")
    panels[0].legend(fontsize=None if len(names) == 1 else "small")
    save(figure, path)


def draw_mujoco(path: Path) -> None:
    """Draw a panel for each task: the runs of each variant in one color, and Tianshou's means as lines."""
    runs = [*read_whole_runs(), *read_preset_runs()]
    tasks, variants = sorted({run["task"] for run in runs}), list(dict.fromkeys(run["variant"] for run in runs))
    figure, panels = make_canvas(len(tasks), width=4.6, columns=3)
    for task, panel in zip(tasks, panels, strict=True):
        for run in (run for run in runs if run["task"] == task):
            steps = [row["env_steps"] / 1e6 for row in run["curve"]]
            color, style = f"C{variants.index(run['variant'])}", "-" if steps[-1] > 2 else "--"
            seen = np.array([row["evaluation"] for row in run["curve"]])
            draw_mean(panel, steps, seen, color, f"{run['variant']}, {steps[-1]:.0f}M", style)
        for text, style, budget in zip(PUBLISHED[task], (":", "-."), ("1M", "3M"), strict=False):
            if text:
                panel.axhline(float(text.split()[0]), color="gray", ls=style, lw=1, label=f"Tianshou, best of {budget}")
        panel.set(title=task, xlabel="million environment steps", ylabel="return of 10 episodes")
        panel.legend(fontsize=8)
    save(figure, path)


def draw_choices(path: Path) -> None:
    """Draw a panel for each task, which shows how much each choice of a library changes the return."""
    compared = compare_runs("differences", DIFFERENCES)
    names = [name for name in DIFFERENCES if name in compared[0].last]
    figure, panels = make_canvas(len(compared), width=4.6)
    figure.set_size_inches(9.2, 1.2 + 0.27 * len(names))
    for one, panel in zip(compared, panels, strict=True):
        kinds = ((-0.15, "last evaluation", one.last), (0.15, "mean of all evaluations", one.mean))
        for shift, label, changes in kinds:
            middle, low, high = np.array([[changes[name]["mean"], *changes[name]["95"]] for name in names]).T
            places = np.arange(len(names)) + shift
            panel.errorbar(middle, places, xerr=[middle - low, high - middle], fmt="o", ms=4, lw=1.2, label=label)
        panel.axvline(0, color="gray", lw=1)
        panel.set(title=f"{one.task}, seeds {one.seeds}", xlabel="change of the return, and its 95 % interval")
        panel.set_yticks(range(len(names)), names if panel is panels[0] else [""] * len(names))
        panel.invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    save(figure, path)


def draw_explain(path: Path, name: str) -> None:
    """Draw a waterfall: from the first library's return, through the effect of each choice, to the second's."""
    result = read_records("explain")[name]["results"]
    first, last = (result["returns"][digit * len(result["choices"])] for digit in "01")
    begin, end = np.mean(list(first.values())), np.mean(list(last.values()))
    changes = {choice: change for choice, change in explain_gap(result).items() if choice != "gap"}
    means = np.array([change["mean"] for change in changes.values()])
    stops = begin + np.cumsum([0, *means])
    figure, (axes,) = make_canvas(1, width=8)
    places = np.arange(len(changes)) + 1
    colors = ["C0" if x > 0 else "C1" for x in means]
    axes.barh(places, means, left=stops[:-1], color=colors, label="effect of the choice")
    low, high = np.array([change["95"] for change in changes.values()]).T
    bars = {"xerr": [means - low, high - means], "fmt": "none", "ecolor": "gray", "capsize": 3}
    axes.errorbar(stops[1:], places, **bars, label="95 % interval, for all together")
    axes.plot([begin, end], [0, len(changes) + 1], "o", color="black", label="mean of the seeds")
    axes.set_yticks(range(len(changes) + 2), [result["first"], *changes, result["second"]])
    axes.set(title=result["config"]["env_id"], xlabel="return of the last 100 episodes")
    axes.use_sticky_edges = False
    axes.margins(x=0.05)
    axes.invert_yaxis()
    axes.legend()
    save(figure, path)


def draw_parts(path: Path) -> None:
    """Draw time against the number of elements for the two estimators and their rivals."""
    rows = read_records("parts")["cpu"]["results"]
    figure, panels = make_canvas(2)
    for axes, part in zip(panels, ("gae", "vtrace"), strict=True):
        chosen = [row for row in rows if row["part"] == part]
        for method in dict.fromkeys(row["method"] for row in chosen):
            line = sorted((math.prod(row["size"]), row["us"]["median"]) for row in chosen if row["method"] == method)
            style = {"color": "black", "linestyle": ":"} if method == "floor" else {"marker": "."}
            axes.plot(*zip(*line, strict=True), label=method, **style)
        axes.set(xscale="log", yscale="log", xlabel="steps x environments", ylabel="microseconds", title=part)
        axes.legend()
    save(figure, path)


def draw_devices(path: Path) -> None:
    """Draw what each device computes and sends against the number of devices."""
    rows = [row for row in read_results("devices", "devices") if row["scaling"] != "one shard"]
    figure, panels = make_canvas(3, width=3.6)
    styles = {"strong": "-", "weak": "--"}
    colors = {name: f"C{number}" for number, name in enumerate(dict.fromkeys(row["recipe"] for row in rows))}
    for (name, scaling), mine in group_by(rows, "recipe", "scaling").items():
        ys = [[row[what] / mine[0][what] for row in mine] for what in ("flops", "temporaries")]
        for panel, y in zip(panels, [*ys, [sum(row["operations"].values()) for row in mine]], strict=True):
            panel.plot([row["devices"] for row in mine], y, styles[scaling], color=colors[name], marker=".")
    every = sorted({row["devices"] for row in rows})
    one = "relative to one device"
    titles = (f"FLOPs, {one}", f"temporaries, {one}", "collective operations per update")
    for panel, title in zip(panels, titles, strict=True):
        panel.set(xscale="log", xlabel="devices", title=title)
        panel.set_xticks(every, map(str, every))
        panel.minorticks_off()
    for panel in panels[:2]:
        panel.set(yscale="log")
    panels[2].set(ylim=(0, None))
    for name, color in colors.items():
        panels[2].plot([], [], color=color, label=name)
    for label, style in (("strong: the same environments in all", "-"), ("weak: as many for each device", "--")):
        panels[2].plot([], [], style, color="gray", label=label)
    figure.legend(*panels[2].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    save(figure, path)


def draw_pareto(path: Path) -> None:
    """Draw what policies earn and what that costs, for each weight of the cost, beside what can be reached."""
    figure, (axes,) = make_canvas(1, width=5)
    costs = np.linspace(0, 1)
    axes.plot(costs, np.sqrt(costs), color="gray", linewidth=1, label="best possible")
    front = read_records("gallery")["several objectives"]["results"]["front"]
    for i, (weight, (earned, cost)) in enumerate(front.items()):
        axes.plot(cost, earned, "o", color=f"C{i}", alpha=0.6, label=f"weight {weight}")
    axes.set(xlabel="mean cost of a step", ylabel="mean reward of a step")
    axes.legend()
    save(figure, path)


ALONE = ("cartpole", "ippo_spread", "ippo_smax_3m", "ippo_riddle")
MEMORY = {"names": [f"popgym_{name}" for name in POPGYM], "published": "best of 13 memories, 15M steps"}
FIGURES: dict[str, Callable[[Path], None]] = {
    **{f"learning_{name}.png": functools.partial(draw_learning, names=[name]) for name in ALONE},
    "results_memory.png": functools.partial(draw_learning, **MEMORY),
    "results_mujoco.png": draw_mujoco,
    "results_choices.png": draw_choices,
    "explain.png": functools.partial(draw_explain, name="stable_baselines3_rsl_rl_HalfCheetah-v5_300000"),
    "parts_cpu.png": draw_parts,
    "devices.png": draw_devices,
    "pareto.png": draw_pareto,
}
