"""Environments on the host by name: of Gymnasium, EnvPool and the Arcade Learning Environment (Atari)."""

from __future__ import annotations

import functools
import multiprocessing
import numbers
from collections.abc import Callable, Sequence
from typing import Any, Literal

import gymnasium
import jax
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import iterate

from .._base.errors import MissingPackage, UserValueError
from .._base.extras import require_package
from ..functional._arguments import check_as
from ._env import Env, check_known
from ._host import from_gymnasium
from ._rendering import renders
from ._spaces import leaf_spaces, map_space

Vectorization = Literal["sync", "async"]
START = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else None
"""How processes are started: JAX has threads, and a process forked from one with threads may deadlock."""


def make_gym(
    env_id: str,
    *,
    vectorization: Vectorization = "sync",
    wrappers: tuple[Callable[[Any], Any], ...] = (),
    info: str | tuple[str, ...] = (),
    action_mask: str | None = None,
    **kwargs: Any,
) -> Env:
    """Make a Gymnasium environment from its name, e.g. "HalfCheetah-v5", or "module:name" if a module registers it.

    `vectorization="async"` steps in processes, which import the script that makes them, so it must run its own code
    under `if __name__ == "__main__":`. `wrappers` are applied to each environment; `info` and `action_mask` are those
    of `from_gymnasium`, and `kwargs` those of `gymnasium.make`. Observations that are neither arrays nor integers, nor
    dicts or tuples of them, are flattened by `gymnasium.wrappers.FlattenObservation`.
    """
    check_as("make", "vectorization", vectorization, Vectorization)
    if ":" not in env_id:
        check_known(env_id, "Gymnasium", gymnasium.registry)
    limit = kwargs.get("max_episode_steps")
    if limit is not None and (not isinstance(limit, numbers.Integral) or (limit < 1 and limit != -1)):
        raise UserValueError(f"{env_id}: max_episode_steps must be a positive integer or -1 (no limit), got {limit!r}")
    kwargs = {**({"render_mode": "rgb_array"} if renders.get() else {}), **kwargs}
    spec = gymnasium.registry.get(env_id, env_id)  # other processes may not have registered the name

    def make_one() -> Any:
        env = functools.reduce(lambda env, wrap: wrap(env), wrappers, gymnasium.make(spec, **kwargs))
        known = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
        if all(isinstance(leaf, known) for leaf in leaf_spaces(env.observation_space)):
            return env
        return gymnasium.wrappers.FlattenObservation(env)

    def make_vector(num_envs: int) -> Any:
        try:
            if vectorization == "async":
                return AsyncVectorEnv([make_one] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP, context=START)
            return _SyncVectorEnv([make_one] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
        except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:  # it says what to install
            raise MissingPackage(f"{env_id}: {error}") from error
        except gymnasium.error.UnregisteredEnv as error:  # of a module that registers names
            raise UserValueError(f"{env_id}: {error}") from error

    return from_gymnasium(make_vector, info=info, action_mask=action_mask)


class _SyncVectorEnv(SyncVectorEnv):
    """Gymnasium's, but observations keep their dtypes, which `from_gymnasium` checks, and `info` is a dict for each.

    Merging four numbers of each of eight environments takes about 100 us.
    """

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, Any]:
        started = [env.reset(seed=seed + i, options=options) for i, env in enumerate(self.envs)]
        each, infos = zip(*started, strict=True)
        return self._stacked(each), infos

    def step(self, actions: Any) -> tuple[Any, ...]:
        each = []
        for env, action in zip(self.envs, iterate(self.action_space, actions), strict=True):
            obs, reward, terminated, truncated, info = env.step(action)
            if terminated or truncated:
                final = {"final_obs": obs, "final_info": info}
                obs, info = env.reset()
                info = info | final
            each.append((obs, reward, terminated, truncated, info))
        seen, *fields = zip(*each, strict=True)
        return self._stacked(seen), *fields

    def render(self) -> tuple[Any]:
        return (self.envs[0].render(),)  # the others would not be shown

    def _stacked(self, each: Sequence[Any]) -> Any:
        return map_space(lambda space, *x: np.asarray(x), self.single_observation_space, *each)


def make_envpool(env_id: str, *, info: str | tuple[str, ...] = (), **kwargs: Any) -> Env:
    """Make an EnvPool environment from its name, e.g. "HalfCheetah-v5"; its environments step in C++ threads.

    `info` is that of `from_gymnasium`; `kwargs` are for `envpool.make`, such as `num_threads`.
    """
    envpool = require_package("envpool", "envpool")
    check_known(env_id, "EnvPool", envpool.list_all_envs())
    return from_gymnasium(lambda num_envs: _EnvPool(envpool, env_id, num_envs, kwargs), info=info)


class _EnvPool:
    """An EnvPool as a vector environment that resets where an episode ended, and takes a seed when it resets."""

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
        obs, *fields, info = self.envs.step(action)
        order = np.argsort(info["env_id"])
        obs, reward, terminated, truncated = jax.tree.map(lambda x: x[order], (obs, *fields))
        info = {name: x[order] for name, x in info.items() if np.shape(x)[:1] == order.shape}
        if len(over := np.flatnonzero(terminated | truncated)):
            final = [jax.tree.map(lambda x, i=i: x[i], obs) for i in range(self.num_envs)]
            info = {**info, "final_obs": final, "final_info": info}
            first, began = self.envs.reset(over)  # without this call, the next step would reset

            def begin(x: np.ndarray, new: np.ndarray) -> np.ndarray:
                x = x.copy()
                x[began["env_id"]] = new
                return x

            obs = jax.tree.map(begin, obs, first)
        return obs, reward, terminated, truncated, info

    def close(self) -> None:
        self.envs.close()


def make_ale(
    game: str,
    *,
    episodic_life: bool = False,
    stack_num: int = 4,
    use_fire_reset: bool = True,
    **kwargs: Any,
) -> Env:
    """Make an Atari game from its name in `ale_py`, e.g. "breakout", with the usual preprocessing, in C++ threads.

    Each action is repeated for four frames, and the pixelwise maximum of the last two is kept, scaled to 84 x 84 gray
    pixels; the last `stack_num` are stacked. A game begins with up to 29 no-ops. If it has the action FIRE, then FIRE
    and the action after it are played at the start of the game and, with `episodic_life`, of each further life. A lost
    life then terminates an episode, whose return remains that of the whole game. Rewards are those of the game: clip
    them with `clip_reward`. `kwargs` are for `ale_py.vector_env.AtariVectorEnv`, such as `repeat_action_probability`.

    Reference: Mnih et al. 2015, doi:10.1038/nature14236, Methods; Machado et al. 2018, arXiv:1709.06009; Huang et al.
    2022, The 37 Implementation Details of PPO, details 1 to 9 of Atari.
    """
    roms, vector = require_package("ale_py.roms", "atari"), require_package("ale_py.vector_env", "atari")
    check_known(game, "Atari", roms.get_all_rom_ids())
    mode = {"autoreset_mode": "NextStep", "reward_clipping": False, "stack_num": 1, "use_fire_reset": False}

    def make_games(num_envs: int) -> _Games:
        games = [vector.AtariVectorEnv(game, 1, **mode, **kwargs) for _ in range(num_envs)]
        return _Games(games, stack_num, episodic_life, use_fire_reset)

    return from_gymnasium(make_games)


class _Games:
    """Atari games as one vector environment, in which a lost life may terminate an episode while the game continues.

    Each game is a separate `AtariVectorEnv`, which steps in its own C++ thread: when a life begins in one game, a few
    frames are played in it while the others wait.
    """

    def __init__(self, games: list[Any], stack_num: int, episodic_life: bool, use_fire_reset: bool) -> None:
        self.games, self.num_envs, self.episodic_life = games, len(games), episodic_life
        self.metadata, self.render_mode = {"autoreset_mode": AutoresetMode.SAME_STEP}, "rgb_array"
        self.single_action_space = games[0].single_action_space
        shape = (stack_num, *games[0].single_observation_space.shape[1:])
        self.single_observation_space = spaces.Box(0, 255, shape, np.uint8)
        self.obs = np.zeros((self.num_envs, *shape), np.uint8)
        self.lives, self.ended = np.zeros(self.num_envs, int), np.zeros(self.num_envs, bool)
        actions = [action.name for action in games[0].ale.get_action_set()]
        # Stable-Baselines3 and CleanRL press FIRE, and then the action after it.
        self.first_actions = (1, 2) if use_fire_reset and "FIRE" in actions[1:2] else ()

    def reset(self, seed: int) -> tuple[np.ndarray, dict[str, Any]]:
        for index in range(self.num_envs):
            self._new_game(index, seed + index)
            self._begin(index)
        return self.obs, {}

    def step(self, action: np.ndarray) -> tuple[Any, ...]:
        for game, one in zip(self.games, action, strict=True):
            game.send(one[None])
        lives = self.lives.copy()
        reward, terminated, truncated = map(np.array, zip(*map(self._receive, range(self.num_envs)), strict=True))
        self.ended = ended = terminated | truncated  # of games, and not only of lives
        if self.episodic_life:  # some games continue for a while without a life
            terminated |= (self.lives > 0) & (self.lives < lives)
        final_obs = self.obs.copy()
        for index in map(int, np.flatnonzero(terminated | truncated)):
            if ended[index]:
                self._new_game(index)
                self._begin(index)
            else:
                more, ended[index] = self._begin(index, life=True)
                reward[index] += more
        return self.obs, reward, terminated, truncated & ~terminated, {"final_obs": final_obs}

    def _receive(self, index: int) -> tuple[Any, Any, Any]:
        """Stack the frame that a game's step returns; return reward, terminated and truncated."""
        frame, reward, terminated, truncated, info = self.games[index].recv()
        self.obs[index] = np.concatenate([self.obs[index, 1:], frame[0]])
        self.lives[index] = info["lives"][0]
        return reward[0], terminated[0], truncated[0]

    def _new_game(self, index: int, seed: int | None = None) -> None:
        frame, info = self.games[index].reset(seed=seed)
        self.obs[index], self.lives[index] = frame[0], info["lives"][0]

    def _begin(self, index: int, life: bool = False) -> tuple[int, bool]:
        """Play the first frames of a game or of a further life; return their reward, and whether the game is over."""
        total, over = 0, False
        for action in (0, *self.first_actions) if life else self.first_actions:
            self.games[index].ale.send(np.array([action], np.int32), np.ones(1, np.float32))
            reward, terminated, truncated = self._receive(index)
            total += reward
            if terminated or truncated:
                over = True
                self._new_game(index)
                if life:
                    self._begin(index)
                break
        self.obs[index] = self.obs[index, -1]
        return total, over

    def render(self) -> list[np.ndarray]:
        """Draw the latest frame that the policy sees, because the games render nothing else."""
        gray = np.repeat(np.repeat(self.obs[0, -1], 4, 0), 4, 1)
        return [np.stack([gray] * 3, axis=-1)]

    def close(self) -> None:
        for game in self.games:
            game.close()
