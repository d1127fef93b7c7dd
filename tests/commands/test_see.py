"""What users do with a trained run: load it by its path, evaluate it, compare it, watch it, log it elsewhere."""

import dataclasses
import functools
import json
import re
import sys
import types
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import ppo_parts
from ppo_parts import envs, networks, training
from ppo_parts.commands import compare, evaluate, export, watch
from ppo_parts.errors import MissingPackage, UserValueError
from ppo_parts.recipes import cleanrl_ppo
from ppo_parts.training import _statistics
from ppo_parts.training._files import format_rows, replace_file
from ppo_parts.training._population import PARENT
from ppo_parts.training._stored import check_trusted, name_recipe
from tests import recipe
from tests.envs.common import bit_game
from tests.runs import go, measuring


@pytest.fixture
def bare(folder, tmp_path):
    """Write a copy of the run's `config.json` with changes, and return its folder."""

    def write(**changes) -> Path:
        stored = json.loads((folder / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**stored, **changes}))
        return tmp_path

    return write


def test_a_run_says_which_recipe_it_is_of(folder, monkeypatch):
    """If the recipe was run as a command, the run has the name by which to import it."""
    stored = json.loads((folder / "config.json").read_text())
    assert stored["recipe"] == "tests.recipe"
    assert stored["run"]["checkpoint_every"] is stored["run"]["log_every"] is None  # as fractions of any run
    run = training.load(folder)
    assert run.config == recipe.Config()
    assert run.update == run.train.num_updates == 2
    config = type("Config", (), {"__module__": "__main__"})
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert name_recipe(config) == "__main__"  # as in a console
    main.__file__ = "/somewhere/mine.py"
    own = functools.partial(cleanrl_ppo.make_train, env=None)  # the program supplies its arguments
    assert name_recipe(config) == name_recipe(own) == "mine"
    assert name_recipe(cleanrl_ppo.make_train) == cleanrl_ppo.__name__
    main.__spec__ = types.SimpleNamespace(name="ppo_parts.recipes.cleanrl_ppo")
    assert name_recipe(config) == "ppo_parts.recipes.cleanrl_ppo"


ELSEWHERE = [(x, "CartPole-v1", f"the recipe {x}") for x in ("spy", "spy.recipes", "ppo_parts.recipes_of.spy")]
ELSEWHERE += [("ppo_parts.recipes.cleanrl_ppo", "gym:spy:Env-v0", "the environment gym:spy:Env-v0")]


@pytest.mark.parametrize(("module", "env_id", "named"), ELSEWHERE)
def test_a_run_folder_does_not_choose_what_is_imported(bare, monkeypatch, capsys, module, env_id, named):
    """Neither its recipe nor its environment is imported unless the user says so; the module would print."""
    path = bare(recipe=module, config=dataclasses.asdict(cleanrl_ppo.Config(env_id=env_id)))
    for place in (path, path / "recipes_of"):
        place.mkdir(exist_ok=True)
        (place / "spy.py").write_text("print('imported')")
    monkeypatch.chdir(path)
    monkeypatch.syspath_prepend(str(path))
    monkeypatch.setattr(ppo_parts, "__path__", [*ppo_parts.__path__, str(path)])
    says = rf"{re.escape(str(path))} asks for {re.escape(named)}.*, whose code would be imported and run: .* --trust"
    for command in (evaluate, watch, export):
        with pytest.raises(SystemExit, match=f"^error: {says}"):
            command.main([str(path)])
    recipe = {} if "spy" in module else {"make_train": cleanrl_ppo.make_train}
    with pytest.raises(UserValueError, match=says):
        training.load(path, **recipe)
    if recipe:
        for flag in ("--resume", "--init-from"):
            with pytest.raises(SystemExit, match=f"^error: {says}"):
                training.main(cleanrl_ppo.make_train, cleanrl_ppo.PRESETS, [flag, str(path), "--trust", "--no-trust"])
    assert "imported" not in capsys.readouterr().out
    with pytest.raises((SystemExit, UserValueError, ModuleNotFoundError)):
        training.load(path, **recipe, trust=True)
    assert "imported" in capsys.readouterr().out
    for name in ("spy", "ppo_parts.recipes_of.spy", "ppo_parts.recipes_of"):
        sys.modules.pop(name, None)


def test_what_cannot_be_written_is_refused_before_anything_is_played(folder, tmp_path, monkeypatch):
    """A refusal also leaves nothing behind."""
    monkeypatch.setattr("ppo_parts.commands._shared.load", lambda *args, **given: pytest.fail("loaded"))
    outputs = [(watch, "--output", "x.gif"), (export, "--output", "x.onnx"), (compare, "--output", "x.png")]
    for command, flag, name in (*outputs, (evaluate, "--json", "x.json"), (compare, "--json", "x.json")):
        (tmp_path / name).mkdir(exist_ok=True)
        for path, says in ((tmp_path / name, "Is a directory"), (tmp_path / "no" / name, "there is no such folder")):
            with pytest.raises(SystemExit, match=f"^error: .*: {says}"):
                command.main([str(folder), flag, str(path)])
    with pytest.raises(ZeroDivisionError), replace_file(tmp_path / "x") as partial:
        partial.write_text(str(1 / 0) if partial.write_text("half") else "")
    assert not list(tmp_path.rglob("*tmp*"))


def test_a_recipe_that_is_not_there_is_named(folder, bare, monkeypatch):
    for name, message in (
        (None, r"None, is not the name of a module: name the module of its recipe, --recipe my_module"),
        ("a/recipe.py", r"'a/recipe\.py', is not the name of a module: write --recipe a\.recipe$"),
        ("../recipe.py", r"is not the name of a module: add \.\. to PYTHONPATH, and write --recipe recipe$"),
        ("absent.recipe", r"absent\.recipe, cannot be imported from here: change to its folder, add it"),
        ("tests.common", r"tests\.common, has no make_train"),
    ):
        with pytest.raises(UserValueError, match=message):
            training.load(bare(recipe=name), trust=True)
    path = bare(recipe="broken_recipe")  # an import that fails inside a recipe is shown as it is
    (path / "broken_recipe.py").write_text("import absent_package")
    monkeypatch.chdir(path)  # recipes are found there, too
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ModuleNotFoundError, match="absent_package"):
        training.load(path, trust=True)
    for name in ("../x", "my recipe", ".relative", "recipes..x", "/tmp/x.py", ""):
        with pytest.raises(SystemExit, match=f"^error: the recipe .*, '{re.escape(name)}', is not the name of a mod"):
            evaluate.main([str(folder), "--recipe", name])
    with pytest.raises(SystemExit, match="no checkpoint in"):  # its recipe was found
        evaluate.main([str(bare(recipe=None)), "--recipe", "tests.recipe"])
    bare(recipe=cleanrl_ppo.__name__, config=dataclasses.asdict(cleanrl_ppo.Config(env_id="mine:walk")))
    with pytest.raises(SystemExit, match=r"envs\.register adds one\): name the module .* --recipe my_module"):
        evaluate.main([str(path)])


def test_evaluate_prints_the_returns_of_each_seed(folder, tmp_path, capsys):
    before = sorted(path.name for path in folder.rglob("*"))
    result = evaluate.main([str(folder), "--episodes", "3", "--json", str(tmp_path / "result.json")])
    assert result["episode_return"]["per_seed"] == [6.0, 6.0]
    assert (result["episode_length"], result["terminated"], result["truncated"]) == (3.0, 6, 0)
    assert result["info"] == {"won": 1.0}
    assert json.loads((tmp_path / "result.json").read_text()) == result
    printed = capsys.readouterr().out
    assert f"{folder} after update 2 of 2: walk" in printed
    assert "mean return 6.00 (standard deviation 0.00), IQM 6.00 [range: 6.00, 6.00] over seeds" in printed
    assert "of 6 episodes, 6 terminated and 0 were truncated\nmean won 1" in printed
    assert sorted(path.name for path in folder.rglob("*")) == before


def test_commands_end_with_one_sentence(folder, capsys):
    for command, argv, says in (
        (evaluate, ["/nowhere"], "error: /nowhere holds no run"),
        (evaluate, [str(folder), "--checkpoint", "7"], r"no checkpoint 7 in .*: there are 1, 2"),
        (watch, [str(folder), "--seed-index", "2"], "--seed-index must lie in .0, 2., the seeds of the run, got 2"),
    ):
        with pytest.raises(SystemExit, match=says):
            command.main(argv)
    for flag, x, says in (
        ("--episodes", "0", "must be at least 1, got 0"),
        ("--episodes", "1.5", "--episodes: '1.5' is not an integer"),
        ("--seed", "x", "--seed: 'x' is not an integer"),
        ("--episode", "3", "unrecognized arguments: --episode 3"),
        *(("--seed", x, f"--seed: must lie in [0, 2**32), got {x}") for x in ("-1", "4294967296", "9" * 23)),
    ):
        with pytest.raises(SystemExit):
            evaluate.main([str(folder), flag, x])
        assert says in capsys.readouterr().err


def test_statistics_are_those_of_rliable_and_one_seed_has_an_interval_over_its_episodes():
    x = np.random.default_rng(0).normal(100, 20, size=(8, 1, 3))  # rliable 1.2.0 with 20,000 samples
    center, low, high = _statistics.iqm_interval(x[:, 0].T, samples=20_000)
    np.testing.assert_allclose(center, [99.54996759958557, 92.84587558378865, 99.74000615063537], rtol=1e-12)
    np.testing.assert_allclose(low, [77.35734116079196, 88.11506449130708, 87.86247068104934], atol=0.5)
    np.testing.assert_allclose(high, [117.78094006923818, 111.52786758113308, 107.13105125002505], atol=0.5)
    y = np.random.default_rng(1).normal(110, 20, size=6)
    curves = [compare.Curve("", "", np.zeros(1), values[None]) for values in (x[:, 0, 0], y)]
    assert compare.make_table(curves)[1]["larger_than_first"] == pytest.approx(0.7291666666666666)
    _, low, high = _statistics.iqm_interval(np.ones((2, 1)))
    assert np.isnan([low, high]).all()
    ended, length = np.ones((1, 4), bool), np.full((1, 4), 7)
    returns = np.asarray([[1.0, 2.0, 3.0, 10.0]])
    result = evaluate.summarize(training.EpisodeResults(returns, length, ended, ~ended))
    assert result["episode_return"]["per_episode"] == [1.0, 2.0, 3.0, 10.0]
    assert result["episode_return"]["iqm"] == 2.5
    assert "over episodes" in evaluate.describe(result)
    agents = training.EpisodeResults(np.stack([returns, returns + 2], -1), length, ended, ~ended)
    assert evaluate.summarize(agents)["episode_return"]["per_episode"] == [2.0, 3.0, 4.0, 11.0]
    seeds = jax.tree.map(lambda x: np.concatenate([x, x]), agents)  # values after the axis of seeds are one sample
    seeds.episode_return[1] *= 3
    result = evaluate.summarize(seeds)
    assert result["episode_return"]["per_seed"] == [5.0, 15.0]
    assert (result["episode_length"], result["terminated"], result["truncated"]) == (7.0, 8, 0)


def test_a_colon_in_a_setting_names_no_module():
    stored = {"recipe": None, "config": {"env_id": "gym:CartPole-v1,file='C:model'"}}
    check_trusted(stored, Path("run"), trust=False, recipe=False)


def written(
    path: Path, seeds: int, slope: float, *, seed: int = 1, env_id: str = "walk", updates: int = 40, noise=0
) -> Path:
    """Write the folder of a run whose returns grow by `slope` per update, and by 1 per seed."""
    rng = np.random.default_rng(0)
    path.mkdir()
    config = {"config": {"env_id": env_id, "seed": seed}, "run": {"num_seeds": seeds}, "versions": {}}
    (path / "config.json").write_text(json.dumps({**config, "steps_per_update": 10}))
    means = (slope * update + noise * rng.normal() for update in range(1, updates))
    returns = [[np.nan] * seeds, *(mean + np.arange(seeds) for mean in means)]
    rows = [{"update": i, "env_steps": 10 * (i + 1), "episode_return": x} for i, x in enumerate(returns)]
    if seeds == 1:
        rows = [{**row, "episode_return": row["episode_return"][0]} for row in rows]
    (path / "metrics.jsonl").write_bytes(format_rows(rows))
    return path


def test_compare_draws_curves_and_prints_a_table(tmp_path, capsys):
    fast, slow = written(tmp_path / "fast,1", 4, 2.0), written(tmp_path / "slow", 1, 1.0)
    other = written(tmp_path / "lr=0.1", 1, 1.0, seed=2, updates=20)
    rows = compare.main([str(other), str(fast), "--output", str(tmp_path / "two.png")])
    assert [row["run"] for row in rows] == [str(other), str(fast)]
    same = [written(tmp_path / str(n), 1, 0.0, seed=n, updates=n, noise=9.0) for n in (99, 2000)]  # in 99 updates
    first, second = compare.main([*map(str, same), "--output", str(tmp_path / "two.png"), "--window", "1"])
    assert (second["iqm"], second["larger_than_first"]) == (first["iqm"], None)  # one seed each
    capsys.readouterr()
    picture, table = tmp_path / "compare.png", tmp_path / "table.json"
    several = f"slow={slow},{other}"
    arguments = [f"fast={fast}", several, "--output", str(picture), "--json", str(table), "--window", "1"]
    first, second = compare.main(arguments)
    assert (first["seeds"], first["env_steps"], first["iqm"], first["mean"]) == (4, 200, 39.5, 39.5)  # at the same step
    assert (first["min"], first["max"]) == (38.0, 41.0)
    assert first["iqm_95"] == pytest.approx([38.0, 41.0], abs=0.6)
    assert (second["run"], second["seeds"], second["larger_than_first"]) == ("slow", 2, 0.0)
    assert (second["env_steps"], second["iqm"]) == (200, 19.0)  # the shorter one ends there
    assert json.loads(table.read_text()) == [first, second]
    printed = capsys.readouterr().out
    assert "| slow" in printed
    assert "of fewer than 5 seeds, the interval is their range, and P is a rough estimate" in printed
    assert "IQM [range]" in printed
    with Image.open(picture) as drawn:
        assert drawn.size[0] > 200
    stored = json.loads((slow / "config.json").read_text())
    (slow / "config.json").write_text(json.dumps(stored | {"num_updates": 40}))
    np.testing.assert_allclose(compare.read_curve("slow", [slow]).values[-1], 37.5)  # this is the mean of the last four
    curve = compare.read_curve("slow", [slow], window=1)
    np.testing.assert_allclose(np.interp([100.0, 200.0], curve.env_steps, curve.values[:, 0]), [9.0, 19.0], atol=0.1)


def test_compare_averages_members_of_a_population_but_not_the_seeds_of_its_evaluations(tmp_path):
    path = written(tmp_path / "run", 2, 0.0, updates=3)
    members = [[[np.nan, 1.0], [2.0, 4.0]], [[np.nan, 3.0], [np.nan, np.nan]], [[np.nan, 5.0], [6.0, np.nan]]]
    rows = [
        {"update": i, "env_steps": i + 1.0, "episode_return": x, PARENT: [[0, 1]] * 2, "evaluation/return": [i, 10 + i]}
        for i, x in enumerate(members)
    ]
    (path / "metrics.jsonl").write_bytes(format_rows(rows))
    read = lambda metric: compare.read_curve("", [path], metric, window=1).values.tolist()  # noqa: E731
    assert read("evaluation/return") == [[0, 10], [1, 11], [2, 12]]
    assert read("episode_return") == [[1, 3], [3, 4.5], [5, 6]]  # it is drawn without gaps


def test_compare_refuses_what_cannot_be_compared(tmp_path):
    a, b = (str(written(tmp_path / x, 2, 1.0, seed=seed, env_id=x)) for seed, x in ((1, "a"), (3, "b")))
    none, part, late = (str(written(tmp_path / x, 1, 1.0, env_id="a")) for x in ("none", "part", "late"))
    row = {"update": 0, "env_steps": 10, "episode_return": [1.0, np.nan]}
    later = [{"update": i, "env_steps": 500 * (i + 1), "episode_return": [np.nan, 1.0][i]} for i in range(2)]
    for path, rows in ((none, []), (part, [row]), (late, later)):
        (Path(path) / "metrics.jsonl").write_bytes(format_rows(rows))
    for argv, says in (
        ([a, b], "runs of different environments cannot be compared: .*a: a, .*b: b"),
        ([f"x={a},{b}"], "x: the runs use several environments, a, b"),
        ([f"x={a},{a}"], "two runs have the same seed"),
        ([a, "--metric", "won"], "no row has the metric won; available: env_steps, episode_return, update"),
        ([a, "--metric", "evaluation/won"], "the metric evaluation/won; .*; evaluations .* need --eval-every"),
        ([a, "--output", "x.foo"], r"x\.foo must end with .* or \.png or "),
        ([none], "there are no metrics yet"),
        ([part], "has not been measured in every seed"),
        ([a, late], "late has no value yet at step 400, the last that all have reached"),
    ):
        with pytest.raises(SystemExit, match=f"^error: .*{says}"):
            compare.main(argv)


def test_watch_writes_what_the_agent_does(folder, tmp_path, capsys):
    path = watch.main([str(folder), "--output", str(tmp_path / "a.gif"), "--episodes", "2", "--width", "16"])
    assert "episode 2: return 6.0 in 3 steps" in capsys.readouterr().out
    with Image.open(path) as animation:
        assert (animation.n_frames, animation.size) == (6, (16, 12))
        greys = []
        for i in range(6):
            animation.seek(i)
            greys.append(np.asarray(animation.convert("L")).max())
            assert animation.info["duration"] == 30  # a GIF counts hundredths of a second
    assert greys == [0, 50, 100] * 2


@pytest.mark.parametrize(("fps", "duration"), [(50, 20), (35, 30), (0.5, 2000)])
def test_the_time_between_the_frames_of_a_gif_is_rounded(fps, duration, tmp_path):
    watch.write_animation(tmp_path / "a.gif", [np.full((30, 45, 3), grey, np.uint8) for grey in (0, 200)], fps=fps)
    with Image.open(tmp_path / "a.gif") as animation:
        assert animation.info["duration"] == duration


def test_watch_and_evaluations_carry_a_memory_and_begin_alike_whatever_the_limit(capsys):
    train = recipe.make_train(recipe.Config(memory="lstm"))
    state = train.jitted_init(jax.random.key(0))
    assert len(list(watch.render_frames(train, state, max_steps=2, mode=True))) == 2
    assert not capsys.readouterr().out
    played = jax.jit(lambda state: train.evaluate_policy(jax.random.key(1), state, 3))(state)
    assert played.episode_length.tolist() == [3, 3, 3]

    step = lambda key, x, action: envs.Step(x, jnp.zeros(2), reward=0.0, terminated=False)  # noqa: E731
    reset = lambda key: (jax.random.uniform(key), jnp.zeros(2))  # noqa: E731
    render = lambda x: np.full((2, 2, 3), 255 * x, np.uint8)  # noqa: E731
    env = envs.auto_reset(reset, step, envs.Box((2,)), envs.Box((1,)), render=render)
    policy, space = networks.actor_critic(env, (4,)), types.SimpleNamespace
    train = space(policy=policy, env=space(evaluation=lambda state: env))
    state = space(rollout=space(env_state=None), learner=space(params=policy.init(jax.random.key(0))))
    first, second = (next(watch.render_frames(train, state, max_steps=limit)) for limit in (2, 3))
    np.testing.assert_array_equal(first, second)
    env = envs.fold_agents(bit_game()._replace(render=lambda x: np.zeros((2, 2, 3), np.uint8)))
    policy = networks.actor_critic(env, (4,))
    train = space(policy=policy, env=space(evaluation=lambda state: env))
    state = space(rollout=space(env_state=None), learner=space(params=policy.init(jax.random.key(0))))
    assert len(list(watch.render_frames(train, state, max_steps=2))) == 2


def test_watch_says_what_it_cannot_draw_or_write(folder, tmp_path, monkeypatch):
    state = jax.tree.map(lambda x: x[0], training.load(folder).state)
    train = recipe.make_train(recipe.Config(drawn=False))
    write = watch.write_animation
    for bad, says in (
        (lambda: next(watch.render_frames(train, state)), "environment cannot be rendered: give its Env a render"),
        (lambda: watch.render_frames(train, state, max_steps=0), "max_steps must be at least 1, got 0"),
        (lambda: write(Path("a.mp4"), [], fps=0), r"fps must lie in \(0, inf\], got 0"),
        (lambda: write(Path("a.gif"), [], fps=60), r"fps must lie in \(0, 50\], got 60"),
        (lambda: write(Path("a.gif"), [], width=-1), "width must be at least 1, got -1"),
        (lambda: write(Path("a.png"), []), r"a\.png must end with \.gif or \.mp4"),
        *((lambda x=x: write(tmp_path / x, []), "there are no frames to write") for x in ("a.gif", "a.mp4")),
        (lambda: evaluate.play_episodes(training.load(folder), 1, seed=2**32), "seed must be .* got 4294967296"),
    ):
        with pytest.raises(UserValueError, match=says):
            bad()
    assert not list(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(MissingPackage, match=r'pip install "ppo_parts\[watch\]"'):
        watch.write_animation(tmp_path / "a.mp4", [])


def test_videos_are_written_by_ffmpeg(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    imageio = pytest.importorskip("imageio")
    frames = [np.full((30, 45, 3), grey, np.uint8) for grey in (0, 200)]
    assert watch.write_animation(tmp_path / "a.mp4", frames, width=90) == 2
    read = [x for x in imageio.get_reader(tmp_path / "a.mp4")]  # noqa: C416 - the reader has an infinite length
    assert [x.shape for x in read] == [(60, 90, 3)] * 2
    assert [round(float(x.mean()), -1) for x in read] == [0, 200]


def test_runs_are_tracked(tmp_path, monkeypatch):
    """A resumed run continues its tracked run, and a missing package is reported before a folder is made."""
    config, options = recipe.Config(), {"track": True, "log_every": 1, "checkpoint_every": 1}
    program = measuring(episode_return=6.0, episodes=1.0)
    run = functools.partial(go, recipe.make_train(config), tmp_path, "a", config, program, **options)
    runs, records, finished = [], [], []

    def init(**settings):
        runs.append(settings)
        log = lambda record, step: records.append((step, record))  # noqa: E731
        return types.SimpleNamespace(log=log, finish=lambda exit_code=0: finished.append(exit_code))

    stop, fail = (mock.Mock(side_effect=error) for error in (training.StopRun, ZeroDivisionError))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingPackage, match=r'wandb is not installed: .* pip install "ppo_parts\[track\]"'):
        run()
    assert not list(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    run(on_rows=stop)
    with pytest.raises(ZeroDivisionError):
        run(resume=tmp_path / "a", on_rows=fail)
    run(resume=tmp_path / "a")
    first, second, _ = runs
    assert (first["project"], first["name"], first["dir"]) == ("mine", "a", str(tmp_path / "a"))
    assert first["config"]["env_id"] == "walk"
    assert first["id"] == second["id"] == (tmp_path / "a" / "wandb_id.txt").read_text()
    assert [step for step, _ in records] == [16, 32]
    assert records[0][1]["charts/episode_return"] == 6.0
    assert finished == [0, 1, 0]
