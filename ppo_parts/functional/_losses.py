"""Losses, per element: nothing here reduces, so masks and weights stay the caller's."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ._common import Array, floating, same_shape


def clipped_surrogate(
    log_ratio: Array,
    advantage: Array,
    *,
    clip_eps: float | Array,
    clip_eps_high: float | Array | None = None,
    dual_clip: float | Array | None = None,
) -> Array:
    r"""PPO's clipped objective, as a loss per element.

    .. math:: L_i = -\min\left(r_i A_i,\ \mathrm{clip}(r_i, 1-\epsilon, 1+\epsilon_{high}) A_i\right),
              \qquad r_i = e^{\ell_i}

    With `dual_clip` c, elements with A < 0 are bounded as well: :math:`L_i \le -c A_i`, so that a ratio which ran
    away cannot dominate the batch.

    Args:
        log_ratio: log pi_current(a) - log pi_behaviour(a), any shape, in nats. This is what is differentiated.
        advantage: same shape; treat it as a constant.
        clip_eps: clip range below 1 (and above, unless `clip_eps_high` is given), > 0.
        clip_eps_high: clip range above 1; None: `clip_eps`. (DAPO's clip-higher.)
        dual_clip: None, or c > 1.

    Returns:
        The loss per element (to be minimised), same shape.

    Raises:
        ShapeError: shapes differ. TypeError: not floating.

    Example:
        >>> import jax.numpy as jnp
        >>> ratio = jnp.array([1., 2., 2.])
        >>> [round(float(l), 4) for l in clipped_surrogate(jnp.log(ratio), jnp.array([1., 1., -1.]), clip_eps=.2)]
        [-1.0, -1.2, 2.0]

    Reference: Schulman et al. 2017, arXiv:1707.06347, eq. 7. Dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5.
    """
    floating("clipped_surrogate", log_ratio=log_ratio, advantage=advantage)
    same_shape("clipped_surrogate", log_ratio=log_ratio, advantage=advantage)
    ratio = jnp.exp(log_ratio)
    # The clipped loss is the larger only where the ratio is out of range and has no gradient; inside, both are equal.
    # Said like this it is faster to differentiate than a maximum of both, which shares gradients out where they tie.
    constant = jax.lax.stop_gradient(ratio)
    clipped = -advantage * jnp.clip(constant, 1 - clip_eps, 1 + (clip_eps if clip_eps_high is None else clip_eps_high))
    loss = -advantage * ratio
    loss = jnp.where(loss < clipped, clipped, loss)
    if dual_clip is not None:
        loss = jnp.where(advantage < 0, jnp.minimum(loss, -dual_clip * advantage), loss)
    return loss.astype(log_ratio.dtype)


def value_loss(value: Array, target: Array) -> Array:
    r"""Squared error per element, with the half: :math:`L_i = \frac{1}{2}(v_i - \text{target}_i)^2`.

    Args:
        value: predicted value, any shape; this is what is differentiated.
        target: value target, same shape; treat it as a constant.

    Returns:
        The loss per element, same shape, in squared reward units.

    Raises:
        ShapeError: shapes differ (a `[N]` against a `[N, 1]` never broadcasts). TypeError: not floating.

    Example:
        >>> import jax.numpy as jnp
        >>> value_loss(jnp.array([3.]), jnp.array([1.])).tolist()
        [2.0]

    Reference: Schulman et al. 2017, arXiv:1707.06347, eq. 9 (there without the half: double the coefficient).
    """
    floating("value_loss", value=value, target=target)
    same_shape("value_loss", value=value, target=target)
    return (0.5 * jnp.square(value - target)).astype(value.dtype)


def clipped_value_loss(value: Array, old_value: Array, target: Array, *, clip_eps: float | Array) -> Array:
    r"""Value loss that gives no gradient for moving further than `clip_eps` from the old prediction.

    .. math:: L_i = \frac{1}{2}\max\left((v_i - \text{target}_i)^2,\ (v^{clip}_i - \text{target}_i)^2\right),
              \qquad v^{clip}_i = v^{old}_i + \mathrm{clip}(v_i - v^{old}_i, -\epsilon, \epsilon)

    The clip range is in reward units, unlike the surrogate's. This is PPO2's form (the larger of both errors), not
    Stable-Baselines3's (the clipped prediction alone).

    Args:
        value: predicted value, any shape; this is what is differentiated.
        old_value: the prediction to stay close to, same shape: the rollout's, or the latest one written back.
        target: value target, same shape.
        clip_eps: clip range, > 0, in reward units.

    Returns:
        The loss per element, same shape, in squared reward units.

    Raises:
        ShapeError: shapes differ. TypeError: not floating.

    Example:
        >>> import jax.numpy as jnp
        >>> v, old, target = jnp.array([2.]), jnp.array([0.]), jnp.array([2.])
        >>> [round(float(l), 4) for l in clipped_value_loss(v, old, target, clip_eps=.5)]  # .5 * (.5 - 2)^2
        [1.125]

    Reference: OpenAI baselines' PPO2; Engstrom et al. 2020, arXiv:2005.12729, section 3.
    """
    floating("clipped_value_loss", value=value, old_value=old_value, target=target)
    same_shape("clipped_value_loss", value=value, old_value=old_value, target=target)
    clipped = (old_value + jnp.clip(value - old_value, -clip_eps, clip_eps)).astype(value.dtype)
    return jnp.maximum(value_loss(value, target), value_loss(clipped, target))
