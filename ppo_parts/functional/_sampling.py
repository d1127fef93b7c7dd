"""Sampling of training data: shuffles, priorities, and the weights that correct for them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ._common import (
    Array,
    ShapeError,
    accumulator_dtype,
    check_floating,
    check_same_shape,
    checked_scalar,
    known_values,
    zero_masked,
)


def permutation(key: Array, size: int) -> Array:
    r"""Permute the integers below `size` randomly, on CPUs much faster than `jax.random.permutation`.

    This sorts words of 32 bits. The low :math:`b = \lceil \log_2 n \rceil` bits of a word are its position, the others
    are random. There are as many rounds as are needed for at least :math:`b + 10` random bits in total. Two elements
    that draw the same bits keep their order. For a given pair, this happens with probability below
    :math:`2^{-10} / n`, and for a given element below :math:`2^{-10}`; otherwise all orders are equally likely.
    (`jax.random.permutation` sorts 32 random bits per round together with the positions. XLA on CPUs takes about four
    times as long to sort these two arrays as to sort one.)

    Args:
        key: key of `jax.random`.
        size: n, at least 1.

    Returns:
        `[size]` int32.

    Raises:
        ValueError: `size` is not a whole number of at least 1.

    Example:
        >>> import jax
        >>> sorted(permutation(jax.random.key(0), 4).tolist())
        [0, 1, 2, 3]

    Reference: sorting by random keys is Knuth, The Art of Computer Programming 2, section 3.4.2.
    """
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
        raise ValueError(f"permutation: size must be a whole number of at least 1, got {size!r}")
    bits = max(1, int(size - 1).bit_length())
    if bits > 24:  # a word has too few random bits left
        return jax.random.permutation(key, size).astype(jnp.int32)
    position, low = jnp.arange(size, dtype=jnp.uint32), jnp.uint32(2**bits - 1)
    rounds = -(-(bits + 10) // (32 - bits))
    order = position
    for words in jax.random.bits(key, (rounds, size), jnp.uint32):
        order = order[jnp.sort(words & ~low | position) & low]
    return order.astype(jnp.int32)


def segment_priorities(
    advantage: Array, *, alpha: float | Array, eps: float | Array = 1e-6, mask: Array | None = None
) -> Array:
    r"""Compute the probability of each segment from a power of its summed absolute advantage. Gradients are stopped.

    .. math:: w_n = \left(\sum_t m_{tn} |A_{tn}|\right)^{\alpha}, \qquad
              P_n = \frac{w_n + \epsilon}{\sum_k (w_k + \epsilon)}

    `alpha=0` gives uniform probabilities. A segment whose steps are all masked has probability exactly 0. A sum that is
    not finite is treated as 0 (the learner reports non-finite advantages separately).

    Args:
        advantage: `[T, N]`; axis 0 is summed over.
        alpha: exponent, >= 0.
        eps: >= 0, added to every priority, so that every segment has a positive probability.
        mask: None, or 0/1 of the same shape; masked elements have no effect, whatever they contain.

    Returns:
        `[N]` probabilities that sum to 1 (all 0 if everything is masked). They are equal if all priorities are 0, as
        with `eps=0` and advantages of 0.

    Raises:
        ShapeError: `advantage` is not `[T, N]`, `mask` has another shape, or `alpha` or `eps` is not a single number.
            TypeError: `advantage` is not floating. ValueError: `alpha` or `eps` is out of its range.

    Example:
        >>> import jax.numpy as jnp
        >>> p = segment_priorities(jnp.array([[1., -2.], [0., 1.]]), alpha=1.)
        >>> [round(float(x), 3) for x in p]
        [0.25, 0.75]

    Reference: PufferLib 3.0; the exponent is that of Schaul et al. 2016, arXiv:1511.05952, eq. 1.
    """
    where = "segment_priorities"
    check_floating(where, advantage=advantage)
    check_same_shape(where, advantage=advantage, mask=mask)
    if jnp.ndim(advantage) != 2:
        raise ShapeError(f"{where}: advantage must be [T, N], got shape {jnp.shape(advantage)}")
    alpha, eps = checked_scalar(where, "alpha", alpha, 0), checked_scalar(where, "eps", eps, 0)
    (kept_advantage,) = zero_masked(where, mask, jax.lax.stop_gradient(advantage))
    total = jnp.sum(jnp.abs(kept_advantage), axis=0)
    total = jnp.where(jnp.isfinite(total), total, 0)
    # Divide by the largest total, so that no power overflows: by its root twice, because XLA may multiply by inverses.
    root = jnp.sqrt(jnp.maximum(jnp.max(total, initial=0), 1))
    priority = (total / root / root) ** alpha + eps / root**alpha / root**alpha
    priority = jnp.where(jnp.all(priority == 0), 1, priority)
    if mask is not None:
        priority = jnp.where(jnp.any(jnp.asarray(mask).astype(bool), axis=0), priority, 0)
    whole = jnp.sum(priority)
    return (priority / jnp.where(whole > 0, whole, 1)).astype(jnp.result_type(advantage))


def importance_weights(probabilities: Array, indices: Array, *, beta: float | Array, normalize: bool = False) -> Array:
    r"""Compute the weights that undo prioritized sampling. Gradients are stopped.

    .. math:: w_i = (N \cdot P_i)^{-\beta}, \qquad N = \#\{n : P_n > 0\}

    `beta=1` makes weighted means unbiased estimates of the mean over all segments; 0 applies no correction.

    Args:
        probabilities: `[N]`, the probabilities used for drawing (see `segment_priorities`).
        indices: `[M]` integers, the segments drawn.
        beta: exponent, in [0, 1].
        normalize: divide by the largest weight that any segment could have, so that weights are at most 1.

    Returns:
        `[M]` weights, in the dtype of `probabilities`.

    Raises:
        ShapeError: `probabilities` or `indices` do not have rank 1. TypeError: `indices` are not integers, or
            `probabilities` are not floating. ValueError: `beta` or a known index is out of its range (traced indices
            are not checked).

    Example:
        >>> import jax.numpy as jnp
        >>> importance_weights(jnp.array([.25, .75]), jnp.array([0]), beta=1.).tolist()
        [2.0]

    Reference: Schaul et al. 2016, arXiv:1511.05952, section 3.4.
    """
    check_floating("importance_weights", probabilities=probabilities)
    if not jnp.issubdtype(jnp.result_type(indices), jnp.integer):
        raise TypeError(f"importance_weights: indices must be integers, got {jnp.result_type(indices)}")
    for name, x in {"probabilities": probabilities, "indices": indices}.items():
        if jnp.ndim(x) != 1:
            raise ShapeError(f"importance_weights: {name} must have one axis, got shape {jnp.shape(x)}")
    beta = checked_scalar("importance_weights", "beta", beta, 0, 1)
    dtype = jnp.result_type(probabilities)
    probabilities = jax.lax.stop_gradient(jnp.asarray(probabilities)).astype(accumulator_dtype(probabilities))
    if (drawn := known_values(indices)) is not None:  # JAX would clamp or wrap indices out of range
        number = probabilities.shape[0]
        outside = drawn[(drawn < 0) | (drawn >= number)]
        if outside.size:
            raise ValueError(f"importance_weights: there are segments 0 to {number - 1}, but {outside[0]} was drawn")
    drawable = probabilities > 0
    scaled = jnp.sum(drawable) * probabilities
    weight = jnp.where(drawable, jnp.where(drawable, scaled, 1) ** -beta, 0)
    if normalize:
        largest = jnp.max(weight)
        weight = weight / jnp.where(largest > 0, largest, 1)
    return weight[jnp.asarray(indices)].astype(dtype)
