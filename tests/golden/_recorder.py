"""What the recorders of other libraries' PPO share: a synthetic rollout, and a tape for torch.

Each recorder runs on its own, in an environment with the library that it is named after:

    pip install stable-baselines3 && python tests/golden/record_stable_baselines3.py --seed 0

It feeds the library's own code with a rollout of random numbers, and writes what came out to `libraries/`.
Everything is computed in float64, so that a difference of the algorithm is not mistaken for a rounding error: torch's
default is float64, and `Tensor.float()` and `as_tensor(dtype=torch.float32)` return float64.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "libraries"
TIME, ENVS, OBS, ACTIONS, HIDDEN = 16, 4, 4, 2, 8
EPOCHS, MINIBATCHES = 3, 2
Arrays = dict[str, np.ndarray]


def rollout(seed: int) -> Arrays:
    """Observations, rewards and ends of episodes `[T, N, ...]`; `next_obs` is the final one where an episode ended."""
    rng = np.random.default_rng(seed)
    obs, next_obs, first = (rng.normal(size=(TIME, ENVS, OBS)) for _ in range(3))
    kind = rng.choice(3, size=(TIME, ENVS), p=(0.8, 0.1, 0.1))
    kind[4, 0], kind[6, 1], kind[-1, :3] = 1, 2, (0, 1, 2)  # both ends occur, also in the last step
    for t in range(1, TIME):
        obs[t] = np.where(kind[t - 1, :, None] > 0, first[t], next_obs[t - 1])
    reward = rng.normal(size=(TIME, ENVS))
    flags = {"terminated": kind == 1, "truncated": kind == 2}
    return {"obs": obs, "next_obs": next_obs, "reward": reward} | {k: x.astype(float) for k, x in flags.items()}


def after(data: Arrays, t: int, rng: np.random.Generator) -> np.ndarray:
    """The observations that the environments return from step t: those of step t + 1, or of a new episode."""
    if t + 1 < TIME:
        return data["obs"][t + 1]
    ended = (data["terminated"][t] + data["truncated"][t])[:, None] > 0
    return np.where(ended, rng.normal(size=(ENVS, OBS)), data["next_obs"][t])


def time_major(rows: Any) -> np.ndarray:
    """Rows n * T + t of a rollout that is flattened environment by environment, as rows t * N + n."""
    rows = np.asarray(rows)
    return rows % TIME * ENVS + rows // TIME


class TorchTape:
    """Writes down the losses that are differentiated, the parameters after each step, and the permutations drawn.

    Args:
        parameters: the tensors in the order of the recording: w0, b0, w1, b1 (w is `[out, in]`) and the logarithm of
            the standard deviation of the policy, then w0, b0, w1, b1 of the value.
    """

    def __init__(self, parameters: Iterable[Any]) -> None:
        self.parameters = list(parameters)
        self.losses: list[float] = []
        self.steps = [self.flat()]
        self.permutations: list[np.ndarray] = []

    def flat(self) -> np.ndarray:
        return np.concatenate([np.ravel(p.detach().cpu().numpy()) for p in self.parameters])

    def watch(self, optimizer: Any) -> None:
        """Start to write."""
        import torch

        backward = torch.Tensor.backward

        def recorded(loss: Any, *args: Any, **kwargs: Any) -> Any:
            self.losses.append(loss.item())
            return backward(loss, *args, **kwargs)

        torch.Tensor.backward = recorded
        optimizer.register_step_post_hook(lambda *_: self.steps.append(self.flat()))
        for module, name in ((np.random, "permutation"), (torch, "randperm")):
            setattr(module, name, self._recorded_permutation(getattr(module, name)))

    def _recorded_permutation(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            drawn = draw(*args, **kwargs)
            self.permutations.append(np.array(drawn))
            return drawn

        return recorded

    def read(self) -> Arrays:
        return {"losses": np.array(self.losses), "params": np.stack(self.steps)}


def in_double_precision(seed: int) -> None:
    """Let torch compute in float64, and seed it and NumPy."""
    import torch

    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double
    as_tensor = torch.as_tensor

    def as_double(x: Any, dtype: Any = None, device: Any = None) -> Any:
        return as_tensor(x, dtype=torch.float64 if dtype == torch.float32 else dtype, device=device)

    torch.as_tensor = as_double
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (the libraries draw from the global generator)


def minibatches(permutations: Iterable[Any]) -> np.ndarray:
    """One permutation of the rows for each epoch as indices `[E, K, M]`."""
    return np.stack([np.reshape(p, (MINIBATCHES, -1)) for p in permutations]).astype(np.int16)


def save(preset: str, package: str, case: str, seed: int, options: dict[str, Any], arrays: Arrays) -> None:
    """Write `libraries/<preset>_<case>.npz`; `options` are the hyperparameters by our names, if not the defaults."""
    meta = {"preset": preset, "options": options, "seed": seed, "package": package, "version": version(package)}
    path = FOLDER / f"{preset}_{case}.npz"
    write(path, meta=json.dumps({**meta, "python": platform.python_version()}), **arrays)


def write(path: Path, **arrays: Any) -> None:
    """Write a trace and say how large it is."""
    np.savez_compressed(path, **arrays)
    print(f"{path.name}: {path.stat().st_size:,} bytes")


def record(cases: dict[str, Callable[..., None]], parser: argparse.ArgumentParser | None = None) -> None:
    """Command line: record all cases, each in a process of its own, with `seed` and the options of the parser."""
    import multiprocessing

    parser = parser or argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args())
    for case in cases.values():
        process = multiprocessing.Process(target=case, kwargs=options)
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(process.exitcode)
