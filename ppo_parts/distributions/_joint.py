"""A joint distribution over actions that are trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ShapeError, UserTypeError
from ..functional._common import Array
from ._distribution import TreeDistribution, check_distribution, check_draw, is_distribution


class Joint(TreeDistribution):
    r"""Independent distributions over the entries of an action, such as a discrete choice and its real parameters.

    .. math:: \log\pi(a) = \sum_k \log\pi_k(a_k), \qquad H = \sum_k H_k, \qquad
              \mathrm{KL}(\pi \,\|\, \pi') = \sum_k \mathrm{KL}(\pi_k \,\|\, \pi'_k)

    Args:
        parts: a dict or a tuple of distributions with the same batch shape, which may come from other libraries. Dicts
            and tuples may be nested. Actions have the same structure, like elements of `envs.Dict` or `envs.Tuple`.

    Raises:
        TypeError: if there are no distributions, or an action has other entries. ShapeError: if batch axes differ.

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
            says = f"must be a dict or a tuple of distributions, got {parts!r}"
            raise UserTypeError(says, where="Joint", argument="parts")
        # Copy every dict, because the caller may change it later.
        self.parts = jax.tree.map(lambda part: part, parts, is_leaf=_is_part)
        self._parts_with("log_prob", "sample")

    def sample(self, *, seed: Array, sample_shape: Sequence[int] = ()) -> Any:
        """Draw actions; the leaves begin with `sample_shape` and the batch axes."""
        shape = check_draw(type(self).__name__, seed, sample_shape)
        more = {"sample_shape": shape} if shape else {}  # other libraries may not accept it
        keys = jax.random.split(seed, len(self.leaves))
        return self._together([part.sample(seed=key, **more) for part, key in zip(self.leaves, keys, strict=True)])

    def mode(self) -> Any:
        """Return the mode of each part."""
        return self._together([part.mode() for part in self._parts_with("mode")])

    def log_prob(self, value: Any) -> Array:
        """Return the log-probability of actions, summed over parts; leaves may share additional leading axes."""
        return self._total(part.log_prob(x) for part, x in zip(self.leaves, self._entries(value), strict=True))

    def entropy(self) -> Array:
        """Return the sum of the entropies, in nats; raise `NotImplementedError` if one has no closed form."""
        for part in self.leaves:
            if not hasattr(part, "entropy"):
                says = f"{type(part).__name__} has no entropy; ppo_parts.entropy_bonus estimates it from samples"
                raise NotImplementedError(says)
        return self._total(part.entropy() for part in self.leaves)

    def kl_divergence(self, other: Joint) -> Array:
        """Return KL(self || other) in nats, summed over the parts."""
        self._check_comparable(other)
        parts = self._parts_with("kl_divergence")
        return self._total(ours.kl_divergence(theirs) for ours, theirs in zip(parts, other.leaves, strict=True))

    @property
    def leaves(self) -> list[Any]:
        """Return all distributions as a list."""
        return jax.tree.leaves(self.parts, is_leaf=_is_part)

    def _parts_with(self, *methods: str) -> list[Any]:
        """Return the distributions, after checking that each has these methods, because some libraries lack them."""
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
            says = f"must have an entry for each part of {self}, got {jax.tree.structure(value)}"
            raise UserTypeError(says, where="Joint", argument="value") from error

    def _together(self, values: list[Any]) -> Any:
        """Return the action with these entries."""
        return jax.tree.unflatten(self._shape, values)

    def _total(self, summands: Any) -> Array:
        """Add arrays of one shape, without starting from 0, to save one addition."""
        first, *rest = summands
        shapes = [jnp.shape(x) for x in (first, *rest)]
        if len({*shapes}) > 1:
            says = "the parts must have the same batch axes, but their numbers have the shapes"
            raise ShapeError(f"{type(self).__name__}: {says} {', '.join(map(str, shapes))}")
        return sum(rest, first)


def _is_part(x: Any) -> bool:
    return x is None or is_distribution(x)  # None is treated as a leaf, so that it is rejected
