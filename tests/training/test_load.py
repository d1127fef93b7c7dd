"""A run taken up again: back in memory, and as the state with which another begins."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from ppo_parts import training
from ppo_parts.recipes import cleanrl_ppo, pufferlib_ppo
from ppo_parts.training._checkpoint import Checkpoints
from tests.common import assert_same
from tests.runs import UPDATES, Crash, acting, assert_same_run, checkpoint, crash, go, raw, rows, steps, tiny


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
        (tmp_path.parent, make_train, "latest", rf"no config.json; .* has .*{tmp_path.name}"),
        (whole[0], lambda config: train, "latest", r"write def make_train\(config: Config\)"),
        (whole[0], pufferlib_ppo.make_train, "latest", r"of another recipe, .* \(.*, .*, .* and \d+ more\)"),
        (tmp_path, make_train, "latest", "no checkpoint in .*: there is none"),
    ):
        with pytest.raises((FileNotFoundError, ValueError, TypeError), match=message):
            training.load(folder, made_by, checkpoint=which)
    assert steps(whole[0]) == [8, 12]


def test_init_from_with_another_configuration(monkeypatch, whole, tmp_path, capsys):
    """More updates, another rate."""
    config = tiny(16, learning_rate=1e-3)
    train = cleanrl_ppo.make_train(config)
    monkeypatch.chdir(whole[0].parent)
    with monkeypatch.context() as patch:  # it dies before it has a checkpoint of its own, and begins again
        patch.setattr(Checkpoints, "save", lambda *args, **given: crash())
        with pytest.raises(Crash):
            go(train, tmp_path, "run", config, init_from=Path(whole[0].name))
    with pytest.raises(Crash):
        go(train, tmp_path, "run", config, init_from=Path(whole[0].name), program=acting(2, crash))
    monkeypatch.chdir(tmp_path)  # the folder is known by its absolute path
    folder, _ = go(train, None, "", config, resume=tmp_path / "run")
    assert "from update 12" in capsys.readouterr().out
    assert (folder / "metrics.jsonl").read_text().startswith((whole[0] / "metrics.jsonl").read_text())
    found = rows(folder)
    assert [(row["update"], row["env_steps"]) for row in found[-4:]] == [(i, 16 * (i + 1)) for i in range(12, 16)]
    assert int(checkpoint(folder)["learner.step"]) == 16
    changed = json.loads((folder / "config.json").read_text())["continued_from"]["changed"]
    assert changed == {"total_timesteps": [192, 256], "learning_rate": [2.5e-4, 1e-3]}
    assert steps(whole[0]) == [8, 12]


def test_init_from_refuses_what_does_not_fit_before_a_folder_is_made(train, whole, tmp_path):
    shape = r"of another configuration: .*kernel has float32\[.*\], expected float32\["
    for changes, message in (
        ({"hidden": (9,)}, shape),
        ({"num_steps": 16}, r"12 updates of .* were 192 environment steps, but an update is now 32: keep num_envs"),
        ({"seed": 5}, "continues its keys; seed was 1, is 5"),
        ({}, r"total_timesteps must be more than the 192 steps \(12 updates\) of .*, from which this run continues"),
    ):
        config = tiny(UPDATES, **changes)
        other = cleanrl_ppo.make_train(config) if changes.keys() - {"seed"} else train
        with pytest.raises(ValueError, match=message):
            go(other, tmp_path, "run", config, init_from=whole[0])
        assert not list(tmp_path.iterdir())


def test_init_from_takes_over_what_is_not_given(train, make_train, whole, tmp_path):
    given = ["--init-from", str(whole[0]), "--checkpoint", "8", "--directory", str(tmp_path), "--name", "run"]
    training.main(make_train, cleanrl_ppo.PRESETS, [*given, "--no-progress", "--no-tensorboard"])
    assert_same_run(tmp_path / "run", whole[0])
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["config"] == json.loads((whole[0] / "config.json").read_text())["config"]
    assert stored["run"]["eval_episodes"] == 3
    assert stored["continued_from"] == {"folder": str(whole[0]), "update": 8, "changed": {}}
