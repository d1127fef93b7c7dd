"""The folder of a run: `config.json`, `metrics.jsonl` and `checkpoints/`. Many may read it, and one process writes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import os
import platform
import shutil
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .. import __version__
from .._base.errors import UserValueError
from .._base.extras import require_package
from ..envs._registry import without_settings
from ._checkpoint import Checkpoints
from ._config import RunOptions, kept_options, stored_options
from ._evaluate import EVALUATION
from ._files import Row, lines_of, plain, valid_rows, write_json, write_whole
from ._messages import RunExistsError, RunFolderError, RunNotFoundError, logger
from ._processes import broadcast_first, is_first, together
from ._statistics import finite_mean
from ._train import Train

JAX_SETTINGS = ("jax_enable_x64", "jax_default_prng_impl", "jax_threefry_partitionable", "jax_default_matmul_precision")
"""They change the arrays of a state, or the last bits of its numbers."""


def stored_run(folder: Path) -> dict[str, Any]:
    """Read `config.json`: config, run (options), versions, recipe, and the run it was continued from, if any."""
    path = folder / "config.json"
    try:
        stored = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        around, what = (folder, "no config.json") if folder.is_dir() else (folder.parent, "no such folder")
        runs = sorted(found.parent.name for found in around.glob("*/config.json"))
        there = f"; {around} has {', '.join(runs[-8:])}" if runs else ""
        raise RunNotFoundError(f"{folder} holds no run: there is {what}{there}") from None
    except (ValueError, RecursionError) as error:
        raise UserValueError(f"{path} cannot be read: {error}") from None
    kinds = {"config": dict, "run": dict, "versions": dict, "steps_per_update": int}
    wrong = [name for name, kind in kinds.items() if not isinstance(stored, dict) or type(stored.get(name)) is not kind]
    if wrong or "num_seeds" not in stored["run"]:
        raise UserValueError(
            f"{path} is damaged: it has no valid {(*wrong, 'num_seeds')[0]}; the checkpoints are not affected: write "
            "the file of a run with the same configuration in its place"
        )
    return stored


def stored_config(kind: type, stored: Mapping[str, Any]) -> Any:
    fields = {field.name for field in dataclasses.fields(kind)}
    if set(stored["config"]) != fields:
        differing = sorted(set(stored["config"]) ^ fields)
        named = ", ".join(differing[:3]) + f" and {len(differing) - 3} more" * (len(differing) > 3)
        raise UserValueError(
            f"the run is of another recipe, or of another version of it: it records {stored.get('recipe')}, and fields "
            f"differ ({named}): use the version that made it, or edit these fields in config.json"
        )
    return kind(**{name: tuple(x) if isinstance(x, list) else x for name, x in stored["config"].items()})


def recipe_of(defined: Any) -> str:
    """Return the name of the module that defines a function or a class, as it can be imported later."""
    name = None
    while isinstance(defined, functools.partial):
        if defined.args or defined.keywords:  # another function, which the program that runs defines
            name = "__main__"
        defined = defined.func
    name = name or defined.__module__
    if name != "__main__":
        return name
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:  # python -m ppo_parts.recipes.cleanrl_ppo
        return spec.name
    return name if file is None else Path(file).stem  # python my_recipe.py


def describe(config: Any, options: RunOptions, train: Train) -> dict[str, Any]:
    """Describe a new run for `config.json`; raise if JSON cannot represent the configuration."""
    stored = {
        "config": in_json(config),
        "steps_per_update": train.steps_per_update,
        "num_updates": train.num_updates,
        "recipe": train.recipe,
    }
    back = stored_config(type(config), stored)
    for field in dataclasses.fields(config):
        if getattr(back, field.name) != (value := getattr(config, field.name)):
            raise UserValueError(
                f"{value!r} could not be read back from config.json: use numbers that are finite, strings, None, and "
                "tuples of them",
                where="config",
                argument=field.name,
            )
    return {**stored, "run": kept_options(options), "versions": versions(), "jax": _jax_settings()}


def in_json(config: Any) -> dict[str, Any]:
    return json.loads(json.dumps(plain(dataclasses.asdict(config)), default=str))


def changes(stored: Mapping[str, Any], config: Any, options: RunOptions) -> dict[str, tuple[Any, Any]]:
    now = {**in_json(config), "num_seeds": options.num_seeds}
    return differences({**stored["config"], "num_seeds": stored["run"]["num_seeds"]}, now)


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    pairs = {name: (then.get(name, "(absent)"), now.get(name, "(absent)")) for name in {**then, **now}}
    return {name: (was, is_now) for name, (was, is_now) in pairs.items() if was != is_now}


def listed(changed: Mapping[Any, tuple[Any, Any]]) -> str:
    return "; ".join(f"{name} was {was!r}, is {now!r}" for name, (was, now) in changed.items())


def check_recipe(stored: Mapping[str, Any], recipe: str | None) -> None:
    """Raise unless a run is resumed with its own recipe."""
    own = stored.get("recipe")
    if str(own).rpartition(".")[2] == str(recipe).rpartition(".")[2]:  # a package may have moved
        return
    if own is None or recipe is None:
        raise UserValueError(
            f"the run records the recipe {own}, got {recipe}: a run with an environment, a chain or a policy of your "
            "own is resumed with the same ones, training.run(make_train(config, ...), config, options)"
        )
    raise UserValueError(
        f"the run records the recipe {own}, and a resumed run keeps its recipe, got {recipe}: resume it with "
        f'python -m {own}; if the module was renamed, set "recipe" to "{recipe}" in config.json'
    )


def check_unchanged(stored: Mapping[str, Any], config: Any, options: RunOptions, recipe: str | None) -> None:
    """Raise unless a run is resumed with its own configuration and recipe; warn about versions that have changed."""
    check_recipe(stored, recipe)
    if changed := changes(stored, config, options):
        raise UserValueError(
            f"a resumed run keeps its configuration; {listed(changed)}. A new run with --init-from starts from "
            "its state and may have other settings, except for env_id, seed, num_seeds, num_envs, num_steps and those "
            "that shape the network"
        )
    before, now = {**stored["versions"], **stored.get("jax", {})}, {**versions(), **_jax_settings()}
    if updated := [f"{name} {before.get(name)} (now {x})" for name, x in now.items() if before.get(name) != x]:
        logger.warning(f"begun with {', '.join(updated)}: the last bits may differ")


def _jax_settings() -> dict[str, Any]:
    return {name: getattr(jax.config, name) for name in JAX_SETTINGS}


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that affect the numbers of a run."""
    found = {"python": platform.python_version(), "ppo_parts": __version__}
    for name in ("jax", "jaxlib", "optax", "flax", "gymnax", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


class RunFolder:
    """A read-only view of a run on the disk; another process may be writing to it. `stored` is `config.json`."""

    def __init__(self, path: Path, stored: dict[str, Any] | None = None, options: RunOptions | None = None) -> None:
        self.path, self.log_path, self.result_path = path, path / "metrics.jsonl", path / "result.json"
        self.stored = stored_run(self.path) if stored is None else stored
        self.options = stored_options(self.stored) if options is None else options
        self.checkpoints = Checkpoints(path / "checkpoints", keep=self.options.keep_checkpoints)

    def restore(self, train: Train, which: str | int = "latest") -> tuple[int, Any]:
        """Restore a checkpoint ("latest", "best" or a number); return its number of updates, and its state."""
        number = None if which in ("latest", "best") else int(which)
        if which == "best":
            if (found := self.best()) is None:
                metric = self.options.best_metric
                reason = "it was run without best_metric" if metric is None else f"{metric} is unknown"
                there = ", ".join(map(str, self.checkpoints.steps()))
                raise UserValueError(f"{self.path} has no best checkpoint: {reason}; there are {there}")
            number, _ = found
        return self.checkpoints.restore(train.state_shapes(self.options.num_seeds), number)

    def best(self, new: int | None = None) -> tuple[int, float] | None:
        """Return the best of the checkpoints and of a `new` one, and its value; None without any.

        Of equal ones, it is the first. The value is that of the evaluation at the checkpoint, or the mean over the last
        tenth of the run's updates before it, so that it does not depend on when checkpoints are saved.
        """
        metric = self.options.best_metric
        if metric is None:
            return None
        window = 1 if metric.startswith(EVALUATION) else max(1, self.stored.get("num_updates", 1) // 10)
        found = {}
        for step in sorted({*self.checkpoints.steps(), *(() if new is None else (new,))}):
            mean = finite_mean([self.judged.get(update, np.nan) for update in range(step - window, step)])
            if np.isfinite(mean):
                found[step] = mean
        best = (min if self.options.best_mode == "min" else max)(found, key=found.__getitem__, default=None)
        return None if best is None else (best, found[best])

    @functools.cached_property
    def judged(self) -> dict[int, float]:
        """The `best_metric` of each update."""
        return self.judge(row for row, _ in valid_rows(self.log_path))

    def judge(self, rows: Iterable[Row]) -> dict[int, float]:
        return {row["update"]: finite_mean(row.get(str(self.options.best_metric), np.nan)) for row in rows}

    def rows(self, before: int) -> Iterator[tuple[Row, int]]:
        """Yield the rows of the updates before a checkpoint, as `valid_rows` does; warn if the log lacks some."""
        known = 0
        for row, end in valid_rows(self.log_path):
            if row["update"] >= before:
                break
            known = row["update"] + 1
            yield row, end
        if known < before:
            state = f"is damaged and has only {known}" if self.log_path.exists() else "is missing, and with it all"
            message = f"{self.log_path} {state} of the {before} updates before the checkpoint, which is sound"
            warnings.warn(message, RuntimeWarning, stacklevel=3)


@contextlib.contextmanager
def open_run(train: Train, config: Any, options: RunOptions) -> Iterator[tuple[RunWriter | None, int, Any]]:
    """Open the folder of a new run, or of the run to resume, and lock it against other writers.

    Yields the folder, how many updates are done, and the state after them (None for a new run). Processes other than
    the first get no folder, and what the first one has read. No folder is created if a configuration, a recipe or a
    state does not fit.
    """
    with contextlib.ExitStack() as stack:
        folder, done, state = None, 0, None
        with together("open the folder of the run"):
            if is_first():
                folder, done, state = stack.enter_context(_opened(train, config, options))
        if jax.process_count() > 1:
            numbers = np.asarray([done, state is not None], np.int32)
            done, restored = broadcast_first(numbers, numbers).tolist()
            state = broadcast_first(state, train.state_shapes(options.num_seeds)) if restored else None
        yield folder, done, state


@contextlib.contextmanager
def _opened(train: Train, config: Any, options: RunOptions) -> Iterator[tuple[RunWriter, int, Any]]:
    if options.resume is not None:
        stored = stored_run(options.resume)
        check_unchanged(stored, config, options, train.recipe)
        with _locked(options.resume):
            folder = RunWriter(options.resume, stored, options)
            yield folder, *folder.begin(train, options.checkpoint)
        return
    stored = describe(config, options, train)
    source, done, state = _source(train, config, options) if options.init_from is not None else (None, 0, None)
    env_id = without_settings(str(getattr(config, "env_id", "run")))  # settings may contain a path
    name = f"{env_id}-s{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        path = _unused(options.directory / name) if options.name is None else options.directory / options.name
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(
            f"{error.filename} cannot be created: {error.strerror}; give another --directory or --name"
        ) from error
    with _locked(path):
        if (path / "config.json").exists():
            raise RunExistsError(f"{path} holds a run: continue it with --resume {path}, or give another --name")
        folder = RunWriter(path, stored, options)
        if source is not None:  # `config.json` comes last: without it, the folder holds no run
            changed = changes(source.stored, config, options)
            stored["continued_from"] = {"folder": str(source.path), "update": done, "changed": changed}
            write_whole(folder.log_path, lines_of(row for row, _ in source.rows(done)))
            folder.write_checkpoint(done, state)
        yield folder, *folder.begin(train)


class RunWriter(RunFolder):
    """The folder of a run for the single process that writes to it; `open_run` creates it.

    Whenever the process dies, the folder contains a run that can be resumed. No results are deleted: files that the run
    cannot continue from are moved to `aside/`. `result.json` marks the run as complete.
    """

    def begin(self, train: Train, which: str | int = "latest") -> tuple[int, Any]:
        """Return how many updates are done and the state after them, and cut off what came later."""
        steps = self.checkpoints.steps()
        if not steps and which != "latest":
            raise RunNotFoundError(f"{self.path} has no checkpoints, so not {which!r} either")
        done, state = self.restore(train, which) if steps else (0, None)
        for later in steps:  # nothing is moved before a state has been accepted
            if later > done:
                os.rename(self.checkpoints.directory / str(later), self._aside(f"checkpoint-{later}"))
        size = max((end for _, end in self.rows(done)), default=0)
        if self.log_path.exists() and size < self.log_path.stat().st_size:
            shutil.copy(self.log_path, self._aside("metrics.jsonl"))
            os.truncate(self.log_path, size)
            if not done:
                logger.warning(f"{self.path} has no checkpoint: the run begins again; its log is in aside/")
        write_json(self.path / "config.json", {**self.stored, "run": kept_options(self.options)})
        if done < train.num_updates and self.result_path.exists():  # the run is not complete
            os.rename(self.result_path, self._aside("result.json"))
        self.log_path.touch()
        return done, state

    def append(self, rows: list[Row]) -> None:
        try:
            os.stat(self.log_path)  # raises if somebody removed it
            with self.log_path.open("ab") as file:
                file.write(lines_of(rows))
        except OSError as error:
            last = max(self.checkpoints.steps(), default=None)
            there = "there is no checkpoint" if last is None else f"the latest checkpoint is {last}"
            raise RunFolderError(f"{self.log_path} could not be written: {error.strerror}; {there}") from error
        if self.options.best_metric is not None:
            self.judged.update(self.judge(rows))

    def tail(self, first: int) -> Iterator[Row]:
        return (row for row, _ in valid_rows(self.log_path) if row["update"] >= first)

    def write_checkpoint(self, update: int, state: Any) -> None:
        """Write a checkpoint; the latest ones and the best one are kept."""
        found = self.best(update)
        self.checkpoints.save(update, state, best=found and found[0])

    def _aside(self, name: str) -> Path:
        place = self.path / "aside"
        place.mkdir(exist_ok=True)
        return _unused(place / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")


def _source(train: Train, config: Any, options: RunOptions) -> tuple[RunFolder, int, Any]:
    """Return the run that a new one starts from, its update and its state; raise if they do not fit."""
    assert options.init_from is not None
    run = RunFolder(options.init_from.resolve())
    changed = changes(run.stored, config, options)
    if fixed := {name: changed[name] for name in ("seed", "num_seeds") if name in changed}:
        raise UserValueError(
            f"a run that begins with the state of {run.path} continues its keys; {listed(fixed)}: keep these, or "
            "begin a run without --init-from"
        )
    update, state = run.restore(train, options.checkpoint)
    steps = update * run.stored["steps_per_update"]
    if run.stored["steps_per_update"] != train.steps_per_update:
        raise UserValueError(
            f"the {update} updates of {run.path} were {steps} environment steps, but an update is now "
            f"{train.steps_per_update}: keep num_envs * num_steps, so that the counters continue"
        )
    if update >= train.num_updates:
        raise UserValueError(
            f"must be more than the {steps:,} steps ({update} updates) of {run.path}, from which this run continues, "
            f"got {config.total_timesteps}",
            where="Config",
            argument="total_timesteps",
        )
    return run, update, state


def _unused(path: Path) -> Path:
    """Return `path`, or if it exists, the first of the same path with the suffixes -2, -3, ... that does not."""
    paths = (path if n == 1 else path.with_name(f"{path.name}-{n}") for n in itertools.count(1))
    return next(path for path in paths if not path.exists())


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock `folder` for this process; the operating system releases the lock however the process ends."""
    filelock = require_package("filelock", "train")
    with contextlib.ExitStack() as held:
        try:
            with contextlib.suppress(NotImplementedError):  # no locks on this file system
                held.enter_context(filelock.FileLock(folder / ".lock", timeout=0))
        except filelock.Timeout:
            raise RunExistsError(f"{folder} is being written by another process") from None
        except OSError as error:
            raise RunFolderError(f"{folder} cannot be written: {error.strerror}") from error
        yield
