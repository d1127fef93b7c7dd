"""Gymnasium environments by name."""

from __future__ import annotations

import functools
import multiprocessing
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from .._base.doors import checked
from .._base.errors import MissingPackage, UserValueError
from .._base.extras import require_package
from ._env import Env, check_known
from ._host import from_gymnasium
from ._rendering import render_settings
from ._spaces import is_tree, leaf_spaces, map_space

Vectorization = Literal["sync", "async"]
START = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else None
"""How processes are started: JAX has threads, and a process forked from one with threads may deadlock."""


@checked
def make(
    env_id: str,
    *,
    vectorization: Vectorization = "sync",
    wrappers: tuple[Callable[[Any], Any], ...] = (),
    info: str | tuple[str, ...] = (),
    action_mask: str | None = None,
    timeout: float | None = None,
    **kwargs: Any,
) -> Env:
    """Make a Gymnasium environment from its name, e.g. "HalfCheetah-v5", or "module:name" if a module registers it.

    Observations that are neither arrays, nor dicts or tuples of arrays and integers, are flattened by
    `gymnasium.wrappers.FlattenObservation`: an integer becomes a one-hot vector, for example.

    Args:
        env_id: the name.
        vectorization: "sync" steps one environment after another; "async" in processes. A script that makes them must
            run its own code under `if __name__ == "__main__":`, because a new process imports the script.
        wrappers: applied to each environment, such as Gymnasium's own.
        info, action_mask, timeout: see `from_gymnasium`.
        **kwargs: for `gymnasium.make`.
    """
    gymnasium = require_package("gymnasium", "gymnasium")
    if ":" not in env_id:
        check_known(env_id, "Gymnasium", gymnasium.registry)
    limit = kwargs.get("max_episode_steps")
    if limit is not None and (not isinstance(limit, numbers.Integral) or (limit < 1 and limit != -1)):
        raise UserValueError(
            f"{env_id}: max_episode_steps must be a positive integer, or -1 for episodes without a limit, got {limit!r}"
        )
    kwargs = {**render_settings(), **kwargs}
    spec = gymnasium.registry.get(env_id, env_id)  # other processes may not have registered the name

    def make_one() -> Any:
        env = functools.reduce(lambda env, wrap: wrap(env), wrappers, gymnasium.make(spec, **kwargs))
        space, spaces = env.observation_space, gymnasium.spaces
        known = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary) if is_tree(space) else ()
        if all(isinstance(leaf, known or spaces.Box) for leaf in leaf_spaces(space)):
            return env
        return gymnasium.wrappers.FlattenObservation(env)

    def make_vector(num_envs: int) -> Any:
        try:
            if vectorization == "async":
                mode = gymnasium.vector.AutoresetMode.SAME_STEP
                return gymnasium.vector.AsyncVectorEnv([make_one] * num_envs, autoreset_mode=mode, context=START)
            return _Environments(make_one, num_envs)
        except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:  # it says what to install
            raise MissingPackage(f"{env_id}: {error}") from error
        except gymnasium.error.UnregisteredEnv as error:  # of a module that registers names
            raise UserValueError(f"{env_id}: {error}") from error

    return from_gymnasium(make_vector, info=info, action_mask=action_mask, timeout=timeout)


class _Environments:
    """Environments that step one after another, as a vector environment.

    Gymnasium's `SyncVectorEnv` also merges all that they return as `info`: an eighth of a step of HalfCheetah-v5.
    """

    def __init__(self, make: Callable[[], Any], num_envs: int) -> None:
        from gymnasium.vector import AutoresetMode

        self.num_envs, self.envs = num_envs, [make() for _ in range(num_envs)]
        self.metadata = {**self.envs[0].metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self.render_mode = self.envs[0].render_mode
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space

    def reset(self, seed: int) -> tuple[np.ndarray, _Infos]:
        obs, infos = zip(*(env.reset(seed=seed + i) for i, env in enumerate(self.envs)), strict=True)
        return self._stacked(obs), _Infos(infos)

    def _stacked(self, obs: Sequence[Any]) -> Any:
        return map_space(lambda space, *x: np.asarray(x), self.single_observation_space, *obs)

    def step(self, action: Any) -> tuple[Any, ...]:
        rows = _rows(self.single_action_space, action, self.num_envs)
        returned = [env.step(one) for env, one in zip(self.envs, rows, strict=True)]
        each, reward, terminated, truncated, infos = map(list, zip(*returned, strict=True))
        obs = self._stacked(each)
        over = [i for i in range(self.num_envs) if terminated[i] or truncated[i]]
        if not over:
            return obs, reward, terminated, truncated, _Infos(infos)
        final_obs = _rows(self.single_observation_space, obs, self.num_envs)
        final = {"final_obs": final_obs, "final_info": _Infos(infos.copy())}
        for i in over:
            each[i], infos[i] = self.envs[i].reset()
        return self._stacked(each), reward, terminated, truncated, _Infos(infos, final)

    def render(self) -> tuple[Any, ...]:
        return tuple(env.render() for env in self.envs[:1])

    def close(self) -> None:
        for env in self.envs:
            env.close()


def _rows(space: Any, x: Any, number: int) -> Any:
    """Return the element of each environment, of elements that are stacked."""
    if not is_tree(space):
        return x
    return [map_space(lambda space, leaf, i=i: leaf[i], space, x) for i in range(number)]


class _Infos(Mapping[str, Any]):
    """The `info` of several environments: a list for each name, with NaN where one does not report it."""

    def __init__(self, infos: Sequence[dict[str, Any]], final: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.infos, self.final = infos, final

    def __getitem__(self, name: str) -> Any:
        if name in self.final or not any(name in info for info in self.infos):
            return self.final[name]
        return [info.get(name, np.nan) for info in self.infos]

    def __iter__(self) -> Iterator[str]:
        return iter({name for info in (self.final, *self.infos) for name in info})

    def __len__(self) -> int:
        return len(set(self))
