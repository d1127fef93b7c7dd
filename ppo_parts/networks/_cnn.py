"""The convolutional policy of Atari agents."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from .._base.errors import UserValueError
from .._core.types import Batch, Output, Policy
from ..envs import Env, is_discrete
from ..envs._env import check_env
from ._dense import in_one_draw, orthogonal
from ._flax import dense
from ._heads import Array, action_distribution, action_size


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


class NatureCNN(nn.Module):
    """Three convolutions and a dense layer, which actor and critic share, and their heads."""

    space: Any
    features: int
    largest: float

    @nn.compact
    def __call__(self, frames: Array) -> Output:
        """Evaluate frames `[..., C, H, W]`."""
        dtype = jnp.promote_types(frames.dtype, jnp.float32)
        x = jnp.moveaxis(frames.reshape(-1, *frames.shape[-3:]), 1, -1).astype(dtype) / self.largest
        for features, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = nn.relu(Conv(features, kernel, stride)(x))
        x = nn.relu(dense(self.features)(x.reshape(*frames.shape[:-3], -1)))
        head, value = dense(action_size(self.space), gain=0.01)(x), dense(1, gain=1.0)(x)
        return Output(action_distribution(self.space, head), value[..., 0])


def nature_cnn(env: Env, features: int = 512) -> Policy:
    """Make the policy of most Atari agents: the convolutions of DQN, shared by actor and critic, and two heads.

    Convolutions of 32 8x8 filters with stride 4, 64 4x4 filters with stride 2 and 64 3x3 filters with stride 1, and a
    dense layer, each with ReLU, and the initial weights of `actor_critic`. Pixels are divided by 255 if those are the
    bounds of their space, and not if it has bounds within [-1, 1], or after `envs.normalize_observation`.

    Args:
        env: the environment; observations are `[C, H, W]` frames of at least 36 x 36 pixels, actions are discrete.
        features: number of units of the dense layer.

    Returns:
        `ppo_parts.Policy`, for any leading axes.

    Raises:
        ValueError: other observations, bounds or actions; bounds of 0 and 255 with a floating dtype, whose frames may
            have been divided already.

    Reference: Mnih et al. 2015, doi:10.1038/nature14236, Methods; Huang et al. 2022, The 37 Implementation Details of
    PPO, detail 8 of Atari.
    """
    check_env("nature_cnn", env)
    shape = tuple(getattr(env.observation_space, "shape", None) or ())
    if len(shape) != 3 or min(shape[1:]) < 36:
        raise UserValueError(
            f"nature_cnn: observations must be [C, H, W] frames of at least 36 x 36 pixels, got shape {shape}: use "
            "actor_critic, or your own network"
        )
    if not is_discrete(env.action_space):
        raise UserValueError(f"nature_cnn: actions must be discrete, got {env.action_space}: use your own network")
    network = NatureCNN(env.action_space, features, largest_pixel(env.observation_space))

    def evaluate(params: Any, batch: Batch) -> Any:
        return network.apply(params, batch.obs)

    return Policy(lambda key: in_one_draw(network.init)(key, jnp.zeros((1, *shape))), evaluate)


def largest_pixel(space: Any) -> float:
    """Return what to divide frames by: 255, or 1 if they are scaled already."""
    low, high = np.min(getattr(space, "low", -np.inf)), np.max(getattr(space, "high", np.inf))
    dtype = getattr(space, "dtype", None)
    floating = dtype is not None and np.issubdtype(dtype, np.floating)
    if (low, high) == (0, 255) and not floating:
        return 255.0
    if -np.inf < low <= high <= 1 or (low == -high > -np.inf):  # standardized
        return 1.0
    raise UserValueError(
        f"nature_cnn: the bounds of {space} do not tell whether pixels must be divided by 255: use bounds of 0 and 255 "
        "and a dtype of integers where they must, and bounds of 0 and 1 where they are scaled already"
    )
