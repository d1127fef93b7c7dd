"""Attacked runs end as if nothing had happened, or say what did."""

import pytest

from benchmarks.attack import measure


@pytest.mark.slow
def test_attack_ends_identical_or_said(tmp_path):
    found = measure(tmp_path, times=10, seed=1, wait=1)
    assert all(found["signals"][name]["seconds"] <= 5 for name in ("SIGTERM", "SIGINT", "SIGHUP"))
    assert found["signals"]["SIGINT again"]["seconds"] <= 1
    removed = found["removed_while_running"]
    assert removed.pop("checkpoints") == "continued: identical"  # the next one is written all the same
    assert set(removed.values()) == {"saved; resumed: identical"}
