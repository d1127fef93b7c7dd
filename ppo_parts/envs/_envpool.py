"""EnvPool's environments, which step in C++ threads."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .._base.extras import require_package
from ._env import Env, check_known
from ._host import from_gymnasium


def make(env_id: str, *, info: str | tuple[str, ...] = (), timeout: float | None = None, **kwargs: Any) -> Env:
    """Make an EnvPool environment from its name, e.g. "HalfCheetah-v5"; its environments step in C++ threads.

    `info` and `timeout` are those of `from_gymnasium`; `kwargs` are for `envpool.make`, such as `num_threads`.
    """
    envpool = require_package("envpool", "envpool")
    check_known(env_id, "EnvPool", envpool.list_all_envs())
    return from_gymnasium(lambda num_envs: _EnvPool(envpool, env_id, num_envs, kwargs), info=info, timeout=timeout)


class _EnvPool:
    """An EnvPool as a vector environment that resets where an episode ended, and takes a seed when it resets."""

    def __init__(self, envpool: Any, env_id: str, num_envs: int, kwargs: dict[str, Any]) -> None:
        from gymnasium.vector import AutoresetMode

        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.num_envs = num_envs
        self.make = functools.partial(envpool.make, env_id, env_type="gymnasium", num_envs=num_envs, **kwargs)
        self.envs = self.make(seed=0)
        self.single_observation_space = self.envs.observation_space
        self.single_action_space = self.envs.action_space

    def reset(self, seed: int) -> tuple[Any, Any]:
        self.envs.close()
        self.envs = self.make(seed=seed)
        return self.envs.reset()

    def step(self, action: np.ndarray) -> tuple[Any, ...]:
        *returned, info = self.envs.step(action)
        order = np.argsort(info["env_id"])
        obs, reward, terminated, truncated = (x[order] for x in returned)
        info = {name: x[order] for name, x in info.items() if np.shape(x)[:1] == order.shape}
        if len(over := np.flatnonzero(terminated | truncated)):
            info = {**info, "final_obs": obs, "final_info": info}
            first, began = self.envs.reset(over)  # ordered by "env_id"; without this call, the next step would reset
            obs = obs.copy()
            obs[began["env_id"]] = first
        return obs, reward, terminated, truncated, info

    def close(self) -> None:
        self.envs.close()
