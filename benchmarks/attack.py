"""Attack runs: what is damaged, removed or full, who is signalled and how long that takes.

    python -m benchmarks attack

Every attack on a tiny run has to end in one of three ways: *identical* to a run that nobody disturbed, *said* (it
continues in the same state, and a warning names what is lost), or *refused* with a sentence. Signals go to a run of 3e9
steps, and the seconds until its process has ended are measured. Writes benchmarks/results/attack.json.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppo_parts import envs, training
from ppo_parts._base.errors import UserError
from recipes import cleanrl_ppo

from ._runs import (
    ROOT,
    Crash,
    acting,
    arguments,
    assert_same_run,
    checkpoint,
    compiled_programs_kept_in,
    crash,
    go,
    rows,
    start,
    steps,
    tiny,
)
from ._timing import write

STEPS = 3_000_000_000
MEGABYTE = 2**20


class Runs:
    """One tiny run that was not disturbed, and one that died after update 10 of 12, with checkpoints of 4 and 8."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.train = directory, cleanrl_ppo.make_train(tiny())
        self.whole, _ = go(self.train, directory, "whole")
        with contextlib.suppress(Crash):
            go(self.train, directory, "crashed", compile=acting(12, crash))

    def copy(self, name: str) -> Path:
        """The run that died."""
        return Path(shutil.copytree(self.directory / "crashed", self.directory / name))

    def outcome(self, folder: Path) -> str:
        """Resume it: how does it end?"""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                go(self.train, None, "", resume=folder)
            except UserError as error:
                return f"refused: {type(error).__name__}"
        with contextlib.suppress(AssertionError):
            assert_same_run(folder, self.whole)
            return "identical"
        assert any(issubclass(warning.category, RuntimeWarning) for warning in said), f"{folder} differs without a word"
        ours, theirs = checkpoint(folder), checkpoint(self.whole)
        assert all(np.array_equal(ours[name], theirs[name]) for name in theirs), f"{folder} ended in another state"
        return "the same state, lost metrics said"


def damaged_bytes(runs: Runs, times: int, seed: int) -> dict[str, dict[str, int]]:
    """Flip a bit, cut, or overwrite a part of a random file, and resume."""
    rng, outcomes = random.Random(seed), dict[str, Counter[str]]()
    for number in range(times):
        folder = runs.copy(f"bytes{number}")
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
        kinds = {"config.json": [], "metrics.jsonl": [], "checkpoints": []}
        for path in files:
            kinds[path.relative_to(folder).parts[0]].append(path)
        kind = rng.choice(sorted(kinds))
        path = rng.choice(kinds[kind])
        content = bytearray(path.read_bytes())
        at, how = rng.randrange(len(content)), rng.choice(["flip", "cut", "noise"])
        if how == "flip":
            content[at] ^= 1 << rng.randrange(8)
        elif how == "cut":
            del content[at:]
        else:
            content[at : at + 16] = rng.randbytes(len(content[at : at + 16]))
        path.write_bytes(content)
        outcomes.setdefault(kind, Counter())[runs.outcome(folder)] += 1
        shutil.rmtree(folder)
    return {kind: dict(counts) for kind, counts in sorted(outcomes.items())}


def mislabelled(runs: Runs) -> dict[str, str]:
    """Checkpoints that are not what their names say."""
    outcomes = {}
    for name, change in {
        "renamed from 8 to 10": lambda c: (c / "8").rename(c / "10"),
        "4 copied to 9": lambda c: shutil.copytree(c / "4", c / "9"),
        "both renamed": lambda c: [(c / old).rename(c / new) for old, new in (("8", "11"), ("4", "5"))],
        "all removed": lambda c: [shutil.rmtree(c / old) for old in ("8", "4")],
    }.items():
        folder = runs.copy("mislabelled")
        change(folder / "checkpoints")
        outcomes[name] = runs.outcome(folder)
        shutil.rmtree(folder)
    return outcomes


def lost_files(runs: Runs) -> dict[str, str]:
    """Remove something while the run is writing: it reports this, and continues from there."""
    outcomes = {}
    for gone in ("metrics.jsonl", "config.json", "checkpoints", ""):
        folder = runs.directory / "lost"

        def remove(folder: Path = folder, gone: str = gone) -> None:
            shutil.rmtree(folder / gone) if (folder / gone).is_dir() else (folder / gone).unlink()

        try:
            go(runs.train, runs.directory, "lost", compile=acting(6, remove))
        except training.RunFolderError as error:
            saved = "is saved" in str(error)
            outcomes[gone or "the whole folder"] = f"{'saved' if saved else 'lost'}; resumed: {runs.outcome(folder)}"
        else:
            outcomes[gone] = f"continued: {runs.outcome(folder)}"
        shutil.rmtree(folder)
    return outcomes


def full_disks(directory: Path, cache: Path) -> dict[str, str]:
    """Disks of several sizes, that a run fills; then more room, and the run is resumed."""
    place, outcomes = directory / "disk", {}
    place.mkdir()
    config = tiny(400)
    command = [*arguments(config), "--no-tensorboard", "--checkpoint-every", "20", "--keep-checkpoints", "3", "--name"]
    finish(start(*command, "roomy", "--directory", str(directory), cache=cache))
    for kilobytes in (64, 128, 192, 256, 384):
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", place], capture_output=True
        )
        if mounted.returncode:
            return {"not measured": "mounting a small disk needs root"}
        try:
            process = start(*command, "run", "--directory", str(place), cache=cache)
            output = process.communicate()[0]
            outcome = "finished" if not process.returncode else "error: said" if "error: " in output else output
            subprocess.run(["mount", "-o", "remount,size=64m", place], check=True)
            if (place / "run" / "config.json").exists():
                said = "RuntimeWarning" in finish(start("--resume", str(place / "run"), cache=cache))
                ours, theirs = checkpoint(place / "run"), checkpoint(directory / "roomy")
                assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
                if not said:
                    assert_same_run(place / "run", directory / "roomy")
                outcome += f"; resumed with more room: {'the same state, lost metrics said' if said else 'identical'}"
            outcomes[f"{kilobytes} kB"] = outcome
        finally:
            subprocess.run(["umount", place], check=True)
    return outcomes


def not_finite(directory: Path) -> dict[str, str]:
    """A non-finite number in each input, at one step: the run stops there, or skips one update."""
    outcomes = {}
    for field in ("reward", "obs"):
        for value in (float("nan"), float("inf")):
            train = cleanrl_ppo.make_train(tiny(), poisoned(envs.make("CartPole-v1"), field, value))
            for mode in ("stop", "skip"):
                name = f"{field} {value}, {mode}"
                with contextlib.redirect_stdout(io.StringIO()):
                    try:
                        folder, result = go(train, directory, name, on_nonfinite=mode, checkpoint_every=1)
                        lost = result["skipped_minibatches"]
                        outcomes[name] = f"{lost} of {2 * len(rows(folder))} minibatches skipped, and said"
                    except training.NonFiniteError as error:
                        outcomes[name] = f"stopped: {str(error).partition('.')[0]}"
                saved = checkpoint(directory / name)
                parameters = [x for key, x in saved.items() if key.startswith("learner.params")]
                assert all(np.isfinite(x).all() for x in parameters), f"{name}: saved what is not finite"
    return outcomes


def poisoned(env: Any, field: str, value: float) -> Any:
    """`env`, where at one step of the run a reward or an observation is `value`."""

    def step(key: jax.Array, state: Any, action: Any) -> Any:
        state, out = env.step(key, state, action)
        here = out.episode_length == 9  # once per episode
        x = getattr(out, field)
        bad = jnp.where(here.reshape(here.shape + (1,) * (x.ndim - 1)), value, x)
        return state, out._replace(**{field: bad})

    return env._replace(step=step)


def signals(directory: Path, cache: Path, wait: float) -> dict[str, dict[str, float]]:
    """Seconds from a signal to the end of the process, in a run of 3e9 steps with the default configuration."""
    measured = {}
    config = dataclasses.replace(cleanrl_ppo.Config(), total_timesteps=STEPS)

    def begun(name: str) -> tuple[subprocess.Popen[str], Path]:
        options = ["--directory", str(directory), "--name", name]
        process = start("--total-timesteps", str(config.total_timesteps), *options, cache=cache, optimized=True)
        folder = directory / name
        until(process, lambda: (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size > 0)
        time.sleep(wait)
        return process, folder

    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        process, folder = begun(name)
        process.send_signal(signal.Signals[name])
        sent = time.monotonic()
        output = process.communicate()[0]
        assert process.returncode == 128 + signal.Signals[name], output
        measured[name] = {"seconds": round(time.monotonic() - sent, 2), "saved_update": max(steps(folder))}
        assert len(rows(folder)) == max(steps(folder))
    process, folder = begun("twice")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    sent = time.monotonic()
    process.communicate()
    measured["SIGINT again"] = {"seconds": round(time.monotonic() - sent, 2)}
    process, folder = begun("usr1")
    process.send_signal(signal.SIGUSR1)
    sent = time.monotonic()
    until(process, lambda: bool(list((folder / "checkpoints").glob("[0-9]*"))))
    measured["SIGUSR1, to its checkpoint"] = {"seconds": round(time.monotonic() - sent, 2)}
    assert process.poll() is None
    process.kill()
    process.communicate()
    return measured


def until(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    """Wait until the process has done something."""
    while process.poll() is None and not reached():
        time.sleep(0.01)


def finish(process: subprocess.Popen[str]) -> str:
    """Wait until a process ends; return its output."""
    output: str = process.communicate()[0]
    assert process.returncode == 0, output
    return output


def measure(directory: Path, times: int, seed: int, wait: float) -> dict[str, Any]:
    """Every attack."""
    began = time.monotonic()
    (directory / "signals").mkdir()
    cache = directory / "cache"
    results: dict[str, Any] = {"signals": signals(directory / "signals", cache, wait)}
    print(results, flush=True)
    with compiled_programs_kept_in(cache), contextlib.redirect_stdout(io.StringIO()):
        runs = Runs(directory)
        results["damaged_bytes"] = damaged_bytes(runs, times, seed)
        results["mislabelled_checkpoints"] = mislabelled(runs)
        results["removed_while_running"] = lost_files(runs)
        results["not_finite"] = not_finite(directory)
    results["full_disk"] = full_disks(directory, cache)
    return {**results, "load_average": os.getloadavg()[0], "seconds": round(time.monotonic() - began)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=60, help="damaged files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wait", type=float, default=20, help="seconds of training before a signal")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        results = measure(Path(directory), args.times, args.seed, args.wait)
    write(str(ROOT / "benchmarks" / "results" / "attack.json"), "benchmarks attack", results)
    for name, outcome in results.items():
        print(f"{name}: {outcome}")
