"""Atari games of the Arcade Learning Environment by name; they step on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from .._base.extras import require_package
from ._env import Env, check_known
from ._host import from_gymnasium


def make_ale(
    game: str, *, episodic_life: bool = False, stack_num: int = 4, use_fire_reset: bool = True, **kwargs: Any
) -> Env:
    """Make an Atari game from its name in `ale_py`, such as "breakout", with the usual preprocessing.

    Games step in C++ threads. Each action is repeated for four frames; the pixelwise maximum of the last two is scaled
    to 84 x 84 gray pixels, and the last `stack_num` results are stacked. A game begins with up to 29 no-ops. If it has
    the action FIRE, then FIRE and the action after it are played at the start of the game. With `episodic_life`, they
    are also played at the start of a life, and a lost life terminates an episode, whose return is still the game's.
    `kwargs` are arguments of `ale_py.vector_env.AtariVectorEnv`, such as `repeat_action_probability`.

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

    Each game is a separate `AtariVectorEnv` that steps in its own C++ thread, because when a life begins in one game, a
    few frames are played in it while the others wait.
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
        # Like Stable-Baselines3 and CleanRL, play FIRE and then the action after it.
        self.first_actions = (1, 2) if use_fire_reset and "FIRE" in actions[1:2] else ()

    def reset(self, seed: int) -> tuple[np.ndarray, dict[str, Any]]:
        for index in range(self.num_envs):
            self._begin(index, seed=seed + index)
        return self.obs, {}

    def step(self, action: np.ndarray) -> tuple[Any, ...]:
        for game, one in zip(self.games, action, strict=True):
            game.send(one[None])
        lives = self.lives.copy()
        reward, terminated, truncated = map(np.array, zip(*map(self._receive, range(self.num_envs)), strict=True))
        self.ended = ended = terminated | truncated  # ends of games, not of lives
        if self.episodic_life:  # some games continue for a while with no lives left
            terminated |= (self.lives > 0) & (self.lives < lives)
        final_obs = self.obs.copy()
        for index in map(int, np.flatnonzero(terminated | truncated)):
            more, over = self._begin(index, life=not ended[index])
            if not ended[index]:
                reward[index] += more
                ended[index] = over
        return self.obs, reward, terminated, truncated & ~terminated, {"final_obs": final_obs}

    def _receive(self, index: int) -> tuple[Any, Any, Any]:
        """Stack the frame from a game's step; return reward, terminated and truncated."""
        frame, reward, terminated, truncated, info = self.games[index].recv()
        self.obs[index] = np.concatenate([self.obs[index, 1:], frame[0]])
        self.lives[index] = info["lives"][0]
        return reward[0], terminated[0], truncated[0]

    def _begin(self, index: int, life: bool = False, seed: int | None = None) -> tuple[int, bool]:
        """Begin a game or a new life; return the reward of its first frames, and whether the game ended in them."""
        if not life:
            frame, info = self.games[index].reset(seed=seed)
            self.obs[index], self.lives[index] = frame[0], info["lives"][0]
        total = 0
        for action in (0, *self.first_actions) if life else self.first_actions:
            self.games[index].ale.send(np.array([action], np.int32), np.ones(1, np.float32))
            reward, terminated, truncated = self._receive(index)
            total += reward
            if terminated or truncated:
                self._begin(index)
                return total, True
        self.obs[index] = self.obs[index, -1]
        return total, False

    def render(self) -> list[np.ndarray]:
        """Return the latest frame that the policy sees, because the games render nothing else."""
        gray = np.repeat(np.repeat(self.obs[0, -1], 4, 0), 4, 1)
        return [np.stack([gray] * 3, axis=-1)]

    def close(self) -> None:
        for game in self.games:
            game.close()
