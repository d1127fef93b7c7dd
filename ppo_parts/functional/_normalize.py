"""Standardization of advantages."""

from __future__ import annotations

import jax.numpy as jnp

from ._arguments import FLOATS, public
from ._common import Array, kept


@public(advantage=FLOATS)
def advantage_normalize(
    advantage: Array,
    *,
    axis: int | tuple[int, ...] | None = None,
    ddof: int = 0,
    eps: float | Array = 1e-8,
    mask: Array | None = None,
) -> Array:
    r"""Subtract the mean and divide by the standard deviation. Gradients flow, also through both statistics.

    .. math:: \hat A = \frac{A - \mu}{\sigma + \epsilon}, \qquad
              \sigma^2 = \frac{1}{\max(1,\, n - \text{ddof})} \sum_i m_i (A_i - \mu)^2, \quad n = \sum_i m_i

    Implementations differ here. Those in PyTorch (CleanRL, PufferLib, Stable-Baselines3) use `ddof=1`; those in JAX, 0.
    jaxagents standardizes over the trajectories of the minibatch (axis 1 in the layout `[T, M, ...]` used here),
    separately for each time step and agent.

    A group of equal elements, or of one, gives 0, not NaN. One whose squares overflow, in float32 from about 1e19,
    gives NaN.

    Args:
        advantage: any shape, floating; the result has its shape and dtype.
        axis: axis or axes over which the statistics are taken; None: all.
        ddof: number subtracted from the count in the variance, 0 (population) or 1 (sample).
        eps: added to the standard deviation, in the units of the advantage.
        mask: None, or 0/1 of the same shape; masked elements do not count, and are 0 in the result.

    Raises:
        ShapeError: `mask` has another shape, or `eps` is not a single number. TypeError: `advantage` is not floating.
        ValueError: `eps` < 0, `ddof` is not 0 or 1, or `axis` does not exist.

    Example:
        >>> import jax.numpy as jnp
        >>> advantage_normalize(jnp.array([1., 3.])).tolist()  # mean 2, standard deviation 1
        [-1.0, 1.0]
        >>> advantage_normalize(jnp.array([5.]), ddof=1).tolist()
        [0.0]

    Reference: Andrychowicz et al. 2021, arXiv:2006.05990, the section on normalization and clipping.
    """
    x, keep = advantage, kept(mask, advantage).astype(advantage.dtype)
    count = jnp.sum(keep, axis=axis, keepdims=True)
    number = jnp.maximum(count, 1)
    offset = (x - jnp.sum(x, axis=axis, keepdims=True) / number) * keep
    # The rounding error of the mean. If the elements are equal, it is all that is left of them, and dividing it by its
    # own size would give numbers of about 1.
    error = jnp.sum(offset, axis=axis, keepdims=True) / number
    square = jnp.sum(jnp.square(offset), axis=axis, keepdims=True)
    spread = square - count * jnp.square(error)
    equal = spread <= 1e-3 * square
    scale = jnp.sqrt(jnp.where(equal, 1, spread) / jnp.maximum(count - ddof, 1)) + eps
    unscaled = jnp.where((square == jnp.inf) & (keep > 0), jnp.nan, 0)  # 0 would look like equal elements
    return jnp.where(equal, unscaled, (offset - error) * keep / scale)
