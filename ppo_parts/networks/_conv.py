"""Convolutions of images."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from .._base.errors import UserValueError
from ._dense import orthogonal

Array = jax.Array


class Conv(nn.Module):
    """A convolution of square filters without padding; the stride divides the width of a filter."""

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


def convolve_by_products(x: Array, kernel: Array, stride: int) -> Array:
    """Convolve `[N, H, W, C]` with `[K, K, C, F]` as a sum of matrix products, of which each covers `stride` pixels.

    On a CPU, the gradients of XLA's own convolution are about 20 times as slow in a loop as outside, and updates are
    loops (https://github.com/jax-ml/jax/issues/12868); matrix products are not.
    """
    size, _, channels, features = kernel.shape
    blocks = size // stride
    rows, columns = ((length - size) // stride + 1 for length in x.shape[1:3])
    x = cropped(x, 0, 0, (rows - 1) * stride + size, (columns - 1) * stride + size)
    x = x.reshape(-1, rows + blocks - 1, stride, columns + blocks - 1, stride, channels).swapaxes(2, 3)
    x = x.reshape(*x.shape[:3], stride * stride * channels)
    kernel = kernel.reshape(blocks, stride, blocks, stride, channels, features).swapaxes(1, 2)
    kernel = kernel.reshape(blocks * blocks, stride * stride * channels, features)
    shifts = [(i, j) for i in range(blocks) for j in range(blocks)]
    products = (cropped(x, i, j, rows, columns) @ each for (i, j), each in zip(shifts, kernel, strict=True))
    return sum(products, jnp.zeros(()))


def cropped(x: Array, top: int, left: int, height: int, width: int) -> Array:
    """Crop `[N, H, W, C]`; N may be symbolic, as in an export, where indexing would gather."""
    return jax.lax.slice_in_dim(jax.lax.slice_in_dim(x, top, top + height, axis=1), left, left + width, axis=2)


def convolved(frames: Array, largest: float) -> Array:
    """Apply DQN's three convolutions to frames `[..., C, H, W]`; call this inside the compact method of a module."""
    dtype = jnp.promote_types(frames.dtype, jnp.float32)
    x = jnp.moveaxis(frames.reshape(-1, *frames.shape[-3:]), 1, -1).astype(dtype) / largest
    for features, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
        x = nn.relu(Conv(features, kernel, stride)(x))
    return x.reshape(*frames.shape[:-3], -1)


def largest_pixel(where: str, space: Any) -> float:
    """Return what to divide frames by: 255, or 1 if they are scaled already."""
    low, high = np.min(getattr(space, "low", -np.inf)), np.max(getattr(space, "high", np.inf))
    dtype = getattr(space, "dtype", None)
    floating = dtype is not None and np.issubdtype(dtype, np.floating)
    if (low, high) == (0, 255) and not floating:
        return 255.0
    if -np.inf < low <= high <= 1 or (low == -high > -np.inf):  # standardized
        return 1.0
    raise UserValueError(
        f"{where}: the bounds of {space} do not tell whether pixels must be divided by 255: use bounds of 0 and 255 "
        "and a dtype of integers where they must, and bounds of 0 and 1 where they are scaled already"
    )
