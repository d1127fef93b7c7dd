"""The command line of recipes, and the ranges of their configurations: what cannot work ends with one sentence."""

import dataclasses
import importlib
import json
import os
import pickle
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal, get_type_hints

import jax
import jax.numpy as jnp
import pytest
import yaml

import ppo_parts as pp
from ppo_parts import envs, training
from ppo_parts.commands import evaluate
from ppo_parts.training._cli import fitting_preset, whole_number, with_flag
from ppo_parts.training._config import ranges
from ppo_parts.training._devices import check_memory
from ppo_parts.training._train import seed_keys
from recipes import cleanrl_ppo, ippo, pufferlib_ppo
from recipes.__main__ import listed
from tests.runs import tiny

pytestmark = pytest.mark.lenient_ranks  # distrax, gymnax
RECIPES = (cleanrl_ppo, pufferlib_ppo, ippo)


class Reached(Exception):
    """Where a run would begin."""


def main(recipe, *argv, run=None):
    """The command line up to where a run begins, with its configuration and options."""

    def begin(train, config, options):
        raise Reached(config, options)

    return training.main(recipe.make_train, recipe.PRESETS, [*argv], run=run or begin)


def reached(*argv, recipe=cleanrl_ppo):
    with pytest.raises(Reached) as begun:
        main(recipe, *argv)
    return begun.value.args


# --- ranges ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_config_numbers_of_a_recipe_declare_their_range(recipe):
    """Of what is out of range the command line names the flag and Python the field, before an environment is made."""
    for preset in recipe.PRESETS.values():
        training.check_config(preset)
    numbers = {name for name, hint in get_type_hints(recipe.Config).items() if re.search("int|float", str(hint))}
    assert numbers == ranges(recipe.Config).keys()
    for name, declared in ranges(recipe.Config).items():
        outside = declared.low if declared.open_low else declared.low - 1
        default = getattr(recipe.Config(), name)
        wrong = (outside,) if isinstance(default, tuple) else outside
        if not isinstance(outside, int):
            wrong = float(outside)
        with pytest.raises(pp.errors.UserValueError, match=f"^Config: {name} must "):
            recipe.make_train(recipe.Config(**{name: wrong}))
        flag = f"--{name.replace('_', '-')}"
        with pytest.raises(SystemExit, match=f"^error: {flag} must .*, got "):
            main(recipe, flag, str(outside))


@pytest.mark.parametrize("recipe", RECIPES)
def test_help_says_what_each_field_is_and_its_range(recipe, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")  # options below each other
    with pytest.raises(SystemExit):
        main(recipe, "--help")
    text = " ".join(capsys.readouterr().out.replace("│", "").split())
    for name, declared in ranges(recipe.Config).items():
        said = text.partition(f"--{name.replace('_', '-')} ")[2].partition("(default:")[0]
        assert str(declared) in said, name
        assert len(said.replace(str(declared), "").split()) > 3, name
    assert "discount of rewards per step" in text


@dataclasses.dataclass(frozen=True)
class Config:
    size: Annotated[int, training.between(1, 9)] = 4
    rate: Annotated[float | None, training.more_than(0)] = None
    sizes: Annotated[tuple[int, ...], training.at_least(1)] = (4, 4)
    piece: Annotated[int | Literal["auto"] | None, training.at_least(1)] = "auto"
    kind: Literal["a", "b"] = "a"
    free: float = 0.0
    yes: bool = True
    name: str = "x"
    tags: tuple[str, ...] = ("a",)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"size": 0}, "size must be at least 1, got 0"),
        ({"size": 10}, "size must lie in [1, 9], got 10"),
        ({"size": 4.0}, "size must be a whole number, got 4.0: write 4"),
        ({"size": True}, "size must be a whole number, got True"),
        ({"size": None}, "size must be a whole number, got None"),
        ({"rate": 0.0}, "rate must lie in (0, inf), got 0.0"),
        ({"rate": float("nan")}, "rate must lie in (0, inf), got nan"),
        ({"rate": float("inf")}, "rate must lie in (0, inf), got inf"),
        ({"rate": "1"}, "rate must be a number"),
        ({"sizes": (4, 0)}, "sizes must be at least 1, got 0"),
        ({"sizes": 4}, "sizes must be a tuple, got 4"),
        ({"piece": 0}, "piece must be at least 1, got 0"),
        ({"piece": "all"}, "piece must be one of 'auto', got 'all'"),
        ({"kind": "c"}, "kind must be one of 'a', 'b', got 'c'"),
        ({"kind": 3}, "kind must be one of 'a', 'b', got 3"),
        ({"free": float("nan")}, "free must lie in (-inf, inf), got nan"),
        ({"free": float("-inf")}, "free must lie in (-inf, inf), got -inf"),
        ({"yes": 1}, "yes must be True or False, got 1"),
        ({"name": None}, "name must be a string, got None"),
        ({"tags": ("a", 3)}, "tags must be a string, got 3"),
    ],
)
def test_config_field_that_cannot_be_used_is_named(changes, says):
    with pytest.raises((pp.errors.UserTypeError, pp.errors.UserValueError), match=re.escape(f"Config: {says}")):
        training.check_config(Config(**changes))


def test_config_in_range_or_traced_passes():
    training.check_config(Config(size=9, rate=1e-9, sizes=(), piece=1, free=-3.0))
    jax.eval_shape(lambda rate: training.check_config(Config(rate=rate)), jnp.ones(()))


def test_seeds_outside_32_bits_are_refused():
    for seed, number in ((-1, 1), (2**32, 1), (2**32 - 1, 2)):
        with pytest.raises(pp.errors.UserValueError, match=r"seed must be such that all seeds lie in \[0, 2\*\*32\)"):
            seed_keys(seed, number)
    assert seed_keys(2**32 - 2, 2).shape == (2,)


def test_updates_beyond_the_counter_are_refused():
    with pytest.raises(
        pp.errors.UserValueError, match=r"less than 2.*31 updates, got .*, which is 1953125000000000 updates"
    ):
        training.updates_in(10**18, num_envs=4, num_steps=128)


def test_memory_that_does_not_suffice_is_refused_at_once():
    train = cleanrl_ppo.make_train(tiny(2))
    check_memory(train, 100)
    with pytest.raises(
        pp.errors.UserValueError, match=r"at least .* GiB of memory .* there are 1\.0 GiB: .*fewer seeds .now 1000000"
    ):
        check_memory(train, 1_000_000, limit=2**30)


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["1000000", "1_000_000", "1e6", "+1.0e6", "0.001e9"])
def test_flag_of_a_whole_number_takes_scientific_notation(given):
    config, _ = reached("--total-timesteps", given)
    assert config.total_timesteps == 1_000_000
    assert isinstance(config.total_timesteps, int)


@pytest.mark.parametrize("given", ["1.5", "1e-3", "abc", "", "inf", "nan", "1e999999999"])
def test_flag_of_a_whole_number_refuses_other_numbers(given, capsys):
    with pytest.raises(ValueError, match=r"is not a whole number|is too large"):
        whole_number(given)
    with pytest.raises(SystemExit) as ended:
        main(cleanrl_ppo, "--num-envs", given)
    assert ended.value.code == 2
    assert "--num-envs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "field", "value"),
    [
        ("--microbatch", "microbatch", 1000),
        ("--hidden", "hidden", (1000,)),
        ("--num-seeds", "num_seeds", 1000),
        ("--eval-episodes", "eval_episodes", 1000),
        ("--checkpoint-every", "checkpoint_every", 1000),
        ("--keep-checkpoints", "keep_checkpoints", 1000),
    ],
)
def test_flag_takes_scientific_notation_wherever_a_whole_number_may_stand(flag, field, value):
    config, options = reached(flag, "1e3", *(["--hidden", "8"] if field == "num_seeds" else []))
    found = getattr(config if hasattr(config, field) else options, field)
    assert found == value
    assert type(found) is type(value)


FILE = {
    "num_envs": "1e1",
    "total-timesteps": 1e6,
    "hidden": [8, 16],
    "anneal_lr": False,
    "target_kl": None,
    "learning_rate": 0.001,
    "eval_episodes": 5,
    "tensorboard": False,
}


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_config_file_sets_what_flags_do_not(tmp_path, suffix):
    path = tmp_path / f"mine{suffix}"
    path.write_text(json.dumps(FILE) if suffix == ".json" else yaml.safe_dump(FILE))
    config, options = reached("--num-steps", "64", "--config", str(path), "--hidden", "4", "--anneal-lr")
    assert (config.num_envs, config.total_timesteps, config.num_steps) == (10, 1_000_000, 64)
    assert (config.hidden, config.anneal_lr, config.target_kl, config.learning_rate) == ((4,), True, None, 1e-3)
    assert (options.eval_episodes, options.tensorboard) == (5, False)
    config, _ = reached("--config", str(path))
    assert (config.hidden, config.anneal_lr) == ((8, 16), False)


def test_config_file_may_have_words_that_begin_with_a_dash(tmp_path):
    (tmp_path / "mine.yaml").write_text("name: -x")
    _, options = reached("--config", str(tmp_path / "mine.yaml"))
    assert options.name == "-x"


def test_config_file_in_json_gives_each_option_once(tmp_path):
    for content, says in (
        ('{"gamma": 0.9, "seed": 3, "gamma": 0.8}', "gamma is given 2 times"),
        ("[" * 200_000, "nested"),
    ):
        (tmp_path / "mine.json").write_text(content)
        with pytest.raises(SystemExit, match=rf"^error: .*mine\.json cannot be read: .*{says}"):
            main(cleanrl_ppo, "--config", str(tmp_path / "mine.json"))


def test_config_file_may_name_a_preset(tmp_path):
    (tmp_path / "mine.yaml").write_text("preset: continuous\nnum_envs: 2\n")
    config, _ = reached("--config", str(tmp_path / "mine.yaml"))
    assert (config.env_id, config.num_envs, config.num_steps) == ("Pendulum-v1", 2, 2048)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("num_env: 3", "'num_env' is not an option of a file; did you mean 'num_envs'?"),
        ("anneal_lr: 3", "anneal_lr must be True or False, got 3"),
        ("config: other.yaml", "'config' is not an option of a file"),
        (
            "preset: contiuous",
            "mine.yaml: preset must be one of 'discrete', 'continuous', got 'contiuous'",
        ),
        ("- 3", "must map names of options to values, got [3]"),
        ("a: [", "cannot be read: "),
        ("clip_coef: -1", "mine.yaml: clip_coef must lie in (0, inf), got -1.0"),
        ("num-envs: many", "mine.yaml: num-envs must be a whole number, got 'many'"),
        ("num_envs: 2.5", "mine.yaml: num_envs must be a whole number, got 2.5"),
        ("hidden: [8, 0]", "mine.yaml: hidden must be at least 1, got 0"),
        ("gamma: 0.9\nseed: 3\ngamma: 0.8", "mine.yaml: gamma is given 2 times: give it once"),
        ("env_id: no", "mine.yaml: env_id must be a string, got False"),
        ("best_mode: highest", "mine.yaml: best_mode must be"),
        ("name: [a, b]", "mine.yaml: name must be one value, got ['a', 'b']"),
        ("target_kl: None", "mine.yaml: target_kl is the text 'None': write null for None"),
        ("hidden: 64 64", "mine.yaml: hidden must be a list, such as [64, 64], got '64 64'"),
    ],
)
def test_config_file_that_cannot_be_used_is_refused(tmp_path, content, says):
    (tmp_path / "mine.yaml").write_text(content)
    with pytest.raises(SystemExit, match=f"^error: .*{re.escape(says)}"):
        main(cleanrl_ppo, "--config", str(tmp_path / "mine.yaml"))
    with pytest.raises(SystemExit, match=r"^error: .*absent\.yaml: No such file"):
        main(cleanrl_ppo, "--config", str(tmp_path / "absent.yaml"))


def test_error_names_the_flag_of_its_argument():
    error = pp.errors.UserValueError("must lie in [0, 1], got 2.0", where="Config", argument="gamma")
    assert str(error) == "Config: gamma must lie in [0, 1], got 2.0"
    assert with_flag(error, ["gamma", "name"]) == "--gamma must lie in [0, 1], got 2.0"
    assert with_flag(error, []) == str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.argument) == (str(error), "gamma")
    assert with_flag(pp.errors.UserValueError("give another name"), ["name"]) == "give another name"
    assert with_flag(OSError("gamma"), ["gamma"]) == "gamma"


def test_recipes_are_listed_with_their_presets():
    lines = list(listed())
    files = {path.stem for path in Path(cleanrl_ppo.__file__).parent.glob("[a-z]*.py")}
    commands = {line.partition(":")[0] for line in lines if line[0] != " "}
    assert commands == {f"python -m recipes.{name}" for name in files}
    for recipe in RECIPES:
        for name, config in recipe.PRESETS.items():
            assert any(f"--preset {name} " in line and config.env_id in line for line in lines)


def test_commands_of_the_pages_give_a_configuration():
    """Those that need neither a file nor a second device; no environment is made."""

    def make_train(config):
        raise Reached(config)

    root, others = Path(__file__).parents[2], {"--help", "--config", "--resume", "--distributed", "--num-devices"}
    seen = set()
    for page in (root / "README.md", *root.glob("docs/*.md")):
        for recipe, options in re.findall(r"python -m recipes\.(\w+)((?:\\\n|[^`#&|\n])*)", page.read_text()):
            argv = shlex.split(options.replace("\\\n", " "))  # a command may continue on the next line
            if not others & set(argv):
                with pytest.raises(Reached):
                    training.main(make_train, importlib.import_module(f"recipes.{recipe}").PRESETS, argv)
                seen.add(recipe)
    assert seen >= {"cleanrl_ppo", "pufferlib_ppo", "ippo", "atari_ppo"}


@pytest.mark.parametrize("flag", ["--resume", "--init-from"])
def test_preset_beside_an_older_run_is_refused(flag, tmp_path):
    with pytest.raises(
        SystemExit, match=rf"^error: --preset continuous is for new runs, and {flag} takes the settings"
    ):
        main(cleanrl_ppo, flag, str(tmp_path), "--preset", "continuous")


@pytest.mark.parametrize("flags", [["--name", "other"], ["--directory", "elsewhere"]])
def test_a_run_is_resumed_where_it_is(flags, tmp_path):
    (tmp_path / "mine").mkdir()
    stored = {"config": {}, "run": {"num_seeds": 1}, "versions": {}, "steps_per_update": 1}
    (tmp_path / "mine/config.json").write_text(json.dumps(stored))
    says = rf"^error: {flags[0]} {flags[1]} is for new runs, and --resume continues .*mine"
    with pytest.raises(SystemExit, match=says):
        main(cleanrl_ppo, "--resume", str(tmp_path / "mine"), *flags)


def test_name_that_is_taken_is_refused_before_anything_is_traced(tmp_path, monkeypatch):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/config.json").write_text("{}")
    monkeypatch.setattr(cleanrl_ppo, "make_train", lambda config: pytest.fail("traced"))
    with pytest.raises(SystemExit, match=r"^error: .*taken already holds a run: .* give another --name"):
        main(cleanrl_ppo, "--directory", str(tmp_path), "--name", "taken")


@pytest.mark.parametrize(
    ("recipe", "argv", "fits"),
    [
        (cleanrl_ppo, ["--env-id", "Pendulum-v1"], "continuous"),
        (pufferlib_ppo, ["--env-id", "Breakout-MinAtar"], "minatar"),
        (cleanrl_ppo, ["--env-id", "Acrobot-v1"], None),
        (cleanrl_ppo, ["--env-id", "Pendulum-v1", "--preset", "discrete"], None),
    ],
)
def test_preset_that_fits_better_is_named(recipe, argv, fits, capsys):
    reached(*argv, recipe=recipe)
    said = capsys.readouterr().err
    assert said == (
        ""
        if fits is None
        else f"note: {argv[1]} is trained with the settings of --preset discrete; --preset "
        f"{fits} is meant for environments like it\n"
    )


def test_preset_is_not_found_in_settings_of_an_environment():
    env, env_id = envs.make("CartPole-v1"), "gym:LunarLander-v3,continuous=False"
    assert fitting_preset(("discrete", "continuous"), env_id, env) == "discrete"


@pytest.mark.parametrize("recipe", RECIPES)
def test_preset_fits_its_own_environment(recipe):
    for name, config in recipe.PRESETS.items():
        env = SimpleNamespace(action_space=None) if recipe is ippo else envs.make(config.env_id)
        assert fitting_preset(recipe.PRESETS, config.env_id, env) == name


@pytest.mark.parametrize(
    "error",
    [
        pp.errors.UserValueError("a"),
        pp.errors.UserTypeError("a"),
        pp.errors.UserTimeoutError("a"),
        pp.errors.ShapeError("a"),
        OSError("a"),
    ],
)
def test_error_of_the_user_ends_with_a_sentence(error):
    with pytest.raises(SystemExit, match=r"^error: a$"), training.exit_on_user_error():
        raise error


@pytest.mark.parametrize("error", [ValueError("a"), TypeError("a"), FloatingPointError("a"), KeyError("a")])
def test_error_of_another_kind_keeps_its_traceback(error):
    with pytest.raises(type(error)), training.exit_on_user_error():
        raise error


def test_device_that_is_missing_is_named():
    code = "from ppo_parts import training\nwith training.exit_on_user_error():\n    training._devices.check_device()\n"
    environment = {**os.environ, "JAX_PLATFORMS": "nonsense"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    said = ended.stderr.strip().splitlines()[-1]
    assert re.match(r"error: JAX cannot start: .*nonsense.*JAX_PLATFORMS=nonsense requests it: unset it", said), said
    assert "Traceback" not in ended.stderr


# --- what would be ignored -------------------------------------------------------------------------------------------


def test_recipe_of_a_run_is_the_module_of_its_make_train():
    """And not that of its configuration, which another recipe may have defined."""

    def make_train(config: cleanrl_ppo.Config) -> training.Train:
        return cleanrl_ppo.make_train(config)

    def begin(train, config, options):
        raise Reached(train.recipe)

    with pytest.raises(Reached, match=__name__):
        training.main(make_train, cleanrl_ppo.PRESETS, [], run=begin)


@pytest.mark.parametrize("arguments", [["--anneal-lr", "false"], ["--anneal_lr=False"], ["--no-anneal-lr", "true"]])
def test_flag_of_a_boolean_takes_no_value(arguments):
    with pytest.raises(SystemExit, match=r"takes no value, got '\w+': write --anneal-lr, or --no-anneal-lr for False$"):
        main(cleanrl_ppo, *arguments)


def test_config_files_are_one_at_a_time(tmp_path):
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text("gamma: 0.5")
    with pytest.raises(SystemExit, match=r"error: --config is given 2 times: join .*a\.yaml"):
        main(cleanrl_ppo, "--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml"))


def test_the_list_of_recipes_takes_no_arguments(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["recipes", "cleanrl_ppo", "--gamma", "0.5"])
    path = importlib.import_module("recipes.__main__").__file__
    with pytest.raises(SystemExit, match=r"to train, write python -m recipes\.cleanrl_ppo"):
        runpy.run_path(path, run_name="__main__")
    monkeypatch.setattr(sys, "argv", ["recipes", "--gamma"])
    with pytest.raises(SystemExit, match=r"to train, write python -m recipes\.NAME"):
        runpy.run_path(path, run_name="__main__")
    monkeypatch.setattr(sys, "argv", ["recipes", "--help"])
    runpy.run_path(path, run_name="__main__")
    assert "Each has its own --help" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["-1", "4294967296", "99999999999999999999999"])
def test_seeds_of_commands_that_jax_would_cut_are_refused(text, capsys):
    with pytest.raises(SystemExit):
        evaluate.main(["nowhere", "--seed", text])
    assert f"--seed: must lie in [0, 2**32), got {text}" in capsys.readouterr().err
