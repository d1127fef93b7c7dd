"""The metrics file: what is damaged is noticed, and a policy does not depend on it."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from ppo_parts import training
from ppo_parts.errors import UserError, UserValueError
from ppo_parts.recipes import cleanrl_ppo
from ppo_parts.training import _progress
from ppo_parts.training._files import lines_of, valid_rows
from tests.common import assert_same
from tests.runs import checkpoint, go, rows, tiny


def test_metrics_that_are_damaged_end_before(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = [{"update": i, "loss": float(i)} for i in range(4)]
    lines = lines_of(good).splitlines(keepends=True)
    for rest in (b"\x00\xff\n", lines[3].rstrip(b"\n"), lines[2], lines[1], b"[1]\n", b"{}\n", b'{"update": "3"}\n'):
        path.write_bytes(b"".join([*lines[:3], rest]))
        assert training.read_metrics(path) == good[:3]
        assert [end for _, end in valid_rows(path)][-1] == len(b"".join(lines[:3]))


@pytest.mark.parametrize("how", ["lost", "damaged"])
def test_metrics_that_are_lost_keep_neither_a_policy_nor_a_run_from_loading(
    train, make_train, broken, whole, how, tmp_path
):
    path, known = broken / "metrics.jsonl", 0 if how == "lost" else 3
    if how == "lost":
        path.unlink()
    else:
        path.write_bytes(b"".join([*path.read_bytes().splitlines(keepends=True)[:3], os.urandom(100)]))
    says = r"metrics\.jsonl is (missing|damaged and has only 3).* of the 8 updates"
    with pytest.warns(RuntimeWarning, match=says):
        run = training.load(broken, make_train)
    assert run.update == 8 == int(run.state.learner.step)
    assert np.isfinite(run.metrics["loss"]).tolist() == [True] * 3 + [False] * 5 if known else run.metrics == {}
    if how == "lost":
        with pytest.warns(RuntimeWarning, match=says):
            folder, _ = go(train, tmp_path, "next", init_from=broken)
        assert rows(folder) == rows(whole[0])[8:]
    with pytest.warns(RuntimeWarning, match=says):
        folder, _ = go(train, None, "", resume=broken)
    expected = rows(whole[0])
    assert rows(folder) == expected[:known] + expected[8:]
    assert_same(checkpoint(folder), checkpoint(whole[0]))


def test_metrics_as_columns():
    table = [{"update": 0, "x": 1.0}, {"update": 1, "y": 0.0}]
    np.testing.assert_array_equal(training.column(table, "x"), [1.0, np.nan])
    for kind in (KeyError, UserError):
        with pytest.raises(kind, match=r"^no update has z; there are update, x, y$"):
            training.column(table, "z")
    with pytest.raises(UserValueError, match=r"x must be numbers, and as many in each row, got \[\[1, 2\], 3\]"):
        training.column([{"x": [1, 2]}, {"x": 3}], "x")


@pytest.mark.slow
def test_memory_of_a_run_does_not_grow(train, tmp_path):
    """100,000 updates, whose numbers cost nothing, after 20,000 to warm up; then the first call after `resume`."""
    resident, began, first = [], [], []

    class Free(training.Program):
        def advance_from(self, state):
            return self.advance

        def advance(self, state, most):
            first.append(time.monotonic() - began[-1])
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]))
            numbers = np.linspace(0, 1, most, dtype=np.float32)
            return state, {name: numbers for name in train.shapes[1] if not name.startswith("nonfinite")}

    config, seconds = tiny(120_000), []
    long = cleanrl_ppo.make_train(config)
    options = {"checkpoint_every": 1000, "log_every": 600}
    for where in ({"name": "run", "place": tmp_path}, {"name": "", "place": None, "resume": tmp_path / "run"}):
        began.append(time.monotonic())
        first.clear()
        stop = lambda rows: (_ for _ in ()).throw(training.StopRun) if rows[-1]["update"] == 118_999 else None  # noqa: E731
        go(long, config=config, program=Free, on_rows=stop, **where, **options)
        seconds.append(first[0])
    warm, end = np.mean(resident[18:20]), np.max(resident[20:119])
    print(f"{warm * 4 / 1024:.1f} MB after 20,000 updates, at most {end * 4 / 1024:.1f} after; first call {seconds}")
    assert end < 1.02 * warm
    assert seconds[1] < seconds[0] + 15


def test_speed_is_that_of_the_call_without_compiling(train, monkeypatch):
    """Two records of one call share its time, and of the first call the beginning is unknown."""
    clock, written = iter([0.0, 100.0, 102.0]), []
    monkeypatch.setattr(_progress.time, "perf_counter", lambda: next(clock))
    options = training.RunOptions(log_every=1)
    listen = _progress.records(train, options, lambda first: [], 0, lambda record, step: written.append(record))
    for updates in ([0], [1, 2]):
        listen([{"update": i, "env_steps": 16 * (i + 1)} for i in updates])
    assert [record.get("time/steps_per_second") for record in written] == [None, 16.0, 16.0]
