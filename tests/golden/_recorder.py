"""What the recorders of other libraries' PPO share: a synthetic rollout, tapes, the files and the command line.

Each recorder runs on its own, in an environment with the library that it is named after:

    pip install stable-baselines3 && python tests/golden/record_stable_baselines3.py --seed 0

Those that call `record_library` feed the library's own code with a rollout of random numbers, and write what came out
to `libraries/`. There, everything is computed in float64, so that a difference of the algorithm is not mistaken for a
rounding error: torch's default is float64, and `Tensor.float()` and `as_tensor(dtype=torch.float32)` return float64.
"""

import argparse
import functools
import hashlib
import json
import multiprocessing
import platform
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent
TIME, ENVS, OBS, ACTIONS, HIDDEN = 16, 4, 4, 2, 8
EPOCHS, MINIBATCHES = 3, 2
MINIBATCH = TIME * ENVS // MINIBATCHES
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


class Scripted:
    """Environments that return a rollout step by step, whatever the actions are."""

    def __init__(self, seed: int) -> None:
        self.data, self.t, self.rng = rollout(seed), 0, np.random.default_rng(seed)

    def next(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The next or first observations, rewards, terminations, truncations, and the next or final observations."""
        row = {name: x[self.t].copy() for name, x in self.data.items()}
        self.t += 1
        terminated, truncated = row["terminated"] > 0, row["truncated"] > 0
        if self.t < TIME:
            obs = self.data["obs"][self.t]
        else:
            first = self.rng.normal(size=(ENVS, OBS))
            obs = np.where((terminated | truncated)[:, None], first, row["next_obs"])
        return obs, row["reward"], terminated, truncated, row["next_obs"]


def drawn(shape: tuple[int, ...], gain: float, seed: int) -> np.ndarray:
    """Draw weights `[out, in, ...]`; NumPy guarantees that `RandomState` gives the same numbers in every version."""
    numbers = np.random.RandomState(seed).standard_normal(shape)
    return (gain * numbers / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


def time_major(rows: Any) -> np.ndarray:
    """Rows n * T + t of a rollout that is flattened environment by environment, as rows t * N + n."""
    rows = np.asarray(rows)
    return rows % TIME * ENVS + rows // TIME


def by_time(x: Any) -> np.ndarray:
    """Numbers of such a rollout as `[T, N]`."""
    return x.numpy().reshape(ENVS, TIME).T


def minibatches(permutations: Iterable[Any]) -> np.ndarray:
    """One permutation of the rows for each epoch as indices `[E, K, M]`."""
    return np.stack([np.reshape(p, (MINIBATCHES, -1)) for p in permutations]).astype(np.int16)


def under(prefix: str, parts: dict[str, Any]) -> Arrays:
    """Copies of arrays or tensors, with names that begin with `prefix/`."""
    arrays = {name: x.detach() if hasattr(x, "detach") else x for name, x in parts.items()}
    return {f"{prefix}/{name}": np.array(x) for name, x in arrays.items()}


class Tape:
    """Rows of arrays, by the names of what they belong to."""

    def __init__(self) -> None:
        self.rows: dict[str, list[np.ndarray]] = defaultdict(list)

    def write(self, prefix: str, parts: dict[str, Any]) -> None:
        for name, x in under(prefix, parts).items():
            self.rows[name].append(x)

    def read(self, prefix: str) -> Arrays:
        found = {name.removeprefix(f"{prefix}/"): x for name, x in self.rows.items() if name.startswith(f"{prefix}/")}
        return {name: np.stack(x) for name, x in found.items()}


def on_backward(before: Callable[[Any, Any], None], after: Callable[[], None] = lambda: None) -> None:
    """Call `before(loss, frame of the caller)` and then `after()` whenever torch differentiates a loss."""
    import torch

    backward = torch.Tensor.backward

    def recorded(loss: Any, *args: Any, **kwargs: Any) -> None:
        before(loss, sys._getframe(1))
        backward(loss, *args, **kwargs)
        after()

    torch.Tensor.backward = recorded


class TorchTape:
    """Writes down the losses that are differentiated, the parameters after each step, and the permutations drawn.

    Args:
        parameters: the tensors in the order of the recording: w0, b0, w1, b1 (w is `[out, in]`) and the logarithm of
            the standard deviation of the policy, then w0, b0, w1, b1 of the value.
    """

    def __init__(self, *parameters: Any) -> None:
        self.parameters = list(parameters)
        self.losses: list[float] = []
        self.steps = [self.flat()]
        self.permutations: list[np.ndarray] = []

    def flat(self) -> np.ndarray:
        return np.concatenate([np.ravel(p.detach().cpu().numpy()) for p in self.parameters])

    def watch(self, optimizer: Any) -> None:
        """Start to write."""
        import torch

        on_backward(lambda loss, _: self.losses.append(loss.item()))
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


def space(size: int, limit: float = 1e3) -> Any:
    """A box as the space of observations or actions."""
    import gymnasium

    return gymnasium.spaces.Box(-limit, limit, (size,), dtype=np.float64)


def write(path: Path, meta: dict[str, Any] | None = None, **arrays: Any) -> None:
    """Write a recording, with `meta` as JSON, and say how large it is."""
    if meta is not None:
        arrays["meta"] = json.dumps(meta, sort_keys=True)
    np.savez_compressed(path, **arrays)
    print(f"{path.name}: {path.stat().st_size:,} bytes")


def versions(*packages: str) -> dict[str, str]:
    """Of Python, too."""
    return {name: version(name) for name in packages} | {"python": platform.python_version()}


def digest(path: Path) -> str:
    """The hash of a file that ran."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def record(cases: dict[str, Callable[..., None]], folder: str, source: bool = False) -> None:
    """Command line: record all cases, each in a process of its own, with `seed`, `out` and perhaps `source`.

    Args:
        folder: the default of `out`, the folder to write to, in this one.
        source: each case also takes the path of a checkout.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=FOLDER / folder)
    if source:
        parser.add_argument("--source", type=Path, required=True)
    for case in cases.values():
        process = multiprocessing.get_context("fork").Process(target=case, kwargs=vars(parser.parse_args()))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(process.exitcode)


def record_library(
    preset: str, package: str, update: Callable[..., Arrays], options: dict[str, tuple[str, Any]],
    ours: dict[str, Any] | None = None, theirs: dict[str, Any] | None = None, always: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Command line: record `update(seed, **settings of the library)` with its defaults, and with other settings.

    Args:
        options: our name of a hyperparameter: the library's name, and the value.
        ours: hyperparameters whose values differ, by our names.
        theirs: the same by the library's names.
        always: hyperparameters by our names that the defaults need, too.
    """
    ours = {name: x for name, (_, x) in options.items()} | (ours or {})
    settings = {"default": ({}, {}), "options": (ours, dict(options.values()) | (theirs or {}))}

    def record_case(name: str, seed: int, out: Path) -> None:
        ours, theirs = settings[name]
        arrays = update(seed, **theirs)
        meta = {"preset": preset, "options": ours | (always or {}), "seed": seed, "versions": versions(package)}
        write(out / f"{preset}_{name}.npz", meta, **arrays)

    record({name: functools.partial(record_case, name) for name in settings}, "libraries")


def values_and_gradients(prefix: str, runs: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    """The values and the gradients of losses, by the names of a recording."""
    values = {f"{prefix}loss/{name}": value for name, (value, _) in runs.items()}
    return values | {f"{prefix}gradient/{name}": gradient for name, (_, gradient) in runs.items()}


def record_functions(name: str, functions: Callable[[np.random.Generator], dict[str, Any]]) -> None:
    """Command line: write what functions return on the random arrays that they are given."""

    def record_them(seed: int, out: Path) -> None:
        recorded = functions(np.random.default_rng(seed))
        write(out / name, **{name: np.asarray(x) for name, x in recorded.items()})

    record({name: record_them}, ".")
