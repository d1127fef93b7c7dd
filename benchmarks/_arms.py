"""Helpers for benchmarks with a few arms: curves over training, summaries over seeds, and tables in pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from ppo_parts import training
from ppo_parts.training import at_least, between, more_than
from ppo_parts.training._statistics import interval

from . import _pages

ROOT = Path(__file__).resolve().parent.parent
WINDOWS = 50
"""Number of equal spans of training steps over which curves take the mean return of the episodes that end there."""
MEASURES = {"second_half": "return in the second half of training", "evaluation": "return of 100 new episodes"}


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


def cell(found: Mapping[str, Any]) -> str:
    """Mean over seeds, and its 95 % bootstrap interval."""
    return _pages.interval(dict(found), digits=1)


def draw_curves(axes: Any, steps: int, curves: Sequence[Sequence[float]], label: str, color: Any) -> None:
    """Mean over seeds and its 95 % interval against environment steps."""
    values = np.array(curves, float).T
    x = (np.arange(WINDOWS) + 0.5) * steps / WINDOWS
    axes.plot(x, np.nanmean(values, axis=1), color=color, label=label)
    axes.fill_between(x, *interval(values), color=color, alpha=0.15, linewidth=0)
