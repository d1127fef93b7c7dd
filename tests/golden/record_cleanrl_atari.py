"""Record CleanRL's `ppo_atari.py`: the script runs as it is, with its own wrappers, on a small game made here.

Run it where the packages that the script imports are installed, with a checkout of the commit:

    pip install torch==2.13.0 numpy==1.26.4 gymnasium==0.29.1 tyro==1.0.17 opencv-python-headless==4.11.0.86
    PYTHONPATH=path/to/cleanrl python tests/golden/record_cleanrl_atari.py --source path/to/cleanrl/cleanrl --seed 0

The network has 1.7 million parameters. They begin with numbers that the test draws again, and are not recorded.
Everything is computed in float64: in float32, rounding changes the sign of the input of a ReLU now and then, and Adam
enlarges the small differences of the gradients.
"""

import itertools
from pathlib import Path
from typing import Any

import _recorder as recorder
import gymnasium as gym
import numpy as np
import record_cleanrl
import torch

CASE = "f_atari"
SIZES = {"num_envs": 2, "num_steps": 16, "total_timesteps": 64, "num_minibatches": 2, "update_epochs": 2}
OPTIONS = {"env_id": "SmallGame-v0", "learning_rate": 0.001, **SIZES}


class SmallGame(gym.Env):
    """A square that moves, in a game with three lives of 30 frames, and rewards that have nothing to do with it."""

    observation_space = gym.spaces.Box(0, 255, (210, 160, 3), np.uint8)
    action_space = gym.spaces.Discrete(4)

    def __init__(self) -> None:
        self.ale = self  # the wrappers ask `env.unwrapped.ale.lives()`
        self.frame = 0

    def lives(self) -> int:
        return 3 - self.frame // 30

    def get_action_meanings(self) -> list[str]:
        return ["NOOP", "FIRE", "RIGHT", "LEFT"]

    def _seen(self) -> np.ndarray:
        obs = np.zeros((210, 160, 3), np.uint8)
        obs[self.place[0] : self.place[0] + 40, self.place[1] : self.place[1] + 30] = self.color
        return obs

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.frame, self.place = 0, self.np_random.integers(0, 120, 2)
        self.color = self.np_random.integers(50, 256, 3)
        return self._seen(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.frame += 1
        self.place = (self.place + self.np_random.integers(-5, 6, 2) + (0, (0, 0, 4, -4)[action])).clip(0, 130)
        reward = float(self.np_random.choice([0.0, 0.0, 0.0, 3.0, -2.0]))
        return self._seen(), reward, self.lives() == 0, False, {}


def run(source: Path, out: Path, seed: int) -> None:
    recorder.in_double_precision(seed)
    gym.register("SmallGame-v0", SmallGame)
    numbers = itertools.count()

    def orthogonal(weight: torch.Tensor, gain: float) -> None:
        with torch.no_grad():
            weight.copy_(torch.from_numpy(recorder.drawn(tuple(weight.shape), gain, next(numbers))))

    torch.nn.init.orthogonal_ = orthogonal
    record_cleanrl.CASES[CASE] = ("ppo_atari.py", OPTIONS)
    write = recorder.write

    def write_small(path: Path, meta: dict[str, Any], **arrays: Any) -> None:
        small = {name: x for name, x in arrays.items() if "param" not in name and not name.startswith("final/")}
        write(path, meta, **{name: x.astype(np.uint8) if name.endswith("/obs") else x for name, x in small.items()})

    recorder.write = write_small
    record_cleanrl.run(CASE, source, out, seed)


if __name__ == "__main__":
    recorder.record({CASE: run}, "cleanrl_pufferlib", source=True)
