"""Environments of Gymnasium and EnvPool by name; they step on the host."""

from __future__ import annotations

import contextlib
import copy
import functools
import multiprocessing
import numbers
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, Literal

import gymnasium
import jax
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import iterate

from .._base.extras import require_package
from ..errors import MissingPackage, UserValueError
from ..functional._arguments import check_as
from ._env import Env, check_items, check_known
from ._host import from_gymnasium
from ._rendering import renders
from ._spaces import list_spaces, map_space
from ._vector import GYMNASIUM, RESET, STEP

Vectorization = Literal["sync", "async"]
START_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else None
"""How processes are started. JAX has threads, and a fork of a process with threads may deadlock."""


def make_gym(
    env_id: str,
    *,
    vectorization: Vectorization = "sync",
    wrappers: tuple[Callable[[Any], Any], ...] = (),
    info: str | tuple[str, ...] = (),
    action_mask: str | None = None,
    **kwargs: Any,
) -> Env:
    """Make a Gymnasium environment from its name, such as "HalfCheetah-v5", or "module:name" if a module registers it.

    With `vectorization="async"`, environments step in worker processes that import the main script, so guard its code
    with `if __name__ == "__main__":`. `wrappers` are applied to each environment. `info` and `action_mask` are
    arguments of `from_gymnasium`, and `kwargs` of `gymnasium.make`. Observations other than arrays, integers, and dicts
    or tuples of these are flattened by `gymnasium.wrappers.FlattenObservation`.
    """
    check_as("make", "vectorization", vectorization, Vectorization)
    if ":" not in env_id:
        check_known(env_id, "Gymnasium", gymnasium.registry)
    limit = kwargs.get("max_episode_steps")
    if limit is not None and (not isinstance(limit, numbers.Integral) or (limit < 1 and limit != -1)):
        raise UserValueError(f"{env_id}: max_episode_steps must be a positive integer or -1 (no limit), got {limit!r}")
    kwargs = {**({"render_mode": "rgb_array"} if renders.get() else {}), **kwargs}
    spec, creator = gymnasium.registry.get(env_id, env_id), os.getpid()  # worker processes may not know the name

    def make_one() -> Any:
        # A terminal signals the workers, too, but the run must save before they end.
        if vectorization == "async" and os.getpid() != creator:
            for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
                if (number := getattr(signal, name, None)) is not None:  # Windows has only the first
                    signal.signal(number, signal.SIG_IGN)
        env = functools.reduce(lambda env, wrap: wrap(env), wrappers, gymnasium.make(spec, **kwargs))
        known = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
        if all(isinstance(leaf, known) for leaf in list_spaces(env.observation_space)):
            return _CopyFinalObs(env, env_id)
        return _CopyFinalObs(gymnasium.wrappers.FlattenObservation(env), env_id)

    def make_vector(num_envs: int) -> Any:
        try:
            mode = AutoresetMode.SAME_STEP
            if vectorization == "async":
                return _AsyncVectorEnv([make_one] * num_envs, autoreset_mode=mode, context=START_METHOD)
            return _SyncVectorEnv([make_one] * num_envs, autoreset_mode=mode)
        except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:  # it says what to install
            raise MissingPackage(f"{env_id}: {error}") from error
        except gymnasium.error.UnregisteredEnv as error:  # raised for a name in a module
            raise UserValueError(f"{env_id}: {error}") from error

    return from_gymnasium(make_vector, info=info, action_mask=action_mask)


class _AsyncVectorEnv(AsyncVectorEnv):
    """Gymnasium's class, but silent if Python has closed the pipes first, as its garbage collection may do."""

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            super().__del__()


class _CopyFinalObs(gymnasium.Wrapper):
    """Checks results, and copies what ends an episode, because `reset` may reuse arrays and the dict."""

    def __init__(self, env: Any, env_id: str) -> None:
        super().__init__(env)
        self.check = functools.partial(check_items, env_id, remedy=GYMNASIUM)

    def reset(self, **kwargs: Any) -> tuple[Any, ...]:
        return self.check("reset", self.env.reset(**kwargs), RESET)

    def step(self, action: Any) -> tuple[Any, ...]:
        obs, reward, terminated, truncated, info = self.check("step", self.env.step(action), STEP)
        if terminated or truncated:
            obs, info = copy.deepcopy(obs), {name: copy.copy(x) for name, x in info.items()}
        return obs, reward, terminated, truncated, info


class _SyncVectorEnv(SyncVectorEnv):
    """Gymnasium's class, but observations keep their dtypes, which `from_gymnasium` checks, and `info` has lists.

    Gymnasium makes an array for each entry, which takes about 100 us for four numbers of each of eight environments.
    """

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, Any]:
        started = [env.reset(seed=seed + i, options=options) for i, env in enumerate(self.envs)]
        each, infos = zip(*started, strict=True)
        return self._stacked(each), _merged(infos)

    def step(self, actions: Any) -> tuple[Any, ...]:
        each = []
        for env, action in zip(self.envs, iterate(self.action_space, actions), strict=True):
            obs, reward, terminated, truncated, info = env.step(action)
            final_obs, final_info = None, {}
            if terminated or truncated:
                final_obs, final_info = obs, info
                obs, info = env.reset()
            each.append((obs, reward, terminated, truncated, info, final_obs, final_info))
        seen, *fields, infos, final_obs, final_infos = zip(*each, strict=True)
        final = {"final_obs": final_obs, "final_info": _merged(final_infos)}
        return self._stacked(seen), *fields, _merged(infos) | final

    def render(self) -> tuple[Any]:
        return (self.envs[0].render(),)  # only the first one is shown

    def _stacked(self, each: Sequence[Any]) -> Any:
        return map_space(lambda space, *x: np.asarray(x), self.single_observation_space, *each)


def _merged(infos: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the entries of all environments by name; None marks a missing one. `_x` would mean the mask of `x`."""
    names = {name for one in infos for name in one if not name.startswith("_")}
    return {name: [one.get(name) for one in infos] for name in names}


def make_envpool(env_id: str, *, info: str | tuple[str, ...] = (), **kwargs: Any) -> Env:
    """Make an EnvPool environment, which steps in C++ threads, from its name, such as "HalfCheetah-v5".

    `info` is an argument of `from_gymnasium`; `kwargs` are arguments of `envpool.make`, such as `num_threads`.
    """
    envpool = require_package("envpool", "envpool")
    check_known(env_id, "EnvPool", envpool.list_all_envs())
    return from_gymnasium(lambda num_envs: _EnvPool(envpool, env_id, num_envs, kwargs), info=info)


class _EnvPool:
    """An EnvPool as a vector environment that resets where an episode ended, and whose `reset` takes a seed."""

    def __init__(self, envpool: Any, env_id: str, num_envs: int, kwargs: dict[str, Any]) -> None:
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
        obs, reward, terminated, truncated, info = self.envs.step(action)  # in order, because all are stepped
        info = {name: x for name, x in info.items() if np.shape(x)[:1] == (self.num_envs,)}
        if len(over := np.flatnonzero(terminated | truncated)):
            final = [jax.tree.map(lambda x, i=i: x[i], obs) for i in range(self.num_envs)]
            info = {**info, "final_obs": final, "final_info": info}
            first, began = self.envs.reset(over)  # otherwise the next step would reset
            obs = jax.tree.map(np.copy, obs)
            for x, new in zip(jax.tree.leaves(obs), jax.tree.leaves(first), strict=True):
                x[began["env_id"]] = new
        return obs, reward, terminated, truncated, info

    def close(self) -> None:
        self.envs.close()
