"""Rendering of MuJoCo and gymnax environments, and a context in which host environments are made to render."""

from __future__ import annotations

import colorsys
import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from .._base.extras import require_package
from ..errors import ShapeError, UserValueError
from ._env import cast_exactly

renders: contextvars.ContextVar[bool] = contextvars.ContextVar("renders", default=False)
"""Whether Gymnasium environments that are made now can render."""


@contextlib.contextmanager
def rendering() -> Iterator[None]:
    """In this context, make Gymnasium environments that can render, because they must know this when they are made."""
    token = renders.set(True)
    try:
        yield
    finally:
        renders.reset(token)


@contextlib.contextmanager
def opengl_errors() -> Iterator[None]:
    """Explain how to render without a display if MuJoCo only reports that OpenGL or EGL is missing."""
    try:
        yield
    except Exception as error:
        if "OpenGL" not in str(error) and "EGL" not in str(error):
            raise
        remedy = "Without a display, set the environment variable MUJOCO_GL to egl or, without an EGL device, to osmesa"
        raise UserValueError(f"MuJoCo cannot draw: {str(error).rstrip('.')}. {remedy}") from error


def as_frame(where: str, image: Any) -> np.ndarray:
    """Return a rendered image `[H, W, 3]` as uint8."""
    where, image = f"{where}: the image of render", np.asarray(image)
    if image.ndim != 3 or image.shape[-1] != 3:
        raise ShapeError(f"{where} must have shape [H, W, 3], got {image.shape}")
    return cast_exactly(where, image, np.dtype(np.uint8), "return uint8, 0 to 255")


def make_mujoco_renderer(model: Any) -> Callable[[Any], np.ndarray]:
    """Return `draw(state)` for a `mujoco.MjModel` and states of Playground or Brax.

    It uses the model's first camera, which follows the body in most models. The renderers of Brax and Playground make a
    new `mujoco.Renderer` for each call, which takes ten times as long as rendering.
    """

    @functools.cache
    def make() -> tuple[Any, Any, Any]:
        mujoco = require_package("mujoco", "brax")
        return mujoco, mujoco.Renderer(model, 240, 320), mujoco.MjData(model)

    def draw(state: Any) -> np.ndarray:
        with opengl_errors():
            mujoco, renderer, data = make()
            if hasattr(state, "pipeline_state"):  # Brax's
                data.qpos[:], data.qvel[:] = state.pipeline_state.q, state.pipeline_state.qd
            else:
                for name in ("qpos", "qvel", "mocap_pos", "mocap_quat"):
                    getattr(data, name)[:] = getattr(state.data, name)
            mujoco.mj_forward(model, data)
            renderer.update_scene(data, camera=0 if model.ncam else -1)
            return np.array(renderer.render())

    return draw


CONTROL = ("Acrobot-v1", "CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1")
"""Environments of gymnax that Gymnasium draws."""
CELL = 32
"""Width of a cell of a grid, in pixels."""


def make_gymnax_renderer(env: Any, env_params: Any) -> Callable[[Any], np.ndarray] | None:
    """Return the `render` of an `Env` for the states of a gymnax environment, or None if it cannot be drawn.

    Gymnasium draws the classic control tasks; MinAtar's observations are drawn with one color for each channel.
    """
    name = getattr(env, "name", "")
    if name not in CONTROL and not name.endswith("-MinAtar"):
        return None

    def render(states: Any) -> np.ndarray:
        state = jax.tree.map(lambda x: np.asarray(x)[0], states.inner)
        if name not in CONTROL:
            return draw_grid(np.asarray(env.observe(jax.random.key(0), state, None, env_params)))
        require_package("pygame", "watch")
        from gymnax.visualize import vis_gym

        return vis_gym.render_gym_frame(name, state, env_params)

    return render


def draw_grid(grid: np.ndarray) -> np.ndarray:
    """Draw a grid of nonnegative channels `[H, W, C]` with one color per channel, the last one on top."""
    channels = grid.shape[-1]
    colors = [colorsys.hsv_to_rgb(i / channels, 0.65, 1.0) for i in range(channels)]
    palette = np.asarray([(0, 0, 0), *colors]) * 255
    top = np.max((grid > 0) * (np.arange(channels) + 1), axis=-1)
    return np.repeat(np.repeat(palette[top].astype(np.uint8), CELL, 0), CELL, 1)
