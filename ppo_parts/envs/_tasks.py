"""Tasks that no other package has in JAX: a task with hybrid actions, and POPGym's memory tasks."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base.hyperparameters import check_number
from ..functional._arguments import FROM_0
from ._env import Array, Env, check_known
from ._episodes import Step, auto_reset
from ._spaces import Box, Dict, Discrete

REACH, HOLE, TEE = np.array([8.0, 2.0, 0.5], np.float32), 0.1, 8.0


def make_tasks(name: str, *, noise: float = 0.05, time_limit: int = 20) -> Env:
    """Make the task "golf", in which the agent chooses a club and a stroke with it.

    The ball starts at a distance of 8 from the hole, in a random direction. It drops if it is within 0.1 of the hole,
    which ends the episode. A stroke is a vector in the unit disk times the reach of the club, 8, 2 or 0.5. The reward
    is the decrease in the distance to the hole, minus 1.

    The action is a dict, in which "club" is 0, 1 or 2, and "stroke" `[3, 2]` has a stroke for each club, as in the
    parameterized action spaces of Masson et al. 2016, arXiv:1509.01644. The observation, `[6]`, is the ball's position
    relative to the hole, divided by the reach of each club and clipped to [-1, 1].

    Args:
        name: "golf".
        noise: standard deviation of the relative error of each coordinate of a stroke.
        time_limit: number of strokes after which an episode is truncated.
    """
    check_known(name, "tasks", ("golf",))
    noise = check_number("tasks:golf", "noise", noise, FROM_0, schedule=False)

    def observe(ball: Array) -> Array:
        return jnp.clip(ball[None] / REACH[:, None], -1, 1).ravel()

    def reset(key: Array) -> tuple[Array, Array]:
        angle = jax.random.uniform(key, maxval=2 * jnp.pi)
        ball = TEE * jnp.stack([jnp.cos(angle), jnp.sin(angle)])
        return ball, observe(ball)

    def step(key: Array, ball: Array, action: Any) -> Step:
        stroke = action["stroke"][action["club"]]
        stroke = stroke / jnp.maximum(jnp.linalg.norm(stroke), 1)
        after = ball + jnp.asarray(REACH)[action["club"]] * stroke * (1 + noise * jax.random.normal(key, (2,)))
        distance = jnp.linalg.norm(after)
        return Step(after, observe(after), jnp.linalg.norm(ball) - distance - 1, distance < HOLE)

    def render(ball: Array) -> np.ndarray:
        frame = np.full((120, 120, 3), (60, 140, 60), np.uint8)
        for position, color in (((0, 0), 0), (np.clip(ball, -9, 9), 255)):
            column, row = (60 + 6 * np.asarray(position)).astype(int)
            frame[row - 2 : row + 3, column - 2 : column + 3] = color
        return frame

    space = Dict({"club": Discrete(3), "stroke": Box((3, 2), -1.0, 1.0)})
    return auto_reset(reset, step, Box((6,), -1.0, 1.0), space, time_limit=time_limit, render=render)


Dealt = tuple[dict[str, Array], Array]
"""The observations of an episode, `[T + 1]` by name, and the right answers, `[T]`; -1 means no question."""


def make_popgym(name: str) -> Env:
    """Make a card game of POPGym from its name there, such as "RepeatPreviousMedium".

    A card is dealt in each step. The reward of an answer is 1, or -1 if it is wrong, divided by the number of answers
    in an episode. The observation has the `card`, and whether it is the `first` one, as with POPGym's wrapper
    `Antialias`. The right answers are:

    * RepeatFirst: the suit of the first card;
    * RepeatPrevious: the suit of the k-th card from the end, counting the latest card as the first;
    * Autoencode: after all cards are dealt (when `watch` is 0), their suits from the last card to the first;
    * CountRecall: the number of cards of the kind `query` that have been dealt, including the latest.

    Reference: Morad et al. 2023, POPGym, arXiv:2303.01859, appendix A.
    """
    check_known(name, "popgym", tuple(NAMES))
    game, settings = NAMES[name]
    deal = functools.partial(game, **settings)
    seen, _ = jax.eval_shape(deal, jax.random.key(0))
    kinds = settings.get("kinds", 4)
    counts = 52 * settings["decks"] // kinds + 1  # 0 cards of a kind to all of them
    options = {"card": kinds, "query": kinds, "watch": 2, "first": 2}

    def observe(seen: dict[str, Array], t: Array) -> dict[str, Array]:
        return {x: jnp.int32(each[t]) for x, each in seen.items()} | {"first": jnp.int32(t == 0)}

    def reset(key: Array) -> tuple[Any, Any]:
        seen, answers = deal(key)
        return (seen, answers, jnp.int32(0), jnp.sum(answers >= 0)), observe(seen, jnp.int32(0))

    def step(key: Array, state: Any, action: Array) -> Step:
        seen, answers, t, asked = state
        reward = jnp.where(action == answers[t], 1, -1) * (answers[t] >= 0) / asked
        return Step((seen, answers, t + 1, asked), observe(seen, t + 1), reward, t + 1 == len(answers))

    space = Dict({x: Discrete(options[x]) for x in (*seen, "first")})
    return auto_reset(reset, step, space, Discrete(counts if "query" in seen else 4))


def shuffle(key: Array, decks: int, kinds: int = 4) -> Array:
    """Return the kinds of the cards in shuffled decks of 52."""
    return jax.random.permutation(key, jnp.arange(52 * decks, dtype=jnp.int16) % kinds)


def repeat_first(key: Array, decks: int) -> Dealt:
    cards = shuffle(key, decks)
    return {"card": cards}, jnp.full_like(cards[1:], cards[0])


def repeat_previous(key: Array, decks: int, k: int) -> Dealt:
    cards = shuffle(key, decks)
    return {"card": cards}, jnp.concatenate([jnp.full_like(cards[: k - 1], -1), cards[:-k]])


def autoencode(key: Array, decks: int) -> Dealt:
    cards = shuffle(key, decks)
    watch = jnp.arange(2 * len(cards)) < len(cards) - 1
    answers = jnp.concatenate([jnp.full_like(cards[1:], -1), cards[::-1]])
    return {"card": jnp.append(cards, jnp.zeros_like(cards)), "watch": watch}, answers


def count_recall(key: Array, decks: int, kinds: int) -> Dealt:
    cards, queries = (shuffle(x, decks, kinds) for x in jax.random.split(key))
    dealt = jnp.cumsum(jax.nn.one_hot(cards, kinds, dtype=jnp.int16), axis=0, dtype=jnp.int16)
    return {"card": cards, "query": queries}, jnp.take_along_axis(dealt, jnp.int32(queries[:, None]), axis=1)[:-1, 0]


GAMES: Any = {
    "RepeatFirst": (repeat_first, {"decks": 1}, {"decks": 8}, {"decks": 16}),
    "RepeatPrevious": (repeat_previous, {"decks": 1, "k": 4}, {"decks": 2, "k": 32}, {"decks": 3, "k": 64}),
    "Autoencode": (autoencode, {"decks": 1}, {"decks": 2}, {"decks": 3}),
    "CountRecall": (
        count_recall, {"decks": 1, "kinds": 2}, {"decks": 2, "kinds": 4}, {"decks": 4, "kinds": 13}
    ),
}  # fmt: skip
NAMES = {
    name + level: (game, settings)
    for name, (game, *levels) in GAMES.items()
    for level, settings in zip(("Easy", "Medium", "Hard"), levels, strict=True)
}
