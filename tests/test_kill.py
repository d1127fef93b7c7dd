"""A run that is killed again and again, at any moment of its life, ends as if nothing had happened."""

import itertools
import random
import signal
import time

import pytest

from tests.running import arguments, assert_same_run, start, tiny

KILLS, UPDATES, REACH = 20, 2000, 80
OPTIONS = ("--checkpoint-every", "13", "--log-every", "3", "--no-tensorboard")


@pytest.mark.slow
def test_twenty_kills(tmp_path):
    """While it starts, compiles, trains, writes or resumes; no life goes on for much more than `REACH` updates."""
    cache, config = tmp_path / "cache", tiny(UPDATES)
    command = [*arguments(config), "--directory", str(tmp_path), *OPTIONS, "--name"]
    undisturbed = start(*command, "whole", cache=cache)
    began = time.monotonic()
    wait(tmp_path / "whole", undisturbed, 1)
    beginning = time.monotonic() - began
    output = undisturbed.communicate(timeout=600)[0]
    assert undisturbed.returncode == 0, output

    rng, folder, reached = random.Random(0), tmp_path / "run", [0]
    for _ in range(KILLS):
        resumed = (folder / "config.json").exists()
        process = start(*(["--resume", str(folder)] if resumed else [*command, "run"]), cache=cache)
        if rng.random() < 0.4:
            wait(folder, process, reached[-1] + REACH, seconds=rng.uniform(0, beginning))
        else:
            wait(folder, process, reached[-1] + rng.randrange(REACH))
            time.sleep(rng.uniform(0, 0.05))
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        reached.append(written(folder))
    output = start("--resume", str(folder), cache=cache).communicate(timeout=600)[0]
    print("updates written after each life:", reached)
    assert sum(later > earlier for earlier, later in itertools.pairwise(reached)) > KILLS // 4
    assert (folder / "result.json").exists(), output
    assert_same_run(folder, tmp_path / "whole")


def written(folder):
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait(folder, process, updates, seconds=600):
    """Until the run has written so many updates, has ended, or the time is over."""
    deadline = time.monotonic() + seconds
    while written(folder) < updates and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
