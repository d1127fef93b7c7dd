"""gymnax environments (1.0 and later), by name."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._errors import UserTypeError, UserValueError
from .._extras import require_package
from .._trees import without_weak_types
from ._env import Array, Env, Transition, unknown_env
from ._rendering import gymnax_renderer


class GymnaxState(NamedTuple):
    """State of N gymnax environments, with the return and the length of their episodes so far."""

    inner: Any
    episode_return: Array
    episode_length: Array


def make(env_id: str, **params: Any) -> Env:
    """Make a gymnax environment from its name, with truncation separate from termination.

    Args:
        env_id: one of `gymnax.registered_envs`, e.g. "CartPole-v1".
        **params: fields of the environment's `EnvParams` to change, e.g. `max_steps_in_episode=200`.

    Raises:
        ValueError: unknown name (similar names are listed) or parameter. MissingPackage: gymnax is not installed.
    """
    gymnax = require_package("gymnax", "envs")
    if env_id not in gymnax.registered_envs:
        raise unknown_env(env_id, "gymnax", gymnax.registered_envs)
    inner, env_params = gymnax.make(env_id)
    unknown = [name for name in params if not hasattr(env_params, name)]
    if unknown:
        raise UserValueError(f"{env_id} has no parameter {unknown[0]!r}; it has {', '.join(vars(env_params))}")
    return from_gymnax(inner, env_params.replace(**params))


def from_gymnax(env: Any, env_params: Any = None) -> Env:
    """Wrap an environment with gymnax's interface (six-tuple `step`, `info["final_observation"]`).

    Args:
        env: the environment.
        env_params: its parameters; None: its `default_params`.
    """
    for name in ("default_params", "reset", "step", "observation_space", "action_space"):
        if not hasattr(env, name):
            raise UserTypeError(
                f"from_gymnax: {env!r} has no {name}, so it is not a gymnax environment: make one with envs.make(...), "
                "or write an envs.Env"
            )
    env_params = env.default_params if env_params is None else env_params
    step_all = jax.vmap(env.step, in_axes=(0, 0, 0, None))

    def reset(key: Array, num_envs: int) -> tuple[GymnaxState, Any]:
        obs, inner = jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(key, num_envs), env_params)
        return GymnaxState(without_weak_types(inner), jnp.zeros(num_envs), jnp.zeros(num_envs, jnp.int32)), obs

    def step(key: Array, state: GymnaxState, action: Any) -> tuple[GymnaxState, Transition]:
        num_envs = state.episode_length.shape[0]
        keys = jax.random.split(key, num_envs)
        stepped = step_all(keys, state.inner, action, env_params)
        if len(stepped) != 6 or "final_observation" not in stepped[-1]:
            raise UserTypeError(
                "from_gymnax: step must return what gymnax 1.0 does, (obs, state, reward, terminated, truncated, info) "
                f'with info["final_observation"], and it returned {len(stepped)} items: update the environment'
            )
        obs, inner, reward, terminated, truncated, info = stepped
        reward = reward.astype(jnp.float32)
        collected, length = state.episode_return + reward, state.episode_length + 1
        done = terminated | truncated
        state = GymnaxState(without_weak_types(inner), jnp.where(done, 0, collected), jnp.where(done, 0, length))
        final_obs = info["final_observation"]
        return state, Transition(obs, reward, terminated, truncated, final_obs, collected, length)

    render = gymnax_renderer(env, env_params)
    wrapped = Env(
        reset,
        step,
        env.observation_space(env_params),
        env.action_space(env_params),
        lambda state: wrapped,
        render=None if render is None else lambda state: render(state.inner),
    )
    return wrapped
