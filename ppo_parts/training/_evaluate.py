"""Evaluation of a fixed policy on whole episodes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._base.checked import Count, checked
from .._base.hyperparameters import check_takes
from .._base.moments import find_moments
from .._base.trees import select
from .._core.batch import Array, Evaluate, Params
from .._core.policy import apply_policy, carry_after, policy_keys
from ..envs._env import Env, Transition, check_env
from ..envs._rollout import RolloutState, check_acting
from ..errors import UserValueError
from ..functional._arguments import check_key

EVALUATION = "evaluation/"
"""Prefix of the names of an evaluation's metrics."""


class EpisodeResults(NamedTuple):
    """Results with one entry per episode, `[episodes]`: return (with agents `[episodes, A]`), length, and end.

    If neither flag is set, `max_steps` cut the episode. `info` has the environment's numbers about episodes, by name.
    """

    episode_return: Array
    episode_length: Array
    terminated: Array
    truncated: Array
    info: Any = {}  # noqa: RUF012 - never written to


def play_step(
    env: Env, policy: Evaluate, params: Params, key: Array, state: RolloutState, *, mode: bool
) -> tuple[RolloutState, Transition]:
    """Take one step with the policy in each of N environments."""
    action_key, env_key = jax.random.split(key)
    keys = policy_keys(policy, action_key, jax.tree.leaves(state.obs)[0].shape[0])
    output = apply_policy(policy, params, state.obs, state.carry, state.reset, keys)
    action = output.distribution.mode() if mode else output.distribution.sample(seed=action_key)
    env_state, out = env.step(env_key, state.env_state, action)
    return state.after(env_state, out, carry_after(policy, output, action)), out


@checked
def evaluate_episodes(
    env: Any,
    policy: Evaluate,
    params: Params,
    key: Array,
    episodes: Count,
    *,
    mode: bool = False,
    max_steps: Count = 100_000,
) -> EpisodeResults:
    """Play `episodes` episodes in parallel, each from its own reset to its own end.

    Only the first episode of each environment counts, so short ones are not over-represented. The function is pure.

    Args:
        env: a `ppo_parts.envs.Env`; for an environment with running statistics, the result of its `evaluation`, which
            keeps those of training.
        policy, params: as in `ppo_parts.rollout`.
        key: one key.
        episodes: number of episodes.
        mode: whether to play the distribution's mode instead of a sample.
        max_steps: largest number of steps, for environments without a time limit.

    Raises:
        ValueError: if the environment has running statistics, which would be those of the evaluation alone.
    """
    check_env("evaluate_episodes", env)
    check_takes("evaluate_episodes", "policy", policy, ("params", "batch"))
    check_key("evaluate_episodes", "key", key)
    check_acting("evaluate_episodes", params)
    key, reset_key = jax.random.split(key)
    first = RolloutState.begin(env, policy, episodes, *env.reset(reset_key, episodes))
    if find_moments(first.env_state):
        says = "evaluate_episodes: this environment would begin anew with its running statistics"
        raise UserValueError(f"{says}: give the one that env.evaluation(state.rollout.env_state) returns")

    def unfinished(carry: Any) -> Array:
        *_, results, steps = carry
        return (steps < max_steps) & ~jnp.all(results.terminated | results.truncated)

    def play(key: Array, state: RolloutState) -> tuple[RolloutState, EpisodeResults]:
        state, out = play_step(env, policy, params, key, state, mode=mode)
        ended, truncated = out.episode_ends()
        return state, EpisodeResults(out.episode_return, out.episode_length, ended & ~truncated, truncated, out.info)

    def step(carry: Any) -> Any:
        key, state, results, steps = carry
        key, step_key = jax.random.split(key)
        state, latest = play(step_key, state)
        playing = ~(results.terminated | results.truncated)
        return key, state, select(playing, latest, results), steps + 1

    empty = jax.tree.map(jnp.zeros_like, jax.eval_shape(play, key, first)[1])
    _, _, results, _ = jax.lax.while_loop(unfinished, step, (key, first, empty, jnp.zeros((), jnp.int32)))
    return results


def compute_metrics(played: EpisodeResults, seed_axes: int = 0) -> dict[str, Any]:
    """Return the metrics of an evaluation by name, means and the numbers of terminated and truncated episodes.

    The leading `seed_axes` are kept; all later axes (episodes and agents) are reduced.
    """
    found, fields = {}, played._asdict()
    info = fields.pop("info")
    for name, x in (fields | info).items():
        reduction, dtype = (np.sum, int) if name in ("terminated", "truncated") else (np.mean, float)
        found[EVALUATION + name] = reduction(x, axis=tuple(range(seed_axes, np.ndim(x))), dtype=dtype)
    return found
