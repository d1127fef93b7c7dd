"""Helpers for tests of training runs: a tiny run, ways to run it, and readers of its files."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from ppo_parts.commands.doctor import read_events
from ppo_parts.recipes.cleanrl_ppo import Config
from ppo_parts.training import Program, RunOptions, Train, run

ROOT = Path(__file__).parents[1]
STEPS_PER_UPDATE = 16
UPDATES = 12
QUIET = {"checkpoint_every": 4, "log_every": 2, "tensorboard": False, "progress": False}
EVALUATED = {"eval_every": 5, "eval_episodes": 5, "best_metric": "evaluation/episode_return", "keep_checkpoints": None}


def tiny(updates: int = UPDATES, **changes) -> Config:
    """Configure CartPole with a network of 8 units and `updates` updates of 2 environments times 8 steps."""
    sizes = {"num_envs": 2, "num_steps": 8, "hidden": (8,), "num_minibatches": 2, "update_epochs": 1}
    return Config(**{"total_timesteps": updates * STEPS_PER_UPDATE, **sizes, **changes})


def checkpoint(folder: Path, step: int | None = None) -> dict[str, np.ndarray]:
    """Return the arrays of a checkpoint (the latest) as orbax reads them, without any of our code."""
    folder = (folder / "checkpoints").resolve()
    step = max(int(p.name) for p in folder.iterdir() if p.name.isdecimal()) if step is None else step
    with ocp.StandardCheckpointer() as reader:
        return {"step": np.asarray(step), **reader.restore(folder / str(step))}


def rows(folder: Path) -> list[dict]:
    """Return the rows of metrics.jsonl, each of which has to be strict JSON."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def logged(folder: Path) -> int:
    """Count the whole rows of metrics.jsonl; a process may be writing the last one."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def evaluations(folder: Path) -> dict[int, dict]:
    """Return the metrics of evaluations by the number of updates before each."""
    found = {row["update"] + 1: {k: x for k, x in row.items() if k.startswith("evaluation/")} for row in rows(folder)}
    return {update: metrics for update, metrics in found.items() if metrics}


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Return the numbers in TensorBoard's files, by name and step."""
    seen: dict[str, dict[int, float]] = {}
    for name, x, step in read_events(sorted(folder.glob("events.out.tfevents.*"))):
        seen.setdefault(name, {})[step] = x
    return seen


def assert_same_run(folder: Path, expected: Path) -> None:
    """Check that two runs ended in the same state, and left the same metrics, to the last bit."""
    one, other = checkpoint(folder), checkpoint(expected)
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name, strict=True)
    assert (folder / "metrics.jsonl").read_bytes() == (expected / "metrics.jsonl").read_bytes()
    one, other = (json.loads((where / "result.json").read_text()) for where in (folder, expected))
    for name in (one.keys() & other.keys()) - {"curve", "timing"}:  # `evaluation` is there only if it was asked for
        assert one[name] == other[name], name


def altered(train: Train, **fields: Any) -> Any:
    """Copy a `Train` with other fields; `dataclasses.replace` would trace it."""
    made = copy.copy(train)
    vars(made).update(fields)
    return made


def raw(x: Any) -> Any:
    """Return keys as the numbers that they are made of."""
    return jax.random.key_data(x) if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key) else x


class ByTwos(Program):
    """Run two updates per call, however long they take, with one program for all runs of one `Train`."""

    programs: ClassVar[dict[Any, Any]] = {}

    updates = 2

    def adapt(self, updates, seconds):
        pass

    def compile_updates(self, state: Any) -> Any:
        key = (self.train, self.options.num_seeds, self.mesh)
        if key not in self.programs:
            self.programs[key] = super().compile_updates(state)
        return self.programs[key]


def measuring(**numbers: float) -> type[Program]:
    """Make a program for tests of a run's files: updates change nothing, and measure these numbers."""

    class Measuring(Program):
        def advance_from(self, state: Any) -> Any:
            return lambda state, most: (state, {name: np.full(most, x) for name, x in numbers.items()})

    return Measuring


def acting(after: int, action: Callable[[], None]) -> type[Program]:
    """Make a program like `ByTwos` that calls `action` once `after` updates are computed; the last are not kept yet."""

    class Acting(ByTwos):
        done = 0

        def adapt(self, updates, seconds):
            self.done += updates
            if self.done == after:
                action()

    return Acting


class Crash(Exception):
    """The exception that kills a run in tests."""


def crash() -> None:
    raise Crash


def go(train, place, name, config=None, program=ByTwos, on_rows=None, **options) -> Any:
    """Run quietly by twos; return the run's folder and its result."""
    where = {} if "resume" in options else {"directory": place, "name": name}
    kept = RunOptions(**{**QUIET, **options, **where})
    result = run(train, config or tiny(), kept, on_rows=on_rows, make_program=program)
    return kept.resume or kept.directory / kept.name, result
