"""Find out why a run does not learn, from its metrics, its configuration and its last checkpoint.

    python -m ppo_parts.doctor runs/first --html doctor.html
    python -m ppo_parts.doctor logs/progress.csv

Logs of Stable-Baselines3, CleanRL and rsl_rl (TensorBoard, or progress.csv) are read, too, without a configuration and
without a checkpoint. The exit status is 0 without findings, 1 with findings, and 2 if nothing can be read.
"""

from __future__ import annotations

import argparse
import csv
import html
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from .._base.errors import UserError, UserValueError
from .._base.extras import require_package
from ..envs import host_errors
from ..training import Finding, column, diagnose, exit_on_user_error, probe, read_metrics
from ..training._config_json import stored_run
from ..training._diagnose import Run
from ..training._files import check_writable, write_whole
from ..training._messages import RunNotFoundError
from ..training._train import vmap_over_seeds
from ._shared import load_run, report, run_parser

NAMES = {  # ours, and those of Stable-Baselines3, CleanRL and rsl_rl
    "episode_return": ("rollout/ep_rew_mean", "charts/episodic_return", "Train/mean_reward"),
    "episode_length": ("rollout/ep_len_mean", "charts/episodic_length", "Train/mean_episode_length"),
    "evaluation/episode_return": ("eval/mean_reward",),
    "approx_kl": ("train/approx_kl", "losses/approx_kl"),
    "clip_fraction": ("train/clip_fraction", "losses/clipfrac"),
    "entropy": ("train/entropy_loss", "losses/entropy", "Loss/entropy"),
    "explained_variance": ("train/explained_variance", "losses/explained_variance"),
    "policy_loss": ("train/policy_gradient_loss", "losses/policy_loss", "Loss/surrogate"),
    "value_loss": ("train/value_loss", "losses/value_loss", "Loss/value_function", "Loss/value"),
    "learning_rate": ("train/learning_rate", "charts/learning_rate", "Loss/learning_rate"),
}
FACTORS = {"train/entropy_loss": -1.0, "train/value_loss": 0.5}
"""Stable-Baselines3 logs the entropy loss, and a value loss without the factor 1/2."""


class Evidence(NamedTuple):
    """What is known of a run: metrics by name, `[updates]` or `[updates, seeds]`, and the configuration, if known."""

    metrics: dict[str, np.ndarray]
    config: dict[str, Any]


def read_run(path: Path) -> Evidence:
    """Read the metrics and the configuration of a run's folder, or the log of another library.

    Raises:
        UserValueError: no metric is known. FileNotFoundError: nothing is there.
    """
    if (path / "config.json").exists():
        config, rows = stored_run(path)["config"], read_metrics(path / "metrics.jsonl")
        names = sorted(set().union(*rows) - {"update", "env_steps"})
        return Evidence({name: column(rows, name) for name in names}, config)
    if path.is_dir() and (path / "progress.csv").exists():
        path = path / "progress.csv"
    events = sorted(path.rglob("events.out.tfevents.*")) if path.is_dir() else [path]
    if not path.exists() or not events:
        raise RunNotFoundError(f"{path} is not a run: it has no config.json, progress.csv or TensorBoard events")
    logged = _read_csv(path) if path.suffix == ".csv" else _read_events(events)
    found = {
        name: FACTORS.get(other, 1.0) * np.asarray(logged[other], float)
        for name, others in NAMES.items()
        for other in others
        if other in logged
    }
    if not found:
        known = ", ".join(other for others in NAMES.values() for other in others)
        raise UserValueError(f"{path} has none of the metrics {known}; it has {', '.join(sorted(logged)) or 'nothing'}")
    return Evidence(found, {})


def _read_csv(path: Path) -> dict[str, list[float]]:
    logged: dict[str, list[float]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            for name, text in row.items():
                if text and name:
                    try:
                        logged.setdefault(name, []).append(float(text))
                    except ValueError:
                        raise UserValueError(f"{path}: {name} must be a number, got {text!r}") from None
    return logged


def _read_events(paths: Sequence[Path]) -> dict[str, list[float]]:
    """Read TensorBoard's records: a length in 8 bytes, its checksum in 4, the event, and its checksum in 4."""
    parse = require_package("tensorboardX.proto.event_pb2", "train").Event.FromString
    logged: dict[str, list[float]] = {}
    for path in paths:
        data, at = path.read_bytes(), 0
        while at + 12 <= len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            if at + 16 + length > len(data):
                break  # another process is writing the last record
            try:
                event = parse(data[at + 12 : at + 12 + length])
            except Exception as error:  # protobuf's own class depends on its version
                raise UserValueError(f"{path} is not a file of TensorBoard events: {error}") from error
            for value in event.summary.value:
                if value.WhichOneof("value") == "simple_value":
                    logged.setdefault(value.tag, []).append(value.simple_value)
            at += 16 + length
    return logged


def probe_run(given: argparse.Namespace) -> dict[str, np.ndarray]:
    """Measure the checkpoint that the arguments name, `[seeds]` each; see `training.probe`."""
    run = load_run(given)

    def measure(state: Any) -> dict[str, jax.Array]:
        return probe(run.train, state, run.config)

    with host_errors():
        found = jax.device_get(jax.jit(vmap_over_seeds(measure, run.state.key.size))(run.state))
    return {name: np.atleast_1d(x) for name, x in found.items()}


def describe(findings: Sequence[Finding]) -> str:
    """Describe findings in three lines each."""
    if not findings:
        return "no findings: all that was measured is in its normal range"
    return "\n".join(
        f"{i}. {found.name} ({found.confidence}): {found.cause}\n   {measured(found)}\n   try: {found.advice}"
        for i, found in enumerate(findings, 1)
    )


def measured(found: Finding) -> str:
    """Describe the value of a finding, and its normal range."""
    low, high = found.normal
    between = f"from {low:.3g} to {high:.3g}"
    normal = f"at most {high:.3g}" if low == -np.inf else f"at least {low:.3g}" if high == np.inf else between
    return f"{found.metric} is {found.value:.3g}; normal: {normal}"


PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body{{font:15px sans-serif;max-width:60em;margin:2em auto}}figure{{display:inline-block;margin:.5em}}
.marked{{outline:2px solid #c33}}pre{{white-space:pre-wrap}}</style><h1>{title}</h1><pre>{text}</pre>{figures}</html>
"""
FIGURE = """<figure{marked}><figcaption>{name}: {low:.3g} to {high:.3g}</figcaption><svg width="400" height="120">
<title>{name} over the run</title>{band}<polyline fill="none" stroke="#236" points="{points}"/></svg></figure>
"""


def write_page(path: Path, title: str, metrics: Mapping[str, np.ndarray], findings: Sequence[Finding]) -> None:
    """Write one page without other files: the findings, and a curve of each metric; those of findings are marked.

    The normal range of a marked metric is shaded.
    """
    run, figures = Run(metrics), []
    cited = {found.metric: found.normal for found in findings}
    for name in sorted({*NAMES, *cited} & {*metrics}, key=lambda name: name not in cited):
        y = run.series(name)
        if len(y) < 2:
            continue
        low, high = float(y.min()), float(y.max())

        def height(y: Any, low: float = low, high: float = high) -> Any:
            return 115 - 110 * np.clip((y - low) / (high - low or 1), 0, 1)

        points = " ".join(f"{x:.1f},{h:.1f}" for x, h in zip(np.linspace(0, 400, len(y)), height(y), strict=True))
        band = ""
        if name in cited:
            bottom, top = height(np.array(cited[name]))
            band = f'<rect width="400" y="{top:.1f}" height="{bottom - top:.1f}" fill="#cec"/>'
        marked = ' class="marked"' if name in cited else ""
        figures.append(
            FIGURE.format(name=html.escape(name), low=low, high=high, band=band, points=points, marked=marked)
        )
    page = PAGE.format(title=html.escape(title), text=html.escape(describe(findings)), figures="".join(figures))
    write_whole(path, page.encode())


def main(arguments: Sequence[str] | None = None) -> list[Finding]:
    """Run the command line; return the findings that it printed. Input that cannot be used ends with status 2."""
    parser = run_parser("doctor", "Find out why a run does not learn.")
    parser.add_argument("--html", type=Path, help="file for a page with the findings and the curves")
    given = parser.parse_args(arguments)
    try:
        with exit_on_user_error():
            if given.html is not None:
                check_writable(given.html, (".html",))
            metrics, config = read_run(given.run)
            if config:
                try:
                    metrics = {**metrics, **probe_run(given)}
                except UserError as error:
                    report(f"without measurements of a checkpoint: {error}")
            findings = diagnose(metrics, config)
            if given.html is not None:
                write_page(given.html, f"{given.run}", metrics, findings)
    except SystemExit as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error
    print(describe(findings))
    return findings
