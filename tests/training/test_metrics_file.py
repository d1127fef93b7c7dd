"""The metrics file: what is damaged is noticed, and a policy does not depend on it."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from ppo_parts import training
from ppo_parts.errors import UserError, UserValueError
from ppo_parts.recipes import cleanrl_ppo
from ppo_parts.training._metrics_file import Best, Thinning
from tests.common import assert_same
from tests.runs import assert_same_run, checkpoint, go, rows, tiny


@pytest.mark.parametrize("how", ["cut short", "junk"])
def test_metrics_after_the_needed_rows_may_be_anything(train, broken, whole, how):
    path = broken / "metrics.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[:-20] if how == "cut short" else content + b"\x00\xff\xfe{}\n" + os.urandom(100))
    folder, _ = go(train, None, "", resume=broken)
    assert_same_run(folder, whole[0])


def lose(path, how):
    lines = path.read_bytes().splitlines(keepends=True)
    if how == "lost":
        path.unlink()
        return 0
    if how == "binary":
        lines[3] = b"\x00\xff\n"
    elif how == "changed":
        lines[3] = lines[3].replace(b'"loss": ', b'"loss": 1')
    elif how == "swapped":
        lines[3], lines[4] = lines[4], lines[3]
    elif how == "doubled":
        lines.insert(3, lines[2])
    path.write_bytes(b"".join(lines))
    return 3


@pytest.mark.parametrize("how", ["lost", "binary", "changed", "swapped", "doubled"])
def test_metrics_that_are_lost_keep_neither_a_policy_nor_a_run_from_loading(train, make_train, broken, whole, how):
    known = lose(broken / "metrics.jsonl", how)
    says = r"metrics\.jsonl is (missing|damaged and has only 3).* of the 8 updates"
    with pytest.warns(RuntimeWarning, match=says):
        run = training.load(broken, make_train)
    assert run.update == 8 == int(run.state.learner.step)
    assert np.isfinite(run.metrics["loss"]).tolist() == [True] * 3 + [False] * 5 if known else run.metrics == {}
    if known:
        assert len(training.read_metrics(broken / "metrics.jsonl")) == 3
    with pytest.warns(RuntimeWarning, match=says):
        folder, _ = go(train, None, "", resume=broken)
    expected = rows(whole[0])
    assert rows(folder) == expected[:known] + expected[8:]
    assert_same(checkpoint(folder), checkpoint(whole[0]))
    assert len(training.read_metrics(folder / "metrics.jsonl")) == known + 4
    kept = list((folder / "aside").glob("metrics.jsonl-*")) if (folder / "aside").exists() else []
    assert len(kept) == (how != "lost")


def test_metrics_that_are_lost_do_not_keep_a_run_from_beginning_another(train, broken, whole, tmp_path):
    (broken / "metrics.jsonl").unlink()
    with pytest.warns(RuntimeWarning, match=r"is missing"):
        folder, _ = go(train, tmp_path, "next", init_from=broken)
    assert rows(folder) == rows(whole[0])[8:]


def test_metrics_best():
    table = [{"x": x} for x in (1.0, 5.0, None, 3.0)] + [{"y": 0.0}, {"x": 3.0}]
    table = [{"update": update, **row} for update, row in enumerate(table)]

    def best(rows, updates, mode="max", window=1):
        judged = Best("x", mode, window, num_updates=6)
        judged.add(rows, updates)
        return judged.of(updates)

    assert best(table, range(1, 7)) == (2, 5.0)
    assert best(table, [1, 3, 4, 6]) == (4, 3.0)  # the first of two, and nothing at 3
    assert best(table, [2, 4], window=2) == (2, 3.0)  # (1 + 5) / 2, and 3 alone
    assert best(table, range(1, 7), mode="min") == (1, 1.0)
    assert best(table, [3, 5]) is None
    assert best([{"update": 0, "x": [1.0, None]}, {"update": 1, "x": [3.0, 0.0]}], [1, 2]) == (2, 1.5)
    assert best(table[2:], range(1, 7), window=2) == (4, 3.0)  # a log that begins later
    later = Best("x", window=2)
    later.add(table[:2], [1, 2])
    later.add(table[2:])
    assert later.of([1, 2, 6]) == (2, 3.0)  # nothing at 1, between two windows
    assert later.of([6], new=6) == (6, 3.0)
    assert training.column(table, "y").tolist()[4] == 0
    for kind in (KeyError, UserError):
        with pytest.raises(kind, match=r"^no update has z; there are update, x, y$"):
            training.column(table, "z")
    with pytest.raises(UserValueError, match=r"x must be numbers, and as many in each row, got \[\[1, 2\], 3\]"):
        training.column([{"x": [1, 2]}, {"x": 3}], "x")


def test_metrics_of_several_updates_become_one_row():
    """Sums, extremes, means, and means over episodes; evaluations end a row, and non-finite numbers have their own."""
    nan, zero = np.nan, {"nonfinite/loss": 0.0}
    ways = {"episodes": "sum", "nonfinite/loss": "sum", "ratio_max": "max"}
    updates = [
        {"episodes": 1.0, "episode_return": 2.0, "loss": 1.0, "ratio_max": 3.0, **zero},
        {"episodes": 0.0, "episode_return": nan, "loss": 2.0, "ratio_max": 5.0, **zero},
        {"episodes": 3.0, "episode_return": 6.0, "loss": 3.0, "ratio_max": 4.0, **zero},
        {"episodes": 0.0, "episode_return": nan, "loss": nan, "ratio_max": 1.0, "nonfinite/loss": 2.0},
        {"episodes": 0.0, "episode_return": nan, "loss": 5.0, "ratio_max": 1.0, **zero, "evaluation/won": 1.0},
        {"episodes": 1.0, "episode_return": 1.0, "loss": 6.0, "ratio_max": 1.0, **zero},
        {"episodes": 1.0, "episode_return": 3.0, "loss": 8.0, "ratio_max": 2.0, **zero},
    ]
    updates = [{"update": i, "env_steps": 10 * (i + 1), **row} for i, row in enumerate(updates)]
    rows, pending = Thinning(4, 8, ways).split(updates)
    assert [row["update"] for row in rows] == [2, 3, 4]
    first = {"update": 2, "env_steps": 30, "episodes": 4, "episode_return": 5, "loss": 2, "ratio_max": 5, **zero}
    assert rows[0] == first
    assert rows[1:] == updates[3:5]
    assert pending == updates[5:]
    (last,), pending = Thinning(4, 8, ways).split([*pending, updates[0] | {"update": 7}])
    assert (last["loss"], last["episode_return"], pending) == (5.0, 2.0, [])
    assert Thinning(1, 8, ways).split(updates) == (updates, [])


@pytest.mark.slow
def test_memory_of_a_run_does_not_grow(train, tmp_path):
    """100,000 updates, whose numbers cost nothing, after 20,000 to warm up; then the first call after `resume`."""
    resident, began, first = [], [], []

    def free(*args):
        def advance(state, most):
            first.append(time.monotonic() - began[-1])
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]))
            numbers = np.linspace(0, 1, most, dtype=np.float32)
            return state, {name: numbers for name in train.shapes[1] if not name.startswith("nonfinite")}

        return advance

    config, seconds = tiny(120_000), []
    long = cleanrl_ppo.make_train(config)
    options = {"checkpoint_every": 1000, "log_every": 600, "best_metric": "loss", "metrics_every": 1}
    for where in ({"name": "run", "place": tmp_path}, {"name": "", "place": None, "resume": tmp_path / "run"}):
        began.append(time.monotonic())
        first.clear()
        stop = lambda rows: (_ for _ in ()).throw(training.StopRun) if rows[-1]["update"] == 118_999 else None  # noqa: E731
        go(long, config=config, compile=free, on_rows=stop, **where, **options)
        seconds.append(first[0])
    warm, end = np.mean(resident[18:20]), np.max(resident[20:119])
    print(f"{warm * 4 / 1024:.1f} MB after 20,000 updates, at most {end * 4 / 1024:.1f} after; first call {seconds}")
    assert end < 1.02 * warm
    assert seconds[1] < seconds[0] + 5
