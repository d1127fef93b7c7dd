"""What the learner promises when it runs chains, samplers, stops, phases and microbatches.

`tests/golden` shows that it is a loop over epochs and minibatches, by the numbers of other libraries;
`tests/docs/test_gallery.py` shows it by handwritten loops.
"""

import dataclasses
import functools
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from ppo_parts import distributions
from ppo_parts._base.hyperparameters import check_number
from ppo_parts._core import pieces as _pieces
from ppo_parts.testing import example_batch, example_context
from tests import reference
from tests.common import SEGMENTS, TIME, assert_close, assert_same, evaluate, make_params, poisoned, rollout
from tests.core.common import GAE, KEY, ROWS, SURROGATE, VALUE, both, part, probe, recorder, run, two_entries
from tests.golden_traces import Tape, read_steps, record_steps

ORDER = np.random.default_rng(0).permuted(np.tile(np.arange(TIME * SEGMENTS), (2, 1)), axis=1).reshape(2, 3, -1)
COLUMNS = np.array([[[2, 0], [1, 3]], [[3, 2], [0, 1]]])
LOSSES = (SURROGATE, VALUE)
SEGMENT, FULL = pp.segment_minibatches(1), pp.full_batch()
CONTEXT = pp.Context(key=KEY, step=0, params=make_params(), evaluate=evaluate)


def stacked(results):
    return jax.tree.map(lambda *x: jnp.stack(x), *results)


def growing_reward() -> pp.Part:
    """Make a part before the sampler that lets rewards count a little more each time it runs."""
    update = lambda batch, n, context: (batch.replace(reward=batch.reward * (1 + 0.1 * n)), n + 1)  # noqa: E731
    return part(update, "growing_reward", jnp.zeros(()))


def growing_loss() -> pp.Part:
    """Make a part after the sampler that lets its own loss count a little more each time it runs."""
    update = lambda batch, n, context: (batch.add_loss("own", 0.1 * n * batch.current.value), n + 1)  # noqa: E731
    return part(update, "growing_loss", jnp.zeros(()), provides=("losses",), place="after_sampler")


@pytest.mark.filterwarnings("error:scatter inputs")  # this will be an error in JAX
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("refresh", ["rollout", "epoch", "minibatch"])
def test_learner_state_is_stable(refresh, dtype):
    after = (pp.advantage_normalize(), *LOSSES, pp.entropy_bonus(coef=pp.linear_schedule(1.0, 0.0, 9)))
    sampler = pp.prioritized_sampler(2, alpha=0.5, beta=0.5, num_epochs=2, refresh=refresh)
    pipeline = pp.chain(growing_reward(), GAE, sampler, *after, growing_loss(), pp.kl_early_stop(0.1, check="epoch"))
    learner = pp.learner(evaluate, pipeline, optax.adam(0.01))
    state = jax.eval_shape(learner.init, make_params(dtype=dtype))
    after, _ = jax.eval_shape(learner.update, KEY, state, rollout(dtype=jnp.bfloat16))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)


def test_masked_places_are_neutral():
    head = GAE, pp.given_indices(ORDER, refresh="epoch"), pp.advantage_normalize()
    losses = SURROGATE, pp.clipped_value_loss(clip_eps=0.2), pp.entropy_bonus(coef=0.01), pp.kl_early_stop(1.0)
    learner = pp.learner(evaluate, pp.chain(*head, *losses), optax.adam(0.05))
    update, state, batch = jax.jit(learner.update), learner.init(make_params()), rollout(behavior=make_params())
    expected, metrics = update(KEY, state, batch)
    assert metrics["minibatches"] == 6
    assert "loss" in repr(jax.tree.map(jnp.shape, metrics))
    for kind in ("noise", "nan"):
        assert_same(update(KEY, state, poisoned(batch, kind)), (expected, metrics))
    before = batch.add_metrics(old=1.0).replace(losses={"old": batch.reward})  # these are left from another update
    assert_same(update(KEY, state, before), (expected, metrics))
    flags = {name: getattr(batch, name).astype(bool) for name in ("terminated", "truncated", "mask")}
    after, measured = update(KEY, state, batch.replace(**flags))
    assert_close((after, dict(measured)), (expected, {name: metrics[name] for name in measured}))


@pytest.mark.parametrize("sampler", [pp.shuffled_minibatches(4), pp.segment_minibatches(4)])
def test_a_sampler_in_a_loop_of_your_own_draws_each_element_once_per_epoch(sampler):
    batch, context = rollout().replace(extras={"row": ROWS}), example_context()

    @jax.jit
    def draw(epoch, minibatch):
        drawn, _ = sampler.update(batch, (), context.replace(epoch=epoch, minibatch=minibatch))
        return drawn.extras["row"].ravel(), drawn.log_prob

    epochs = [np.concatenate([draw(epoch, index)[0] for index in range(4)]) for epoch in range(2)]
    assert [sorted(rows) for rows in epochs] == 2 * [list(range(TIME * SEGMENTS))]
    assert not np.array_equal(*epochs)
    assert np.isnan(draw(0, 4)[1]).all()


def test_prioritized_sampler_draws_and_weighs():
    batch = rollout()  # the last segment is masked throughout
    expected = reference.segment_priorities(batch.value, batch.mask, alpha=0.7)
    sampler = pp.prioritized_sampler(8, alpha=0.7, beta=0.4, num_epochs=25, segments_per_minibatch=2)
    batch = batch.replace(extras={"row": ROWS}, advantage=batch.value, target=batch.value)
    state, _ = run(pp.chain(sampler, recorder(200, TIME, 2), VALUE), batch)
    rows, weights, count = map(np.asarray, state.pipeline[1][1][0])
    assert count == 200
    columns = rows[:, 0] % SEGMENTS  # the segments are whole, as test_shards.py shows
    assert not np.any(columns == SEGMENTS - 1)
    flat = reference.importance_weights(expected, columns.ravel(), beta=0.4)
    np.testing.assert_allclose(weights.ravel(), flat, rtol=1e-5)
    assert not np.any(columns[:, 0] == columns[:, 1])
    first = np.bincount(columns[:, 0], minlength=SEGMENTS) / 200  # the first has P, whatever the second is
    np.testing.assert_allclose(first, expected, atol=4 * np.sqrt(0.25 / 200))


def test_phases_run_in_order_and_share_what_stands_before_them():
    look = probe("actor", lambda batch, context: jnp.sum(jnp.abs(context.params["actor"]["policy"])))
    actor = pp.chain(pp.given_indices(ORDER), pp.advantage_normalize(), SURROGATE)
    critic = pp.chain(pp.given_indices(COLUMNS, "segment", refresh="epoch"), VALUE, look)

    def count(params, opt_state, old, new, context):
        return {**params, "other": {"x": params["other"]["x"] + new - old}}, opt_state

    pipeline = pp.chain(dataclasses.replace(growing_reward(), amend=count), GAE, pp.phases(actor=actor, critic=critic))
    optimizers = {"critic": optax.sgd(0.1), "actor": optax.adam(0.1)}
    params = two_entries() | {"other": {"x": jnp.ones(2)}}
    state, metrics = run(pipeline, optimizer=optimizers, params=params, policy=both)
    np.testing.assert_allclose(metrics["critic/actor"], np.abs(state.params["actor"]["policy"]).sum(), rtol=1e-5)
    # the shared parts ran once for the actor, and once more before each of the critic's two epochs
    assert state.pipeline[0][0] == 3
    np.testing.assert_array_equal(state.params["other"]["x"], 1 + 3)
    assert {"explained_variance", "critic/explained_variance"} <= set(metrics)
    says = r"call training\.Train\.of with (such a dict|one optimizer)"
    for wrong in ((pipeline, optax.sgd(0.1)), (actor, optimizers)):  # as a recipe would, whose optimizer is given
        with pytest.raises(pp.errors.UserValueError, match=says):
            pp.learner(both, *wrong)


UNDEFINED = {"entropy": mock.Mock(side_effect=NotImplementedError)}


@pytest.mark.parametrize("hidden", [{}, UNDEFINED], ids=["absent", "undefined"])
def test_entropy_is_estimated_with_its_gradient_where_it_is_not_defined(hidden):
    """For continuous actions it is estimated from samples, and for discrete ones from log-probabilities."""
    batch, part = rollout(masked=False), pp.entropy_bonus(coef=0.5)
    shape = (TIME, SEGMENTS, 3)

    def bonus(x, kind, known):
        x = jnp.broadcast_to(x, shape)
        distribution = kind(jnp.zeros(shape), jnp.exp(x)) if kind is distributions.Normal else kind(x)
        if not known:
            distribution = SimpleNamespace(log_prob=distribution.log_prob, sample=distribution.sample, **hidden)
        current = pp.Current(distribution, batch.log_prob, batch.value)

        def after(key):
            out, _ = part.update(batch.replace(current=current), (), CONTEXT.replace(key=key))
            return out.losses["entropy"], out.metrics["entropy"]

        return tuple(map(jnp.mean, jax.vmap(after)(jax.random.split(CONTEXT.key, 1000))))

    for kind in (distributions.Normal, distributions.Categorical):
        told = jax.jit(jax.value_and_grad(bonus, has_aux=True), static_argnums=(1, 2))
        exact, estimated = (told(jnp.array([0.0, 1.0, 2.0]), kind, known) for known in (True, False))
        assert_close(estimated, exact, rtol=0, atol=0.03)
        assert float(exact[0][0]) == pytest.approx(-0.5 * float(exact[0][1]), rel=1e-4)
        assert exact[0][0] != estimated[0][0]


def stopped_at(target_kl):
    return pp.chain(GAE, pp.given_indices(ORDER), *LOSSES, growing_loss(), pp.kl_early_stop(target_kl))


@functools.cache
def stopping_update():
    """Return `update(target_kl, key, state, batch)`, where the threshold may be traced, and the first state."""
    learner = lambda target_kl: pp.learner(evaluate, stopped_at(target_kl), optax.adam(0.1))  # noqa: E731
    state = learner(0.0).init(make_params())
    return jax.jit(lambda target_kl, key, state, batch: learner(target_kl).update(key, state, batch)), state


@pytest.fixture(scope="module")
def unstopped():
    """Run without a stop; return parameters before each of six minibatches and after the last, and each divergence."""
    batch = rollout(behavior=make_params())
    tape = Tape()
    optimizer = optax.chain(optax.adam(0.1), record_steps(tape, {"kl": "early_stop_kl"}))
    state, _ = run(stopped_at(jnp.inf), batch, optimizer=optimizer)
    after, numbers = read_steps(tape, state.params)
    assert all(numbers["kl"][1:] > 0)
    params = [make_params(), *(jax.tree.map(lambda x, i=i: x[i], after) for i in range(6))]
    return batch, params, numbers["kl"].tolist()


def test_a_minibatch_that_exceeds_or_is_not_a_number_is_not_applied(unstopped):
    batch, params, kls = unstopped
    update, state = stopping_update()
    stopped_at = set()
    for kl in kls[1:]:
        threshold = 0.999 * kl
        first = next(i for i, other in enumerate(kls) if other > threshold)
        stopped_at.add(first)
        after, metrics = update(threshold, KEY, state, batch)
        assert_close(after.params, params[first], rtol=1e-4, atol=1e-5)
        assert after.opt_state[0].count == first
        assert after.pipeline[1][1][2] == first  # growing_loss has the state from before that minibatch, too
        assert metrics["minibatches"] == first
        assert metrics["epochs"] == first // 3 + 1
        assert metrics["early_stopped"] == 1
        np.testing.assert_allclose(metrics["early_stop_kl"], np.mean(kls[: first + 1]), rtol=1e-3, atol=1e-6)
    assert len(stopped_at) > 1
    after, metrics = update(jnp.inf, KEY, state, batch)
    assert_close(after.params, params[6], rtol=1e-4, atol=1e-5)
    assert (metrics["minibatches"], metrics["epochs"], metrics["early_stopped"]) == (6, 2, 0)
    row = int(np.flatnonzero(np.asarray(batch.mask).ravel()[ORDER[0, 1]])[0])  # it is in the second minibatch
    t, n = divmod(int(ORDER[0, 1, row]), SEGMENTS)
    after, metrics = update(jnp.inf, KEY, state, batch.replace(log_prob=batch.log_prob.at[t, n].set(jnp.nan)))
    assert (metrics["minibatches"], metrics["early_stopped"]) == (1, 1)  # a divergence of NaN exceeds any threshold
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(after.params))


def test_stopping_skips_the_work(unstopped):
    batch, _, kls = unstopped
    evaluated = []

    def counted(params, batch):
        jax.debug.callback(lambda: evaluated.append(1))
        return evaluate(params, batch)

    threshold = 0.999 * max(kls[1:4])
    first = next(i for i, kl in enumerate(kls) if kl > threshold)
    _, metrics = jax.block_until_ready(run(stopped_at(threshold), batch, optimizer=optax.adam(0.1), policy=counted))
    jax.effects_barrier()
    assert metrics["minibatches"] == first < 5
    assert len(evaluated) == first + 1


def test_updates_in_scan_and_vmap_equal_loops_which_trace_once():
    update, state = stopping_update()
    batches = [rollout(seed, behavior=make_params()) for seed in range(4)]
    keys, target_kl, together = jax.random.split(KEY, 4), 0.02, stacked(batches)
    after, in_turn, from_here, programs = state, [], [], set()
    for key, batch in zip(keys, batches, strict=True):
        from_here.append(update(target_kl, key, state, batch))
        after, metrics = update(target_kl, key, after, batch)
        in_turn.append(metrics)
        programs.add(update._cache_size())
    assert len(programs) == 1
    vmapped = jax.jit(jax.vmap(update, in_axes=(None, 0, None, 0)))(target_kl, keys, state, together)
    assert_close(vmapped, stacked(from_here), rtol=1e-4, atol=1e-5)
    assert len({int(metrics["minibatches"]) for _, metrics in from_here}) > 1  # they did not all stop at once
    step = lambda state, given: update(target_kl, given[0], state, given[1])  # noqa: E731
    scanned = jax.jit(lambda state: jax.lax.scan(step, state, (keys, together)))(state)
    assert_close(scanned, (after, stacked(in_turn)))
    assert all(x.shape == () for x in in_turn[0].values())


def test_gradients_that_are_not_finite_are_skipped_and_reported():
    batch = rollout(ends=False, masked=False)
    following = part(lambda b, x, c: (b, 0.9 * x + 0.1 * jnp.mean(b.reward)), "following", jnp.ones(()))
    pipeline = pp.chain(following, GAE, pp.given_indices(COLUMNS[:1], "segment"), *LOSSES, growing_loss())
    learner = pp.learner(evaluate, pipeline, optax.apply_if_finite(optax.sgd(0.1), max_consecutive_errors=100))
    update, state = jax.jit(learner.update), learner.init(make_params())
    _, metrics = update(KEY, state, batch)
    assert pp.nonfinite_report(metrics) is None
    # in segment 1, of the second minibatch, the NaN at step 2 spreads backwards over three advantages
    spoiled = batch.replace(reward=batch.reward.at[2, 1].set(jnp.nan))
    after, metrics = update(KEY, state, spoiled)
    counts = {name.removeprefix("nonfinite/"): int(x) for name, x in metrics.items() if name.startswith("nonfinite/")}
    expected = {"reward": 1, "advantage": 3, "loss/policy": 1, "loss/value": 1, "gradient": 1}
    none = ("mask", "terminated", "truncated", "log_prob", "value", "next_value", "loss/own")
    assert counts == expected | {name: 0 for name in none if name in counts}
    assert after.opt_state.total_notfinite == 1
    assert pp.part_state(after, pipeline, "following") == pp.part_state(state, pipeline, "following")
    assert pp.part_state(after, pipeline, "growing_loss") == 1  # it counts one of the two minibatches
    assert not np.array_equal(after.params["policy"], state.params["policy"])  # the first one is applied
    assert pp.nonfinite_report(metrics).startswith("non-finite numbers arose first in reward (1 element), then in adv")
    gives_up = pp.learner(evaluate, pipeline, optax.apply_if_finite(optax.sgd(0.1), max_consecutive_errors=0))
    spoilt, measured = jax.jit(gives_up.update)(KEY, gives_up.init(make_params()), spoiled)
    assert (measured["minibatches"], metrics["minibatches"]) == (2, 1)
    assert np.isnan(spoilt.params["policy"]).any()
    recovered, metrics = update(KEY, after, batch)
    assert pp.nonfinite_report(metrics) is None
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(recovered.params))


def test_no_part_keeps_numbers_that_are_not_finite_if_the_optimizer_skips_them():
    batch = rollout(ends=False, masked=False)
    like = batch.replace(advantage=batch.reward, target=batch.reward)
    chain = pp.chain(pp.replay(2, like), pp.full_batch(), SURROGATE, VALUE, pp.kl_penalty(coef=1.0, target_kl=0.1))
    optimizer = {"main": optax.apply_if_finite(optax.sgd(0.1), max_consecutive_errors=1)}
    spoilt = batch.replace(log_prob=batch.log_prob.at[0, 0].set(jnp.nan), reward=batch.reward.at[1, 1].set(jnp.inf))
    pipeline = pp.chain(GAE, pp.phases(main=pp.phase(chain, trains=None)))
    state, *metrics = run(pipeline, batch, spoilt, batch, optimizer=optimizer)
    assert [int(x["main/minibatches"]) for x in metrics] == [1, 0, 1]
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(state))


@pytest.mark.parametrize("sampler", [pp.shuffled_minibatches(1), pp.segment_minibatches(1)], ids=["step", "segment"])
def test_masked_numbers_of_tokens_may_be_out_of_range(sampler):
    """The embedding of each is NaN. If others are negative, too, they count as numbers, which a memory may read."""
    mask, keeps_time = jnp.ones((TIME, SEGMENTS), bool).at[-1].set(False), sampler.name == "segment_minibatches"

    def policy(params, batch):
        seen = jnp.tanh(jnp.take(params["embedding"], batch.obs, axis=0))
        return evaluate(params, batch.replace(obs=seen))

    params = make_params() | {"embedding": jnp.ones((5, 3))}
    tokens = jnp.ones((TIME, SEGMENTS), int)
    look = probe("least", lambda batch, context: jnp.min(batch.obs))
    outside = tokens.at[-1].set(-100 if keeps_time else 99)
    # A network that evaluates each step separately sees an unmasked token instead.
    for obs, least in ((outside, 0 if keeps_time else 1), (tokens.at[0].set(-1).at[-1].set(-2), -2)):
        batch = rollout(masked=False).replace(obs=obs, mask=mask)
        _, metrics = run(pp.chain(GAE, sampler, SURROGATE, look), batch, params=params, policy=policy)
        assert np.isfinite(metrics["grad_norm"])
        assert metrics["least"] == (least if keeps_time else max(least, -1))


@pytest.mark.parametrize("sampler", [pp.shuffled_minibatches(2), pp.segment_minibatches(2)], ids=["step", "segment"])
def test_masked_numbers_may_be_outside_the_domain_of_a_policy(sampler):
    """Not even zeros would do: the length of an observation and a divergence from a constant have no gradient there."""
    mask = jnp.ones((TIME, SEGMENTS, 1)).at[1, 2].set(0)

    def policy(params, batch):
        seen = batch.obs / jnp.linalg.norm(batch.obs, axis=-1, keepdims=True)
        distribution, value = evaluate(params, batch.replace(obs=seen))
        loc, scale = distribution.logits, 1 + jnp.exp(distribution.logits)
        parts = {"a": distributions.Beta(scale, scale), "b": distributions.Normal(loc, scale)}
        return distributions.Joint(parts), value

    exact = pp.stateless(
        lambda batch: batch.add_loss("kl", batch.behavior.kl_divergence(batch.current.distribution)),
        requires=("behavior",), reads=("current.distribution",), provides=("losses",), place="after_sampler",
    )  # fmt: skip
    batch = rollout(masked=False)
    behavior, _ = policy(make_params(), batch)
    behavior = jax.tree.map(lambda x: jnp.where(mask > 0, x, 0), behavior)
    action = jax.tree.map(lambda x: jnp.where(mask > 0, x, -9), behavior.mode())
    batch = batch.replace(action=action, behavior=behavior, mask=mask[..., 0])
    _, metrics = run(pp.chain(GAE, sampler, SURROGATE, VALUE, exact), batch, policy=policy)
    assert np.isfinite(metrics["grad_norm"])


def test_a_boolean_mask_stays_boolean():
    masked = probe("masked", lambda batch, context: jnp.mean(jnp.where(~batch.mask, 1.0, 0.0)))
    batch = rollout().replace(mask=jnp.ones((TIME, SEGMENTS), bool))
    for sampler in (SEGMENT, pp.time_chunks(1, length=3)):
        assert run(pp.chain(GAE, sampler, masked, SURROGATE), batch)[1]["masked"] == 0


def test_phases_keep_the_type_of_the_parameters():
    """An `nnx.State` returns its entries as states, and makes them from dicts."""
    nnx = pytest.importorskip("flax.nnx")
    params = nnx.state(nnx.Dict({name: nnx.Linear(3, 1, rngs=nnx.Rngs(0)) for name in ("policy", "value")}))
    phases = {"policy": pp.chain(FULL, SURROGATE), "value": pp.chain(FULL, VALUE)}

    def policy(params, batch):
        outputs = [batch.obs @ params[name]["kernel"][...] for name in ("policy", "value")]
        return distributions.Categorical(outputs[0] * jnp.arange(2.0)[None, None]), outputs[1][..., 0]

    optimizer = dict.fromkeys(phases, optax.sgd(0.1))
    state, _ = run(pp.chain(GAE, pp.phases(**phases)), rollout(), optimizer=optimizer, params=params, policy=policy)
    assert jax.tree.structure(state.params) == jax.tree.structure(params)


def test_only_what_counts_is_counted_and_no_phase_learns_from_a_flag_out_of_range():
    none, wrong = jnp.zeros((TIME, SEGMENTS)), jnp.array([jnp.nan, jnp.inf, -jnp.inf])
    batch = rollout().replace(mask=(none + 1).at[0, 0].set(0), terminated=none.at[1, 1].set(1), reset=none)
    names = ("reward", "log_prob", "value", "next_value")
    spoil = {name: getattr(batch, name).at[[0, 1, 2], [0, 1, 2]].set(wrong) for name in names}
    pipeline = pp.chain(pp.full_batch(), probe("x", lambda batch, context: jnp.zeros(())), growing_loss())
    counted = jax.jit(lambda batch: run(pipeline, batch)[1])
    metrics = counted(batch.replace(**spoil))
    # [0, 0] is masked; what follows a termination at [1, 1] may be anything
    expected = {"reward": 2, "log_prob": 2, "value": 2, "next_value": 1}
    assert {name: int(metrics[f"nonfinite/{name}"]) for name in expected} == expected
    for name, value, count in (
        ("mask", 0.5, 1), ("truncated", 2, 1), ("reset", 2, 1), ("terminated", -0.5, 1), ("terminated", 0.5, 0),
    ):  # fmt: skip
        flag = getattr(batch, name).at[2, 2].set(value)  # this step counts; flags are 0 or 1
        metrics = counted(batch.replace(**{name: flag}))
        assert (metrics[f"nonfinite/{name}"], metrics["nonfinite/log_prob"]) == (count, 0), name
        says = f"non-finite numbers arose first in {name} (1 element out of range)" if count else None
        assert pp.nonfinite_report(metrics) == says
    spoilt = batch.replace(terminated=batch.terminated.at[2, 2].set(2))
    phases = {name: pp.chain(pp.full_batch(), loss) for name, loss in (("policy", SURROGATE), ("value", VALUE))}
    _, metrics = run(pp.chain(GAE, pp.phases(**phases)), spoilt, optimizer=dict.fromkeys(phases, optax.sgd(0.1)))
    assert metrics["policy/nonfinite/gradient"] == metrics["value/nonfinite/gradient"] == 1


def test_padding_may_hold_actions_that_do_not_exist():
    batch = rollout()
    batch = batch.replace(action=jnp.where(batch.mask > 0, batch.action, -1))
    pipeline = pp.chain(GAE, pp.full_batch(), SURROGATE, pp.kl_penalty(coef=0.1, target_kl=0.01))
    learner = pp.learner(evaluate, pipeline, optax.sgd(0.1))
    state = learner.init(make_params())
    assert_close(learner.update(KEY, state, batch)[0].params, jax.jit(learner.update)(KEY, state, batch)[0].params)


def test_the_report_names_phases_custom_parts_and_thresholds():
    counts = {"actor/nonfinite/gradient": [1, 0, 1], "nonfinite/value": 2, "nonfinite/mine": 1, "loss": np.nan}
    says = "value (2 elements), then in actor/gradient (2 minibatches), then in mine (1 minibatch)"
    assert pp.nonfinite_report(counts) == f"non-finite numbers arose first in {says}"
    losses = {"nonfinite/loss/clipped_surrogate": 7, "nonfinite/loss/value_loss": 8}  # the first made the other NaN
    assert "first in loss value_loss (8 minibatches), then in loss clipped" in (says := pp.nonfinite_report(losses))
    assert says.endswith("finite: look for actions and observations out of range")
    eps = lambda step: 1e-8 - step  # noqa: E731
    twice, stop = pp.advantage_normalize(eps=eps), pp.kl_early_stop(lambda step: 0.1 - step)
    pipeline = pp.chain(GAE, twice, pp.full_batch(), twice, twice, SURROGATE, stop)
    learner = pp.learner(evaluate, pipeline, optax.sgd(1e-3))
    state = learner.init(make_params())._replace(step=jnp.int32(1))
    _, metrics = jax.jit(learner.update)(jax.random.key(0), state, rollout())
    first = "eps of advantage_normalize (out of range), then in target_kl of kl_early_stop (out of range)"
    assert pp.nonfinite_report(metrics).startswith(f"non-finite numbers arose first in {first}, then in advantage (")


def policy(params, batch):
    """Evaluate `evaluate` with one more head; read further fields."""
    distribution, value = evaluate(params, batch)
    # One leaf belongs to no element, like a deviation that all elements share.
    value = value + 0 * batch.shared["one"] + 0 * batch.extras["row"]
    return pp.Output(distribution, value, aux={"second": batch.obs @ params["value"]})


def numbered(batch):
    """Add what `policy` reads."""
    return batch.replace(shared={"one": jnp.ones(())}, extras={"row": ROWS * 1.0})


def own_part(change, *reads, **declared):
    """Make a part that changes the minibatch after the policy was evaluated."""
    return pp.stateless(change, reads=reads, place="after_sampler", **declared)


def own_loss(name, loss, *reads):
    """Make a part that adds `loss(batch)`, which is a loss of single elements."""
    return own_part(lambda batch: batch.add_loss(name, loss(batch)), *reads, provides=("losses",), elementwise=True)


@pytest.mark.parametrize(("sampler", "microbatch", "elementwise"), [("full", 12, False), ("weighted", 6, True)])
def test_microbatches_change_rounding_only(sampler, microbatch, elementwise):
    """With losses of single elements, each piece is evaluated once; with others, twice."""
    samplers = {"full": pp.full_batch(2), "weighted": pp.prioritized_sampler(2, 2, alpha=1.0, beta=0.5)}
    batch = numbered(rollout())
    norm = lambda batch, context: batch.add_loss("norm", optax.tree.norm(context.params), per="batch")  # noqa: E731
    second = own_loss("second", lambda b: jnp.square(b.current.aux["second"] - b.reward), "current.aux", "reward")
    more = pp.kl_penalty(coef=0.1), pp.critics.critic_loss(pp.functional.huber_value_loss, delta=1.0, name="huber")
    spo = pp.policy_loss(pp.functional.simple_policy_optimization, clip_eps=0.3, name="spo")
    first, *others = (pp.advantage_normalize(), *LOSSES, second, spo, *more, pp.entropy_bonus(coef=0.1))
    if sampler == "weighted":
        weighted = lambda batch: batch.weight[None] * jnp.square(batch.current.value)  # noqa: E731
        others = [pp.advantage_weight(), *others, own_loss("weighted", weighted, "weight", "current.value")]
    assert pp.chain(*LOSSES, second).elementwise  # so a part that wraps a chain is also evaluated once
    if not elementwise:
        others.append(own_part(norm, provides=("losses",)))
    pipeline = pp.chain(GAE, samplers[sampler], first, *others)
    policies = (pp.microbatched(policy, microbatch), policy)
    assert_close(*(run(pipeline, batch, optimizer=optax.adam(0.1), policy=each) for each in policies))
    learner = pp.learner(policies[0], pipeline, optax.adam(0.1))
    assert ("remat" not in str(jax.make_jaxpr(learner.update)(KEY, learner.init(make_params()), batch))) == elementwise


class Tempered(NamedTuple):
    """Logits, and a temperature for each segment, which has no axis of time."""

    logits: jax.Array
    temperature: jax.Array

    def log_prob(self, action):
        return distributions.Categorical(self.logits / self.temperature[None, :, None]).log_prob(action)


@pytest.mark.parametrize("way", ["once", "twice", "shards"])
def test_what_a_distribution_has_for_each_segment_is_joined_in_order(monkeypatch, way):
    def tempered(params, batch):
        of_whole = policy(params, batch)
        distribution = Tempered(of_whole.distribution.logits, batch.per_segment["temperature"])
        return of_whole._replace(distribution=distribution, carry=batch.carry)

    monkeypatch.setattr(jax, "device_count", lambda: 2)
    batch = numbered(rollout()).replace(per_segment={"temperature": jnp.arange(1.0, SEGMENTS + 1)})
    batch = batch.replace(carry=jnp.zeros((SEGMENTS, 1)), reset=jnp.zeros((TIME, SEGMENTS)))
    pipeline = pp.chain(GAE, pp.full_batch(2), *LOSSES, part(name="unknown") if way == "twice" else pp.identity())
    cut = batch.replace(shards=2 if way == "shards" else 1)
    microbatched = tempered if way == "shards" else pp.microbatched(tempered, 12)
    assert_close(run(pipeline, cut, policy=microbatched), run(pipeline, batch, policy=tempered))


def test_pieces_have_keys_of_their_own():
    seen = []

    def look(batch, state, context):
        made = jax.random.split(context.key, 4)
        jax.debug.callback(seen.append, jax.random.key_data(jnp.append(made, context.key)))
        return batch, state

    def looks(*reads):
        return part(look, reads=reads, place="after_sampler", elementwise=True)

    pipeline = pp.chain(GAE, pp.full_batch(), looks(), looks("current.value"), *LOSSES)
    jax.block_until_ready(run(pipeline, numbered(rollout()), policy=pp.microbatched(policy, 6)))
    jax.effects_barrier()
    assert len(seen) == 2 + 1 + 4  # the whole minibatch, which the first part sees twice, and each piece
    assert len(np.unique(np.concatenate(seen), axis=0)) == 5 * (1 + 1 + 4)


def drop(dropped, *reads):
    """Make a part that masks some elements."""
    change = lambda batch: batch.replace(mask=jnp.where(dropped(batch), 0, batch.mask))  # noqa: E731
    return own_part(change, "mask", *reads, provides=("mask",), elementwise=True)


def scaled(batch, context):
    return batch.replace(reward=jnp.exp(context.params["value"][0] + 0 * batch.log_prob))


@pytest.mark.parametrize(
    "parts",
    [
        (own_part(scaled, "log_prob", provides=("reward",)), pp.value_loss(coef=pp.field("reward"))),  # with a gradient
        (drop(lambda batch: batch.extras["row"] % 3 == 0, "extras.row"), *LOSSES),
        (drop(lambda batch: batch.current_log_ratio() > 0, "current.log_prob"), *LOSSES),
    ],
    ids=["reward", "mask", "mask of current"],
)
def test_microbatches_follow_what_parts_change(parts):
    pipeline, batch = pp.chain(GAE, pp.full_batch(2), *parts), numbered(rollout())
    assert_close(*(run(pipeline, batch, policy=each) for each in (pp.microbatched(policy, 6), policy)))


NO_ESTIMATE = (
    pp.stateless(lambda b: b.replace(advantage=b.log_prob), provides=("advantage",)), pp.clipped_surrogate(clip_eps=1)
)  # fmt: skip


def flat_batch(shape, size):
    return pp.Batch(obs=jnp.ones((*shape, size)), action=jnp.ones(shape, int), log_prob=jnp.zeros(shape))


def test_microbatches_need_less_memory():
    """They also do the same with a minibatch of steps."""

    def wide(params, batch):
        head = jnp.stack([jnp.ones(256), jnp.linspace(0, 1, 256)], axis=1)
        return distributions.Categorical(jnp.tanh(batch.obs @ params) @ head), batch.obs[..., 0]

    batch, pipeline = flat_batch((32, 16), 4), pp.chain(pp.shuffled_minibatches(1), *NO_ESTIMATE)
    obs = jax.random.normal(KEY, batch.obs.shape)
    batch = batch.replace(obs=obs, log_prob=-jnp.abs(obs[..., 0]))
    needed, found = [], []
    for microbatch in (None, 64):
        policy = wide if microbatch is None else pp.microbatched(wide, microbatch)
        learner = pp.learner(policy, pipeline, optax.sgd(1.0))
        given = KEY, learner.init(jnp.ones((4, 256))), batch
        program = jax.jit(learner.update).lower(*given).compile()
        needed.append(program.memory_analysis().temp_size_in_bytes)
        found.append(program(*given)[0].params)
    assert needed[1] < needed[0] / 3
    assert_close(*found, rtol=1e-4)
    assert not np.allclose(found[0], 1)


@pytest.mark.parametrize(
    ("segments", "backend", "cores", "size", "pieces"),
    [
        (128, "cpu", 1, 2, 16), (128, "cpu", 2, 2, 1), (15, "cpu", 1, 2, 1), (127, "cpu", 1, "twice", 1),
        (128, "cpu", 1, "twice", 16), (128, "gpu", 1, 2, 1), (131, "cpu", 1, 2, 1), (128, "cpu", 1, 200, 1),
        (128, "cpu", 1, "recurrent", 1),
    ],
)  # fmt: skip
def test_microbatches_are_chosen_where_they_are_faster(monkeypatch, segments, backend, cores, size, pieces):
    """They are from 2,048 elements on (16,384 if pieces are evaluated twice), on one core; 131 is a prime."""
    recurrent, twice, size = size == "recurrent", size == "twice", size if isinstance(size, int) else 2
    seen = []

    def recording(params, batch):
        seen.append(jnp.shape(batch.log_prob))
        return distributions.Categorical(batch.obs * params), batch.obs[..., 0]

    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(_pieces, "count_cores", lambda: cores)
    other = pp.policy_loss(lambda log_ratio, advantage, mask: log_ratio, name="other") if twice else pp.identity()
    batch, pipeline = flat_batch((128, segments), size), pp.chain(pp.segment_minibatches(1), *NO_ESTIMATE, other)
    batch = batch.replace(carry=jnp.zeros((segments, 3))) if recurrent else batch
    learner = pp.learner(pp.microbatched(recording, "auto"), pipeline, optax.sgd(1.0))
    jax.eval_shape(learner.update, KEY, learner.init(jnp.ones(())), batch)
    assert (128, segments // pieces) in seen
    assert {np.prod(x) for x in seen} <= {128 * segments, 128 * segments // pieces}


# --- changing hyperparameters: an end out of range is an error; what leaves the range at run time is counted ----------

SPOILT = {
    "gamma": (0.9, 1.5), "gae_lambda": (0.8, -0.1), "rho_clip": (1.0, -1.0), "c_clip": (1.0, -1.0),
    "alpha": (0.8, -0.5), "beta": (0.4, 1.2), "eps": (1e-6, -1.0), "std_eps": (1e-8, -1.0), "clip_eps": (0.2, -0.2),
    "clip_eps_high": (0.2, jnp.nan), "dual_clip": (3.0, 0.5), "value_clip": (0.2, jnp.nan), "value_coef": (0.5, -0.5),
    "entropy_coef": (0.01, -0.01), "target_kl": (1e3, jnp.nan), "penalty_target": (0.1, -0.1),
    "delta": (1.0, -1.0), "spo_clip": (0.2, -0.2),
}  # fmt: skip
"""For each kind of hyperparameter: a value that it may have, and one that it may not have."""


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
            pp.critics.critic_loss(pp.functional.huber_value_loss, delta=of("delta"), name="huber"),
            pp.policy_loss(pp.functional.simple_policy_optimization, clip_eps=of("spo_clip"), name="spo"),
        )  # fmt: skip
        learner = pp.learner(evaluate, pipeline, optax.sgd(1e-3))
        _, metrics = learner.update(jax.random.key(0), learner.init(make_params())._replace(step=jnp.int32(2)), batch)
        return sum(x for name, x in metrics.items() if name.startswith("nonfinite/"))

    *spoilt, sound = jax.jit(jax.vmap(counted))(jnp.arange(len(SPOILT) + 1))
    assert dict(zip(SPOILT, [int(n) > 0 for n in spoilt], strict=True)) == dict.fromkeys(SPOILT, True)
    assert sound == 0


def test_schedules_are_refused_at_their_ends_only():
    for schedule in (
        pp.linear_schedule(0.2, 0.0, 100),  # annealed to a value that it may not have
        lambda step: 0.2 * (1 - step / 1000),  # in a run of 1000 updates
        lambda step: 0.2 * jnp.sqrt(1 - step / 1000),
        lambda step: jnp.array([0.2, 0.1])[step],
        0.2,
    ):
        check_number("here", "clip_eps", schedule)
    check_number("here", "gamma", lambda step: 1.0 + 1e-7 * step)
    check_number("here", "gamma", pp.linear_schedule(0.9, jnp.float32(1) + 1e-7, 10))  # by rounding
    check_number("here", "beta", jax.jit(lambda step: jnp.minimum(1.0, 0.2 + step / 10)))

    def end(rate):
        beta = check_number("here", "beta", pp.linear_schedule(0.2, rate, 10))
        return beta(jnp.int32(0)), beta(jnp.int32(10))

    first, last = jax.jit(jax.vmap(end))(jnp.array([0.5, 1.5]))
    assert jnp.allclose(first, 0.2)
    assert last[0] == 0.5
    assert jnp.isnan(last[1])
    # Without jit, as with it, a value may be annealed to an open end, and may exceed 1 by a rounding error.
    batch, context = example_batch(after_sampler=True), example_context()
    context = context.replace(step=jnp.asarray(100))
    annealed = pp.clipped_surrogate(clip_eps=pp.linear_schedule(0.2, 0.0, 100))
    above = pp.gae(gamma=lambda step: jnp.float32(1.0000001), gae_lambda=1.0)
    assert jax.jit(pp.linear_schedule(0.2, 0.0, 30))(30) == 0
    for made, given in ((annealed, batch), (above, example_batch())):
        eager, jitted = (f(given, made.init({}), context)[0] for f in (made.update, jax.jit(made.update)))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), eager.losses, jitted.losses)
