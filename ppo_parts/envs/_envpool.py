"""EnvPool's environments, which step in C++ threads."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._base.extras import require_package
from ._env import Env, check_known
from ._host import from_gymnasium


def make(env_id: str, *, info: str | tuple[str, ...] = (), timeout: float | None = None, **kwargs: Any) -> Env:
    """Make an EnvPool environment from its name, e.g. "HalfCheetah-v5"; its environments step in C++ threads.

    Args:
        env_id: a name that EnvPool knows.
        info, timeout: see `from_gymnasium`.
        **kwargs: for `envpool.make`, such as `num_threads`.

    Raises:
        UserValueError: unknown name (similar names are listed). MissingPackage: EnvPool is not installed.
    """
    envpool = require_package("envpool", "envpool")
    check_known(env_id, "EnvPool", envpool.list_all_envs())
    return from_gymnasium(lambda num_envs: _EnvPool(envpool, env_id, num_envs, kwargs), info=info, timeout=timeout)


class _EnvPool:
    """An EnvPool as a vector environment that resets the environments of a mask, and takes seeds when it resets."""

    metadata: dict[str, Any]

    def __init__(self, envpool: Any, env_id: str, num_envs: int, kwargs: dict[str, Any]) -> None:
        from gymnasium.vector import AutoresetMode

        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED}
        self.num_envs = num_envs

        def make(seed: int) -> Any:
            return envpool.make(env_id, env_type="gymnasium", num_envs=num_envs, seed=seed, **kwargs)

        self.make, self.envs, self.obs = make, make(0), np.zeros(0)
        self.single_observation_space = self.envs.observation_space
        self.single_action_space = self.envs.action_space

    def reset(self, seed: int = 0, options: Any = None) -> tuple[Any, Any]:
        if options is None:
            self.envs.close()
            self.envs = self.make(seed)
            self.obs, info = self.envs.reset()
            return self.obs, info
        where = np.flatnonzero(options["reset_mask"])
        obs, info = self.envs.reset(where)  # ordered by info["env_id"]; without this call, the next step would reset
        self.obs = self.obs.copy()
        self.obs[info["env_id"]] = obs
        return self.obs, info

    def step(self, action: np.ndarray) -> tuple[Any, ...]:
        returned = self.envs.step(action)
        order = np.argsort(returned[4]["env_id"])
        self.obs = returned[0][order]
        info = {name: x[order] for name, x in returned[4].items() if np.shape(x)[:1] == order.shape}
        return self.obs, *(x[order] for x in returned[1:4]), info

    def close(self) -> None:
        self.envs.close()
