"""The card games equal POPGym's when they are dealt the same cards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from popgym import envs as games
from popgym.core.deck import Deck

from ppo_parts import envs
from ppo_parts.envs._tasks import NAMES


def stacked(deck, kinds, dealt):
    """Order the cards of a deck, which deals from the end, so that it deals these kinds."""
    of_kind = {kind: list(np.flatnonzero(kinds == kind)) for kind in set(dealt)}
    return np.array([of_kind[kind].pop() for kind in dealt][::-1])


@pytest.mark.parametrize("name", NAMES)
def test_card_games_are_those_of_popgym(name, monkeypatch):
    (module,) = (x for x in vars(games).values() if hasattr(x, name) and getattr(x, name).__module__ == x.__name__)
    theirs, env = getattr(module, name)(), envs.make(f"popgym:{name}")
    assert env.action_space.n == theirs.action_space.n
    state, obs = env.reset(jax.random.key(0), 1)
    seen, answers, *_ = state.inner
    cards = np.asarray(seen["card"][0])
    if name.startswith("CountRecall"):
        decks = {theirs.value_deck: cards, theirs.query_deck: np.asarray(seen["query"][0])}
        kinds = theirs.deck_idx_type
    else:
        decks, kinds = {theirs.deck: cards[: theirs.deck.num_cards]}, theirs.deck.suits_idx
    shuffle = Deck.reset

    def deal(deck, rng):
        shuffle(deck, shuffle=False)
        deck.idx = stacked(deck, kinds, decks[deck])

    monkeypatch.setattr(Deck, "reset", deal)
    their_obs, _ = theirs.reset(seed=0)
    step, rng, over = jax.jit(env.step), np.random.default_rng(1), False
    order = ("watch", "card", "query")
    for t in range(len(answers[0])):
        given = [int(obs[x][0]) for x in order if x in obs]
        assert not over
        assert (given, int(obs["first"][0])) == (np.ravel(their_obs).tolist(), int(t == 0))
        action = max(0, int(answers[0, t])) if rng.random() < 0.5 else rng.integers(env.action_space.n)
        their_obs, reward, over, _, _ = theirs.step(action)
        state, out = step(jax.random.key(t), state, jnp.array([action]))
        obs = out.final_obs
        np.testing.assert_allclose(out.reward[0], reward, atol=1e-7)
        assert bool(out.terminated[0]) == over
    assert over
    assert int(out.episode_length[0]) == len(answers[0])
