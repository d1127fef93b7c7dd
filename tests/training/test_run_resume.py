"""A run that ended before its time continues as if nothing had happened, or says why it cannot."""

import errno
import json
import re
import shutil
from pathlib import Path

import jax
import pytest

from ppo_parts import training
from ppo_parts.recipes import cleanrl_ppo, pufferlib_ppo
from ppo_parts.training import _metrics_file
from ppo_parts.training._checkpoint import Checkpoints
from ppo_parts.training._program import Program
from ppo_parts.training._progress import TensorBoard
from tests.runs import (
    EVALUATED,
    UPDATES,
    Crash,
    acting,
    assert_same_run,
    crash,
    evaluations,
    go,
    rows,
    steps,
    tiny,
)

THINNED = {"metrics_every": 5, "checkpoint_every": 3, "best_metric": "loss"}


@pytest.fixture(scope="module")
def thinned(train, place):
    """A run whose rows are of several updates: what is not in a row yet is in the checkpoint."""
    folder, result = go(train, place, "thinned", **THINNED)
    assert [row["update"] for row in rows(folder)] == [4, 9, 11]
    return folder, result


CRASHES = [("whole", {}, after) for after in (2, 4, 10)]
CRASHES += [("evaluated", EVALUATED, 10), *(("thinned", THINNED, after) for after in (5, 8, 11))]


@pytest.mark.parametrize(("undisturbed", "options", "after"), CRASHES)
def test_resume_after_a_crash_ends_as_if_there_was_none(train, request, tmp_path, undisturbed, options, after, capsys):
    expected, _ = request.getfixturevalue(undisturbed)
    capsys.readouterr()
    with pytest.raises(Crash):
        go(train, tmp_path, "run", compile=acting(after, crash), **options)
    folder, _ = go(train, None, "", resume=tmp_path / "run", **options)
    assert_same_run(folder, expected)
    assert steps(folder) == steps(expected)
    begins_again = (undisturbed, after) == ("whole", 4)
    assert ("has no checkpoint: the run begins again" in capsys.readouterr().err) == begins_again


def full_disk(*args):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_resume_after_a_full_disk(monkeypatch, train, whole, tmp_path):
    """Nothing that was written in part stays, and the run ends as if there had been room."""

    def fill():
        write_all = _metrics_file._write_all
        patch.setattr(_metrics_file, "_write_all", lambda file, content: write_all(file, content[:99]) or full_disk())
        patch.setattr(Checkpoints, "_write", full_disk)

    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"No space left on device\. The state after upd"):
        go(train, tmp_path, "run", compile=acting(6, fill))
    assert len(rows(tmp_path / "run")) == 4
    folder, _ = go(train, None, "", resume=tmp_path / "run")
    assert_same_run(folder, whole[0])


def test_resume_after_a_checkpoint_that_could_not_be_written(monkeypatch, train, whole, tmp_path):
    """And checkpoints need not divide the run."""
    with monkeypatch.context() as patch:
        full = acting(10, lambda: patch.setattr(Checkpoints, "_write", full_disk))
        with pytest.raises(OSError, match=r"the latest checkpoint is 5$"):
            go(train, tmp_path, "run", compile=full, checkpoint_every=5)
    assert len(rows(tmp_path / "run")) == 10
    folder, _ = go(train, None, "", resume=tmp_path / "run", checkpoint_every=5)
    assert steps(folder) == [10, 12]
    assert_same_run(folder, whole[0])


def test_resume_with_another_configuration_is_refused_and_the_field_named(train, broken, whole):
    changed = tiny(UPDATES, learning_rate=1e-3, gamma=0.5)
    with pytest.raises(ValueError, match=r"learning_rate was 0\.00025, is 0\.001; gamma was 0\.99, is 0\.5"):
        go(train, None, "", changed, resume=broken)
    other = cleanrl_ppo.make_train(tiny(UPDATES, hidden=(9,)))
    with pytest.raises(ValueError, match=r"of another configuration: .*kernel has float32\[.*\], expected float32\["):
        go(other, None, "", resume=broken)
    path = broken / "config.json"
    stored = json.loads(path.read_text())
    del stored["config"]["gamma"]
    path.write_text(json.dumps(stored))
    with pytest.raises(
        SystemExit,
        match=r"another version of it: it records ppo_parts\.recipes\.cleanrl_ppo, and fields differ \(gamma\)",
    ):
        training.main(cleanrl_ppo.make_train, cleanrl_ppo.PRESETS, argv=["--resume", str(broken)])
    # Also where the other recipe has other fields, which would be an error later.
    with pytest.raises(
        SystemExit,
        match=r"records the recipe ppo_parts\.recipes\.cleanrl_ppo, .* got ppo_parts\.recipes\.pufferlib_ppo",
    ):
        training.main(pufferlib_ppo.make_train, pufferlib_ppo.PRESETS, argv=["--resume", str(whole[0])])


@pytest.mark.parametrize("where", [8, "best"])
def test_resume_from_the_checkpoint_that_is_asked_for(train, evaluated, tmp_path, capsys, where):
    folder = Path(shutil.copytree(evaluated[0], tmp_path / "run"))
    update = 8 if where == 8 else evaluated[1]["best"]["update"]
    go(train, None, "", resume=folder, checkpoint=where, **EVALUATED)
    done = "all done; " if update == UPDATES else f"from update {update}\n"
    assert done in capsys.readouterr().out
    assert_same_run(folder, evaluated[0])
    with pytest.raises(FileNotFoundError, match=r"no checkpoint 3 in .*: there are "):
        go(train, None, "", resume=folder, checkpoint=3, **EVALUATED)


def test_resume_keeps_options_that_were_given_anew(train, broken):
    go(train, None, "", resume=broken, eval_episodes=2, eval_every=6)
    stored = json.loads((broken / "config.json").read_text())["run"]
    assert (stored["eval_every"], stored["log_every"]) == (6, 2)
    assert list(evaluations(broken)) == [12]


def test_resume_deletes_nothing_before_it_is_accepted(train, evaluated, tmp_path):
    """Not where it is refused; and where it goes back, what came later is set aside."""
    folder = Path(shutil.copytree(evaluated[0], tmp_path / "run"))
    before = steps(folder)
    for refused in ({"checkpoint": 6}, {"config": tiny(gamma=0.5)}):
        with pytest.raises((FileNotFoundError, ValueError)):
            go(train, None, "", resume=folder, **refused, **EVALUATED)
    damage = folder / "checkpoints" / "5" / "state" / "_METADATA"
    content = damage.read_bytes()
    damage.unlink()
    with pytest.raises(OSError, match=r"no checkpoint in .* can be read; 5: "):
        go(train, None, "", resume=folder, checkpoint=5, **EVALUATED)
    assert steps(folder) == before
    assert not (folder / "aside").exists()
    damage.write_bytes(content)
    with pytest.raises(Crash):
        go(train, None, "", resume=folder, checkpoint=5, compile=acting(2, crash), **EVALUATED)
    aside = sorted(re.match(r"(checkpoint-\d+|\D+)-", path.name)[1] for path in (folder / "aside").iterdir())
    assert aside == [*sorted(f"checkpoint-{step}" for step in before if step > 5), "metrics.jsonl", "result.json"]
    (cut,) = (folder / "aside").glob("metrics.jsonl-*")
    assert [row["update"] for row in training.read_metrics(cut)] == list(range(5, UPDATES))
    go(train, None, "", resume=folder, **EVALUATED)
    assert_same_run(folder, evaluated[0])


def test_resume_of_a_finished_run_trains_nothing_and_loses_nothing(train, whole, tmp_path):
    folder = Path(shutil.copytree(whole[0], tmp_path / "run"))
    before = json.loads((folder / "result.json").read_text())
    go(train, None, "", resume=folder, compile=crash)
    assert json.loads((folder / "result.json").read_text()) == before | {"curve": str(folder / "curve.png")}
    (folder / "result.json").unlink()
    go(train, None, "", resume=folder, eval_episodes=3, compile=crash)
    assert_same_run(folder, whole[0])
    (folder / "metrics.jsonl").unlink()
    with pytest.warns(RuntimeWarning, match="is missing"):
        go(train, None, "", resume=folder)
    after = json.loads((folder / "result.json").read_text())
    assert after["last_100_episodes_return"] == before["last_100_episodes_return"]


def test_resume_continues_where_an_evaluation_failed(train, evaluated, tmp_path, monkeypatch):
    evaluate = Program.evaluate

    def fail(self, state, done):
        raise OverflowError("mine")

    monkeypatch.setattr(Program, "evaluate", fail)
    with pytest.raises(OverflowError, match="mine"):
        go(train, tmp_path, "run", **EVALUATED)
    assert steps(tmp_path / "run") == [4, 5]
    assert len(rows(tmp_path / "run")) == 5
    monkeypatch.setattr(Program, "evaluate", evaluate)
    folder, _ = go(train, None, "", resume=tmp_path / "run", **EVALUATED)
    assert steps(folder)[-1] == UPDATES
    assert len(rows(folder)) == UPDATES


def test_resume_of_a_run_without_a_checkpoint_discards_its_events(tmp_path):
    """TensorBoard then hides those of the process that was killed."""
    for begun in (None, 0):
        TensorBoard(tmp_path, begun).close()
    first, second = sorted(tmp_path.glob("events.out.tfevents.*"), key=lambda path: path.name.endswith(".1"))
    assert second.name.endswith(".1")
    assert first.stat().st_size < second.stat().st_size  # the mark at which the session begins


def test_resume_with_another_setting_of_jax_names_it(train, make_train, broken):
    for name, value, says in (
        ("jax_default_prng_impl", "rbg", "='threefry2x32', and it is 'rbg' now: set JAX_DEFAULT_PRNG"),
        ("jax_enable_x64", True, r"=False, and it is True now: .*jax\.config\.update\('jax_enable_x64', False"),
    ):
        before = getattr(jax.config, name)
        jax.config.update(name, value)
        try:
            for read in (lambda: go(train, None, "", resume=broken), lambda: training.load(broken, make_train)):
                with pytest.raises(ValueError, match=name + says):
                    read()
        finally:
            jax.config.update(name, before)


def test_resume_from_a_checkpoint_of_a_run_without_any_is_refused(train, tmp_path):
    with pytest.raises(Crash):
        go(train, tmp_path, "run", compile=acting(2, crash))
    for which in (3, "best"):
        with pytest.raises(FileNotFoundError, match="has no checkpoints, so not"):
            go(train, None, "", resume=tmp_path / "run", checkpoint=which)


def test_resume_with_a_damaged_config_says_so(train, broken):
    empty = '"config": {}, "versions": {}, "steps_per_update": 1'
    for content, message in (
        (b"\xff\xfe", r"config\.json cannot be read: "),
        ("[" * 200_000, r"config\.json cannot be read: it is nested too deeply"),
        ('{"config": {}, "config": {}}', r"config\.json cannot be read: config is given 2 times"),
        ("{}", r"config\.json is damaged: it has no valid config"),
        ("[]", r"config\.json is damaged: it has no valid config"),
        (f'{{{empty}, "run": {{}}}}', r"it has no valid num_seeds"),
        (f'{{{empty}, "run": {{"num_seeds": 1}}, "continued_from": 3}}', r"it has no valid continued_from"),
        (f'{{{empty}, "run": {{"num_seeds": "x"}}}}', r"config\.json: run: num_seeds must be a whole number, got 'x'"),
    ):
        (broken / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises((ValueError, TypeError), match=message):
            training.load(broken, lambda config: train)


def test_resume_with_another_config_than_the_checkpoints_were_made_with_is_refused(train, broken):
    path = broken / "config.json"
    path.write_text(path.read_text().replace('"gamma": 0.99', '"gamma": 0.98'))
    with pytest.raises(OSError, match=r"can be read; 8: it is of a run with another configuration than config\.json"):
        go(train, None, "", tiny(gamma=0.98), resume=broken)
