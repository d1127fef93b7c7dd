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


def sampled():
    """`[T, N]` arrays without a truncation, because rlax has no flag for one; `next_value` is the value shifted."""
    rng = np.random.default_rng(0)
    reward, value, advantage = jnp.asarray(rng.normal(size=(3, T, N)), jnp.float32)
    logits, old_logits = jnp.asarray(rng.normal(size=(2, T, N, ACTIONS)), jnp.float32)
    last = jnp.asarray(rng.normal(size=N), jnp.float32)
    terminated = jnp.asarray(rng.random((T, N)) < 0.2, jnp.float32)
    action = jnp.asarray(rng.integers(ACTIONS, size=(T, N)))
    log_ratio = distributions.Categorical(logits).log_prob(action) - distributions.Categorical(old_logits).log_prob(
        action
    )
    return {
        "reward": reward, "value": value, "last": last, "next_value": f.next_values(value, last),
        "terminated": terminated, "log_ratio": log_ratio, "advantage": advantage,
        "logits": logits, "old_logits": old_logits, "action": action,
    }  # fmt: skip


def each(function, *columns):
    """rlax's functions take one trajectory."""
    return jax.vmap(function, in_axes=1, out_axes=1)(*columns)


def discount(x):
    return GAMMA * (1 - x["terminated"])


def steps(x):
    return x["reward"], x["value"], x["next_value"], x["terminated"]


def gae(x, gae_lambda=LAMBDA):
    return f.gae(*steps(x), gamma=GAMMA, gae_lambda=gae_lambda, stop_gradient=False)


def vtrace(x, gae_lambda=LAMBDA, **options):
    return f.vtrace(x["log_ratio"], *steps(x), gamma=GAMMA, gae_lambda=gae_lambda, pg_lambda=gae_lambda, **options)


def their_vtrace(x, gae_lambda=LAMBDA, **options):
    def estimate(value, next_value, reward, discount, log_ratio, gae_lambda):
        return rlax.vtrace_td_error_and_advantage(
            value, next_value, reward, discount, jnp.exp(log_ratio), lambda_=gae_lambda, **options
        )

    rows = jnp.broadcast_to(jnp.asarray(gae_lambda, jnp.float32), (T, N))
    return each(estimate, x["value"], x["next_value"], x["reward"], discount(x), x["log_ratio"], rows)


def categorical(x):
    return distributions.Categorical(x["logits"])


# theirs, ours, and the input by which both are differentiated
EQUIVALENCES = {
    "truncated_generalized_advantage_estimation": (
        lambda x: each(
            lambda r, d, v: rlax.truncated_generalized_advantage_estimation(r, d, LAMBDA, v),
            x["reward"], discount(x), jnp.concatenate([x["value"], x["last"][None]]),
        ),
        lambda x: gae(x).advantage,
        "reward",
    ),
    "lambda_returns": (
        lambda x: each(lambda r, d, v: rlax.lambda_returns(r, d, v, LAMBDA), x["reward"], discount(x), x["next_value"]),
        lambda x: gae(x).target,
        "reward",
    ),
    "discounted_returns": (
        lambda x: each(rlax.discounted_returns, x["reward"], discount(x), x["next_value"]),
        lambda x: gae(x, gae_lambda=1.0).target,
        "reward",
    ),
    "td_lambda": (
        lambda x: each(
            lambda v, r, d, v2: rlax.td_lambda(v, r, d, v2, LAMBDA),
            x["value"], x["reward"], discount(x), x["next_value"],
        ),
        lambda x: f.gae(*steps(x), gamma=GAMMA, gae_lambda=LAMBDA).target - x["value"],
        "value",
    ),
    "td_learning": (
        lambda x: jax.vmap(jax.vmap(rlax.td_learning))(x["value"], x["reward"], discount(x), x["next_value"]),
        lambda x: f.gae(*steps(x), gamma=GAMMA, gae_lambda=0.0).target - x["value"],
        "value",
    ),
    "vtrace": (
        lambda x: each(
            lambda v, v2, r, d, log: jax.lax.stop_gradient(rlax.vtrace(v, v2, r, d, jnp.exp(log), LAMBDA)),
            x["value"], x["next_value"], x["reward"], discount(x), x["log_ratio"],
        ),
        lambda x: vtrace(x).error,
        "value",
    ),
    "vtrace_td_error_and_advantage": (
        lambda x: jax.lax.stop_gradient(their_vtrace(x)[:2]),
        lambda x: (vtrace(x).error, vtrace(x).policy_advantage),
        "value",
    ),
    "clipped_surrogate_pg_loss": (
        lambda x: rlax.clipped_surrogate_pg_loss(
            jnp.exp(x["log_ratio"].reshape(-1)), x["advantage"].reshape(-1), CLIP
        ),
        lambda x: f.clipped_surrogate(x["log_ratio"], x["advantage"], clip_eps=CLIP).mean(),
        "log_ratio",
    ),
    "l2_loss": (
        lambda x: rlax.l2_loss(x["value"], x["advantage"]),
        lambda x: f.value_loss(x["value"], x["advantage"]),
        "value",
    ),
    "entropy_loss": (
        lambda x: rlax.entropy_loss(x["logits"].reshape(-1, ACTIONS), jnp.ones(T * N)),
        lambda x: -categorical(x).entropy().mean(),
        "logits",
    ),
    "categorical_kl_divergence": (
        lambda x: rlax.categorical_kl_divergence(x["logits"], x["old_logits"]),
        lambda x: categorical(x).kl_divergence(distributions.Categorical(x["old_logits"])),
        "logits",
    ),
    "categorical_importance_sampling_ratios": (
        lambda x: rlax.categorical_importance_sampling_ratios(x["logits"], x["old_logits"], x["action"]),
        lambda x: jnp.exp(
            categorical(x).log_prob(x["action"]) - distributions.Categorical(x["old_logits"]).log_prob(x["action"])
        ),
        "logits",
    ),
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
