"""gymnax environments (1.0 and later), by name."""

from __future__ import annotations

from numbers import Number
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base.errors import UserTypeError, UserValueError
from .._base.extras import require_package
from ._env import Array, Env, Transition, check_interface, check_known
from ._episodes import EpisodeState
from ._rendering import gymnax_renderer


def make(name: str, **params: Any) -> Env:
    """Make one of `gymnax.registered_envs`; `params` are fields of its `EnvParams`, e.g. `max_steps_in_episode=200`."""
    gymnax = require_package("gymnax", "envs")
    check_known(name, "gymnax", gymnax.registered_envs)
    inner, env_params = gymnax.make(name)
    return from_gymnax(inner, changed(name, env_params, params))


def changed(name: str, env_params: Any, params: dict[str, Any]) -> Any:
    """Return the parameters of an environment (a flax dataclass) with some of them changed."""
    unknown = [param for param in params if not hasattr(env_params, param)]
    if unknown:
        raise UserValueError(f"{name} has no parameter {unknown[0]!r}; it has {', '.join(vars(env_params))}")
    for param, value in params.items():
        default = getattr(env_params, param)
        if isinstance(default, (int, float)) and not isinstance(value, (Number, np.ndarray, jax.Array)):
            raise UserTypeError(f"{name}: {param} must be a number, such as {default}, got {value!r}")
        if param == "max_steps_in_episode" and isinstance(value, (int, float)) and (value < 1 or value != int(value)):
            raise UserValueError(f"{name}: {param} must be a whole number of at least 1, got {value!r}")
    return env_params.replace(**params)


def from_gymnax(env: Any, env_params: Any = None) -> Env:
    """Wrap an environment with gymnax's interface; `env_params` are its parameters, None its `default_params`."""
    names = ("default_params", "reset", "step", "observation_space", "action_space")
    check_interface("from_gymnax", env, names, "make a gymnax environment with envs.make(...)")
    env_params = env.default_params if env_params is None else env_params

    def reset(key: Array, num_envs: int) -> tuple[EpisodeState, Any]:
        obs, inner = jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(key, num_envs), env_params)
        return EpisodeState.begin(inner, num_envs), obs

    def step(key: Array, state: EpisodeState, action: Any) -> tuple[EpisodeState, Transition]:
        keys = jax.random.split(key, state.episode_length.shape[0])
        stepped = jax.vmap(env.step, in_axes=(0, 0, 0, None))(keys, state.inner, action, env_params)
        if len(stepped) != 6 or "final_observation" not in stepped[-1]:
            raise UserTypeError(
                "from_gymnax: step must return what gymnax 1.0 does, (obs, state, reward, terminated, truncated, info) "
                f'with info["final_observation"], but it returned {len(stepped)} items: update the environment'
            )
        obs, inner, reward, terminated, truncated, info = stepped
        ends = {"terminated": terminated, "truncated": truncated, "final_obs": info["final_observation"]}
        return state.advance(inner, terminated | truncated, reward.astype(jnp.float32), obs=obs, **ends)

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
