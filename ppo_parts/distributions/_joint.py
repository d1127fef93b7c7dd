"""Several distributions as one, over actions that are trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._base.errors import ShapeError, UserTypeError
from ..functional._common import Array
from ._distribution import TreeDistribution, check_distribution, check_draw, is_distribution


class Joint(TreeDistribution):
    r"""Independent distributions over the entries of an action, such as a discrete choice and its real parameters.

    .. math:: \log\pi(a) = \sum_k \log\pi_k(a_k), \qquad H = \sum_k H_k, \qquad
              \mathrm{KL}(\pi \,\|\, \pi') = \sum_k \mathrm{KL}(\pi_k \,\|\, \pi'_k)

    Args:
        parts: a dict or a tuple of distributions of one batch shape, also from other libraries; dicts and tuples may
            contain others. An action has the same structure, as an element of `envs.Dict` or `envs.Tuple`.

    Raises:
        TypeError: no distributions; an action with other entries. ShapeError: the parts differ in their batch axes.

    Example:
        >>> from ppo_parts.distributions import Categorical, Normal
        >>> parts = {"move": Categorical(jnp.zeros((5, 3))), "strength": Normal(jnp.zeros((5, 2)), 1.0)}
        >>> policy = Joint(parts)
        >>> action, log_prob = policy.sample_and_log_prob(seed=jax.random.key(0))
        >>> action["move"].shape, action["strength"].shape, log_prob.shape
        ((5,), (5, 2), (5,))

    Reference: Fan et al. 2019, Hybrid Actor-Critic Reinforcement Learning in Parameterized Action Space,
    arXiv:1903.01344.
    """

    def __init__(self, parts: Any) -> None:
        several = isinstance(parts, dict | tuple | list)
        if not several or not jax.tree.leaves(parts, is_leaf=_is_part):
            raise UserTypeError(
                f"must be a dict or a tuple of distributions, got {parts!r}", where="Joint", argument="parts"
            )
        # A copy of every dict, because the caller may change them later.
        self.parts = jax.tree.map(lambda part: part, parts, is_leaf=_is_part)
        self._parts_with("log_prob", "sample")

    def sample(self, *, seed: Array, sample_shape: Sequence[int] = ()) -> Any:
        """Draw actions; the leaves begin with `sample_shape` and the batch axes."""
        shape = check_draw(type(self).__name__, seed, sample_shape)
        more = {"sample_shape": shape} if shape else {}  # which another library's distribution need not take
        keys = jax.random.split(seed, len(self.leaves))
        return self._together([part.sample(seed=key, **more) for part, key in zip(self.leaves, keys, strict=True)])

    def mode(self) -> Any:
        """The mode of each part."""
        return self._together([part.mode() for part in self._parts_with("mode")])

    def log_prob(self, value: Any) -> Array:
        """Log-probability of actions, summed over the parts; leaves may have the same additional leading axes."""
        return self._total(part.log_prob(x) for part, x in zip(self.leaves, self._entries(value), strict=True))

    def entropy(self) -> Array:
        """Sum of the entropies, in nats; raises `NotImplementedError` if a part has none in closed form."""
        for part in self.leaves:
            if not hasattr(part, "entropy"):
                says = f"{type(part).__name__} has no entropy; ppo_parts.entropy_bonus estimates it from samples"
                raise NotImplementedError(says)
        return self._total(part.entropy() for part in self.leaves)

    def kl_divergence(self, other: Joint) -> Array:
        """KL(self || other) in nats, summed over the parts."""
        self._check_comparable(other)
        parts = self._parts_with("kl_divergence")
        return self._total(ours.kl_divergence(theirs) for ours, theirs in zip(parts, other.leaves, strict=True))

    @property
    def leaves(self) -> list[Any]:
        """The distributions in one list."""
        return jax.tree.leaves(self.parts, is_leaf=_is_part)

    def _parts_with(self, *methods: str) -> list[Any]:
        """Return the distributions, after checking that each has these methods, which those of a library may lack."""
        for part in self.leaves:
            check_distribution("Joint", part, methods)
        return self.leaves

    @property
    def _shape(self) -> Any:
        return jax.tree.structure(self.parts, is_leaf=_is_part)

    def _entries(self, value: Any) -> list[Any]:
        """Return the action of each part."""
        try:
            return self._shape.flatten_up_to(value)
        except (ValueError, TypeError, KeyError) as error:
            raise UserTypeError(
                f"must have an entry for each part of {self}, got {jax.tree.structure(value)}",
                where="Joint",
                argument="value",
            ) from error

    def _together(self, values: list[Any]) -> Any:
        """Return the action with these entries."""
        return jax.tree.unflatten(self._shape, values)

    def _total(self, summands: Any) -> Array:
        """Add arrays of one shape, without starting from 0, which would be one more addition."""
        first, *rest = summands
        if any(jnp.shape(x) != jnp.shape(first) for x in rest):
            raise ShapeError(
                f"{type(self).__name__}: the parts must have the same batch axes, but their numbers have the shapes "
                f"{', '.join(str(jnp.shape(x)) for x in (first, *rest))}"
            )
        return sum(rest, first)


def _is_part(x: Any) -> bool:
    return x is None or is_distribution(x)  # None is a leaf, so that it is rejected as one
