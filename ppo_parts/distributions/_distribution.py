"""What all distributions of this package have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from .._base.errors import UserTypeError

Array = jax.Array


class TreeDistribution:
    """A pytree whose attributes are arrays or trees of arrays, with the methods that are defined by the others."""

    def __init_subclass__(cls) -> None:
        def flatten(x: Any) -> tuple[tuple[Any, ...], tuple[str, ...]]:
            return tuple(vars(x).values()), tuple(vars(x))

        def unflatten(names: tuple[str, ...], values: Any) -> Any:
            made = object.__new__(cls)
            vars(made).update(zip(names, values, strict=True))
            return made

        jax.tree_util.register_pytree_node(cls, flatten, unflatten)

    def sample(self, *, seed: Array, sample_shape: Sequence[int] = ()) -> Array:
        raise NotImplementedError

    def log_prob(self, value: Array) -> Array:
        raise NotImplementedError

    def sample_and_log_prob(self, *, seed: Array, sample_shape: Sequence[int] = ()) -> tuple[Array, Array]:
        """Draw actions like `sample`, and return them with exactly the log-probability that `log_prob` computes."""
        value = self.sample(seed=seed, sample_shape=sample_shape)
        return value, self.log_prob(value)

    def _check_same_kind(self, other: Any) -> None:
        if type(other) is not type(self):
            raise UserTypeError(
                f"{type(self).__name__}.kl_divergence: the other distribution must be a {type(self).__name__}, too, "
                f"got {type(other).__name__}"
            )
