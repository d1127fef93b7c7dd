"""Functions of log Gamma that stay accurate where large log-gammas cancel.

In float32 on a CPU, for alpha = beta = 200, 1000 and 10000, the largest error of `jax.scipy.stats.beta.logpdf` between
the quantiles 0.001 and 0.999 is 2e-4, 5e-4 and 4e-3, which the importance ratio inherits. `Beta` has an error of 1e-6.

As in R and TensorFlow Probability, the log-density of a beta distribution is computed as the remainder of Stirling's
approximation minus a deviance. `beyond_stirling` is `log_gamma_correction` in tfp.math and `bcorr` in DiDonato and
Morris, with the series of Abramowitz and Stegun, eq. 6.1.41; `deviance` is Loader's `bd0`; `_excess` is `rlog1` in
DiDonato and Morris. The divergence needs one more function, `beyond_bregman`.

Reference: DiDonato and Morris 1992, Algorithm 708, ACM TOMS 18 (3); Loader 2000, Fast and Accurate Computation of
Binomial Probabilities.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..functional._common import Array


def beyond_stirling(x: Array) -> Array:
    r"""Return :math:`\log\Gamma(x) - (x - \tfrac12) \log x + x - \tfrac12 \log 2\pi`, which Stirling omits.

    It decreases by :math:`(x + 1/2) \log(1 + 1/x) - 1` from x to x + 1. After four such steps, a few terms of the
    asymptotic series suffice for float32.
    """
    return sum((x + k + 0.5) * jnp.log1p(1 / (x + k)) - 1 for k in range(4)) + _stirling_series(x + 4)


def _stirling_series(x: Array) -> Array:
    """Return the first terms of the asymptotic series of `beyond_stirling`; at x = 4, the others sum to 5e-10."""
    far = 1 / x
    square = far * far
    return far * (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square * (1 / 1680 - square / 1188))))


def beyond_bregman(x: Array, y: Array) -> Array:
    r"""Return the remainder of the Bregman divergence of log Gamma after its leading terms.

    .. math:: \log\Gamma(y) - \log\Gamma(x) - (y - x) \psi(x) - \left(y \log\frac{y}{x} - y + x\right)

    It is computed as a sum of `_excess`, so that the divergence of nearby numbers stays accurate. As in
    `beyond_stirling`, four steps lead from small x and y to numbers for which the series is accurate.
    """

    def gap(y: Array, x: Array) -> Array:
        return _excess((y - x) / x, y / x)

    near = jnp.minimum(x, y) < 4
    far_x, far_y = (jnp.where(near, number + 4, number) for number in (x, y))
    steps = sum(gap(y + k, x + k) for k in range(4)) + far_y * gap(far_x, far_y) - y * gap(x, y)
    series, slope = with_slope(_stirling_series, far_x)
    return jnp.where(near, steps, 0) + 0.5 * gap(far_y, far_x) + _stirling_series(far_y) - series - (y - x) * slope


def with_slope(function: Any, x: Array) -> tuple[Array, Array]:
    """Return the values of an elementwise function and of its derivative."""
    return jax.jvp(function, (x,), (jnp.ones_like(x),))


def _excess(t: Array, ratio: Array) -> Array:
    """Return t - log(1 + t) >= 0, accurately for small t, and for `ratio` = 1 + t near 0."""
    r = t / (2 + t)
    square = jnp.square(r)  # log(1 + t) = 2 artanh(r)
    small = t * r - 2 * r * square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square / 9)))
    return jnp.where(jnp.abs(t) < 0.3, small, t - jnp.log(ratio))


@jax.custom_jvp
def deviance(alpha: Array, beta: Array, x: Array, rest: Array) -> Array:
    r"""Return :math:`\alpha \log(m / x) + \beta \log((1 - m) / (1 - x))` >= 0 for the mean m; `rest` is 1 - x.

    It is computed as a sum of two nonnegative terms, so it stays accurate where x is near the mean.
    """
    mean, other = alpha / (alpha + beta), beta / (alpha + beta)
    distance = jnp.where(x < rest, x - mean, other - rest)
    return alpha * _excess(distance / mean, x / mean) + beta * _excess(-distance / other, rest / other)


deviance.defjvps(  # in these partial derivatives, no terms cancel
    lambda t, _, alpha, beta, x, rest: t * jnp.log(alpha / (alpha + beta) / x),
    lambda t, _, alpha, beta, x, rest: t * jnp.log(beta / (alpha + beta) / rest),
    lambda t, _, alpha, beta, x, rest: -t * alpha / x,
    lambda t, _, alpha, beta, x, rest: -t * beta / rest,
)
