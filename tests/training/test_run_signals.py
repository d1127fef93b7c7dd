"""Signals: the first saves, the second ends at once."""

import os
import random
import signal
import threading
import time

import pytest

from ppo_parts import training
from ppo_parts.recipes import cleanrl_ppo
from ppo_parts.training import RunOptions, _signals
from ppo_parts.training._config_json import stored_run
from ppo_parts.training._signals import Interrupt
from tests.runs import (
    QUIET,
    acting,
    arguments,
    assert_same_run,
    checkpoint,
    go,
    rows,
    start,
    steps,
    tiny,
)


@pytest.fixture(autouse=True)
def hangup():
    """SIGHUP as in a terminal; tests that run under nohup would otherwise inherit that it is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("name", "after"), [("SIGINT", 6), ("SIGTERM", 4)])
def test_signal_saves_first(train, whole, tmp_path, capsys, name, after):
    number = signal.Signals[name]
    before = signal.getsignal(number)
    folder, result = go(train, tmp_path, "run", compile=acting(after, lambda: signal.raise_signal(number)))
    assert signal.getsignal(number) is before
    assert result["interrupted_by"] == name
    assert result["env_steps"] == after * 16
    assert int(checkpoint(folder)["step"]) == after
    assert f"interrupted after update {after} of 12; continue with --resume {folder}" in capsys.readouterr().out
    assert not (folder / "result.json").exists()
    folder, result = go(train, None, "", resume=folder, eval_episodes=3)
    assert "interrupted_by" not in result
    assert_same_run(folder, whole[0])


def test_signal_usr1_saves_and_continues(train, whole, tmp_path):
    compile = acting(6, lambda: signal.raise_signal(signal.SIGUSR1))
    folder, result = go(train, tmp_path, "run", compile=compile, keep_checkpoints=None)
    assert "interrupted_by" not in result
    assert steps(folder) == [4, 6, 8, 12]
    assert_same_run(folder, whole[0])


def test_signal_again_ends_at_once():
    """Even while the main thread waits for something that no signal ends, as for a device."""
    ended = []
    busy = threading.Lock()
    busy.acquire()
    with Interrupt(end=lambda status: ended.append((status, time.monotonic())) or busy.release()) as interrupt:
        began = time.monotonic()
        for delay in (0.1, 0.2, 0.8):  # the first two count as one
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
        while not busy.acquire(timeout=5):
            raise AssertionError("it waits")
    ((status, then),) = ended
    assert status == 128 + signal.SIGINT
    assert then - began < 1.5
    assert interrupt.asked == "SIGINT"


def test_signal_that_nohup_ignores_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGHUP)
    assert not interrupt.asked


def test_signal_while_processes_agree_counts_in_the_next_call(monkeypatch):
    """The other processes have not heard of it, so this one may not stop alone."""
    interrupt = Interrupt()
    monkeypatch.setattr(_signals, "agree", lambda number: interrupt.ask("SIGTERM") or [number])
    assert [interrupt.agree(), interrupt.agree()] == [False, True]


def test_signal_in_a_long_device_call_ends_a_process(tmp_path, cache):
    """One update takes minutes: the first Ctrl-C waits for it, the second does not, and the folder is sound."""
    config = tiny(num_steps=2**22, total_timesteps=2**24)
    process = start(*arguments(config), "--directory", str(tmp_path), "--name", "run", cache=cache)
    output = ""
    while "compiled in" not in output:
        output += process.stdout.readline()
        assert process.poll() is None, output
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    while "saving; again to abort" not in output:
        output += process.stdout.readline()
        assert process.poll() is None, output
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert process.wait(timeout=60) == 128 + signal.SIGINT
    assert time.monotonic() - began < 5
    assert stored_run(tmp_path / "run")["config"]["num_steps"] == 2**22


def test_signal_processes_that_are_interrupted_and_killed(tmp_path, cache):
    """Real ones: Ctrl-C at a random moment, kill -9 at another, and the end bit-identical to an undisturbed run."""
    config = tiny(300)
    every = ["--checkpoint-every", "7", "--log-every", "1"]
    undisturbed = RunOptions(directory=tmp_path, name="whole", **{**QUIET, "checkpoint_every": 7, "log_every": 1})
    train = cleanrl_ppo.make_train(config)
    training.run(train, config, undisturbed)
    folder = tmp_path / "run"
    first = start(*arguments(config), "--directory", str(tmp_path), "--name", "run", *every, cache=cache)
    disturb(first, folder, 5, signal.SIGINT)
    output = first.communicate(timeout=120)[0]
    if first.returncode != 0:  # it had not ended yet
        assert first.returncode == 130, output
        assert "continue with --resume" in output
        second = start("--resume", str(folder), cache=cache)
        disturb(second, folder, len(rows(folder)) + 5, signal.SIGKILL)
        output = second.communicate(timeout=120)[0]
        assert second.returncode in (-9, 0), output
    training.run(train, config, RunOptions(resume=folder, **QUIET | {"log_every": 1}))
    assert_same_run(folder, tmp_path / "whole")


def disturb(process, folder, after_rows, number):
    """Send a signal at a random moment after the metrics have so many rows."""
    path, deadline = folder / "metrics.jsonl", time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if path.exists() and path.read_bytes().count(b"\n") >= after_rows:
            break
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.3))
    process.send_signal(number)
