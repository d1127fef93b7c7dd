"""Jumanji's environments with one agent."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from .._base.errors import UserValueError
from ._env import Array, Box, Discrete, Env, Observation, check_known
from ._episodes import Step, auto_reset


def make(name: str, *, reset_ratio: int = 1, **settings: Any) -> Env:
    """Make one of `jumanji.registered_environments()`; `settings` go to its constructor, such as `time_limit=500`.

    The entries of an observation, except the action mask, become one vector of float32. Several simultaneous choices
    become one action per combination; a mask must have an entry for each. An episode that ends with a discount of 0 is
    terminated, and otherwise truncated.

    Raises:
        ValueError: several agents, or actions that are not discrete.
    """
    import jumanji

    check_known(name, "Jumanji", jumanji.registered_environments())
    env: Any = jumanji.make(name, **settings)
    choices = tuple(jnp.ravel(getattr(env.action_spec, "num_values", jnp.zeros(0))).tolist())
    _, first = jax.eval_shape(env.reset, jax.random.key(0))
    mask = getattr(first.observation, "action_mask", None)
    if first.reward.shape or not choices or (mask is not None and mask.shape != choices):
        raise UserValueError(f"{name} has several agents, or actions {env.action_spec}: write an adapter for it")

    def seen(observation: Any) -> Any:
        fields = {k: x for k, x in zip(observation._fields, observation, strict=True) if k != "action_mask"}
        obs = jnp.concatenate([jnp.ravel(x).astype(jnp.float32) for x in jax.tree.leaves(fields)])
        if mask is None:
            return Observation(obs)
        available = jnp.ravel(observation.action_mask)
        return Observation(obs, available | ~jnp.any(available))  # a trapped snake must act, and dies

    def reset(key: Array) -> tuple[Any, Any]:
        state, timestep = env.reset(key)
        return state, seen(timestep.observation)

    def step(key: Array, state: Any, action: Array) -> Step:
        indices = jnp.unravel_index(action, choices)
        state, out = env.step(state, indices[0] if len(choices) == 1 else jnp.stack(indices))
        return Step(state, seen(out.observation), out.reward, out.last() & (out.discount == 0), out.last())

    shape = jax.eval_shape(lambda: reset(jax.random.key(0))[1].obs).shape
    return auto_reset(reset, step, Box(shape), Discrete(math.prod(choices)), reset_ratio=reset_ratio)
