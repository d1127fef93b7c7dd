"""Losses per element: no function here reduces, so the caller chooses the weights and the reduction."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ._arguments import public
from ._common import Array


@public()
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
        log_ratio: l = log pi_current(a) - log pi_behavior(a), any shape, in nats; the loss, to be minimized, has its
            shape and dtype.
        advantage: A, same shape.
        clip_eps: clip range below 1 (and above, unless `clip_eps_high` is given), > 0.
        clip_eps_high: clip range above 1 (DAPO's clip-higher); None: the same as `clip_eps`.
        dual_clip: None, or c > 1.
        mask: None, or 0/1 of the same shape: loss and gradient are 0 for masked elements, whatever they contain.

    Raises:
        ShapeError: shapes differ. TypeError: an input is not floating. ValueError: a hyperparameter is out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> ratio = jnp.array([1., 2., 2.])
        >>> [round(float(l), 4) for l in clipped_surrogate(jnp.log(ratio), jnp.array([1., 1., -1.]), clip_eps=.2)]
        [-1.0, -1.2, 2.0]

    Reference: Schulman et al. 2017, arXiv:1707.06347, eq. 7. Dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5.
    """
    return _surrogate(log_ratio, advantage, *clip_bounds(clip_eps, clip_eps_high), dual_clip)


@jax.custom_jvp
def _surrogate(log_ratio: Array, advantage: Array, low: Array, high: Array, limit: Array | None) -> Array:
    return -advantage * _bounded_ratio(jnp.exp(log_ratio), advantage, low, high, limit)


def _surrogate_jvp(primals: Any, tangents: Any) -> Any:
    """The slope is the loss itself, or minus the advantage for the bound that is active.

    JAX's own rule would multiply the 0 of a bounded element by the ratio, which may be infinite.
    """
    log_ratio, advantage, *bounds = primals
    ratio = jnp.exp(log_ratio)
    bounded = _bounded_ratio(ratio, advantage, *bounds)
    loss = _surrogate(*primals)
    slope = jnp.where((bounded < ratio) | (bounded > ratio), 0, loss)
    moved = _moved(lambda *bounds: _bounded_ratio(ratio, advantage, *bounds), bounds, tangents[2:])
    return loss, slope * as_array(tangents[0]) + (0 if moved is None else -advantage * moved)


_surrogate.defjvp(_surrogate_jvp, symbolic_zeros=True)


def as_array(tangent: Any) -> Array:
    """Return a tangent as an array, where it may be a symbolic 0."""
    return jnp.zeros(tangent.shape, tangent.dtype) if isinstance(tangent, SymbolicZero) else tangent


def _moved(function: Any, hyperparameters: Any, tangents: Any) -> Array | None:
    """Return how the function moves with its hyperparameters; None if they are constants, as nearly always."""
    if all(isinstance(x, SymbolicZero) for x in jax.tree.leaves(tangents)):
        return None
    return jax.jvp(function, tuple(hyperparameters), tuple(jax.tree.map(as_array, tangents)))[1]


def _bounded_ratio(ratio: Array, advantage: Array, low: Array, high: Array, limit: Array | None) -> Array:
    """Clip the ratio: from below, and to `limit`, where the advantage is negative; otherwise from above.

    This is the minimum in the equation, in a form that never multiplies an advantage of 0 by an infinite ratio.
    """
    falling = jnp.maximum(ratio, low) if limit is None else jnp.minimum(jnp.maximum(ratio, low), limit)
    return jnp.where(advantage < 0, falling, jnp.minimum(ratio, high))


@public()
def value_loss(value: Array, target: Array, *, mask: Array | None = None) -> Array:
    r"""Compute half the squared error per element. Gradients flow to `value`; `target` is a constant.

    .. math:: L_i = \frac{1}{2}(v_i - \text{target}_i)^2

    Args:
        value: predicted value, any shape; the loss has its shape and dtype, and squared reward units.
        target: value target, same shape.
        mask: None, or 0/1 of the same shape: loss and gradient are 0 for masked elements, whatever they contain.

    Raises:
        ShapeError: shapes differ (`[N]` is never broadcast against `[N, 1]`). TypeError: an input is not floating.

    Example:
        >>> import jax.numpy as jnp
        >>> value_loss(jnp.array([3.]), jnp.array([1.])).tolist()
        [2.0]

    Reference: Schulman et al. 2017, arXiv:1707.06347, eq. 9 (without the factor 1/2, so double the coefficient).
    """
    return _half_square(value - target)


@public()
def clipped_value_loss(
    value: Array, old_value: Array, target: Array, *, clip_eps: float | Array, mask: Array | None = None
) -> Array:
    r"""Compute a value loss that does not reward moving far from the old prediction. Gradients flow only to `value`.

    .. math:: L_i = \frac{1}{2}\max\left((v_i - \text{target}_i)^2,\ (v^{clip}_i - \text{target}_i)^2\right),
              \qquad v^{clip}_i = v^{old}_i + \mathrm{clip}(v_i - v^{old}_i, -\epsilon, \epsilon)

    `old_value` and `target` are constants. The clip range is in reward units, unlike the surrogate's. This is PPO2's
    form, which takes the larger of the two errors; Stable-Baselines3 uses only the clipped prediction.

    Args:
        old_value: the prediction to stay close to, same shape: from the rollout, or the latest one written back.
        clip_eps: clip range, > 0, in reward units.
        value, target, mask: as in `value_loss`; so are the result and the other errors.

    Raises:
        ValueError: `clip_eps` is out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> v, old, target = jnp.array([2.]), jnp.array([0.]), jnp.array([2.])
        >>> [round(float(l), 4) for l in clipped_value_loss(v, old, target, clip_eps=.5)]  # .5 * (.5 - 2)^2
        [1.125]

    Reference: OpenAI baselines' PPO2; Engstrom et al. 2020, arXiv:2005.12729, value function clipping.
    """
    return _larger_error(value, old_value, target, clip_eps)


@jax.custom_jvp
def _larger_error(value: Array, old_value: Array, target: Array, eps: Array) -> Array:
    clipped = _clipped_value(value, old_value, eps)
    return jnp.maximum(_half_square(value - target), _half_square(clipped - target))


def _larger_error_jvp(primals: Any, tangents: Any) -> Any:
    """The slope is the error, or that of the clipped prediction where that is larger; see `_surrogate_jvp`."""
    value, old_value, target, eps = primals
    loss, error = _larger_error(*primals), value - target
    outside = jnp.abs(value - old_value) > eps  # inside, the two errors are equal up to rounding
    clipped = outside & (loss > _half_square(error))
    tangent = jnp.where(clipped, 0, error) * as_array(tangents[0])
    far = _moved(lambda eps: jnp.sign(value - old_value) * eps, (eps,), tangents[3:])
    if far is not None:
        tangent += jnp.where(clipped, _clipped_value(value, old_value, eps) - target, 0) * far
    return loss, tangent


_larger_error.defjvp(_larger_error_jvp, symbolic_zeros=True)


def _clipped_value(value: Array, old_value: Array, eps: Array) -> Array:
    return old_value + jnp.clip(value - old_value, -eps, eps)


def clip_bounds(clip_eps: Any, clip_eps_high: Any) -> tuple[Array, Array]:
    """Return the bounds of the ratio.

    An infinite upper one is replaced by the largest finite number, so that an advantage of 0 has a loss of 0.
    """
    high = clip_eps if clip_eps_high is None else clip_eps_high
    return 1 - clip_eps, jnp.minimum(1 + high, jnp.finfo(high.dtype).max)


def outside_clip_range(log_ratio: Array, clip_eps: Any, clip_eps_high: Any) -> tuple[Array, Array]:
    """Return whether the ratio is below its lower bound, and whether it is above its upper one."""
    moved = jnp.exp(log_ratio) - 1
    return moved < -clip_eps, moved > (clip_eps if clip_eps_high is None else clip_eps_high)


def _half_square(x: Array) -> Array:
    return 0.5 * jnp.square(x)
