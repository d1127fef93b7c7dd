"""The protocol of distributions, and base classes of the distributions of this package."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from .._base.hyperparameters import check_takes
from ..errors import ShapeError, UserTypeError, UserValueError
from ..functional._arguments import check_key
from ..functional._common import Array, accumulator_dtype, check_arrays, check_floating, known_values

FEW = 8
"""Entries along a last axis that are computed separately; with more, XLA's programs become large and slow."""
_TAKES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "log_prob": (("value",), ()),
    "sample": ((), ("seed",)),
    "entropy": ((), ()),
    "mode": ((), ()),
    "kl_divergence": (("other",), ()),
}
"""The positional and the keyword arguments of each method."""


class Distribution(Protocol):
    """Protocol of the distribution that a policy returns; objects from other libraries with these methods work, too.

    | needed by | methods |
    |---|---|
    | the learner, for each loss | `log_prob(value)` |
    | rollouts | `sample(seed=key)`; they use `sample_and_log_prob(seed=key)` if there is one |
    | `entropy_bonus` | `entropy()`; if it is missing or raises `NotImplementedError`, `sample` |
    | actions without noise (evaluation, `export`) | `mode()` |
    | `kl_penalty` with the exact divergence | `kl_divergence(other)` |

    With several shards, microbatches or `keep_distribution`, it must also be a pytree whose arrays begin with the batch
    axes. The distributions of this module provide all of this, except that `TanhNormal` has no closed-form entropy.
    """

    def log_prob(self, value: Array) -> Array:
        """Return the log-probability of actions, summed over the action's axes to one number per batch element."""

    def sample(self, *, seed: Array) -> Array:
        """Draw actions with a key of `jax.random`."""


def check_distribution(where: str, distribution: Any, needs: tuple[str, ...] = ("log_prob",)) -> None:
    """Raise unless a distribution has the needed methods, with the arguments that the library passes."""
    array = isinstance(distribution, jax.Array)
    kind = f"an array of shape {distribution.shape}" if array else type(distribution).__name__
    for method in needs:
        positional, keywords = _TAKES[method]
        function = getattr(distribution, method, None)
        if not callable(function):
            call = f"{method}({', '.join([*positional, *(f'{name}=' for name in keywords)])})"
            remedy = "use one of ppo_parts.distributions, such as Categorical(logits), or one of distrax"
            raise UserTypeError(f"{where}: a distribution needs {call}, but {kind} has no {method}: {remedy}")
        check_takes(where, f"{method} of {kind}", function, positional, keywords)


def is_distribution(x: Any) -> bool:
    """Return whether a node of a tree is a distribution, from this package or another."""
    return hasattr(x, "log_prob")


class TreeDistribution:
    """A pytree of arrays, with the methods of a distribution that can be derived from the others."""

    def __init_subclass__(cls) -> None:
        def flatten(x: Any) -> tuple[tuple[Any, ...], tuple[str, ...]]:
            return tuple(vars(x).values()), tuple(vars(x))

        def unflatten(names: tuple[str, ...], values: Any) -> Any:
            made = object.__new__(cls)
            vars(made).update(zip(names, values, strict=True))
            return made

        jax.tree_util.register_pytree_node(cls, flatten, unflatten)

    def __repr__(self) -> str:
        def describe(x: Any) -> Any:
            return x if is_distribution(x) else jnp.shape(x)

        described = {name: jax.tree.map(describe, x, is_leaf=is_distribution) for name, x in vars(self).items()}
        return f"{type(self).__name__}({', '.join(f'{name}={x}' for name, x in described.items())})"

    sample: Callable[..., Any]
    log_prob: Callable[..., Any]

    def sample_and_log_prob(self, *, seed: Array, sample_shape: Sequence[int] = ()) -> tuple[Array, Array]:
        """Draw actions like `sample`, and return them with the same log-probability that `log_prob` computes."""
        value = self.sample(seed=seed, sample_shape=sample_shape)
        return value, self.log_prob(value)

    @property
    def _shape(self) -> tuple[Any, ...]:
        """Return the shape of the parameters."""
        raise NotImplementedError

    def _check_comparable(self, other: Any) -> None:
        """Raise unless the other distribution is of the same class and shape."""
        name, theirs = type(self).__name__, type(other).__name__
        if type(other) is not type(self):
            raise UserTypeError(f"{name}.kl_divergence: the other distribution must be a {name}, too, got {theirs}")
        if other._shape != self._shape:
            says = f"must have the parts and shapes of {self}, because nothing is broadcast, got {other}"
            raise ShapeError(says, where=f"{name}.kl_divergence", argument="other")

    def _check_action(self, shape: tuple[int, ...], value: Any) -> None:
        """Raise unless actions are real numbers with the trailing axes `shape`."""
        name = type(self).__name__
        check_arrays(name, value=value)
        given = jnp.shape(value)
        if given[max(len(given) - len(shape), 0) :] != shape:
            remedy = ": drop the trailing axis of size 1 with action[..., 0]" if given == (*shape, 1) else ""
            says = f"actions have shape {given}, their distribution {shape}; nothing is broadcast"
            raise ShapeError(f"{name}: {says}{remedy}")


class VectorDistribution(TreeDistribution):
    """A distribution over vectors `[..., D]` of independent real numbers.

    The first attribute of a subclass is a parameter with the shape and dtype of an action. A subclass defines
    `_draw(seed, sample_shape)` and `_log_probs(value)`, `[..., D]`, both of which may return a wider dtype.
    """

    _draw: Callable[[Array, tuple[int, ...]], Array]
    _log_probs: Callable[[Array], Array]

    def sample(self, *, seed: Array, sample_shape: Sequence[int] = ()) -> Array:
        """Draw actions, `[*sample_shape, ..., D]`, which are differentiable with respect to the parameters."""
        return self._draw(seed, check_draw(type(self).__name__, seed, sample_shape)).astype(self._like.dtype)

    def log_prob(self, value: Array) -> Array:
        """Return the log-probability of actions `[..., D]`, summed over D; they may have additional leading axes."""
        self._check_action(self._shape, value)
        return self._total(self._log_probs(value))

    @property
    def _like(self) -> Array:
        """Return the first parameter, which has the shape and dtype of an action."""
        first: Array = jax.tree.leaves(self)[0]
        return first

    @property
    def _shape(self) -> tuple[int, ...]:
        return self._like.shape

    def _same_bounds(self, other: Any, *bounds: str) -> Array:
        """Return where the boxes of two distributions have the same bounds; raise if they are known to differ."""
        boxes = [{name: getattr(x, name) for name in bounds} for x in (self, other)]
        same = jnp.stack([boxes[0][name] == boxes[1][name] for name in bounds]).all(axis=0)
        if not isinstance(same, jax.core.Tracer) and not np.all(same):
            listed = " and ".join(", ".join(f"{name}={x}" for name, x in box.items()) for box in boxes)
            where = f"{type(self).__name__}.kl_divergence"
            raise UserValueError(f"{where}: the two must have the same box, got {listed}")
        return same

    def _total(self, x: Array, *others: Any) -> Array:
        """Sum over the dimensions of the action, in the dtype of this distribution and the others."""
        return sum_entries(lambda x: x, x).astype(jnp.result_type(self._like, *(other._like for other in others)))


def has_few(x: Array) -> bool:
    """Return whether an array has few entries along its last axis, whose size may be symbolic in an export."""
    return isinstance(x.shape[-1], int) and 0 < x.shape[-1] <= FEW


def split_entries(x: Array) -> list[Array]:
    """Return the entries along the last axis. Unlike that of indexing, the gradient of `lax.split` is fused by XLA."""
    return [jnp.squeeze(entry, -1) for entry in jax.lax.split(x, (1,) * x.shape[-1], x.ndim - 1)]


def sum_entries(term: Callable[..., Array], *arrays: Array) -> Array:
    """Return the sum of `term(*arrays)`, computed element by element, over the last axis.

    On a CPU, XLA reduces a short last axis slowly, so its few entries are added one after another. For two actions and
    2048 rows, the loss and its gradient then take a fifth of the time.
    """
    if not has_few(arrays[0]):
        return jnp.sum(term(*arrays), axis=-1)
    return functools.reduce(jnp.add, map(term, *map(split_entries, arrays)))


def widen(shape: tuple[int, ...], *parameters: Array) -> tuple[Array, ...]:
    """Broadcast parameters to a shape, in the dtype in which to compute."""
    dtype = accumulator_dtype(parameters[0])
    return tuple(jnp.broadcast_to(x.astype(dtype), shape) for x in parameters)


def check_draw(where: str, seed: Any, sample_shape: Any) -> tuple[int, ...]:
    """Return `sample_shape` as a tuple, after checking it and the key."""
    check_key(where, "seed", seed)
    sizes = tuple(sample_shape) if isinstance(sample_shape, Sequence) else (None,)
    if not all(isinstance(n, int | np.integer) and n >= 0 for n in sizes):
        raise UserTypeError(f"must be a tuple of integers, got {sample_shape!r}", where=where, argument="sample_shape")
    return sizes


def fit_to_shape(where: str, name: str, x: Array, like: Array, like_name: str) -> Array:
    """Broadcast `x` to the shape of `like`; `x` must have this shape or its last axis, or be a single number."""
    if x.shape not in (like.shape, like.shape[-1:], ()):
        must = f"{name} must have the shape of {like_name}, {like.shape[-1:]} or ()"
        raise ShapeError(f"{where}: {like_name} has shape {like.shape} and {name} {x.shape}; {must}")
    return jnp.broadcast_to(x, like.shape)


def check_sign(where: str, name: str, x: Any, *, zero: bool = False) -> None:
    """Raise unless known numbers are greater than 0 or, with `zero`, at least 0."""
    if (known := known_values(x)) is not None and np.any(known < 0 if zero else known <= 0):
        low = "at least 0" if zero else "greater than 0"
        raise UserValueError(f"must be {low}, got {np.min(known)}", where=where, argument=name)


def check_parameter(where: str, name: str, x: Any) -> None:
    """Raise unless a parameter is floating and has an action axis, [..., D]."""
    check_floating(where, name, x)
    if not jnp.ndim(x):
        raise ShapeError(f"{where}: {name} is a single number; its last axis must be that of the action, [..., D]")


def check_box(where: str, low: Any, high: Any, like: Array, name: str) -> tuple[Array, Array]:
    """Return the bounds of a box with the shape of the parameter `like`, in the dtype in which to compute.

    Unless a bound is traced, raise if the box is infinite, empty, or too narrow for actions of the dtype of `like`.
    """
    if not any(isinstance(x, jax.core.Tracer) for x in (low, high)):
        least, most = np.asarray(low, float), np.asarray(high, float)
        if not (np.all(np.isfinite(least) & np.isfinite(most)) and np.all(least < most)):
            raise UserValueError(f"{where}: the box must be finite, with low < high, got low={low}, high={high}")
        info, largest = jnp.finfo(like.dtype), np.maximum(np.abs(least), np.abs(most))
        if np.any((4 * float(info.eps) * largest > (most - least) / 4) | (largest > float(info.max))):
            raise UserValueError(f"{where}: {like.dtype} cannot resolve the box low={low}, high={high}: use float32")
    wide = [jnp.asarray(x, accumulator_dtype(like)) for x in (low, high)]
    return fit_to_shape(where, "low", wide[0], like, name), fit_to_shape(where, "high", wide[1], like, name)


def nan_outside(log_probs: Array, value: Array, low: Array, high: Array, dtype: Any) -> Array:
    """Replace log-probabilities by NaN where actions lie outside of a box by more than rounding in their dtypes."""
    low, high = (jnp.broadcast_to(x, jnp.shape(value)) for x in (low, high))
    with jax.numpy_dtype_promotion("standard"):
        kinds = [jnp.promote_types(kind, jnp.bfloat16) for kind in (dtype, jnp.result_type(value))]
    eps = max(float(jnp.finfo(kind).eps) for kind in kinds)
    rounding = 4 * eps * (jnp.abs(low) + jnp.abs(high))
    return jnp.where((value < low - rounding) | (value > high + rounding), jnp.nan, log_probs)
