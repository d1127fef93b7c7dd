"""The beta distribution, scaled to a box."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ..functional._common import Array, check_arrays
from ._distribution import VectorDistribution, check_box, check_parameter, check_sign, fit_to_shape, nan_outside, widen
from ._gamma_functions import beyond_bregman, beyond_stirling, deviance, with_slope


class Beta(VectorDistribution):
    r"""Independent beta distributions scaled to a box, :math:`a = l + (h - l) x,\ x \sim \mathrm{Beta}(\alpha, \beta)`.

    .. math:: \log\pi(a) = \sum_d (\alpha_d - 1) \log x_d + (\beta_d - 1) \log(1 - x_d) - \log B(\alpha_d, \beta_d)
              - \log(h_d - l_d), \qquad x = \frac{a - l}{h - l}

    All actions are inside the box; the log-density of others is NaN. If alpha and beta are above 1, as in the example,
    the density has one maximum and is 0 at the edges; otherwise it may be infinite there. To keep the log-density
    finite, `log_prob` and samples clip x to [1e-6, 1 - 1e-6]; entropy and divergence do not. Alpha and beta are clipped
    to [1e-6, 1e9], and their gradient is 0 where they are clipped. Traced negative ones give NaN.

    Args:
        alpha: `[..., D]`, > 0.
        beta: `[..., D]`, `[D]` or a number, > 0.
        low, high: `[..., D]`, `[D]` or numbers, the bounds l and h of the box. All are attributes, `[..., D]`.

    Example:
        >>> outputs = jnp.array([[0.5413, 0.5413, 0.5413, 2.9489]])  # of a network, `[..., 2 * D]`
        >>> alpha, beta = jnp.split(1 + jax.nn.softplus(outputs), 2, axis=-1)
        >>> policy = Beta(alpha, beta, -2., 2.)
        >>> [round(float(x), 2) for x in (*alpha[0], *beta[0], *policy.mode()[0])]
        [2.0, 2.0, 2.0, 4.0, 0.0, -1.0]
        >>> round(float(policy.log_prob(policy.mode())[0]), 3), round(float(policy.entropy()[0]), 3)
        (-1.621, 2.285)

    Reference: Chou et al. 2017, Improving Stochastic Policy Gradients ... using the Beta Distribution, PMLR 70.
    """

    def __init__(self, alpha: Array, beta: Any, low: Any = -1.0, high: Any = 1.0) -> None:
        check_parameter("Beta", "alpha", alpha)
        check_arrays("Beta", beta=beta, low=low, high=high)
        self.alpha = jnp.asarray(alpha, jnp.result_type(alpha, beta))
        self.beta = fit_to_shape("Beta", "beta", jnp.asarray(beta, self.alpha.dtype), self.alpha, "alpha")
        check_sign("Beta", "alpha", self.alpha)
        check_sign("Beta", "beta", self.beta)
        self.low, self.high = check_box("Beta", low, high, self.alpha, "alpha")

    def mode(self) -> Array:
        r"""Return the maximum, :math:`x = (\alpha - 1) / (\alpha + \beta - 2)`, if both exceed 1, else the mean."""
        alpha, beta = self._wide(self.alpha.shape)
        peaked = (alpha > 1) & (beta > 1)
        above = [jnp.where(peaked, x - 1, x) for x in (alpha, beta)]
        return self._scaled(above[0] / (above[0] + above[1]))

    def entropy(self) -> Array:
        r"""Return the entropy in nats, where :math:`\psi` is the digamma function.

        .. math:: \sum_d \log B(\alpha_d, \beta_d) - (\alpha_d - 1) \psi(\alpha_d) - (\beta_d - 1) \psi(\beta_d)
                  + (\alpha_d + \beta_d - 2) \psi(\alpha_d + \beta_d) + \log(h_d - l_d)
        """
        alpha, beta = self._wide(self.alpha.shape)
        total = alpha + beta

        def term(x: Array, count: int) -> Array:
            """Return log Gamma(x) - (x - count) psi(x), without the terms that cancel or are added below."""
            rest, slope = with_slope(beyond_stirling, x)
            return rest - (x - count) * slope - 0.5 * count / x

        entropy = 0.5 * (jnp.log(alpha / total) + jnp.log(beta / total) - jnp.log(total) + 1 + math.log(2 * math.pi))
        entropy += term(alpha, 1) + term(beta, 1) - term(total, 2)
        return self._total(entropy + jnp.log(self.high - self.low))

    def kl_divergence(self, other: Beta) -> Array:
        r"""Return KL(self || other) in nats for a common box; it is infinite where traced boxes differ.

        .. math:: \sum_d \log\frac{B(\alpha_{2d}, \beta_{2d})}{B(\alpha_{1d}, \beta_{1d})}
                  + (\alpha_{1d} - \alpha_{2d}) \psi(\alpha_{1d}) + (\beta_{1d} - \beta_{2d}) \psi(\beta_{1d})
                  + (\alpha_{2d} - \alpha_{1d} + \beta_{2d} - \beta_{1d}) \psi(\alpha_{1d} + \beta_{1d})
        """
        self._check_comparable(other)
        same = self._same_bounds(other, "low", "high")
        alpha, beta = self._wide(self.alpha.shape)
        other_alpha, other_beta = other._wide(self.alpha.shape)

        total, other_total = alpha + beta, other_alpha + other_beta
        divergence = deviance(other_alpha, other_beta, alpha / total, beta / total)
        divergence += beyond_bregman(alpha, other_alpha) + beyond_bregman(beta, other_beta)
        divergence -= beyond_bregman(total, other_total)
        # Rounding errors are large if parameters differ much. The maximum would halve the second derivative at 0.
        divergence += jax.lax.stop_gradient(jnp.maximum(divergence, 0) - divergence)
        return self._total(jnp.where(same, divergence, jnp.inf), other)

    def _wide(self, shape: tuple[int, ...]) -> tuple[Array, ...]:
        # Within these limits, no intermediate result of a gradient overflows in float32.
        wide = widen(shape, self.alpha, self.beta)
        return tuple(jnp.where(x >= 0, jnp.clip(x, 1e-6, 1e9), jnp.nan) for x in wide)

    def _draw(self, seed: Array, sample_shape: tuple[int, ...]) -> Array:
        alpha, beta = self._wide((*sample_shape, *self.alpha.shape))
        return self._scaled(jax.random.beta(seed, alpha, beta, dtype=alpha.dtype))

    def _log_probs(self, value: Array) -> Array:
        shape = jnp.shape(value)
        alpha, beta = self._wide(shape)
        low, high = (jnp.broadcast_to(x, shape) for x in (self.low, self.high))
        # Compute 1 - x from the upper edge, because this is more accurate near that edge than subtracting x.
        x, rest = (_inside(distance / (high - low)) for distance in (value - low, high - value))
        total = alpha + beta
        peak = 0.5 * (jnp.log(alpha * (beta / total)) - math.log(2 * math.pi))  # Stirling's approximation
        peak += beyond_stirling(total) - beyond_stirling(alpha) - beyond_stirling(beta)
        density = peak - deviance(alpha, beta, x, rest) - jnp.log(x) - jnp.log(rest) - jnp.log(high - low)
        return nan_outside(density, value, low, high, self.alpha.dtype)

    def _scaled(self, x: Array) -> Array:
        low, high = (jnp.broadcast_to(bound, x.shape) for bound in (self.low, self.high))
        return (low + (high - low) * _inside(x)).astype(self.alpha.dtype)


def _inside(x: Array) -> Array:
    """Clip a number to [1e-6, 1 - 1e-6], where the log-density is finite."""
    return jnp.clip(x, 1e-6, 1 - 1e-6)
