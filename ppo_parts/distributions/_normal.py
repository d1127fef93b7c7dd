"""Gaussian distributions, with independent or state-dependent noise (gSDE)."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ShapeError
from ..functional._common import Array, accumulator_dtype, check_arrays, check_floating
from ._distribution import VectorDistribution, check_parameter, check_sign, fit_to_shape, widen


class Normal(VectorDistribution):
    r"""Diagonal Gaussian, :math:`a \sim \mathcal N(\mu, \mathrm{diag}(\sigma^2))`, independent over the last axis.

    .. math:: \log\pi(a) = \sum_d -\tfrac12 \left(\frac{a_d - \mu_d}{\sigma_d}\right)^2 - \log\sigma_d
              - \tfrac12 \log 2\pi

    Args:
        loc: `[..., D]`, mean.
        scale: standard deviation, > 0, `[..., D]`, or `[D]` or a number if it is the same for all means. `loc` and
            `scale` are attributes, `[..., D]` of one dtype.

    Example:
        >>> policy = Normal(jnp.zeros((5, 2)), jnp.array([1., 2.]))
        >>> policy.log_prob(jnp.zeros((5, 2))).shape, round(float(policy.entropy()[0]), 4)
        ((5,), 3.531)
    """

    def __init__(self, loc: Array, scale: Any) -> None:
        check_parameter("Normal", "loc", loc)
        check_arrays("Normal", scale=scale)
        dtype = jnp.result_type(loc, scale)
        self.loc = jnp.asarray(loc, dtype)
        self.scale = fit_to_shape("Normal", "scale", jnp.asarray(scale, dtype), self.loc, "loc")
        check_sign("Normal", "scale", self.scale)

    def mode(self) -> Array:
        """Return the mean."""
        return self.loc

    def entropy(self) -> Array:
        r"""Return the entropy in nats, :math:`\sum_d \log\sigma_d + \tfrac12 \log 2\pi e`."""
        _, scale = self._wide(self.loc.shape)
        return self._total(jnp.log(scale) + 0.5 * (1 + math.log(2 * math.pi)))

    def kl_divergence(self, other: Normal) -> Array:
        r"""Return KL(self || other) in nats.

        .. math:: \sum_d \log\frac{\sigma_{2d}}{\sigma_{1d}} - \frac{1}{2}
                  + \frac{\sigma_{1d}^2 + (\mu_{1d} - \mu_{2d})^2}{2 \sigma_{2d}^2}
        """
        self._check_comparable(other)
        (loc, scale), (other_loc, other_scale) = (x._wide(self.loc.shape) for x in (self, other))
        log_ratio, shift = jnp.log(scale / other_scale), (loc - other_loc) / other_scale
        return self._total(0.5 * (jnp.expm1(2 * log_ratio) - 2 * log_ratio + jnp.square(shift)), other)

    def _wide(self, shape: tuple[int, ...]) -> tuple[Array, ...]:
        return widen(shape, self.loc, self.scale)

    def _draw(self, seed: Array, sample_shape: tuple[int, ...]) -> Array:
        loc, scale = self._wide((*sample_shape, *self.loc.shape))
        return loc + scale * jax.random.normal(seed, loc.shape, loc.dtype)

    def _log_probs(self, value: Array) -> Array:
        return log_density(value, *self._wide(jnp.shape(value)))


class StateDependentNormal(Normal):
    r"""Gaussian whose noise is linear in features of the state (generalized state-dependent exploration, gSDE).

    .. math:: a = \mu(s) + (\sigma \odot \theta)^\top \phi(s), \qquad \theta \sim \mathcal N(0, 1)^{L \times D}, \qquad
              \log\pi(a) = \log\mathcal N\!\left(a;\ \mu(s), \sqrt{(\sigma^2)^\top \phi(s)^2 + 10^{-6}}\right)

    Samples drawn with the same key use the same matrix :math:`\theta` for each batch element, so with
    `ppo_parts.rollout(noise_steps=k)` each environment keeps its matrix for k steps.

    Args:
        loc: `[..., D]`, mean.
        features: `[..., L]`, :math:`\phi(s)`, usually the last hidden layer of the actor, with `jax.lax.stop_gradient`.
        std: `[L, D]`, :math:`\sigma`, >= 0; or `[..., L, D]`.

    Attributes:
        scale: `[..., D]`, standard deviation of the action; the arguments are attributes, too.

    Example:
        >>> policy = StateDependentNormal(jnp.zeros((2, 1)), jnp.array([[3., 4.], [6., 8.]]), jnp.ones((2, 1)))
        >>> policy.scale.tolist()
        [[5.0], [10.0]]
        >>> first, same, other = (policy.sample(seed=jax.random.key(k)) for k in (0, 0, 1))
        >>> jnp.array_equal(first, same).item(), jnp.array_equal(first, other).item()
        (True, False)

    Reference: Raffin et al. 2021, Smooth Exploration for Robotic Reinforcement Learning, arXiv:2005.05719, section 3.
    """

    def __init__(self, loc: Array, features: Array, std: Array) -> None:
        for name, x in {"loc": loc, "features": features, "std": std}.items():
            check_floating("StateDependentNormal", name, x)
        (*leading, size), shape = jnp.shape(loc) or (0,), jnp.shape(features)
        wide = (*shape, size)
        if shape[:-1] != tuple(leading) or jnp.shape(std) not in (wide, wide[-2:]) or not shape:
            must = "loc must be [..., D], features [..., L] and std [L, D] or [..., L, D]"
            shapes = f"{jnp.shape(loc)}, {shape} and {jnp.shape(std)}"
            raise ShapeError(f"StateDependentNormal: {must}, got shapes {shapes}")
        check_sign("StateDependentNormal", "std", std, zero=True)
        dtype = accumulator_dtype(jnp.asarray(loc))
        squares = [jnp.square(jnp.asarray(x, dtype)) for x in (features, std)]
        super().__init__(loc, jnp.sqrt(jnp.einsum("...l,...ld->...d", *squares) + 1e-6).astype(jnp.result_type(loc)))
        self.features, self.std = jnp.asarray(features), jnp.broadcast_to(std, wide)

    def _draw(self, seed: Array, sample_shape: tuple[int, ...]) -> Array:
        loc, _ = self._wide((*sample_shape, *self.loc.shape))
        theta = jax.random.normal(seed, (*sample_shape, *self.std.shape), loc.dtype)  # one matrix per sample
        weights = self.features.astype(loc.dtype)[..., None] * self.std.astype(loc.dtype)
        return loc + jnp.sum(jnp.broadcast_to(weights, theta.shape) * theta, axis=-2)


def log_density(value: Any, loc: Any, scale: Any) -> Array:
    """Return the log-density of a Gaussian for each dimension."""
    return -0.5 * jnp.square((value - loc) / scale) - jnp.log(scale) - 0.5 * math.log(2 * math.pi)
