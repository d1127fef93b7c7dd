"""The check of an environment's shapes and dtypes, which traces it and does not run it."""

from __future__ import annotations

from typing import Any

import jax

from .._base.errors import UserTypeError, UserValueError
from .._base.hyperparameters import check_count
from ..functional import ShapeError
from ._env import (
    SEATS,
    Array,
    Env,
    Transition,
    action_struct,
    as_observation,
    check_env,
    check_items,
    count_options,
    describe,
)
from ._spaces import is_tree, map_space


def check(env: Env, num_envs: int = 2, action: Any = None) -> None:
    """Raise unless every shape and dtype of `reset`, `step` and `evaluation` is valid; they are traced, but not run.

    Args:
        env: the environment.
        num_envs: N to check with.
        action: actions of all N environments, leaves `[N, ...]`; None: zeros of the action space.

    Raises:
        UserTypeError, ShapeError: names the first violation, and the remedy.

    Example:
        >>> from ppo_parts import envs
        >>> envs.check(envs.make("CartPole-v1"))
    """
    check_env("check", env)
    each = (check_count("check", "num_envs", num_envs),) + (() if env.num_agents is None else (env.num_agents,))
    key = jax.random.key(0)
    returned = jax.eval_shape(lambda key: env.reset(key, num_envs), key)
    state, obs = check_items("check", "reset", returned, "(state, obs)")
    if action is None:
        action = action_struct(env.action_space, each)
    after, out = check_items("check", "step", jax.eval_shape(env.step, key, state, action), "(state, Transition)")
    if not isinstance(out, Transition):
        raise UserTypeError(f"check: step must return (state, Transition), got (state, {type(out).__name__})")
    out.check(obs, each)
    if env.zero_sum and (lacking := [name for name in SEATS if name not in out.info]):
        raise UserValueError(
            f"check: the policy plays both sides of this game (zero_sum), but info has no {lacking[0]!r}: return 1 for "
            "the first player, and -1 for the second"
        )
    if describe(after) != describe(state):
        raise ShapeError(
            "check: step must keep the structure, shapes and dtypes of the state, or no loop can carry it; reset "
            f"returns {describe(state)}, step {describe(after)}"
        )
    _check_observation(env, obs, each)
    evaluated = describe(jax.eval_shape(lambda key: evaluation_of(env, key, num_envs).reset(key, num_envs)[1], key))
    if evaluated != describe(obs):
        raise ShapeError(
            f"check: observations in the environment of evaluation(state) must be like the others, {describe(obs)}, "
            f"got {evaluated}"
        )


def evaluation_of(env: Env, key: Array, num_envs: int) -> Env:
    """Return the environment to evaluate in."""
    evaluated = env.evaluation(env.reset(key, num_envs)[0])
    if not isinstance(evaluated, Env):
        raise UserTypeError(
            f"check: evaluation(state) must return the Env to evaluate in, usually the environment itself; got "
            f"{type(evaluated).__name__}"
        )
    return evaluated


def _check_observation(env: Env, obs: Any, each: tuple[int, ...]) -> None:
    """Raise unless observations, and their action masks, fit the spaces."""
    obs, available, privileged = as_observation(obs)
    shapes = map_space(lambda space: getattr(space, "shape", None), env.observation_space)
    given = jax.tree.map(lambda x: x.shape[len(each) :], obs)
    expected, seen = getattr(env.privileged_space, "shape", None), getattr(privileged, "shape", None)
    if (None if seen is None else seen[len(each) :]) != (None if expected is None else tuple(expected)):
        raise ShapeError(
            f"check: privileged_space has shape {expected}, but obs.privileged {seen} for {each} environments: give "
            "both, or neither"
        )
    if is_tree(env.observation_space) and shapes != given:
        raise ShapeError(f"check: the entries of observation_space have the shapes {shapes}, but observations {given}")
    if hasattr(obs, "shape") and shapes is not None and given != tuple(shapes):
        raise ShapeError(f"check: observation_space has shape {tuple(shapes)}, but observations have {given}")
    if available is None:
        return
    masks = []

    def check_mask(space: Any, mask: Any) -> None:
        if mask is None:
            return
        masks.append(mask)
        if not count_options(space):
            raise UserTypeError(
                f"check: obs.available masks discrete actions, but {space} is not discrete: leave it None"
            )
        expected = (*each, sum(count_options(space)))
        if mask.shape != expected or mask.dtype != bool:
            raise ShapeError(
                f"check: obs.available must be boolean of shape {expected}, one for each option, got {mask.dtype} of "
                f"shape {mask.shape}"
            )

    if is_tree(env.action_space) and not isinstance(available, dict | tuple):
        raise UserTypeError(f"check: obs.available must be a dict or a tuple like {env.action_space}, got an array")
    map_space(check_mask, env.action_space, available)
    if len(masks) != len(jax.tree.leaves(available)):
        raise UserTypeError(f"check: obs.available has entries that {env.action_space} lacks: {describe(available)}")
