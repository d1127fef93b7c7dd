"""Words and switches are checked where a public function is called, and not where they are used."""

import inspect
import types
import typing
from collections.abc import Mapping

import pytest

import ppo_parts as pp
from ppo_parts import distributions, envs, networks, training
from ppo_parts.errors import UserError

FAMILIES = (pp, pp.tokens, pp.exploration, pp.critics, pp.regularizers, pp.symmetry, pp.agents, pp.optim)
LEFT_OUT = {"main", "run"}  # read the command line, or a folder


def functions():
    """The public functions, each once."""
    for room in (*FAMILIES, distributions, envs, networks, training):
        for name in getattr(room, "__all__", dir(room)):
            function = getattr(room, name)
            ours = inspect.isfunction(function) and function.__module__.startswith("ppo_parts")
            if ours and name[0] != "_" and name not in LEFT_OUT:
                yield function


def is_word(hint):
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    plain = (str, bool, type(None), tuple[str, ...])
    return all(kind in plain or typing.get_origin(kind) in (typing.Literal, Mapping) for kind in kinds)


WORDS = [
    (function, parameter)
    for function in dict.fromkeys(functions())
    for parameter in inspect.signature(function).parameters.values()
    if is_word(typing.get_type_hints(function).get(parameter.name))
]


@pytest.mark.parametrize(("function", "parameter"), WORDS, ids=lambda x: getattr(x, "name", None) or x.__name__)
def test_words_and_switches_are_checked_at_the_door(function, parameter):
    several = parameter.kind is parameter.VAR_POSITIONAL
    with pytest.raises(UserError, match=rf"\b{parameter.name} must be"):
        function(object()) if several else function(**{parameter.name: object()})
