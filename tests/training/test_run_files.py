"""What a run leaves behind, what it refuses before it leaves anything, and the metrics file, which no policy needs."""

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import ppo_parts as pp
from ppo_parts import training
from ppo_parts.errors import UserError, UserValueError
from ppo_parts.recipes import cleanrl_ppo
from ppo_parts.training import RunFolderError, RunOptions, _reports, _run, run
from ppo_parts.training._files import format_rows
from ppo_parts.training._folder import open_run
from ppo_parts.training._processes import logger
from tests import runs
from tests.common import assert_same
from tests.runs import EVALUATED, UPDATES, acting, assert_same_run, checkpoint, crash, go, measuring, rows, steps, tiny


def test_run_leaves_its_configuration_metrics_picture_and_result(whole):
    folder, result = whole
    assert json.loads((folder / "config.json").read_text())["versions"]["jax"] == jax.__version__
    found = rows(folder)
    assert [row["update"] for row in found] == list(range(UPDATES))
    assert [row["env_steps"] for row in found] == [16 * (i + 1) for i in range(UPDATES)]
    rate = tiny().learning_rate
    assert [row["learning_rate"] for row in found] == pytest.approx([rate * (1 - i / UPDATES) for i in range(UPDATES)])
    ended = [row for row in found if row["episodes"]]
    assert 0 < len(ended) < UPDATES
    assert all((row["episode_return"] is None) == (row["episodes"] == 0) for row in found)
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert result["curve"] == str(folder / "curve.png")
    assert json.loads((folder / "result.json").read_text()) == json.loads(json.dumps(result))
    total = sum(row["episode_return"] * row["episodes"] for row in ended)
    mean = total / sum(row["episodes"] for row in ended)
    assert result["last_100_episodes_return"]["mean"] == pytest.approx(mean, rel=1e-5)
    assert result["last_100_episodes_return"]["episodes"] == sum(row["episodes"] for row in ended)  # fewer than 100
    played = result["evaluation"]
    assert played["episodes"] == 3 == played["terminated"] + played["truncated"]
    assert played["episode_return"]["mean"] == pytest.approx(played["episode_length"])  # CartPole pays 1 a step
    timing = result["timing"]
    assert timing["env_steps_this_session"] == 16 * UPDATES
    assert timing["steps_per_second"] == pytest.approx(16 * UPDATES / timing["seconds"])
    assert timing["device"] == jax.devices()[0].device_kind
    assert steps(folder) == [8, 12]
    earlier, later = (checkpoint(folder, step)["key"] for step in (8, 12))
    assert not np.array_equal(earlier, later)  # every update has its own keys
    seen = runs.scalars(folder)  # in TensorBoard
    assert set(seen) >= {"charts/episode_return", "losses/loss", "losses/approx_kl", "time/steps_per_second"}
    assert list(seen["losses/loss"]) == [row["env_steps"] for row in found[1::2]]
    means = [(row["loss"] + after["loss"]) / 2 for row, after in zip(found[::2], found[1::2], strict=True)]
    assert [*seen["losses/loss"].values()] == pytest.approx(means, rel=1e-5, abs=1e-7)


def test_run_of_several_seeds_is_one_program(whole, train, make_train, place, monkeypatch):
    """Their evaluations are one program, too: traced once to see that they can work, and once for all of them."""
    traced, told, play = [], [], training.Train.evaluate_policy

    def evaluate_policy(*args, **given):
        traced.append(given)
        return play(*args, **given)

    with monkeypatch.context() as patch:
        patch.setattr(training.Train, "evaluate_policy", evaluate_policy)
        several, result = go(train, place, "seeds", on_rows=told.extend, num_seeds=3, eval_mode=True, **EVALUATED)
    assert traced == 2 * [{"episodes": 5, "mode": True}]
    assert {row["loss"].shape for row in told} == {(3,)}
    found = rows(several)
    for mine, alone in zip(found, rows(whole[0]), strict=True):
        assert (mine["update"], mine["env_steps"]) == (alone["update"], alone["env_steps"])
        assert mine["loss"][0] == pytest.approx(alone["loss"], rel=1e-3, abs=1e-5)  # the first seed is seed 1
    assert len({tuple(row["loss"][i] for row in found) for i in range(3)}) == 3
    assert result["evaluation"]["terminated"] + result["evaluation"]["truncated"] == 15
    run, played = training.load(several, make_train), runs.evaluations(several)
    keys = jax.vmap(lambda seed: jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 2**20), UPDATES))
    evaluate = jax.vmap(lambda key, state: train.evaluate_policy(key, state, 5, mode=True).episode_return.mean())
    expected = np.asarray(jax.jit(evaluate)(keys(np.arange(1, 4)), run.state), float)
    assert played[UPDATES]["evaluation/episode_return"] == pytest.approx(expected)
    assert result["evaluation"]["episode_return"]["per_seed"] == played[UPDATES]["evaluation/episode_return"]
    assert run.metrics["evaluation/episode_return"].shape == (UPDATES, 3)
    best = max(played, key=lambda update: np.mean(played[update]["evaluation/episode_return"]))
    assert result["best"]["update"] == best
    with pytest.raises(ValueError, match="num_seeds was 3, is 2"):
        go(train, place, "", num_seeds=2, resume=several)


def test_run_in_which_no_episode_ends_has_no_curve(train, place, capsys, caplog, monkeypatch):
    """As a function, `run` prints nothing: its messages are logged."""
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    folder, result = go(train, place, "endless", program=measuring(episode_return=np.nan, episodes=0.0))
    assert "curve" not in result
    assert not (folder / "curve.png").exists()
    stored = json.loads((folder / "result.json").read_text())
    assert stored["last_100_episodes_return"]["mean"] is None
    assert capsys.readouterr().out == ""
    assert "no episode ended" in caplog.messages
    numbers = dict.fromkeys(stored["last_100_episodes_return"])
    _reports.announce({**stored, "evaluation": {"episodes": 2, "episode_return": numbers}})  # of a completed run
    assert "evaluation over 2 episodes: not finite" in caplog.messages
    go(train, place, "few", program=measuring(episode_return=3.0, episodes=2.0))
    assert "mean return of the last 24 episodes: 3.0" in caplog.text
    go(train, place, "many", program=measuring(episode_return=3.0, episodes=20.0))
    assert "mean return of the last 100 episodes: 3.0" in caplog.text


def test_run_folder_is_new_or_named_with_the_reason_why_it_cannot_be_used(train, whole, place, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "run" / ".lock").mkdir(parents=True)
    for options, kind, message in (
        ({"name": "whole", "directory": place}, FileExistsError, r"whole holds a run: continue it with --res"),
        ({"name": "run", "directory": tmp_path / "file"}, RunFolderError, "Not a directory; give another --directory"),
        ({"name": "run", "directory": tmp_path}, RunFolderError, "run cannot be written"),
    ):
        with pytest.raises(kind, match=message), open_run(train, tiny(), RunOptions(**options)):
            pass
    monkeypatch.setattr(time, "strftime", lambda format: "now")
    folders = []
    for _ in range(2):
        with open_run(train, tiny(), RunOptions(directory=tmp_path)) as (folder, *_):
            folders.append(folder.path.name)
    with open_run(train, tiny(env_id="jaxmarl:SMAX/3m"), RunOptions(directory=tmp_path)) as (folder, *_):
        folders.append(folder.path.name)
    assert folders == ["CartPole-v1-s1-now", "CartPole-v1-s1-now-2", "jaxmarl:SMAX-3m-s1-now"]
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: "-now" not in path.name and exists(path))  # two runs begin at once
    with open_run(train, tiny(), RunOptions(directory=tmp_path)) as (folder, *_):
        assert folder.path.name == "CartPole-v1-s1-now-3"


def test_run_has_one_writer_and_ends_if_its_log_is_removed(train, tmp_path):
    def again():
        with pytest.raises(FileExistsError, match="is being written by another process"):
            go(train, None, "", resume=tmp_path / "run")
        with pytest.raises(FileExistsError, match="is being written by another process"):
            go(train, tmp_path, "run")
        crash()

    with pytest.raises(runs.Crash):
        go(train, tmp_path, "run", program=acting(2, again))
    remove = acting(6, lambda: (tmp_path / "other" / "metrics.jsonl").unlink())
    with pytest.raises(RunFolderError, match=r"metrics.jsonl could not be written: No such file"):
        go(train, tmp_path, "other", program=remove)


IN_JSON = "config: {} .* cannot be stored"
NEEDED = "needs eval_episodes"
REFUSED = [  # changes of the configuration, options, and the error
    ({"target_kl": np.ones(2)}, {}, IN_JSON.format("target_kl")),
    ({"target_kl": np.inf}, {}, IN_JSON.format("target_kl")),
    ({"env_id": Path("x")}, {}, IN_JSON.format("env_id")),
    ({"seed": 2**32 - 1}, {"num_seeds": 2}, r"seed must be such that all seeds lie in \[0, 2\*\*32\)"),
    ({}, {"checkpoint_every": -1}, "run: checkpoint_every must be at least 1, got -1"),
    ({}, {"eval_every": 2}, f"run: eval_every {NEEDED}"),
    ({}, {"eval_mode": True}, f"run: eval_mode {NEEDED}"),
    ({}, {"best_metric": "episode_retrun"}, "got 'episode_retrun'; did you mean 'episode_return'. there are"),
    ({}, {"best_metric": "evaluation/episode_return"}, "got 'evaluation/episode_return'; .* needs eval_every; there"),
    ({}, {"checkpoint": "best"}, "checkpoint selects a checkpoint of the run given as resume or init_from, got 'best'"),
    ({}, {"resume": Path("a"), "init_from": Path("b")}, "give one of them"),
    *(({}, {"name": name}, f"run: name must name a folder .*, got '{name}'") for name in ("", "../run", "/tmp/run")),
]


def test_run_that_cannot_work_is_refused_before_a_folder_is_made(train, tmp_path, monkeypatch):
    own = runs.altered(train, config=None)  # from a recipe without `training.recipe`
    column = pp.stateless(lambda batch: batch.add_metrics(update=0.5), reads=())
    chain = pp.chain(pp.gae(gamma=0.9, gae_lambda=0.9), pp.full_batch(), pp.clipped_surrogate(clip_eps=0.2), column)
    named = cleanrl_ppo.make_train(tiny(UPDATES), None, chain)
    for made, changes, options, message in (
        *((own, *row) for row in REFUSED),
        (named, {}, {}, "the metric 'update' has the name of a column"),
        (train, {"gamma": 0.5, "seed": 7}, {}, "config must be the one .*; gamma was 0.99, is 0.5: make the run again"),
    ):
        given = {"name": "run", **options}
        with pytest.raises((ValueError, TypeError), match=message):
            go(made, tmp_path, given.pop("name"), tiny(UPDATES, **changes), **given)
        assert not list(tmp_path.iterdir()), message
    for name, message in (
        ("name", "names only new runs, got 'b', and resume continues a/run in place"),
        ("directory", "holds only new runs, got b, and resume continues a/run: leave it out"),
    ):
        with pytest.raises(ValueError, match=f"run: {name} {message}"):
            run(train, tiny(UPDATES), RunOptions(resume="a/run", **{name: "b"}))
    unseeded = dataclasses.make_dataclass("Unseeded", ["env_id"])("x")
    for name, given, functions in (
        ("config", ({"seed": 1},), {}),
        ("config", (unseeded,), {}),
        ("options", (tiny(UPDATES), {"num_seeds": 1}), {}),
        ("on_rows", (tiny(UPDATES),), {"on_rows": []}),
        ("make_program", (tiny(UPDATES),), {"make_program": None}),
    ):
        with pytest.raises(UserError, match=f"^run: {name} must be "):
            run(train, *given, **functions)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=r"tensorboardX is not installed: .*, or give --no-tensorboard"):
        go(train, tmp_path, "run", tiny(UPDATES), tensorboard=True)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="num_updates must be at least 1, got 0"):
        dataclasses.replace(train, num_updates=0)


def test_run_is_resumed_with_its_own_recipe(train, tmp_path):
    def of(module, made=train):
        def make_train(config: cleanrl_ppo.Config):
            return made

        make_train.__module__ = module
        return training.recipe(make_train)(tiny())

    with pytest.raises(UserError, match=r"make_train must return a training.Train, got None: return training.Train.of"):
        of("here.mine", None)
    with pytest.raises(UserError, match=r"must say what its configuration is: def make_train\(config: Config\)"):
        training.recipe(lambda config: train)(tiny())
    own = cleanrl_ppo.make_train(tiny(), env=train.env)
    trains = {"named": of("here.mine"), "recipe": train, "own": own}
    names = ["here.mine", train.recipe, None]
    for (name, named), recorded in zip(trains.items(), names, strict=True):
        with open_run(named, tiny(), RunOptions(name=name, directory=tmp_path)) as (folder, *_):
            assert folder.stored["recipe"] == recorded
    assert train.recipe == "ppo_parts.recipes.cleanrl_ppo"
    renamed = r"made by the recipe here\.mine, and this is there\.mine: .* if the module was renamed"
    for name, other, says in (
        ("own", train, "made by the recipe None, and this is ppo_parts.recipes.cleanrl_ppo"),
        ("recipe", own, "this is None: resume it with the module, or with the environment, chain or policy of your"),
        ("named", of("there.mine"), renamed),
        ("own", own, None),
    ):
        expected = contextlib.nullcontext() if says is None else pytest.raises(ValueError, match=says)
        with expected, open_run(other, tiny(), RunOptions(resume=tmp_path / name)):
            pass


def test_run_paces_change_nothing(train, whole, tmp_path):
    """Calls of any length, checkpoints between them, and records of any size give the same bits; calls aim at 0.5 s."""

    class Uneven(runs.ByTwos):
        updates = 1

        def adapt(self, updates, seconds):
            self.updates = self.updates % 3 + 1

    options = {"log_every": 100, "checkpoint_minutes": 1e-9, "keep_checkpoints": None}
    folder, _ = go(train, tmp_path, "run", program=Uneven, **options)
    assert_same_run(folder, whole[0])
    assert steps(folder) == [1, 3, 4, 5, 7, 8, 9, 11, 12]
    program = training.Program(train, 1, RunOptions())
    assert program.updates == 1
    # It is 10 and not 20, because the first call may have been a short one.
    for updates, seconds, fitting in ((1, 0.025, 10), (10, 0.25, 20), (20, 2.0, 5), (1, 15.0, 1)):
        program.adapt(updates, seconds)
        assert program.updates == fitting


def test_timing_is_that_of_updates_and_speed_that_of_the_call_without_compiling(train, tmp_path, monkeypatch):
    clock, played = itertools.count(), _run.Program.evaluate

    def evaluate(self, state, update):
        for _ in range(1000):
            next(clock)
        return played(self, state, update)

    monkeypatch.setattr(_run, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(_run.Program, "evaluate", evaluate)
    _, result = go(train, tmp_path, "timed", eval_episodes=1, eval_every=4)
    assert 0 < result["timing"]["seconds"] < 1000
    # Two records of one call share its time; the beginning of the first call is unknown.
    clock, written = iter([100.0, 102.0]), []
    monkeypatch.setattr(_reports.time, "perf_counter", lambda: next(clock))
    listen = _reports.make_records(train, training.RunOptions(log_every=1), lambda record, step: written.append(record))
    for updates in ([0], [1, 2]):
        listen([{"update": i, "env_steps": 16 * (i + 1)} for i in updates])
    assert [record.get("time/steps_per_second") for record in written] == [None, 16.0, 16.0]


def test_damaged_metrics_end_before_the_damage_and_become_columns(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = [{"update": i, "loss": float(i)} for i in range(4)]
    lines = format_rows(good).splitlines(keepends=True)
    for rest in (b"\x00\xff\n", lines[3].rstrip(b"\n"), lines[2], lines[1], b"[1]\n", b"{}\n", b'{"update": "3"}\n'):
        path.write_bytes(b"".join([*lines[:3], rest]))
        assert training.read_metrics(path) == good[:3]
    table = [{"update": 0, "x": 1.0}, {"update": 1, "y": 0.0}]
    np.testing.assert_array_equal(training.select_metric(table, "x"), [1.0, np.nan])
    np.testing.assert_array_equal(training.select_metric([{}, {"x": [1, None]}], "x"), [[np.nan, np.nan], [1, np.nan]])
    with pytest.raises(UserValueError, match=r"^no row has the metric z; available: update, x, y$"):
        training.select_metric(table, "z")
    with pytest.raises(UserValueError, match=r"x must be numbers, and as many in each row, got \[\[1, 2\], 3\]"):
        training.select_metric([{"x": [1, 2]}, {"x": 3}], "x")


def test_metrics_that_are_lost_keep_neither_a_policy_nor_a_run_from_loading(train, make_train, broken, whole, tmp_path):
    damaged, expected = Path(shutil.copytree(broken, tmp_path / "damaged")), rows(whole[0])
    path = damaged / "metrics.jsonl"
    path.write_bytes(b"".join([*path.read_bytes().splitlines(keepends=True)[:3], os.urandom(100)]))
    (broken / "metrics.jsonl").unlink()
    for stored, options, says, known in (
        (damaged, {"resume": damaged}, "damaged: the metrics of 5", 3),
        (broken, {"init_from": broken}, "missing: the metrics of 8", 0),
        (broken, {"resume": broken}, "missing: the metrics of 8", 0),
    ):
        says = rf"metrics\.jsonl is {says} of the 8 updates before the checkpoint are lost"
        with pytest.warns(RuntimeWarning, match=says):
            loaded = training.load(stored, make_train)
        assert loaded.update == 8 == int(loaded.state.learner.step)
        finite = np.isfinite(loaded.metrics.get("loss", np.array([]))).tolist()
        assert finite == ([True] * 3 + [False] * 5 if known else [])
        assert "not_finite" not in [found.name for found in training.diagnose(loaded.metrics)]  # they are only lost
        with pytest.warns(RuntimeWarning, match=says):
            folder, _ = go(train, tmp_path, "next", **options)
        assert rows(folder) == expected[:known] + expected[8:]
    assert_same(checkpoint(folder), checkpoint(whole[0]))


@pytest.mark.slow
def test_memory_of_a_run_does_not_grow(train, tmp_path):
    """Run 100,000 updates, whose numbers cost nothing, after 20,000 to warm up."""
    resident = []

    class Free(training.Program):
        def advance_from(self, state):
            return self.advance

        def advance(self, state, most):
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]))
            numbers = np.linspace(0, 1, most, dtype=np.float32)
            return state, {name: numbers for name in train.shapes[1] if not name.startswith("nonfinite")}

    config = tiny(120_000)
    go(cleanrl_ppo.make_train(config), tmp_path, "run", config, Free, checkpoint_every=1000, log_every=600)
    warm, end = np.mean(resident[18:20]), np.max(resident[20:])
    print(f"{warm * 4 / 1024:.1f} MB after 20,000 updates, at most {end * 4 / 1024:.1f} after")
    assert end < 1.02 * warm
