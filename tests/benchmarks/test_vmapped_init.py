"""Vmapped seeds come to an end on a busy CPU, however often."""

import pytest

from benchmarks.vmapped_init import measure


@pytest.mark.slow
@pytest.mark.parametrize("program", ["feed-forward", "lstm"])
def test_vmapped_seeds_never_stand_still(program):
    assert measure(program, runs=200, load=2, patience=60)["finished"] == 200
