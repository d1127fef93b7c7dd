"""Checks for environments: `check` traces shapes and dtypes, and `check_laws` tests laws with random actions."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._base.checked import Count, checked
from .._base.hyperparameters import check_count, check_takes
from .._base.moments import find_moments
from .._base.trees import shapes_of
from ..distributions import Categorical, MultiCategorical
from ..errors import ShapeError, UserTypeError, UserValueError
from ._env import SEATS, Array, Env, Transition, as_observation, check_env, check_items, check_like, get_axes
from ._host import host_errors
from ._spaces import array_bounds, count_options, is_choice_open, is_image, list_spaces, make_action_struct, map_space

Act = Callable[[Array, Any], Any]
JAX_FILES = os.path.join(os.path.dirname(jax.__file__), "")


@checked
def check(env: Env, num_envs: Count = 2, action: Any = None) -> None:
    """Raise unless all shapes and dtypes of `reset`, `step` and `evaluation` are valid; nothing is run, only traced.

    Args:
        env: the environment.
        num_envs: N, the number of environments in the check.
        action: actions of all N environments, leaves `[N, ...]`; None means placeholders that fit the action space.

    Raises:
        UserTypeError, ShapeError: an error that names the first violation and the remedy.

    Example:
        >>> from ppo_parts import envs
        >>> envs.check(envs.make("CartPole-v1"))
    """
    check_env("check", env)
    struct = make_action_struct(env.action_space, get_axes(env, num_envs)) if action is None else action
    _check(env, num_envs, lambda key, obs: struct)


def _check(env: Env, num_envs: int, act: Act) -> None:
    """Do what `check` does; `act(key, obs)` returns the shapes and dtypes of actions."""
    obs = _check_functions(env, num_envs, act)
    with _explained("evaluation"):
        check_evaluation = lambda key: _check_functions(make_evaluation(env, key, num_envs), num_envs, act)  # noqa: E731
        evaluated = jax.eval_shape(check_evaluation, jax.random.key(0))
    alike = "check: observations in the environment of evaluation(state) must be like the others"
    check_like(alike, evaluated, obs, error=ShapeError)


def _check_functions(env: Env, num_envs: int, act: Act) -> Any:
    """Raise unless `reset` and `step` are valid; return the observations."""
    each, key = get_axes(env, num_envs), jax.random.key(0)
    with _explained("reset"):
        returned = jax.eval_shape(lambda key: env.reset(key, num_envs), key)
    state, obs = check_items("check", "reset", returned, ("state", "obs"))
    with _explained("step"):
        returned = jax.eval_shape(env.step, key, state, act(key, obs))
    after, out = check_items("check", "step", returned, ("state", "Transition"))
    if not isinstance(out, Transition):
        raise UserTypeError(f"check: step must return (state, Transition), got (state, {type(out).__name__})")
    out.check(obs, each)
    if env.zero_sum and (lacking := [name for name in SEATS if name not in out.info]):
        says = f"check: the policy plays both sides of this game (zero_sum), but info has no {lacking[0]!r}"
        raise UserValueError(f"{says}: return 1 for the first player, and -1 for the second")
    kept = "check: so that loops can carry it, step must keep the structure, shapes and dtypes of the state of reset"
    check_like(kept, after, state, error=ShapeError)
    _check_observation(env, obs, each)
    return obs


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Explain what JAX cannot trace, and where, instead of JAX's own error about a tracer."""
    try:
        yield
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        frames = [x for x in traceback.extract_tb(error.__traceback__) if JAX_FILES not in x.filename]
        place = f"{frames[-1].filename}:{frames[-1].lineno}, {frames[-1].line}"
        says = f"check: {name} uses the value of an array, which is not known when JAX traces it ({place})"
        remedy = "use jnp.where or jax.lax.cond instead of if, and jnp instead of np, int(x), float(x) and x[mask]"
        if isinstance(error, jax.errors.UnexpectedTracerError):
            says = f"check: {name} uses an array that an earlier call stored outside of the state ({place})"
            remedy = "keep everything that changes in the state"
        raise UserTypeError(f"{says}: {remedy}") from error


def make_evaluation(env: Env, key: Array, num_envs: int) -> Env:
    """Return the environment for evaluation."""
    evaluated = env.evaluation(env.reset(key, num_envs)[0])
    check_env("check: what evaluation(state) returns", evaluated)
    return evaluated


def _check_observation(env: Env, obs: Any, each: tuple[int, ...]) -> None:
    """Raise unless observations and their action masks fit the spaces."""
    obs, available, privileged = as_observation(obs)
    for name, tree in (("observation", obs), ("privileged", privileged)):
        space = getattr(env, f"{name}_space")
        shape = map_space(lambda x: None if getattr(x, "shape", None) is None else tuple(x.shape), space)
        given = jax.tree.map(lambda x: x.shape[len(each) :], tree)
        remedy = "make them alike" if space is not None else f"declare it, as in {name}_space=envs.Box((6,))"
        if shape != given and (shape is not None or name == "privileged"):
            raise ShapeError(f"check: {name}_space has shape {shape}, but reset returns {given}: {remedy}")

    def valid_mask(space: Any) -> Any:
        options = count_options(space)
        return jax.ShapeDtypeStruct((*each, sum(options)), bool) if options else None

    valid = map_space(valid_mask, env.action_space)
    given, there = ({place: shapes_of(x) for place, x in jax.tree.leaves_with_path(t)} for t in (available, valid))
    if not given.items() <= there.items():  # a dict may lack some masks
        must = f"{shapes_of(valid)}, True for each option of {env.action_space} that is available"
        raise ShapeError(f"check: obs.available must be {must}, got {shapes_of(available)}")


class Played(NamedTuple):
    """T steps of N environments with random actions, as NumPy arrays."""

    env: Env
    first: Any  # the observation of the reset, leaves `[N, ...]`
    out: Transition  # leaves `[T, N, ...]`
    ended: np.ndarray  # `[T, N]`, True where an episode ended
    again: tuple[Any, Transition]  # `first` and `out` of another run from the same key
    other: Any  # reset observations of 8 N environments with another key, or None if `first` varies
    evaluated: tuple[Any, Transition]  # `first` and `out` of the environment of `evaluation`, with the same key


def reproducible(played: Played) -> Iterator[str]:
    """Law: the same key gives the same episodes."""
    remedy = "draw all random numbers from the key (in Gymnasium, self.np_random after super().reset(seed=seed))"
    for name, one, again in zip(("reset", "step"), (played.first, played.out), played.again, strict=True):
        if not _are_equal(one, again):
            says = f"{name} returns different results when it is called again with the same key"
            yield f"{says}: {remedy}, and keep everything that changes in the state"


def separate(played: Played) -> Iterator[str]:
    """Law: environments that are reset together do not all begin with the same draw."""
    if played.other is None or not _are_alike(played.other):
        return
    if not _are_equal(*(jax.tree.map(lambda x: x[0], obs) for obs in (played.first, played.other))):
        says = "reset gives all N environments the same first observation, although it depends on the key"
        yield f"{says}: give each environment its own key, jax.random.split(key, num_envs)"


def finite(played: Played) -> Iterator[str]:
    """Law: rewards and observations are finite."""
    named = {"obs": (played.first, played.out.obs), "final_obs": played.out.final_obs, "reward": played.out.reward}
    for name, tree in named.items():
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)):
            yield f"{name} contains NaN or an infinity: end the episode before that, or clip the inputs"


def spaces(played: Played) -> Iterator[str]:
    """Law: integer and image observations, whose bounds networks read, lie within their spaces."""
    return _list_outside(played, read=True)


def _list_outside(played: Played, read: bool) -> Iterator[str]:
    """Yield observations outside of spaces whose bounds networks read or, without `read`, of other spaces."""
    trees = [tree for tree in (played.env.observation_space, played.env.privileged_space) if tree is not None]
    leaf_spaces = [space for tree in trees for space in list_spaces(tree)]
    first = jax.tree.map(lambda x: x[None], played.first)
    for name, obs in (("the first obs", first), ("obs", played.out.obs), ("final_obs", played.out.final_obs)):
        leaves = jax.tree.leaves(as_observation(obs)._replace(available=None))
        for space, x in zip(leaf_spaces, leaves, strict=False):
            options = np.asarray(count_options(space))
            dtype = np.dtype(int if options.size else getattr(space, "dtype", None) or np.float32)
            whole, has_bounds = dtype.kind in "iu", options.size or hasattr(space, "low")
            if (whole or is_image(space)) != read or not has_bounds:
                continue
            if whole and x.dtype.kind not in "biu":
                says = f"observations are {x.dtype}, but those of the observation space, {space}, are integers"
                yield f"{says}: give it the dtype and the bounds of what reset and step return, or return integers"
            low, high = (0, options - 1) if options.size else array_bounds("observations", space)
            if not whole:  # floats may be rounded, and bounds the largest of a dtype
                with np.errstate(over="ignore"):
                    low, high = low - 1e-5 * np.maximum(1, np.abs(low)), high + 1e-5 * np.maximum(1, np.abs(high))
            says = "{name} contains {1:g} {0}, outside of the observation space, {space}"
            remedy, wrong = ": change its bounds, or what the environment returns", (x < low) | (x > high)
            yield from _report(wrong, says + remedy, x, name=name, space=space)


def masks(played: Played) -> Iterator[str]:
    """Law: at least one option of each choice is available wherever the policy acts."""
    each = (as_observation(obs).available for obs in (played.first, played.out.obs))
    seen = jax.tree.map(lambda first, after: np.concatenate([first[None], after]), *each)

    def is_closed(space: Any, available: Any) -> Any:
        return None if available is None else ~is_choice_open(count_options(space), available)

    remedy = "one must be available wherever the policy acts, including in the first observation of the next episode"
    for closed in jax.tree.leaves(map_space(is_closed, played.env.action_space, seen)):
        yield from _report(closed, f"obs.available leaves no action {{0}}: of each choice, at least {remedy}")


def flags(played: Played) -> Iterator[str]:
    """Law: where an episode ended, it was terminated or truncated for every agent."""
    over = (played.out.terminated | played.out.truncated).reshape(*played.ended.shape, -1).all(axis=-1)
    says = "ended is True {0}, but some agent is neither terminated nor truncated"
    return _report(played.ended & ~over, f"{says}: set terminated, or, if a time limit cut the episode, truncated")


def final_observation(played: Played) -> Iterator[str]:
    """Law: `final_obs` followed the step; it is `obs` if the episode goes on, and never from the next episode."""
    obs, ended = played.out.obs, played.ended
    same = _where_close(obs, played.out.final_obs)
    over = ended
    if played.env.num_agents is None:  # a lost life may end an episode only for the learner
        over = over | played.out.terminated | played.out.truncated
    before, after = (jax.tree.map(lambda x, rows=rows: x[rows], obs) for rows in (slice(-1), slice(1, None)))
    changes = ~_where_close(before, after) & ~ended[1:]
    if ended.sum() > 1 and same[ended].all() and changes.any():
        remedy = "it must be the observation that followed the step, and obs the first one after the automatic reset"
        yield f"final_obs equals obs wherever an episode ended: {remedy} (truncated episodes take their value from it)"
    yield from _report(~over & ~same, "final_obs differs from obs {0}, where no episode ended: it must equal obs there")


def episode_length(played: Played) -> Iterator[str]:
    """Law: `episode_length` counts the steps of an episode from 1, and starts again after its end."""
    reported = played.out.episode_length
    length = _sum_episodes(np.ones(played.ended.shape, int), played.ended)
    says = "episode_length is {1} {0}, but the episode has {2} steps, including this one"
    remedy = "count in the state, and start from 0 where an episode ended (envs.auto_reset does)"
    return _report(reported != length, f"{says}: {remedy}", reported, length)


def episode_return(played: Played) -> Iterator[str]:
    """Law: `episode_return` sums the unscaled rewards of the episode so far, without those of absent agents."""
    out = played.evaluated[1]
    reward = (out.reward if out.mask is None else np.where(out.mask, out.reward, 0)).astype(float)
    total = _sum_episodes(reward, np.asarray(out.episode_ends()[0]))
    says = "episode_return is {1:g} {0}, but the rewards of the episode add up to {2:g}: add the reward of this step"
    remedy = "start from 0 where an episode ended (envs.auto_reset does); env.evaluation(state) must not scale rewards"
    wrong = ~np.isclose(out.episode_return, total, rtol=1e-3, atol=1e-3)
    return _report(wrong, f"{says}, and {remedy}", out.episode_return, total)


def seats(played: Played) -> Iterator[str]:
    """Law: in a game in which the policy plays both sides, `info` tells who moved and who moves next."""
    if not played.env.zero_sum:
        return
    moved, following = (np.asarray(played.out.info[name]) for name in SEATS)
    says = "info[{name!r}] is {1:g} {0}: return 1 for the first player, and -1 for the second"
    yield from _report(np.abs(moved) != 1, says, moved, name=SEATS[0])
    yield from _report((np.abs(following) != 1) & ~played.ended, says, following, name=SEATS[1])
    remedy = "it must name the player who moves next in obs"
    says = f"info['next_seat'] {{0}} is not the info['seat'] of the step after it: {remedy}"
    yield from _report((following[:-1] != moved[1:]) & ~played.ended[:-1], says)


LAWS = (reproducible, separate, finite, spaces, masks, flags, final_observation, episode_length, episode_return, seats)
"""The laws that `check_laws` checks, in this order; each function yields what is wrong and how to fix it."""


class Report(NamedTuple):
    """The result of `check_laws`: how many episodes ended and how, and notes on what looks unusual."""

    episodes: int
    terminated: int
    truncated: int
    notes: tuple[str, ...]


@checked
def check_laws(
    env: Env, *, num_envs: Count = 4, num_steps: Count = 1000, seed: int = 0, act: Act | None = None
) -> Report:
    """Run an environment with random actions, and raise an error that names the field if it breaks a law.

    Args:
        env: the environment; `check` runs first.
        num_envs, num_steps: N and T; N environments run for T steps, twice.
        seed: seed for the keys.
        act: `act(key, obs) -> action` for all environments; None draws uniformly from the available actions.

    Raises:
        UserTypeError, ShapeError: as in `check`. UserValueError: an error that names the first broken law and a remedy.

    Example:
        >>> from ppo_parts import envs
        >>> envs.check_laws(envs.make("CartPole-v1", max_steps_in_episode=15), num_steps=30).notes
        ()
    """
    check_env("check_laws", env)
    check_count("check_laws", "seed", seed, 0)
    act = random_action(env) if act is None else act
    check_takes("check_laws", "act", act, ("key", "obs"))
    _check(env, num_envs, functools.partial(jax.eval_shape, act))
    with host_errors():
        played = play(env, act, num_envs, num_steps, seed)
    if wrong := next(itertools.chain.from_iterable(law(played) for law in LAWS), None):
        raise UserValueError(f"check_laws: {wrong}")
    episodes, truncated = (int(np.sum(x)) for x in played.out.episode_ends())
    return Report(episodes, episodes - truncated, truncated, tuple(list_notes(played)))


def play(env: Env, act: Act, num_envs: int, num_steps: int, seed: int) -> Played:
    """Run an environment twice with one key, and its `evaluation` once."""

    def run(key: Array, evaluating: bool = False) -> tuple[Any, Transition]:
        env_key, reset_key, key = jax.random.split(key, 3)
        played = make_evaluation(env, env_key, num_envs) if evaluating else env
        state, obs = played.reset(reset_key, num_envs)

        def step(carry: Any, key: Array) -> Any:
            action_key, step_key = jax.random.split(key)
            state, out = played.step(step_key, carry[0], act(action_key, carry[1]))
            return (state, out.obs), out

        return obs, jax.lax.scan(step, (state, obs), jax.random.split(key, num_steps))[1]

    key, same = jax.random.key(seed), []
    one, two = (jax.jit(functools.partial(run)).lower(key) for _ in range(2))  # traced twice
    compiled = one.compile()
    first, out = jax.device_get(compiled(key))
    # Compilation takes most of the time, so only one of two programs with the same text is compiled. The text contains
    # every constant, such as a random number from NumPy. (The text of a jaxpr lacks constants of inner functions.)
    again = jax.device_get((compiled if one.as_text() == two.as_text() else two.compile())(key))
    reset_many = jax.jit(lambda key: env.reset(key, 8 * num_envs)[1])  # compiled only if a law needs it
    other = jax.device_get(reset_many(jax.random.key(seed + 1))) if _are_alike(first) else None
    jax.eval_shape(lambda key: same.append(make_evaluation(env, key, num_envs) is env), key)
    evaluated = (first, out) if same[0] else jax.device_get(jax.jit(functools.partial(run, evaluating=True))(key))
    return Played(env, first, out, np.asarray(out.episode_ends()[0]), again, other, evaluated)


def random_action(env: Env) -> Act:
    """Return `act(key, obs) -> action`, uniform among the available actions, or in the box of one environment.

    If a box has only one bound, actions are drawn within 2 of it; if it has none, within [-1, 1].
    """
    space = env.action_space

    def act(key: Array, obs: Any) -> Any:
        each = get_axes(env, len(jax.tree.leaves(obs)[0]))
        number = len(list_spaces(space))
        keys = iter(jax.random.split(key, number) if number > 1 else [key])
        return map_space(lambda one, mask: of_one(next(keys), one, mask, each), space, as_observation(obs).available)

    def of_one(key: Array, space: Any, available: Any, each: tuple[int, ...]) -> Array:
        if options := count_options(space):
            logits = jnp.zeros((*each, sum(options))) if available is None else jnp.where(available, 0.0, -1e9)
            policy = MultiCategorical(logits, options) if hasattr(space, "nvec") else Categorical(logits)
            return policy.sample(seed=key)
        shape = make_action_struct(space, each).shape
        low, high = (jnp.broadcast_to(jnp.float32(x), shape) for x in array_bounds("actions", space))
        from_low, to_high = low > -1e6, high < 1e6
        least = jnp.where(from_low, low, jnp.where(to_high, high - 2, -1))
        greatest = jnp.where(to_high, high, jnp.where(from_low, low + 2, 1))
        return jax.random.uniform(key, shape, minval=least, maxval=greatest)

    return act


def list_notes(played: Played) -> Iterator[str]:
    """Yield notes on what is allowed but often a mistake."""
    episodes, lengths = int(played.ended.sum()), played.out.episode_length[played.ended]
    cut, last = np.asarray(played.out.episode_ends()[1]), lengths.max(initial=0)
    longest = played.ended & (played.out.episode_length == last)
    number = longest.sum()
    if episodes == 0:
        says = f"no episode ended in {len(played.ended)} steps, so ends have not been checked"
        yield f"{says}: use more steps, or a shorter time limit"
    if episodes > 3 and not cut.any() and 2 * number > episodes and last > 1:
        says = f"{number} of {episodes} episodes were terminated after {last} steps, and none lasted longer"
        remedy = "if that is a time limit, report it as truncated, so that the value of the final observation counts"
        yield f"{says}: {remedy}"
    if cut.any() and number > 3 and not (cut & longest).any():
        says = f"all {number} episodes of {last} steps, the longest, were terminated, and only shorter ones truncated"
        yield f"{says}: if that is a time limit, terminated and truncated are swapped"
    if played.out.terminated.ndim == 3:
        yield from _list_left(played)
    numbers = [as_observation(obs)._replace(available=None) for obs in (played.first, played.out.obs)]
    if not any(x.any() for x in jax.tree.leaves(numbers)):
        yield "all observations are 0"
    if not played.out.reward.any():
        yield "all rewards of random actions are 0"
    state = jax.eval_shape(lambda key: played.env.reset(key, played.ended.shape[1]), jax.random.key(0))[0]
    one, other = (jax.tree.map(lambda x: x[None], obs) for obs in (played.first, played.evaluated[0]))
    if not find_moments(state) and not _where_close(one, other).all():
        says = "the environment of evaluation(state) resets to other observations with the same key"
        yield f"{says}: a wrapper that changes observations must also wrap env.evaluation(state)"
    yield from itertools.islice(_list_outside(played, read=False), 1)


def _list_left(played: Played) -> Iterator[str]:
    """Yield notes on agents that leave before their episode ends."""
    out, ended = played.out, played.ended[:, :, None]
    over = out.terminated | out.truncated
    left = np.zeros_like(over)  # whether an agent ended in an earlier step of the episode
    for t in range(1, len(over)):
        left[t] = (left[t - 1] | over[t - 1]) & ~ended[t - 1]
    counted = left & (True if out.mask is None else out.mask)
    if counted.any():
        says = "an agent ended before its episode did, and its later steps count"
        yield f"{says}: if it has left, return mask, False in the steps after its end"
    if out.mask is not None and (over & ~left & ~out.mask)[1:][out.mask[:-1] & ~ended[:-1]].any():
        says = "the step in which an agent ended does not count, although the step before it does"
        yield f"{says}: mask is True in the step that ends an agent, and False in the steps after it"
    if ((left | over).all(axis=-1) & ~played.ended).any():
        says = "all agents have ended, but in different steps, so the episode continues"
        yield f"{says}: keep terminated True for an agent that has left"


def _are_alike(tree: Any) -> bool:
    """Return whether every row equals the first one."""
    return all((x == x[:1]).all() for x in jax.tree.leaves(tree))


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether all leaves of two trees are equal; NaN equals NaN."""
    same = jax.tree.map(lambda x, y: np.array_equal(x, y, equal_nan=jnp.issubdtype(x.dtype, jnp.inexact)), one, other)
    return all(jax.tree.leaves(same))


def _where_close(one: Any, other: Any) -> np.ndarray:
    """Return where the leaves of two trees are equal up to rounding, `[T, N]`."""
    same = []
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        # Integers are not converted, because a thousand steps of Atari pixels as float64 would take gigabytes.
        inexact = np.issubdtype(x.dtype, np.inexact)
        close = np.isclose(x, y, rtol=1e-5, atol=1e-5, equal_nan=True) if inexact else x == y
        same.append(close.all(axis=tuple(range(2, x.ndim))))
    return np.logical_and.reduce(same)


def _report(wrong: Any, says: str, *values: Any, **names: Any) -> Iterator[str]:
    """Yield a message about the first wrong place of `[T, N, ...]`; `{0}` is the place, and `{1}`, ... the values."""
    if wrong.any():
        place = tuple(np.argwhere(wrong)[0])
        yield says.format("in step {} of environment {}".format(*place), *(x[place].item() for x in values), **names)


def _sum_episodes(x: Any, ended: np.ndarray) -> np.ndarray:
    """Return the cumulative sum of `x`, `[T, N, ...]`, over the steps of each episode."""
    sums, before = np.empty_like(x), np.zeros_like(x[0])
    for t, over in enumerate(ended):
        sums[t] = before + x[t]
        before = np.where(over.reshape(-1, *(1,) * (x.ndim - 2)), 0, sums[t])
    return sums
