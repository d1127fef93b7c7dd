"""A function of the user's that is called with new rows."""

import numpy as np
import pytest

from ppo_parts import training
from tests.runs import EVALUATED, assert_same_run, checkpoint, go, rows, steps


def test_on_rows_gets_each_row_once_and_in_order(train, evaluated, tmp_path):
    """Rows are on the disk by then, and what the function does to them has no effect."""
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


def test_on_rows_may_stop_the_run_which_is_saved_first(train, whole, tmp_path, capsys):
    def stop(new):
        if new[-1]["update"] >= 5:
            raise training.StopRun("enough")

    folder, result = go(train, tmp_path, "run", on_rows=stop)
    assert (result["interrupted_by"], result["reason"], result["env_steps"]) == ("StopRun", "enough", 6 * 16)
    assert int(checkpoint(folder)["step"]) == 6
    assert "interrupted after update 6 of 12" in capsys.readouterr().out
    folder, result = go(train, None, "", resume=folder, eval_episodes=3)
    assert "reason" not in result
    assert_same_run(folder, whole[0])


def test_a_run_is_saved_where_on_rows_fails(train, whole, tmp_path):
    def fail(new):
        if new[-1]["update"] == 5:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        go(train, tmp_path, "run", on_rows=fail)
    assert steps(tmp_path / "run") == [4, 6]
    folder, _ = go(train, None, "", resume=tmp_path / "run")
    assert_same_run(folder, whole[0])
