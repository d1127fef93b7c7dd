"""Craftax and Craftax-Classic."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ._env import Array, Env, check_known
from ._episodes import Step, auto_reset
from ._gymnax import changed

NAMES = ("Craftax-Symbolic-v1", "Craftax-Pixels-v1", "Craftax-Classic-Symbolic-v1", "Craftax-Classic-Pixels-v1")


def make(name: str, *, reset_ratio: int = 16, **params: Any) -> Env:
    """Make one of the environments of Craftax; `params` are fields of its `EnvParams`, such as `max_timesteps=1000`.

    An episode that ends because of `max_timesteps` alone is truncated. `achievements` is the number of achievements
    that an episode unlocked. Generating a world takes much longer than a step, so by default N environments generate
    only N / 16 of them in a step (`reset_ratio` of `auto_reset`), as in the baselines of Craftax.
    """
    from craftax.craftax_env import make_craftax_env_from_name

    check_known(name, "Craftax", NAMES)
    env = make_craftax_env_from_name(name, auto_reset=False)
    env_params = changed(name, env.default_params, params)

    def reset(key: Array) -> tuple[Any, Array]:
        obs, state = env.reset(key, env_params)
        return state, obs

    def step(key: Array, state: Any, action: Array) -> Step:
        obs, state, reward, done, _ = env.step(key, state, action, env_params)
        terminated = env.is_terminal(state.replace(timestep=jnp.zeros_like(state.timestep)), env_params)
        info = {"achievements": jnp.sum(state.achievements)}
        return Step(state, obs, reward, terminated, done, info)

    spaces = env.observation_space(env_params), env.action_space(env_params)
    return auto_reset(reset, step, *spaces, reset_ratio=reset_ratio)
