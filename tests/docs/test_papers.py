"""The chains of papers that the benchmark compares can be run, and their page shows the records."""

import jax
import pytest

from benchmarks import _tables, papers
from benchmarks.paper_index import PAPERS
from ppo_parts.recipes import cleanrl_ppo


@pytest.mark.parametrize("name", PAPERS)
def test_every_chain_is_traced(name):
    train = papers.make_train(cleanrl_ppo.Config(total_timesteps=1024, num_envs=4, num_steps=8, hidden=(4,)), name)
    after, metrics = train.shapes
    state = jax.eval_shape(train.init, jax.random.key(0))
    assert jax.tree.map(lambda x: x.shape, after) == jax.tree.map(lambda x: x.shape, state)
    assert "policy_loss" in metrics


def test_chains_are_those_of_the_records():
    recorded = [record["results"]["arms"] for record in _tables.records("papers").values()]
    assert set(PAPERS) == set().union(*recorded) - {"plain"}
