"""A run that is killed again and again, at any moment of its life, ends as if nothing had happened."""

import random
import signal
import time

import pytest

from tests.running import arguments, assert_same_run, rows, start, tiny

KILLS, UPDATES = 20, 1500
OPTIONS = ("--checkpoint-every", "13", "--log-every", "3", "--no-tensorboard")


@pytest.mark.slow
def test_twenty_kills(tmp_path):
    """Kills begin while it starts, compiles, trains, writes and resumes; each life is given a little more time."""
    cache, config = tmp_path / "cache", tiny(UPDATES)
    undisturbed = start(*arguments(config), "--directory", str(tmp_path), "--name", "whole", *OPTIONS, cache=cache)
    began = time.monotonic()
    output = undisturbed.communicate(timeout=600)[0]
    assert undisturbed.returncode == 0, output
    whole = time.monotonic() - began

    rng, folder, killed, lives, reached = random.Random(0), tmp_path / "run", 0, 0, []
    while not (folder / "result.json").exists():
        lives += 1
        assert lives < 200, reached
        if (folder / "config.json").exists():
            process = start("--resume", str(folder), cache=cache)
        else:
            process = start(*arguments(config), "--directory", str(tmp_path), "--name", "run", *OPTIONS, cache=cache)
        if killed < KILLS:
            if rng.random() < 0.5:  # soon after it goes on, where it trains and writes
                has = len(rows(folder)) if (folder / "metrics.jsonl").exists() else 0
                wait_for_rows(folder, has + 30, process)
                time.sleep(rng.uniform(0, 0.2))
            else:
                time.sleep(rng.uniform(0, whole))
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                killed += 1
        output = process.communicate(timeout=600)[0]
        assert process.returncode in (0, -signal.SIGKILL), output
        reached.append(len(rows(folder)) if (folder / "metrics.jsonl").exists() else 0)
    print("updates written after each life:", reached)
    assert killed >= KILLS // 2
    assert_same_run(folder, tmp_path / "whole")


def wait_for_rows(folder, number, process):
    path = folder / "metrics.jsonl"
    while process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= number:
            return
        time.sleep(0.01)
