"""A run back in memory."""

import jax
import numpy as np
import pytest

from ppo_parts import training
from ppo_parts.recipes import cleanrl_ppo, pufferlib_ppo
from tests.common import assert_same
from tests.runs import UPDATES, checkpoint, raw, rows, steps, tiny


def test_load_brings_back_policy_and_history(train, make_train, whole, evaluated):
    run = training.load(whole[0], make_train)
    assert run.config == tiny(UPDATES)
    assert run.train is train
    assert run.update == UPDATES
    for path, x in jax.tree_util.tree_leaves_with_path(run.state.learner.params):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        np.testing.assert_array_equal(x, checkpoint(whole[0])[f"learner.params.{name}"])
    assert run.metrics["loss"].tolist() == [row["loss"] for row in rows(whole[0])]
    earlier = training.load(str(evaluated[0]), make_train, checkpoint=5)
    assert int(earlier.state.learner.step) == 5
    assert earlier.metrics["env_steps"].tolist() == [16, 32, 48, 64, 80]
    known = np.isfinite(earlier.metrics["evaluation/episode_return"])
    assert known.tolist() == [False, False, False, False, True]
    recipe = training.load(whole[0], cleanrl_ppo.make_train)
    assert_same(jax.tree.map(raw, recipe.state), jax.tree.map(raw, run.state))


def test_load_says_why_it_cannot(train, make_train, whole, tmp_path):
    (tmp_path / "config.json").write_text((whole[0] / "config.json").read_text())
    for folder, made_by, which, message in (
        (whole[0], make_train, np.int64(5), r"no checkpoint 5 in .*: there are 8, 12"),
        (whole[0], make_train, "best", r"no best checkpoint: it was run without best_metric; there are 8, 12"),
        (whole[0], make_train, "last", "checkpoint must be one of 'latest', 'best', a whole number, got 'last'"),
        (tmp_path / "a" / "b", make_train, "latest", "b holds no run: there is no such folder$"),
        (tmp_path.with_name("b"), make_train, "latest", rf"no such folder; .* has .*{tmp_path.name}"),
        (whole[0], lambda config: train, "latest", r"write def make_train\(config: Config\)"),
        (whole[0], pufferlib_ppo.make_train, "latest", r"of another recipe, .* \(.*, .*, .* and \d+ more\)"),
        (tmp_path, make_train, "latest", "no checkpoint in .*: there is none"),
    ):
        with pytest.raises((FileNotFoundError, ValueError, TypeError), match=message):
            training.load(folder, made_by, checkpoint=which)
    assert steps(whole[0]) == [8, 12]
