"""The metrics file: what is damaged is noticed, and a policy does not depend on it."""

import os

import numpy as np
import pytest

from benchmarks._runs import assert_same_run, checkpoint, go, rows
from ppo_parts import training
from ppo_parts.training._metrics_file import best_update
from tests.common import assert_same


def test_metrics_last_line_cut_short_is_left_out(train, broken, whole):
    path = broken / "metrics.jsonl"
    path.write_text(path.read_text()[:-20])
    folder, _ = go(train, None, "", resume=broken)
    assert_same_run(folder, whole[0])


def test_metrics_after_the_needed_rows_may_be_anything(train, broken, whole):
    with (broken / "metrics.jsonl").open("ab") as file:
        file.write(b"\x00\xff\xfe{}\n" + os.urandom(100))
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


HOW = ["lost", "binary", "changed", "swapped", "doubled"]


@pytest.mark.parametrize("how", HOW)
def test_metrics_that_are_lost_do_not_keep_a_policy_from_loading(train, make_train, broken, how):
    known = lose(broken / "metrics.jsonl", how)
    with pytest.warns(RuntimeWarning, match=r"metrics\.jsonl is (missing|damaged and has only 3).* of the 8 updates"):
        run = training.load(broken, make_train)
    assert run.update == 8 == int(run.state.learner.step)
    assert np.isfinite(run.metrics["loss"]).tolist() == [True] * 3 + [False] * 5 if known else run.metrics == {}
    if known:
        assert len(training.read_metrics(broken / "metrics.jsonl")) == 3


@pytest.mark.parametrize("how", HOW)
def test_metrics_that_are_lost_do_not_keep_a_run_from_being_resumed(train, broken, whole, how):
    known = lose(broken / "metrics.jsonl", how)
    with pytest.warns(RuntimeWarning, match=r"metrics\.jsonl is (missing|damaged and has only 3).* of the 8 updates"):
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


def test_metrics_best_update():
    table = [{"x": x} for x in (1.0, 5.0, None, 3.0)] + [{"y": 0.0}, {"x": 3.0}]
    table = [{"update": update, **row} for update, row in enumerate(table)]
    assert best_update(table, range(1, 7), "x") == (2, 5.0)
    assert best_update(table, [1, 3, 4, 6], "x") == (4, 3.0)  # the first of two, and nothing at 3
    assert best_update(table, [2, 4], "x", window=2) == (2, 3.0)  # (1 + 5) / 2, and 3 alone
    assert best_update(table, range(1, 7), "x", mode="min") == (1, 1.0)
    assert best_update(table, [3, 5], "x") is None
    assert best_update([{"update": 0, "x": [1.0, None]}, {"update": 1, "x": [3.0, 0.0]}], [1, 2], "x") == (2, 1.5)
    assert best_update(table[2:], range(1, 7), "x", window=2) == (4, 3.0)  # a log that begins later
    assert training.column(table, "y").tolist()[4] == 0
    with pytest.raises(KeyError, match="no update has z; there are update, x, y"):
        training.column(table, "z")
