"""The table of rlax in docs/coming-from.md: rlax's functions, vmapped over trajectories, and ours are equal."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppo_parts import distributions
from ppo_parts import functional as f

rlax = pytest.importorskip("rlax")
pytestmark = [
    pytest.mark.lenient_ranks,  # rlax broadcasts
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),  # rlax refers to distrax
]

T, N, ACTIONS = 6, 3, 4
GAMMA, LAMBDA, CLIP = 0.9, 0.8, 0.2
PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
Categorical = distributions.Categorical


def sampled():
    """`[T, N]` arrays without a truncation, because rlax has no flag for one; `next_value` is the value shifted."""
    rng = np.random.default_rng(0)
    reward, advantage, log_ratio = rng.normal(size=(3, T, N))
    logits, old_logits = rng.normal(size=(2, T, N, ACTIONS))
    values, terminated = rng.normal(size=(T + 1, N)), rng.random((T, N)) < 0.2
    floats = {
        "reward": reward, "value": values[:-1], "next_value": values[1:], "advantage": advantage, "logits": logits,
        "terminated": terminated, "discount": GAMMA * (1 - terminated), "old_logits": old_logits,
        "log_ratio": 0.5 * log_ratio, "lambdas": np.full((T, N), LAMBDA),
    }  # fmt: skip
    given = {name: jnp.asarray(x, jnp.float32) for name, x in floats.items()}
    return given | {"action": jnp.asarray(rng.integers(ACTIONS, size=(T, N)))}


def theirs(function, *names, **settings):
    """A function of rlax takes one trajectory."""
    return lambda x: jax.vmap(lambda *row: function(*row, **settings), 1, 1)(*(x[name] for name in names))


def gae(x, gae_lambda=LAMBDA, stop_gradient=False):
    steps = (x[name] for name in ("reward", "value", "next_value", "terminated"))
    return f.gae(*steps, gamma=GAMMA, gae_lambda=gae_lambda, stop_gradient=stop_gradient)


def error(x, gae_lambda=LAMBDA):
    return gae(x, gae_lambda, stop_gradient=True).target - x["value"]


def vtrace(x):
    steps = (x[name] for name in ("log_ratio", "reward", "value", "next_value", "terminated"))
    return f.vtrace(*steps, gamma=GAMMA, gae_lambda=LAMBDA, pg_lambda=LAMBDA)


def estimated(reward, discount, value, next_value):
    values = jnp.append(value, next_value[-1])
    return rlax.truncated_generalized_advantage_estimation(reward, discount, LAMBDA, values)


def traced(function, take=lambda out: out):
    """One of the functions of V-trace, as constants."""
    of_ratio = lambda *row: take(function(*row[:-2], jnp.exp(row[-2]), row[-1]))  # noqa: E731
    found = theirs(of_ratio, "value", "next_value", "reward", "discount", "log_ratio", "lambdas")
    return lambda x: jax.lax.stop_gradient(found(x))


def log_ratio(x):
    return Categorical(x["logits"]).log_prob(x["action"]) - Categorical(x["old_logits"]).log_prob(x["action"])


STEPS = "reward", "discount", "next_value"
# theirs, ours, and the input by which both are differentiated
EQUIVALENCES = {
    "truncated_generalized_advantage_estimation":
        (theirs(estimated, "reward", "discount", "value", "next_value"), lambda x: gae(x).advantage, "reward"),
    "lambda_returns": (theirs(rlax.lambda_returns, *STEPS, lambda_=LAMBDA), lambda x: gae(x).target, "reward"),
    "discounted_returns": (theirs(rlax.discounted_returns, *STEPS), lambda x: gae(x, 1.0).target, "reward"),
    "td_lambda": (theirs(rlax.td_lambda, "value", *STEPS, lambda_=LAMBDA), error, "value"),
    "td_learning": (theirs(jax.vmap(rlax.td_learning), "value", *STEPS), lambda x: error(x, 0.0), "value"),
    "vtrace": (traced(rlax.vtrace), lambda x: vtrace(x).error, "value"),
    "vtrace_td_error_and_advantage":
        (traced(rlax.vtrace_td_error_and_advantage, lambda out: out[:2]),
         lambda x: (vtrace(x).error, vtrace(x).policy_advantage), "value"),
    "clipped_surrogate_pg_loss":
        (lambda x: rlax.clipped_surrogate_pg_loss(jnp.exp(x["log_ratio"].ravel()), x["advantage"].ravel(), CLIP),
         lambda x: f.clipped_surrogate(x["log_ratio"], x["advantage"], clip_eps=CLIP).mean(), "log_ratio"),
    "l2_loss": (lambda x: rlax.l2_loss(x["value"], x["advantage"]),
                lambda x: f.value_loss(x["value"], x["advantage"]), "value"),
    "entropy_loss": (lambda x: rlax.entropy_loss(x["logits"].reshape(-1, ACTIONS), jnp.ones(T * N)),
                     lambda x: -Categorical(x["logits"]).entropy().mean(), "logits"),
    "categorical_kl_divergence":
        (lambda x: rlax.categorical_kl_divergence(x["logits"], x["old_logits"]),
         lambda x: Categorical(x["logits"]).kl_divergence(Categorical(x["old_logits"])), "logits"),
    "categorical_importance_sampling_ratios":
        (lambda x: rlax.categorical_importance_sampling_ratios(x["logits"], x["old_logits"], x["action"]),
         lambda x: jnp.exp(log_ratio(x)), "logits"),
}  # fmt: skip


def test_values_and_gradients():
    given = sampled()
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(T, N)), jnp.float32)

    def evaluate(function, wrt):
        def weighted(x):
            results = function(given | {wrt: x})
            return sum(jnp.sum(leaf * weights) for leaf in jax.tree.leaves(results)), results

        (_, results), slope = jax.value_and_grad(weighted, has_aux=True)(given[wrt])
        return results, slope

    @jax.jit
    def all_of_them():
        return {name: [evaluate(x, wrt) for x in pair] for name, (*pair, wrt) in EQUIVALENCES.items()}

    for name, (theirs, ours) in all_of_them().items():
        for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert np.shape(x) == np.shape(y), name
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6, err_msg=name)


def test_the_page_lists_what_is_tested():
    rows = re.findall(r"^\| `(\w+)`", PAGE.read_text().partition("\n## rlax\n")[2].partition("\n## ")[0], re.MULTILINE)
    assert sorted(rows) == sorted(EQUIVALENCES)
