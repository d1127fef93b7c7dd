"""Losses per element that are added to a policy loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ._arguments import fit, public
from ._common import Array, ShapeError, zero_masked


@public(raw=True, apart="mask")
def bounds_loss(mean: Array, *, bound: float | Array = 1.1, mask: Array | None = None) -> Array:
    r"""Compute a penalty for means of actions outside a soft bound. Gradients flow to `mean`.

    .. math:: L_i = \sum_d \max(|\mu_{id}| - b, 0)^2

    Where the environment clips actions, means far outside have no effect on it and get no gradient from it. This loss
    keeps them close to the bounds. With b = 0 it penalizes the square of the mean.

    Args:
        mean: `[..., D]`, mean of the action, in a scale in which the bounds of actions are -1 and 1.
        bound: the soft bound b, >= 0.
        mask: None, or 0/1 `[...]`: loss and gradient are 0 for masked elements, whatever they contain.

    Returns:
        The loss per element, `[...]`, in the dtype of `mean`.

    Raises:
        ShapeError: shapes differ. TypeError: `mean` is not floating. ValueError: `bound` is out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> bounds_loss(jnp.array([[1., -3.], [0., 2.]]), bound=1.).tolist()
        [4.0, 1.0]

    Reference: rl_games (Makoviichuk and Makoviychuk), `bounds_loss_coef`, whose bound is 1.1.
    """
    (center,) = zero_masked("bounds_loss", _wide_mask("bounds_loss", mean, mask), mean)
    excess = jnp.maximum(jnp.abs(center) - fit("bounds_loss", "bound", bound, center.shape, center.dtype), 0)
    return jnp.sum(jnp.square(excess), axis=-1).astype(jnp.result_type(mean))


@public(raw=True, apart="mask")
def mirror_loss(mean: Array, mirrored: Array, *, mask: Array | None = None) -> Array:
    r"""Compute how far actions are from symmetric ones. Gradients flow to `mean`; `mirrored` is a constant.

    .. math:: L_i = \frac{1}{D} \sum_d (\mu_{id} - \tilde\mu_{id})^2

    `mean` is the mean of the action for a mirrored observation, and `mirrored` the mirrored mean for the observation
    itself. They are equal for a symmetric policy.

    Args:
        mean, mirrored: `[..., D]`, means of actions.
        mask: None, or 0/1 `[...]`: loss and gradient are 0 for masked elements, whatever they contain.

    Returns:
        The loss per element, `[...]`, in the dtype of `mean`.

    Raises:
        ShapeError: shapes differ. TypeError: a mean is not floating.

    Example:
        >>> import jax.numpy as jnp
        >>> mirror_loss(jnp.array([[1., -3.], [0., 2.]]), jnp.array([[1., -1.], [0., 2.]])).tolist()
        [2.0, 0.0]

    Reference: Yu et al. 2018, Learning Symmetric and Low-Energy Locomotion, arXiv:1801.08093; Mittal et al.
    2024, Symmetry Considerations for Learning Task Symmetric Robot Policies, arXiv:2403.04359, whose target is
    constant.
    """
    where = "mirror_loss"
    ours, target = zero_masked(where, _wide_mask(where, mean, mask), mean, mirrored)
    difference = ours - jax.lax.stop_gradient(target)
    return jnp.mean(jnp.square(difference), axis=-1).astype(jnp.result_type(mean))


@public(raw=True, apart="mask")
def smoothness_loss(mean: Array, other: Array, *, mask: Array | None = None) -> Array:
    r"""Compute the distance between the actions for two observations. Gradients flow to both.

    .. math:: L_i = \| \mu_i - \mu'_i \|_2

    Where they are closer than 1e-6, loss and gradient are 0. The temporal term of CAPS compares an observation with the
    one that followed, and the spatial term with a noisy copy of it.

    Args:
        mean, other: `[..., D]`, means of actions.
        mask: None, or 0/1 `[...]`: loss and gradient are 0 for masked elements, whatever they contain.

    Returns:
        The loss per element, `[...]`, in the units of the action and in the dtype of `mean`.

    Raises:
        ShapeError: shapes differ. TypeError: a mean is not floating.

    Example:
        >>> import jax.numpy as jnp
        >>> smoothness_loss(jnp.array([[3., 0.], [1., 2.]]), jnp.array([[0., 4.], [1., 2.]])).tolist()
        [5.0, 0.0]

    Reference: Mysore et al. 2021, Regularizing Action Policies for Smooth Control (CAPS), arXiv:2012.06644.
    """
    where = "smoothness_loss"
    ours, theirs = zero_masked(where, _wide_mask(where, mean, mask), mean, other)
    squares = jnp.sum(jnp.square(ours - theirs), axis=-1)
    apart = ~(squares <= 1e-12)  # or NaN; at 0, the gradient of the root is not finite
    return jnp.where(apart, jnp.sqrt(jnp.where(apart, squares, 1)), 0).astype(jnp.result_type(mean))


@public()
def self_imitation_value_loss(value: Array, target: Array, *, mask: Array | None = None) -> Array:
    r"""Compute half the squared error of values below their target. Gradients flow to `value`; `target` is a constant.

    .. math:: L_i = \frac{1}{2} (\text{target}_i - v_i)_+^2

    Here :math:`(x)_+ = \max(x, 0)`. This is the critic's half of self-imitation; `self_imitation_loss` is the policy's.
    Returns of good episodes are a lower bound of the value of the best policy, so values above them are left alone.

    Args:
        value: predicted value, any shape.
        target: return, same shape.
        mask: None, or 0/1 of the same shape: loss and gradient are 0 for masked elements, whatever they contain.

    Returns:
        The loss per element, same shape, in squared reward units and in the dtype of `value`.

    Raises:
        ShapeError: shapes differ. TypeError: an input is not floating.

    Example:
        >>> import jax.numpy as jnp
        >>> self_imitation_value_loss(jnp.array([1., 3.]), jnp.array([3., 1.])).tolist()
        [2.0, 0.0]

    Reference: Oh et al. 2018, Self-Imitation Learning, arXiv:1806.05635.
    """
    return 0.5 * jnp.square(jnp.maximum(target - value, 0))


def _wide_mask(where: str, mean: Array, mask: Array | None) -> Array | None:
    """Return the mask of elements `[...]` with the axis of actions, `[..., D]`; raise unless it fits the means."""
    if not jnp.ndim(mean):
        raise ShapeError(
            f"{where}: mean must be [..., D], one number per dimension of the action, got a single number: add an axis "
            "with mean[None]"
        )
    if mask is None:
        return None
    if jnp.shape(mask) != jnp.shape(mean)[:-1]:
        raise ShapeError(
            f"{where}: mask must have the shape of mean without its last axis, {jnp.shape(mean)[:-1]}, got "
            f"{jnp.shape(mask)}"
        )
    return jnp.broadcast_to(jnp.asarray(mask)[..., None], jnp.shape(mean))
