"""The laws that every environment must follow: functions of recorded steps that return what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from ._env import SEATS, Env, Observation, Transition


class Played(NamedTuple):
    """T steps of N environments with random actions, as NumPy arrays.

    Attributes:
        env: the environment.
        first: the observation of the reset, leaves `[N, ...]`.
        out: the transitions, leaves `[T, N, ...]`.
        ended: `[T, N]`, True where an episode ended.
        again: another run from the same key, as `(first, out)`.
        other: observations of a reset of 8 N environments with another key; None if those of `first` are not all alike.
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
"""Returns what is wrong and how to fix it; None if the law holds."""


def reproducible(played: Played) -> str | None:
    """The same key gives the same episodes."""
    if equal((played.first, played.out), played.again):
        return None
    where = "reset" if not equal(played.first, played.again[0]) else "step"
    return (
        f"{where} returns different results when it is called again with the same key: draw all random numbers from "
        "the key (jax.random; in Gymnasium self.np_random, after super().reset(seed=seed)), and keep everything that "
        "changes in the state"
    )


def separate(played: Played) -> str | None:
    """Environments that are reset together do not all begin with the same draw."""
    if played.other is None:
        return None
    first, other = array_of(played.first), array_of(played.other)
    if alike(other) and (first[0] != other[0]).any():
        return (
            "reset gives all N environments the same first observation, although it depends on the key: give each "
            "environment its own key, jax.random.split(key, num_envs)"
        )
    return None


def finite(played: Played) -> str | None:
    """Rewards and observations are finite."""
    named = {"obs": (played.first, played.out.obs), "final_obs": played.out.final_obs, "reward": played.out.reward}
    for name, tree in named.items():
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(tree) if np.issubdtype(x.dtype, np.inexact)):
            return f"{name} contains NaN or an infinity: end the episode before that, or clip the inputs"
    return None


def integers(played: Played) -> str | None:
    """Where the space of observations consists of integers, observations are integers within its bounds."""
    space, seen = played.env.observation_space, array_of(played.out.obs)
    if seen.dtype.kind == "f":
        return (
            f"observations are {seen.dtype}, but those of the observation space, {space}, are {np.dtype(space.dtype)}: "
            "give the space the dtype and the bounds of what reset and step return"
        )
    outside = (seen < space.low) | (seen > space.high)
    found = _first(outside)
    return found and (
        f"obs contains {seen[outside][0]} {found}, outside of the observation space, {space}: change its bounds, or "
        "what step returns"
    )


def masks(played: Played) -> str | None:
    """At least one action is available wherever the policy acts."""
    if not played.first.available.any(axis=-1).all():
        return "obs.available leaves no action after reset: at least one must be available wherever the policy acts"
    found = _first(~played.out.obs.available.any(axis=-1))
    return found and (
        f"obs.available leaves no action {found}: at least one must be available wherever the policy acts (obs is what "
        "it acts on next; where an episode ended it is the first observation of the next)"
    )


def flags(played: Played) -> str | None:
    """Where an episode ended, every agent's part of it was terminated or truncated."""
    over = (played.out.terminated | played.out.truncated).reshape(*played.ended.shape, -1).all(axis=-1)
    found = _first(played.ended & ~over)
    return found and (
        f"ended is True {found}, but some agent is neither terminated nor truncated: set terminated, or, if a time "
        "limit cut the episode, truncated"
    )


def final_observation(played: Played) -> str | None:
    """`final_obs` is the observation that followed the step: `obs` if the episode goes on, never one of the next."""
    obs, final = played.out.obs, played.out.final_obs
    same = np.ones(played.ended.shape, bool)
    for x, y in zip(jax.tree.leaves(obs), jax.tree.leaves(final), strict=True):
        # Integers are compared as they are: as float64, a thousand steps of Atari's pixels would take gigabytes.
        inexact = np.issubdtype(x.dtype, np.inexact)
        close = np.isclose(x, y, rtol=1e-5, atol=1e-5, equal_nan=True) if inexact else x == y
        same &= close.reshape(*same.shape, -1).all(axis=-1)
    over = played.ended
    if played.env.num_agents is None:  # a lost life may end an episode for the learner only
        over = over | played.out.terminated | played.out.truncated
    found = _first(~over & ~same)
    if found is not None:
        return f"final_obs differs from obs {found}, where no episode ended: it must equal obs there"
    seen = array_of(obs)
    changes = (seen[1:] != seen[:-1]).reshape(*played.ended[1:].shape, -1).any(axis=-1)[~played.ended[1:]]
    if played.ended.sum() > 1 and same[played.ended].all() and changes.any():
        return (
            "final_obs equals obs wherever an episode ended: final_obs must be the observation that followed the step, "
            "and obs the first one of the next episode, after the automatic reset. The value of a truncated episode is "
            "taken from final_obs"
        )
    return None


def episode_length(played: Played) -> str | None:
    """`episode_length` counts the steps of an episode from 1, and starts again after its end."""
    length = np.ones(played.ended.shape, int)
    for t, ended in enumerate(played.ended[:-1]):
        length[t + 1] += np.where(ended, 0, length[t])
    wrong = np.asarray(played.out.episode_length != length)
    found = _first(wrong)
    if found is None:
        return None
    t, n = np.argwhere(wrong)[0]
    return (
        f"episode_length is {played.out.episode_length[t, n]} {found}, but the episode has {length[t, n]} steps, "
        "including this one: count in the state, and start from 0 where an episode ended (envs.auto_reset does)"
    )


def episode_return(played: Played) -> str | None:
    """`episode_return` is the sum of the unscaled rewards of the episode so far, without those of absent agents."""
    out, total = played.unscaled, np.zeros(played.unscaled.reward.shape[1:])
    reward = out.reward if out.mask is None else np.where(out.mask, out.reward, 0)
    for t, ended in enumerate(np.asarray(out.episode_ends()[0])):
        total = total + reward[t]
        wrong = ~np.isclose(out.episode_return[t], total, rtol=1e-3, atol=1e-3)
        if wrong.any():
            place = tuple(np.argwhere(wrong)[0])
            return (
                f"episode_return is {out.episode_return[t][place]:g} in step {t} of environment {place[0]}, but the "
                f"rewards of the episode add up to {total[place]:g}: add the reward of this step, and start from 0 "
                "where an episode ended (envs.auto_reset does); env.evaluation(state) must not scale rewards"
            )
        total = np.where(ended.reshape(-1, *(1,) * (total.ndim - 1)), 0, total)
    return None


def seats(played: Played) -> str | None:
    """In a game in which the policy plays both sides, `info` tells who moved, and who moves next."""
    moved, following = (np.asarray(played.out.info[name]) for name in SEATS)
    for name, seat, known in ((SEATS[0], moved, True), (SEATS[1], following, ~played.ended)):
        wrong = (np.abs(seat) != 1) & known
        if found := _first(wrong):
            return f"info[{name!r}] is {seat[wrong][0]:g} {found}: return 1 for the first player, and -1 for the second"
    found = _first((following[:-1] != moved[1:]) & ~played.ended[:-1])
    return found and (
        f"info['next_seat'] {found} is not the info['seat'] of the step after it: it must be the player to move in obs"
    )


LAWS: tuple[Law, ...] = (
    reproducible, separate, finite, integers, masks, flags, final_observation, episode_length, episode_return, seats,
)  # fmt: skip
"""What `check_laws` checks, in this order."""


def applies(law: Law, played: Played) -> bool:
    """Return whether a law says anything about this environment."""
    space = played.env.observation_space
    has: dict[Law, bool] = {
        integers: hasattr(space, "low") and np.dtype(getattr(space, "dtype", None) or np.float32).kind in "iu",
        masks: isinstance(played.first, Observation) and played.first.available is not None,
        flags: played.out.ended is not None,
        seats: played.env.zero_sum,
    }
    return has.get(law, True)


def array_of(obs: Any) -> np.ndarray:
    """Return the first leaf of observations; masks are skipped."""
    return jax.tree.leaves(obs)[0]


def alike(x: np.ndarray) -> bool:
    """Return whether all rows are the same."""
    return bool((x == x[:1]).all())


def equal(one: Any, other: Any) -> bool:
    """Return whether all leaves of two trees are equal; NaN equals NaN."""
    same = jax.tree.map(lambda x, y: np.array_equal(x, y, equal_nan=np.issubdtype(x.dtype, np.inexact)), one, other)
    return all(jax.tree.leaves(same))


def _first(wrong: np.ndarray) -> str | None:
    """Describe where the first True of `[T, N, ...]` is."""
    if not wrong.any():
        return None
    t, n, *_ = np.argwhere(wrong)[0]
    return f"in step {t} of environment {n}"
