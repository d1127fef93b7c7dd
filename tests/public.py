"""The public names of the package, found by inspection."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import ppo_parts as pp
from ppo_parts import distributions, envs, functional, networks, training

FAMILIES = (pp, pp.tokens, pp.exploration, pp.critics, pp.regularizers, pp.symmetry, pp.agents, pp.optim)
ROOMS = (*FAMILIES, functional, distributions, envs, networks, training)
LEFT_OUT = {"main", "run"}  # read the command line, or a folder


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public callables of the rooms, each once, without errors, records and commands."""
    seen: set[int] = set()
    for room in ROOMS:
        for name in getattr(room, "__all__", [x for x in dir(room) if not x.startswith("_")]):
            made = getattr(room, name)
            ours = str(getattr(made, "__module__", "")).startswith("ppo_parts")
            if callable(made) and ours and not is_record(made) and id(made) not in seen and name not in LEFT_OUT:
                seen.add(id(made))
                yield f"{room.__name__}.{name}", made


def is_record(made: Any) -> bool:
    """Whether this holds data and computes nothing, or is an error or a protocol."""
    if not isinstance(made, type):
        return False
    protocol = getattr(made, "_is_protocol", False)
    data = dataclasses.is_dataclass(made) and "__post_init__" not in vars(made) and "sample" not in dir(made)
    return issubclass(made, (BaseException, tuple)) or protocol or data
