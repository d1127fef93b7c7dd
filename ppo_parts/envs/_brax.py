"""Brax environments, and others with Brax's interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .._base.doors import checked
from .._base.errors import UserValueError
from .._base.hyperparameters import check_count
from ._env import Array, Box, Env, Observation, as_observation, check_interface, check_known
from ._episodes import Step, auto_reset
from ._rendering import mujoco_renderer


def make(name: str, *, time_limit: int = 1000, reset_ratio: int = 1, **settings: Any) -> Env:
    """Make an environment of `brax.envs`; `settings` go to its constructor, such as `backend="spring"`.

    The environment's `done` is a termination; after `time_limit` steps an episode is truncated.
    """
    from brax import envs

    check_known(name, "Brax", envs._envs)
    return from_brax(envs.get_environment(name, **settings), time_limit=time_limit, reset_ratio=reset_ratio)


@checked
def from_brax(
    env: Any,
    *,
    time_limit: int | None,
    reset_ratio: int = 1,
    obs_key: str = "state",
    critic_obs_key: str | None = None,
    action_repeat: int = 1,
) -> Env:
    """Wrap an environment whose `reset(key)` and `step(state, action)` return a state with obs, reward and done.

    Args:
        env: a `brax.envs.Env`, or one of MuJoCo Playground, without wrappers.
        time_limit, reset_ratio: as in `auto_reset`; `time_limit` counts actions.
        obs_key: the entry that the policy sees, if observations are a dict.
        critic_obs_key: the entry that the critic sees, such as "privileged_state"; None: that of the policy.
        action_repeat: how many steps of `env` each action lasts; their rewards are summed.
    """
    names = ("reset", "step", "action_size")
    check_interface("from_brax", env, names, "make an environment with envs.make('brax:...')")
    check_count("from_brax", "action_repeat", action_repeat)

    def entry(obs: Any, argument: str, key: str) -> Array:
        if isinstance(obs, Mapping) and key in obs:
            return obs[key]
        has = f"have the entries {', '.join(obs)}" if isinstance(obs, Mapping) else "are a single array: leave it out"
        raise UserValueError(f"{argument}={key!r}: the observations {has}")

    def seen(state: Any) -> Any:
        obs = entry(state.obs, "obs_key", obs_key) if isinstance(state.obs, Mapping) else state.obs
        if critic_obs_key is None:
            return obs
        return Observation(obs, privileged=entry(state.obs, "critic_obs_key", critic_obs_key))

    def reset(key: Array) -> tuple[Any, Any]:
        state = env.reset(key)
        return state, seen(state)

    def step(key: Array, state: Any, action: Array) -> Step:
        state = env.step(state, action)
        reward = state.reward
        for _ in range(action_repeat - 1):
            after, over = env.step(state, action), state.done > 0
            reward += jnp.where(over, 0, after.reward)
            state = jax.tree.map(lambda x, y, over=over: jnp.where(over, x, y), state, after)
        return Step(state, seen(state), reward, state.done > 0)

    model = getattr(env, "mj_model", getattr(getattr(env, "sys", None), "mj_model", None))  # Playground's, or Brax's
    draw = None if model is None else mujoco_renderer(model, positions)

    obs, _, privileged = as_observation(jax.eval_shape(lambda: reset(jax.random.key(0))[1]))
    return auto_reset(
        reset,
        step,
        Box(obs.shape),
        Box((env.action_size,), -1.0, 1.0),
        time_limit=time_limit,
        reset_ratio=reset_ratio,
        render=draw,
        privileged_space=None if privileged is None else Box(privileged.shape),
    )


def positions(state: Any) -> dict[str, Array]:
    """Return the arrays that MuJoCo draws from a state of Playground or Brax, by their names in `mujoco.MjData`."""
    if hasattr(state, "pipeline_state"):  # Brax's
        return {"qpos": state.pipeline_state.q, "qvel": state.pipeline_state.qd}
    return {name: getattr(state.data, name) for name in ("qpos", "qvel", "mocap_pos", "mocap_quat")}
