"""The chains of papers that the benchmark compares can be run, and their page shows the records."""

import inspect

import jax
import pytest

from benchmarks import paper_index as index
from benchmarks import papers
from benchmarks._records import RESULTS, read
from docs import papers as page
from recipes import cleanrl_ppo


@pytest.mark.parametrize("function", index.COMPARED, ids=lambda function: function.__name__)
def test_every_chain_is_traced(function):
    train = papers.make_train(cleanrl_ppo.Config(total_timesteps=1024, num_envs=4, num_steps=8, hidden=(4,)), function)
    state = jax.eval_shape(train.init, jax.random.key(0))
    after, metrics = jax.eval_shape(train.step, state)
    assert jax.tree.map(lambda x: x.shape, after) == jax.tree.map(lambda x: x.shape, state)
    assert "policy_loss" in metrics.names


def test_chains_are_those_of_the_records():
    recorded = [record["results"]["arms"] for record in read(RESULTS / "papers.jsonl").values()]
    assert {function.__name__ for function in index.COMPARED} == set().union(*recorded) - {"plain"}
    assert all(len(inspect.getdoc(function).splitlines()) >= 3 for function in index.COMPARED)


def test_page_shows_the_records():
    assert page.page() == page.PAGE.read_text(), "run python -m docs.papers"


def test_differences_whose_interval_excludes_0_are_bold():
    found = {"mean": 1.0, "difference": {"mean": 2.0, "95": [0.5, 3.0]}}
    arm = {"return_over_training": found, "evaluation_return": {"difference": {"mean": 2.0, "95": [-0.5, 3.0]}}}
    assert page.row("xie_2024", arm)[-2:] == ("**+2.0 [+0.5, +3.0]**", "+2.0 [-0.5, +3.0]")
    assert page.row("xie_2024", arm)[0] == "[Xie et al. 2024](https://arxiv.org/abs/2401.16025)"
