"""Find out why a run does not learn, from its metrics, its configuration and its last checkpoint.

    python -m ppo_parts.doctor runs/first --html doctor.html
    python -m ppo_parts.doctor logs/progress.csv

It also reads logs of Stable-Baselines3, CleanRL and rsl_rl (TensorBoard or progress.csv), which have no configuration
and no checkpoint. The exit status is 0 without findings in the measurements, 1 with findings, and 2 after an error.
"""

from __future__ import annotations

import argparse
import base64
import csv
import html
import io
import struct
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .._base.extras import require_package
from ..errors import UserError, UserValueError
from ..training import Finding, diagnose, exit_on_user_error, probe, read_metrics, select_metric
from ..training._diagnose import RISEN, Evidence
from ..training._files import RunNotFoundError, check_writable, read_result, write_whole
from ..training._stored import read_config
from ._shared import compute_for_each_seed, load_run, make_parser, report

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
FACTORS = {"train/entropy_loss": -1.0, "train/value_loss": 0.5, "Loss/value_function": 0.5, "Loss/value": 0.5}
"""Stable-Baselines3 logs the entropy loss and, like rsl_rl, a value loss without the factor 1/2."""


def read_run(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read metrics by name and the configuration from a run's folder, or only metrics from another library's log."""
    if (path / "config.json").exists():
        rows = read_metrics(path / "metrics.jsonl")
        metrics = {name: select_metric(rows, name) for name in sorted(set().union(*rows))}
        result = read_result(path / "result.json")
        if "evaluation" in result and "evaluation/episode_return" not in metrics:  # only after training
            metrics["evaluation/episode_return"] = np.array([result["evaluation"]["episode_return"]["mean"]], float)
        return metrics, read_config(path)["config"]
    tables = [path] if path.suffix == ".csv" else sorted(path.glob("progress.csv"))
    one = [path] if path.name.startswith("events.out.tfevents.") else []
    events = [] if tables else one or sorted(path.rglob("events.out.tfevents.*"))
    if not path.exists() or not (tables or events):
        raise RunNotFoundError(f"{path} is not a run: it has no config.json, progress.csv or TensorBoard events")
    if len(folders := sorted({str(event.parent) for event in events})) > 1:
        raise UserValueError(f"{path} has {len(folders)} logs, such as that in {folders[0]}: name one of their folders")
    logged: dict[str, list[float]] = {}
    for name, x, *_ in _read_csv(tables[0]) if tables else read_events(events):
        logged.setdefault(name, []).append(x)
    names = {name: next((each for each in others if each in logged), None) for name, others in NAMES.items()}
    found = {name: FACTORS.get(each, 1.0) * np.asarray(logged[each]) for name, each in names.items() if each}
    if not found:
        known = ", ".join(other for others in NAMES.values() for other in others)
        raise UserValueError(f"{path} has none of the metrics {known}; it has {', '.join(sorted(logged)) or 'nothing'}")
    return found, {}


def _read_csv(path: Path) -> Iterator[tuple[str, float]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except UnicodeDecodeError as error:
        raise UserValueError(f"{path} must be text in UTF-8: {error}") from error
    for name, text in (cell for row in rows for cell in row.items() if cell[0] and cell[1]):
        try:
            yield name, float(text)
        except ValueError:
            if any(name in others for others in NAMES.values()):
                raise UserValueError(f"{path}: {name} must be a number, got {text!r}") from None


def read_events(paths: Sequence[Path]) -> Iterator[tuple[str, float, int]]:
    """Yield the tag, the number and the step of each scalar in TensorBoard files.

    A record consists of a length (8 bytes), its checksum (4 bytes), the event, and its checksum (4 bytes).
    """
    parse = require_package("tensorboardX.proto.event_pb2", "train").Event.FromString
    for path in paths:
        with path.open("rb") as file:
            while len(header := file.read(12)) == 12:
                (length,) = struct.unpack_from("<Q", header)
                try:
                    if len(record := file.read(length + 4)) < length + 4:
                        break  # another process is writing the last record
                    event = parse(record[:-4])
                except Exception as error:  # an impossible length, or an error of protobuf
                    raise UserValueError(f"{path} is not a file of TensorBoard events: {error}") from error
                scalars = (x for x in event.summary.value if x.WhichOneof("value") == "simple_value")
                yield from ((x.tag, x.simple_value, event.step) for x in scalars)


def probe_run(given: argparse.Namespace) -> dict[str, np.ndarray]:
    """Measure the checkpoint that the arguments name, with shapes `[seeds]`; see `training.probe`."""
    run = load_run(given)
    report("measuring its policy in new rollouts (compiling them can take a minute)")
    return compute_for_each_seed(
        run, lambda state: probe(run.train, run.train.restart_host_envs(state).acting, run.config)
    )


def describe(findings: Sequence[Finding], metrics: Mapping[str, Any]) -> str:
    """Describe each finding in three lines, or say what having no findings means."""
    text = ""
    for i, found in enumerate(findings, 1):
        low, high = found.normal
        bounds = [f"at least {low:.3g}"] * (low > -np.inf) + [f"at most {high:.3g}"] * (high < np.inf)
        text += f"{i}. {found.name} ({found.confidence}): {found.cause}\n"
        text += f"   {found.metric} is {found.value:.3g}; normal: {' and '.join(bounds)}\n   try: {found.advice}\n"
    if text:
        return text
    none = "nothing that was measured points to a fault; envs.check_laws checks environments"
    if not any(name.startswith("probe/") for name in metrics):
        none = "nothing in the metrics points to a fault; no checkpoint was measured"
    idle = bool(Evidence(metrics).rise() <= RISEN)
    return f"no findings{', although the return did not rise' * idle}: {none}\n"


PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body{{font:15px sans-serif;max-width:60em;margin:auto}}pre{{white-space:pre-wrap}}</style>
<h1>{title}</h1><pre>{text}</pre><img src="data:image/png;base64,{picture}"></html>
"""


def write_page(path: Path, title: str, text: str, metrics: Mapping[str, Any], findings: Sequence[Finding]) -> None:
    """Write the `text` and the curves as one page, with metrics of findings in red and their normal range in green."""
    run, normal = Evidence(metrics), {found.metric: found.normal for found in findings}
    cited = {name for name in NAMES if any(name in found.metric for found in findings)}  # or derived from it
    series = {name: run.series(name) for name in sorted(NAMES, key=lambda name: name not in cited)}
    series = {name: y for name, y in series.items() if len(y) > 1}
    size = 8, 2 * len(series) or 1
    figure = require_package("matplotlib.figure", "train").Figure(figsize=size, layout="constrained")
    for i, (name, y) in enumerate(series.items(), 1):
        axes = figure.add_subplot(len(series), 1, i)
        axes.plot(y, color="C3" if name in cited else "C0")
        axes.set_title(name)
        if name in normal:
            axes.axhspan(*np.clip(normal[name], *axes.get_ylim()), color="C2", alpha=0.2)
        axes.set_xlabel("update")
    figure.savefig(picture := io.BytesIO(), format="png", dpi=80)
    picture64 = base64.b64encode(picture.getvalue()).decode()
    page = PAGE.format(title=html.escape(title), text=html.escape(text), picture=picture64)
    write_whole(path, page.encode())


def main(arguments: Sequence[str] | None = None) -> list[Finding]:
    """Run the command line; return the printed findings. Invalid input ends the process with status 2."""
    about = "Find out why a run does not learn. The exit status is 1 with findings, and 2 after an error."
    of = "folder of the run, such as runs/first, or another library's log (TensorBoard or progress.csv)"
    parser = make_parser("doctor", about, of=of)
    parser.add_argument("--html", type=Path, help="file for a page with the findings and the curves")
    given = parser.parse_args(arguments)
    try:
        with exit_on_user_error():
            if given.html is not None:
                check_writable(given.html, (".html",))
            metrics, config = read_run(given.run)
            if not config and (given.recipe is not None or given.trust or given.checkpoint != "latest"):
                raise UserValueError(
                    f"{given.run} is a log without checkpoints: --checkpoint, --recipe, --trust need one"
                )
            try:
                metrics |= probe_run(given) if config else {}
            except UserError as error:
                if given.trust or given.recipe is not None:  # they ask for it
                    raise
                report(f"no checkpoint was measured: {error}")
            # Omit the planned steps, because the first axis of a log is always the update axis.
            findings = diagnose(metrics, {name: x for name, x in config.items() if name != "total_timesteps"})
            text = describe(findings, metrics)
            if given.html is not None:
                write_page(given.html, str(given.run), text, metrics, findings)
    except SystemExit as error:
        if isinstance(error.code, int):  # Ctrl-C
            raise
        print(error, file=sys.stderr)
        raise SystemExit(2) from error
    except Exception:  # Python would exit with 1, as with findings
        traceback.print_exc()
        raise SystemExit(2) from None
    print(text, end="")
    return findings
