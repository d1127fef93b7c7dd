"""Evaluate a trained run: play whole episodes and print their returns.

python -m ppo_parts.evaluate runs/first --episodes 100
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._base.checked import Count, checked
from ..training import EpisodeResults, LoadedRun, exit_on_user_error, summary
from ..training._evaluate import compute_metrics
from ..training._files import check_writable, write_json
from ..training._reports import summarize_evaluation
from ..training._statistics import format_summary
from ..training._train import make_keys
from ._shared import add_episodes, compute_for_each_seed, load_run, make_parser, report


@checked
def play_episodes(run: LoadedRun, episodes: Count, *, seed: int = 0, mode: bool = False) -> EpisodeResults:
    """Play whole episodes with the policies of all seeds of a run; `mode` plays the distribution's mode.

    The results are NumPy arrays `[seeds, episodes]`; with several agents, returns are `[seeds, episodes, A]`.
    """
    seeds = run.state.key.size
    keys = jax.random.split(make_keys(seed, 1), seeds)
    play = functools.partial(run.train.evaluate_policy, episodes=episodes, mode=mode)
    played = compute_for_each_seed(run, play, keys if seeds > 1 else keys[0])
    return played if seeds > 1 else jax.tree.map(lambda x: x[None], played)


def summarize(played: EpisodeResults) -> dict[str, Any]:
    """Summarize episodes `[seeds, episodes]` by means and by counts of ends; `info` has the environment's numbers.

    `episode_return`, averaged over agents, is `training.summary` of the seeds' means. With one seed, it summarizes the
    returns of its episodes, as `per_episode` instead of `per_seed`.
    """
    seeds, episodes = np.shape(played.episode_length)
    found = summarize_evaluation(compute_metrics(played, seed_axes=1), episodes)
    if seeds == 1:
        found["episode_return"] = summary(np.asarray(played.episode_return, float).reshape(episodes, -1).mean(-1))
        found["episode_return"]["per_episode"] = found["episode_return"].pop("per_seed")
    info = {name: found.pop(name) for name in played.info}
    return {"seeds": seeds, **found, "info": info}


def describe(result: dict[str, Any]) -> str:
    """Describe a summary in a few lines."""
    returns, several = result["episode_return"], result["seeds"] > 1
    text = f"mean return {format_summary(returns, 2)}"
    if returns["iqm_95"] is not None:
        text += f" over {'seeds' if several else 'episodes'}"
    if several:
        text += "\nmean return of each seed: " + ", ".join(f"{x:.2f}" for x in returns["per_seed"])
    text += (
        f"\nmean length {result['episode_length']:.1f}; of {result['seeds'] * result['episodes']} episodes, "
        f"{result['terminated']} terminated and {result['truncated']} were truncated"
    )
    return text + "".join(f"\nmean {name} {x:.4g}" for name, x in result["info"].items())


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the command line; return the printed result as a dictionary."""
    parser = make_parser("evaluate", "Play whole episodes with the policy of a trained run, and print their returns.")
    add_episodes(parser, 100, of=" of each seed")
    parser.add_argument("--json", type=Path, help="file to write the result to")
    given = parser.parse_args(arguments)
    with exit_on_user_error():
        if given.json is not None:
            check_writable(given.json)
        run = load_run(given)
        report(f"compiling, then playing {given.episodes} episode{'s' * (given.episodes > 1)}")
        result = summarize(play_episodes(run, given.episodes, seed=given.seed, mode=given.mode))
        result = {"run": str(given.run), "update": run.update, "mode": given.mode, **result}
        print(f"{given.run} after update {run.update} of {run.train.num_updates}: {getattr(run.config, 'env_id', '')}")
        print(describe(result))
        if given.json is not None:
            write_json(given.json, result)
    return result
