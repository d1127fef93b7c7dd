"""Signatures of public functions: what is checked when a function is called, and what the defaults are.

A default is a number, a flag or a word that nobody has to give; each of them means something.
"""

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import ppo_parts as pp
from ppo_parts import distributions, envs, networks, training
from ppo_parts.errors import UserError

FAMILIES = (pp, pp.tokens, pp.exploration, pp.critics, pp.regularizers, pp.symmetry, pp.agents, pp.optim)
FAMILIES += (distributions, envs, networks)
LEFT_OUT = {"main", "run", "from_jaxmarl", "recipe", "dense"}  # they need more first, are decorators, or flax's
# These integers may be 0, or are compared with others first.
UNCOUNTED = {"ddof", "seed", "burn_in", "checkpoint", "shards", "members", "num_minibatches", "num_epochs"}
UNCOUNTED |= {"from_brax time_limit", "from_brax reset_ratio"}


def public(room):
    """Return the functions of a module by name, and the distributions."""
    found = {name: getattr(room, name) for name in getattr(room, "__all__", dir(room)) if name[0] != "_"}
    ours = {name: x for name, x in found.items() if getattr(x, "__module__", "").startswith("ppo_parts.")}
    return {name: x for name, x in ours.items() if inspect.isfunction(x) or (room is distributions and callable(x))}


def kinds_of(hint):
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def is_plain(hint):
    plain = (str, bool, int, Path, type(None), tuple[str, ...])
    return all(x in plain or typing.get_origin(x) in (typing.Literal, Mapping, Callable) for x in kinds_of(hint))


CHECKED = [
    (function, parameter)
    for function in dict.fromkeys(x for room in (*FAMILIES, training) for x in public(room).values())
    if inspect.isfunction(function) and function.__name__ not in LEFT_OUT
    for parameter in inspect.signature(function).parameters.values()
    if is_plain(typing.get_type_hints(function).get(parameter.name))
]


@pytest.mark.parametrize(("function", "parameter"), CHECKED, ids=lambda x: getattr(x, "name", None) or x.__name__)
def test_words_switches_counts_and_functions_are_checked_on_entry(function, parameter):
    """The check comes before anything else is needed; a count is an integer of at least 1."""
    several, wrong = parameter.kind is parameter.VAR_POSITIONAL, {object(): ""}
    if int in kinds_of(typing.get_type_hints(function)[parameter.name]):
        wrong |= {1.5: ".*an integer", True: ".*an integer"}
        if UNCOUNTED.isdisjoint((parameter.name, f"{function.__name__} {parameter.name}")):
            wrong |= {0: " at least 1, got 0"}
    for value, says in wrong.items():
        with pytest.raises(UserError, match=rf"\b{parameter.name} must be{says}"):
            function(value) if several else function(**{parameter.name: value})


def test_defaults_are_those_that_are_recorded():
    """Whoever changes a default on purpose changes `defaults.txt`, too."""
    found = set()
    for room in (*FAMILIES, pp.functional):
        for name, function in public(room).items():
            parameters = inspect.signature(function).parameters.values()
            given = [f"{x.name}={x.default!r}" for x in parameters if isinstance(x.default, int | float | str)]
            if given:
                found.add(" ".join([f"{room.__name__}.{name}".removeprefix("ppo_parts."), *given]))
    assert sorted(found) == Path(__file__).with_name("defaults.txt").read_text().splitlines()
