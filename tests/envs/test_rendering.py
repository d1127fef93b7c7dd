"""Images of environments, which `python -m ppo_parts.watch` writes."""

import jax
import numpy as np
import pytest

from ppo_parts import envs
from ppo_parts.envs._rendering import draw_grid, opengl_errors, rendering
from ppo_parts.errors import UserValueError


@pytest.mark.lenient_ranks
def test_minatar_is_drawn_from_its_channels():
    env = envs.prepare(envs.make("Breakout-MinAtar"), normalize=True, gamma=0.9)
    state, _ = env.reset(jax.random.key(0), 2)
    frame = env.render(state)
    assert frame.shape == (320, 320, 3)
    grid = np.asarray(envs.make("Breakout-MinAtar").reset(jax.random.key(0), 2)[1][0])
    np.testing.assert_array_equal(frame[::32, ::32].any(-1), grid.any(-1))
    shown = np.unique(np.max((grid > 0) * np.arange(1, 5), axis=-1))  # the ball hides its trail
    assert len(np.unique(frame.reshape(-1, 3), axis=0)) == len(shown) == 3
    grid = np.zeros((2, 1, 2))  # the last channel is on top
    grid[0, 0, 0] = grid[1, 0, :] = 1
    top, bottom = draw_grid(grid)[[0, 32], 0]
    assert top.tolist() == [255, 89, 89]
    assert bottom.tolist() == [89, 255, 255]


@pytest.mark.parametrize("env_id", ["CartPole-v1", "gym:CartPole-v1"])
def test_gymnasium_draws(env_id):
    pytest.importorskip("pygame")
    made, on_host = [], env_id.startswith("gym:")
    with rendering():
        env = envs.make(env_id, **({"wrappers": (lambda env: made.append(env) or env,)} if on_host else {}))
    state, _ = env.reset(jax.random.key(0), 2)
    for other in made[-1:]:
        other.render = None  # is not called
    frame = env.render(state)
    assert frame.shape == (400, 600, 3)
    assert len(np.unique(frame.reshape(-1, 3), axis=0)) > 3
    if on_host:
        env = envs.make(env_id)
        state, _ = env.reset(jax.random.key(0), 1)
        with pytest.raises(UserValueError, match='without render_mode="rgb_array"'):
            env.render(state)


def test_how_to_draw_without_a_display_is_said():
    for says in ("an OpenGL platform library has not been loaded", "Cannot initialize a EGL device display."):
        with pytest.raises(UserValueError, match=f"{says.rstrip('.')}. Without a display, set"), opengl_errors():
            raise ImportError(says)
    with pytest.raises(ImportError), opengl_errors():
        raise ImportError("another")
