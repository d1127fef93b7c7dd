"""Runs in their own processes: one that is killed again and again, and two that train together."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest

from tests.common import assert_same
from tests.runs import ROOT, STEPS_PER_UPDATE, assert_same_run, checkpoint, logged, rows, steps

pytestmark = pytest.mark.slow
KILLS, UPDATES_PER_LIFE = 20, 60
SIZES = "--num-steps 8 --num-minibatches 2 --update-epochs 1 --hidden 8 --no-tensorboard "
KILLED = "--num-envs 2 --log-every 5 --eval-every 20 --eval-episodes 2 --best-metric evaluation/episode_return "
TOGETHER = "--num-envs 8 --shards 2 --total-timesteps 1e8 --checkpoint-every 1000000 --checkpoint-minutes 600 "
HEARTBEAT = 10


def started(processes, place, *argv):
    """Start the recipe in one or several processes, as torchrun does; `output` has what they print."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1] - 1
    found, argv = [], list(argv)
    if processes > 1:
        argv += ["--distributed", "--heartbeat-timeout", str(HEARTBEAT)]
    for rank in range(processes):
        env = os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": "8", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
        if processes > 1:
            group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": processes, "RANK": rank}
            env |= {name: str(x) for name, x in group.items()}
        command = [sys.executable, "-m", "ppo_parts.recipes.cleanrl_ppo", *argv]
        with (place / f"log{rank}").open("w") as log:
            found.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT))
    return found


def output(place, rank=0):
    return (place / f"log{rank}").read_text()


def wait_for(condition, processes, place, seconds=300, pause=0.2):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        assert all(process.poll() is None for process in processes), output(place)
        time.sleep(pause)


def complete(folder):
    """Return the numbers of the complete checkpoints."""
    return [int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdecimal()]


def half_written(folder):
    """Return whether an incomplete checkpoint is later than all complete ones; an earlier one was being removed."""
    partial = [int(path.name.partition(".")[0]) for path in (folder / "checkpoints").glob("*.orbax-checkpoint-tmp*")]
    return max(partial, default=0) > max(complete(folder), default=0)


def test_a_run_killed_twenty_times_ends_the_same(tmp_path):
    def finish(*argv):
        (process,) = started(1, tmp_path, *argv)
        assert process.wait() == 0, output(tmp_path)

    rng, folder, moments = random.Random(0), tmp_path / "run", Counter()
    total = f"--total-timesteps {(KILLS + 2) * UPDATES_PER_LIFE * STEPS_PER_UPDATE} --directory {tmp_path} --name"
    command = (SIZES + KILLED + total).split()
    finish(*command, "whole", "--checkpoint-every", "50")
    for number in range(KILLS):
        writing = rng.random() < 0.7
        resumed = ["--resume", str(folder)] if (folder / "config.json").exists() else [*command, "run"]
        every = "1" if writing else "50"  # so most of the time goes into checkpoints, or into updates
        before, latest = logged(folder), max(complete(folder), default=0)
        (process,) = started(1, tmp_path, *resumed, "--checkpoint-every", every)
        if number % 10 == 9:
            time.sleep(rng.uniform(0, 8))  # it is still starting
        else:
            goal = before + rng.randrange(1, UPDATES_PER_LIFE)
            wait_for(lambda goal=goal: logged(folder) >= goal, [process], tmp_path, pause=0.0005)
            if writing:
                wait_for(lambda: half_written(folder), [process], tmp_path, pause=0.0005)
            time.sleep(rng.uniform(0, 0.01))
        assert process.poll() is None, output(tmp_path)
        process.kill()
        process.wait()
        from_update = re.search(r"environment steps(?:, from update (\d+))?\n", output(tmp_path))
        assert from_update is None or int(from_update[1] or 0) == latest
        moments["checkpoint" if half_written(folder) else "update" if logged(folder) > before else "start"] += 1
        assert not complete(folder) or checkpoint(folder)  # orbax alone can read it
    finish("--resume", str(folder), "--checkpoint-every", "50")
    assert_same_run(folder, tmp_path / "whole")
    best = json.loads((folder / "result.json").read_text())["best"]["update"]
    assert_same(*(checkpoint(tmp_path / name, best) for name in ("run", "whole")))
    assert moments["checkpoint"] >= 10
    assert moments["update"] >= 1


def test_two_processes(tmp_path):
    """Two processes have the rows of one; one signal stops both; and the survivor notices if one is lost."""
    folder, alone = tmp_path / "two", tmp_path / "one"
    new = f"{SIZES}{TOGETHER}--directory {tmp_path} --name".split()

    one = started(1, tmp_path, *new, "one")
    wait_for(lambda: logged(alone) > 20, one, tmp_path)
    one[0].send_signal(signal.SIGTERM)
    assert one[0].wait(60) == 128 + signal.SIGTERM

    # A signal to the second process stops both, with a checkpoint.
    two = started(2, tmp_path, *new, "two")
    wait_for(lambda: logged(folder) > 20, two, tmp_path)
    two[1].send_signal(signal.SIGTERM)
    assert [process.wait(60) for process in two] == [128 + signal.SIGTERM] * 2
    (saved,) = steps(folder)
    assert saved == len(rows(folder))
    for expected, found in zip(rows(alone)[:10], rows(folder)[:10], strict=True):
        for name in expected:
            np.testing.assert_allclose(found[name] or 0, expected[name] or 0, 1e-3, 1e-4, err_msg=name)

    # If one is killed, the other notices, because a collective operation fails.
    gone, died = "JaxRuntimeError", "another task died"
    lost = rows_after_loss(folder, saved, tmp_path, 1, signal.SIGKILL, gone)

    # The resumed run repeats what was computed after the checkpoint. Now the first process is killed, through which the
    # others find each other, so JAX itself ends them. The same happens if a process no longer answers.
    assert rows_after_loss(folder, saved, tmp_path, 0, signal.SIGKILL, died) == lost
    assert rows_after_loss(folder, saved, tmp_path, 1, signal.SIGSTOP, died) == lost


def rows_after_loss(folder, saved, place, victim, signal_number, sentence):
    """Resume, stop one process, and wait for the other to end with a sentence; return rows after the checkpoint."""
    two = started(2, place, "--resume", str(folder))
    wait_for(lambda: logged(folder) == saved, two, place)  # then it has cut off the rows after the checkpoint
    wait_for(lambda: logged(folder) > saved + 20, two, place)
    two[victim].send_signal(signal_number)
    began, survivor = time.monotonic(), 1 - victim
    try:
        assert two[survivor].wait(4 * HEARTBEAT) != 0
    finally:
        for process in two:
            process.kill()
            process.wait()
    assert time.monotonic() - began < 2 * HEARTBEAT, output(place, survivor)
    assert sentence in output(place, survivor)
    whole = (folder / "metrics.jsonl").read_text().splitlines()[: saved + 20]  # the last row may have been cut off
    return list(map(json.loads, whole))
