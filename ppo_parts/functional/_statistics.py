"""Means, standardization, and diagnostics: how far the policy has moved, and how well the critic predicts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ._arguments import Axes, Ddof, Fixed, Floats, KLEstimator, Single, array_function, check_axes
from ._common import Array, Number, accumulator_dtype, boolean_mask
from ._policy_losses import outside_clip_range


@array_function(raw=True, also=check_axes)
def masked_mean(x: Array, mask: Array | None = None, axis: Axes = None) -> Array:
    r"""Compute the mean over the elements where `mask` is 1. Gradients flow to `x`, but are 0 for masked elements.

    .. math:: \bar x = \frac{\sum_i m_i x_i}{\max(1, \sum_i m_i)}

    Args:
        x: any shape; the mean has its dtype (float32 for integers and booleans), and is NaN if x is empty and unmasked.
        mask: None (all ones), or 0/1 of the shape of `x`. If all elements are masked, the mean is 0.
        axis: axis or axes to reduce; None reduces all.

    Example:
        >>> float(masked_mean(jnp.array([1., 3., jnp.nan]), jnp.array([1, 1, 0])))
        2.0
        >>> float(masked_mean(jnp.array([1, 2]), jnp.array([1, 1])))
        1.5
    """
    x, dtype = jnp.asarray(x), accumulator_dtype(x)
    if mask is None:
        return jnp.mean(x, axis=axis, dtype=None if jnp.issubdtype(x.dtype, jnp.floating) else dtype)
    keep = boolean_mask(mask, x)
    total = jnp.sum(jnp.where(keep, x.astype(dtype), 0), axis=axis)
    mean = total / jnp.maximum(jnp.sum(keep, axis=axis, dtype=dtype), 1)
    return mean.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else mean


@array_function(also=check_axes)
def advantage_normalize(
    advantage: Floats, *, axis: Axes = None, ddof: Ddof = 0, eps: Single = 1e-8, mask: Array | None = None
) -> Array:
    r"""Subtract the mean and divide by the standard deviation. Gradients also flow through both statistics.

    .. math:: \hat A = \frac{A - \mu}{\sigma + \epsilon}, \qquad
              \sigma^2 = \frac{1}{\max(1,\, n - \text{ddof})} \sum_i m_i (A_i - \mu)^2, \quad n = \sum_i m_i

    Implementations in PyTorch (CleanRL, PufferLib, Stable-Baselines3) use `ddof=1`; implementations in JAX use 0. Equal
    elements, or a single one, give 0. If squares overflow, in float32 above about 1e19, the result is NaN.

    Args:
        advantage: any shape, floating; the result has its shape and dtype.
        axis: axis or axes over which the statistics are computed; None means all.
        ddof: number subtracted from the count in the variance, 0 or 1.
        eps: number added to the standard deviation, in the units of the advantage.
        mask: None, or 0/1 of the same shape.

    Example:
        >>> advantage_normalize(jnp.array([1., 3.])).tolist()  # mean 2, standard deviation 1
        [-1.0, 1.0]
        >>> advantage_normalize(jnp.array([5.]), ddof=1).tolist()
        [0.0]

    Reference: Andrychowicz et al. 2021, arXiv:2006.05990, the section on normalization and clipping.
    """
    x, keep = advantage, boolean_mask(mask, advantage).astype(advantage.dtype)
    count = jnp.sum(keep, axis=axis, keepdims=True)
    number = jnp.maximum(count, 1)
    offset = (x - jnp.sum(x, axis=axis, keepdims=True) / number) * keep
    # This is the rounding error of the mean. If the elements are equal, only this error remains, and dividing it by its
    # own size would give numbers near 1.
    error = jnp.sum(offset, axis=axis, keepdims=True) / number
    square = jnp.sum(jnp.square(offset), axis=axis, keepdims=True)
    spread = square - count * jnp.square(error)
    equal = spread <= 1e-3 * square
    scale = jnp.sqrt(jnp.where(equal, 1, spread) / jnp.maximum(count - ddof, 1)) + eps
    unscaled = jnp.where((square == jnp.inf) & (keep > 0), jnp.nan, 0)  # 0 would mean equal elements
    return jnp.where(equal, unscaled, (offset - error) * keep / scale)


@array_function()
def approx_kl(log_ratio: Floats, *, estimator: KLEstimator = "k3", mask: Array | None = None) -> Array:
    r"""Estimate KL(behavior ‖ current) per element, from the behavior policy's actions. Gradients flow to `log_ratio`.

    .. math:: k_1 = -\ell, \qquad k_2 = \tfrac{1}{2}\ell^2, \qquad k_3 = (e^{\ell} - 1) - \ell

    k1 is unbiased and noisy (its mean can be negative), k2 is biased and never negative, k3 is unbiased and never
    negative. "k3+" has the value of k3 and the gradient of k2. k3 and its gradient are infinite where :math:`e^{\ell}`
    overflows, in float32 for log-ratios above 88; k2 is infinite where :math:`\ell^2` overflows.

    As losses, k1 and k3 have unbiased gradients if the actions come from the behavior policy. If they come from the
    current policy, negate the log-ratio to estimate KL(current ‖ behavior); then only k2 and "k3+" have its gradient.

    Args:
        log_ratio: log pi_current(a) - log pi_behavior(a), any shape, in nats; the estimate is also in nats.
        estimator: "k1", "k2", "k3" or "k3+".
        mask: None, or 0/1 of the same shape.

    Example:
        >>> l = jnp.log(jnp.array([2.]))
        >>> [round(float(approx_kl(l, estimator=k)[0]), 3) for k in ("k1", "k2", "k3", "k3+")]
        [-0.693, 0.24, 0.307, 0.307]

    Reference: Schulman 2020, Approximating KL Divergence, http://joschu.net/blog/kl-approx.html. "k3+" is from verl.
    """
    if estimator == "k1":
        return -log_ratio
    k2 = 0.5 * jnp.square(log_ratio)
    if estimator == "k2":
        return k2
    k3 = jnp.expm1(log_ratio) - log_ratio
    if estimator == "k3":
        return k3
    slope = jnp.where(jnp.isfinite(k2), k2, 0)  # avoids inf - inf, which is NaN
    return jax.lax.stop_gradient(k3) + (slope - jax.lax.stop_gradient(slope))


@array_function()
def clip_fraction(
    log_ratio: Fixed, *, clip_eps: Number, clip_eps_high: Number | None = None, mask: Array | None = None
) -> Array:
    r"""Return 1.0 for each element whose ratio has left the clip range, else 0.0. There is no gradient.

    .. math:: [\, r_i < 1-\epsilon \ \text{or}\ r_i > 1+\epsilon_{high} \,], \qquad r_i = e^{\ell_i}

    Args:
        log_ratio, clip_eps, clip_eps_high, mask: as in `clipped_surrogate`.

    Example:
        >>> clip_fraction(jnp.log(jnp.array([1., 1.3, .7])), clip_eps=.2).tolist()
        [0.0, 1.0, 1.0]

    Reference: Huang et al. 2022, The 37 Implementation Details of PPO, detail 12.
    """
    below, above = outside_clip_range(log_ratio, clip_eps, clip_eps_high)
    return (below | above).astype(log_ratio.dtype)


@array_function()
def explained_variance(value: Fixed, target: Fixed, *, mask: Array | None = None) -> Array:
    r"""Compute the share of the target's variance that the value explains. Gradients are stopped.

    .. math:: 1 - \frac{\mathrm{Var}(\text{target} - v)}{\mathrm{Var}(\text{target})}

    A critic that predicts only the mean explains 0. If the target is empty or constant up to rounding, it is NaN.

    Args:
        value: predictions, any shape.
        target: value targets, same shape.
        mask: None, or 0/1 of the same shape.

    Example:
        >>> t = jnp.array([0., 2.])
        >>> float(explained_variance(t, t)), float(explained_variance(0 * t, t))
        (1.0, 0.0)

    Reference: OpenAI baselines; Huang et al. 2022, detail 12. Variances are population variances (ddof 0).
    """
    reference = unmasked_element(target, mask)

    def variance(x: Array) -> Array:
        return masked_mean(jnp.square(x - masked_mean(x, mask)), mask)

    # Subtract one of the targets first. The mean of equal numbers has a rounding error; the mean of their differences,
    # which are all 0, has none.
    return share_explained(variance(target - reference), variance(target - value), reference)


def unmasked_element(x: Array, mask: Array | None) -> Array:
    """Return one of the unmasked elements, or -inf if there is none."""
    if mask is None:
        first = jnp.atleast_1d(x)[:1]  # only the first step, because a maximum over all steps costs a pass
        return jnp.max(first, initial=-jnp.inf)
    return jnp.max(x, where=boolean_mask(mask, x), initial=-jnp.inf)


def share_explained(total: Array, error: Array, target: Array) -> Array:
    """Return the share of the variance `total` that is not `error`; NaN if `total` is only rounding error."""
    varies = jnp.sqrt(total) > 4 * jnp.finfo(total.dtype).eps * jnp.abs(target)
    return jnp.where(varies, 1 - error / jnp.where(varies, total, 1), jnp.nan)
