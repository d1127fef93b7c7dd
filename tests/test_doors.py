"""Words and switches are checked where a public function is called, and not where they are used."""

import inspect
import types
import typing
from collections.abc import Mapping

import pytest

from ppo_parts.errors import UserError
from tests.public import public


def is_word(hint):
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    plain = (str, bool, type(None), tuple[str, ...])
    return all(kind in plain or typing.get_origin(kind) in (typing.Literal, Mapping) for kind in kinds)


FUNCTIONS = [x for x in public() if inspect.isfunction(x[1]) and not x[0].startswith("ppo_parts.functional.")]
WORDS = [
    (function, parameter)
    for _, function in FUNCTIONS
    for parameter in inspect.signature(function).parameters.values()
    if is_word(typing.get_type_hints(function).get(parameter.name))
]


@pytest.mark.parametrize(("function", "parameter"), WORDS, ids=lambda x: getattr(x, "name", None) or x.__name__)
def test_words_and_switches_are_checked_at_the_door(function, parameter):
    several = parameter.kind is parameter.VAR_POSITIONAL
    with pytest.raises(UserError, match=rf"\b{parameter.name} must be"):
        function(object()) if several else function(**{parameter.name: object()})
