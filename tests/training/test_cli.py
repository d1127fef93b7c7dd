"""The command line of recipes, and the ranges of their configurations: what cannot work ends with one sentence."""

import dataclasses
import functools
import importlib
import json
import math
import pickle
import re
import runpy
import shlex
import signal
import sys
import unittest.mock
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal, get_type_hints

import jax
import jax.numpy as jnp
import pytest
import yaml

import ppo_parts as pp
from ppo_parts import training
from ppo_parts._base.command_line import whole_number
from ppo_parts.recipes import cleanrl_ppo, ippo, pufferlib_ppo
from ppo_parts.recipes.__main__ import list_recipes
from ppo_parts.training._config import format_finite, read_declared
from ppo_parts.training._program import CACHE_LIMIT, keep_compiled_programs
from ppo_parts.training._run import time_compiling
from tests.runs import ROOT

RECIPES = (cleanrl_ppo, pufferlib_ppo, ippo)


class Reached(Exception):
    """Raised where a run would begin."""


def make_train(config: training.Config):
    """Stand in for a recipe's function, without tracing anything."""
    return SimpleNamespace()


def begin(train, config, options):
    raise Reached(config, options, train.recipe)


def reached(*argv, recipe=cleanrl_ppo):
    """Return the configuration, the options and the recipe with which a run would begin."""
    with pytest.raises(Reached) as begun:
        training.main(make_train, recipe.PRESETS, [*argv], run=begin)
    return begun.value.args


def ends_with(*argv, says, recipe=cleanrl_ppo):
    """Check that a recipe's command line ends with this sentence before a run begins."""
    with pytest.raises(SystemExit, match=f"^error: {says}"):
        training.main(recipe.make_train, recipe.PRESETS, [*argv], run=begin)


def ended_by_tyro(argv, says, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        training.main(make_train, cleanrl_ppo.PRESETS, argv, run=begin)
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("recipe", RECIPES)
def test_config_numbers_of_a_recipe_declare_their_range(recipe, capsys, monkeypatch):
    """If one is out of range, the command line names the flag, and Python the field, before making an environment."""
    monkeypatch.setenv("COLUMNS", "80")  # options are below each other
    with pytest.raises(SystemExit):
        training.main(functools.partial(recipe.make_train), recipe.PRESETS, ["--help"])
    text = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert " ".join(recipe.__doc__.partition(".")[0].split()) in text
    assert "discount of rewards per step" in text
    for preset in recipe.PRESETS.values():
        training.check_config(preset)
    numbers = {name for name, hint in get_type_hints(recipe.Config).items() if re.search("int|float", str(hint))}
    assert numbers == read_declared(recipe.Config, training.Range).keys()
    for name, limits in read_declared(recipe.Config, training.Range).items():
        flag = f"--{name.replace('_', '-')}"
        said = text.partition(f"{flag} ")[2].partition("(default:")[0]
        assert format_finite(limits) in said, name
        assert len(said.replace(format_finite(limits), "").split()) > 3, name
        outside = limits.low if limits.open_low else limits.low - 1
        wrong = outside if isinstance(outside, int) else float(outside)
        several = isinstance(getattr(recipe.Config(), name), tuple)
        with pytest.raises(pp.errors.UserValueError, match=f"^Config: {name} must "):
            recipe.make_train(recipe.Config(**{name: (wrong,) if several else wrong}))
    ends_with(flag, str(outside), says=f"{flag} must .*, got ", recipe=recipe)


@dataclasses.dataclass(frozen=True)
class Config:
    size: Annotated[int, training.Range(1, 9)] = 4
    shift: Annotated[int, training.Range(-math.inf, 5)] = -7
    rate: Annotated[float | None, training.Range(0, open_low=True)] = None
    sizes: Annotated[tuple[int, ...], training.Range(1)] = (4, 4)
    piece: Annotated[int | Literal["auto"] | None, training.Range(1)] = "auto"
    kind: Literal["a", "b"] = "a"
    free: float = 0.0
    yes: bool = True
    name: str = "x"
    tags: tuple[str, ...] = ("a",)
    pair: tuple[int, str] = (1, "a")
    few: Annotated[tuple[int, ...] | None, training.Range(1)] = None
    level: Literal[1, 2] = 1


def test_config_field_that_cannot_be_used_is_named():
    training.check_config(Config(size=9, rate=1e-9, sizes=(), piece=2**70, free=-3.0, few=(1, 2), level=2))
    jax.eval_shape(lambda rate: training.check_config(Config(rate=rate)), jnp.ones(()))

    class Untyped(Config):
        rate = 0.5

    says = r"Untyped: rate has no type, .* its value, 0.5: write rate: float = 0.5"
    with pytest.raises(pp.errors.UserTypeError, match=says):
        training.check_config(Untyped())
    for name, value, says in (
        ("size", 0, "must be at least 1, got 0"),
        ("size", 10, "must lie in [1, 9], got 10"),
        ("size", 4.0, "must be an integer, got 4.0: write 4"),
        ("size", True, "must be an integer, got True"),
        ("shift", 6, "must lie in (-inf, 5], got 6"),
        ("rate", 0.0, "must lie in (0, inf), got 0.0"),
        ("rate", float("nan"), "must lie in (0, inf), got nan"),
        ("rate", "1", "must be a number"),
        ("sizes", (4, 0), "must be at least 1, got 0"),
        ("sizes", 4, "must be a tuple[int, ...], got 4"),
        ("sizes", [4, 5], "must be a tuple[int, ...], got [4, 5]: write (4, 5)"),
        ("piece", 0, "must be at least 1, got 0"),
        ("piece", "all", "must be one of 'auto', an integer, None, got 'all'"),
        ("kind", "c", "must be one of 'a', 'b', got 'c'"),
        ("free", float("nan"), "must lie in (-inf, inf), got nan"),
        ("yes", 1, "must be True or False, got 1"),
        ("name", None, "must be a string, got None"),
        ("tags", ("a", 3), "must be a string, got 3"),
        ("pair", (1, 2), "must be a string, got 2"),
        ("few", (4, 0), "must be at least 1, got 0"),
        ("level", 3, "must be one of 1, 2, got 3"),
        ("level", True, "must be one of 1, 2, got True"),
        ("pair", (1, "a", 3), "must be a tuple[int, str], got (1, 'a', 3)"),
    ):
        with pytest.raises(pp.errors.UserError, match=re.escape(f"Config: {name} {says}")):
            training.check_config(Config(**{name: value}))


def test_flags_of_whole_numbers_take_scientific_notation(capsys):
    for given in ("1000000", "1_000_000", "1e6", "+1.0e6", "0.001e9"):
        assert whole_number(given) == 1_000_000
    for given in ("1.5", "1e-3", "abc", "", "inf", "nan", "1e999999999"):
        with pytest.raises(ValueError, match=r"is not an integer|could not convert"):
            whole_number(given)
    for argv, says in ((["--num-envs", "1.5"], "--num-envs"), (["--resume"], "Missing value for argument '--resume'")):
        ended_by_tyro(argv, says, capsys)
    names = ("total_timesteps", "microbatch", "hidden", "num_seeds", "keep_checkpoints")
    config, options, recipe = reached(*(word for name in names for word in (f"--{name.replace('_', '-')}", "1e3")))
    assert recipe == __name__  # the module of make_train, not that of the configuration
    found = [getattr(config if hasattr(config, name) else options, name) for name in names]
    assert repr(found) == "[1000, 1000, (1000,), 1000, 1000]"


FILE = {
    "num_envs": "1e1", "total-timesteps": 1e6, "hidden": [8, 16], "anneal_lr": False, "target_kl": None,
    "learning_rate": 0.001, "eval_episodes": 5, "tensorboard": False, "name": "-x",
}  # fmt: skip


def test_config_file_sets_what_flags_do_not(tmp_path):
    for path, dump in ((tmp_path / "mine.json", json.dumps), (tmp_path / "mine.yaml", yaml.safe_dump)):
        path.write_text(dump(FILE))
        config, options, _ = reached("--num-steps", "64", "--config", str(path), "--hidden", "4", "--anneal-lr")
        assert (config.num_envs, config.total_timesteps, config.num_steps) == (10, 1_000_000, 64)
        assert (config.hidden, config.anneal_lr, config.target_kl, config.learning_rate) == ((4,), True, None, 1e-3)
        assert (options.eval_episodes, options.tensorboard, options.name) == (5, False, "-x")
    path.write_text('{"preset": "continuous", "num_envs": 2, "anneal_lr": false, "resume": null}')
    config, *_ = reached("--config", str(path))
    assert (config.env_id, config.num_envs, config.num_steps, config.anneal_lr) == ("Pendulum-v1", 2, 2048, False)


def test_config_file_or_flags_that_cannot_be_used_are_refused(tmp_path, capsys, monkeypatch):
    path = tmp_path / "mine.yaml"
    for content, says in (
        ("preset: contiuous", "--preset must be one of 'discrete', 'continuous', 'golf', got 'contiuous'"),
        ("- 3", ".*mine.yaml must map names of options to values, got [3]"),
        ("a: [", ".*mine.yaml cannot be read: "),
        ("num_envs: 8\nnum_envs: 16", ".*mine.yaml gives num_envs twice: leave one of them out"),
        ("clip_coef: -1", "--clip-coef must lie in (0, inf), got -1.0"),
        ("hidden: [8, 0]", "--hidden must be at least 1, got 0"),
        ("anneal-lr: yes please", "--anneal-lr must be true or false in .*mine.yaml, got 'yes please'"),
        ("num_envs: 8\nnum-envs: 16", ".*mine.yaml gives num_envs twice: leave one of them out"),
        ("config: other.yaml", ".*mine.yaml cannot name another file, other.yaml: write its options here"),
        ("config: {env_id: a}", ".*mine.yaml is of a run: continue it with --resume .*, or copy what is under"),
        ("num_envs: yes", "--num-envs must not be true or false in .*mine.yaml: YAML reads yes, no, on and off so"),
        ("name: [a, b]", "--name must be one value in .*mine.yaml, got ['a', 'b']"),
        ("directory: null", "--directory must have a value in .*mine.yaml: leave it out for the default"),
        ("hidden: {a: 4}", "--hidden must be one value in .*mine.yaml, got {'a': 4}"),
    ):
        path.write_text(content)
        ends_with("--config", str(path), says=re.escape(says).replace(r"\.\*", ".*"))
    pairs = dataclasses.make_dataclass(
        "Pairs",
        [
            ("pair", tuple[int, int], (1, 2)),
            ("few", tuple[int, ...] | None, None),
            ("maybe", bool | None, None),
            ("weights", dict[str, float], dataclasses.field(default_factory=lambda: {"fuel": 1.0, "time": 3.0})),
        ],
        bases=(cleanrl_ppo.Config,),
        frozen=True,
    )
    for content, raised, says in (
        ("pair: [1, 2, 3]", SystemExit, r"^error: --pair must be 2 values in .*mine\.yaml, got \[1, 2, 3\]"),
        ("few: [3, 4, 5]", Reached, r"few=\(3, 4, 5\)"),
        ("weights: {gamma: 2}", SystemExit, "^error: --weights has no key 'gamma', which .* its keys are fuel, time"),
        ("maybe: true\nweights: {fuel: 2}", Reached, r"maybe=True, weights={'fuel': 2.0, 'time': 3.0}"),
    ):
        path.write_text(content)
        with pytest.raises(raised, match=says):
            training.main(make_train, {"default": pairs()}, ["--config", str(path)], run=begin)
    (tmp_path / "mine.json").write_text('{\n\t"num_envs": 8, "num_envs": 16}')  # YAML does not allow tabs
    ends_with("--config", str(tmp_path / "mine.json"), says=r".*mine\.json gives num_envs twice: leave one of them out")
    ends_with("--config", "a", "--config", "b", says="--config is given twice: put all options into one file")
    ends_with("--config", str(tmp_path / "absent.yaml"), says=r".*absent\.yaml: No such file")
    for content, says in {"num_env: 3": "--num-envs", "num_envs: 2.5": "'2.5' is not an integer"}.items():
        path.write_text(content)
        ended_by_tyro(["--config", str(path)], says, capsys)
    for name in ("track", "preset"):
        named = dataclasses.make_dataclass("Named", [(name, bool, False)], bases=(cleanrl_ppo.Config,), frozen=True)
        with pytest.raises(pp.errors.UserValueError, match=f"Config: {name} is also .* option .*: rename the field"):
            training.main(make_train, {"default": named()}, [])
    for name, key in (("weights", "gamma"), ("weights", "resume")):
        field = (name, dict, dataclasses.field(default_factory=lambda key=key: {key: 0.5}))
        weighted = dataclasses.make_dataclass("Weighted", [field], bases=(cleanrl_ppo.Config,), frozen=True)
        with pytest.raises(pp.errors.UserValueError, match=f"Config: weights has the key '{key}', .*: rename it"):
            training.main(make_train, {"default": weighted()}, [])
    nested = dataclasses.make_dataclass("Nested", [("net", Config, Config())], bases=(cleanrl_ppo.Config,), frozen=True)
    with pytest.raises(
        pp.errors.UserValueError, match=r"net Config\(.* cannot be stored .*: make its fields those of C"
    ):
        training.main(make_train, {"default": nested()}, [])
    placed = dataclasses.make_dataclass("Placed", [("at", Path | None, None)], bases=(cleanrl_ppo.Config,), frozen=True)
    with pytest.raises(SystemExit, match=r"^error: --at PosixPath\('a'\) cannot be stored .*: use finite numbers"):
        training.main(make_train, {"default": placed()}, ["--at", "a"], run=begin)
    with pytest.raises(pp.errors.UserTypeError, match=r"def make_train\(config: Config\)"):
        training.main(lambda config: pytest.fail("traced"), cleanrl_ppo.PRESETS, [])

    def fail(config: training.Config):
        pytest.fail("traced")

    monkeypatch.setattr(cleanrl_ppo, "make_train", fail)
    stored = {"config": {}, "run": {"num_seeds": 1}, "versions": {}, "steps_per_update": 1}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    for flag in ("--resume", "--init-from"):
        says = f"--preset continuous is for new runs, and {flag} takes the settings"
        ends_with(flag, str(tmp_path), "--preset", "continuous", says=says)


def test_errors_of_the_user_end_with_a_sentence_that_names_the_flag():
    error = pp.errors.UserValueError("must lie in [0, 1], got 2.0", where="Config", argument="gamma")
    error = pickle.loads(pickle.dumps(error))  # as if it came from another process
    for raised, flags, says in (
        (error, ["gamma", "name"], "--gamma must lie in [0, 1], got 2.0"),
        (error, [], str(error)),
        (pp.errors.UserTypeError("give another name"), ["name"], "give another name"),
        (OSError(28, "No space left on device", "x"), [], "x: No space left on device"),
        (OSError("a"), [], "a"),
    ):
        with pytest.raises(SystemExit, match=f"^error: {re.escape(says)}$"), training.exit_on_user_error(flags):
            raise raised
    with pytest.raises(ValueError, match="a"), training.exit_on_user_error():  # such an error keeps its traceback
        raise ValueError("a")


def test_how_a_run_ends_is_how_the_command_ends():
    def main(run):
        return training.main(make_train, cleanrl_ppo.PRESETS, [], run=run)

    for name in ("SIGINT", "SIGTERM"):
        with pytest.raises(SystemExit, match=f"^{128 + signal.Signals[name]}$"):
            main(lambda *_, name=name: {"interrupted_by": name})
    assert main(lambda *_: {"interrupted_by": "StopRun"}) == {"interrupted_by": "StopRun"}  # the run stopped itself
    with pytest.raises(SystemExit, match=f"^{128 + signal.SIGINT}$"):
        main(unittest.mock.Mock(side_effect=KeyboardInterrupt()))


def test_recipes_are_listed_with_their_presets(monkeypatch):
    lines = list(list_recipes())
    files = {path.stem for path in Path(cleanrl_ppo.__file__).parent.glob("[a-z]*.py")}
    commands = {line.partition(":")[0] for line in lines if line[0] != " "}
    assert commands == {f"python -m ppo_parts.recipes.{name}" for name in files}
    for recipe in RECIPES:
        for name, config in recipe.PRESETS.items():
            assert any(f"--preset {name} " in line and config.env_id in line for line in lines)
    monkeypatch.setattr(sys, "argv", ["ppo_parts.recipes", "cleanrl_ppo", "--gamma", "0.5"])
    with pytest.raises(SystemExit, match=r"to train, write python -m ppo_parts.recipes\.cleanrl_ppo"):
        runpy.run_path(importlib.import_module("ppo_parts.recipes.__main__").__file__, run_name="__main__")


def test_commands_of_the_pages_give_a_configuration():
    """Leave out commands that need a file or a second device, and make no environment."""

    def make_train(config: training.Config):
        raise Reached(config)

    others, seen = {"--help", "--config", "--sweep", "--resume", "--distributed", "--num-devices"}, set()
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        for recipe, options in re.findall(r"python -m ppo_parts.recipes\.(\w+)((?:\\\n|[^`#&|\n])*)", page.read_text()):
            argv = shlex.split(options.replace("\\\n", " "))  # a command may continue on the next line
            if not others & set(argv):
                with pytest.raises(Reached):
                    training.main(make_train, importlib.import_module(f"ppo_parts.recipes.{recipe}").PRESETS, argv)
                seen.add(recipe)
    assert seen >= {"cleanrl_ppo", "pufferlib_ppo", "ippo", "atari_ppo"}


CHANGED = ("compilation_cache_dir", "persistent_cache_min_compile_time_secs", "compilation_cache_max_size")


@pytest.fixture
def settings(monkeypatch):
    """Use JAX's settings in a process that keeps no programs; return them by their names without prefix."""
    before = {f"jax_{name}": jax.config.values[f"jax_{name}"] for name in (*CHANGED, "enable_compilation_cache")}
    for name in CHANGED:
        monkeypatch.delenv(f"JAX_{name.upper()}", raising=False)
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", True)
    yield lambda: {name: jax.config.values[f"jax_{name}"] for name in CHANGED}
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_are_kept_in_the_cache_folder_of_the_user(settings, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_compiled_programs()
    assert capsys.readouterr().err.startswith("compiled programs are not kept: [Errno 20] Not a directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_MAX_SIZE", "7")  # the user's setting wins
    limit = settings()["compilation_cache_max_size"]
    assert limit != CACHE_LIMIT
    for option, folder in ((False, None), (True, tmp_path / "ppo_parts" / "jax")):
        jax.config.update("jax_enable_compilation_cache", option)
        keep_compiled_programs()
        assert settings()["compilation_cache_dir"] == (folder and str(folder))
    assert [*settings().values()][1:] == [0.0, limit]
    assert folder.stat().st_mode & 0o077 == 0
    jax.config.update("jax_compilation_cache_dir", "theirs")
    keep_compiled_programs()
    assert settings()["compilation_cache_dir"] == "theirs"


def test_a_run_says_how_long_compiling_took_the_last_time(settings, tmp_path, caplog, monkeypatch):
    def said(seconds):
        clock = iter((0.0, seconds))
        monkeypatch.setattr("time.monotonic", lambda: next(clock))
        with time_compiling("recipe CartPole-v1"):
            pass
        return [record.message for record in caplog.records[-2:]]

    caplog.set_level("INFO", "ppo_parts.training")
    assert said(9.0) == ["compiling", "compiled in 9.0 s"]  # there is no folder, so nothing is known the next time
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    assert said(8.0) == ["compiling", "compiled in 8.0 s"]
    assert said(1.0) == ["compiling; recipe CartPole-v1 took 8.0 s the last time", "compiled in 1.0 s"]
    (tmp_path / "jax_seconds.json").write_text("[not JSON")
    assert said(1.0) == ["compiling", "compiled in 1.0 s"]
