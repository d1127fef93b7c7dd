"""Dense layers for your own flax modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import flax.linen as nn

from .._base.doors import checked
from ._cpu import dense_dot_general
from ._dense import orthogonal
from ._heads import Array

Activation = Literal["tanh", "relu", "gelu", "elu", "silu"]
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {name: getattr(nn, name) for name in get_args(Activation)}


def dense(features: int, gain: Any = 2**0.5) -> nn.Dense:
    """Make a dense layer with orthogonal weights, biases of 0, and a gradient that is fast on a CPU.

    The gain of the weights is usually sqrt(2) for hidden layers, 0.01 for a policy head, and 1 for a value head.

    Reference: Huang et al. 2022, The 37 Implementation Details of PPO, detail 2.
    """
    return nn.Dense(features, kernel_init=orthogonal(gain), dot_general=dense_dot_general)


@checked
def mlp(x: Array, hidden: tuple[int, ...], activation: Activation = "tanh") -> Array:
    """Apply layers of `hidden` units to `[..., D]`; call this inside the compact method of a flax module.

    `activation` is "tanh", "relu", "gelu", "elu" or "silu".

    Example:
        >>> class Value(nn.Module):
        ...     @nn.compact
        ...     def __call__(self, obs):
        ...         return dense(1, gain=1.0)(mlp(obs, (64, 64)))[..., 0]
    """
    for features in hidden:
        x = ACTIVATIONS[activation](dense(features)(x))
    return x
