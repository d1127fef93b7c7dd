"""Signatures of public functions: words and switches are checked where a function is called, and what defaults are.

A default is a number or a flag that nobody has to give, and each of them means something.
"""

import inspect
import types
import typing
from collections.abc import Mapping
from pathlib import Path

import pytest

import ppo_parts as pp
from ppo_parts import distributions, envs, networks, training
from ppo_parts.errors import UserError

FAMILIES = (pp, pp.tokens, pp.exploration, pp.critics, pp.regularizers, pp.symmetry, pp.agents, pp.optim)
FAMILIES += (distributions, envs, networks)
LEFT_OUT = {"main", "run"}  # read the command line, or a folder


def public(room):
    """Its functions, and the distributions, by name."""
    found = {name: getattr(room, name) for name in getattr(room, "__all__", dir(room)) if name[0] != "_"}
    ours = {name: x for name, x in found.items() if getattr(x, "__module__", "").startswith("ppo_parts.")}
    return {name: x for name, x in ours.items() if inspect.isfunction(x) or (room is distributions and callable(x))}


def is_word(hint):
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    plain = (str, bool, type(None), tuple[str, ...])
    return all(kind in plain or typing.get_origin(kind) in (typing.Literal, Mapping) for kind in kinds)


WORDS = [
    (function, parameter)
    for function in dict.fromkeys(x for room in (*FAMILIES, training) for x in public(room).values())
    if inspect.isfunction(function) and function.__name__ not in LEFT_OUT
    for parameter in inspect.signature(function).parameters.values()
    if is_word(typing.get_type_hints(function).get(parameter.name))
]


@pytest.mark.parametrize(("function", "parameter"), WORDS, ids=lambda x: getattr(x, "name", None) or x.__name__)
def test_words_and_switches_are_checked_at_the_door(function, parameter):
    several = parameter.kind is parameter.VAR_POSITIONAL
    with pytest.raises(UserError, match=rf"\b{parameter.name} must be"):
        function(object()) if several else function(**{parameter.name: object()})


def test_defaults_are_those_that_are_recorded():
    """A default that changes on purpose changes `defaults.txt`, too."""
    found = set()
    for room in (*FAMILIES, pp.functional):
        for name, function in public(room).items():
            parameters = inspect.signature(function).parameters.values()
            given = [f"{x.name}={x.default!r}" for x in parameters if isinstance(x.default, int | float | str)]
            if given:
                found.add(" ".join([f"{room.__name__}.{name}".removeprefix("ppo_parts."), *given]))
    assert sorted(found) == Path(__file__).with_name("defaults.txt").read_text().splitlines()
