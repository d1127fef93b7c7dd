"""Spaces of observations and actions, with the same attributes as in Gymnasium and other packages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from .._base.hyperparameters import check_count
from ..errors import UserTypeError, UserValueError
from ..functional._arguments import ANY, check_order, is_whole
from ..functional._common import check_range


@dataclasses.dataclass(frozen=True)
class Discrete:
    """A space of n integers, 0 to n - 1."""

    n: int
    shape: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self) -> None:
        check_count("Discrete", "n", self.n)


@dataclasses.dataclass(frozen=True)
class MultiDiscrete:
    """A space of K integers `[..., K]`, where choice k has `nvec[k]` options, 0 to `nvec[k] - 1`."""

    nvec: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.nvec, (tuple, list, np.ndarray)) or any(map(np.ndim, self.nvec)) or not len(self.nvec):
            must = "nvec must be a tuple, the number of options of each choice"
            raise UserTypeError(f"MultiDiscrete: {must}, got {self.nvec!r}")
        object.__setattr__(self, "nvec", tuple(check_count("MultiDiscrete", "nvec", n) for n in self.nvec))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return `(K,)`."""
        return (len(self.nvec),)


@dataclasses.dataclass(frozen=True)
class Box:
    """A space of arrays of real numbers between `low` and `high`, which are numbers or arrays."""

    shape: tuple[int, ...]
    low: Any = -math.inf
    high: Any = math.inf

    def __post_init__(self) -> None:
        if not isinstance(self.shape, (tuple, list)):
            raise UserTypeError(f"Box: shape must be a tuple, got {self.shape!r}; the order is Box(shape, low, high)")
        object.__setattr__(self, "shape", tuple(check_count("Box", "shape", length, 0) for length in self.shape))
        for name, bound in (("low", self.low), ("high", self.high)):
            check_range("Box", name, bound, ANY)
            if len(np.shape(bound)) > len(self.shape) or any(
                n not in (1, length) for n, length in zip(np.shape(bound)[::-1], self.shape[::-1], strict=False)
            ):
                raise UserValueError(f"Box: {name} must fit the shape {self.shape}, got shape {np.shape(bound)}")
        check_order("Box", vars(self), "low", "high")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Box) or self.shape != other.shape:
            return False
        bounds = (self.low, other.low), (self.high, other.high)
        return all(x is y or bool(np.all(np.equal(x, y))) for x, y in bounds)

    def __hash__(self) -> int:
        return hash(self.shape)


@dataclasses.dataclass(frozen=True)
class Dict:
    """A space of dicts with an entry from each of the given spaces, which may be a `Dict` or `Tuple`.

    Example:
        >>> from ppo_parts import envs
        >>> space = envs.Dict({"move": envs.Discrete(3), "strength": envs.Box((3,), 0.0, 1.0)})
    """

    spaces: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.spaces, Mapping) or not self.spaces or not all(map(_is_space, self.spaces.values())):
            raise UserTypeError(f"Dict: spaces must be a dict of spaces, got {self.spaces!r}")

    def __hash__(self) -> int:
        return hash(frozenset(self.spaces))


@dataclasses.dataclass(frozen=True)
class Tuple:
    """A space of tuples with an entry from each of the given spaces, which may be a `Dict` or `Tuple`."""

    spaces: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.spaces, tuple | list) or not self.spaces or not all(map(_is_space, self.spaces)):
            raise UserTypeError(f"Tuple: spaces must be a tuple of spaces, got {self.spaces!r}")
        object.__setattr__(self, "spaces", tuple(self.spaces))


def _is_space(x: Any) -> bool:
    like_space = any(hasattr(x, name) for name in ("shape", "n", "spaces"))
    return like_space and not isinstance(x, type) and not hasattr(x, "__array__")


def check_space(where: str, name: str, space: Any) -> None:
    """Raise unless an object has the attributes of a space, whose integers start from 0."""
    if _is_space(space):
        for each in list_spaces(space):
            if np.any(getattr(each, "start", 0)):
                says = f"must start from 0, got {each!r:.200}: describe it from 0, and convert in the environment"
                raise UserValueError(says, where=where, argument=name)
        return
    remedy = "envs.Box(shape), envs.Discrete(n), or an envs.Dict or envs.Tuple of spaces"
    if is_whole(space):
        remedy = f"envs.Discrete({space}), or envs.Box(({space},)) for real numbers"
    elif isinstance(space, tuple | list) and all(map(is_whole, space)):
        remedy = f"envs.Box({tuple(space)})"
    raise UserTypeError(f"must be a space, got {space!r:.200}: write {remedy}", where=where, argument=name)


def is_tree(space: Any) -> bool:
    """Return whether the elements of a space are dicts or tuples."""
    return hasattr(space, "spaces") and type(space).__name__ != "OneOf"  # Gymnasium's union of spaces


def map_space(function: Callable[..., Any], space: Any, *trees: Any) -> Any:
    """Map `function(space, *entries)` over the spaces in a tree; the result is a tree like an element of the space.

    The entries come from the same place in other trees; they are None for a tree that is None or lacks the name.
    """
    if not is_tree(space):
        return function(space, *trees)
    named = isinstance(space.spaces, Mapping)
    keys = sorted(space.spaces) if named else range(len(space.spaces))  # JAX's order of leaves
    entries: list[Any] = []
    for tree in trees:
        fits = isinstance(tree, Mapping) if named else isinstance(tree, tuple | list) and len(tree) == len(keys)
        if tree is not None and not fits:
            raise UserValueError(f"expected an element of {space}, got {tree!r:.200}: change what returns it")
        entries.append({} if tree is None else tree if named else dict(enumerate(tree)))
    found = {key: map_space(function, space.spaces[key], *(each.get(key) for each in entries)) for key in keys}
    return found if named else tuple(found.values())


def is_image(space: Any) -> bool:
    """Return whether the elements are images `[C, H, W]` or `[H, W, C]` of at least 36 x 36 pixels."""
    shape = tuple(getattr(space, "shape", None) or ())
    return len(shape) == 3 and max(min(shape[1:]), min(shape[:2])) >= 36


def list_spaces(space: Any) -> list[Any]:
    """Return the spaces in a tree of spaces, in the order of an element's leaves; a single space is one leaf."""
    found: list[Any] = []
    map_space(found.append, space)
    return found


def make_space(tree: Any) -> Any:
    """Make a space from a tree of spaces, as `map_space` returns it."""
    if isinstance(tree, dict):
        return Dict({name: make_space(each) for name, each in tree.items()})
    return Tuple(tuple(map(make_space, tree))) if isinstance(tree, tuple) else tree


def count_options(space: Any) -> tuple[int, ...]:
    """Return the number of options of each choice, which is `(n,)` for `Discrete`, `nvec`, or `()` for a box.

    Example:
        >>> from ppo_parts import envs
        >>> envs.count_options(envs.MultiDiscrete((3, 2))), envs.count_options(envs.Discrete(4))
        ((3, 2), (4,))
    """
    if hasattr(space, "nvec"):
        return tuple(map(int, space.nvec))
    return (int(space.n),) if hasattr(space, "n") else ()


def is_discrete(space: Any) -> bool:
    """Return whether actions are integers, one choice (`Discrete`) or several."""
    return all(map(count_options, list_spaces(space)))


def make_action_struct(space: Any, each: tuple[int, ...]) -> Any:
    """Return the shapes and dtypes of actions with the leading axes `each`."""

    def struct(space: Any) -> jax.ShapeDtypeStruct:
        shape = () if hasattr(space, "n") else array_shape("actions", space)
        return jax.ShapeDtypeStruct((*each, *shape), jnp.int32 if is_discrete(space) else jnp.float32)

    return map_space(struct, space)


def count_numbers(space: Any) -> int:
    """Return the number of numbers in an element; it is 1 for `Discrete`, and the sum for a `Dict` or `Tuple`."""
    return sum(math.prod(array_shape("elements", each)) for each in list_spaces(space))


def array_shape(what: str, space: Any) -> tuple[int, ...]:
    """Return the shape of a space of arrays."""
    shape = getattr(space, "shape", None)
    if shape is None:
        ways = "a network of your own, check(env, action=...) and check_laws(env, act=...)"
        raise UserValueError(f"{space!r} is not a space of arrays: flatten its {what} in a wrapper, or use {ways}")
    return tuple(shape)


def array_bounds(what: str, space: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the bounds of a box as arrays of its shape."""
    shape = array_shape(what, space)
    if not (hasattr(space, "low") and hasattr(space, "high")):
        raise UserTypeError(f"{space!r} has no bounds low and high: describe {what} by an envs.Box")
    low, high = (np.broadcast_to(np.asarray(x), shape) for x in (space.low, space.high))
    return low, high


def is_choice_open(options: tuple[int, ...], available: np.ndarray) -> Any:
    """Return whether a mask `[..., n]` of all choices leaves an option for each choice, `[...]`."""
    starts = np.cumsum((0, *options[:-1]))
    return np.logical_or.reduceat(available, starts, axis=-1).all(axis=-1)
