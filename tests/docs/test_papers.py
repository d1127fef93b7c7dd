"""The index of papers: every chain is one that the learner can run, and the page follows from the module."""

import inspect

import jax
import jax.numpy as jnp
import optax
import pytest

import ppo_parts as pp
from benchmarks import paper_index as index
from docs import papers as page

TIME, SEGMENTS, OBS, ACTIONS = 8, 16, 3, 2
INDEXED = [function for functions in index.SECTIONS.values() for function in functions]


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def parameters():
    """Shapes of everything that the policies of the index read."""
    predictor = {"hidden": array(OBS, 8), "out": array(8, 8)}
    head = {"kernel": array(OBS), "bias": array(), "mean": array(), "scale": array()}
    layers = {name: array(OBS) for name in ("value", "value_intrinsic", "value_cost", "advantage")}
    layers |= {"policy": array(OBS, ACTIONS), "log_std": array(ACTIONS), "features": array(OBS, 5)}
    return layers | {"logits": array(OBS, 41), "quantiles": array(OBS, 16), "head": head, "predictor": predictor}


def evaluate(params, batch):
    """A policy with all the heads that a paper of the index may want, for whole numbers or numbers as actions."""
    names = ("value", "value_intrinsic", "value_cost", "advantage", "features")
    aux = {name: batch.obs @ params[name] for name in names}
    loc = batch.obs @ params["policy"]
    continuous = batch.action is not None and jnp.issubdtype(batch.action.dtype, jnp.floating)
    gaussian = pp.distributions.Normal(loc, jnp.exp(params["log_std"]))
    return pp.Output(
        gaussian if continuous else pp.distributions.Categorical(loc), batch.obs @ params["value"], aux=aux
    )


def recurrent(params, batch):
    """A policy whose state is the last observation."""
    output = evaluate(params, batch)
    return output.distribution, output.value, batch.obs[-1]


def given(function):
    """A rollout in shapes, with all that the chain may read: of continuous actions, of agents, of tokens, or plain."""
    shape = (TIME, SEGMENTS, 3) if function in index.SECTIONS["Multi-agent"] else (TIME, SEGMENTS)
    continuous = function in (index.rahman_2022, index.mysore_2021, index.yu_2018)
    obs, flat = array(*shape, OBS), array(*shape)
    action = array(*shape, ACTIONS) if continuous else jax.ShapeDtypeStruct(shape, jnp.int32)
    names = ("value_intrinsic", "next_value_intrinsic", "cost", "value_cost", "next_value_cost", "right")
    extras = dict.fromkeys((*names, "sampler_log_prob", "reference_log_prob"), flat)
    extras |= {"teacher": jax.eval_shape(pp.distributions.Categorical, array(*shape, ACTIONS))}
    fields = ("log_prob", "value", "reward", "terminated", "truncated", "next_value")
    batch = pp.Batch(obs=obs, action=action, next_obs=obs, extras=extras, **dict.fromkeys(fields, flat))
    per_segment = dict.fromkeys(("score", "baseline", "cost"), array(SEGMENTS))
    shared = {"demonstrations": (array(7, OBS), jax.ShapeDtypeStruct((7,), jnp.int32))}
    batch = batch.replace(per_segment=per_segment, shared=shared)
    if function in index.SECTIONS["Language models"]:
        return batch.replace(mask=flat)
    if function is index.kapturowski_2019:
        return batch.replace(carry=array(SEGMENTS, OBS), reset=flat)
    return batch


def setup(function, batch):
    """What a function of the index returns, always as a `Setup`."""
    extras = batch.extras | {"returns": batch.reward} if function is index.oh_2018 else {}
    like = pp.Batch(obs=batch.obs, action=batch.action, log_prob=batch.log_prob, target=batch.reward, extras=extras)
    made = function(like) if "like" in inspect.signature(function).parameters else function()
    return made if isinstance(made, index.Setup) else index.Setup(made)


def shapes(tree):
    return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)], jax.tree.structure(tree)


@pytest.mark.lenient_ranks
@pytest.mark.parametrize("function", INDEXED, ids=lambda function: function.__name__)
def test_update_of_every_chain_is_traced(function):
    batch = given(function)
    chain, own, optimizer = setup(function, batch)
    policy = own or (recurrent if function is index.kapturowski_2019 else evaluate)
    learner = pp.learner(policy, chain, optimizer or optax.adam(1e-3))
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(learner.init, parameters(), key)
    after, metrics = jax.eval_shape(learner.update, key, state, batch)
    assert shapes(after) == shapes(state)
    assert any(name.endswith("loss") for name in metrics)


def test_at_least_sixty_papers_each_listed_once():
    named = {name for name, function in vars(index).items() if inspect.isfunction(function) and page.is_paper(function)}
    assert {function.__name__ for function in INDEXED} == named
    assert len(INDEXED) == len(named) >= 60
    assert len({page.reference(function) for function in INDEXED}) == len(INDEXED)


def test_every_reference_is_linked():
    bare = {function.__name__ for function in INDEXED if not page.ARXIV.search(page.reference(function))}
    assert bare == set(page.ELSEWHERE_ONLINE)


def test_chain_takes_at_most_twelve_lines():
    assert {function.__name__: n for function in INDEXED if not 1 <= (n := len(page.body(function))) <= 12} == {}


def test_page_shows_the_index():
    assert page.page() == page.PAGE.read_text(), "run python -m docs.papers"


def test_verdict_is_whether_the_interval_excludes_0():
    assert page.verdict({"95": [-1.0, 2.0]}) == "no difference within the interval"
    assert [page.verdict({"95": x}) for x in ([0.5, 1.0], [-2.0, -1.0])] == ["better", "worse"]
