"""Evaluation of a fixed policy on whole episodes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._base.doors import checked
from .._base.hyperparameters import check_count, check_takes
from .._core.policy import apply_policy, carry_after, initial_carry_of, policy_keys
from .._core.types import Array, Evaluate, Params
from ..envs._env import check_env
from ..functional._arguments import check_key
from ..functional._common import unsqueezed

EVALUATION = "evaluation/"
"""Prefix of the names of an evaluation's metrics."""


class EpisodeResults(NamedTuple):
    """One entry per episode, `[episodes]`: return (of A agents `[episodes, A]`), length, and how it ended.

    Neither flag: it was cut by `max_steps`. `info` has the environment's own numbers about each episode, by name.
    """

    episode_return: Array
    episode_length: Array
    terminated: Array
    truncated: Array
    info: Any = {}  # noqa: RUF012 - never written to


def play_step(
    env: Any, policy: Evaluate, params: Params, key: Array, env_state: Any, obs: Any, memory: Any, begins: Array, *,
    mode: bool,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Act once in each of N environments; return their state, their step, and the policy's memory.

    `begins` is `[N]` or `[N, A]`, whether an episode begins.
    """
    action_key, env_key = jax.random.split(key)
    output = apply_policy(policy, params, obs, memory, begins, policy_keys(policy, action_key, len(begins)))
    action = output.distribution.mode() if mode else output.distribution.sample(seed=action_key)
    return *env.step(env_key, env_state, action), carry_after(policy, output, action)


@checked
def evaluate_episodes(
    env: Any,
    policy: Evaluate,
    params: Params,
    key: Array,
    episodes: int,
    *,
    mode: bool = False,
    max_steps: int = 100_000,
) -> EpisodeResults:
    """Play `episodes` episodes in parallel, each from its own reset to its own end.

    Only the first episode of each environment counts, so that short episodes are not over-represented. It is pure.

    Args:
        env: `ppo_parts.envs.Env`; for an environment with running statistics, the result of its `evaluation`.
        policy, params: as in `ppo_parts.rollout`.
        key: one key.
        episodes: number of episodes.
        mode: play the distribution's mode instead of a sample.
        max_steps: largest number of steps, for environments without a time limit.
    """
    check_env("evaluate_episodes", env)
    check_takes("evaluate_episodes", "policy", policy, ("params", "batch"))
    check_key("evaluate_episodes", "key", key)
    check_count("evaluate_episodes", "episodes", episodes)
    check_count("evaluate_episodes", "max_steps", max_steps)
    key, reset_key = jax.random.split(key)
    env_state, obs = env.reset(reset_key, episodes)
    each = (episodes,) if env.num_agents is None else (episodes, env.num_agents)
    nothing = jnp.zeros(episodes, bool)

    def unfinished(carry: Any) -> Array:
        *_, results, steps = carry
        return (steps < max_steps) & ~jnp.all(results.terminated | results.truncated)

    def play(key: Array, env_state: Any, obs: Any, memory: Any, steps: Array) -> Any:
        begins = jnp.broadcast_to(steps == 0, each)  # as a rollout begins; only first episodes count here
        return play_step(env, policy, params, key, env_state, obs, memory, begins, mode=mode)

    def step(carry: Any) -> Any:
        key, env_state, obs, memory, results, steps = carry
        key, step_key = jax.random.split(key)
        env_state, out, memory = play(step_key, env_state, obs, memory, steps)
        playing = ~(results.terminated | results.truncated)
        ended, truncated = out.episode_ends()
        seen = EpisodeResults(out.episode_return, out.episode_length, ended & ~truncated, truncated, out.info)

        def kept(new: Array, old: Array) -> Array:
            return jnp.where(unsqueezed(playing, old.ndim), new.astype(old.dtype), old)

        results = jax.tree.map(kept, seen, results)
        return key, env_state, out.obs, memory, results, steps + 1

    initial_carry = initial_carry_of(policy)
    memory = None if initial_carry is None else initial_carry(episodes)
    began = jnp.zeros((), jnp.int32)
    played = jax.eval_shape(play, key, env_state, obs, memory, began)[1]
    info = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), played.info)
    empty = EpisodeResults(jnp.zeros(each), jnp.zeros(episodes, jnp.int32), nothing, nothing, info)
    start = (key, env_state, obs, memory, empty, began)
    *_, results, _ = jax.lax.while_loop(unfinished, step, start)
    return results


def metrics_of(played: EpisodeResults, seed_axes: int = 0) -> dict[str, Any]:
    """Compute the metrics of an evaluation by name: means, and the numbers of terminated and truncated episodes.

    The leading `seed_axes` are kept; all later axes (episodes, and agents) are reduced.
    """
    found = {}
    for name in metric_names(played):
        x = getattr(played, name) if name in EpisodeResults._fields else played.info[name]
        reduction, dtype = (np.sum, int) if name in ("terminated", "truncated") else (np.mean, float)
        found[EVALUATION + name] = reduction(x, axis=tuple(range(seed_axes, np.ndim(x))), dtype=dtype)
    return found


def metric_names(played: EpisodeResults) -> list[str]:
    """Return the names of the metrics of `metrics_of`, without their prefix; `played` may hold shapes only."""
    return list(dict.fromkeys([*EpisodeResults._fields[:-1], *played.info]))
