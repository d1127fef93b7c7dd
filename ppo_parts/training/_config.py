"""What the fields of a configuration may hold: declared once, beside the field, and checked wherever it is used."""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import jax
import numpy as np

from .._errors import UserError, UserTypeError, UserValueError
from .._hyperparameters import bounds, choice, count, number
from ._train import updates_in


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`, the ends included but for an open low end."""

    low: float
    high: float = np.inf
    open_low: bool = False

    def __str__(self) -> str:
        return bounds(self.low, self.high, self.open_low)


def between(low: float, high: float) -> Range:
    """The range of a field of a `Config`, `low <= x <= high`: `gamma: Annotated[float, between(0, 1)] = 0.99`."""
    return Range(low, high)


def at_least(low: float) -> Range:
    """The range of a field of a `Config`, `x >= low`; of a tuple, that of each of its numbers."""
    return Range(low)


def more_than(low: float) -> Range:
    """The range of a field of a `Config`, `x > low`."""
    return Range(low, open_low=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What the configuration of every recipe has; a subclass gives the defaults, and adds fields of its own.

    A field that is declared again, `num_envs: int = 4`, keeps its range and its documentation. Fields that are floats
    may hold traced arrays.

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
        ...     gamma: Annotated[float, training.between(0, 1)] = 0.99  # discount of rewards per step
        >>> Config().num_updates
        976
    """

    env_id: str
    """name of the environment"""
    total_timesteps: Annotated[int, at_least(1)]
    """environment steps of the whole run, rounded down to whole updates; 5e5 is fine, too"""
    num_envs: Annotated[int, at_least(1)]
    """environments that are stepped side by side"""
    num_steps: Annotated[int, at_least(1)]
    """steps of each environment in a rollout, after which there is an update"""
    microbatch: Annotated[int | Literal["auto"] | None, at_least(1)] = "auto"
    """evaluate networks on so many steps at a time, for less memory; "auto": 1024 where that is faster"""
    seed: Annotated[int, between(0, 2**32 - 1)] = 1
    """of all random numbers"""

    @property
    def num_updates(self) -> int:
        """Whole updates of `num_envs * num_steps` steps in `total_timesteps`; see `updates_in`."""
        return updates_in(self.total_timesteps, num_envs=self.num_envs, num_steps=self.num_steps)


def ranges(kind: type) -> dict[str, Range]:
    """The ranges that the fields of a dataclass declare, by name; declared again without one, a field keeps its own."""
    found: dict[str, Range] = {}
    for base in reversed(kind.__mro__):
        for name, hint in get_type_hints(base, include_extras=True).items():
            for declared in getattr(hint, "__metadata__", ()):
                if isinstance(declared, Range):
                    found[name] = declared
    return found


def check_config(config: Any, *, flags: bool = False) -> None:
    """Raise where a field of a dataclass is not of its declared type, or out of its declared range.

    A range stands beside the type: `gamma: Annotated[float, training.between(0, 1)] = 0.99`. Fields that are typed as
    floats may hold traced numbers, of which nothing can be known yet.

    Args:
        config: an instance of a dataclass.
        flags: name the fields as the command line does, `--max-grad-norm`.

    Raises:
        UserTypeError, UserValueError: the first field that cannot be used, what it holds and what it may hold.

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
        ppo_parts.UserValueError: Config: max_grad_norm must lie in (0, inf), got -0.5
    """
    where, declared = type(config).__name__, ranges(type(config))
    for name, hint in get_type_hints(type(config)).items():
        try:
            _check_field(where, name, getattr(config, name), hint, declared.get(name))
        except UserError as error:
            if not flags:
                raise
            said = str(error).removeprefix(f"{where}: {name}")
            raise type(error)(f"--{name.replace('_', '-')}{said}") from None


def _check_field(where: str, name: str, value: Any, hint: Any, declared: Range | None) -> None:
    kinds = kinds_of(hint)
    words = tuple(word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind))
    if (value is None and type(None) in kinds) or (isinstance(value, str) and value in words):
        return
    numeric = [kind for kind in kinds if kind in (int, float)]
    if words and (isinstance(value, str) or not numeric):
        choice(where, name, value, words)
    elif numeric:
        _check_number(where, name, value, numeric[0], declared)
    elif get_origin(hint) is tuple:
        if not isinstance(value, tuple):
            raise UserTypeError(f"{where}: {name} must be a tuple, got {value!r}")
        for x in value:
            _check_number(where, name, x, get_args(hint)[0], declared)
    elif hint is bool and not isinstance(value, bool):
        raise UserTypeError(f"{where}: {name} must be True or False, got {value!r}")
    elif hint is str and not isinstance(value, str):
        raise UserTypeError(f"{where}: {name} must be a string, got {value!r}")


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union; of any other type, the type."""
    return get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _check_number(where: str, name: str, value: Any, kind: type, declared: Range | None) -> None:
    if kind is float:
        limits = Range(-np.inf) if declared is None else declared
        number(where, name, value, limits.low, limits.high, open_low=limits.open_low)
        return
    low = None if declared is None else int(declared.low)
    whole = count(where, name, value, low)
    if declared is not None and whole > declared.high:
        raise UserValueError(f"{where}: {name} must lie in [{low}, {int(declared.high)}], got {value!r}")


def check_memory(train: Any, num_seeds: int, limit: float | None = None) -> None:
    """Raise where a run of so many seeds cannot fit into the memory of its device, whatever else it needs.

    What is counted is the state of a run and one rollout; gradients and activations come on top.

    Args:
        train: the run.
        num_seeds: how many of it there are at once.
        limit: bytes; None: those of the device, where it says so.
    """
    limit = _memory() if limit is None else limit
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(train.init, key)
    shapes = state, jax.eval_shape(train.rollout.collect, key, state.learner.params, state.rollout)
    needed = num_seeds * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    if limit is not None and needed > limit:
        raise UserValueError(
            f"this run needs at least {needed / 2**30:,.1f} GiB of memory for its states and rollouts, and there are "
            f"{limit / 2**30:,.1f} GiB: give fewer seeds (num_seeds={num_seeds}), environments or steps, or a smaller "
            "network"
        )


def _memory() -> float | None:
    """Bytes of the first device; of a CPU, those of the machine."""
    device = jax.devices()[0]
    statistics = device.memory_stats() if device.platform != "cpu" else None
    if statistics:
        return statistics.get("bytes_limit")
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):  # not on this system
        return None
