"""A check that plays an environment with random actions, and compares the results with the laws."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base.errors import UserValueError
from .._base.hyperparameters import check_count
from ..distributions import Categorical, MultiCategorical
from ._check import check, evaluation_of
from ._env import Array, Env, Observation, Transition, action_struct, check_env, count_options
from ._laws import LAWS, Played, alike, applies, array_of, ended_in


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

    Returns:
        `Report`.

    Raises:
        UserTypeError, ShapeError: as `check`. UserValueError: names the first law that is broken, and the remedy.

    Example:
        >>> from ppo_parts import envs
        >>> envs.check_laws(envs.make("CartPole-v1", max_steps_in_episode=15), num_steps=30).notes
        ()
    """
    check_env("check_laws", env)
    check_count("check_laws", "num_steps", num_steps)
    check_count("check_laws", "num_envs", num_envs)
    act = act or random_action(env)
    check(env, num_envs, jax.eval_shape(lambda key: act(key, env.reset(key, num_envs)[1]), jax.random.key(0)))
    played = play(env, act, num_envs, num_steps, seed)
    laws = [law for law in LAWS if applies(law, played)]
    for law in laws:
        if (wrong := law(played)) is not None:
            raise UserValueError(f"check_laws: {wrong}")
    cut = truncated_in(played)
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
        return evaluation_of(env, key, num_envs)

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
    return Played(env, first, out, ended_in(out), again, other, unscaled)


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
        shape = action_struct(space, each).shape
        low, high = (jnp.broadcast_to(np.asarray(x, np.float32), shape) for x in (space.low, space.high))
        bounded = (jnp.abs(low) < 1e6) & (jnp.abs(high) < 1e6)
        low, high = jnp.where(bounded, low, -1.0), jnp.where(bounded, high, 1.0)
        return jax.random.uniform(key, shape, minval=low, maxval=high)

    return act


def truncated_in(played: Played) -> np.ndarray:
    """Return where an episode ended because it was cut, `[T, N]`."""
    return np.asarray(played.out.episode_ends()[1])


def notes_on(played: Played) -> tuple[str, ...]:
    """Note what is allowed but often a mistake."""
    episodes = int(played.ended.sum())
    cut = truncated_in(played)
    lengths = played.out.episode_length[played.ended]
    notes = []
    if episodes == 0:
        notes.append(
            f"no episode ended in {len(played.ended)} steps, so the ends of episodes have not been checked: use more "
            "steps, or a shorter time limit"
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
