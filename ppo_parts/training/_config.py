"""What a recipe's `Config` may hold."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin, get_type_hints

from .._hyperparameters import choice


def check_choices(config: Any) -> None:
    """Raise `ValueError` where a field of a dataclass is typed as a `Literal` and holds none of its words.

    The command line checks that by itself; this is for configurations made in Python.
    """
    for name, hint in get_type_hints(type(config)).items():
        if get_origin(hint) is Literal:
            choice(type(config).__name__, name, getattr(config, name), get_args(hint))
