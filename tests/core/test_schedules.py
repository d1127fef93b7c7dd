"""Hyperparameters that change: their ends are checked when a part is built, and what leaves its range is reported."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from ppo_parts._base.hyperparameters import check_number
from ppo_parts.testing import example_batch, example_context
from tests.common import evaluate, make_params, rollout

SPOILT = {
    "gamma": (0.9, 1.5), "gae_lambda": (0.8, -0.1), "rho_clip": (1.0, -1.0), "c_clip": (1.0, -1.0),
    "alpha": (0.8, -0.5), "beta": (0.4, 1.2), "eps": (1e-6, -1.0), "std_eps": (1e-8, -1.0), "clip_eps": (0.2, -0.2),
    "clip_eps_high": (0.2, jnp.nan), "dual_clip": (3.0, 0.5), "value_clip": (0.2, jnp.nan), "value_coef": (0.5, -0.5),
    "entropy_coef": (0.01, -0.01), "target_kl": (1e3, jnp.nan), "penalty_target": (0.1, -0.1),
}  # fmt: skip
"""A hyperparameter of each kind: a value that it may have, and one that it may not."""


@pytest.mark.parametrize("kind", ["schedule", "traced"])
def test_a_value_that_leaves_its_range_at_run_time_is_counted_as_not_finite(kind):
    batch = rollout()

    def counted(spoilt):
        def of(name):
            good, bad = SPOILT[name]
            value = jnp.where(spoilt == list(SPOILT).index(name), bad, good)
            return value if kind == "traced" else lambda step: jnp.where(step == 2, value, good)

        pipeline = pp.chain(
            pp.vtrace(**{name: of(name) for name in ("gamma", "gae_lambda", "rho_clip", "c_clip")}),
            pp.prioritized_sampler(2, **{name: of(name) for name in ("alpha", "beta", "eps")}),
            pp.advantage_normalize(eps=of("std_eps")), pp.advantage_weight(),
            pp.clipped_surrogate(**{name: of(name) for name in ("clip_eps", "clip_eps_high", "dual_clip")}),
            pp.clipped_value_loss(clip_eps=of("value_clip"), coef=of("value_coef")),
            pp.entropy_bonus(coef=of("entropy_coef")), pp.kl_early_stop(of("target_kl")),
            pp.kl_penalty(coef=1.0, target_kl=of("penalty_target")),
        )  # fmt: skip
        learner = pp.learner(evaluate, pipeline, optax.sgd(1e-3))
        state = learner.init(make_params())._replace(step=jnp.int32(2))
        _, metrics = learner.update(jax.random.key(0), state, batch)
        return sum(x for name, x in metrics.items() if name.startswith("nonfinite/"))

    *spoilt, sound = jax.jit(jax.vmap(counted))(jnp.arange(len(SPOILT) + 1))
    assert dict(zip(SPOILT, [int(n) > 0 for n in spoilt], strict=True)) == dict.fromkeys(SPOILT, True)
    assert sound == 0


def test_a_threshold_out_of_range_is_named_in_the_report():
    pipeline = pp.chain(pp.full_batch(), pp.entropy_bonus(coef=0.1), pp.kl_early_stop(lambda step: 0.1 - step))
    learner = pp.learner(evaluate, pipeline, optax.sgd(1e-3))
    state = learner.init(make_params())._replace(step=jnp.int32(1))
    _, metrics = jax.jit(learner.update)(jax.random.key(0), state, rollout())
    assert pp.nonfinite_report(metrics) == "non-finite numbers arose first in target_kl of early_stop_kl (1 minibatch)"


def test_a_schedule_is_not_refused_for_steps_it_may_never_reach():
    for schedule in (
        pp.linear_schedule(0.2, 0.0, 100),  # annealed to what it may not be
        lambda step: 0.2 * (1 - step / 1000),  # of a run of 1000 updates
        lambda step: 0.2 * jnp.sqrt(1 - step / 1000),
        lambda step: jnp.array([0.2, 0.1])[step],
        0.2,
    ):
        check_number("here", "clip_eps", schedule)
    check_number("here", "gamma", lambda step: 1.0 + 1e-7 * step)
    check_number("here", "gamma", pp.linear_schedule(0.9, jnp.float32(1) + 1e-7, 10))  # rounding
    check_number("here", "beta", jax.jit(lambda step: jnp.minimum(1.0, 0.2 + step / 10)))


def test_a_schedule_of_a_traced_number_is_left_to_run_time():
    def end(rate):
        beta = check_number("here", "beta", pp.linear_schedule(0.2, rate, 10))
        return beta(jnp.int32(0)), beta(jnp.int32(10))

    first, last = jax.jit(jax.vmap(end))(jnp.array([0.5, 1.5]))
    assert jnp.allclose(first, 0.2)
    assert last[0] == 0.5
    assert jnp.isnan(last[1])


def test_the_end_of_a_schedule_is_accepted_without_jit():
    """As with jit: a value may be annealed to an open end, and may be above 1 by a rounding error."""
    batch, context = example_batch(after_sampler=True), example_context()
    context = context.replace(step=jnp.asarray(100))
    annealed = pp.clipped_surrogate(clip_eps=pp.linear_schedule(0.2, 0.0, 100))
    above = pp.gae(gamma=lambda step: jnp.float32(1.0000001), gae_lambda=1.0)
    for made, given in ((annealed, batch), (above, example_batch())):
        eager, jitted = (f(given, made.init({}), context)[0] for f in (made.update, jax.jit(made.update)))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), eager.losses, jitted.losses)
