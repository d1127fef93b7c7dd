"""Losses per element that are added to a policy loss."""

from __future__ import annotations

import jax.numpy as jnp

from ._arguments import public
from ._common import Array


@public(wide="mean")
def bounds_loss(mean: Array, *, bound: float | Array = 1.1, mask: Array | None = None) -> Array:
    r"""Compute a penalty for means of actions outside a soft bound. Gradients flow to `mean`.

    .. math:: L_i = \sum_d \max(|\mu_{id}| - b, 0)^2

    Where the environment clips actions, means far outside have no effect on it and get no gradient from it. This loss
    keeps them close to the bounds. With b = 0 it penalizes the square of the mean.

    Args:
        mean: `[..., D]`, mean of the action, in a scale in which the bounds of actions are -1 and 1; the loss, `[...]`,
            has its dtype.
        bound: the soft bound b, >= 0.
        mask: None, or 0/1 `[...]`: loss and gradient are 0 for masked elements, whatever they contain.

    Raises:
        ShapeError: shapes differ. TypeError: `mean` is not floating. ValueError: `bound` is out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> bounds_loss(jnp.array([[1., -3.], [0., 2.]]), bound=1.).tolist()
        [4.0, 1.0]

    Reference: rl_games (Makoviichuk and Makoviychuk), `bounds_loss_coef`, whose bound is 1.1.
    """
    return jnp.sum(jnp.square(jnp.maximum(jnp.abs(mean) - bound, 0)), axis=-1)


@public(wide="mean mirrored")
def mirror_loss(mean: Array, mirrored: Array, *, mask: Array | None = None) -> Array:
    r"""Compute how far actions are from symmetric ones. Gradients flow to `mean`; `mirrored` is a constant.

    .. math:: L_i = \frac{1}{D} \sum_d (\mu_{id} - \tilde\mu_{id})^2

    `mean` is the mean of the action for a mirrored observation, and `mirrored` the mirrored mean for the observation
    itself. They are equal for a symmetric policy.

    Args:
        mean, mirrored: `[..., D]`, means of actions.
        mask: as in `bounds_loss`; so are the result and the errors.

    Example:
        >>> import jax.numpy as jnp
        >>> mirror_loss(jnp.array([[1., -3.], [0., 2.]]), jnp.array([[1., -1.], [0., 2.]])).tolist()
        [2.0, 0.0]

    Reference: Yu et al. 2018, Learning Symmetric and Low-Energy Locomotion, arXiv:1801.08093; Mittal et al.
    2024, Symmetry Considerations for Learning Task Symmetric Robot Policies, arXiv:2403.04359, whose target is
    constant.
    """
    return jnp.mean(jnp.square(mean - mirrored), axis=-1)


@public(wide="mean other")
def smoothness_loss(mean: Array, other: Array, *, mask: Array | None = None) -> Array:
    r"""Compute the distance between the actions for two observations. Gradients flow to both.

    .. math:: L_i = \| \mu_i - \mu'_i \|_2

    Where they are closer than 1e-6, loss and gradient are 0. The temporal term of CAPS compares an observation with the
    one that followed, and the spatial term with a noisy copy of it.

    Args:
        mean, other: `[..., D]`, means of actions.
        mask: as in `bounds_loss`; so are the result, in the units of the action, and the errors.

    Example:
        >>> import jax.numpy as jnp
        >>> smoothness_loss(jnp.array([[3., 0.], [1., 2.]]), jnp.array([[0., 4.], [1., 2.]])).tolist()
        [5.0, 0.0]

    Reference: Mysore et al. 2021, Regularizing Action Policies for Smooth Control (CAPS), arXiv:2012.06644.
    """
    squares = jnp.sum(jnp.square(mean - other), axis=-1)
    apart = ~(squares <= 1e-12)  # or NaN; at 0, the gradient of the root is not finite
    return jnp.where(apart, jnp.sqrt(jnp.where(apart, squares, 1)), 0)


@public()
def self_imitation_value_loss(value: Array, target: Array, *, mask: Array | None = None) -> Array:
    r"""Compute half the squared error of values below their target. Gradients flow to `value`; `target` is a constant.

    .. math:: L_i = \frac{1}{2} (\text{target}_i - v_i)_+^2

    Here :math:`(x)_+ = \max(x, 0)`. This is the critic's half of self-imitation; `self_imitation_loss` is the policy's.
    Returns of good episodes are a lower bound of the value of the best policy, so values above them are left alone.

    Args:
        value, target, mask: as in `value_loss`; so are the result and the errors. The target is a return.

    Example:
        >>> import jax.numpy as jnp
        >>> self_imitation_value_loss(jnp.array([1., 3.]), jnp.array([3., 1.])).tolist()
        [2.0, 0.0]

    Reference: Oh et al. 2018, Self-Imitation Learning, arXiv:1806.05635.
    """
    return 0.5 * jnp.square(jnp.maximum(target - value, 0))
