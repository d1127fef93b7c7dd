"""Whole episodes with a fixed policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._hyperparameters import count
from .._policy import evaluate_policy, evaluate_step
from .._types import Array, Batch, Evaluate, Params

EVALUATION = "evaluation/"
"""What the names of an evaluation's metrics begin with."""


class EpisodeResults(NamedTuple):
    """One entry per episode, `[episodes]`: return, length, and how it ended (neither: cut by `max_steps`)."""

    episode_return: Array
    episode_length: Array
    terminated: Array
    truncated: Array


def evaluate_episodes(
    env: Any,
    evaluate: Evaluate,
    params: Params,
    key: Array,
    episodes: int,
    *,
    mode: bool = False,
    max_steps: int = 100_000,
    initial_carry: Callable[[int], Any] | None = None,
) -> EpisodeResults:
    """Play `episodes` episodes side by side, each from its own reset to its own end.

    Every environment counts with its first episode, so short ones are not over-represented.

    Args:
        env: `ppo_parts.envs.Env`; for one with running statistics, what its `evaluation` returned.
        evaluate: as in `ppo_parts.learner`.
        params: parameters to play with.
        key: PRNG key.
        episodes: how many.
        mode: play the distribution's mode instead of a sample.
        max_steps: bound for environments without a time limit.
        initial_carry: for recurrent policies, as in `ppo_parts.rollout`.

    Returns:
        `EpisodeResults`. Pure: jits and vmaps.
    """
    count("evaluate_episodes", "episodes", episodes)
    count("evaluate_episodes", "max_steps", max_steps)
    key, reset_key = jax.random.split(key)
    env_state, obs = env.reset(reset_key, episodes)
    nothing = jnp.zeros(episodes, bool)
    empty = EpisodeResults(jnp.zeros(episodes), jnp.zeros(episodes, jnp.int32), nothing, nothing)

    def unfinished(carry: Any) -> Array:
        *_, results, steps = carry
        return (steps < max_steps) & ~jnp.all(results.terminated | results.truncated)

    def step(carry: Any) -> Any:
        key, env_state, obs, memory, results, steps = carry
        key, action_key, env_key = jax.random.split(key, 3)
        if initial_carry is None:
            distribution, _ = evaluate_policy(evaluate, params, Batch(obs=obs, axes=("segment",)))
        else:
            # No resets: each environment counts with its first episode only.
            distribution, _, memory = evaluate_step(evaluate, params, obs, memory, nothing)
        action = distribution.mode() if mode else distribution.sample(seed=action_key)
        if initial_carry is not None:
            action = jax.tree.map(lambda x: x[0], action)
        env_state, out = env.step(env_key, env_state, action)
        playing = ~(results.terminated | results.truncated)
        results = EpisodeResults(
            jnp.where(playing, out.episode_return, results.episode_return),
            jnp.where(playing, out.episode_length, results.episode_length),
            jnp.where(playing, out.terminated, results.terminated),
            jnp.where(playing, out.truncated & ~out.terminated, results.truncated),
        )
        return key, env_state, out.obs, memory, results, steps + 1

    memory = None if initial_carry is None else initial_carry(episodes)
    start = (key, env_state, obs, memory, empty, jnp.zeros((), jnp.int32))
    *_, results, _ = jax.lax.while_loop(unfinished, step, start)
    return results


def metrics_of(played: EpisodeResults, seed_axes: int = 0) -> dict[str, Any]:
    """Metrics of an evaluation by name: mean return and length, how many episodes terminated and were truncated.

    The leading `seed_axes` stay; everything after them (episodes, and agents) is one sample.
    """

    def over(reduction: Callable[..., Any], x: Any, dtype: type) -> Any:
        return reduction(x, axis=tuple(range(seed_axes, np.ndim(x))), dtype=dtype)

    return {
        EVALUATION + "episode_return": over(np.mean, played.episode_return, float),
        EVALUATION + "episode_length": over(np.mean, played.episode_length, float),
        EVALUATION + "terminated": over(np.sum, played.terminated, int),
        EVALUATION + "truncated": over(np.sum, played.truncated, int),
    }
