"""Policy losses per element, functions of log-ratio and advantage: alternatives to the clipped surrogate.

A ratio may overflow, and then an advantage of 0, a bound or a difference would turn infinity into NaN. So each function
computes every branch only where it is taken: elsewhere the log-ratio is replaced by 0 first.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from ._arguments import POSITIVE, public
from ._common import Array


@public()
def importance_weighted_surrogate(log_ratio: Array, advantage: Array, *, mask: Array | None = None) -> Array:
    r"""Compute the unclipped surrogate as a loss per element. Gradients flow to `log_ratio`; `advantage` is a constant.

    .. math:: L_i = -r_i A_i, \qquad r_i = e^{\ell_i}

    Nothing bounds the step, so combine it with a penalty (`kl_penalty`), or with a single epoch. Where
    :math:`e^{\ell}` overflows (in float32 from a log-ratio of 88), loss and gradient are infinite unless A is 0.

    Args:
        log_ratio, advantage, mask: as in `clipped_surrogate`; so are the result and the errors.

    Example:
        >>> import jax.numpy as jnp
        >>> log_ratio, advantage = jnp.log(jnp.array([2., .5])), jnp.array([1., -1.])
        >>> [round(float(l), 4) for l in importance_weighted_surrogate(log_ratio, advantage)]
        [-2.0, 0.5]

    Reference: Schulman et al. 2017, arXiv:1707.06347, eq. 6.
    """
    return -advantage * _ratio(log_ratio, advantage != 0)


@public()
def simple_policy_optimization(
    log_ratio: Array, advantage: Array, *, clip_eps: float | Array, mask: Array | None = None
) -> Array:
    r"""Compute the loss of SPO, a parabola in the ratio. Gradients flow to `log_ratio`; `advantage` is a constant.

    .. math:: L_i = -r_i A_i + \frac{|A_i|}{2\epsilon} (r_i - 1)^2, \qquad r_i = e^{\ell_i}

    The minimum is at a ratio of :math:`1 + \epsilon` for A > 0 and :math:`1 - \epsilon` for A < 0, and unlike with a
    clip, the gradient pulls elements beyond it back. The loss grows with the square of the ratio: in float32 it is
    infinite from a log-ratio of about 44. Otherwise finite inputs give finite losses and gradients.

    Args:
        clip_eps: distance of the minimum from a ratio of 1, > 0.
        log_ratio, advantage, mask: as in `clipped_surrogate`; so are the result and the errors.

    Example:
        >>> import jax.numpy as jnp
        >>> ratio, advantage = jnp.array([1., 2., 2.]), jnp.array([1., 1., -1.])
        >>> [round(float(l), 4) for l in simple_policy_optimization(jnp.log(ratio), advantage, clip_eps=.5)]
        [-1.0, -1.0, 3.0]

    Reference: Xie et al. 2024, Simple Policy Optimization, arXiv:2401.16025.
    """
    # As a product, because r^2 - r of an infinite ratio would be NaN.
    sign, moved = jnp.sign(advantage), _ratio(log_ratio, advantage != 0) - 1
    return jnp.abs(advantage) * (moved * (moved / (2 * clip_eps) - sign) - sign)


@public(alpha=POSITIVE, beta=POSITIVE)
def discovered_policy_optimization(
    log_ratio: Array,
    advantage: Array,
    *,
    alpha: float | Array = 2.0,
    beta: float | Array = 0.6,
    mask: Array | None = None,
) -> Array:
    r"""Compute the loss of DPO, a drift found by meta-learning. Gradients flow to `log_ratio`; `advantage` is constant.

    .. math:: L_i &= -r_i A_i + D_i, \qquad r_i = e^{\ell_i} \\
              D_i &= \mathrm{relu}\left((r_i - 1) A_i - \alpha \tanh\frac{(r_i - 1) A_i}{\alpha}\right)
              \quad\text{where } A_i \ge 0 \\
              D_i &= \mathrm{relu}\left(\ell_i A_i - \beta \tanh\frac{\ell_i A_i}{\beta}\right)
              \quad\text{where } A_i < 0

    This is Discovered Policy Optimization; it has nothing to do with direct preference optimization. For A >= 0 the
    loss is at least :math:`-A - \alpha`. For A < 0 it is infinite where :math:`e^{\ell}` overflows (in float32 from a
    log-ratio of 88). Otherwise finite inputs give finite losses and gradients.

    Args:
        log_ratio: l = log pi_current(a) - log pi_behavior(a), any shape, in nats.
        alpha: scale of the drift for A >= 0, > 0: the drift matters where (r - 1) A is about as large.
        beta: scale of the drift for A < 0, > 0: the drift matters where l A is about as large.
        log_ratio, advantage, mask: as in `clipped_surrogate`; so are the result and the errors. The scale of the
            advantage matters, so normalize it.

    Example:
        >>> import jax.numpy as jnp
        >>> ratio, advantage = jnp.array([1., 3., 3., .5]), jnp.array([1., 1., -1., 1.])
        >>> [round(float(l), 4) for l in discovered_policy_optimization(jnp.log(ratio), advantage)]
        [-1.0, -2.5232, 3.0, -0.5]

    Reference: Lu et al. 2022, Discovered Policy Optimisation, arXiv:2210.05639.
    """
    # x - tanh(x) has the sign of x, so each drift is active on one side of a ratio of 1. There, -r A cancels with the
    # r A in the first drift.
    risen, fallen = (advantage > 0) & (log_ratio > 0), (advantage < 0) & (log_ratio < 0)
    rise = advantage * (_bounded_ratio(log_ratio, risen) - 1)
    risen_loss = -advantage - alpha * jnp.tanh(rise / alpha)
    fall = advantage * jnp.where(fallen, log_ratio, 0)
    drift = fall - beta * jnp.tanh(fall / beta)
    plain = -advantage * _ratio(log_ratio, (advantage != 0) & ~risen)
    return jnp.where(risen, risen_loss, plain + drift)


@public()
def rollback_surrogate(
    log_ratio: Array,
    advantage: Array,
    *,
    clip_eps: float | Array,
    slope: float | Array,
    clip_eps_high: float | Array | None = None,
    mask: Array | None = None,
) -> Array:
    r"""Compute PPO-RB's loss, whose slope changes sign at the clip. Gradients flow to `log_ratio`, not to `advantage`.

    .. math:: L_i = -\min(r_i A_i, F(r_i) A_i), \qquad r_i = e^{\ell_i}

    where F(r) = r inside the clip range, and outside it, with the nearer bound :math:`b = 1 - \epsilon` or
    :math:`1 + \epsilon_{high}`,

    .. math:: F(r) = -\alpha r + (1 + \alpha) b

    An element that has left the clip range in the direction of its advantage is pulled back, with :math:`\alpha` times
    the force that moved it there; as :math:`\alpha` approaches 0, this becomes `clipped_surrogate`. Where
    :math:`e^{\ell}` overflows (in float32 from a log-ratio of 88), loss and gradient are infinite unless A is 0.

    Args:
        clip_eps: clip range below 1 (and above, unless `clip_eps_high` is given), > 0.
        slope: strength alpha of the pull back, > 0.
        clip_eps_high: clip range above 1; None: the same as `clip_eps`.
        log_ratio, advantage, mask: as in `clipped_surrogate`; so are the result and the errors.

    Example:
        >>> import jax.numpy as jnp
        >>> ratio, advantage = jnp.array([1., 2., 2.]), jnp.array([1., 1., -1.])  # -.5 * 2 + 1.5 * 1.2 = .8
        >>> [round(float(l), 4) for l in rollback_surrogate(jnp.log(ratio), advantage, clip_eps=.2, slope=.5)]
        [-1.0, -0.8, 2.0]

    Reference: Wang et al. 2019, Truly Proximal Policy Optimization, arXiv:1903.07940, PPO-RB.
    """
    ratio = _ratio(log_ratio, advantage != 0)
    high = clip_eps if clip_eps_high is None else clip_eps_high
    bound = jnp.where(advantage < 0, 1 - clip_eps, 1 + high)
    outside = jnp.where(advantage < 0, ratio < bound, ratio > bound)
    return -advantage * jnp.where(outside, (1 + slope) * bound - slope * ratio, ratio)


@public(coef=POSITIVE)
def mirror_descent_surrogate(
    log_ratio: Array, advantage: Array, *, coef: float | Array, mask: Array | None = None
) -> Array:
    r"""Compute the loss of on-policy MDPO. Gradients flow to `log_ratio`; `advantage` is a constant.

    .. math:: L_i = -r_i A_i + \beta (r_i \ell_i - r_i + 1), \qquad r_i = e^{\ell_i}

    The second term is an unbiased estimate, never negative, of KL(current ‖ behavior) from actions of the behavior
    policy. This is the direction opposite to that of PPO's penalty. The slope is :math:`-r_i (A_i - \beta \ell_i)`, so
    an element moves until its log-ratio is :math:`A_i / \beta`. Where :math:`r_i \ell_i` overflows (in float32 from a
    log-ratio of about 84), the loss is infinite, and the gradient infinite or NaN.

    Args:
        coef: weight beta of the divergence, the inverse of the step size, > 0.
        log_ratio, advantage, mask: as in `clipped_surrogate`; so are the result and the errors.

    Example:
        >>> import jax.numpy as jnp
        >>> ratio = jnp.array([1., 2.])  # -2 + .5 * (2 log 2 - 2 + 1)
        >>> [round(float(l), 4) for l in mirror_descent_surrogate(jnp.log(ratio), jnp.array([1., 1.]), coef=.5)]
        [-1.0, -1.8069]

    Reference: Tomar et al. 2020, Mirror Descent Policy Optimization, arXiv:2005.09814, on-policy MDPO.
    """
    return jnp.exp(log_ratio) * (coef * (log_ratio - 1) - advantage) + coef


@public()
def self_imitation_loss(log_prob: Array, advantage: Array, *, mask: Array | None = None) -> Array:
    r"""Compute the policy loss of self-imitation per element. Gradients flow to `log_prob`; `advantage` is a constant.

    .. math:: L_i = -\log\pi(a_i | s_i)\, (A_i)_+, \qquad A_i = R_i - V(s_i)

    Only actions that were better than expected are imitated: :math:`(A)_+ = \max(A, 0)`. A log-ratio in place of the
    log-probability changes the loss by a constant, and not its gradient, so that `policy_loss(self_imitation_loss)`
    works as well.

    Args:
        log_prob: log pi_current(a), any shape, in nats.
        advantage: return minus value, same shape.
        mask: as in `clipped_surrogate`; so are the result and the errors.

    Example:
        >>> import jax.numpy as jnp
        >>> self_imitation_loss(jnp.array([-2., -2.]), jnp.array([3., -3.])).tolist()
        [6.0, 0.0]

    Reference: Oh et al. 2018, Self-Imitation Learning, arXiv:1806.05635.
    """
    return -log_prob * jnp.maximum(advantage, 0)


def _ratio(logs: Array, needed: Array) -> Array:
    """Return the ratio where it is needed, and 1 elsewhere, where 0 times an infinite one would be NaN."""
    return jnp.exp(jnp.where(needed, logs, 0))


def _bounded_ratio(logs: Array, needed: Array) -> Array:
    """Return the ratio like `_ratio`, but never infinite, for functions that reach their limit long before."""
    largest = math.log(jnp.finfo(logs.dtype).max) - 1  # the exponential of the logarithm itself may round to infinity
    return jnp.exp(jnp.where(needed, jnp.minimum(logs, largest), 0))
