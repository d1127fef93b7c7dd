"""Opponents in two-player games."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._base.errors import UserValueError
from .._core.policy import apply_policy, initial_carry_of
from ._env import Array, Observation

Opponent = Callable[[Array, Observation], Array]
"""`opponent(key, obs) -> action`, for one observation."""


def until_turn(move: Callable[[Array, Any], Any], key: Array, state: Any) -> tuple[Any, Array]:
    """Let the opponent move until it is the turn of player 0, or the game is over.

    Args:
        move: `move(key, state) -> state`, a move of the opponent.
        key: PRNG key.
        state: the state of a game of Pgx after a move of player 0, or at the beginning.

    Returns:
        The state, and the reward of player 0 since its move, including that of `state`.
    """

    def waits(carry: Any) -> Array:
        _, state, _ = carry
        return (state.current_player != 0) & ~state.terminated & ~state.truncated

    def wait(carry: Any) -> Any:
        key, state, reward = carry
        key, move_key = jax.random.split(key)
        state = move(move_key, state)
        return key, state, reward + state.rewards[0]

    return jax.lax.while_loop(waits, wait, (key, state, state.rewards[0]))[1:]


def random_opponent(key: Array, obs: Observation) -> Array:
    """Draw one of the legal actions."""
    return jax.random.categorical(key, jnp.where(obs.available, 0.0, -jnp.inf)).astype(jnp.int32)


def frozen_opponent(policy: Any, params: Any) -> Opponent:
    """Make an opponent for `envs.make("pgx:...", opponent=...)` that plays a policy with fixed parameters.

    Args:
        policy: `ppo_parts.Policy` without memory, or `evaluate`.
        params: its parameters.
    """
    if initial_carry_of(policy) is not None:
        raise UserValueError("frozen_opponent: a policy with memory needs its state; give one without memory")

    def act(key: Array, obs: Observation) -> Array:
        distribution = apply_policy(policy, params, jax.tree.map(lambda x: x[None], obs)).distribution
        return distribution.sample(seed=key)[0]

    return act
