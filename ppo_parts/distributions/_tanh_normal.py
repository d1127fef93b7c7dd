"""A Gaussian squashed into a box."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import UserTypeError
from ..functional._arguments import number
from ..functional._common import Array, Range, check_arrays
from ._distribution import VectorDistribution, check_box, nan_outside
from ._normal import Normal, log_density


class TanhNormal(VectorDistribution):
    r"""Gaussian squashed into a box, :math:`a = m + h \tanh(u),\ u \sim \mathcal N(\mu, \sigma)`, in each dimension.

    .. math:: \log\pi(a) = \sum_d \log\mathcal N(u_d; \mu_d, \sigma_d) - \log h_d - \log(1 - \tanh^2 u_d),
              \qquad u = \mathrm{artanh}((a - m) / h)

    In float32, all u above 9 are rounded to the edge of the box, where artanh is infinite. Therefore every action
    within a relative `eps` of an edge (in `log_prob`, within eps / 2, because samples are rounded) is replaced by the
    edge, which gets the probability of all actions that it replaces,

    .. math:: \log\pi(m + h) = \log\Phi((\mu - u_{max}) / \sigma), \qquad u_{max} = \mathrm{artanh}(1 - \epsilon)

    The result is a log-mass at the edge, a log-density inside, and NaN outside, exactly as samples are distributed.

    Args:
        base: `Normal` or `StateDependentNormal` of u, `[..., D]`.
        low, high: `[..., D]`, `[D]` or numbers, the bounds of the box, whose middle is m and whose half width is h.
        eps: relative width of an edge. It is increased in bfloat16, and if the box is narrow and far from 0.

    Attributes:
        base: the distribution of u, as given.
        low, high, middle, half, eps: `[..., D]`, the bounds, m, h and the width of an edge.

    Example:
        >>> policy = TanhNormal(Normal(jnp.array([0., 50.]), 1.), -2., 2.)
        >>> [round(float(x), 4) for x in policy.log_prob(jnp.array([[0., 2.], [1., 2.]]))]
        [-1.6121, -1.4753]

    Reference: Haarnoja et al. 2018, arXiv:1801.01290, appendix C; the edge is Tobin's 1958 censored likelihood.
    """

    def __init__(self, base: Normal, low: Any = -1.0, high: Any = 1.0, eps: float = 1e-6) -> None:
        if not isinstance(base, Normal):
            says = f"must be a Normal, got {type(base).__name__}; write TanhNormal(Normal(loc, scale), low, high)"
            raise UserTypeError(says, where="TanhNormal", argument="base")
        check_arrays("TanhNormal", low=low, high=high)
        eps = number(Range(0, 0.999), single=True).check("TanhNormal", "eps", eps)
        self.base = base
        self.low, self.high = check_box("TanhNormal", low, high, base.loc, "loc")
        # In a narrow box far from 0, an action has few digits to resolve the box, so the edge must be wider.
        self.eps = jnp.maximum(eps, 4 * float(jnp.finfo(base.loc.dtype).eps) * (1 + jnp.abs(self.middle) / self.half))

    @property
    def middle(self) -> Array:
        """Return the middle of the box, `[..., D]`."""
        return (self.high + self.low) / 2

    @property
    def half(self) -> Array:
        """Return half the width of the box, `[..., D]`."""
        return (self.high - self.low) / 2

    def mode(self) -> Array:
        """Return the squashed mean, which is the median, instead of the mode, which squashing would move."""
        return self._squashed(self.base._wide(self.base.loc.shape)[0])

    def entropy(self) -> Array:
        """Raise `NotImplementedError`, as there is no closed form; `ppo_parts.entropy_bonus` uses a sample instead."""
        says = "TanhNormal has no entropy in closed form; ppo_parts.entropy_bonus estimates it from samples"
        raise NotImplementedError(says)

    def kl_divergence(self, other: TanhNormal) -> Array:
        """Return KL(self || other) of the Gaussians in nats, as squashing cancels; it is infinite where boxes differ.

        Where both have probability at an edge, it is an upper bound, because samples beyond the edge look the same.
        """
        self._check_comparable(other)
        same = self._same_bounds(other, "low", "high", "eps")
        return jnp.where(jnp.all(same, axis=-1), self.base.kl_divergence(other.base), jnp.inf)

    def _draw(self, seed: Array, sample_shape: tuple[int, ...]) -> Array:
        return self._squashed(self.base._draw(seed, sample_shape))

    def _log_probs(self, value: Array) -> Array:
        shape = jnp.shape(value)
        loc, scale = self.base._wide(shape)
        middle, half, eps = (jnp.broadcast_to(x, shape) for x in (self.middle, self.half, self.eps))
        x = (value - middle) / half
        edge, limit = jnp.abs(x) > 1 - eps / 2, 1 - eps
        u = jnp.arctanh(jnp.clip(x, -limit, limit))
        slope = 2 * (math.log(2) - u - jax.nn.softplus(-2 * u))  # log(1 - tanh(u)^2), computed without cancellation
        density = log_density(jnp.where(edge, jax.lax.stop_gradient(loc), u), loc, scale) - slope
        beyond = (jnp.sign(x) * loc - jnp.arctanh(limit)) / scale
        mass = jax.scipy.special.log_ndtr(jnp.where(edge, beyond, 0))
        log_probs = jnp.where(edge, mass, density - jnp.log(half))
        return nan_outside(log_probs, value, self.low, self.high, self.base.loc.dtype)

    def _squashed(self, u: Array) -> Array:
        bounds = self.low, self.high, self.middle, self.half, self.eps
        low, high, middle, half, eps = (jnp.broadcast_to(x, u.shape) for x in bounds)
        x = jnp.tanh(u)
        edge = jnp.where(x > 0, high, low)  # middle + half may be rounded to beyond the edge
        return jnp.where(jnp.abs(x) > 1 - eps, edge, middle + half * x).astype(self.base.loc.dtype)
