"""Ranges and help texts of configuration fields, which are declared in the annotation of the field."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import jax
import numpy as np

from .._base.doors import check_as, checked, is_known
from .._base.errors import UserTypeError, UserValueError
from .._base.hyperparameters import check_count, check_number
from ..functional._common import bounds
from ._train import updates_in

M = TypeVar("M")


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`, including both ends; with `open_low`, excluding `low`."""

    low: float
    high: float = np.inf
    open_low: bool = False

    def __post_init__(self) -> None:
        check_as("Range", "open_low", self.open_low, bool)
        for name, x in {"low": self.low, "high": self.high}.items():
            check_number("Range", name, x, -np.inf, schedule=False)
        if not self.low <= self.high:
            raise UserValueError(f"must be at least low, {self.low}, got {self.high}", where="Range", argument="high")

    def __str__(self) -> str:
        low = "(" if self.open_low or self.low == -np.inf else "["
        return f"{low}{bounds(self.low, self.high)[1:-1]}{')' if self.high == np.inf else ']'}"

    def __contains__(self, x: float) -> bool:
        return (self.low < x if self.open_low else self.low <= x) and x <= self.high and bool(np.isfinite(x))


def between(low: float, high: float) -> Range:
    """Declare the range of a `Config` field, `low <= x <= high`: `gamma: Annotated[float, between(0, 1)] = 0.99`."""
    return Range(low, high)


def at_least(low: float) -> Range:
    """Declare the range of a `Config` field, `x >= low`; for a tuple, the range of each of its numbers."""
    return Range(low)


def more_than(low: float) -> Range:
    """Declare the range of a `Config` field, `x > low`."""
    return Range(low, open_low=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The fields that every recipe's configuration has; a subclass sets the defaults and adds its own fields.

    The annotation of a field declares its type, its range and its help text. A field that a subclass declares again,
    `num_envs: int = 4`, keeps its range and its help text. Float fields may hold traced arrays.

    Example:
        >>> import dataclasses
        >>> from typing import Annotated
        >>> from ppo_parts import training
        >>> @dataclasses.dataclass(frozen=True, kw_only=True)
        ... class Config(training.Config):
        ...     env_id: str = "CartPole-v1"
        ...     total_timesteps: int = 500_000
        ...     num_envs: int = 4
        ...     num_steps: int = 128
        ...     gamma: Annotated[float, training.between(0, 1), "discount of rewards per step"] = 0.99
        >>> Config().num_updates
        976
    """

    env_id: Annotated[str, "name of the environment"]
    total_timesteps: Annotated[int, at_least(1), "environment steps, rounded down to whole updates, e.g. 5e5"]
    num_envs: Annotated[int, at_least(1), "number of environments stepped in parallel"]
    num_steps: Annotated[int, at_least(1), "steps of each environment in a rollout; an update follows each rollout"]
    microbatch: Annotated[
        int | Literal["auto"] | None,
        at_least(1),
        'evaluate networks on this many steps at a time, to save memory; "auto": 1024 where that is faster',
    ] = "auto"
    shards: Annotated[
        int | None,
        at_least(1),
        "equal blocks of environments that minibatches do not mix; devices hold whole ones. None: one, or on the "
        "command line as many as --num-devices",
    ] = None
    seed: Annotated[int, between(0, 2**32 - 1), "seed for all random numbers"] = 1

    @property
    def num_updates(self) -> int:
        """Whole updates of `num_envs * num_steps` steps in `total_timesteps`."""
        return updates_in(self.total_timesteps, num_envs=self.num_envs, num_steps=self.num_steps)


def declared(kind: type, of: type[M]) -> dict[str, M]:
    """Return what the annotations of a dataclass's fields declare, by field: their `Range`, or their help (`str`).

    A field that a subclass declares again without them keeps them.
    """
    found: dict[str, M] = {}
    for base in reversed(kind.__mro__):
        for name, hint in get_type_hints(base, include_extras=True).items():
            found.update((name, x) for x in getattr(hint, "__metadata__", ()) if isinstance(x, of))
    return found


@checked
def check_config(config: Any, where: str = "") -> None:
    """Raise if a field of a dataclass does not have its declared type, or lies outside its declared range.

    Float fields may hold traced numbers, which are not checked because their values are not known yet. Errors name the
    first invalid field, its value and the values it may hold; they begin with `where`, or the name of the dataclass.

    Example:
        >>> import dataclasses
        >>> from typing import Annotated
        >>> from ppo_parts import training
        >>> from ppo_parts.training import more_than
        >>> @dataclasses.dataclass(frozen=True)
        ... class Config:
        ...     max_grad_norm: Annotated[float, more_than(0)] = 0.5
        >>> training.check_config(Config(max_grad_norm=-0.5))
        Traceback (most recent call last):
        ...
        ppo_parts.errors.UserValueError: Config: max_grad_norm must lie in (0, inf), got -0.5
    """
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise UserTypeError(f"check_config: config must be an instance of a dataclass, got {config!r}")
    where, ranges = where or type(config).__name__, declared(type(config), Range)
    for name, hint in get_type_hints(type(config)).items():
        _check_field(where, name, getattr(config, name), hint, ranges.get(name))


def _check_field(where: str, name: str, value: Any, hint: Any, limits: Range | None) -> None:
    """Raise if the value of a field does not have the type `hint`, or lies outside the declared range."""
    if get_origin(hint) is tuple:
        if not isinstance(value, tuple):
            raise UserTypeError(f"must be a tuple, got {value!r}", where=where, argument=name)
        for x in value:
            _check_field(where, name, x, get_args(hint)[0], limits)
        return
    kinds = get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    number = next((kind for kind in kinds if kind in (int, float)), None)
    is_word = isinstance(value, str) and any(get_origin(kind) is Literal for kind in kinds)
    if number is None or is_word or (value is None and type(None) in kinds):
        if is_known(hint):
            check_as(where, name, value, hint)
        return
    allowed = limits or Range(-np.inf)
    if number is int:
        value = check_count(where, name, value, None if np.isinf(allowed.low) else int(allowed.low))
    elif not (isinstance(value, (float, np.floating)) and np.isnan(value)):  # NaN is outside any range
        value = check_number(where, name, value, -np.inf, schedule=False)
    if not isinstance(value, jax.core.Tracer) and value not in allowed:
        raise UserValueError(f"must lie in {allowed}, got {value!r}", where=where, argument=name)
