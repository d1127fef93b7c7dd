"""The result of a run: `result.json`, the learning curve, and a printed summary."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ._curves import plot_curve
from ._evaluate import EVALUATION
from ._files import Row, column, valid_rows, write_json
from ._folder import RunWriter
from ._population import PARENT
from ._processes import logger
from ._statistics import summary, with_interval
from ._train import NONFINITE, last_episodes_return


def finish(folder: RunWriter, result: dict[str, Any], played: Row | None) -> dict[str, Any]:
    """Write the result, with what follows from an evaluation, if any, from checkpoints and from metrics."""
    if played is not None:
        result["evaluation"] = evaluation_of(played, folder.options.eval_episodes)
    if (best := folder.best()) is not None:
        result["best"] = {"metric": folder.options.best_metric, "update": best[0], "value": best[1]}
    rows = (row for row, _ in valid_rows(folder.log_path))
    result |= of_metrics(folder.path / "curve.png", rows, title=str(result["config"].get("env_id", "")))
    write_json(folder.result_path, result)
    return result


def of_metrics(path: Path, rows: Iterable[Row], title: str) -> dict[str, Any]:
    """Draw the learning curve, if any episode ended; return the part of the result that follows from the metrics."""
    played = EVALUATION + "episode_return"
    drawn: list[Row] = []  # without the other metrics, which would not all fit into memory
    lost, total, population = 0.0, 0.0, False
    for row in rows:
        population = PARENT in row
        drawn.append({name: row[name] for name in ("env_steps", "episode_return", "episodes", played) if name in row})
        bad = sum(np.nan_to_num(np.asarray(x, float)) for name, x in row.items() if NONFINITE in name)
        minibatches = sum(np.asarray(x, float) for name, x in row.items() if name.split("/")[-1] == "minibatches")
        lost, total = lost + float(np.sum(np.where(bad, minibatches, 0))), total + float(np.sum(minibatches))
    if not drawn:
        return {}
    env_steps, returns, episodes = (column(drawn, name) for name in ("env_steps", "episode_return", "episodes"))
    evaluation = column(drawn, played) if any(played in row for row in drawn) else None
    if population:  # members copy each other, so they are not independent seeds
        with np.errstate(invalid="ignore"):  # 0 / 0 where no episode ended
            returns = np.nansum(returns * episodes, axis=-1) / np.sum(episodes, axis=-1)
        episodes = np.sum(episodes, axis=-1)
    last = last_episodes_return(returns.T, episodes.T)
    result: dict[str, Any] = {"last_100_episodes_return": summary(np.asarray(last))}
    if lost:
        result |= {"skipped_minibatches": int(lost), "skipped_share": lost / total}
    if np.isfinite(returns).any():
        plot_curve(path, env_steps, returns, title, evaluation=evaluation)
        result["curve"] = str(path)
    return result


def evaluation_of(played: dict[str, Any], episodes: int) -> dict[str, Any]:
    means = {name.removeprefix(EVALUATION): float(np.mean(x)) for name, x in played.items()}
    returns = summary(played[EVALUATION + "episode_return"])
    ends = {name: int(np.sum(played[EVALUATION + name])) for name in ("terminated", "truncated")}
    return {**means, "episodes": episodes, "episode_return": returns, **ends}


def announce(result: dict[str, Any]) -> None:
    if "last_100_episodes_return" in result and np.isfinite(result["last_100_episodes_return"]["mean"]):
        logger.info(f"mean return of the last 100 episodes: {with_interval(result['last_100_episodes_return'])}")
    else:
        logger.info("no episode ended" + (" in some of the seeds" if result["num_seeds"] > 1 else ""))
    if "skipped_minibatches" in result:
        logger.info(
            f"{result['skipped_minibatches']:,} minibatches ({result['skipped_share']:.0%}) had no effect: there were "
            f"non-finite numbers in their updates; {NONFINITE}... in the metrics says where"
        )
    if "evaluation" in result:
        played = result["evaluation"]
        logger.info(f"evaluation over {played['episodes']} episodes: {with_interval(played['episode_return'])}")
    if "best" in result:
        logger.info("best {metric}: {value:.4g}, in the checkpoint of update {update}".format(**result["best"]))
    if "timing" in result:
        seeds = f" of {result['num_seeds']} seeds" if result["num_seeds"] > 1 else ""
        text = "{env_steps_this_session:,} steps{seeds} in {seconds:,.1f} s"
        text += " ({steps_per_second:,.0f} per second) on {device}"
        logger.info(text.format(seeds=seeds, **result["timing"]))
    if "curve" in result:
        logger.info(f"learning curve: {result['curve']}")
