"""The benchmarks run, and the pages contain what their records say."""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import itertools
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from benchmarks import __main__ as command_line
from benchmarks import _records, _seeds, _tables, atari, classic, explain, house, learning, report, reproduce, train
from benchmarks._seeds import make_keys, measure_training, train_in_stages
from benchmarks.devices import read_operations
from ppo_parts.training import EpisodeResults

programs = train.make_programs
ROOT = _records.ROOT


def run(monkeypatch, *arguments):
    """Run `python -m benchmarks ...`."""
    monkeypatch.setattr(sys, "argv", ["benchmarks", *map(str, arguments)])
    command_line.main()


def test_parts_are_timed(tmp_path, monkeypatch):
    path = tmp_path / "parts.jsonl"
    chosen = ("gae", "clipped_surrogate", "segment_priorities", "pp.segment_minibatches", "pp.value_loss")
    small = ("--sizes", "4x8", "--rounds", 2)
    with jax.numpy_rank_promotion("allow"):  # rlax broadcasts
        run(monkeypatch, "parts", "--parts", *chosen, *small, "--json", f"{path}#cpu")
    rows = {(r["part"], r["direction"], r["method"]): r for r in _records.read(path)["cpu"]["results"]}
    assert {method for part, _, method in rows if part == "gae"} == {"ours", "unrolled", "floor"}
    assert ("clipped_surrogate", "gradient", "ours") in rows
    ours = rows["gae", "forward", "ours"]
    # 3 float32 and 2 boolean arrays of 32 numbers are read, and 2 float32 arrays are written
    assert ours["gb_per_s"] * ours["us"]["median"] * 1e3 == pytest.approx(32 * (3 * 4 + 2 + 2 * 4))
    loss = rows["pp.value_loss", "forward", "ours"]  # only the shapes of its other two arguments are used
    assert loss["gb_per_s"] * loss["us"]["median"] * 1e3 == pytest.approx(32 * (2 * 4 + 4))
    assert ours["over_ours"]["median"] == rows["gae", "forward", "floor"]["over_floor"]["median"] == 1


def test_repeats_differ_and_wrong_numbers_are_not_timed():
    """Otherwise XLA would add to a few numbers only once, however often the addition is repeated."""
    repeated = train._timing.repeat(jax.numpy.add, numbered=True)
    np.testing.assert_array_equal(jax.jit(repeated)(5, jax.numpy.ones(6)), np.full(6, 1.0 + 4))
    for wrong in (1.1, float("nan")):
        with pytest.raises(AssertionError, match="wrong differs from ours"):
            train._timing.assert_same({"ours": (jax.numpy.ones(3),), "wrong": (wrong * jax.numpy.ones(3),)})


def test_products_in_loops_count_as_often_as_they_run():
    x = jnp.ones((8, 16))
    run = lambda x: jax.lax.scan(lambda x, _: (x @ x.T @ x, None), x, length=5)[0]  # noqa: E731
    found = read_operations(jax.jit(run).lower(x).compile(), "dot")
    assert sum(each.times * each.flops for each in found) == 5 * 2 * (2 * 8 * 8 * 16)


@pytest.mark.slow
def test_a_budget_has_the_time_and_the_floor_of_each_piece(tmp_path, monkeypatch, capsys):
    path = tmp_path / "budget.jsonl"
    run(monkeypatch, "budget", "--sizes", "4x4", "--rounds", 1, "--json", f"{path}#cpu")
    *pieces, whole = _records.read(path)["cpu"]["results"]
    assert whole["piece"] == "whole"
    assert {"rollout", "backward", "optimizer"} < {row["piece"] for row in pieces}
    assert whole["floor_ms"] == pytest.approx(sum(row["floor_ms"] for row in pieces))
    assert all(row["ms"] > row["floor_ms"] > 0 for row in (whole, *pieces) if row["piece"] != "backward")


def test_effects_of_choices_are_shapley_values_that_add_up_to_the_gap():
    """If two choices count only together, each has half of the effect."""
    names, seeds = ["a", "b", "c"], [1, 2, 3]
    stops = ["".join(digits) for digits in itertools.product("01", repeat=3)]
    returns = {x: {str(seed): seed + 4.0 * (x[:2] == "11") + 10.0 * (x[2] == "1") for seed in seeds} for x in stops}
    result = {"choices": names, "seeds": seeds, "returns": returns}
    found = explain.compute_effects(result)
    assert {name: set(values) for name, values in found.items()} == {"a": {2}, "b": {2}, "c": {10}, "gap": {14}}
    assert list(explain.explain_gap(result)) == ["c", "a", "b", "gap"]
    returns["111"]["2"] = None  # the record of a return that was not finite
    assert np.isfinite(explain.compute_effects(result)["gap"]).tolist() == [True, False, True]


def test_an_explanation_is_continued_with_the_same_settings_and_shown_when_it_is_complete(tmp_path, monkeypatch):
    between = iter([None] * 4)  # both ends and two stops; then the run is interrupted
    monkeypatch.setattr(explain, "make_between", lambda *args: next(between))
    monkeypatch.setattr(explain, "vectorize", lambda run: lambda seeds: {"last_100_episodes_return": np.float32(seeds)})
    monkeypatch.setattr(_tables, "RESULTS", tmp_path)
    command = ("explain", "cleanrl", "stable_baselines3", "--json", tmp_path / "explain.jsonl", "--seeds")
    with pytest.raises(StopIteration):
        run(monkeypatch, *command, 2)
    assert len([*_tables.tabulate_explain(lambda text, *_: text)]) == 1  # only the header
    monkeypatch.setattr(explain, "make_between", lambda *args: None)
    run(monkeypatch, *command, 3)
    run(monkeypatch, *command, 1)
    [(name, record)] = _records.read(tmp_path / "explain.jsonl").items()
    assert (record["results"]["complete"], record["results"]["seeds"]) == (True, [1, 2, 3])
    assert len([*_tables.tabulate_explain(lambda text, *_: text)]) == 1 + 4  # three choices and the gap
    record["results"]["config"]["gamma"] = 0.5
    _records.store(f"{tmp_path}/explain.jsonl#{name}", record)
    with pytest.raises(SystemExit, match=f"{name} has another config: begin anew"):
        run(monkeypatch, *command, 3)


@pytest.mark.parametrize("of_second", [[], ["gradient steps"], explain.list_differing("cleanrl", "rsl_rl")])
def test_a_run_between_two_libraries_has_choices_of_each(monkeypatch, of_second):
    monkeypatch.setattr(explain.choices, "make_train", lambda config, **choices: (config, choices))
    config, choices = explain.make_between(explain.choices.Config(), "cleanrl", "rsl_rl", of_second)
    expected = explain.LIBRARIES["cleanrl"] | {name: explain.LIBRARIES["rsl_rl"][name] for name in of_second}
    given = {argument: x for choice in expected.values() for argument, x in choice.items()}
    assert (config.num_minibatches, config.update_epochs) == ((4, 5) if of_second else (32, 10))
    assert choices == {name: x for name, x in given.items() if name not in ("num_minibatches", "update_epochs")}


@pytest.mark.lenient_ranks  # the networks' biases
def test_outcomes_are_those_of_the_training():
    """Compare the same seed in a run that stops at several stages."""
    sizes = {"total_timesteps": 2048, "num_envs": 8, "num_steps": 16, "hidden": (4,)}
    train = classic.make_train(classic.Config(env_id="CartPole-v1", learning_rate=0.0, **sizes))
    stages = list(train_in_stages(train, make_keys(range(3, 5)), 3))
    ends = [(640, False), (1280, False), (2048, True)]  # 16 updates are not a multiple of 3
    assert [(stage.env_steps, stage.last) for stage in stages] == ends
    with pytest.raises(ValueError, match="a run of 16 updates cannot stop 17 times"):
        next(train_in_stages(train, make_keys(range(1)), 17))
    names = ("episode_return", "episodes")
    returns, episodes = (np.concatenate([stage.metrics[name][0] for stage in stages]) for name in names)
    found = jax.jit(functools.partial(measure_training, train))(3)
    np.testing.assert_allclose(found["return_over_training"], np.nansum(returns * episodes) / episodes.sum(), rtol=1e-5)


def test_training_runs_are_compared_with_their_rivals(tmp_path, monkeypatch):
    """The programs have stand-ins, which compile quickly; each time is divided by that of the recipe."""
    monkeypatch.setitem(train.SETTINGS, "tiny", ("CartPole-v1", 4, 1, 1))
    monkeypatch.setattr(train, "is_installed", lambda name: False)
    slow = lambda x: jax.lax.fori_loop(0, 1_000_000, lambda i, x: jax.numpy.sin(x), x)  # noqa: E731
    stand_ins = {"cleanrl": slow, "pufferlib": jax.numpy.sin}

    def some(*args):
        assert programs(*args).keys() == stand_ins.keys()
        return {name: lambda key, f=f: f(jax.random.normal(key)) for name, f in stand_ins.items()}

    monkeypatch.setattr(train, "make_programs", some)
    written = ("--json", f"{tmp_path / 'train.jsonl'}#cpu")
    compiled, cold = [], train._timing.compile_cold
    monkeypatch.setattr(train._timing, "compile_cold", lambda f, *x, **y: compiled.append(f) or cold(f, *x, **y))
    run(monkeypatch, "train", "--settings", "tiny", "--rounds", 2, "--programs", "pufferlib", *written)
    assert len(compiled) == 3 * 2
    assert len(set(compiled[::2])) == 2  # the first one is not always the same
    rows = {row["program"]: row for row in _records.read(tmp_path / "train.jsonl")["cpu"]["results"]}
    assert rows.keys() == stand_ins.keys()
    assert all(row["env_steps"] == 4 * 128 for row in rows.values())
    for row in rows.values():
        assert row["compile_seconds"]["total"]["q1"] <= row["compile_seconds"]["total"]["q3"]
    assert rows["pufferlib"]["over_cleanrl"]["median"] < 0.5 < rows["cleanrl"]["over_cleanrl"]["median"] == 1


def test_tables_of_pages_are_those_of_the_records(monkeypatch):
    monkeypatch.setattr(_tables, "read", functools.cache(_records.read))
    for path in report.PAGES:
        page = path.read_text()
        assert report.fill(page, path.parent) == page, f"{path}: run `python -m benchmarks report`"
        for file, name in re.findall(r"benchmarks/results/(\w+)\.jsonl#([^)\s]+)", page):
            assert name in _tables.read_records(file), f"{path} links to {file}.jsonl#{name}"


def test_markers_of_generated_tables_stand_on_lines_of_their_own():
    """Whatever `report` does not recognize as the marker of a table, it would leave as it is."""
    for path in report.PAGES:
        page = path.read_text()
        markers = [line for line in page.splitlines() if "<!--" in line and not line.endswith(" command -->")]
        assert [line for line in markers if not re.fullmatch(r"<!-- [\w. -]+ -->", line)] == [], path
        assert [line == "<!-- end -->" for line in markers] == [False, True] * len(report.BLOCK.findall(page)), path


def test_a_point_of_a_learning_curve_is_drawn_where_its_updates_end(monkeypatch):
    figures = []
    monkeypatch.setattr(report._figures, "save", lambda figure, path: figures.append(figure))
    report._figures.draw_learning(None, ["cartpole"])  # 976 updates of 512 steps; each point is the mean of four
    (axes,) = figures[0].axes
    steps = axes.lines[0].get_xdata()
    assert (steps[0], steps[-1], set(np.diff(steps))) == (4 * 512, 976 * 512, {4 * 512})


def test_a_record_has_the_command_without_local_folders(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["python -m benchmarks x", "--json=/home/me/a.jsonl#b", "/opt/python", "runs/c d"])
    assert _records.describe_run()["command"] == "python -m benchmarks x '--json=a.jsonl#b' python 'runs/c d'"


def test_records_are_added_and_replaced_by_name_where_a_run_is_told_to_write(tmp_path):
    path = tmp_path / "new.jsonl"
    assert _records.read(path) == {}
    for name, number in (("b", 1), ("a", 2), ("b", 3)):
        _records.store(f"{path}#{name}", {"results": np.array([number])})
    assert [(name, record["results"]) for name, record in _records.read(path).items()] == [("a", [2]), ("b", [3])]
    _records.store(path, {"results": 4})
    assert _records.find(f"{path}#new")["results"] == 4  # a record without a name has the name of its file
    assert _records.find(f"{path}#c") is None
    parser = _records.make_parser("", json=(records := "benchmarks/results/kuhn.jsonl"))
    claim = lambda *args: _records.claim(parser.parse_args(args[:-1]), *args[-1].split())  # noqa: E731
    for file in (str(path), records):
        assert claim("--json", file, "kuhn") == [f"{file}#kuhn"]
        assert claim("--json", f"{file}#mine", "kuhn") == [f"{file}#mine"]
    assert claim("another other") == [f"{records}#another", f"{records}#other"]
    with pytest.raises(SystemExit, match=f"#mine names one record, but the run writes 2: give --json {path}"):
        claim("--json", f"{path}#mine", "a b")


@pytest.mark.parametrize("name", ["", "#cpu"])
def test_a_run_that_is_cut_short_keeps_the_record_that_it_would_replace(tmp_path, name):
    address, named = f"{tmp_path / 'a.jsonl'}{name}", name.removeprefix("#") or "a"

    def cut_short():
        yield {"x": 3}
        raise KeyboardInterrupt

    _records.collect(address, [{"x": 1}, {"x": 2}])
    with pytest.raises(KeyboardInterrupt):
        _records.collect(address, cut_short())
    found = lambda: {x: record["results"] for x, record in _records.read(tmp_path / "a.jsonl").items()}  # noqa: E731
    assert found() == {named: [{"x": 1}, {"x": 2}], f"{named}_partial": [{"x": 3}]}
    _records.collect(address, [{"x": 4}])
    assert found() == {named: [{"x": 4}]}


def test_benchmarks_that_run_at_the_same_time_keep_their_records(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: _records.store(f"{tmp_path}/x.jsonl#{i}", {"results": i}), range(40)))
    assert len(_records.read(tmp_path / "x.jsonl")) == 40


RECORDED = """learning acrobot cartpole --seeds 1; kuhn --seeds 1; mujoco Hopper-v5 --seeds 1; levels; study breakout
libraries HalfCheetah-v5 --steps 3e5 --variant brax; differences Ant-v5 --steps 3e5; population cartpole --seeds 1
gallery PPO --seeds 1; atari ale:pong"""


@pytest.mark.parametrize("command", re.split("; |\n", RECORDED))
def test_a_run_ends_before_it_begins_if_it_would_replace_a_record(monkeypatch, command):
    says = r"results/\w+.jsonl#.* is a record of 2.*: --json benchmarks/results/\w+.jsonl replaces"
    with pytest.raises(SystemExit, match=says):
        run(monkeypatch, *command.split())


def test_code_that_the_gallery_runs_and_new_files_are_among_the_uncommitted_ones(monkeypatch):
    ran = lambda args, **_: argparse.Namespace(stdout=" ".join(map(str, args)))  # noqa: E731
    monkeypatch.setattr(_records.subprocess, "run", ran)
    spec = importlib.util.spec_from_file_location("benchmarks.copied", _records.__file__)
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    assert copied.UNCOMMITTED.endswith("status --porcelain -- ppo_parts benchmarks/*.py docs/gallery")


def test_runs_that_are_merged_have_other_seeds_and_the_same_settings():
    row = {"env_steps": 8, "evaluation": [1.0, 2.0], "last_100_episodes": [1.0, 2.0]}
    one = {"address": "a#1", "seeds": [1, 2], "config": {"seed": 1, "gamma": 0.9}, "curve": [row]}
    two = one | {"address": "a#3", "seeds": [3, 4], "config": {"seed": 3, "gamma": 0.9}}
    assert _tables.merge([one, two])["seeds"] == [1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"a seed would count twice: a#1, a#3 have the seeds \[1, 2, 2, 3\]"):
        _tables.merge([one, two | {"seeds": [2, 3]}])
    with pytest.raises(ValueError, match="have different settings: a#1, a#3"):
        _tables.merge([one, two | {"config": {"seed": 3, "gamma": 0.99}}])


def test_returns_of_atari_games_are_those_that_cleanrl_prints(monkeypatch):
    printed = "global_step=10, episodic_return=[1.]\nSPS: 7\nglobal_step=90, episodic_return=[-3.]\nSPS: 9\n"
    given = []
    monkeypatch.setattr(atari._rivals, "run_cleanrl", lambda *args: given.append(args) or printed)
    config = dataclasses.replace(atari.atari_ppo.PRESETS["atari"], env_id="ale:space_invaders", seed=5)
    theirs = atari.train_cleanrl("python", "script", config)
    assert given[0][2] == {"env-id": "SpaceInvadersNoFrameskip-v4", "seed": 5, "total-timesteps": 10_000_000}
    assert theirs == {"seed": 5, "games": [[10, 1.0, 1], [90, -3.0, 1]]}


def test_a_difference_of_means_has_an_interval_over_seeds():
    draws = np.random.default_rng(1)
    assert _seeds.compare_means([3.0] * 10, [1.0] * 10) == {"mean": 2.0, "95": [2.0, 2.0], "detectable": 0.0}
    assert _seeds.show_change({"mean": 2.0, "95": [-1.4, 3.0]}) == "+2 [-1, +3]"
    several = [_seeds.compare_means(*draws.normal(0.0, 1.0, (2, 100))) for _ in range(30)]
    assert np.mean([x["detectable"] for x in several]) == pytest.approx(2.8 * 0.02**0.5, rel=0.05)
    now, before = draws.normal(10_000.0, 1000.0, 10), draws.normal(8000.0, 1000.0, 7)
    welch, paired = scipy.stats.ttest_ind(now, before, equal_var=False), scipy.stats.ttest_rel(now[:7], before)
    seen = _seeds.compare_means(now, before), _seeds.compare_pairs(now[:7], before)
    for found, exact in zip(seen, (welch, paired), strict=True):
        assert found["95"] == pytest.approx(exact.confidence_interval())
        assert found["mean"] == pytest.approx(np.mean(exact.confidence_interval()))
        assert [_seeds.show_visible(found, seeds)[:2] == "**" for seeds in (4, 5)] == [False, True]
    low, high = report._figures.compute_band(np.array([[*before, np.nan]]))
    assert [*low, *high] == pytest.approx(scipy.stats.t.interval(0.95, 6, before.mean(), scipy.stats.sem(before)))
    assert _seeds.show_interval({"mean": 2.0, "mean_95": [9, 9], "per_seed": [1.0, 3.0]}, 0) == "2 [-11, 15]"


def test_a_reproduced_record_is_compared_number_by_number(monkeypatch):
    old = {"returns": {"per_seed": [1.0, 2.0], "mean": 1.5}, "seconds": 3.0, "name": "x", "gone": 1}
    new = {"returns": {"per_seed": [1.0, 4.0], "mean": 2.5}, "seconds": 3.0, "more": 2}
    assert reproduce.compare(old, old) == ["5 of 5 numbers are equal"]
    says = ["2 of 4 numbers are equal", "1 are missing, of gone", "  returns/mean: 1.5, now 2.5"]
    assert reproduce.compare(old, new) == says
    assert reproduce.parse_records(b'{"name": "a",\n"results": 1}') == [{"name": "a", "results": 1}]
    assert reproduce.parse_records(b'{"results":1}\n{"loss":2}\n{"results":3}\n') == [{"results": 1}, {"results": 3}]
    assert reproduce.parse_records(b"{ // no JSON") == reproduce.parse_records(b"\x80") == []
    several = "stands for several: its results name each SEED and VARIANT"
    errors = {"humanoid.jsonl#ablation": several, "retired.jsonl#mujoco_designs": "names no command"}
    errors["../benchmarks/results/kuhn.jsonl#x"] = "kuhn.jsonl has no record 'x', but kuhn"
    for name, error in errors.items():
        with pytest.raises(SystemExit, match=error):
            run(monkeypatch, "reproduce", name)


def test_a_size_that_cannot_be_measured_is_an_error(monkeypatch):
    monkeypatch.setattr(house, "FRAMES", "raise SystemExit(3)")
    with pytest.raises(subprocess.CalledProcessError, match="exit status 3"):
        house.measure(ROOT)


def test_imports_between_packages_may_take_several_lines(tmp_path):
    files = {"__init__.py": "from . import (\n    a,\n    b,\n)", "a.py": "from .b.c import x as y", "b.py": "import a"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = house.find_imports(tmp_path)
    assert found == {("__init__", "a"), ("__init__", "b"), ("a", "b")}
    assert house.count_layers(found) == (3, 0)


WRITTEN = [  # a file, the names of the records in it, and the output
    ("somewhere.jsonl", ["a", "b"], "cpu: slow, now fast\n1 of 1"),
    ("benchmarks/results/older.json", [None], "cpu: slow, now fast\n1 of 1"),
    ("benchmarks/results/x.jsonl", ["c"], "name: a, now c\ncpu: slow, now fast\n1 of 1"),
    ("benchmarks/results/x.jsonl", ["b", "c"], "the command wrote no record 'a', but ['b', 'c']"),
    ("benchmarks/results/x.jsonl", [], "the command wrote no record 'a', but []"),
]


@pytest.mark.parametrize(("file", "names", "expected"), WRITTEN)
def test_a_record_is_found_where_its_command_writes_it(tmp_path, monkeypatch, capsys, file, names, expected):
    """It is not sought in the records of the commit; the command runs with the flags of the record."""
    old = {"name": "a", "uncommitted": "", "commit": "", "xla_flags": "xx", "results": {"flags": 2}}
    old |= {"hardware": {"cpu": "slow"}, "versions": {"jax": "0.1"}}
    new = [old | {"hardware": {"cpu": "fast"}, "name": name} for name in names]
    new = [{key: x for key, x in each.items() if x is not None} for each in new]
    flags = 'json.dumps(each | {"results": {"flags": len(os.environ["XLA_FLAGS"])}})'
    code = f"import json, os; print(*({flags} for each in {new}), sep=chr(10), end='', file=open('{file}', 'w'))"
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    _records.store(f"{tmp_path}/benchmarks/results/x.jsonl#a", old)
    monkeypatch.setattr(reproduce, "unpack_revision", lambda revision: contextlib.nullcontext(tmp_path))
    monkeypatch.setattr(reproduce, "read", lambda path: {"a": old | {"command": shlex.join(["python", "-c", code])}})
    try:
        run(monkeypatch, "reproduce", "x.jsonl#a")
    except SystemExit as error:
        print(error)
    assert expected in capsys.readouterr().out


def test_documented_commands_parse(monkeypatch):
    class Parsed(Exception):
        pass

    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.py")]
    text = "\n".join(path.read_text() for path in pages if path.name not in ("CHANGELOG.md", "__main__.py"))
    documented = set(re.findall(r"python -m benchmarks (\w+)((?: +[^\s`<|#][^\s`<|]*)+)", text))
    parse = argparse.ArgumentParser.parse_known_args

    def parse_only(parser, *args):
        _, unknown = parse(parser, *args)
        assert not unknown
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_only)
    assert len(documented) > 20
    for name, arguments in documented:
        with pytest.raises(Parsed):
            run(monkeypatch, name, *shlex.split(arguments))


def test_the_command_line_lists_what_there_is(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="no benchmark is called 'gae'"):
        run(monkeypatch, "gae")
    assert "whole training runs" in capsys.readouterr().out
    values = {
        "parts --parts nonsense": "invalid choice",
        "parts --sizes 128": "give steps and environments, such as 128x64, got '128'",
        "parts --rounds 1.5": "'1.5' is not an integer",
        "levels --first-seed -1": "must lie in [0, 2**32), got -1",
        "train --programs rejaxx": "invalid choice",
        "train --programs purejaxrl": "purejaxrl cannot take part, --purejaxrl gives no clone",
        "train --purejaxrl nowhere": "nowhere has no purejaxrl/ppo.py",
    }
    for command, says in values.items():
        with pytest.raises(SystemExit, match="2"):
            run(monkeypatch, *command.split())
        assert f"argument {command.split()[1]}: {says}" in capsys.readouterr().err


def test_learning_runs_with_changed_settings_and_a_key_for_each_seed():
    class Fake:
        def evaluate_policy(self, key, state, episodes, *, mode):
            nothing = jnp.zeros(episodes, bool)
            luck = jax.random.uniform(key, (episodes,)) + state
            return EpisodeResults(luck, jnp.ones(episodes, int), nothing, nothing)

    keys = jax.vmap(jax.random.key)(jnp.arange(3))
    found = learning.evaluate_seeds(Fake(), keys, jnp.zeros(3), episodes=5)["evaluation_5_episodes_return"]
    assert found.shape == (3,)
    assert len(np.unique(found)) == 3
    config = learning.change_config(learning.TASKS["pufferlib_cartpole"].config, ["ent_coef=0.001", "optimizer=adam"])
    assert (config.ent_coef, config.optimizer) == (0.001, "adam")


def test_settings_may_be_given_one_at_a_time(tmp_path, monkeypatch, capsys):
    seen, returns = [], {"mean": 1.0, "per_seed": [1.0]}
    measure = lambda *args: seen.append(args) or {"evaluation_100_episodes_return": returns}  # noqa: E731
    monkeypatch.setattr(learning, "measure", measure)
    written = ("--json", tmp_path / "new.jsonl")
    run(monkeypatch, "learning", "cartpole", "--set", "gamma=0.9", "--set", "ent_coef=0.1", *written)
    changed = dataclasses.replace(learning.TASKS["cartpole"].config, gamma=0.9, ent_coef=0.1)
    assert seen == [(learning.TASKS["cartpole"]._replace(config=changed), range(1, 11))]
    assert [*_records.read(tmp_path / "new.jsonl")] == ["cartpole_gamma_0.9_ent_coef_0.1"]
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "learning", "cartpole", "--set", "gamma", "0.9", *written)
    assert "argument --set: give FIELD=VALUE, got 'gamma'" in capsys.readouterr().err
    for wrong, says in (("gamma=2", "gamma must lie in"), ("clip_coeff=1", "no field 'clip_coeff', but env_id")):
        with pytest.raises(SystemExit, match=says):
            run(monkeypatch, "learning", "acrobot", "cartpole", "--set", wrong, *written)
    with pytest.raises(SystemExit, match="no field 'update_epochs'"):  # refused before training
        run(monkeypatch, "learning", "cartpole", "ippo_spread", "--set", "update_epochs=2", *written)
    assert len(seen) == 1
