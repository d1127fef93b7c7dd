"""Reports of a run, to listeners for each new row (progress bar, TensorBoard, Weights & Biases), and at its end."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .._base.extras import require_package
from ._config import RunOptions
from ._evaluate import EVALUATION
from ._files import Row, average_finite, read_rows, select_metric, write_json, write_whole
from ._folder import RunFolder
from ._population import PARENT
from ._processes import logger
from ._statistics import format_summary, plot_curve, summary
from ._train import NONFINITE, Train, last_episodes_return

OnRows = Callable[[list[Row]], object]
"""`on_rows(rows)` receives the metrics of new updates, in order, after they were written to `metrics.jsonl`."""

Write = Callable[[dict[str, float], int], object]
"""`write(record, step)` writes numbers by tag, after `step` environment steps."""


class StopRun(Exception):
    """An `on_rows` function raises this to save and end the run; its message is the `reason` in the result."""

    __module__ = "ppo_parts.training"


@contextlib.contextmanager
def open_listeners(
    train: Train, options: RunOptions, folder: RunFolder | None, done: int, on_rows: OnRows | None
) -> Iterator[list[OnRows]]:
    """Open the listeners to new rows after `done` updates; only the first process has any."""
    if folder is None:
        yield []
        return
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(_show_progress(train, options, done))]
        if options.tensorboard:
            write = stack.enter_context(open_tensorboard(folder, done * train.steps_per_update))
            opened.append(make_records(train, options, write))
        if options.track:
            opened.append(make_records(train, options, stack.enter_context(open_weights_and_biases(folder))))
        yield opened if on_rows is None else [*opened, on_rows]


@contextlib.contextmanager
def _show_progress(train: Train, options: RunOptions, done: int) -> Iterator[OnRows]:
    """Show environment steps, steps per second, and the mean return of the last updates."""
    steps = train.steps_per_update * options.num_seeds
    hidden = None if options.progress else True  # None shows it only on terminals
    counts: dict[str, Any] = {"total": train.num_updates * steps, "initial": done * steps}
    with require_package("tqdm", "train").tqdm(**counts, unit="step", unit_scale=True, disable=hidden) as bar:

        def show(rows: list[Row]) -> None:
            if np.isfinite(mean := average_finite([row["episode_return"] for row in rows])):
                bar.set_postfix_str(f"return {mean:.6g}")
            bar.update(len(rows) * steps)

        yield show


def make_records(train: Train, options: RunOptions, write: Write) -> OnRows:
    """Return a listener that writes records, each of which is the mean over `log_every` updates and all seeds.

    A record ends at a multiple of `log_every`, at an evaluation, and at the end of the run, so records do not depend on
    the number of updates per device call. The first record of a resumed run covers the updates after the checkpoint.
    """
    every = options.log_every or max(1, train.num_updates // 200)
    steps = train.steps_per_update * options.num_seeds
    record: list[Row] = []
    before = np.nan  # the end of the last call; the first one includes compiling

    def listen(rows: list[Row]) -> None:
        nonlocal before
        now = time.perf_counter()
        seconds, before = (now - before) / len(rows), now
        for row in rows:
            record.append({**row, "seconds": seconds})
            number = row["update"] + 1
            if not (number % every == 0 or number == train.num_updates or any(x.startswith(EVALUATION) for x in row)):
                continue
            names = set().union(*record)
            means = {name: average_finite([x[name] for x in record if name in x]) for name in names}
            numbers = {"time/steps_per_second": steps / means.pop("seconds")}
            numbers |= {make_tag(name): x for name, x in means.items() if name not in ("update", "env_steps")}
            write({name: x for name, x in sorted(numbers.items()) if np.isfinite(x)}, row["env_steps"])
            record.clear()

    return listen


def make_tag(name: str) -> str:
    """Return the tag of a metric in TensorBoard, which groups tags by the word before the first slash."""
    if NONFINITE in name:
        return NONFINITE + name.replace(NONFINITE, "")
    if name.startswith("episode") or name.endswith("learning_rate"):
        return f"charts/{name}"
    return name if name.startswith(EVALUATION) else f"losses/{name}"


@contextlib.contextmanager
def open_tensorboard(folder: RunFolder, env_steps: int) -> Iterator[Write]:
    """Write a TensorBoard event file, which hides an earlier process's events after these steps."""
    first = env_steps + 1
    about: Any = {"purge_step": first, "filename_suffix": f".{first}"}  # more than the time in seconds
    with require_package("tensorboardX", "train").SummaryWriter(str(folder.path), **about) as writer:

        def write(record: dict[str, float], step: int) -> None:
            for name, value in record.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        yield write


@contextlib.contextmanager
def open_weights_and_biases(folder: RunFolder) -> Iterator[Write]:
    """Log to a run of Weights & Biases with the name and the configuration of the run on disk.

    A resumed run continues the same run, whose identifier is in `wandb_id.txt`. Records that a killed process had
    already written are not written again, because their steps are not later than its last one.
    """
    wandb, path, config = require_package("wandb", "track"), folder.path / "wandb_id.txt", dict(folder.stored["config"])
    if not path.exists():
        write_whole(path, secrets.token_hex(4).encode())
    about: dict[str, Any] = {"name": folder.path.name, "id": path.read_text(), "dir": str(folder.path)}
    project = os.environ.get("WANDB_PROJECT", "ppo_parts")
    run = wandb.init(project=project, resume="allow", config=config, **about)
    with contextlib.ExitStack() as stack:
        stack.push(lambda error, *_: run.finish(exit_code=int(error is not None)))  # uploads the rest
        yield lambda record, step: run.log(record, step=step)


def finish(folder: RunFolder, result: dict[str, Any], played: Row | None) -> dict[str, Any]:
    """Write the result, which contains data from the evaluation (if any), checkpoints and metrics."""
    if played is not None:
        result["evaluation"] = summarize_evaluation(played, folder.options.eval_episodes)
    if (best := folder.find_best()) is not None:
        result["best"] = {"metric": folder.options.best_metric, "update": best[0], "value": best[1]}
    title = str(result["config"].get("env_id", ""))
    result |= summarize_metrics(folder.path / "curve.png", read_rows(folder.log_path), title, result["env_steps"])
    write_json(folder.result_path, result)
    return result


def summarize_metrics(path: Path, rows: Iterable[Row], title: str, env_steps: int) -> dict[str, Any]:
    """Draw the learning curve if any episode ended, and return the part of the result that depends on metrics.

    A damaged log may lack the metrics of the last updates. Then the last returns are unknown.
    """
    played = EVALUATION + "episode_return"
    drawn: list[Row] = []  # only some metrics, because all may not fit into memory
    lost, total, population = 0.0, 0.0, False
    for row in rows:
        population = PARENT in row
        drawn.append({name: row[name] for name in ("env_steps", "episode_return", "episodes", played) if name in row})
        bad = sum(np.nan_to_num(np.asarray(x, float)) for name, x in row.items() if NONFINITE in name)
        minibatches = sum(np.asarray(x, float) for name, x in row.items() if name.split("/")[-1] == "minibatches")
        lost, total = lost + float(np.sum(np.where(bad, minibatches, 0))), total + float(np.sum(minibatches))
    if not drawn:
        return {}
    steps, returns, episodes = (select_metric(drawn, name) for name in ("env_steps", "episode_return", "episodes"))
    evaluation = select_metric(drawn, played) if any(played in row for row in drawn) else None
    if population:  # members copy each other, so they are not independent seeds
        returns = np.asarray(last_episodes_return(returns, episodes, last=2**31))  # all episodes of an update
        episodes = np.sum(episodes, axis=-1)
    last = last_episodes_return(returns.T, episodes.T)
    counts = np.sum(np.where(np.isfinite(returns), np.nan_to_num(episodes), 0), axis=0)
    number = int(min(100, np.min(counts)))  # of the seed with the fewest
    means = {**summary(np.asarray(last)), "episodes": number}
    result: dict[str, Any] = {"last_100_episodes_return": means} if steps[-1] == env_steps else {}
    if lost:
        result |= {"skipped_minibatches": int(lost), "skipped_fraction": lost / total}
    if np.isfinite(returns).any():
        plot_curve(path, steps, returns, title, evaluation=evaluation)
        result["curve"] = str(path)
    return result


def summarize_evaluation(played: dict[str, Any], episodes: int) -> dict[str, Any]:
    means = {name.removeprefix(EVALUATION): float(np.mean(x)) for name, x in played.items()}
    returns = summary(played[EVALUATION + "episode_return"])
    ends = {name: int(np.sum(played[EVALUATION + name])) for name in ("terminated", "truncated")}
    return {**means, "episodes": episodes, "episode_return": returns, **ends}


def announce(result: dict[str, Any]) -> None:
    found = result.get("last_100_episodes_return")
    if found is None:
        logger.info("the last returns are unknown: metrics.jsonl lacks the last updates")
    elif found["mean"] is not None and np.isfinite(found["mean"]):  # None is read from a file
        logger.info(f"mean return of the last {found.get('episodes', 100)} episodes: {format_summary(found)}")
    else:
        logger.info("no episode ended" + (" in some of the seeds" if result["num_seeds"] > 1 else ""))
    if "skipped_minibatches" in result:
        logger.info(
            f"{result['skipped_minibatches']:,} minibatches ({result['skipped_fraction']:.0%}) had no effect, because "
            f"their updates had non-finite numbers; {NONFINITE}... in the metrics says where"
        )
    if "evaluation" in result:
        played = result["evaluation"]
        logger.info(f"evaluation over {played['episodes']} episodes: {format_summary(played['episode_return'])}")
    if "best" in result:
        logger.info("best {metric}: {value:.4g}, in the checkpoint of update {update}".format(**result["best"]))
    if "timing" in result:
        seeds = f" of {result['num_seeds']} seeds" if result["num_seeds"] > 1 else ""
        text = "{env_steps_this_session:,} steps{seeds} in {seconds:,.1f} s"
        text += " ({steps_per_second:,.0f} per second) on {device}"
        logger.info(text.format(seeds=seeds, **result["timing"]))
    if "curve" in result:
        logger.info(f"learning curve: {result['curve']}")
