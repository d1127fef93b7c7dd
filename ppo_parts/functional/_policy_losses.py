r"""Policy losses per element, most of which are functions of the log-ratio and the advantage.

The ratio :math:`r = e^{\ell}` overflows in float32 for log-ratios above 88. Then an advantage of 0, a bound or a
difference would turn infinity into NaN. Branches that are not taken therefore see a log-ratio of 0. Docstrings say
where a loss is infinite; otherwise finite inputs give finite losses and gradients.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ._arguments import CorrectionMode, Fixed, Floats, Positive, Wide, WideFixed, array_function, check_order, fit
from ._common import Array, Number, boolean_mask, zero_masked


@array_function()
def clipped_surrogate(
    log_ratio: Floats,
    advantage: Fixed,
    *,
    clip_eps: Number,
    clip_eps_high: Number | None = None,
    dual_clip: Number | None = None,
    mask: Array | None = None,
) -> Array:
    r"""Compute PPO's clipped objective as a loss per element. Gradients flow to `log_ratio`; `advantage` is a constant.

    .. math:: L_i = -\min\left(r_i A_i,\ \mathrm{clip}(r_i, 1-\epsilon, 1+\epsilon_{high}) A_i\right),
              \qquad r_i = e^{\ell_i}

    With `dual_clip` c, the losses of elements with A < 0 are bounded as well, :math:`L_i \le -c A_i`. Without it, the
    loss of such an element is infinite where its ratio overflows.

    Args:
        log_ratio: l = log pi_current(a) - log pi_behavior(a), any shape, in nats; the loss, which is minimized, has its
            shape and dtype.
        advantage: A, same shape.
        clip_eps, clip_eps_high: clip range below and above 1 (DAPO's clip-higher), > 0; None means `clip_eps`.
        dual_clip: None, or c > 1.
        mask: None, or 0/1 of the same shape.

    Example:
        >>> ratio = jnp.array([1., 2., 2.])
        >>> [round(float(l), 4) for l in clipped_surrogate(jnp.log(ratio), jnp.array([1., 1., -1.]), clip_eps=.2)]
        [-1.0, -1.2, 2.0]

    Reference: Schulman et al. 2017, arXiv:1707.06347, eq. 7. Dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5.
    """
    ratio, (low, high) = jnp.exp(log_ratio), clip_bounds(clip_eps, clip_eps_high)
    # This form of the minimum in the equation never multiplies an advantage of 0 by an infinite ratio.
    constant = jax.lax.stop_gradient(ratio)
    falling = jnp.maximum(constant, low) if dual_clip is None else jnp.clip(constant, low, dual_clip)
    bounded = jnp.where(advantage < 0, falling, jnp.minimum(constant, high))
    # Where the ratio is bounded, its slope is 0 and must not be multiplied by a ratio that may be infinite.
    free = (bounded == ratio) | jnp.isnan(ratio)
    # Products inside the choice are faster than one outside, which XLA on a CPU would move into a later sum.
    return jnp.where(free, -advantage * _ratio(log_ratio, free), -advantage * bounded)


def clip_bounds(clip_eps: Any, clip_eps_high: Any) -> tuple[Array, Array]:
    """Return the bounds of the ratio; the upper bound is finite, so that an advantage of 0 has a loss of 0."""
    high = clip_eps if clip_eps_high is None else clip_eps_high
    return 1 - clip_eps, jnp.minimum(1 + high, jnp.finfo(high.dtype).max)


def outside_clip_range(log_ratio: Array, clip_eps: Any, clip_eps_high: Any) -> tuple[Array, Array]:
    """Return whether the ratio is below its lower bound, and whether it is above its upper bound."""
    moved = jnp.exp(log_ratio) - 1
    return moved < -clip_eps, moved > (clip_eps if clip_eps_high is None else clip_eps_high)


@array_function()
def importance_weighted_surrogate(log_ratio: Floats, advantage: Fixed, *, mask: Array | None = None) -> Array:
    r"""Compute the unclipped surrogate as a loss per element. Gradients flow to `log_ratio`; `advantage` is a constant.

    .. math:: L_i = -r_i A_i

    Nothing bounds the step, so combine it with a penalty (`kl_penalty`), or with a single epoch. Where the ratio
    overflows, the loss and its gradient are infinite unless A is 0. Arguments and result are as in `clipped_surrogate`.

    Example:
        >>> log_ratio, advantage = jnp.log(jnp.array([2., .5])), jnp.array([1., -1.])
        >>> [round(float(l), 4) for l in importance_weighted_surrogate(log_ratio, advantage)]
        [-2.0, 0.5]

    Reference: Schulman et al. 2017, arXiv:1707.06347, eq. 6.
    """
    return -advantage * _ratio(log_ratio, advantage != 0)


@array_function()
def simple_policy_optimization(
    log_ratio: Floats, advantage: Fixed, *, clip_eps: Number, mask: Array | None = None
) -> Array:
    r"""Compute the SPO loss, a parabola in the ratio. Gradients flow to `log_ratio`; `advantage` is a constant.

    .. math:: L_i = -r_i A_i + \frac{|A_i|}{2\epsilon} (r_i - 1)^2

    The minimum is at a ratio of :math:`1 + \epsilon` for A > 0 and :math:`1 - \epsilon` for A < 0, and unlike a clip,
    the gradient pulls elements beyond the minimum back to it. Where the ratio's square overflows, the loss is infinite
    unless A is 0.

    Args:
        clip_eps: distance of the minimum from a ratio of 1, > 0.
        log_ratio, advantage, mask: as in `clipped_surrogate`, as is the result.

    Example:
        >>> ratio, advantage = jnp.array([1., 2., 2.]), jnp.array([1., 1., -1.])
        >>> [round(float(l), 4) for l in simple_policy_optimization(jnp.log(ratio), advantage, clip_eps=.5)]
        [-1.0, -1.0, 3.0]

    Reference: Xie et al. 2024, Simple Policy Optimization, arXiv:2401.16025.
    """
    # The loss is written as a product, because r^2 - r would be NaN for an infinite ratio.
    sign, moved = jnp.sign(advantage), _ratio(log_ratio, advantage != 0) - 1
    return jnp.abs(advantage) * (moved * (moved / (2 * clip_eps) - sign) - sign)


@array_function()
def discovered_policy_optimization(
    log_ratio: Floats, advantage: Fixed, *, alpha: Positive = 2.0, beta: Positive = 0.6, mask: Array | None = None
) -> Array:
    r"""Compute the DPO loss, whose drift was meta-learned. Gradients flow to `log_ratio`; `advantage` is constant.

    .. math:: L_i &= -r_i A_i + D_i \\
              D_i &= \mathrm{relu}\left((r_i - 1) A_i - \alpha \tanh\frac{(r_i - 1) A_i}{\alpha}\right)
              \quad\text{where } A_i \ge 0 \\
              D_i &= \mathrm{relu}\left(\ell_i A_i - \beta \tanh\frac{\ell_i A_i}{\beta}\right)
              \quad\text{where } A_i < 0

    This DPO is not direct preference optimization. For A >= 0 the loss is at least :math:`-A - \alpha`; for A < 0 it is
    infinite where the ratio overflows. The scale of the advantage matters, so normalize it.

    Args:
        alpha, beta: scales of the drift for A >= 0 and for A < 0, > 0.
        log_ratio, advantage, mask: as in `clipped_surrogate`, as is the result.

    Example:
        >>> ratio, advantage = jnp.array([1., 3., 3., .5]), jnp.array([1., 1., -1., 1.])
        >>> [round(float(l), 4) for l in discovered_policy_optimization(jnp.log(ratio), advantage)]
        [-1.0, -2.5232, 3.0, -0.5]

    Reference: Lu et al. 2022, Discovered Policy Optimisation, arXiv:2210.05639.
    """
    alpha, beta = (jnp.minimum(x, math.sqrt(jnp.finfo(log_ratio.dtype).max)) for x in (alpha, beta))  # may be inf
    # x - tanh(x) has the sign of x, so each drift is active only on one side of a ratio of 1. There, the term r A of
    # the first drift cancels -r A.
    risen, fallen = (advantage > 0) & (log_ratio > 0), (advantage < 0) & (log_ratio < 0)
    largest = math.log(jnp.finfo(log_ratio.dtype).max) - 1  # tanh reaches its limit long before this
    rise = advantage * (_ratio(jnp.minimum(log_ratio, largest), risen) - 1)
    risen_loss = -advantage - alpha * jnp.tanh(rise / alpha)
    fall = advantage * jnp.where(fallen, log_ratio, 0)
    drift = fall - beta * jnp.tanh(fall / beta)
    plain = -advantage * _ratio(log_ratio, (advantage != 0) & ~risen)
    return jnp.where(risen, risen_loss, plain + drift)


@array_function()
def rollback_surrogate(
    log_ratio: Floats,
    advantage: Fixed,
    *,
    clip_eps: Number,
    slope: Number,
    clip_eps_high: Number | None = None,
    mask: Array | None = None,
) -> Array:
    r"""Compute PPO-RB's loss, whose slope changes sign at the clip. Gradients flow to `log_ratio`, not to `advantage`.

    .. math:: L_i = -\min(r_i A_i, F(r_i) A_i)

    where F(r) = r inside the clip range, and outside it, with the nearer bound :math:`b = 1 - \epsilon` or
    :math:`1 + \epsilon_{high}`,

    .. math:: F(r) = -\alpha r + (1 + \alpha) b

    An element that has left the clip range in the direction of its advantage is pulled back with :math:`\alpha` times
    the force that moved it there. Where the ratio overflows, the loss and its gradient are infinite unless A is 0.

    Args:
        slope: alpha, the strength with which elements are pulled back, > 0.
        log_ratio, advantage, clip_eps, clip_eps_high, mask: as in `clipped_surrogate`, as is the result.

    Example:
        >>> ratio, advantage = jnp.array([1., 2., 2.]), jnp.array([1., 1., -1.])  # -.5 * 2 + 1.5 * 1.2 = .8
        >>> [round(float(l), 4) for l in rollback_surrogate(jnp.log(ratio), advantage, clip_eps=.2, slope=.5)]
        [-1.0, -0.8, 2.0]

    Reference: Wang et al. 2019, Truly Proximal Policy Optimization, arXiv:1903.07940, PPO-RB.
    """
    ratio = _ratio(log_ratio, advantage != 0)
    bound = jnp.where(advantage < 0, *clip_bounds(clip_eps, clip_eps_high))
    outside = jnp.where(advantage < 0, ratio < bound, ratio > bound)
    return -advantage * jnp.where(outside, (1 + slope) * bound - slope * ratio, ratio)


@array_function()
def mirror_descent_surrogate(
    log_ratio: Floats, advantage: Fixed, *, coef: Positive, mask: Array | None = None
) -> Array:
    r"""Compute the on-policy MDPO loss. Gradients flow to `log_ratio`; `advantage` is a constant.

    .. math:: L_i = -r_i A_i + \beta (r_i \ell_i - r_i + 1)

    The second term is an unbiased, nonnegative estimate of KL(current ‖ behavior) from actions of the behavior policy;
    PPO's penalty uses the opposite direction. An element moves until its log-ratio is :math:`A_i / \beta`. Where
    :math:`r_i \ell_i` overflows, the loss is infinite, and its gradient is infinite or NaN.

    Args:
        coef: weight beta of the divergence, the inverse of the step size, > 0.
        log_ratio, advantage, mask: as in `clipped_surrogate`, as is the result.

    Example:
        >>> ratio = jnp.array([1., 2.])  # -2 + .5 * (2 log 2 - 2 + 1)
        >>> [round(float(l), 4) for l in mirror_descent_surrogate(jnp.log(ratio), jnp.array([1., 1.]), coef=.5)]
        [-1.0, -1.8069]

    Reference: Tomar et al. 2020, Mirror Descent Policy Optimization, arXiv:2005.09814, on-policy MDPO.
    """
    log_ratio = jnp.maximum(log_ratio, -1e4)  # 0 * inf would be NaN
    return jnp.exp(log_ratio) * (coef * (log_ratio - 1) - advantage) + coef


@array_function(raw=True, also=lambda where, values: check_order(where, values, "low", "high"))
def importance_sampling_weight(
    log_ratio: Floats, *, high: Number, low: Number = 0.0, mode: CorrectionMode = "truncate", mask: Array | None = None
) -> Array:
    r"""Compute a bounded importance weight per element. Gradients are stopped.

    .. math:: w_i = \mathrm{clip}(e^{\ell_i}, low, high) \quad\text{("truncate")}, \qquad
              w_i = e^{\ell_i} \, [\, low \le e^{\ell_i} \le high \,] \quad\text{("mask")}

    Multiply losses or advantages by this weight if the policy that sampled the actions is not the behavior policy in
    the ratio of the loss, for example because an inference engine rounds differently from the trainer.

    Args:
        log_ratio: l = log pi(a) - log pi_sampler(a), any shape, in nats. The weight has its shape and dtype, and is
            finite unless the log-ratio is NaN.
        high, low: largest and smallest weight, > 0 and >= 0.
        mode: "truncate", which bounds the variance, or "mask", which drops the elements outside the bounds.
        mask: None, or 0/1 of the same shape. Masked elements have a weight of 0.

    Example:
        >>> log_ratio = jnp.log(jnp.array([.5, 1., 4.]))
        >>> [importance_sampling_weight(log_ratio, mode=mode, high=2.).tolist() for mode in ("truncate", "mask")]
        [[0.5, 1.0, 2.0], [0.5, 1.0, 0.0]]

    Reference: Ionides 2008, Truncated Importance Sampling, Journal of Computational and Graphical Statistics 17(2).
    """
    where, dtype = "importance_sampling_weight", jnp.result_type(log_ratio)  # the weight must be finite in this dtype
    (logs,) = zero_masked(mask, jax.lax.stop_gradient(log_ratio))
    most, least = (fit(where, name, x, logs.shape, logs.dtype) for name, x in (("high", high), ("low", low)))
    ratio = jnp.minimum(jnp.exp(logs), jnp.asarray(jnp.finfo(dtype).max, logs.dtype))
    clipped = jnp.clip(ratio, least, most)
    weight = clipped if mode == "truncate" else jnp.where((clipped < ratio) | (clipped > ratio), 0, clipped)  # or NaN
    return jnp.where(boolean_mask(mask, weight), weight, 0).astype(dtype)


@array_function()
def bounds_loss(mean: Wide, *, bound: Number = 1.1, mask: Array | None = None) -> Array:
    r"""Compute a penalty for action means outside a soft bound. Gradients flow to `mean`.

    .. math:: L_i = \sum_d \max(|\mu_{id}| - b, 0)^2

    If the environment clips actions, means far outside its bounds get no useful gradient; this loss keeps them close.

    Args:
        mean: `[..., D]`, mean of the action, scaled so that the action bounds are -1 and 1; the loss, `[...]`, has its
            dtype.
        bound: the soft bound b, >= 0.
        mask: None, or 0/1 `[...]`.

    Example:
        >>> bounds_loss(jnp.array([[1., -3.], [0., 2.]]), bound=1.).tolist()
        [4.0, 1.0]

    Reference: rl_games (Makoviichuk and Makoviychuk), `bounds_loss_coef`, whose bound is 1.1.
    """
    return jnp.sum(jnp.square(jnp.maximum(jnp.abs(mean) - bound, 0)), axis=-1)


@array_function()
def mirror_loss(mean: Wide, mirrored: WideFixed, *, mask: Array | None = None) -> Array:
    r"""Compute how far action means are from symmetric ones. Gradients flow to `mean`; `mirrored` is a constant.

    .. math:: L_i = \frac{1}{D} \sum_d (\mu_{id} - \tilde\mu_{id})^2

    Args:
        mean: `[..., D]`, mean of the action for a mirrored observation.
        mirrored: `[..., D]`, the mirrored mean for the observation itself, equal to `mean` if the policy is symmetric.
        mask: as in `bounds_loss`, as is the result.

    Example:
        >>> mirror_loss(jnp.array([[1., -3.], [0., 2.]]), jnp.array([[1., -1.], [0., 2.]])).tolist()
        [2.0, 0.0]

    Reference: Yu et al. 2018, arXiv:1801.08093; Mittal et al. 2024, arXiv:2403.04359, whose target is constant; rsl_rl.
    """
    return jnp.mean(jnp.square(mean - mirrored), axis=-1)


@array_function()
def smoothness_loss(mean: Wide, other: Wide, *, mask: Array | None = None) -> Array:
    r"""Compute the distance between the actions for two observations. Gradients flow to both.

    .. math:: L_i = \| \mu_i - \mu'_i \|_2

    Where the distance is below 1e-6, the loss and its gradient are 0. CAPS compares an observation with the next one,
    and with a noisy copy.

    Args:
        mean, other: `[..., D]`, means of the actions.
        mask: as in `bounds_loss`, as is the result, which is in the units of the action.

    Example:
        >>> smoothness_loss(jnp.array([[3., 0.], [1., 2.]]), jnp.array([[0., 4.], [1., 2.]])).tolist()
        [5.0, 0.0]

    Reference: Mysore et al. 2021, Regularizing Action Policies for Smooth Control (CAPS), arXiv:2012.06644.
    """
    squares = jnp.sum(jnp.square(mean - other), axis=-1)
    apart = ~(squares <= 1e-12)  # true for NaN; at 0, the gradient of the square root is not finite
    return jnp.where(apart, jnp.sqrt(jnp.where(apart, squares, 1)), 0)


@jax.custom_jvp
def _ratio(logs: Array, needed: Array) -> Array:
    """Return the ratio where it is needed, and 1 elsewhere, because 0 times an infinite ratio would be NaN.

    The ratio is its own derivative, so that XLA computes one exponential for all uses of `logs`. Without this rule,
    the loss and its gradient take twice as long.
    """
    return jnp.where(needed, jnp.exp(logs), 1)


@_ratio.defjvp
def _differentiate_ratio(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    ratio = _ratio(*primals)
    return ratio, jnp.where(primals[1], ratio, 0) * tangents[0]
