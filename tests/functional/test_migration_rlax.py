"""The rlax table in docs/coming-from.md: rlax's functions, vmapped over trajectories, equal the code beside them."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppo_parts import distributions
from ppo_parts import functional as f
from tests.common import assert_close

rlax = pytest.importorskip("rlax")
pytestmark = [
    pytest.mark.lenient_ranks,  # rlax broadcasts
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),  # rlax refers to distrax, which raises them
]

T, N, ACTIONS = 6, 3, 4
GAMMA, LAMBDA, CLIP = 0.9, 0.8, 0.2
PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
Categorical = distributions.Categorical


def sampled():
    """Return `[T, N]` arrays without truncations, for which rlax has no flag; `next_value` is the value shifted."""
    rng = np.random.default_rng(0)
    reward, advantage = rng.normal(size=(2, T, N))
    logits, old_logits = rng.normal(size=(2, T, N, ACTIONS))
    values, terminated = rng.normal(size=(T + 1, N)), rng.random((T, N)) < 0.2
    floats = {
        "reward": reward, "value": values[:-1], "next_value": values[1:], "advantage": advantage, "logits": logits,
        "terminated": terminated, "discount": GAMMA * (1 - terminated), "old_logits": old_logits,
        "lambdas": np.full((T, N), LAMBDA),
    }  # fmt: skip
    given = {name: jnp.asarray(x, jnp.float32) for name, x in floats.items()}
    return given | {"action": jnp.asarray(rng.integers(ACTIONS, size=(T, N)))}


def theirs(function, *names, **settings):
    """Map a function of rlax, which takes one trajectory."""
    return lambda x: jax.vmap(lambda *row: function(*row, **settings), 1, 1)(*(x[name] for name in names))


def ours(cell, x):
    """Return what a cell's code returns, where "..." are the steps; several fields of it, if the cell names them."""
    steps, settings = [x[name] for name in STEPS], {"gamma": GAMMA, "gae_lambda": LAMBDA}
    names = x | {
        "gae": lambda *_, **more: f.gae(*steps, **settings | more),
        "vtrace": lambda *_, **more: f.vtrace(x["log_ratio"], *steps, **settings | more),
        "exp": jnp.exp, "p": x["logits"], "q": x["old_logits"], "λ": LAMBDA, "epsilon": CLIP,
    }  # fmt: skip
    code, *others = re.findall("`([^`]*)`", cell)
    result = eval(code, {**vars(f), "Categorical": Categorical} | names)
    if callable(result):
        return result(x["value"], x["advantage"])
    fields = [getattr(result, name) for name in others if name in getattr(result, "_fields", ())]
    return fields or result


def estimated(reward, discount, value, next_value):
    values = jnp.append(value, next_value[-1])
    return rlax.truncated_generalized_advantage_estimation(reward, discount, LAMBDA, values)


def traced(function, take=lambda out: out):
    """Make one of V-trace's functions with constant outputs."""
    of_ratio = lambda *row: take(function(*row[:-2], jnp.exp(row[-2]), row[-1]))  # noqa: E731
    found = theirs(of_ratio, "value", "next_value", "reward", "discount", "log_ratio", "lambdas")
    return lambda x: jax.lax.stop_gradient(found(x))


STEPS, RETURNS = ("reward", "value", "next_value", "terminated"), ("reward", "discount", "next_value")
# rlax's functions, and the input with respect to which both are differentiated
THEIRS = {
    "truncated_generalized_advantage_estimation":
        (theirs(estimated, "reward", "discount", "value", "next_value"), "reward"),
    "lambda_returns": (theirs(rlax.lambda_returns, *RETURNS, lambda_=LAMBDA), "reward"),
    "discounted_returns": (theirs(rlax.discounted_returns, *RETURNS), "reward"),
    "td_lambda": (theirs(rlax.td_lambda, "value", *RETURNS, lambda_=LAMBDA), "value"),
    "td_learning": (theirs(jax.vmap(rlax.td_learning), "value", *RETURNS), "value"),
    "vtrace": (traced(rlax.vtrace), "value"),
    "vtrace_td_error_and_advantage": (traced(rlax.vtrace_td_error_and_advantage, lambda out: out[:2]), "value"),
    "clipped_surrogate_pg_loss":
        (lambda x: rlax.clipped_surrogate_pg_loss(jnp.exp(x["log_ratio"].ravel()), x["advantage"].ravel(), CLIP),
         "logits"),
    "l2_loss": (lambda x: rlax.l2_loss(x["value"], x["advantage"]), "value"),
    "entropy_loss": (lambda x: rlax.entropy_loss(x["logits"].reshape(-1, ACTIONS), jnp.ones(T * N)), "logits"),
    "categorical_kl_divergence": (lambda x: rlax.categorical_kl_divergence(x["logits"], x["old_logits"]), "logits"),
    "categorical_importance_sampling_ratios":
        (lambda x: rlax.categorical_importance_sampling_ratios(x["logits"], x["old_logits"], x["action"]), "logits"),
}  # fmt: skip


def test_the_code_of_the_page_has_the_values_and_gradients_of_rlax():
    given = sampled()
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(T, N)), jnp.float32)

    section = PAGE.read_text().partition("\n## rlax\n")[2].partition("\n## ")[0]
    cells = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE))
    assert cells.keys() == THEIRS.keys()

    def evaluate(function, wrt):
        def weighted(x):
            x = given | {wrt: x}
            one, other = (Categorical(x[name]).log_prob(x["action"]) for name in ("logits", "old_logits"))
            results = function(x | {"log_ratio": one - other})
            return sum(jnp.sum(leaf * weights) for leaf in jax.tree.leaves(results)), results

        (_, results), slope = jax.value_and_grad(weighted, has_aux=True)(given[wrt])
        return results, slope

    @jax.jit
    def all_of_them():
        by_name = {name: (functools.partial(ours, cells[name]), *pair) for name, pair in THEIRS.items()}
        return {name: [evaluate(x, wrt) for x in pair] for name, (*pair, wrt) in by_name.items()}

    found, expected = ({name: jax.tree.leaves(x[i]) for name, x in all_of_them().items()} for i in range(2))
    assert_close(found, expected, 2e-5, 2e-6)
