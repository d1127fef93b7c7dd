"""Pgx's games with one or two players."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .._base.errors import UserValueError
from .._core.policy import apply_policy, initial_carry_of, policy_keys
from ._env import Array, Env, Observation, check_known
from ._episodes import Step, auto_reset
from ._spaces import Box, Discrete

Opponent = Callable[[Array, Observation], Array]
"""`opponent(key, obs) -> action`, for one observation."""


def make_pgx(
    name: str,
    *,
    opponent: Opponent | Literal["self"] | None = None,
    time_limit: int | None = None,
    reset_ratio: int = 1,
) -> Env:
    """Make one of `pgx.available_envs()` with one player, or with two, one or both of whom the policy plays.

    The player who begins is drawn at random in each episode. `won` is whether the policy won, or, with "self", whether
    the first of the two players did.

    `opponent(key, obs) -> action` takes one `Observation`; None: uniformly among the legal actions. See
    `frozen_opponent`. "self": the policy plays both sides (`Env.zero_sum`), and is evaluated against None.
    """
    import pgx

    check_known(name, "Pgx", pgx.available_envs())
    env = pgx.make(name)
    if env.num_players > 2:
        raise UserValueError(f"{name} has {env.num_players} players, but this adapter is for one or two")
    if opponent is not None and env.num_players == 1:
        raise UserValueError(f"{name} has one player, so there is no opponent: leave out opponent={opponent!r}")
    both = opponent == "self"
    if not (opponent is None or both or callable(opponent)):
        raise UserValueError(
            f'{name}: opponent must be "self", None or a function of a key and an observation, got {opponent!r}'
        )
    choose_action: Opponent = opponent if callable(opponent) else random_opponent

    def seen(state: Any) -> Observation:
        return Observation(state.observation.astype(jnp.float32), state.legal_action_mask)

    def others(key: Array, state: Any) -> tuple[Any, Array]:
        """Let the opponent move until it is the turn of player 0; return the reward of player 0 since its move."""
        if env.num_players == 1 or both:
            return state, state.rewards[0]

        def waits(carry: Any) -> Array:
            _, state, _ = carry
            return (state.current_player != 0) & ~state.terminated & ~state.truncated

        def wait(carry: Any) -> Any:
            key, state, reward = carry
            key, action_key, step_key = jax.random.split(key, 3)
            state = env.step(state, choose_action(action_key, seen(state)), step_key)
            return key, state, reward + state.rewards[0]

        return jax.lax.while_loop(waits, wait, (key, state, state.rewards[0]))[1:]

    def sign(state: Any) -> Array:
        return 1.0 - 2.0 * state.current_player

    def reset(key: Array) -> tuple[Any, Observation]:
        key, others_key = jax.random.split(key)
        state, _ = others(others_key, env.init(key))
        return state, seen(state)

    def step(key: Array, state: Any, action: Array) -> Step:
        key, others_key = jax.random.split(key)
        moved = sign(state)
        state, reward = others(others_key, env.step(state, action, key))
        info = {"won": reward > 0} if env.num_players > 1 else {}
        info |= {"seat": moved, "next_seat": sign(state)} if both else {}
        return Step(state, seen(state), reward, state.terminated, state.truncated, info)

    spaces = Box(tuple(env.observation_shape)), Discrete(env.num_actions)
    made = auto_reset(reset, step, *spaces, time_limit=time_limit, reset_ratio=reset_ratio, zero_sum=both)
    if not both:
        return made
    against_random = make_pgx(name, time_limit=time_limit, reset_ratio=reset_ratio)
    return made._replace(evaluation=lambda state: against_random)


def random_opponent(key: Array, obs: Observation) -> Array:
    """Draw one of the legal actions."""
    return jax.random.categorical(key, jnp.where(obs.available, 0.0, -jnp.inf)).astype(jnp.int32)


def frozen_opponent(policy: Any, params: Any) -> Opponent:
    """Make an opponent for `envs.make("pgx:...", opponent=...)` that plays a policy without memory."""
    if initial_carry_of(policy) is not None:
        raise UserValueError("frozen_opponent: a policy with memory needs its state; give one without memory")

    def act(key: Array, obs: Observation) -> Array:
        one, own = jax.tree.map(lambda x: x[None], obs), policy_keys(policy, key, 1)
        return apply_policy(policy, params, one, keys=own).distribution.sample(seed=key)[0]

    return act
