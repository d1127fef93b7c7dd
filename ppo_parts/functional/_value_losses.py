"""Critic losses per element, and functions for critics that predict a distribution over values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._arguments import AnyFloats, Fixed, Floats, MeanAndScale, Positive, Single, Support, Wide, array_function
from ._common import Array, Number, accumulator_dtype, zero_masked
from ._errors import ShapeError


@array_function()
def value_loss(value: Floats, target: Fixed, *, mask: Array | None = None) -> Array:
    r"""Compute half the squared error per element. Gradients flow to `value`; `target` is a constant.

    .. math:: L_i = \frac{1}{2}(v_i - \text{target}_i)^2

    Args:
        value: predicted value, any shape; the loss has its shape and dtype, and is in squared reward units.
        target: value target, same shape (`[N]` is never broadcast against `[N, 1]`).
        mask: None, or 0/1 of the same shape.

    Example:
        >>> value_loss(jnp.array([3.]), jnp.array([1.])).tolist()
        [2.0]

    Reference: Schulman et al. 2017, arXiv:1707.06347, eq. 9 (without the factor 1/2, so double the coefficient).
    """
    return 0.5 * jnp.square(value - target)


@array_function()
def clipped_value_loss(
    value: Floats, old_value: Fixed, target: Fixed, *, clip_eps: Number, mask: Array | None = None
) -> Array:
    r"""Compute a value loss that does not favor large changes of the prediction. Gradients flow only to `value`.

    .. math:: L_i = \frac{1}{2}\max\left((v_i - \text{target}_i)^2,\ (v^{clip}_i - \text{target}_i)^2\right),
              \qquad v^{clip}_i = v^{old}_i + \mathrm{clip}(v_i - v^{old}_i, -\epsilon, \epsilon)

    This is PPO2's form, which takes the larger of the two errors; Stable-Baselines3 uses only the clipped prediction.

    Args:
        old_value: the prediction to stay close to, same shape, usually the value recorded in the rollout.
        clip_eps: clip range, > 0, in reward units.
        value, target, mask: as in `value_loss`, as is the result.

    Example:
        >>> v, old, target = jnp.array([2.]), jnp.array([0.]), jnp.array([2.])
        >>> [round(float(l), 4) for l in clipped_value_loss(v, old, target, clip_eps=.5)]  # .5 * (.5 - 2)^2
        [1.125]

    Reference: OpenAI baselines' PPO2; Engstrom et al. 2020, arXiv:2005.12729, value function clipping.
    """
    error, moved = value - target, value - old_value
    clipped = old_value + jnp.sign(moved) * clip_eps - target
    inside = jnp.abs(moved) <= clip_eps
    return 0.5 * jnp.square(jnp.where(inside | (jnp.abs(clipped) <= jnp.abs(error)), error, clipped))


@array_function()
def huber_value_loss(value: Floats, target: Fixed, *, delta: Positive = 1.0, mask: Array | None = None) -> Array:
    r"""Compute the Huber loss of the value per element. Gradients flow to `value`; `target` is a constant.

    .. math:: L_i = \begin{cases} \frac12 e_i^2 & |e_i| \le \delta \\ \delta(|e_i| - \frac12\delta) & |e_i| > \delta
              \end{cases}, \qquad e_i = v_i - \text{target}_i

    Args:
        delta: error at which the loss becomes linear, > 0, in reward units.
        value, target, mask: as in `value_loss`, as is the result.

    Example:
        >>> huber_value_loss(jnp.array([.5, 3.]), jnp.zeros(2), delta=1.).tolist()
        [0.125, 2.5]

    Reference: Huber 1964, doi:10.1214/aoms/1177703732.
    """
    return _huber(value - target, delta)


@array_function()
def quantile_value_loss(quantiles: Wide, target: Fixed, *, kappa: Single = 1.0, mask: Array | None = None) -> Array:
    r"""Compute the quantile Huber loss per element. Gradients flow to `quantiles`; `target` is a constant.

    .. math:: L_i = \frac1K \sum_k |\tau_k - [u_{ik} < 0]|\, \frac{H_\kappa(u_{ik})}{\kappa}, \qquad
              u_{ik} = \text{target}_i - q_{ik}, \quad \tau_k = \frac{k + 1/2}{K}

    H is the Huber loss. With `kappa` 0, this is the pinball loss, :math:`H_\kappa(u) / \kappa = |u|`.

    Args:
        quantiles: `[..., K]`, predicted quantiles of the return, for k = 0 to K - 1; the loss has their dtype.
        target: `[...]`, value target.
        kappa: error at which the loss becomes linear, >= 0, in reward units.
        mask: None, or 0/1 `[...]`.

    Example:
        >>> quantile_value_loss(jnp.array([[0., 0.]]), jnp.array([2.]), kappa=0.).tolist()  # .5 * (.25 + .75) * 2
        [1.0]

    Reference: Dabney et al. 2018, arXiv:1710.10044, eqs. 8 to 10, divided by kappa as in IQN, arXiv:1806.06923.
    """
    error = target[..., None] - quantiles
    tau = (jnp.arange(error.shape[-1], dtype=error.dtype) + 0.5) / error.shape[-1]
    size = jnp.where(kappa > 0, _huber(error, kappa) / jnp.where(kappa > 0, kappa, 1), jnp.abs(error))
    return jnp.mean(jnp.abs(jax.lax.broadcast_to_rank(tau, error.ndim) - (error < 0)) * size, axis=-1)


def _check_support(where: str, values: dict[str, Any]) -> None:
    if (size := np.shape(values["support"])) != (axes := jnp.shape(values["logits"]))[-1:]:
        raise ShapeError(
            f"{where}: the last axis of the logits and the support must have the same size, got logits {axes} and "
            f"support {size}"
        )


@array_function(also=_check_support)
def categorical_value_loss(
    logits: Wide, target: Fixed, *, support: Support, sigma: Single | None = None, mask: Array | None = None
) -> Array:
    r"""Compute the cross-entropy loss of a categorical critic. Gradients flow to `logits`; `target` is a constant.

    .. math:: L_i = -\sum_k p_{ik} \log \hat p_{ik}, \qquad \hat p_i = \mathrm{softmax}(\text{logits}_i)

    Without `sigma`, p divides the probability between the two atoms around the target, so that its mean is the target
    (two-hot). With `sigma`, p is the probability that a Gaussian assigns to bins (HL-Gauss),

    .. math:: p_k = \frac{z_{k+1} - y}{z_{k+1} - z_k}, \quad p_{k+1} = 1 - p_k \qquad \text{or} \qquad
              p_k \propto \Phi\left(\frac{b_{k+1} - y}{\sigma}\right) - \Phi\left(\frac{b_k - y}{\sigma}\right)

    The edges b of the bins are halfway between the atoms z, and the two outer bins are symmetric about their atoms.
    Targets beyond the support (with `sigma`, beyond its outer bins) are moved to its ends. The minimum of the
    loss is the entropy of p.

    Args:
        logits: `[..., K]`, floating; the loss `[...]`, in nats, has their dtype.
        target: y, `[...]`.
        support: `[K]`, the atoms z, increasing, in the units of the target; K >= 2.
        sigma: None, or the standard deviation of the Gaussian, > 0, in the units of the target; 0.75 bin widths in the
            paper.
        mask: None, or 0/1 `[...]`.

    Example:
        >>> loss = categorical_value_loss(jnp.zeros((1, 4)), jnp.array([.3]), support=[-1., 0., 1., 2.])
        >>> round(float(loss[0]), 4)  # log 4
        1.3863

    Reference: Farebrother et al. 2024, arXiv:2403.03950, section 3.1; Imani and White 2018, arXiv:1806.04613. Two-hot:
    Schrittwieser et al. 2020, arXiv:1911.08265, appendix F; Hafner et al. 2023, arXiv:2301.04104.
    """
    z = jnp.asarray(support, target.dtype)
    probs = two_hot(target, z) if sigma is None else hl_gauss(target, z, sigma)
    # An atom of probability 0 may have a logit of -inf.
    log_probs = jnp.where(probs > 0, jax.nn.log_softmax(logits), 0)
    return zero_masked(mask, -jnp.sum(probs * log_probs, axis=-1))[0]


def two_hot(target: Array, z: Array) -> Array:
    """Divide the probability between the two atoms around each target."""
    # `upper` is the share of the upper atom of each pair, 1 for pairs below the target and 0 for pairs above it.
    lower, gap = (jax.lax.broadcast_to_rank(x, target.ndim + 1) for x in (z[:-1], z[1:] - z[:-1]))
    upper = jnp.clip((target[..., None] - lower) / gap, 0, 1)
    one, nothing = jnp.ones_like(upper[..., :1]), jnp.zeros_like(upper[..., :1])
    return jnp.concatenate([one, upper], axis=-1) - jnp.concatenate([upper, nothing], axis=-1)


def hl_gauss(target: Array, z: Array, sigma: Any) -> Array:
    """Return the probability that a Gaussian around each target assigns to bins, whose centers are the atoms."""
    first, last = z[0] - (z[1] - z[0]) / 2, z[-1] + (z[-1] - z[-2]) / 2
    edges = jnp.concatenate([first[None], (z[1:] + z[:-1]) / 2, last[None]])
    distance = jax.lax.broadcast_to_rank(edges, target.ndim + 1) - jnp.clip(target, first, last)[..., None]
    below = jax.scipy.special.ndtr(distance / sigma)
    return jnp.diff(below) / (below[..., -1:] - below[..., :1])


@array_function(also=_check_support)
def categorical_value(logits: Wide, support: Support) -> Array:
    r"""Compute the expected value of a categorical critic, :math:`v = \sum_k \mathrm{softmax}(\text{logits})_k\, z_k`.

    Gradients flow to `logits`.

    Args:
        logits: `[..., K]`, floating; the value `[...]` has their dtype.
        support: `[K]`, the atoms z, increasing, in the units of the value.

    Example:
        >>> categorical_value(jnp.zeros((1, 3)), [0., 1., 5.]).tolist()
        [2.0]

    Reference: Bellemare et al. 2017, arXiv:1707.06887; Farebrother et al. 2024, arXiv:2403.03950.
    """
    atoms = jax.lax.broadcast_to_rank(jnp.asarray(support, logits.dtype), logits.ndim)
    return jnp.sum(jax.nn.softmax(logits) * atoms, axis=-1)


@array_function(raw=True)
def rescale_head(kernel: AnyFloats, bias: AnyFloats, old: MeanAndScale, new: MeanAndScale) -> tuple[Array, Array]:
    r"""Rescale the last layer of a critic so that :math:`\sigma n(s) + \mu` does not change. Gradients flow.

    .. math:: w \leftarrow \frac{\sigma}{\sigma'} w, \qquad b \leftarrow \frac{\sigma b + \mu - \mu'}{\sigma'}

    Args:
        kernel: w, any shape, such as `[n, 1]`.
        bias: b, any shape, such as `[1]`.
        old: the current mean and scale (standard deviation), one number each.
        new: the mean and the scale that replace them.

    Returns:
        The new kernel and bias, with the shapes and dtypes of the old ones.

    Example:
        >>> kernel, bias = rescale_head(jnp.ones((2, 1)), jnp.zeros(1), (0., 1.), (3., 2.))
        >>> kernel.ravel().tolist(), bias.tolist()
        ([0.5, 0.5], [-1.5])

    Reference: van Hasselt et al. 2016, PopArt, arXiv:1602.07714, proposition 1.
    """
    (mean, scale), (new_mean, new_scale) = old, new
    dtype = accumulator_dtype(kernel, bias)
    mean, scale, new_mean, new_scale = (jnp.asarray(x, dtype) for x in (mean, scale, new_mean, new_scale))
    moved = (scale * jnp.asarray(bias, dtype) + mean - new_mean) / new_scale
    scaled = scale / new_scale * jnp.asarray(kernel, dtype)
    return scaled.astype(jnp.result_type(kernel)), moved.astype(jnp.result_type(bias))


def _huber(error: Array, delta: Any) -> Array:
    inside = jnp.clip(error, -delta, delta)
    return inside * (error - 0.5 * inside)
