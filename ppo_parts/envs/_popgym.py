"""The card games of POPGym, tasks for memories: its decks, rewards and ends, in JAX."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ._env import Array, Env, check_known
from ._episodes import Step, auto_reset
from ._spaces import Dict, Discrete

Dealt = tuple[dict[str, Array], Array]
"""What is seen in an episode, `[T + 1]` by name, and the right answers, `[T]`; -1: none is asked for."""


def make_popgym(name: str) -> Env:
    """Make a card game of POPGym by its name there, such as "RepeatPreviousMedium".

    A card is dealt in each step. An answer is rewarded by 1, or -1 if it is wrong, divided by the number of answers in
    an episode. The observation has the `card`, and whether it is the `first` one, as with POPGym's wrapper `Antialias`.
    The right answer is, in

    * RepeatFirst: the suit of the first card;
    * RepeatPrevious: the suit of the k-th card from the end, where the latest card is the first;
    * Autoencode: when all cards are dealt (and `watch` is 0), their suits from the last card to the first;
    * CountRecall: how many cards of the kind `query` have been dealt, including the latest.

    Reference: Morad et al. 2023, POPGym, arXiv:2303.01859, appendix A.
    """
    check_known(name, "popgym", tuple(NAMES))
    game, settings = NAMES[name]
    deal = functools.partial(game, **settings)
    seen, _ = jax.eval_shape(deal, jax.random.key(0))
    kinds = settings.get("kinds", 4)
    counts = 52 * settings["decks"] // kinds + 1  # from no card of a kind to all of them
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
    """Return the kinds of the cards of some decks of 52, in random order."""
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
