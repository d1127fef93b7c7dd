"""Record CleanRL's `ppo.py`, `ppo_continuous_action.py` and `ppo_atari.py`: each script runs as it is.

Run it where the packages that the scripts import are installed, with the folder `cleanrl` of a checkout of the commit:

    pip install torch==2.13.0 numpy==1.26.4 gymnasium==0.29.1 tyro==1.0.17 opencv-python-headless==4.11.0.86
    PYTHONPATH=path/to/cleanrl python tests/golden/record_cleanrl.py --source path/to/cleanrl/cleanrl --seed 0

A script computes in global variables. The tape reads them when `backward` is called, after each step of the optimizer,
and when the script logs. It takes the place of TensorBoard.

`ppo_atari.py` has a network of 1.7 million parameters, and its own wrappers, on a small game made here. The parameters
begin with numbers that the test draws again, and are not recorded. Everything is computed in float64: in float32,
rounding changes the sign of the input of a ReLU now and then, and Adam enlarges the small differences of the gradients.
"""

import functools
import itertools
import runpy
import sys
import types
from collections import defaultdict
from pathlib import Path
from typing import Any

import _recorder as recorder
import gymnasium as gym
import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

COMMIT = "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb"
SIZES = {"num_envs": 4, "num_steps": 32, "total_timesteps": 256}
TWO = {"num_minibatches": 2, "update_epochs": 2}
PENDULUM = {"env_id": "Pendulum-v1", **TWO}
SHORT = {"env_id": "PendulumLimit11-v1", **TWO, "total_timesteps": 128, "learning_rate": 0.01, "ent_coef": 0.01}
FRAMES = {
    "env_id": "SmallGame-v0", "num_envs": 2, "num_steps": 16, "total_timesteps": 64, **TWO, "learning_rate": 0.001,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "a_default": ("ppo.py", {}), "a_biglr": ("ppo.py", {"learning_rate": 0.005}),
    "b_noclipv_nonorm": ("ppo.py", {"clip_vloss": False, "norm_adv": False, **TWO, "learning_rate": 0.01}),
    "c_target_kl": ("ppo.py", {"target_kl": 0.0085, "learning_rate": 0.004, "anneal_lr": False}),
    "d_continuous": ("ppo_continuous_action.py", PENDULUM), "e_continuous_trunc": ("ppo_continuous_action.py", SHORT),
    "f_atari": ("ppo_atari.py", FRAMES),
}  # fmt: skip
ROLLOUT = ("obs", "actions", "logprobs", "rewards", "dones", "values", "next_done", "advantages", "returns")
SCALARS = ("old_approx_kl", "approx_kl", "pg_loss", "v_loss", "entropy_loss", "loss")
SNAPSHOTS = {0: 4, 1: 1}  # how many minibatches of an iteration keep whole parameters


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


class Tape(recorder.Tape):
    """What the script computes in each iteration, and what it logs."""

    def __init__(self) -> None:
        super().__init__()
        self.arrays: recorder.Arrays = {}
        self.logged: dict[str, list[Any]] = defaultdict(list)
        self.script: dict[str, Any] = {}

    def parameters(self) -> dict[str, torch.Tensor]:
        return dict(self.script["agent"].named_parameters())

    def before_backward(self, loss: Any, frame: Any) -> None:
        script = self.script = frame.f_globals
        if not self.rows:  # the first minibatch of an iteration
            prefix = f"it{script['iteration'] - 1}"
            self.arrays |= recorder.under(f"{prefix}/params_start", self.parameters())
            whole = {name: script[name] for name in ROLLOUT} | {"next_value": script["next_value"][0]}
            self.arrays |= recorder.under(prefix, whole)
        self.write("mb", {"epoch": np.int32(script["epoch"]), "mb_inds": script["mb_inds"].astype(np.int16)})
        self.write("mb", {name: script[name] for name in SCALARS} | {"clipfrac": script["clipfracs"][-1]})

    def after_backward(self) -> None:
        self.write("mb", {"grad_norm": torch.nn.utils.get_total_norm([p.grad for p in self.parameters().values()])})

    def after_step(self, *_: Any) -> None:
        self.write("param_after", self.parameters())

    def add_text(self, *_: Any) -> None: ...
    def close(self) -> None: ...

    def add_scalar(self, name: str, x: Any, step: int) -> None:
        self.logged[name].append(x)
        if name == "losses/explained_variance":  # an iteration ends
            self.end_iteration(self.script["iteration"] - 1, self.script["args"].target_kl)

    def end_iteration(self, i: int, target_kl: float | None) -> None:
        rows = self.read("mb")
        if snapshots := SNAPSHOTS.get(i):
            rows["snap"] = np.arange(snapshots, dtype=np.int32)
            rows |= {f"param_after/{name}": x[:snapshots] for name, x in self.read("param_after").items()}
        self.arrays |= recorder.under(f"it{i}/mb", rows)
        stopped = target_kl is not None and self.script["approx_kl"].item() > target_kl
        rate = float(self.logged["charts/learning_rate"][-1])
        ended = {"last_epoch": np.int32(rows["epoch"][-1]), "early_stop": stopped, "lr": rate}
        self.arrays |= recorder.under(f"it{i}", ended)
        self.rows.clear()

    def recording(self) -> recorder.Arrays:
        self.arrays |= recorder.under("final", self.parameters())
        self.arrays["param_names"] = np.array(list(self.parameters()))
        logged = {"explained_variance": "losses/explained_variance", "logged_clipfrac": "losses/clipfrac"}
        return self.arrays | {name: np.array(self.logged[tag], float) for name, tag in logged.items()}


def flags(options: dict[str, Any]) -> list[str]:
    """Options as the script's command line."""
    words = []
    for name, x in options.items():
        flag = name.replace("_", "-")
        words += ([f"--{flag}"] if x else [f"--no-{flag}"]) if isinstance(x, bool) else [f"--{flag}", str(x)]
    return words


def draw_parameters(seed: int) -> None:
    """Compute in float64, and begin with parameters that the test draws again."""
    recorder.in_double_precision(seed)
    numbers = itertools.count()

    def orthogonal(weight: torch.Tensor, gain: float) -> None:
        with torch.no_grad():
            weight.copy_(torch.from_numpy(recorder.drawn(tuple(weight.shape), gain, next(numbers))))

    torch.nn.init.orthogonal_ = orthogonal


def without_parameters(arrays: recorder.Arrays) -> recorder.Arrays:
    kept = {name: x for name, x in arrays.items() if "param" not in name and not name.startswith("final/")}
    return {name: x.astype(np.uint8) if name.endswith("/obs") else x for name, x in kept.items()}


def run(case: str, source: Path, out: Path, seed: int) -> None:
    torch.set_num_threads(1)
    gym.register("SmallGame-v0", SmallGame)
    gym.register("PendulumLimit11-v1", "gymnasium.envs.classic_control:PendulumEnv", max_episode_steps=11)
    file, options = CASES[case]
    if case == "f_atari":
        draw_parameters(seed)
    tape = Tape()
    recorder.on_backward(tape.before_backward, tape.after_backward)
    register_optimizer_step_post_hook(tape.after_step)
    sys.modules["torch.utils.tensorboard"] = types.SimpleNamespace(SummaryWriter=lambda _: tape)  # type: ignore
    sys.argv = [file, *flags({"seed": seed, **SIZES, **options, "cuda": False})]
    runpy.run_path(str(source / file), run_name="__main__")
    settings = {name: x for name, x in vars(tape.script["args"]).items() if name != "exp_name"}
    meta = {"peer": "CleanRL", "commit": COMMIT, "file": f"cleanrl/{file}", "case": f"cleanrl_{case}", "seed": seed}
    meta |= {"file_sha256": recorder.digest(source / file), "argv": sys.argv[1:], "args": settings}
    meta["versions"] = recorder.versions("torch", "numpy", "gymnasium")
    arrays = without_parameters(tape.recording()) if case == "f_atari" else tape.recording()
    recorder.write(out / f"cleanrl_{case}.npz", meta, **arrays)


if __name__ == "__main__":
    recorder.record({case: functools.partial(run, case) for case in CASES}, "cleanrl_pufferlib", source=True)
