"""What ends a run early: signals, a function of the user, hosts that fail, and non-finite numbers."""

import dataclasses
import json
import os
import signal
import sys
import time
import unittest.mock
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppo_parts import envs, training
from ppo_parts.recipes import cleanrl_ppo
from ppo_parts.training import _folder, _processes, _run
from ppo_parts.training._folder import RunFolder
from ppo_parts.training._processes import Interrupt
from tests.common import assert_same
from tests.envs.common import Scripted, altered, clock, host
from tests.runs import EVALUATED, ByTwos, acting, assert_same_run, checkpoint, go, rows, steps, tiny


@pytest.fixture(autouse=True)
def hangup():
    """Handle SIGHUP as in a terminal; under nohup, tests would otherwise inherit that it is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def raising(error, after=None):
    """Make a function for `on_rows` that raises this error after update 5, first sending a signal if there is one."""

    def on_rows(new):
        if new[-1]["update"] == 5:
            if after:
                signal.raise_signal(after)
            raise error

    return on_rows


@pytest.mark.parametrize("by", ["SIGTERM", "SIGINT", "StopRun", "KeyError"])
def test_a_run_that_ends_early_is_saved_and_continued(train, whole, tmp_path, capsys, by):
    """A signal ends it, even if that makes something fail; so does `on_rows`, by asking for an end or by failing."""
    before, folder = signal.getsignal(signal.SIGTERM), tmp_path / "the run"
    if by == "KeyError":
        with pytest.raises(KeyError, match="mine"):
            go(train, tmp_path, "the run", on_rows=raising(KeyError("mine")))
    else:
        program = acting(6, lambda: signal.raise_signal(signal.SIGTERM))
        ways = {
            "SIGTERM": {"program": program}, "StopRun": {"on_rows": raising(training.StopRun("enough"))},
            "SIGINT": {"on_rows": raising(EOFError("its worker ended"), after=signal.SIGINT)},
        }  # fmt: skip
        _, result = go(train, tmp_path, "the run", **ways[by])
        assert (result.pop("interrupted_by"), result.pop("reason", None)) == (by, "enough" if by == "StopRun" else None)
        assert result["env_steps"] == 6 * 16
        assert f"interrupted after update 6 of 12; continue with --resume '{folder}'" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is before
    assert steps(folder) == [4, 6]
    assert not (folder / "result.json").exists()
    _, result = go(train, None, "", resume=folder, eval_episodes=3)
    assert not {"interrupted_by", "reason"} & result.keys()
    assert_same_run(folder, whole[0])


def compiling(name):
    """Make a program in whose compilation a signal arrives."""

    class Compiling(ByTwos):
        def advance_from(self, state):
            signal.raise_signal(signal.Signals[name])
            return super().advance_from(state)

    return Compiling


def test_signal_usr1_saves_and_continues(train, whole, tmp_path):
    later = acting(6, lambda: signal.raise_signal(signal.SIGUSR1))
    for name, program, saved in (("later", later, [4, 6, 8, 12]), ("early", compiling("SIGUSR1"), [2, 4, 8, 12])):
        folder, result = go(train, tmp_path, name, program=program, keep_checkpoints=None)
        assert "interrupted_by" not in result
        assert steps(folder) == saved
        assert_same_run(folder, whole[0])


def test_a_signal_while_a_run_compiles_ends_it_before_the_first_update(train, whole, tmp_path):
    folder, result = go(train, tmp_path, "run", program=compiling("SIGTERM"))
    assert (result["interrupted_by"], result["env_steps"], rows(folder)) == ("SIGTERM", 0, [])
    go(train, None, "", resume=folder)
    assert_same_run(folder, whole[0])


def test_a_signal_after_the_last_update_interrupts_no_process(train, tmp_path, monkeypatch):
    class Late(ByTwos):
        def evaluate(self, state, update):
            signal.raise_signal(signal.SIGTERM)
            return super().evaluate(state, update)

    for first in (True, False):
        monkeypatch.setattr(_folder, "is_first", lambda first=first: first)
        _, result = go(train, tmp_path, "run", program=Late, eval_episodes=1)
        assert ("interrupted_by" in result, "evaluation" in result) == (False, first)


def test_signals_that_stop_end_the_process_when_they_come_again_and_are_agreed_on(monkeypatch):
    """A signal that nohup ignores does not stop; a handler that Python did not set is replaced by the default."""
    for name in _processes.STOP:
        with Interrupt() as interrupt:
            signal.raise_signal(signal.Signals[name])
        assert interrupt.reason["interrupted_by"] == name
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGHUP)
    assert not interrupt.reason
    interrupt._before = {signal.SIGHUP: None}
    interrupt.__exit__()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    with monkeypatch.context() as closed:  # a closed terminal must not raise an error, least of all in a signal handler
        closed.setattr(sys, "stdout", unittest.mock.Mock(write=unittest.mock.Mock(side_effect=OSError(5, "closed"))))
        with _processes.print_messages():
            _processes.logger.info("saving")
    # The other processes have not heard of the signal, so this one may not stop alone.
    interrupt = Interrupt()
    monkeypatch.setattr(_processes, "take_largest", lambda number: interrupt.ask("SIGTERM") or [number])
    assert [interrupt.agree(), interrupt.agree()] == [False, True]
    # A second signal ends the process, but not immediately: a wrapper may forward what a terminal sends as well.
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with Interrupt() as interrupt:
        for pause in (0.0, 0.0, 1.1 * _processes.TOGETHER):
            assert ended == []
            time.sleep(pause)
            signal.raise_signal(signal.SIGINT)
    assert ended == [128 + signal.SIGINT]
    assert interrupt.reason == {"interrupted_by": "SIGINT"}


def test_on_rows_gets_each_row_once_and_in_order(train, evaluated, tmp_path):
    """By then, rows are on the disk, and what the function does to them has no effect."""
    seen, folder = [], tmp_path / "run"

    def on_rows(new):
        assert [row["update"] for row in rows(folder)[-len(new) :]] == [row["update"] for row in new]
        seen.extend(dict(row) for row in new)
        for row in new:
            row.clear()

    go(train, tmp_path, "run", on_rows=on_rows, **EVALUATED)
    assert_same_run(folder, evaluated[0])
    for mine, written in zip(seen, rows(folder), strict=True):
        assert {name: None if np.isnan(x) else x for name, x in mine.items()} == written


crash = SimpleNamespace(steps_left=np.inf)


@pytest.fixture(scope="module")
def host_train():
    """Train on the host, with episodes of seven steps that are each paid 1."""

    def act(env):
        crash.steps_left -= 1
        if crash.steps_left == 0:
            raise OSError("the simulator crashed")

    env = host(*[lambda: Scripted(7, reward=1.0, act=act)] * 2)
    return cleanrl_ppo.make_train(tiny(), env=envs.prepare(env, normalize=True, gamma=0.99))


def test_a_run_on_the_host_resumes_with_new_episodes_and_old_statistics(host_train, tmp_path, capsys):
    folder, _ = go(host_train, tmp_path, "run", on_rows=raising(training.StopRun("enough")), eval_episodes=2)
    done = len(rows(folder))
    assert 6 <= done < host_train.num_updates
    stopped = RunFolder(folder).restore(host_train)[1]
    folder, result = go(host_train, None, "", resume=folder, eval_episodes=2)
    assert "no checkpoint can store them: new episodes begin" in capsys.readouterr().out
    assert [row["update"] for row in rows(folder)] == list(range(host_train.num_updates))
    assert result["evaluation"]["episode_return"]["mean"] == 7
    final = RunFolder(folder).restore(host_train)[1]
    before, after = (int(state.rollout.env_state.inner.moments.seen) for state in (stopped, final))
    assert before == 2 * (done * 8 + 1)  # an observation for the reset, and one for each step
    assert after == 2 * (host_train.num_updates * 8 + 2)  # statistics go on after a second reset


def test_an_error_on_the_host_loses_no_update(host_train, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(crash, "steps_left", 7 * host_train.steps_per_update + 3)
    says = r"^the simulator crashed\nThis error was raised by the environment"
    with pytest.raises(OSError, match=says), training.exit_on_user_error():  # the error keeps its traceback
        go(host_train, tmp_path, "run")
    folder = tmp_path / "run"
    assert f"saved after update 6; continue with --resume {folder}" in capsys.readouterr().out
    assert len(rows(folder)) == 6  # each call has two updates; a checkpoint is due after every fourth update
    assert steps(folder)[-1] == 6  # the error saved it
    go(host_train, None, "", resume=folder)
    assert len(rows(folder)) == host_train.num_updates
    assert json.loads((folder / "result.json").read_text())


def test_an_evaluation_that_fails_loses_no_row(train, tmp_path):
    def evaluate(self, state, update):
        raise KeyError("mine")

    heard, failing = [], type("Failing", (ByTwos,), {"evaluate": evaluate})
    with pytest.raises(KeyError, match="mine"):
        go(train, tmp_path, "run", program=failing, on_rows=heard.extend, eval_episodes=1, eval_every=6)
    assert [row["update"] for row in heard] == list(range(6)) == [row["update"] for row in rows(tmp_path / "run")]
    assert steps(tmp_path / "run") == [4, 6]


def test_nonfinite_numbers_end_a_run_and_the_remedy_that_is_offered_works(tmp_path, capsys):
    """In step 20, which is in update 2, the reward is not a number and could spoil the statistics of endless episodes.

    The update changes nothing, and is counted; everything that is kept is finite.
    """
    endless = altered(clock(jnp.inf), reward=lambda out: jnp.where(out.episode_length == 21, jnp.nan, 1.0))
    config = tiny(6)
    train = cleanrl_ppo.make_train(config, envs.prepare(endless, normalize=True, gamma=config.gamma))
    message = (
        r"^update 3: non-finite numbers arose first in reward \(2 elements\), then in .*"
        r"its last checkpoint, of update 2, is sound.*--on-nonfinite skip skips such updates"
    )
    heard = []
    with pytest.raises(FloatingPointError, match=message):
        go(train, tmp_path, "run", config, log_every=6, checkpoint_every=1, on_rows=heard.extend)
    assert [row["nonfinite/reward"] for row in heard] == [0, 0, 2]
    assert [row["nonfinite/reward"] for row in rows(tmp_path / "run")] == [0, 0, 2]
    options = {"on_nonfinite": "skip", "checkpoint_every": 1, "keep_checkpoints": None}
    folder, result = go(train, None, "", config, resume=tmp_path / "run", **options)
    found = rows(folder)
    assert [row["nonfinite/reward"] for row in found] == [0, 0, 2, 0, 0, 0]
    assert [row["nonfinite/gradient"] > 0 for row in found] == [False, False, True, False, False, False]
    kept = {name: x for name, x in checkpoint(folder).items() if "episode_return" not in name}
    assert all(np.isfinite(x).all() for x in kept.values() if np.issubdtype(np.asarray(x).dtype, np.floating))
    assert (result["skipped_minibatches"], result["skipped_fraction"]) == (2, 1 / 6)
    assert "2 minibatches (17%) had no effect" in capsys.readouterr().out
    before, after = ({k: x for k, x in checkpoint(folder, i).items() if k.startswith("learner")} for i in (2, 3))
    assert (before.pop("learner.step"), after.pop("learner.step")) == (2, 3)
    assert_same(before, after)


def test_nonfinite_parameters_are_never_saved(train, tmp_path):
    """Finite gradients can lead to them, for example in Adam with eps = 0."""

    def update(key, state, batch):
        new, metrics = train.learner.update(key, state, batch)
        poison = jnp.where(state.step == 5, jnp.nan, 0.0)
        return new._replace(params=jax.tree.map(lambda x: x + poison, new.params)), metrics

    poisoned = dataclasses.replace(train, learner=train.learner._replace(update=update))
    message = r"^update 6: non-finite numbers arose first in parameters \(\d+ elements\)\. .*, of update 4, is"
    with pytest.raises(FloatingPointError, match=message):
        go(poisoned, tmp_path, "run", checkpoint_every=2)
    assert steps(tmp_path / "run") == [2, 4]
    assert [row["nonfinite/parameters"] > 0 for row in rows(tmp_path / "run")] == [False] * 5 + [True]


def test_nonfinite_report_is_of_the_first_update():
    """What follows from it comes later; in a sum over updates, it would be listed as the cause."""
    loss, none = {"loss": np.zeros((4, 2))}, {"nonfinite/reward": np.zeros((4, 2), int)}
    later, first = (np.array([[0, 0], [0, n], [0, 4], [0, 4]]) for n in (0, 1))
    measured = loss | none | {"nonfinite/log_prob": later, "nonfinite/gradient": first}
    says = " (seed 1 of 2, from 0): non-finite numbers arose first in gradient (1 minibatch)"
    assert _run.find_nonfinite(measured) == (1, says)
    assert _run.find_nonfinite(measured | {"population/parent": np.zeros((4, 2))})[1].startswith(" (member 1 of 2")
    assert _run.find_nonfinite(loss | none) is _run.find_nonfinite(loss) is None
