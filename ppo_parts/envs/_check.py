"""Checks of environments: of shapes and dtypes, and of the laws, with random actions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base.errors import UserTypeError, UserValueError
from .._base.hyperparameters import check_count, check_takes
from ..distributions import Categorical, MultiCategorical
from ..functional import ShapeError
from . import _env
from ._env import SEATS, Array, Env, Observation, Transition, count_options, describe
from ._laws import LAWS, Played, alike, applies, array_of


def check(env: Env, num_envs: int = 2, action: Any = None) -> None:
    """Raise unless an environment follows the protocol: it is traced, but not run.

    This checks every shape and dtype of `reset`, `step` and `evaluation`; the error names the field and the remedy.

    Args:
        env: the environment.
        num_envs: N to check with.
        action: actions of all N environments, leaves `[N, ...]`; None: zeros of the action space.

    Raises:
        UserTypeError, ShapeError: names the first violation.

    Example:
        >>> from ppo_parts import envs
        >>> envs.check(envs.make("CartPole-v1"))
        >>> envs.check("CartPole-v1")
        Traceback (most recent call last):
        ...
        ppo_parts.errors.UserTypeError: check: 'CartPole-v1' is not an environment: make one with envs.make(...),
        envs.from_gymnasium(...) or envs.Env(...)
    """
    _env.check_env("check", env)
    each = (check_count("check", "num_envs", num_envs),) + (() if env.num_agents is None else (env.num_agents,))
    key = jax.random.key(0)
    state, obs = _pair("reset", jax.eval_shape(lambda key: env.reset(key, num_envs), key))
    if action is None:
        action = _env.action_struct(env.action_space, each)
    after, out = _pair("step", jax.eval_shape(env.step, key, state, action))
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
    evaluated = describe(jax.eval_shape(lambda key: _evaluation_of(env, key, num_envs).reset(key, num_envs)[1], key))
    if evaluated != describe(obs):
        raise ShapeError(
            f"check: observations in the environment of evaluation(state) must be like the others, {describe(obs)}, "
            f"got {evaluated}"
        )


def _evaluation_of(env: Env, key: Array, num_envs: int) -> Env:
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
    shape, available = getattr(env.observation_space, "shape", None), None
    if isinstance(obs, Observation):
        obs, available, privileged = obs
        expected, given = getattr(env.privileged_space, "shape", None), getattr(privileged, "shape", None)
        if (None if given is None else given[len(each) :]) != (None if expected is None else tuple(expected)):
            raise ShapeError(
                f"check: privileged_space has shape {expected}, but obs.privileged {given} for {each} environments: "
                "give both, or neither"
            )
    leaves = jax.tree.leaves(obs)
    if shape is not None and len(leaves) == 1 and leaves[0].shape[len(each) :] != tuple(shape):
        raise ShapeError(
            f"check: observation_space has shape {tuple(shape)}, but observations have {leaves[0].shape[len(each) :]}"
        )
    if available is None:
        return
    if not count_options(env.action_space):
        raise UserTypeError(
            "check: obs.available masks discrete actions, but action_space is not discrete: leave it None"
        )
    expected = (*each, sum(count_options(env.action_space)))
    if available.shape != expected or available.dtype != bool:
        raise ShapeError(
            f"check: obs.available must be boolean of shape {expected}, one for each option, got {available.dtype} of "
            f"shape {available.shape}"
        )


def _pair(name: str, returned: Any) -> tuple[Any, Any]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        second = "obs" if name == "reset" else "Transition"
        got = f"{len(returned)} items" if isinstance(returned, tuple) else type(returned).__name__
        raise UserTypeError(f"check: {name} must return (state, {second}), got {got}")
    return returned


@dataclasses.dataclass(frozen=True)
class Report:
    """What `check_laws` saw: how many episodes ended and how, notes on what looks unusual, and the laws that apply."""

    episodes: int
    terminated: int
    truncated: int
    notes: tuple[str, ...]
    laws: tuple[str, ...] = dataclasses.field(repr=False)


def check_laws(
    env: Env, *, num_envs: int = 4, num_steps: int = 1000, seed: int = 0, act: Callable[[Array, Any], Any] | None = None
) -> Report:
    """Run an environment with random actions, and raise if it breaks a law; the error names the field.

    Args:
        env: the environment; `check` runs first.
        num_envs, num_steps: N environments run for T steps, twice.
        seed: seed of the keys.
        act: `act(key, obs) -> action` for all environments; None: uniformly among the available actions, or within the
            bounds of the box.

    Raises:
        UserTypeError, ShapeError: as `check`. UserValueError: names the first law that is broken, and the remedy.

    Example:
        >>> from ppo_parts import envs
        >>> envs.check_laws(envs.make("CartPole-v1", max_steps_in_episode=15), num_steps=30).notes
        ()
    """
    _env.check_env("check_laws", env)
    check_count("check_laws", "num_steps", num_steps)
    check_count("check_laws", "num_envs", num_envs)
    check_count("check_laws", "seed", seed, 0)
    act = random_action(env) if act is None else act
    check_takes("check_laws", "act", act, ("key", "obs"))
    check(env, num_envs, jax.eval_shape(lambda key: act(key, env.reset(key, num_envs)[1]), jax.random.key(0)))
    played = play(env, act, num_envs, num_steps, seed)
    laws = [law for law in LAWS if applies(law, played)]
    for law in laws:
        if (wrong := law(played)) is not None:
            raise UserValueError(f"check_laws: {wrong}")
    cut = np.asarray(played.out.episode_ends()[1])
    return Report(
        episodes=int(played.ended.sum()),
        terminated=int((played.ended & ~cut).sum()),
        truncated=int(cut.sum()),
        notes=notes_on(played),
        laws=tuple((law.__doc__ or "").strip() for law in laws),
    )


def play(env: Env, act: Callable[[Array, Any], Any], num_envs: int, num_steps: int, seed: int) -> Played:
    """Run an environment twice with one key, and its `evaluation` once."""

    def played(make: Callable[[Array], Env]) -> Callable[[Array], Any]:
        def run(key: Array) -> tuple[Any, Transition]:
            env_key, reset_key, key = jax.random.split(key, 3)
            env = make(env_key)
            state, obs = env.reset(reset_key, num_envs)

            def step(carry: Any, key: Array) -> Any:
                action_key, step_key = jax.random.split(key)
                state, out = env.step(step_key, carry[0], act(action_key, carry[1]))
                return (state, out.obs), out

            return obs, jax.lax.scan(step, (state, obs), jax.random.split(key, num_steps))[1]

        return run

    def evaluation(key: Array) -> Env:
        return _evaluation_of(env, key, num_envs)

    def numpy(tree: Any) -> Any:
        return jax.tree.map(np.asarray, tree)

    key, same = jax.random.key(seed), []
    one, two = (jax.jit(played(lambda key: env)).lower(key) for _ in range(2))
    compiled = one.compile()
    first, out = numpy(compiled(key))
    # Programs with the same text are equal, so only one is compiled, which takes most of the time. The text contains
    # every constant, such as a random number from NumPy. (The text of a jaxpr lacks those of functions that it calls.)
    again = numpy((compiled if one.as_text() == two.as_text() else two.compile())(key))
    reset_many = jax.jit(lambda key: env.reset(key, 8 * num_envs)[1])  # compiled only where a law needs it
    other = numpy(reset_many(jax.random.key(seed + 1))) if alike(array_of(first)) else None
    jax.eval_shape(lambda key: same.append(evaluation(key) is env), key)
    unscaled = out if same[0] else numpy(jax.jit(played(evaluation))(key)[1])
    return Played(env, first, out, np.asarray(out.episode_ends()[0]), again, other, unscaled)


def random_action(env: Env) -> Callable[[Array, Any], Array]:
    """Return `act(key, obs) -> action`, uniform among the available actions or within the box of one environment."""
    space = env.action_space

    def act(key: Array, obs: Any) -> Array:
        agents = () if env.num_agents is None else (env.num_agents,)
        each = (jax.tree.leaves(obs)[0].shape[0], *agents)
        if options := count_options(space):
            available = obs.available if isinstance(obs, Observation) else None
            logits = jnp.zeros((*each, sum(options))) if available is None else jnp.where(available, 0.0, -1e9)
            policy = MultiCategorical(logits, options) if hasattr(space, "nvec") else Categorical(logits)
            return policy.sample(seed=key)
        shape = _env.action_struct(space, each).shape
        low, high = (jnp.broadcast_to(np.asarray(x, np.float32), shape) for x in (space.low, space.high))
        bounded = (jnp.abs(low) < 1e6) & (jnp.abs(high) < 1e6)
        low, high = jnp.where(bounded, low, -1.0), jnp.where(bounded, high, 1.0)
        return jax.random.uniform(key, shape, minval=low, maxval=high)

    return act


def notes_on(played: Played) -> tuple[str, ...]:
    """Note what is allowed but often a mistake."""
    episodes = int(played.ended.sum())
    cut = np.asarray(played.out.episode_ends()[1])
    lengths = played.out.episode_length[played.ended]
    notes = []
    if episodes == 0:
        notes.append(
            f"no episode ended in {len(played.ended)} steps, so ends have not been checked: use more steps, or a "
            "shorter time limit"
        )
    longest = played.ended & (played.out.episode_length == lengths.max(initial=0))
    if episodes > 3 and not cut.any() and 2 * longest.sum() > episodes and lengths.max() > 1:
        notes.append(
            f"{longest.sum()} of {episodes} episodes were terminated after {lengths.max()} steps, and none lasted "
            "longer: if that is a time limit, report it as truncated, so that the value of the final observation counts"
        )
    if cut.any() and longest.sum() > 3 and not (cut & longest).any():
        notes.append(
            f"all {longest.sum()} episodes of {lengths.max()} steps, the longest, were terminated, and only shorter "
            "ones were truncated: if that is a time limit, terminated and truncated are swapped"
        )
    if not array_of(played.out.obs).any() and not array_of(played.first).any():
        notes.append("all observations are 0")
    if not played.out.reward.any():
        notes.append("all rewards of random actions are 0")
    return tuple(notes)
