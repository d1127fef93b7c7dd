"""A run that is killed again and again, at any moment of its life, ends as if nothing had happened."""

import pytest

from benchmarks.kill import measure


@pytest.mark.slow
def test_kill_twenty_times_ends_the_same(tmp_path):
    killed = measure(20, tmp_path)["killed_in"]
    assert killed["checkpoint"] >= 10
    assert killed["update"] >= 1
