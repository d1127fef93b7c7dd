"""Laws that every environment follows, and two checks: of shapes and dtypes (traced), and of what happens (played)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import UserTypeError, UserValueError
from .._hyperparameters import count
from ..functional import ShapeError
from ._env import Array, Env, Observation, Transition, described, is_discrete


def check(env: Env, num_envs: int = 2, action: Any = None) -> None:
    """Raise if an environment of your own does not follow the protocol; the error names the field and the remedy.

    The environment is traced but not run: this checks every shape and dtype of `reset`, `step` and `evaluation`.

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
        ppo_parts.UserTypeError: check: 'CartPole-v1' is not an environment: make one with envs.make(...) or
        envs.Env(...)
    """
    if not isinstance(env, Env):
        raise UserTypeError(f"check: {env!r} is not an environment: make one with envs.make(...) or envs.Env(...)")
    each = (count("check", "num_envs", num_envs),) + (() if env.num_agents is None else (env.num_agents,))
    key = jax.random.key(0)
    state, obs = _pair("reset", jax.eval_shape(lambda key: env.reset(key, num_envs), key))
    if action is None:
        space = env.action_space
        dtype = jnp.int32 if is_discrete(space) else jnp.float32
        action = jax.ShapeDtypeStruct((*each, *(() if is_discrete(space) else space.shape)), dtype)
    after, out = _pair("step", jax.eval_shape(env.step, key, state, action))
    if not isinstance(out, Transition):
        raise UserTypeError(f"check: step must return (state, Transition), got (state, {type(out).__name__})")
    out.check(obs, each)
    if described(after) != described(state):
        raise ShapeError(
            "check: step must keep the structure, shapes and dtypes of the state, or no loop can carry it; reset "
            f"returns {described(state)}, step {described(after)}"
        )
    _check_observation(env, obs, each)
    evaluated = described(jax.eval_shape(lambda key: _evaluation(env, key, num_envs).reset(key, num_envs)[1], key))
    if evaluated != described(obs):
        raise ShapeError(
            f"check: observations in the environment of evaluation(state) must be like the others, {described(obs)}, "
            f"got {evaluated}"
        )


def _evaluation(env: Env, key: Array, num_envs: int) -> Env:
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
        obs, available = obs
    leaves = jax.tree.leaves(obs)
    if shape is not None and len(leaves) == 1 and leaves[0].shape[len(each) :] != tuple(shape):
        raise ShapeError(
            f"check: observation_space has shape {tuple(shape)}, and observations have {leaves[0].shape[len(each) :]}"
        )
    if available is None:
        return
    if not is_discrete(env.action_space):
        raise UserTypeError(
            "check: obs.available masks discrete actions, and action_space is not discrete: leave it None"
        )
    if available.shape != (*each, env.action_space.n) or available.dtype != bool:
        raise ShapeError(
            f"check: obs.available must be boolean of shape {(*each, env.action_space.n)}, one for each action, got "
            f"{available.dtype} of shape {available.shape}"
        )


def _pair(name: str, returned: Any) -> tuple[Any, Any]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        second = {"reset": "obs", "step": "Transition"}[name]
        got = f"{len(returned)} items" if isinstance(returned, tuple) else type(returned).__name__
        raise UserTypeError(f"check: {name} must return (state, {second}), got {got}")
    return returned


class Played(NamedTuple):
    """T steps of N environments with random actions, as NumPy arrays.

    Attributes:
        env: the environment.
        first: the observation of the reset, leaves `[N, ...]`.
        out: the transitions, leaves `[T, N, ...]`.
        ended: `[T, N]`, True where an episode ended.
        again: another run from the same key, as `(first, out)`.
        other: observations of a reset with another key.
        unscaled: the transitions of the same steps in the environment of `evaluation`.
    """

    env: Env
    first: Any
    out: Transition
    ended: np.ndarray
    again: tuple[Any, Transition]
    other: Any
    unscaled: Transition


Law = Callable[[Played], str | None]
"""Returns what is wrong and how to mend it; None where the law holds."""


def reproducible(played: Played) -> str | None:
    """The same key gives the same episodes."""
    if _equal((played.first, played.out), played.again):
        return None
    where = "reset" if not _equal(played.first, played.again[0]) else "step"
    return (
        f"{where} gives other results when it is called again with the same key: draw all random numbers from the key "
        "(jax.random), and keep everything that changes in the state"
    )


def separate(played: Played) -> str | None:
    """Environments that are reset together do not all begin with the same draw."""
    first, other = _seen(played.first), _seen(played.other)
    copies = all(np.array_equal(x, np.broadcast_to(x[:1], x.shape), equal_nan=True) for x in (first, other))
    if len(first) > 1 and copies and not np.array_equal(first, other, equal_nan=True):
        return (
            "reset gives all N environments the same first observation, and another one with another key: give each "
            "its own key, jax.random.split(key, num_envs)"
        )
    return None


def finite(played: Played) -> str | None:
    """Rewards and observations are finite."""
    named = {"obs": (played.first, played.out.obs), "final_obs": played.out.final_obs, "reward": played.out.reward}
    for name, tree in named.items():
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(tree) if np.issubdtype(x.dtype, np.inexact)):
            return f"{name} contains NaN or an infinity: end the episode before that, or clip what it is computed from"
    return None


def masks(played: Played) -> str | None:
    """At least one action is available in each observation from which the policy acts."""
    if not isinstance(played.first, Observation) or played.first.available is None:
        return None
    if not played.first.available.any(axis=-1).all():
        return "obs.available leaves no action after reset: at least one must be available wherever the policy acts"
    found = _first(~played.out.obs.available.any(axis=-1))
    if found is None:
        return None
    return (
        f"obs.available leaves no action {found}: at least one must be available wherever the policy acts (obs is what "
        "it acts on next; where an episode ended it is the first observation of the next)"
    )


def flags(played: Played) -> str | None:
    """Where an episode ended, every agent's part of it was terminated or truncated; elsewhere it goes on."""
    if played.out.ended is None:
        return None
    over = (played.out.terminated | played.out.truncated).reshape(*played.ended.shape, -1).all(axis=-1)
    found = _first(played.ended & ~over)
    return found and (
        f"ended is True {found}, and neither terminated nor truncated for some agent: set terminated, or, if a time "
        "limit cut the episode, truncated"
    )


def final_observation(played: Played) -> str | None:
    """`final_obs` is the observation that followed the step: `obs` where the episode goes on, never of the next one."""
    obs, final = played.out.obs, played.out.final_obs
    same = np.ones(played.ended.shape, bool)
    for x, y in zip(jax.tree.leaves(obs), jax.tree.leaves(final), strict=True):
        equal = np.isclose(x, y, rtol=1e-5, atol=1e-5, equal_nan=True) if x.dtype != bool else x == y
        same &= equal.reshape(*same.shape, -1).all(axis=-1)
    found = _first(~played.ended & ~same)
    if found is not None:
        return f"final_obs differs from obs {found}, where no episode ended: it must equal obs there"
    seen = _seen(obs)
    changes = (seen[1:] != seen[:-1]).reshape(*played.ended[1:].shape, -1).any(axis=-1)[~played.ended[1:]]
    if played.ended.sum() > 1 and same[played.ended].all() and changes.any():
        return (
            "final_obs is the first observation of the next episode wherever one ended: it must be the observation "
            "that followed the step, before the reset. The value of a truncated episode is taken from it"
        )
    return None


def episode_length(played: Played) -> str | None:
    """`episode_length` counts the steps of an episode from 1, and starts anew after its end."""
    length = np.zeros(played.ended.shape, int)
    steps = np.zeros(played.ended.shape[1], int)
    for t, ended in enumerate(played.ended):
        length[t] = steps + 1
        steps = np.where(ended, 0, length[t])
    wrong = np.asarray(played.out.episode_length != length)
    found = _first(wrong)
    if found is None:
        return None
    t, n = np.argwhere(wrong)[0]
    return (
        f"episode_length is {played.out.episode_length[t, n]} {found}, and the episode has {length[t, n]} steps, "
        "including this one: count in the state, and start from 0 where an episode ended (envs.auto_reset does)"
    )


def episode_return(played: Played) -> str | None:
    """`episode_return` is the sum of the unscaled rewards of the episode so far."""
    out, total = played.unscaled, np.zeros(played.unscaled.reward.shape[1:])
    for t, ended in enumerate(_ended(out)):
        total = total + out.reward[t]
        wrong = ~np.isclose(out.episode_return[t], total, rtol=1e-3, atol=1e-3)
        if wrong.any():
            place = tuple(np.argwhere(wrong)[0])
            return (
                f"episode_return is {out.episode_return[t][place]:g} in step {t} of environment {place[0]}, and the "
                f"rewards of the episode add up to {total[place]:g}: add the reward of this step, and start from 0 "
                "where an episode ended (envs.auto_reset does); env.evaluation(state) must not scale rewards"
            )
        total = np.where(ended.reshape(-1, *(1,) * (total.ndim - 1)), 0, total)
    return None


LAWS: tuple[Law, ...] = (
    reproducible, separate, finite, masks, flags, final_observation, episode_length, episode_return,
)  # fmt: skip
"""What `check_laws` checks, in this order."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What `check_laws` saw: how many episodes ended and how, and notes on what looks unusual."""

    episodes: int
    terminated: int
    truncated: int
    notes: tuple[str, ...]


def check_laws(
    env: Env, *, num_envs: int = 4, num_steps: int = 1000, seed: int = 0, act: Callable[[Array, Any], Any] | None = None
) -> Report:
    """Play an environment with random actions, and raise if it does not follow a law; the error names the field.

    Args:
        env: the environment; `check` runs first.
        num_envs, num_steps: N environments are played for T steps, twice.
        seed: seed of the keys.
        act: `act(key, obs) -> action` for all environments; None: uniformly among the available actions, or within the
            bounds of the box.

    Returns:
        `Report`.

    Raises:
        UserTypeError, ShapeError: as `check`. UserValueError: names the first law that is broken, and the remedy.

    Example:
        >>> from ppo_parts import envs
        >>> envs.check_laws(envs.make("CartPole-v1", max_steps_in_episode=15), num_steps=30).notes
        ()
    """
    count("check_laws", "num_steps", num_steps)
    act = act or random_action(env)
    check(env, num_envs, jax.eval_shape(lambda key: act(key, env.reset(key, num_envs)[1]), jax.random.key(0)))
    played = play(env, act, num_envs, num_steps, seed)
    for law in LAWS:
        wrong = law(played)
        if wrong is not None:
            raise UserValueError(f"check_laws: {wrong}")
    return report(played)


def play(env: Env, act: Callable[[Array, Any], Any], num_envs: int, num_steps: int, seed: int) -> Played:
    """Play an environment twice with one key, and once its evaluation."""

    def played(make: Callable[[Array], Env]) -> Callable[[Array], Any]:
        def run(key: Array) -> tuple[Any, Transition, Any]:
            env_key, reset_key, other_key, key = jax.random.split(key, 4)
            env = make(env_key)
            state, obs = env.reset(reset_key, num_envs)

            def step(carry: Any, key: Array) -> Any:
                action_key, step_key = jax.random.split(key)
                state, out = env.step(step_key, carry[0], act(action_key, carry[1]))
                return (state, out.obs), out

            _, out = jax.lax.scan(step, (state, obs), jax.random.split(key, num_steps))
            return obs, out, env.reset(other_key, num_envs)[1]

        return run

    def evaluation(key: Array) -> Env:
        return _evaluation(env, key, num_envs)

    def numpy(tree: Any) -> Any:
        return jax.tree.map(np.asarray, tree)

    key, same = jax.random.key(seed), []
    one, two = (jax.jit(played(lambda key: env)).trace(key) for _ in range(2))
    compiled = one.lower().compile()
    first, out, other = numpy(compiled(key))
    again = numpy((compiled if _same_program(one.jaxpr, two.jaxpr) else two.lower().compile())(key)[:2])
    jax.eval_shape(lambda key: same.append(evaluation(key) is env), key)
    unscaled = out if same[0] else numpy(jax.jit(played(evaluation))(key)[1])
    return Played(env, first, out, _ended(out), again, other, unscaled)


def _same_program(one: Any, other: Any) -> bool:
    """Return whether two traces are the same; a random number of NumPy, for example, would differ."""
    words = [re.sub("0x[0-9a-f]+", "", str(program)) for program in (one, other)]  # without addresses in memory
    return words[0] == words[1] and _equal(*([np.asarray(c) for c in program.consts] for program in (one, other)))


def random_action(env: Env) -> Callable[[Array, Any], Array]:
    """Return `act(key, obs) -> action`, uniform among the available actions or within the box of one environment."""
    space = env.action_space

    def act(key: Array, obs: Any) -> Array:
        agents = () if env.num_agents is None else (env.num_agents,)
        each = (jax.tree.leaves(obs)[0].shape[0], *agents)
        if is_discrete(space):
            available = obs.available if isinstance(obs, Observation) else None
            logits = jnp.zeros((*each, space.n)) if available is None else jnp.where(available, 0.0, -1e9)
            return jax.random.categorical(key, logits).astype(jnp.int32)
        shape = (*each, *space.shape)
        low, high = (jnp.broadcast_to(np.asarray(x, np.float32), shape) for x in (space.low, space.high))
        bounded = (jnp.abs(low) < 1e6) & (jnp.abs(high) < 1e6)
        low, high = jnp.where(bounded, low, -1.0), jnp.where(bounded, high, 1.0)
        return low + jax.random.uniform(key, shape) * (high - low)

    return act


def report(played: Played) -> Report:
    """Count the episodes, and note what is allowed but often a mistake."""
    episodes = int(played.ended.sum())
    cut = played.out.truncated.reshape(*played.ended.shape, -1).any(axis=-1) & played.ended
    lengths = played.out.episode_length[played.ended]
    notes = []
    if episodes == 0:
        notes.append(
            f"no episode ended in {len(played.ended)} steps, so the ends of episodes have not been checked: give more "
            "steps, or a shorter time limit"
        )
    if episodes > 3 and not cut.any() and len(set(lengths.tolist())) == 1 and lengths[0] > 1:
        notes.append(
            f"all {episodes} episodes were terminated after {lengths[0]} steps: if that is a time limit, report it as "
            "truncated, so that the value of the final observation counts"
        )
    if not _seen(played.out.obs).any() and not _seen(played.first).any():
        notes.append("all observations are 0")
    if not played.out.reward.any():
        notes.append("all rewards of random actions are 0")
    return Report(episodes, int((played.ended & ~cut).sum()), int(cut.sum()), tuple(notes))


def _ended(out: Transition) -> np.ndarray:
    """Where an episode ended, `[T, N]`."""
    return np.asarray(out.terminated | out.truncated if out.ended is None else out.ended)


def _seen(obs: Any) -> np.ndarray:
    """The first leaf of observations; the mask is not it."""
    return jax.tree.leaves(obs)[0]


def _equal(one: Any, other: Any) -> bool:
    same = jax.tree.map(lambda x, y: np.array_equal(x, y, equal_nan=np.issubdtype(x.dtype, np.inexact)), one, other)
    return all(jax.tree.leaves(same))


def _first(wrong: np.ndarray) -> str | None:
    """Say where the first True of `[T, N, ...]` is."""
    if not wrong.any():
        return None
    t, n, *_ = np.argwhere(wrong)[0]
    return f"in step {t} of environment {n}"
