"""Runs of many seeds of a recipe in one program: what is measured of each, and summaries over seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ppo_parts import training
from ppo_parts.training import at_least, between, more_than

from ._pages import interval

WINDOWS = 50
"""Number of equal spans of training steps over which curves take the mean return of the episodes that end there."""
EPISODES = 100
"""New episodes that are played after training."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(training.Config):
    """Hyperparameters that benchmarks of a few arms share."""

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


def seeds_of(options: Any) -> range:
    """The seeds of a command line."""
    return range(options.first_seed, options.first_seed + options.seeds)


def keys_of(seeds: range) -> jax.Array:
    """A key for each seed."""
    return jax.vmap(jax.random.key)(jnp.arange(seeds.start, seeds.stop))


def evaluation_key(key: jax.Array) -> jax.Array:
    """A key that training does not use, for evaluations."""
    return jax.random.fold_in(key, 2**20)


def outcome(train: training.Train, seed: jax.Array) -> dict[str, jax.Array]:
    """Train one seed and play new episodes: all measures, of which a compiled program computes those that it returns.

    `return_over_training` is the mean over all episodes of the training, and `curve` has their means in each window.
    """
    key = jax.random.key(seed)
    state, metrics = train(key)
    returns, episodes = metrics["episode_return"], metrics["episodes"]
    total = jnp.where(episodes > 0, returns * episodes, 0)
    window = jnp.arange(train.num_updates) * WINDOWS // train.num_updates
    totals, ended = (jax.ops.segment_sum(x, window, WINDOWS) for x in (total, episodes))
    return {
        "return_over_training": jnp.sum(total) / jnp.sum(episodes),
        "last_100_episodes_return": training.last_episodes_return(returns, episodes),
        "evaluation_return": jnp.mean(train.evaluate_policy(evaluation_key(key), state, EPISODES).episode_return),
        "curve": totals / ended,
    }


class Stage(NamedTuple):
    """A run of several seeds at one of its stops; metrics are those since the stop before, `[seeds, updates]`."""

    number: int
    last: bool
    env_steps: int
    state: Any
    metrics: Any


def stages(train: training.Train, keys: jax.Array, number: int) -> Iterator[Stage]:
    """Train the seeds of `keys` in one program that stops about `number` times, at equal distances."""
    every = max(1, train.num_updates // number)

    def several(state: Any) -> Any:
        return jax.lax.scan(lambda state, _: train.step(state), state, None, length=every)

    advance, state = jax.jit(jax.vmap(several)), jax.jit(jax.vmap(train.init))(keys)
    stops = train.num_updates // every
    for stop in range(stops):
        state, metrics = advance(state)
        yield Stage(stop, stop + 1 == stops, (stop + 1) * every * train.steps_per_update, state, metrics)


def summarized(outcomes: Mapping[str, Any]) -> dict[str, Any]:
    """Summarize `outcome` of several seeds, `[seeds, ...]`; windows in which no episode ended are left out."""
    curves = np.asarray(outcomes["curve"])
    return {
        "second_half": training.summary(np.nanmean(curves[:, WINDOWS // 2 :], axis=1)),
        "evaluation": training.summary(np.asarray(outcomes["evaluation_return"])),
        "curves": np.round(curves, 2),
    }


def show(found: Mapping[str, Any]) -> str:
    """Both measures of `summarized`, for the command line."""
    return f"{interval(found['second_half'], 1)}, new episodes {interval(found['evaluation'], 1)}"
