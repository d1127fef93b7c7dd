"""Two processes on this machine train together: the rows of one, one signal stops both, and a loss is noticed."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.runs import ROOT, logged, rows, steps

pytestmark = pytest.mark.slow
SIZES = "--total-timesteps 1e8 --num-envs 8 --num-steps 8 --num-minibatches 2 --update-epochs 1 --hidden 8 --shards 2"
QUIET = "--no-progress --no-tensorboard --checkpoint-every 1000000 --checkpoint-minutes 600"
HEARTBEAT = 10


def started(processes, place, *argv):
    """The recipe in one or several processes, as torchrun starts them."""
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


def wait_for(condition, processes, place, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        assert all(process.poll() is None for process in processes), (place / "log0").read_text()
        time.sleep(0.2)


def test_two_processes(tmp_path):
    folder, alone = tmp_path / "two", tmp_path / "one"
    new = [*SIZES.split(), *QUIET.split(), "--directory", str(tmp_path), "--name"]

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

    # If one is killed, the other notices.
    gone, died = "error: another process of this run does not answer", "another task died"
    lost = rows_after_loss(folder, saved, tmp_path, 1, signal.SIGKILL, gone)

    # The run that is resumed repeats what was computed after the checkpoint. Now the first process is killed, through
    # which the others find each other: JAX ends them itself. The same happens if one does not answer any more.
    assert rows_after_loss(folder, saved, tmp_path, 0, signal.SIGKILL, died) == lost
    assert rows_after_loss(folder, saved, tmp_path, 1, signal.SIGSTOP, died) == lost


def rows_after_loss(folder, saved, place, victim, signal_number, sentence):
    """Resume, stop one process, and wait for the other to end with a sentence; return rows after the checkpoint."""
    two = started(2, place, "--resume", str(folder))
    wait_for(lambda: logged(folder) == saved, two, place)  # it has cut off the rows after the checkpoint
    wait_for(lambda: logged(folder) > saved + 20, two, place)
    two[victim].send_signal(signal_number)
    began, survivor = time.monotonic(), 1 - victim
    try:
        assert two[survivor].wait(4 * HEARTBEAT) != 0
    finally:
        for process in two:
            process.kill()
            process.wait()
    text = (place / f"log{survivor}").read_text()
    assert time.monotonic() - began < 2 * HEARTBEAT, text
    assert sentence in text
    whole = (folder / "metrics.jsonl").read_text().splitlines()[: saved + 20]  # the last one may have been cut off
    return list(map(json.loads, whole))
