"""Prioritized sampling of segments: priorities, draws, and the weights that correct for them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._arguments import Fixed, Indices, Key, Single, Size, array_function, check_below
from ._common import Array, accumulator_dtype, boolean_mask, known_values
from ._errors import UserValueError


@array_function(axes={"advantage": "[T, N]"})
def segment_priorities(advantage: Fixed, *, alpha: Single, eps: Single = 1e-6, mask: Array | None = None) -> Array:
    r"""Compute the probability of each segment from a power of its summed absolute advantage. Gradients are stopped.

    .. math:: w_n = \left(\sum_t m_{tn} |A_{tn}|\right)^{\alpha}, \qquad
              P_n = \frac{w_n + \epsilon}{\sum_k (w_k + \epsilon)}

    If all priorities are 0, the probabilities are uniform. A segment whose steps are all masked has probability 0; if
    this holds for all segments, the probabilities sum to 0 instead of 1. A sum that is not finite counts as 0.

    Args:
        advantage: `[T, N]`, floating; the probabilities `[N]` have its dtype.
        alpha: exponent, >= 0.
        eps: number added to every priority, >= 0, so that every segment has a positive probability.
        mask: None, or 0/1 of the same shape.

    Example:
        >>> p = segment_priorities(jnp.array([[1., -2.], [0., 1.]]), alpha=1.)
        >>> [round(float(x), 3) for x in p]
        [0.25, 0.75]

    Reference: PufferLib 3.0; the exponent is from Schaul et al. 2016, arXiv:1511.05952, eq. 1.
    """
    total = jnp.sum(jnp.abs(advantage), axis=0)
    total = jnp.where(jnp.isfinite(total), total, 0)
    tiny = jnp.finfo(total.dtype).tiny
    largest = jnp.max(total, initial=jnp.where(eps > 0, 1, tiny))  # of all sums, so that no power over- or underflows
    priority = (total / largest) ** alpha + jnp.where(eps > 0, eps / largest**alpha, 0)
    priority = jnp.where(jnp.all(priority == 0), 1, priority)
    if mask is not None:
        priority = jnp.where(jnp.any(boolean_mask(mask, advantage), axis=0), priority, 0)
    whole = jnp.sum(priority)
    return priority / jnp.where(whole > 0, whole, 1)


def _check_draw(where: str, values: dict[str, Any]) -> None:
    """Raise if the probabilities are known not to be a distribution, or if too many are drawn."""
    number, known = jnp.shape(values["probabilities"])[0], known_values(values["probabilities"])
    if known is not None:
        rounding = 1e-3 if jnp.finfo(known.dtype).bits > 16 else 0.05
        total = known.astype(np.float64).sum()  # 0 if everything is masked
        if not ((known >= 0).all() and (abs(total - 1) < rounding or total == 0)):
            remedy = "; divide them by their sum" if (known >= 0).all() and np.isfinite(total) else ""
            raise UserValueError(
                f"{where}: probabilities must be at least 0 and sum to 1, got a sum of {known.sum()} and a minimum of "
                f"{known.min()}{remedy}"
            )
    if "indices" in values:
        check_below(where, "indices", values["indices"], number)
    elif (size := values["size"]) > number:
        what = f"an integer in [1, {number}], the number of segments"
        raise UserValueError(f"must be {what}, got {size}", where=where, argument="size")


@array_function(raw=True, axes={"probabilities": "[N]"}, also=_check_draw)
def sample_without_replacement(key: Key, probabilities: Fixed, size: Size) -> Array:
    r"""Draw distinct segments one after another, in proportion to their probabilities. Gradients are stopped.

    The function returns the segments with the largest keys :math:`\log P_n + G_n`, where G is standard Gumbel noise.

    Args:
        key: key of `jax.random`.
        probabilities: `[N]`, as in `importance_weights`. Segments with probability 0 are drawn last, by index.
        size: number of segments to draw, M, at most N.

    Returns:
        The segments in the order in which they are drawn, `[M]` int32.

    Example:
        >>> sorted(sample_without_replacement(jax.random.key(0), jnp.array([.7, .2, .1, 0.]), 3).tolist())
        [0, 1, 2]

    Reference: Kool et al. 2019, Stochastic Beams and Where to Find Them, arXiv:1903.06059, section 2.
    """
    probabilities = jax.lax.stop_gradient(probabilities).astype(accumulator_dtype(probabilities))
    keys = jnp.log(probabilities) - jnp.log(_small_exponential(key, probabilities))
    return jax.lax.top_k(keys, size)[1]


def _small_exponential(key: Array, like: Array) -> Array:
    """Draw exponential variates that are accurate near 0, where JAX's own are multiples of 2^-23."""
    high, low = jax.random.bits(key, (2, *like.shape), jnp.uint32).astype(like.dtype)
    uniform = (high + low * 2.0**-32) * 2.0**-32
    return -jnp.log1p(-jnp.minimum(uniform, 1 - jnp.finfo(like.dtype).epsneg))


@array_function(axes={"probabilities": "[N]", "indices": "[M]"}, also=_check_draw)
def importance_weights(probabilities: Fixed, indices: Indices, *, beta: Single) -> Array:
    r"""Compute the weights that undo prioritized sampling. Gradients are stopped.

    .. math:: w_i = (N \cdot P_i)^{-\beta}, \qquad N = \#\{n : P_n > 0\}

    With `beta=1`, a weighted mean is an unbiased estimate of the mean over all segments if segments are drawn with
    replacement. With `beta=0`, nothing is corrected.

    Args:
        probabilities: `[N]`, the probabilities used for drawing (see `segment_priorities`), which sum to 1, or to 0 if
            everything is masked; the weights `[M]` have their dtype.
        indices: `[M]` integers, the segments drawn. They are not checked if they are traced.
        beta: exponent, in [0, 1].

    Example:
        >>> importance_weights(jnp.array([.25, .75]), jnp.array([0]), beta=1.).tolist()
        [2.0]

    Reference: Schaul et al. 2016, arXiv:1511.05952, section 3.4.
    """
    drawable = probabilities != 0  # NaN counts as drawable and makes the weights NaN
    scaled = jnp.where(drawable, jnp.sum(drawable) * probabilities, 1)
    return jnp.where(drawable, scaled**-beta, 0)[indices]
