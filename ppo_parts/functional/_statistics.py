"""Diagnostics: how far the policy moved, how good the critic is."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp

from ._common import Array, accumulator, floating, masked_mean, same_shape

KLEstimator = Literal["k1", "k2", "k3"]


def approx_kl(log_ratio: Array, *, estimator: KLEstimator = "k3") -> Array:
    r"""Estimate of KL(behaviour ‖ current) per element, from actions of the behaviour policy.

    .. math:: k_1 = -\ell, \qquad k_2 = \tfrac{1}{2}\ell^2, \qquad k_3 = (e^{\ell} - 1) - \ell

    k1 is unbiased and noisy (its mean can be negative), k2 is biased and never negative, k3 is unbiased and never
    negative. CleanRL logs k3 as `approx_kl` and k1 as `old_approx_kl`; JaxDEM logs k2; jaxagents sums k1.

    Args:
        log_ratio: log pi_current(a) - log pi_behaviour(a), any shape, in nats.
        estimator: "k1", "k2" or "k3".

    Returns:
        The estimate per element, same shape, in nats. Its mean estimates the divergence.

    Raises:
        ValueError: another estimator. TypeError: not floating.

    Example:
        >>> import jax.numpy as jnp
        >>> l = jnp.log(jnp.array([2.]))
        >>> [round(float(approx_kl(l, estimator=k)[0]), 3) for k in ("k1", "k2", "k3")]
        [-0.693, 0.24, 0.307]

    Reference: Schulman 2020, Approximating KL Divergence, http://joschu.net/blog/kl-approx.html.
    """
    floating("approx_kl", log_ratio=log_ratio)
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * jnp.square(log_ratio)
    if estimator == "k3":
        return jnp.expm1(log_ratio) - log_ratio
    raise ValueError(f'approx_kl: estimator must be "k1", "k2" or "k3", got {estimator!r}')


def clip_fraction(log_ratio: Array, *, clip_eps: float | Array, clip_eps_high: float | Array | None = None) -> Array:
    r"""1.0 where the ratio left the clip range, per element: :math:`r < 1-\epsilon` or :math:`r > 1+\epsilon_{high}`.

    Args:
        log_ratio: log pi_current(a) - log pi_behaviour(a), any shape, in nats.
        clip_eps, clip_eps_high: as in `clipped_surrogate`.

    Returns:
        0.0 or 1.0 per element; the mean is what is usually logged.

    Example:
        >>> import jax.numpy as jnp
        >>> clip_fraction(jnp.log(jnp.array([1., 1.3, .7])), clip_eps=.2).tolist()
        [0.0, 1.0, 1.0]

    Reference: Huang et al. 2022, The 37 Implementation Details of PPO, detail 12.
    """
    floating("clip_fraction", log_ratio=log_ratio)
    moved = jnp.exp(log_ratio) - 1
    high = clip_eps if clip_eps_high is None else clip_eps_high
    return ((moved > high) | (moved < -clip_eps)).astype(log_ratio.dtype)


def explained_variance(value: Array, target: Array, mask: Array | None = None) -> Array:
    r"""Share of the target's variance that the value explains.

    .. math:: 1 - \frac{\mathrm{Var}(\text{target} - v)}{\mathrm{Var}(\text{target})}

    1 is a perfect critic, 0 one that knows the mean only, less than 0 worse than that.

    Args:
        value: predictions, any shape.
        target: value targets, same shape.
        mask: None, or 0/1 of the same shape.

    Returns:
        A scalar; NaN where the target is constant (nothing to explain).

    Raises:
        ShapeError: shapes differ. TypeError: not floating.

    Example:
        >>> import jax.numpy as jnp
        >>> t = jnp.array([0., 2.])
        >>> float(explained_variance(t, t)), float(explained_variance(0 * t, t))
        (1.0, 0.0)

    Reference: OpenAI baselines; Huang et al. 2022, detail 12. Variances are population ones (ddof 0).
    """
    floating("explained_variance", value=value, target=target)
    same_shape("explained_variance", value=value, target=target, mask=mask)

    def variance(x: Array) -> Array:
        x = x.astype(accumulator(x))
        return masked_mean(jnp.square(x - masked_mean(x, mask)), mask)

    total = variance(target)
    explained = 1 - variance(target - value) / jnp.where(total > 0, total, 1)
    return jnp.where(total > 0, explained, jnp.nan).astype(value.dtype)
