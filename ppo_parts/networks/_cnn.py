"""The convolutional policy of Atari agents."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from .._base.errors import UserValueError
from .._core.types import Batch, Output, Policy
from ..envs import Env, is_discrete
from ..envs._env import check_env
from ._conv import convolved, largest_pixel
from ._dense import in_one_draw
from ._flax import dense
from ._heads import Array, action_distribution, action_size


class NatureCNN(nn.Module):
    """Three convolutions and a dense layer, which actor and critic share, and their heads."""

    space: Any
    features: int
    largest: float

    @nn.compact
    def __call__(self, frames: Array) -> Output:
        """Evaluate frames `[..., C, H, W]`."""
        x = nn.relu(dense(self.features)(convolved(frames, self.largest)))
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
