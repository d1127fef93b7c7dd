"""Kill a run again and again: does it always end as if nothing had happened?

    python -m benchmarks kill --times 50

A tiny run is killed with SIGKILL at random moments, most of them while a checkpoint is being written, and resumed each
time. In the end its metrics, its result and its checkpoints (the last and the best) have to be those of a run that
nobody disturbed, to the last bit. Writes benchmarks/results/kill.json.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ._runs import ROOT, arguments, assert_same_run, checkpoint, start, tiny
from ._timing import write

UPDATES_PER_LIFE = 60
EVALUATED = ("--eval-every", "20", "--eval-episodes", "2", "--best-metric", "evaluation/episode_return")
OPTIONS = ("--no-tensorboard", "--log-every", "5", *EVALUATED)


def measure(times: int, directory: Path, seed: int = 0) -> dict[str, object]:
    """Kill a run `times` times, finish it, and compare it with one that was not interrupted.

    Raises:
        AssertionError: it did not go on from its latest complete checkpoint, or ended differently.
    """
    rng, cache, folder = random.Random(seed), directory / "cache", directory / "run"
    config = tiny((times + 2) * UPDATES_PER_LIFE)
    command = [*arguments(config), "--directory", str(directory), *OPTIONS, "--name"]
    began = time.monotonic()
    finish(start(*command, "whole", "--checkpoint-every", "50", cache=cache))
    lives = []
    for number in range(times):
        writing = rng.random() < 0.7
        resumed = ["--resume", str(folder)] if (folder / "config.json").exists() else [*command, "run"]
        every = "1" if writing else "50"  # so that most of the time goes into checkpoints, or into updates
        before, latest = rows(folder), max(complete(folder), default=0)
        process = start(*resumed, "--checkpoint-every", every, cache=cache)
        if number % 10 == 9:
            time.sleep(rng.uniform(0, 8))  # it is still starting
        else:
            goal = before + rng.randrange(1, UPDATES_PER_LIFE)
            until(process, lambda goal=goal: rows(folder) >= goal)
            if writing:
                until(process, lambda: half_written(folder))
            time.sleep(rng.uniform(0, 0.01))
        assert process.poll() is None, process.communicate()[0]
        process.send_signal(signal.SIGKILL)
        output = process.communicate()[0]
        from_update = re.search(r"environment steps(?:, from update (\d+))?\n", output)
        if from_update is not None:
            assert int(from_update[1] or 0) == latest, f"went on from {from_update[1]}, not from {latest}"
        moment = "checkpoint" if half_written(folder) else "update" if rows(folder) > before else "start"
        assert not complete(folder) or checkpoint(folder)  # as orbax alone reads it
        lives.append(
            {"killed_in": moment, "updates": rows(folder), "latest_checkpoint": max(complete(folder), default=0)}
        )
        print(f"{number + 1}: {lives[-1]}", flush=True)
    finish(start("--resume", str(folder), "--checkpoint-every", "50", cache=cache))
    assert_same_run(folder, directory / "whole")
    best = json.loads((folder / "result.json").read_text())["best"]["update"]
    ours, theirs = (checkpoint(directory / name, best) for name in ("run", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    return {
        "kills": times,
        "killed_in": dict(Counter(life["killed_in"] for life in lives)),
        "updates": config.total_timesteps // (config.num_envs * config.num_steps),
        "bit_identical": ["metrics.jsonl", "result.json", "last checkpoint", f"best checkpoint (update {best})"],
        "seconds": round(time.monotonic() - began),
        "lives": lives,
    }


def rows(folder: Path) -> int:
    """Updates on record."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def complete(folder: Path) -> list[int]:
    """Numbers of the complete checkpoints."""
    return [int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdecimal()]


def half_written(folder: Path) -> bool:
    """Return whether an incomplete checkpoint is later than all complete ones; an earlier one was being removed."""
    partial = [int(path.name.partition(".")[0]) for path in (folder / "checkpoints").glob("*.orbax-checkpoint-tmp*")]
    return max(partial, default=0) > max(complete(folder), default=0)


def until(process: subprocess.Popen, reached: Callable[[], bool]) -> None:
    """Wait until the process has done something."""
    while process.poll() is None and not reached():
        time.sleep(0.0005)


def finish(process: subprocess.Popen) -> None:
    """Wait until a process ends."""
    output = process.communicate()[0]
    assert process.returncode == 0, output


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        results = measure(args.times, Path(directory), args.seed)
    write(str(ROOT / "benchmarks" / "results" / "kill.json"), "benchmarks kill", results)
    print(f"{results['kills']} kills, {results['killed_in']}: the same to the last bit")
