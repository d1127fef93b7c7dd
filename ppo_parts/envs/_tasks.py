"""Tasks of this package, for what no other package has in JAX: hybrid actions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base.hyperparameters import check_number
from ..functional._arguments import FROM_0
from ._env import Array, Env, check_known
from ._episodes import Step, auto_reset
from ._spaces import Box, Dict, Discrete

REACH, HOLE, TEE = np.array([8.0, 2.0, 0.5], np.float32), 0.1, 8.0


def make_tasks(name: str, *, noise: float = 0.05, time_limit: int = 20) -> Env:
    """Make the task "golf": choose a club, and the stroke with it.

    The ball starts at a distance of 8 from the hole, in a random direction, and drops if it is within 0.1, which ends
    the episode. A stroke is a vector in the unit disk, times the reach of the club: 8, 2 or 0.5. The reward is how much
    nearer the ball has come, minus 1.

    The action is a dict: "club" is 0, 1 or 2, and "stroke" `[3, 2]` has a stroke for each club, as in the parameterized
    action spaces of Masson et al. 2016, arXiv:1509.01644. The observation, `[6]`, has the position of the ball relative
    to the hole, divided by the reach of each club and clipped to [-1, 1].

    Args:
        name: "golf".
        noise: standard deviation of the relative error of each coordinate of a stroke.
        time_limit: strokes after which an episode is truncated.
    """
    check_known(name, "tasks", ("golf",))
    noise = check_number("tasks:golf", "noise", noise, FROM_0, schedule=False)

    def observe(ball: Array) -> Array:
        return jnp.clip(ball[None] / REACH[:, None], -1, 1).ravel()

    def reset(key: Array) -> tuple[Array, Array]:
        angle = jax.random.uniform(key, maxval=2 * jnp.pi)
        ball = TEE * jnp.stack([jnp.cos(angle), jnp.sin(angle)])
        return ball, observe(ball)

    def step(key: Array, ball: Array, action: Any) -> Step:
        stroke = action["stroke"][action["club"]]
        stroke = stroke / jnp.maximum(jnp.linalg.norm(stroke), 1)
        after = ball + jnp.asarray(REACH)[action["club"]] * stroke * (1 + noise * jax.random.normal(key, (2,)))
        distance = jnp.linalg.norm(after)
        return Step(after, observe(after), jnp.linalg.norm(ball) - distance - 1, distance < HOLE)

    def render(ball: Array) -> np.ndarray:
        frame = np.full((120, 120, 3), (60, 140, 60), np.uint8)
        for position, color in (((0, 0), 0), (np.clip(ball, -9, 9), 255)):
            column, row = (60 + 6 * np.asarray(position)).astype(int)
            frame[row - 2 : row + 3, column - 2 : column + 3] = color
        return frame

    space = Dict({"club": Discrete(3), "stroke": Box((3, 2), -1.0, 1.0)})
    return auto_reset(reset, step, Box((6,), -1.0, 1.0), space, time_limit=time_limit, render=render)
