"""Kuhn poker of the benchmark: the game that is played and the one that is solved are the same."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import kuhn


def test_kuhn_poker_pays_what_its_exploitability_assumes():
    """Every deal and every line of play, step by step, against the recursion of the benchmark."""
    for cards in ((0, 1), (2, 1), (0, 2)):
        for line in ((0, 0), (0, 1, 0), (0, 1, 1), (1, 0), (1, 1)):
            state, seats, total = (jnp.array(cards), jnp.int32(0)), [], 0.0
            table = np.full((3, 4), np.nan)
            for action in line:
                node = int(state[1])
                table[cards[0 if kuhn.FIRST[node] else 1], node] = action
                out = kuhn.step(jax.random.key(0), state, action)
                seats.append(float(out.info["seat"]))
                total, state = total + float(out.reward), out.state
            assert out.terminated
            assert seats == [1.0, -1.0, 1.0][: len(line)]
            assert total == kuhn.return_of_deal(cards, np.nan_to_num(table), np.nan_to_num(table))
