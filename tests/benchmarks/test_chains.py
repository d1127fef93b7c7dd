"""The chains and games of benchmarks: they run, and they are what pages and records say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import _tables, gallery, kuhn, study
from ppo_parts.recipes import pufferlib_ppo


@pytest.mark.lenient_ranks  # of the cards
@pytest.mark.parametrize("name", gallery.VARIANTS)
def test_every_variant_of_the_gallery_is_traced(name):
    """`Train` traces a step of each, and the state that it returns is one that it takes."""
    train = gallery.train_of(gallery.VARIANTS[name]())
    assert jax.tree.map(lambda x: x.shape, train.shapes[0]) == jax.tree.map(
        lambda x: x.shape, jax.eval_shape(train.init, jax.random.key(0))
    )


def test_variants_are_those_of_the_records():
    assert gallery.VARIANTS.keys() == _tables.records("gallery").keys()


CONFIG = pufferlib_ppo.Config(total_timesteps=64, num_envs=4, num_steps=8, num_minibatches=2, hidden=4, anneal_ent=True)


def program(pipeline=None):
    return str(jax.make_jaxpr(pufferlib_ppo.make_train(CONFIG, pipeline=pipeline))(jax.random.key(0)))


@pytest.mark.lenient_ranks
def test_study_arms_differ_in_the_three_and_all_three_are_the_recipe():
    assert program(study.ARMS["all three (PufferLib)"].chain(CONFIG)) == program()
    chains = {name: str(arm.chain(CONFIG)) for name, arm in study.ARMS.items()}
    assert ("prioritized_sampler" in chains["plain"], "vtrace" in chains["plain"]) == (False, False)
    assert "prioritized_sampler" in chains["priorities"]
    assert "vtrace" in chains["refresh + V-trace"]


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
