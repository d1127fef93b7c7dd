"""Compare trained runs: a plot of their learning curves with intervals, and a table.

    python -m ppo_parts.compare runs/a runs/b --output compare.png
    python -m ppo_parts.compare "ours=runs/a1,runs/a2,runs/a3" "theirs=runs/b1,runs/b2,runs/b3"

Only `config.json` and `metrics.jsonl` are read, so the recipe is not needed, and runs may still be training. The solid
line is the interquartile mean over seeds, and the band is its 95 % bootstrap interval (Agarwal et al. 2021,
arXiv:2108.13264).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._base.checked import Count, checked
from .._base.command_line import positive
from ..errors import UserValueError
from ..training import _statistics, exit_on_user_error, read_metrics, select_metric
from ..training._evaluate import EVALUATION
from ..training._files import check_writable, write_json
from ..training._population import PARENT
from ..training._stored import read_config


class Curve(NamedTuple):
    """The learning curves of the seeds of one or several runs: values `[points, seeds]` at `env_steps` `[points]`.

    Values are the metric averaged over a window of updates, or NaN before its first measurement.
    """

    label: str
    env_id: str
    env_steps: np.ndarray
    values: np.ndarray


@checked
def read_curve(
    label: str, folders: Sequence[str | Path], metric: str = "episode_return", window: Count | None = None
) -> Curve:
    """Read a metric of runs that differ only in their seeds, averaged over `window` updates (None: a tenth of a run).

    Raise `UserValueError` if it was not measured, or if the runs use several environments or share a seed.
    """
    paths = [Path(folder) for folder in folders]
    stored = [read_config(path) for path in paths]
    env_ids = {str(run["config"].get("env_id")) for run in stored}
    if len(env_ids) > 1:
        raise UserValueError(f"{label}: the runs use several environments, {', '.join(sorted(env_ids))}")
    seeds = [run["config"].get("seed", 0) + i for run in stored for i in range(run["run"]["num_seeds"])]
    if len(set(seeds)) < len(seeds):
        raise UserValueError(f"{label}: two runs have the same seed, of {sorted(seeds)}, so they are not independent")
    tenths = [max(1, run.get("num_updates", 1) // 10) for run in stored]
    tables = [_read_metric(path, metric, window or tenth) for path, tenth in zip(paths, tenths, strict=True)]
    return Curve(label, env_ids.pop(), *_statistics.resample(tables, points=None))


def make_table(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    r"""Compute one row for each curve at the last step that all have reached.

    "larger_than_first" is :math:`P(X > Y) + P(X = Y) / 2` for a seed X and a seed Y of the first curve, as in Agarwal
    et al. 2021, section 4.3; None for the first curve, and if both have one seed.
    """
    rows: list[dict[str, Any]] = []
    step = min(curve.env_steps[-1] for curve in curves)
    reached = [np.array([np.interp(step, curve.env_steps, x) for x in curve.values.T]) for curve in curves]
    for curve, last in zip(curves, reached, strict=True):
        if np.isnan(last).any():
            raise UserValueError(f"{curve.label} has no value yet at step {int(step)}, the last that all have reached")
        center, low, high = (float(x[0]) for x in _statistics.iqm_interval(last[None], samples=20_000))
        larger = np.mean((last[:, None] > reached[0]) + 0.5 * (last[:, None] == reached[0]))
        row = {"run": curve.label, "env_steps": int(step), "seeds": len(last), "iqm": center}
        row |= {"iqm_95": None if len(last) == 1 else [low, high], "mean": float(np.mean(last))}
        alone = not rows or len(last) == len(reached[0]) == 1
        row |= {"min": float(np.min(last)), "max": float(np.max(last))}
        row |= {"larger_than_first": None if alone else float(larger)}
        rows.append(row)
    return rows


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """Format a table as text that is also valid Markdown."""
    few = all(row["seeds"] < _statistics.FEW for row in rows)
    interval = "IQM [range]" if few else "IQM [95 %]"
    lines = [["run", "env steps", "seeds", interval, "mean", "min", "max", "P(larger than first)"]]
    for row in rows:
        decimals = _statistics.choose_decimals(row["mean"])
        numbers = [f"{row[name]:.{decimals}f}" for name in ("mean", "min", "max")]
        low, high = row["iqm_95"] or (None, None)
        center = f"{row['iqm']:.{decimals}f}" + (f" [{low:.{decimals}f}, {high:.{decimals}f}]" if row["iqm_95"] else "")
        larger = "" if row["larger_than_first"] is None else f"{row['larger_than_first']:.2f}"
        lines.append([row["run"], f"{row['env_steps']:,}", str(row["seeds"]), center, *numbers, larger])
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)


def plot_curves(path: Path, curves: Sequence[Curve], metric: str = "episode return") -> None:
    """Draw the interquartile mean over seeds with its 95 % interval, and thin lines for the seeds."""
    with _statistics.draw_picture(path, metric, curves[0].env_id) as axes:
        for i, curve in enumerate(curves):
            seeds = curve.values.shape[1]
            label = f"{curve.label} ({seeds} seed{'s' * (seeds > 1)})"
            _statistics.draw_seeds(axes, curve.env_steps, curve.values, f"C{i % 10}", label)


def _read_metric(folder: Path, metric: str, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps `[n]` and the smoothed values `[n, seeds]` of a metric, NaN before the first one."""
    rows = read_metrics(folder / "metrics.jsonl")
    if not rows:
        raise UserValueError(f"{folder}: there are no metrics yet: wait for the first update")
    try:
        found = select_metric(rows, metric)
    except UserValueError as error:
        hint = "; evaluations during training need --eval-every" if metric.startswith(EVALUATION) else ""
        raise UserValueError(f"{folder}: {error}{hint}") from None
    if PARENT in rows[0] and found.ndim == select_metric(rows, PARENT).ndim:  # evaluations play only the best member
        found = np.ma.masked_invalid(found).mean(axis=-1).filled(np.nan)  # members copy each other: they are one seed
    steps, values = select_metric(rows, "env_steps"), _statistics.smooth(found.reshape(len(rows), -1), window)
    if not np.isfinite(values).any(axis=0).all():
        raise UserValueError(f"{folder}: {metric} has not been measured in every seed; perhaps no episode has ended")
    return steps, values


def _split_label(text: str) -> tuple[str, list[str]]:
    """Split "name=FOLDER,FOLDER"; a folder's name may contain both signs."""
    label, equals, folders = text.partition("=")
    if not equals or Path(text).is_dir():
        label = folders = text
    return label, [folders] if Path(folders).is_dir() else folders.split(",")


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run the command line; return the rows of the table."""
    parser = argparse.ArgumentParser(
        prog="python -m ppo_parts.compare", description="Plot the learning curves of several runs.", allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", help="folder of a run, or name=FOLDER,FOLDER for runs with different seeds")
    parser.add_argument("--output", type=Path, default=Path("compare.png"), help="picture (default: compare.png)")
    parser.add_argument("--metric", default="episode_return", help="metric to compare (default: episode_return)")
    parser.add_argument("--window", type=positive, help="updates to average over (default: a tenth of the run)")
    parser.add_argument("--json", type=Path, help="file to write the table to")
    given = parser.parse_args(arguments)
    with exit_on_user_error():
        _statistics.check_picture(given.output)
        if given.json is not None:
            check_writable(given.json)
        curves = [read_curve(*_split_label(text), given.metric, given.window) for text in given.runs]
        if len({curve.env_id for curve in curves}) > 1:
            pairs = ", ".join(f"{curve.label}: {curve.env_id}" for curve in curves)
            raise UserValueError(f"runs of different environments cannot be compared: {pairs}")
        rows = make_table(curves)
        over = "a tenth of the run" if given.window is None else f"at most {given.window} updates"
        what = f"{given.metric.replace('_', ' ')} (mean over {over})"
        plot_curves(given.output, curves, what)
        print(f"{what}, at the last step that all have reached")
        print(describe(rows))
        if any(1 < row["seeds"] < _statistics.FEW for row in rows):
            print(f"of fewer than {_statistics.FEW} seeds, the interval is their range, and P is a rough estimate")
        print(given.output)
        if given.json is not None:
            write_json(given.json, rows)
    return rows
