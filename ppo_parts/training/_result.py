"""The result of a run: `result.json`, the learning curve, and a printed summary."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ._evaluate import EVALUATION
from ._folder import RunFolder
from ._metrics_file import Row, column
from ._records import plot_curve, versions
from ._statistics import summary
from ._train import NONFINITE, Train, last_episodes_return


def result_of(train: Train, config: Any, num_seeds: int, rows: list[Row], done: int) -> dict[str, Any]:
    """Compute the part of the result after `done` updates that follows from the metrics."""
    result: dict[str, Any] = {
        "config": dataclasses.asdict(config),
        "num_seeds": num_seeds,
        "env_steps": done * train.steps_per_update,
        "versions": versions(),
    }
    if rows:
        returns, episodes = column(rows, "episode_return"), column(rows, "episodes")
        last = last_episodes_return(returns.T, episodes.T)
        result["last_100_episodes_return"] = summary(np.asarray(last))
        result |= skipped(rows)
    return result


def skipped(rows: list[Row]) -> dict[str, Any]:
    """Count the minibatches without effect, whose update had numbers that are not finite, and their share of all."""
    names = sorted(set().union(*rows))
    bad = sum(np.nan_to_num(column(rows, name)) for name in names if NONFINITE in name)
    minibatches = sum(np.nan_to_num(column(rows, name)) for name in names if name.split("/")[-1] == "minibatches")
    lost, total = float(np.sum(np.where(bad, minibatches, 0))), float(np.sum(minibatches))
    return {"skipped_minibatches": int(lost), "skipped_share": lost / total} if lost else {}


def evaluation_of(played: dict[str, Any], episodes: int) -> dict[str, Any]:
    """Summarise the last evaluation for the result."""
    means = {name.removeprefix(EVALUATION): float(np.mean(x)) for name, x in played.items()}
    return {
        **means,
        "episodes": episodes,
        "episode_return": summary(played[EVALUATION + "episode_return"]),
        "terminated": int(np.sum(played[EVALUATION + "terminated"])),
        "truncated": int(np.sum(played[EVALUATION + "truncated"])),
    }


def draw(folder: RunFolder, rows: list[Row], title: str) -> dict[str, str]:
    """Draw the learning curve, if any episode ended, and return its path."""
    returns = column(rows, "episode_return")
    if not np.isfinite(returns).any():
        return {}
    played = EVALUATION + "episode_return"
    evaluation = column(rows, played) if any(played in row for row in rows) else None
    path = folder.path / "curve.png"
    plot_curve(path, column(rows, "env_steps"), returns, title, evaluation=evaluation)
    return {"curve": str(path)}


def announce(result: dict[str, Any]) -> None:
    """Print the result."""

    def sentence(what: str, numbers: dict[str, Any]) -> str:
        text = f"{what}: {numbers['mean']:.1f}"
        if numbers["iqm_95"] is not None:
            low, high = numbers["iqm_95"]
            text += (
                f" (standard deviation {numbers['std']:.1f}), IQM {numbers['iqm']:.1f} [95 %: {low:.1f}, {high:.1f}]"
            )
        return text

    if "last_100_episodes_return" in result and np.isfinite(result["last_100_episodes_return"]["mean"]):
        print(sentence("mean return of the last 100 episodes", result["last_100_episodes_return"]))
    else:
        print("no episode ended" + (" in some of the seeds" if result["num_seeds"] > 1 else ""))
    if "skipped_minibatches" in result:
        print(
            f"{result['skipped_minibatches']:,} minibatches ({result['skipped_share']:.0%}) had no effect: there were "
            f"numbers that are not finite in their updates; {NONFINITE}... in the metrics says where"
        )
    if "evaluation" in result:
        played = result["evaluation"]
        print(sentence(f"evaluation over {played['episodes']} episodes", played["episode_return"]))
    if "best" in result:
        print("best {metric}: {value:.4g}, in the checkpoint of update {update}".format(**result["best"]))
    if "curve" in result:
        print(f"learning curve: {result['curve']}")
