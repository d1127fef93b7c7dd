"""A run is loaded, resumed as if nothing had happened, or used as the state with which another one begins."""

import contextlib
import dataclasses
import errno
import json
import re
import shutil
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

from ppo_parts import training
from ppo_parts.recipes import cleanrl_ppo, pufferlib_ppo
from ppo_parts.training import RunOptions, _files, _folder
from ppo_parts.training._checkpoint import Checkpoints
from ppo_parts.training._folder import RunFolder, open_run
from tests import runs
from tests.runs import EVALUATED, UPDATES, Crash, acting, assert_same_run, checkpoint, crash, go, rows, steps, tiny


def test_load_brings_back_policy_and_history(train, make_train, whole, evaluated):
    run = training.load(whole[0], make_train)
    assert run.config == tiny(UPDATES)
    assert run.train is train
    assert run.update == UPDATES
    plain = vars(make_train).get("__wrapped__", make_train)  # its module calls `training.main`, which decorates it
    assert training.load(whole[0], plain).train.recipe == train.recipe
    for path, x in jax.tree.leaves_with_path(run.state.learner.params):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        np.testing.assert_array_equal(x, checkpoint(whole[0])[f"learner.params.{name}"])
    assert run.metrics["loss"].tolist() == [row["loss"] for row in rows(whole[0])]
    earlier = training.load(str(evaluated[0]), make_train, checkpoint=5)
    assert int(earlier.state.learner.step) == earlier.options.checkpoint == 5
    assert earlier.metrics["env_steps"].tolist() == [16, 32, 48, 64, 80]
    assert np.isfinite(earlier.metrics["evaluation/episode_return"]).tolist() == [False, False, False, False, True]


def test_load_says_why_it_cannot(train, make_train, whole, tmp_path, broken):
    (tmp_path / "config.json").write_text((whole[0] / "config.json").read_text())
    for folder, made_by, which, message in (
        (whole[0], make_train, np.int64(5), r"no checkpoint 5 in .*: there are 8, 12"),
        (whole[0], make_train, "best", r"no best checkpoint: best_metric is None; there are 8, 12"),
        (whole[0], make_train, "last", "checkpoint must be one of 'latest', 'best', an integer, got 'last'"),
        (tmp_path / "a" / "b", make_train, "latest", "b holds no run: it has no config.json$"),
        (tmp_path.with_name("b"), make_train, "latest", rf"holds no run: .*; .* has .*{tmp_path.name}"),
        (tmp_path.parent, make_train, "latest", rf"holds no run: .*; .* has .*{tmp_path.name}"),
        (whole[0], lambda config: train, "latest", r"its configuration is: def make_train\(config: Config\)"),
        (whole[0], pufferlib_ppo.make_train, "latest", r"of another recipe, .* \(.*, .*, .* and \d+ more\)"),
        (tmp_path, make_train, "latest", "no checkpoint in .*: there is none"),
    ):
        with pytest.raises((FileNotFoundError, ValueError, TypeError), match=message):
            training.load(folder, made_by, checkpoint=which)
    assert steps(whole[0]) == [8, 12]
    empty = '"config": {}, "versions": {}, "steps_per_update": 1'
    for content, message in (
        ("[", r"config\.json cannot be read: "),
        ("[]", r"config\.json is damaged: it has no valid config"),
        (f'{{{empty}, "run": {{}}}}', r"it has no valid num_seeds"),
        (f'{{{empty}, "run": {{"num_seeds": "x"}}}}', r"config\.json: run: num_seeds must be an integer, got 'x'"),
        (f'{{{empty}, "run": {{"num_seeds": 1, "eval_evry": 2}}}}', "no option 'eval_evry'; did you mean 'eval_every'"),
        (f'{{{empty}, "run": {{"num_seeds": 1, "old": 2}}}}', "no option 'old': use the version .*, or remove it"),
    ):
        (broken / "config.json").write_text(content)
        with pytest.raises((ValueError, TypeError), match=message):
            training.load(broken, lambda config: train)


def test_init_from_with_another_configuration(monkeypatch, whole, tmp_path, capsys):
    """The new run has more updates and another rate."""
    config = tiny(16, learning_rate=1e-3)
    train = cleanrl_ppo.make_train(config)
    monkeypatch.chdir(whole[0].parent)
    for name, dies in (("run", (Checkpoints, "save")), ("other", (RunFolder, "rewind"))):  # before there is a run
        with monkeypatch.context() as patch:
            patch.setattr(*dies, lambda *args, **given: crash())
            with pytest.raises(Crash):
                go(train, tmp_path, name, config, init_from=Path(whole[0].name))
    with open_run(train, config, RunOptions(name="other", directory=tmp_path)) as (_, done, state):
        assert (done, state) == (0, None)  # a new run does not continue what is left there
    aside = sorted(path.name.split("-")[0] for path in (tmp_path / "other" / "aside").iterdir())
    assert aside == ["checkpoints", "metrics.jsonl"]
    with pytest.raises(Crash):
        go(train, tmp_path, "run", config, init_from=Path(whole[0].name), program=acting(2, crash))
    monkeypatch.chdir(tmp_path)  # the run knows the folder by its absolute path
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
        ({"seed": 5}, "continues its episodes and keys; seed was 1, is 5"),
        ({"num_envs": 4, "num_steps": 4}, "continues its episodes and keys; num_envs was 2, is 4"),
        ({"env_id": "Acrobot-v1"}, "keys; env_id was 'CartPole-v1', is 'Acrobot-v1'"),
        ({}, r"total_timesteps must be more than the 192 steps \(12 updates\) of .*, got 192"),
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
    assert stored["run"]["eval_episodes"] == 3
    assert stored["continued_from"] == {"folder": str(whole[0]), "update": 8, "changed": {}}


@pytest.mark.parametrize(("undisturbed", "options", "after"), [("whole", {}, 4), ("evaluated", EVALUATED, 10)])
def test_resume_after_a_crash_ends_as_if_there_were_none(train, request, tmp_path, undisturbed, options, after, capsys):
    """This includes TensorBoard, which hides what the killed process wrote after the checkpoint."""
    expected, _ = request.getfixturevalue(undisturbed)
    folder, options = tmp_path / "run", options | {"tensorboard": True}
    capsys.readouterr()
    with pytest.raises(Crash):
        go(train, tmp_path, "run", program=acting(after, crash), **options)
    if after == 4:  # it died before the first checkpoint
        for which in (3, "best"):
            with pytest.raises((FileNotFoundError, ValueError), match=r"no checkpoint .* is none|there are none"):
                go(train, None, "", resume=folder, checkpoint=which)
    go(train, None, "", resume=folder, **options)
    assert_same_run(folder, expected)
    assert steps(folder) == steps(expected)
    assert ("has no checkpoint: the run begins again" in capsys.readouterr().err) == (after == 4)
    assert list(runs.scalars(folder)["losses/loss"]) == list(runs.scalars(expected)["losses/loss"])
    saved = {4: 0, 10: 8}[after]
    assert len(list(folder.glob(f"events.out.tfevents.*.{16 * saved + 1}"))) >= 1


FULL_DISK = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
ROWS = _files, "format_rows", "device; the latest checkpoint is 5"
CHECKPOINT = Checkpoints, "_open_checkpointer", "10 could not be written: .*No space left"


@pytest.mark.parametrize(("where", "what", "says"), [ROWS, CHECKPOINT])
def test_resume_after_a_full_disk(monkeypatch, train, whole, tmp_path, where, what, says):
    """The run ends as if there had been room; its length need not be a multiple of `checkpoint_every`."""
    with monkeypatch.context() as patch:
        program = acting(10, lambda: patch.setattr(where, what, FULL_DISK))
        with pytest.raises(training.RunFolderError, match=says):
            go(train, tmp_path, "run", program=program, checkpoint_every=5)
    folder, _ = go(train, None, "", resume=tmp_path / "run", checkpoint_every=5)
    assert steps(folder) == [10, 12]
    assert_same_run(folder, whole[0])


def test_resume_with_another_configuration_is_refused_and_the_field_named(train, broken, whole):
    changed = tiny(UPDATES, learning_rate=1e-3, gamma=0.5)
    with pytest.raises(ValueError, match=r"learning_rate was 0\.00025, is 0\.001; gamma was 0\.99, is 0\.5"):
        go(train, None, "", changed, resume=broken)
    path = broken / "config.json"
    stored = json.loads(path.read_text())
    del stored["config"]["gamma"]
    path.write_text(json.dumps(stored))
    for recipe, folder, says in (
        (cleanrl_ppo, broken, r"another version of it: it records .*\.cleanrl_ppo, .* differ \(gamma\)"),
        (pufferlib_ppo, whole[0], r"was made by the recipe .*\.cleanrl_ppo, and this is .*\.pufferlib_ppo: resume it"),
    ):
        with pytest.raises(SystemExit, match=says):
            training.main(recipe.make_train, recipe.PRESETS, argv=["--resume", str(folder)])
    with pytest.raises(SystemExit, match=r"of another recipe, .* it records .*\.cleanrl_ppo, and fields differ"):
        training.main(pufferlib_ppo.make_train, pufferlib_ppo.PRESETS, argv=["--init-from", str(whole[0])])


def test_resume_from_the_command_line_keeps_all_but_the_options_that_are_given(broken, capsys):
    """It also names settings that have changed, which may change the last bits."""
    path = broken / "config.json"
    path.write_text(path.read_text().replace('"jax_enable_x64": false', '"jax_enable_x64": true'))
    given = ["--resume", str(broken), "--eval-episodes", "2", "--eval-every", "6", "--no-progress"]
    assert training.main(cleanrl_ppo.make_train, cleanrl_ppo.PRESETS, given)["config"] == dataclasses.asdict(tiny())
    stored = json.loads(path.read_text())["run"]
    assert (stored["eval_every"], stored["log_every"], stored["tensorboard"]) == (6, 2, False)
    says = "results may differ in the last bits from those of the run: jax_enable_x64 was True, is False\n"
    assert says in capsys.readouterr().err
    assert list(runs.evaluations(broken)) == [12]


def test_resume_takes_over_the_options_of_a_run_or_says_which_differ(train, make_train, evaluated, tmp_path, capsys):
    folder = Path(shutil.copytree(evaluated[0], tmp_path / "run"))
    before = (folder / "config.json").read_text()
    with open_run(train, tiny(), training.load(folder, make_train).options):
        assert (folder / "config.json").read_text() == before
    assert capsys.readouterr().err == ""
    with open_run(train, tiny(), RunOptions(resume=folder)):
        assert "best_metric was 'evaluation/episode_return', is None" in capsys.readouterr().err


def test_all_processes_read_the_checkpoint_that_the_first_one_found(monkeypatch, train, tmp_path):
    """This includes checkpoint number 0; the other processes are stand-ins."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(_folder, "is_first", lambda: False)
    monkeypatch.setattr(_folder, "fail_together", lambda what: contextlib.nullcontext())
    monkeypatch.setattr(_folder.RunFolder, "__init__", lambda self, path: None)
    monkeypatch.setattr(_folder.RunFolder, "restore", lambda self, train, which: (which, f"state {which}"))
    for told, state in ((np.array([0, 1]), "state 0"), (np.array([0, 0]), None)):
        monkeypatch.setattr(_folder, "broadcast_one_to_all", lambda mine, told=told: told)
        with open_run(train, tiny(), RunOptions(resume=tmp_path)) as found:
            assert found == (None, 0, state)


def test_resume_deletes_nothing_before_it_is_accepted(train, evaluated, tmp_path):
    """If it is refused, it deletes nothing; if it goes back, it sets aside what came later."""
    folder = Path(shutil.copytree(evaluated[0], tmp_path / "run"))
    before = steps(folder)
    (folder / "checkpoints" / "4" / "_METADATA").unlink()
    for refused, says in (
        ({"checkpoint": 6}, "no checkpoint 6"),
        ({"config": tiny(gamma=0.5)}, "gamma was"),
        ({"checkpoint": 4}, r"no checkpoint in .* can be read; 4: "),
    ):
        with pytest.raises((OSError, ValueError), match=says):
            go(train, None, "", resume=folder, **refused, **EVALUATED)
    assert steps(folder) == before
    assert not (folder / "aside").exists()
    with pytest.raises(Crash):
        go(train, None, "", resume=folder, checkpoint=5, program=acting(2, crash), **EVALUATED)
    aside = sorted(re.match(r"(checkpoint-\d+|\D+)-", path.name)[1] for path in (folder / "aside").iterdir())
    assert aside == [*sorted(f"checkpoint-{step}" for step in before if step > 5), "metrics.jsonl", "result.json"]
    (cut,) = (folder / "aside").glob("metrics.jsonl-*")
    assert [row["update"] for row in training.read_metrics(cut)] == list(range(UPDATES))


def test_resume_of_a_finished_run_trains_nothing_and_loses_nothing(train, whole, tmp_path):
    folder = Path(shutil.copytree(whole[0], tmp_path / "run"))
    before = json.loads((folder / "result.json").read_text())

    class Untrained(runs.ByTwos):
        def advance_from(self, state):
            crash()

    go(train, None, "", resume=folder, program=Untrained)
    assert json.loads((folder / "result.json").read_text()) == before | {"curve": str(folder / "curve.png")}
    first = b"".join((folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:2])
    for name, content in (("result.json", b"{"), *(("metrics.jsonl", x) for x in (first, b"{", None))):
        (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
        with pytest.warns(RuntimeWarning, match=f"{name} is {'missing' if content is None else 'damaged'}"):
            go(train, None, "", resume=folder)
        after = json.loads((folder / "result.json").read_text())
        assert after["last_100_episodes_return"] == before["last_100_episodes_return"]
