"""The environments of XLand-MiniGrid, with its ports of MiniGrid."""

from __future__ import annotations

from typing import Any

from .._base.errors import UserValueError
from ._env import Array, Box, Discrete, Env, check_known
from ._episodes import Step, auto_reset
from ._gymnax import changed


def make(name: str, *, reset_ratio: int = 1, **params: Any) -> Env:
    """Make one of `xminigrid.registered_environments()`; `params` are fields of its `EnvParams`, such as `view_size=5`.

    Observations are the grid in view, `[V, V, 2]`: the number of each tile and of its color. An episode that ends with
    a discount of 0 is terminated, and otherwise truncated.
    """
    import xminigrid

    check_known(name, "XLand-MiniGrid", xminigrid.registered_environments())
    env, env_params = xminigrid.make(name)
    env_params = changed(name, env_params, params)
    shape = env.observation_shape(env_params)
    if not isinstance(shape, tuple):
        raise UserValueError(f"{name} has observations {shape}, but this adapter is for arrays: write one for it")

    def reset(key: Array) -> tuple[Any, Array]:
        timestep = env.reset(env_params, key)
        return timestep, timestep.observation

    def step(key: Array, timestep: Any, action: Array) -> Step:
        timestep = env.step(env_params, timestep, action)
        over = timestep.last()
        return Step(timestep, timestep.observation, timestep.reward, over & (timestep.discount == 0), over)

    return auto_reset(reset, step, Box(shape), Discrete(env.num_actions(env_params)), reset_ratio=reset_ratio)
