"""Dense layers for your own flax modules, and convolutions for images."""

from __future__ import annotations

import math
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from .._base.checked import checked
from .._base.hyperparameters import check_count
from ..errors import UserTypeError, UserValueError
from ._cpu import convolve_by_products, dense_dot_general
from ._heads import Array
from ._orthogonal import orthogonal

Activation = Literal["tanh", "relu", "gelu", "elu", "silu"]


def dense(features: int, gain: Any = 2**0.5) -> nn.Dense:
    """Make a dense layer with orthogonal weights, zero biases, and a gradient that is fast on a CPU.

    The gain of the weights is usually sqrt(2) for hidden layers, 0.01 for a policy head, and 1 for a value head.

    Reference: Huang et al. 2022, The 37 Implementation Details of PPO, detail 2.
    """
    return nn.Dense(features, kernel_init=orthogonal(gain), dot_general=dense_dot_general)


def check_hidden(where: str, hidden: Any) -> None:
    """Raise unless `hidden` is a tuple of numbers of units."""
    if not isinstance(hidden, (tuple, list)):
        raise UserTypeError(f"{where}: hidden must be a tuple with the units of each layer, got {hidden!r}")
    for units in hidden:
        check_count(where, "hidden", units)


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
    check_hidden("mlp", hidden)
    for features in hidden:
        x = getattr(nn, activation)(dense(features)(x))
    return x


class Conv(nn.Module):
    """A convolution with square filters and no padding; the stride must divide the width of the filters."""

    features: int
    size: int
    stride: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Convolve `[N, H, W, C]`."""
        shape = self.size, self.size, x.shape[-1], self.features
        kernel = self.param("kernel", orthogonal(2**0.5), shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        if jax.default_backend() == "cpu":
            return convolve_by_products(x, kernel, self.stride) + bias
        strides, layout = (self.stride, self.stride), ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, strides, "VALID", dimension_numbers=layout) + bias


def convolved(frames: Array, largest: float) -> Array:
    """Apply DQN's three convolutions to frames `[..., C, H, W]`; call this inside the compact method of a module."""
    dtype = jnp.promote_types(frames.dtype, jnp.float32)
    x = jnp.moveaxis(frames.reshape(-1, *frames.shape[-3:]), 1, -1).astype(dtype) / largest
    for features, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
        x = nn.relu(Conv(features, kernel, stride)(x))
    return x.reshape(*frames.shape[:-3], math.prod(x.shape[1:]))


def largest_pixel(where: str, space: Any) -> float:
    """Return the number by which to divide frames, 255, or 1 if they are already scaled."""
    low, high = np.min(getattr(space, "low", -np.inf)), np.max(getattr(space, "high", np.inf))
    dtype = getattr(space, "dtype", None)
    floating = dtype is not None and np.issubdtype(dtype, np.floating)
    if (low, high) == (0, 255) and not floating:
        return 255.0
    if -1 <= low <= high <= 1 or (low == -high > -np.inf):  # standardized
        return 1.0
    says = f"the bounds of {space} do not tell whether pixels must be divided by 255"
    remedy = "bounds of 0 and 255 and a dtype of integers where they must, and of 0 and 1 where they are scaled already"
    raise UserValueError(f"{where}: {says}: use {remedy}")
