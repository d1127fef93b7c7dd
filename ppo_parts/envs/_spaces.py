"""Spaces whose elements are dicts or tuples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from .._base.errors import UserTypeError


@dataclasses.dataclass(frozen=True)
class Dict:
    """A space whose elements are dicts with an entry of each of these spaces; any of them may be a `Dict` or `Tuple`.

    Example:
        >>> from ppo_parts import envs
        >>> space = envs.Dict({"move": envs.Discrete(3), "strength": envs.Box((3,), 0.0, 1.0)})
    """

    spaces: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.spaces, Mapping) or not self.spaces or not all(map(_is_space, self.spaces.values())):
            raise UserTypeError(f"Dict: spaces must be a dict of spaces, got {self.spaces!r}")


@dataclasses.dataclass(frozen=True)
class Tuple:
    """A space whose elements are tuples with an entry of each of these spaces, which may be `Dict` and `Tuple`, too."""

    spaces: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.spaces, tuple | list) or not self.spaces or not all(map(_is_space, self.spaces)):
            raise UserTypeError(f"Tuple: spaces must be a tuple of spaces, got {self.spaces!r}")
        object.__setattr__(self, "spaces", tuple(self.spaces))


def _is_space(x: Any) -> bool:
    return any(hasattr(x, name) for name in ("shape", "n", "spaces"))


def is_tree(space: Any) -> bool:
    """Return whether the elements of a space are dicts or tuples."""
    return hasattr(space, "spaces") and type(space).__name__ != "OneOf"  # of Gymnasium: one of its spaces


def map_space(function: Callable[..., Any], space: Any, *trees: Any) -> Any:
    """Return a tree like an element of a space, of `function(space, *entries)` for each space that is not a tree.

    The entries are those of other trees at this place; of a tree that is None, or lacks a name, they are None.
    """

    def entry(tree: Any, key: Any) -> Any:
        return None if tree is None else tree.get(key) if isinstance(tree, Mapping) else tree[key]

    if not is_tree(space):
        return function(space, *trees)
    if not isinstance(space.spaces, Mapping):
        every = enumerate(space.spaces)
        return tuple(map_space(function, each, *(entry(tree, i) for tree in trees)) for i, each in every)
    names = sorted(space.spaces)  # the order of leaves in JAX
    return {name: map_space(function, space.spaces[name], *(entry(tree, name) for tree in trees)) for name in names}


def is_image(space: Any) -> bool:
    """Return whether a space has images `[C, H, W]` or `[H, W, C]` of at least 36 x 36 pixels."""
    shape = tuple(getattr(space, "shape", None) or ())
    return len(shape) == 3 and max(min(shape[1:]), min(shape[:2])) >= 36


def leaf_spaces(space: Any) -> list[Any]:
    """Return the spaces in a tree of spaces, in the order of the leaves of an element; a single space is one leaf."""
    found: list[Any] = []
    map_space(found.append, space)
    return found


def space_of(tree: Any) -> Any:
    """Return the space of a tree of spaces, as `map_space` makes it."""
    if isinstance(tree, dict):
        return Dict({name: space_of(each) for name, each in tree.items()})
    return Tuple(tuple(map(space_of, tree))) if isinstance(tree, tuple) else tree
