"""Helpers for benchmarks with a few arms: curves over training, and summaries over seeds."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from ppo_parts import training
from ppo_parts.training import at_least, between, more_than

from . import _pages
from ._timing import positive

WINDOWS = 50
"""Number of equal spans of training steps over which curves take the mean return of the episodes that end there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(training.Config):
    """Hyperparameters that these benchmarks share."""

    env_id: str = "CartPole-v1"
    num_steps: int = 32
    learning_rate: Annotated[float, at_least(0)]  # of Adam
    gamma: Annotated[float, between(0, 1)] = 0.99
    gae_lambda: Annotated[float, between(0, 1)] = 0.95
    num_minibatches: Annotated[int, at_least(1)] = 4
    update_epochs: Annotated[int, at_least(1)] = 4
    clip_coef: Annotated[float, more_than(0)] = 0.2
    vf_coef: Annotated[float, at_least(0)] = 0.5
    hidden: Annotated[tuple[int, ...], at_least(1)] = (32, 32)


def outcome(train: training.Train, seed: jax.Array) -> dict[str, jax.Array]:
    """Train one seed, and play 100 new episodes with a key that training does not use."""
    state, metrics = train(jax.random.key(seed))
    returns, episodes = metrics["episode_return"], metrics["episodes"]
    window = jnp.arange(train.num_updates) * WINDOWS // train.num_updates
    total = jax.ops.segment_sum(jnp.where(episodes > 0, returns * episodes, 0), window, WINDOWS)
    played = train.evaluate_policy(jax.random.fold_in(jax.random.key(seed), 2**20), state, 100)
    ended = jax.ops.segment_sum(episodes, window, WINDOWS)
    return {"curve": total / ended, "evaluation": jnp.mean(played.episode_return)}


def summarized(outcomes: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Summarize `outcome` of several seeds, `[seeds, ...]`; windows in which no episode ended are left out."""
    curves = np.asarray(outcomes["curve"])
    second_half = np.nanmean(curves[:, WINDOWS // 2 :], axis=1)
    return {
        "second_half": training.summary(second_half),
        "evaluation": training.summary(np.asarray(outcomes["evaluation"])),
        "curves": np.round(curves, 2),
    }


def show(found: Mapping[str, Any]) -> str:
    """Both measures, for the command line."""
    return f"{_pages.interval(found['second_half'], 1)}, new episodes {_pages.interval(found['evaluation'], 1)}"


def parser_of(description: str | None, steps: int) -> argparse.ArgumentParser:
    """The command line of a benchmark of arms."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=positive, default=10, help="how many seeds")
    parser.add_argument("--first-seed", type=int, default=1, help="the first of them")
    parser.add_argument("--steps", type=positive, default=steps, help="environment steps of a run")
    return parser
