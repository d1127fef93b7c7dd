"""Losses per element: no function here reduces, so the caller chooses the weights and the reduction."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ._common import Array, check_floating, check_same_shape, checked_hyperparameter, zero_masked


def clipped_surrogate(
    log_ratio: Array,
    advantage: Array,
    *,
    clip_eps: float | Array,
    clip_eps_high: float | Array | None = None,
    dual_clip: float | Array | None = None,
    mask: Array | None = None,
) -> Array:
    r"""Compute PPO's clipped objective as a loss per element. Gradients flow to `log_ratio`; `advantage` is a constant.

    .. math:: L_i = -\min\left(r_i A_i,\ \mathrm{clip}(r_i, 1-\epsilon, 1+\epsilon_{high}) A_i\right),
              \qquad r_i = e^{\ell_i}

    With `dual_clip` c, elements with A < 0 are bounded as well: :math:`L_i \le -c A_i`, so that a very large ratio
    cannot dominate the batch. Without it the loss of such an element is :math:`-A_i e^{\ell_i}`, which is infinite (as
    is its gradient) where it overflows: in float32 from a log-ratio of 88. Everywhere else, finite inputs give finite
    losses and gradients.

    Args:
        log_ratio: l = log pi_current(a) - log pi_behavior(a), any shape, in nats.
        advantage: A, same shape.
        clip_eps: clip range below 1 (and above, unless `clip_eps_high` is given), > 0.
        clip_eps_high: clip range above 1 (DAPO's clip-higher); None: the same as `clip_eps`.
        dual_clip: None, or c > 1.
        mask: None, or 0/1 of the same shape: loss and gradient are 0 for masked elements, whatever they contain.

    Returns:
        The loss per element (to be minimized), same shape, in the dtype of `log_ratio`.

    Raises:
        ShapeError: shapes differ. TypeError: an input is not floating. ValueError: a hyperparameter is out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> ratio = jnp.array([1., 2., 2.])
        >>> [round(float(l), 4) for l in clipped_surrogate(jnp.log(ratio), jnp.array([1., 1., -1.]), clip_eps=.2)]
        [-1.0, -1.2, 2.0]

    Reference: Schulman et al. 2017, arXiv:1707.06347, eq. 7. Dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5.
    """
    where = "clipped_surrogate"
    logs, gains = policy_inputs(where, log_ratio, advantage, mask)
    low, high = clip_range(where, clip_eps, clip_eps_high, logs)
    limit = None
    if dual_clip is not None:
        limit = checked_hyperparameter(where, "dual_clip", dual_clip, logs.shape, 1, open_low=True, dtype=logs.dtype)
    # An infinite upper end is replaced by the largest finite number, so that an advantage of 0 has a loss of 0.
    most = jnp.minimum(1 + high, jnp.finfo(logs.dtype).max)
    return _surrogate(logs, gains, 1 - low, most, limit).astype(jnp.result_type(log_ratio))


@jax.custom_jvp
def _surrogate(log_ratio: Array, advantage: Array, low: Array, high: Array, limit: Array | None) -> Array:
    return -advantage * _bounded_ratio(jnp.exp(log_ratio), advantage, low, high, limit)


@_surrogate.defjvp
def _(primals: Any, tangents: Any) -> Any:
    """The slope is the loss itself, and 0 where a bound is active.

    JAX's own rule would multiply this 0 by the ratio, which may be infinite.
    """
    log_ratio, advantage, *bounds = primals
    ratio = jnp.exp(log_ratio)
    bounded = _bounded_ratio(ratio, advantage, *bounds)
    loss = _surrogate(*primals)
    slope = jnp.where((bounded < ratio) | (bounded > ratio), 0, loss)
    return loss, slope * tangents[0]


def _bounded_ratio(ratio: Array, advantage: Array, low: Array, high: Array, limit: Array | None) -> Array:
    """Clip the ratio: from below, and to `limit`, where the advantage is negative; otherwise from above.

    This is the minimum in the equation, in a form that never multiplies an advantage of 0 by an infinite ratio.
    """
    falling = jnp.maximum(ratio, low) if limit is None else jnp.minimum(jnp.maximum(ratio, low), limit)
    return jnp.where(advantage < 0, falling, jnp.minimum(ratio, high))


def value_loss(value: Array, target: Array, *, mask: Array | None = None) -> Array:
    r"""Compute half the squared error per element. Gradients flow to `value`; `target` is a constant.

    .. math:: L_i = \frac{1}{2}(v_i - \text{target}_i)^2

    Args:
        value: predicted value, any shape.
        target: value target, same shape.
        mask: None, or 0/1 of the same shape: loss and gradient are 0 for masked elements, whatever they contain.

    Returns:
        The loss per element, same shape, in squared reward units and in the dtype of `value`.

    Raises:
        ShapeError: shapes differ (`[N]` is never broadcast against `[N, 1]`). TypeError: an input is not floating.

    Example:
        >>> import jax.numpy as jnp
        >>> value_loss(jnp.array([3.]), jnp.array([1.])).tolist()
        [2.0]

    Reference: Schulman et al. 2017, arXiv:1707.06347, eq. 9 (without the factor 1/2, so double the coefficient).
    """
    check_floating("value_loss", value=value, target=target)
    check_same_shape("value_loss", value=value, target=target, mask=mask)
    v, aim = zero_masked("value_loss", mask, value, jax.lax.stop_gradient(target))
    return _half_square(v - aim).astype(jnp.result_type(value))


def clipped_value_loss(
    value: Array, old_value: Array, target: Array, *, clip_eps: float | Array, mask: Array | None = None
) -> Array:
    r"""Compute a value loss that does not reward moving far from the old prediction. Gradients flow only to `value`.

    .. math:: L_i = \frac{1}{2}\max\left((v_i - \text{target}_i)^2,\ (v^{clip}_i - \text{target}_i)^2\right),
              \qquad v^{clip}_i = v^{old}_i + \mathrm{clip}(v_i - v^{old}_i, -\epsilon, \epsilon)

    `old_value` and `target` are constants. The clip range is in reward units, unlike the surrogate's. This is PPO2's
    form, which takes the larger of the two errors; Stable-Baselines3 uses only the clipped prediction.

    Args:
        value: predicted value, any shape.
        old_value: the prediction to stay close to, same shape: from the rollout, or the latest one written back.
        target: value target, same shape.
        clip_eps: clip range, > 0, in reward units.
        mask: None, or 0/1 of the same shape: loss and gradient are 0 for masked elements, whatever they contain.

    Returns:
        The loss per element, same shape, in squared reward units and in the dtype of `value`.

    Raises:
        ShapeError: shapes differ. TypeError: an input is not floating. ValueError: `clip_eps` is out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> v, old, target = jnp.array([2.]), jnp.array([0.]), jnp.array([2.])
        >>> [round(float(l), 4) for l in clipped_value_loss(v, old, target, clip_eps=.5)]  # .5 * (.5 - 2)^2
        [1.125]

    Reference: OpenAI baselines' PPO2; Engstrom et al. 2020, arXiv:2005.12729, value function clipping.
    """
    where = "clipped_value_loss"
    check_floating(where, value=value, old_value=old_value, target=target)
    check_same_shape(where, value=value, old_value=old_value, target=target, mask=mask)
    v, old, aim = zero_masked(where, mask, value, *jax.lax.stop_gradient((old_value, target)))
    eps = checked_hyperparameter(where, "clip_eps", clip_eps, v.shape, 0, open_low=True, dtype=v.dtype)
    return _larger_error(v, old, aim, eps).astype(jnp.result_type(value))


@jax.custom_jvp
def _larger_error(value: Array, old_value: Array, target: Array, eps: Array) -> Array:
    clipped = old_value + jnp.clip(value - old_value, -eps, eps)
    return jnp.maximum(_half_square(value - target), _half_square(clipped - target))


@_larger_error.defjvp
def _(primals: Any, tangents: Any) -> Any:
    """The slope is the error, and 0 where the clipped prediction has the larger error; see `_surrogate`."""
    value, old_value, target, eps = primals
    loss, error = _larger_error(*primals), value - target
    outside = jnp.abs(value - old_value) > eps  # inside, the two errors are equal up to rounding
    slope = jnp.where(outside & (loss > _half_square(error)), 0, error)
    return loss, slope * tangents[0]


def policy_inputs(
    where: str, logs: Array, advantage: Array, mask: Array | None, name: str = "log_ratio"
) -> tuple[Array, Array]:
    """Check the inputs of a policy loss and return them in the accumulator dtype; the advantage is a constant."""
    check_floating(where, **{name: logs}, advantage=advantage)
    check_same_shape(where, **{name: logs}, advantage=advantage, mask=mask)
    logs, gains = zero_masked(where, mask, logs, jax.lax.stop_gradient(advantage))
    return logs, gains


def clip_range(where: str, clip_eps: Any, clip_eps_high: Any, like: Array) -> tuple[Array, Array]:
    """Return how far below and above 1 the ratio may move."""
    low = checked_hyperparameter(where, "clip_eps", clip_eps, like.shape, 0, open_low=True, dtype=like.dtype)
    if clip_eps_high is None:
        return low, low
    return low, checked_hyperparameter(
        where, "clip_eps_high", clip_eps_high, like.shape, 0, open_low=True, dtype=like.dtype
    )


def outside_clip_range(log_ratio: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """Return whether the ratio is below 1 - low, and whether it is above 1 + high."""
    moved = jnp.exp(log_ratio) - 1
    return moved < -low, moved > high


def _half_square(x: Array) -> Array:
    return 0.5 * jnp.square(x)
