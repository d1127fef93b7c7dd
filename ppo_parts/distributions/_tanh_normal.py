"""Gaussians squashed into a box."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base.errors import UserValueError
from ..functional._common import accumulator_dtype, check_arrays, known_values
from ._distribution import VectorDistribution, check_box, fit_to_shape, same_box
from ._normal import Normal, StateDependentNormal, log_density, relation

Array = jax.Array


class TanhNormal(VectorDistribution):
    r"""Gaussian squashed into a box, :math:`a = m + h \tanh(u),\ u \sim \mathcal N(\mu, \sigma)`, in each dimension.

    .. math:: \log\pi(a) = \sum_d \log\mathcal N(u_d; \mu_d, \sigma_d) - \log h_d - \log(1 - \tanh^2 u_d),
              \qquad u = \mathrm{artanh}((a - m) / h)

    In float32, all u above 9 are rounded to the edge of the box, where artanh is infinite. Therefore every action
    within a relative `eps` of an edge is replaced by that edge, which has the probability of all that it replaces,

    .. math:: \log\pi(m + h) = \log\Phi((\mu - u_{max}) / \sigma), \qquad u_{max} = \mathrm{artanh}(1 - \epsilon)

    (log-mass at the edge, log-density inside). This is exactly the distribution of the samples.

    Args:
        loc: `[..., D]`, mean of u.
        scale: `[..., D]`, `[D]` or a number, standard deviation of u, > 0.
        low, high: `[..., D]`, `[D]` or numbers, the bounds of the box; m is its middle and h half its width.
        eps: relative width of an edge, which is wider if the box is narrow and far from 0, and in bfloat16.

    Attributes:
        base: `Normal` of u.
        middle, half, eps: `[..., D]`, m, h and the width of an edge.

    Example:
        >>> policy = TanhNormal(jnp.array([0., 50.]), jnp.ones(2), -2., 2.)
        >>> [round(float(x), 4) for x in policy.log_prob(jnp.array([[0., 2.], [1., 2.]]))]
        [-1.6121, -1.4753]

    Reference: Haarnoja et al. 2018, arXiv:1801.01290, appendix C; the edge is Tobin's 1958 censored likelihood.
    """

    def __init__(self, loc: Array, scale: Any, low: Any = -1.0, high: Any = 1.0, eps: float = 1e-6) -> None:
        self._squash(Normal(loc, scale), low, high, eps)

    def _squash(self, base: Normal, low: Any, high: Any, eps: float) -> None:
        """Set the attributes."""
        name = type(self).__name__
        check_arrays(name, low=low, high=high, eps=eps)
        known = known_values(eps)
        if known is not None and not np.all((known >= 0) & (known < 1)):
            raise UserValueError(f"must lie in [0, 1), got {eps!r}", where=name, argument="eps")
        self.base, dtype, wide = base, base.loc.dtype, accumulator_dtype(base.loc)
        check_box(name, low, high, dtype)
        low, high = (
            fit_to_shape(name, bound, jnp.asarray(x, wide), base.loc, "loc")
            for bound, x in (("low", low), ("high", high))
        )
        self.middle, self.half = (high + low) / 2, (high - low) / 2
        # In a narrow box far from 0, an action has few digits left to resolve the box, so the edge must be wider.
        self.eps = jnp.maximum(eps, 4 * float(jnp.finfo(dtype).eps) * (1 + jnp.abs(self.middle) / self.half))

    def mode(self) -> Array:
        """The squashed mean, which is the median, because squashing moves the mode."""
        return self._squashed(self.base._wide(self.base.loc.shape)[0])

    def entropy(self) -> Array:
        """Raise `NotImplementedError`: there is no closed form; `ppo_parts.entropy_bonus` estimates it from samples."""
        raise NotImplementedError(
            f"{type(self).__name__} has no entropy in closed form; ppo_parts.entropy_bonus estimates it from samples"
        )

    def kl_divergence(self, other: TanhNormal) -> Array:
        r"""KL(self || other) in nats, of two distributions in the same box; infinite where traced boxes differ.

        Squashing cancels, so it is the divergence of two Gaussians censored at :math:`\pm u_{max}`, summed over the
        dimensions:

        .. math:: \int_{-u_{max}}^{u_{max}} p(u) \log\frac{p(u)}{q(u)} du
                  + P_- \log\frac{P_-}{Q_-} + P_+ \log\frac{P_+}{Q_+},
                  \qquad P_\pm = \Phi\left(\frac{\pm\mu_1 - u_{max}}{\sigma_1}\right)

        where Q is the same for the other distribution. The integral is a sum of moments of a truncated Gaussian.
        """
        self._check_comparable(other)
        same = same_box(type(self).__name__, self._box(), other._box())
        shape = self.base.loc.shape
        (loc, scale), (other_loc, other_scale) = self.base._wide(shape), other.base._wide(shape)
        log_ratio, shift = relation((loc, scale), (other_loc, other_scale))
        u_max = jnp.arctanh(1 - self.eps)
        below, above = (-u_max - loc) / scale, (u_max - loc) / scale
        # Moments of a standard Gaussian between the edges. The nearer tail gives more precise probabilities.
        near, far = jnp.where(below > 0, -above, below), jnp.where(below > 0, -below, above)
        inside = jax.scipy.special.ndtr(far) - jax.scipy.special.ndtr(near)
        density_below, density_above = (jnp.exp(log_density(z, 0.0, 1.0)) for z in (below, above))
        first = density_below - density_above
        excess = below * density_below - above * density_above  # the second moment, less `inside`
        growth = jnp.expm1(2 * log_ratio)
        within = inside * 0.5 * (growth - 2 * log_ratio + jnp.square(shift))
        within += 0.5 * growth * excess + jnp.exp(log_ratio) * shift * first

        def edge(sign: float) -> Array:
            log_p = jax.scipy.special.log_ndtr((sign * loc - u_max) / scale)
            log_q = jax.scipy.special.log_ndtr((sign * other_loc - u_max) / other_scale)
            return jnp.exp(log_p) * (log_p - log_q)

        return self._total(jnp.where(same, within + edge(-1.0) + edge(1.0), jnp.inf), other)

    @property
    def _like(self) -> Array:
        return self.base.loc

    def _box(self) -> dict[str, Array]:
        return {"low": self.middle - self.half, "high": self.middle + self.half, "eps": self.eps}

    def _draw(self, seed: Array, sample_shape: tuple[int, ...]) -> Array:
        return self._squashed(self.base._draw(seed, sample_shape))

    def _log_probs(self, value: Array) -> Array:
        shape = jnp.shape(value)
        loc, scale = self.base._wide(shape)
        middle, half, eps = (jnp.broadcast_to(x, shape) for x in (self.middle, self.half, self.eps))
        x = (value - middle) / half
        edge, limit = jnp.abs(x) > 1 - eps / 2, 1 - eps
        u = jnp.arctanh(jnp.clip(x, -limit, limit))
        slope = 2 * (math.log(2) - u - jax.nn.softplus(-2 * u))  # log(1 - tanh(u)^2), without cancellation
        density = log_density(jnp.where(edge, jax.lax.stop_gradient(loc), u), loc, scale) - slope
        beyond = (jnp.sign(x) * loc - jnp.arctanh(limit)) / scale
        mass = jax.scipy.special.log_ndtr(jnp.where(edge, beyond, 0))
        return jnp.where(edge, mass, density - jnp.log(half))

    def _squashed(self, u: Array) -> Array:
        middle, half, eps = (jnp.broadcast_to(x, u.shape) for x in (self.middle, self.half, self.eps))
        x = jnp.tanh(u)
        return (middle + half * jnp.where(jnp.abs(x) > 1 - eps, jnp.sign(x), x)).astype(self.base.loc.dtype)


class StateDependentTanhNormal(TanhNormal):
    r"""Squashed Gaussian with state-dependent noise: `TanhNormal` of a `StateDependentNormal`.

    .. math:: a = m + h \tanh\!\left(\mu(s) + (\sigma \odot \theta)^\top \phi(s)\right), \qquad
              \theta \sim \mathcal N(0, 1)^{L \times D}

    Args:
        loc, features, std: as in `StateDependentNormal`; `loc` is the mean before squashing.
        low, high, eps: as in `TanhNormal`; so are the attributes.

    Example:
        >>> loc, features, std = jnp.zeros((2, 1)), jnp.array([[3., 4.], [0., 0.1]]), jnp.ones((2, 1))
        >>> policy = StateDependentTanhNormal(loc, features, std, -2., 2.)
        >>> bool(jnp.all(jnp.abs(policy.sample(seed=jax.random.key(0))) <= 2)), policy.base.scale.shape
        (True, (2, 1))

    Reference: Raffin et al. 2021, Smooth Exploration for Robotic Reinforcement Learning, arXiv:2005.05719, section 3.
    """

    def __init__(
        self, loc: Array, features: Array, std: Array, low: Any = -1.0, high: Any = 1.0, eps: float = 1e-6
    ) -> None:
        self._squash(StateDependentNormal(loc, features, std), low, high, eps)
