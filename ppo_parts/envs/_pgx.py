"""Pgx's games with one or two players."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._errors import UserValueError
from ._env import Array, Box, Discrete, Env, Observation, unknown_env
from ._episodes import Step, auto_reset
from ._opponents import Opponent, random_opponent, until_turn


def make(name: str, *, opponent: Opponent | None = None, time_limit: int | None = None, reset_ratio: int = 1) -> Env:
    """Make one of `pgx.available_envs()` with one player, or with two players, of which the policy is one.

    The player who begins is drawn at random in each episode. `won` is whether the policy won.

    Args:
        name: the game.
        opponent: `opponent(key, obs) -> action`, for one `Observation`; None: uniformly among the legal actions. See
            `frozen_opponent`.
        time_limit, reset_ratio: as in `auto_reset`.
    """
    import pgx

    if name not in pgx.available_envs():
        raise unknown_env(name, "Pgx", pgx.available_envs())
    env = pgx.make(name)
    if env.num_players > 2:
        raise UserValueError(f"{name} has {env.num_players} players, and this adapter is for one or two")
    choose_action = random_opponent if opponent is None else opponent

    def seen(state: Any) -> Observation:
        return Observation(state.observation.astype(jnp.float32), state.legal_action_mask)

    def opponents_move(key: Array, state: Any) -> Any:
        action_key, step_key = jax.random.split(key)
        return env.step(state, choose_action(action_key, seen(state)), step_key)

    def others(key: Array, state: Any) -> tuple[Any, Array]:
        return (state, state.rewards[0]) if env.num_players == 1 else until_turn(opponents_move, key, state)

    def reset(key: Array) -> tuple[Any, Observation]:
        key, others_key = jax.random.split(key)
        state, _ = others(others_key, env.init(key))
        return state, seen(state)

    def step(key: Array, state: Any, action: Array) -> Step:
        key, others_key = jax.random.split(key)
        state, reward = others(others_key, env.step(state, action, key))
        info = {"won": reward > 0} if env.num_players > 1 else {}
        return Step(state, seen(state), reward, state.terminated, state.truncated, info)

    spaces = Box(tuple(env.observation_shape)), Discrete(env.num_actions)
    return auto_reset(reset, step, *spaces, time_limit=time_limit, reset_ratio=reset_ratio)
