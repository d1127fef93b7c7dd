"""Every public name and every flag with bad arguments: is each refused, and does the error say why?

    python -m benchmarks bad_input --json benchmarks/results/bad_input.jsonl#all

The names are found by inspection. The arguments of a name are those of its docstring's example; one at a time is
replaced by a value that its annotation, or the range in its docstring, rules out. A record (a named tuple or a
dataclass of data) is not called, because what reads it checks it.
*Clear*: an error of the package. *Unclear*: any other exception. *Accepted*: the call returns, so the value was wrong
and nobody has said so. The command lines are those of the recipes, up to where a run would begin, and those of the
commands about a run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import doctest
import functools
import importlib
import inspect
import io
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ppo_parts as pp
from ppo_parts import envs, functional, networks, training
from ppo_parts.errors import UserError
from ppo_parts.recipes import cleanrl_ppo
from tests.public import ROOMS, public

from ._options import parser
from ._records import ROOT, write

RECIPES = ("cleanrl_ppo", "pufferlib_ppo", "ippo", "library_ppo", "mujoco_ppo")
COMMANDS = ("evaluate", "watch", "compare", "export")
BROKEN = {
    "empty": "",
    "list": "[]",
    "no_config": "{}",
    "deep": "[" * 200_000,
    "other": '{"recipe": "os", "config": {}}',
}
WORDS = ("x", "-1", "nan", "1.5", "")  # values of flags; a run begins where one of them is right

BAD: dict[str, Any] = {
    "None": None,
    "text": "x",
    "a list": [[1.0], 2.0],
    "nan": float("nan"),
    "negative": -1.5,
    "an object": object(),
    "a wrong shape": np.ones((2, 3, 5), np.float32),
    "complex": np.ones((4, 2), np.complex64),
    "float8": jnp.ones((4, 2), jnp.float8_e4m3fn),
}
NUMBERS = {"None", "text", "a list", "an object", "nan", "complex"}
OBJECTS = ("Env", "Part", "Policy", "Train", "RunOptions", "Callable", "Evaluate", "Mapping", "Literal", "tuple")
OBJECTS += ("KLEstimator", "MaskMode", "Implementation", "Aggregation", "Baseline", "Level", "Scale", "CorrectionMode")
# What each part of an annotation rules out; a part that is not here may be anything.
RULED_OUT: dict[str, set[str]] = {
    "None": set(BAD) - {"None"},
    "Array": {"None", "text", "a list", "an object", "complex", "float8"},
    "ndarray": {"None", "text", "a list", "an object", "complex"},
    "Numeric": NUMBERS,
    "float": NUMBERS,
    "int": NUMBERS | {"negative", "a wrong shape"},
    "bool": set(BAD) - {"negative"},
    "str": set(BAD) - {"text"},
    "Path": set(BAD) - {"text"},
    **{kind: set(BAD) for kind in OBJECTS},
}
BOUNDED = re.compile(r">=? [01]\b|in [\[(]0, |at least \d")


def calls() -> dict[str, dict[str, Any]]:
    """The arguments of names whose docstring has no example of a call."""
    box, agents = envs.make("Pendulum-v1"), envs.make_agents("jaxmarl:MPE_simple_spread_v3")
    cart, image = envs.make("CartPole-v1"), envs.make("gymnax:Breakout-MinAtar")
    policy = networks.actor_critic(cart)
    params, returns = policy.init(jax.random.key(0)), np.ones((4, 2), np.float32)
    wrappers = (envs.clip_action, envs.rescale_action, envs.flatten_action, envs.normalize_observation)
    return {
        **{f"envs.{wrapper.__name__}": {"env": box} for wrapper in (*wrappers, envs.clip_reward)},
        "chain": {"*": (pp.gae(gamma=0.99, gae_lambda=0.95),)},
        "clipped_surrogate": {"clip_eps": 0.2},
        "functional.cispo": {"log_ratio": returns, "advantage": returns, "clip_eps": 0.2},
        "functional.policy_gradient_loss": {"log_ratio": returns, "advantage": returns},
        "envs.normalize_reward": {"env": box, "gamma": 0.99},
        "envs.fold_agents": {"env": agents},
        "envs.make_agents": {"env_id": "jaxmarl:MPE_simple_spread_v3"},
        **{f"envs.{name}": {"obs": np.ones((4, 3, 2), np.float32)} for name in ("share_observations", "with_agent_id")},
        **{f"envs.{name}": {"space": cart.action_space} for name in ("is_discrete", "size")},
        "envs.Box": {"shape": (3,)},
        "envs.Discrete": {"n": 2},
        "envs.MultiDiscrete": {"nvec": (2, 3)},
        "networks.nature_cnn": {"env": image},
        "networks.require_package": {"name": "flax", "extra": "train"},
        "training.Checkpoints": {"directory": "checkpoints"},
        "training.Range": {"low": 0.0},
        **{f"training.{name}": {"low": 0} for name in ("at_least", "more_than")},
        "training.between": {"low": 0, "high": 1},
        **{f"training.{name}": {"x": returns} for name in ("bootstrap", "iqm", "summary")},
        "training.column": {"rows": [{"update": 1, "x": 1.0}], "name": "x"},
        "training.evaluate_episodes": {
            "env": cart, "policy": policy, "params": params, "key": jax.random.key(0), "episodes": 2, "max_steps": 9
        },
        "training.plot_curve": {"path": Path("c.png"), "env_steps": np.arange(4), "returns": returns, "title": ""},
        "training.vmap_over_seeds": {"function": abs, "num_seeds": 2},
        "training.read_metrics": {"path": "metrics.jsonl"},
    }  # fmt: skip


def example_of(where: str, made: Callable[..., Any]) -> inspect.BoundArguments | None:
    """The arguments of the first call in the docstring's example that returns."""
    room_name, _, name = where.rpartition(".")
    calls: list[inspect.BoundArguments] = []

    @functools.wraps(made)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        result, bound = made(*args, **kwargs), inspect.signature(made).bind(*args, **kwargs)
        if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            calls.append(bound)
        return result

    room, home = importlib.import_module(room_name), sys.modules[made.__module__]
    held = [place for place in {id(x): x for x in (*ROOMS, room, home)}.values() if getattr(place, name, None) is made]
    for place in held:
        setattr(place, name, recorded)
    try:
        names = {**vars(home), name: recorded}
        for example in doctest.DocTestParser().get_examples(made.__doc__ or ""):
            with contextlib.suppress(Exception), quietly():
                exec(compile(example.source, where, "single"), names)
            if calls:
                return calls[0]
    finally:
        for place in held:
            setattr(place, name, made)
    return None


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Print and warn nothing."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        np.errstate(all="ignore"),
    ):
        warnings.simplefilter("ignore")
        yield


def ruled_out(made: Callable[..., Any], parameter: inspect.Parameter, arrays: int) -> set[str]:
    """The kinds of value that are wrong for this parameter."""
    text = getattr(parameter.annotation, "__forward_arg__", parameter.annotation)
    text = text if isinstance(text, str) else inspect.formatannotation(text)
    text = text.removeprefix("Annotated[").partition(", ")[0] if text.startswith("Annotated[") else text
    parts = re.sub(r"\[.*\]", "", text).split(" | ")
    wrong = set.intersection(*(RULED_OUT.get(part.rpartition(".")[2], set()) for part in parts))
    said = re.search(rf"^\s+{re.escape(parameter.name)}: (.*)$", made.__doc__ or "", re.MULTILINE)
    if said and BOUNDED.search(said[1]) and not {"Any"} & set(parts):
        wrong |= {"negative"}
    if parts[0] == "Array" and arrays > 1 and not (said and "any shape" in said[1]):
        wrong |= {"a wrong shape"}
    return wrong


def outcome(call: Callable[[], Any]) -> str:
    """How a call ends."""
    try:
        with quietly():
            call()
    except (UserError, functional.ShapeError):
        return "clear"
    except SystemExit as error:
        return "clear" if error.code else "accepted"
    except Exception as error:  # what is to be counted
        return f"unclear: {type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"
    return "accepted"


def names() -> dict[str, Any]:
    """Call each public name with each bad value of each of its parameters."""
    counts, faults, not_called = Counter[str](), dict[str, list[str]](), list[str]()
    called, others = 0, calls()
    for where, made in public():
        known = others.get(where.removeprefix("ppo_parts."))
        given = example_of(where, made) if known is None else inspect.signature(made).bind(*known.pop("*", ()), **known)
        if given is None:
            not_called.append(where)
            continue
        called += 1
        parameters = given.signature.parameters
        arrays = sum(str(parameters[name].annotation).startswith("Array") for name in given.arguments)
        for name, parameter in parameters.items():
            if parameter.kind == parameter.VAR_KEYWORD:
                continue
            for kind in sorted(ruled_out(made, parameter, arrays)):
                value = (BAD[kind],) if parameter.kind == parameter.VAR_POSITIONAL else BAD[kind]
                changed = inspect.BoundArguments(given.signature, given.arguments | {name: value})
                changed.arguments = {x: changed.arguments[x] for x in parameters if x in changed.arguments}
                found = outcome(lambda made=made, changed=changed: made(*changed.args, **changed.kwargs))
                counts[found.partition(":")[0]] += 1
                if found != "clear":
                    faults.setdefault(where, []).append(f"{name}={kind}: {found}")
    return {"names": called, "calls": counts.total(), "counts": counts, "faults": faults, "not_called": not_called}


def command_lines() -> dict[str, Any]:
    """Each recipe, up to where a run begins, and each command about a run, with wrong words after each of its flags."""
    counts, faults = Counter[str](), dict[str, list[str]]()

    def start(program: str, call: Callable[[list[str]], Any], *argv: str) -> None:
        found = outcome(lambda: call(list(argv)))
        counts[found.partition(":")[0]] += 1
        if found.startswith("unclear"):
            faults.setdefault(program, []).append(f"{' '.join(argv)}: {found}")

    for name in RECIPES:
        recipe = importlib.import_module(f"ppo_parts.recipes.{name}")
        begins = functools.partial(training.main, recipe.make_train, recipe.PRESETS, run=lambda *run: {})
        fields = [*dataclasses.fields(next(iter(recipe.PRESETS.values()))), *dataclasses.fields(training.RunOptions)]
        for flag in [f"--{field.name.replace('_', '-')}" for field in fields]:
            for word in WORDS:
                start(f"ppo_parts.recipes.{name}", begins, flag, word)
    with quietly():
        training.main(cleanrl_ppo.make_train, cleanrl_ppo.PRESETS, ["--total-timesteps", "1024", "--name", "sound"])
    for folder, config in BROKEN.items():
        shutil.copytree("runs/sound", folder)
        Path(folder, "config.json").write_text(config)
    for name in COMMANDS:
        command = importlib.import_module(f"ppo_parts.commands.{name}").main
        with contextlib.redirect_stdout(io.StringIO()) as help_text, contextlib.suppress(SystemExit):
            command(["--help"])
        for folder in ("nowhere", ".", *BROKEN):
            start(f"ppo_parts.{name}", command, folder)
        for flag in sorted(set(re.findall(r"--[a-z][a-z-]+", help_text.getvalue())) - {"--help"}):
            for word in WORDS:
                start(f"ppo_parts.{name}", command, "runs/sound", flag, word)
    return {"command_lines": counts.total(), "counts": counts, "faults": faults}


def main() -> None:
    """Command line."""
    options = parser(__doc__, json=None).parse_args()
    with tempfile.TemporaryDirectory() as folder:  # some of the calls write files
        os.chdir(folder)
        results = {"names": names(), "command_lines": command_lines()}
        os.chdir(ROOT)
    for part in results.values():
        for where, found in part["faults"].items():
            print(f"{where}: {len(found)}", *found, sep="\n    ")
        print(f"{part['counts'].total()} calls: {dict(part['counts'])}; not called: {part.get('not_called', [])}")
    write(options.json, results)


if __name__ == "__main__":
    main()
