"""A run that is killed again and again, at any moment of its life, ends as if nothing had happened."""

import json
import random
import re
import signal
import time
from collections import Counter

import numpy as np
import pytest

from tests.runs import arguments, assert_same_run, checkpoint, logged, start, tiny

KILLS, UPDATES_PER_LIFE = 20, 60
EVALUATED = ("--eval-every", "20", "--eval-episodes", "2", "--best-metric", "evaluation/episode_return")
OPTIONS = ("--no-tensorboard", "--log-every", "5", *EVALUATED)


def complete(folder):
    """Numbers of the complete checkpoints."""
    return [int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdecimal()]


def half_written(folder):
    """Return whether an incomplete checkpoint is later than all complete ones; an earlier one was being removed."""
    partial = [int(path.name.partition(".")[0]) for path in (folder / "checkpoints").glob("*.orbax-checkpoint-tmp*")]
    return max(partial, default=0) > max(complete(folder), default=0)


def until(process, reached):
    while process.poll() is None and not reached():
        time.sleep(0.0005)


def finish(process):
    output = process.communicate()[0]
    assert process.returncode == 0, output


@pytest.mark.slow
def test_kill_twenty_times_ends_the_same(tmp_path):
    rng, folder, moments = random.Random(0), tmp_path / "run", Counter()
    command = [*arguments(tiny((KILLS + 2) * UPDATES_PER_LIFE)), "--directory", str(tmp_path), *OPTIONS, "--name"]
    finish(start(*command, "whole", "--checkpoint-every", "50"))
    for number in range(KILLS):
        writing = rng.random() < 0.7
        resumed = ["--resume", str(folder)] if (folder / "config.json").exists() else [*command, "run"]
        every = "1" if writing else "50"  # so that most of the time goes into checkpoints, or into updates
        before, latest = logged(folder), max(complete(folder), default=0)
        process = start(*resumed, "--checkpoint-every", every)
        if number % 10 == 9:
            time.sleep(rng.uniform(0, 8))  # it is still starting
        else:
            goal = before + rng.randrange(1, UPDATES_PER_LIFE)
            until(process, lambda goal=goal: logged(folder) >= goal)
            if writing:
                until(process, lambda: half_written(folder))
            time.sleep(rng.uniform(0, 0.01))
        assert process.poll() is None, process.communicate()[0]
        process.send_signal(signal.SIGKILL)
        from_update = re.search(r"environment steps(?:, from update (\d+))?\n", process.communicate()[0])
        assert from_update is None or int(from_update[1] or 0) == latest
        moments["checkpoint" if half_written(folder) else "update" if logged(folder) > before else "start"] += 1
        assert not complete(folder) or checkpoint(folder)  # as orbax alone reads it
    finish(start("--resume", str(folder), "--checkpoint-every", "50"))
    assert_same_run(folder, tmp_path / "whole")
    best = json.loads((folder / "result.json").read_text())["best"]["update"]
    ours, theirs = (checkpoint(tmp_path / name, best) for name in ("run", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert moments["checkpoint"] >= 10
    assert moments["update"] >= 1
