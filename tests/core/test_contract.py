"""What the contract carries beyond losses per element: outputs, optimizers that listen, amended parameters, lenses."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from ppo_parts import distributions
from ppo_parts.testing import example_batch, example_context
from tests.common import SEGMENTS, TIME, Softmax, assert_close, assert_same, evaluate, make_params, rollout

KEY = jax.random.key(0)
GAE = pp.gae(gamma=0.9, gae_lambda=0.8)
SURROGATE = pp.clipped_surrogate(clip_eps=0.2)


def run(pipeline, batch=None, *, optimizer=None, params=None, policy=evaluate, key=KEY, updates=1, **options):
    """Updates of a fresh learner on one rollout; the last result."""
    learner = pp.learner(policy, pipeline, optimizer or optax.sgd(0.1), **options)
    state, update = learner.init(make_params() if params is None else params, key), jax.jit(learner.update)
    for _ in range(updates):
        state, *rest = update(key, state, rollout() if batch is None else batch)
    return (state, *rest)


def part(update, name="part", init=lambda params, key: (), **attributes):
    return pp.Part(init, update, name, **attributes)


# --- outputs and policies --------------------------------------------------------------------------------------------


def with_aux(params, batch):
    distribution, value = evaluate(params, batch)
    return pp.Output(distribution, value, aux={"second": batch.obs @ params["second"]})


def test_output_and_tuples_mean_the_same():
    pipeline = pp.chain(GAE, pp.full_batch(2), SURROGATE, pp.value_loss())
    assert_same(run(pipeline, policy=lambda p, b: pp.Output(*evaluate(p, b))), run(pipeline))


@pytest.mark.parametrize("size", [None, 4])
def test_aux_is_differentiable_and_survives_microbatches(size):
    def loss(batch, state, context):
        return batch.add_loss("second", jnp.square(batch.current.aux["second"] - batch.reward)), state

    params = make_params() | {"second": jnp.ones(3)}
    pipeline = pp.chain(pp.full_batch(), part(loss, place="after_sampler"))

    def policy(params, batch):  # with a distribution that microbatches can carry
        output = with_aux(params, batch)
        return output._replace(distribution=distributions.Categorical(output.distribution.logits))

    batch = rollout(masked=False)
    state, _ = run(pipeline, batch, params=params, policy=pp.microbatched(policy, size) if size else policy)
    gradient = jax.grad(lambda w: jnp.mean(jnp.square(batch.obs @ w - batch.reward)))(params["second"])
    np.testing.assert_allclose(state.params["second"], params["second"] - 0.1 * gradient, rtol=1e-5)


def test_chains_without_a_critic_run_and_parts_that_need_one_refuse():
    def actor(params, batch):
        return pp.Output(evaluate(params, batch)[0])

    batch = rollout().replace(value=None, next_value=None)
    reinforce = pp.stateless(lambda b: b.replace(advantage=b.reward), name="reinforce", provides=("advantage",))
    state, metrics = run(pp.chain(reinforce, pp.full_batch(2, refresh="epoch"), SURROGATE), batch, policy=actor)
    assert float(jnp.sum(jnp.abs(state.params["policy"] - make_params()["policy"]))) > 0
    assert "nonfinite/value" not in metrics
    with pytest.raises(
        ValueError, match=r"gae: batch\.value is missing: .* give the policy a critic, or use an advantage"
    ):
        run(pp.chain(GAE, pp.full_batch(), SURROGATE), batch, policy=actor)
    with pytest.raises(ValueError, match="value_loss: the policy has no value to learn"):
        run(pp.chain(GAE, pp.full_batch(), pp.value_loss()), rollout(), policy=actor)
    with pytest.raises(ValueError, match="gae: the policy has no value"):
        run(pp.chain(pp.full_batch(), GAE, SURROGATE), rollout(), policy=actor)


@pytest.mark.parametrize("size", [None, 1])
def test_context_evaluate_always_returns_an_output(size):
    seen = []

    def recurrent(params, batch):
        distribution, value = evaluate(params, batch)
        carry = jnp.zeros((SEGMENTS, 2)) if batch.carry is None else batch.carry + 1
        return distributions.Categorical(distribution.logits), value, carry

    def look(batch, state, context):
        output = context.evaluate(context.params, batch)
        seen.append((type(output), output.carry.shape))
        return batch, state

    batch = rollout().replace(carry=jnp.zeros((SEGMENTS, 2)), reset=jnp.zeros((TIME, SEGMENTS)))
    policy = pp.microbatched(recurrent, size) if size else recurrent
    pipeline = pp.chain(part(look), GAE, pp.segment_minibatches(2), part(look), SURROGATE)
    run(pipeline, batch, policy=policy)
    assert {kind for kind, _ in seen} == {pp.Output}
    assert {shape for _, shape in seen} == {(SEGMENTS, 2), (SEGMENTS // 2, 2)}


def test_a_policy_is_called_like_evaluate():
    policy = pp.Policy(lambda key: make_params(), evaluate)
    pipeline = pp.chain(GAE, pp.full_batch(), SURROGATE)
    assert_same(run(pipeline, policy=policy), run(pipeline))


# --- the optimizer hears the parts -----------------------------------------------------------------------------------


def test_the_optimizer_hears_step_loss_and_metrics():
    heard = []

    def update(updates, state, params=None, *, step, value, metrics, **extra):
        heard.append(sorted(metrics))
        return jax.tree.map(lambda u: -metrics["approx_kl"] * u * value * step, updates), state

    adaptive = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    batch = rollout(masked=False)
    pipeline = pp.chain(GAE, pp.full_batch(), SURROGATE, pp.policy_diagnostics())
    learner = pp.learner(evaluate, pipeline, adaptive)
    state = learner.init(make_params())._replace(step=jnp.int32(3))
    after, metrics = jax.jit(learner.update)(KEY, state, batch)
    plain, _ = run(pipeline, batch, optimizer=optax.sgd(1.0))
    scale = metrics["approx_kl"] * metrics["loss"] * 3
    expected = jax.tree.map(lambda new, old: old + scale * (new - old), plain.params, state.params)
    assert_close(after.params, expected)
    assert {"approx_kl", "clip_fraction", "policy_loss"} <= set(heard[0])


def test_reduce_on_plateau_works():
    optimizer = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=1.0))
    pipeline = pp.chain(GAE, pp.full_batch(3), SURROGATE)
    state, _ = run(pipeline, optimizer=optimizer, updates=2)
    assert float(state.opt_state[1].scale) < 1


def test_accumulated_gradients_equal_a_large_batch_and_the_optimizer_hears_the_step():
    batch, optimizer = rollout(masked=False), pp.clipped_adam(pp.linear_schedule(0.1, 0.0, 4), max_grad_norm=0.5)
    whole, parts = (
        pp.chain(GAE, x, SURROGATE, pp.value_loss()) for x in (pp.full_batch(2), pp.segment_minibatches(2, 2))
    )
    accumulated, metrics = run(parts, batch, optimizer=optax.MultiSteps(optimizer, 2), updates=2)
    assert_close(accumulated.params, run(whole, batch, optimizer=optimizer, updates=2)[0].params)
    assert metrics["minibatches"] == 4


def test_an_update_is_differentiable():
    batch = rollout()

    def after(hyperparameters):
        rate, coef, gamma = hyperparameters
        losses = (SURROGATE, pp.value_loss(), pp.entropy_bonus(coef=coef), pp.kl_early_stop(10.0))
        pipeline = pp.chain(pp.gae(gamma=gamma, gae_lambda=0.8), pp.full_batch(2), *losses)
        state, _ = run(pipeline, batch, optimizer=optax.sgd(rate))
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(state.params))

    at = jnp.array([0.1, 0.5, 0.9])
    gradient, value = jax.jit(jax.grad(after))(at), jax.jit(after)
    for index, step in enumerate((0.01, 0.05)):
        move = jnp.zeros(3).at[index].set(step)
        numeric = (value(at + move) - value(at - move)) / (2 * step)
        np.testing.assert_allclose(gradient[index], numeric, rtol=0.02)
        assert abs(numeric) > 0.001
    assert gradient[2] == 0  # advantages are constants


def test_gradient_metrics_are_reported():
    def norms(gradient):
        return {f"grad_norm_{name}": optax.tree.norm(g) for name, g in gradient.items()}

    _, metrics = run(pp.chain(GAE, pp.full_batch(), SURROGATE, pp.value_loss()), gradient_metrics=norms)
    whole = jnp.hypot(metrics["grad_norm_policy"], metrics["grad_norm_value"])
    np.testing.assert_allclose(metrics["grad_norm"], whole, rtol=1e-5)


# --- parts that amend, finish and draw -------------------------------------------------------------------------------


def test_gradient_metrics_that_replace_others_or_are_not_scalars_are_refused():
    for measured, message in (
        ({"loss": 99.0}, r"'loss' is written twice.*gradient_metrics.*give one of them another name"),
        ({"norms": jnp.ones(2)}, r"gradient_metrics must return scalars, but 'norms' has shape \(2,\)"),
    ):
        pipeline, options = pp.chain(GAE, pp.full_batch(), SURROGATE), {"gradient_metrics": lambda g, m=measured: m}
        learner = pp.learner(evaluate, pipeline, optax.sgd(0.1), **options)
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(learner.update, KEY, learner.init(make_params()), rollout())


def test_amend_changes_parameters_outside_the_gradient():
    def count(batch, state, context):
        return batch, state + 1

    def halve(params, old, new):
        return {**params, "value": params["value"] * 0.5 ** (new - old)}

    amending = part(count, "amending", lambda params, key: jnp.zeros(()), amend=halve)
    _, without = jax.tree.leaves(make_params())
    for before, times in ((True, 1), (False, 3)):
        parts = (amending, GAE, pp.full_batch(3), SURROGATE) if before else (GAE, pp.full_batch(3), SURROGATE, amending)
        state, _ = run(pp.chain(*parts))
        np.testing.assert_allclose(state.params["value"], without * 0.5**times, rtol=1e-6)


def test_a_minibatch_that_is_discarded_is_not_amended():
    amending = part(
        lambda b, s, c: (b, s), "amending", amend=lambda params, old, new: jax.tree.map(jnp.zeros_like, params)
    )
    state, _ = run(pp.chain(GAE, pp.full_batch(3), SURROGATE, amending, pp.kl_early_stop(0.0)))
    assert_same(state.params, make_params())


def test_finish_sees_the_rollout_under_the_updated_policy():
    def finish(batch, state, context):
        assert batch.log_prob.shape == (TIME, SEGMENTS)
        return jnp.mean(batch.current.value)

    measuring = part(lambda b, s, c: (b, s), "measuring", lambda params, key: jnp.zeros(()), finish=finish)
    batch = rollout(masked=False)
    pipeline = pp.chain(GAE, pp.shuffled_minibatches(2), pp.value_loss(), measuring)
    state, _ = run(pipeline, batch)
    expected = jnp.mean(evaluate(state.params, batch)[1])
    np.testing.assert_allclose(pp.part_state(state, pipeline, "measuring"), expected, rtol=1e-5)
    with pytest.raises(KeyError, match="the parts are gae, value_loss, measuring"):
        pp.part_state(state, pipeline, "nothing")


def test_parts_draw_their_first_state():
    drawing = part(lambda b, s, c: (b, s), "drawing", lambda params, key: jax.random.normal(key, (3,)))
    pipeline = pp.chain(GAE, drawing, pp.full_batch(), SURROGATE, dataclasses.replace(drawing, name="another"))
    learner = pp.learner(evaluate, pipeline, optax.sgd(1.0))
    drawn = [
        pp.part_state(learner.init(make_params(), jax.random.key(seed)), pipeline, name)
        for seed in range(2)
        for name in ("drawing", "another")
    ]
    assert len({float(x[0]) for x in drawn}) == 4
    with pytest.raises(TypeError, match=r"init must take \(params, key\)"):
        pp.Part(lambda params: (), lambda b, s, c: (b, s), "old")
    with pytest.raises(TypeError, match=r"short: update must take \(batch, state, context\); this one takes \(batch\)"):
        pp.Part(lambda params, key: (), lambda batch: batch, "short")


def test_a_state_that_is_the_parameters_can_be_donated():
    mirror = part(lambda b, s, c: (b, c.params), "mirror", lambda params, key: params)
    learner = pp.learner(evaluate, pp.chain(mirror, GAE, pp.full_batch(), SURROGATE), optax.sgd(0.1))
    update = jax.jit(learner.update, donate_argnums=1)
    state = learner.init(jax.tree.map(jnp.copy, make_params()))
    state, _ = update(KEY, state, rollout())
    state, _ = update(KEY, state, rollout())
    assert int(state.step) == 2


# --- losses, metrics, stops ------------------------------------------------------------------------------------------


def test_losses_are_reduced_as_they_say():
    def losses(batch, state, context):
        batch = batch.add_loss("segment", jnp.arange(1.0, SEGMENTS + 1) + 0 * batch.current.value[0], per="segment")
        return batch.add_loss("scalar", jnp.float32(7) + 0 * jnp.sum(batch.current.value), per="batch"), state

    _, metrics = run(pp.chain(pp.full_batch(), part(losses, place="after_sampler")))
    assert float(metrics["loss"]) == 7 + (1 + 2 + 3) / 3  # the last segment is masked throughout


def test_metrics_are_reduced_as_they_say():
    def measure(batch, state, context):
        x = 1.0 + context.minibatch
        for way in ("mean", "sum", "max", "min"):
            batch = batch.add_metrics(way, **{f"a_{way}": x})
        return batch, state

    pipeline = pp.chain(GAE, pp.shuffled_minibatches(4), part(measure), SURROGATE)
    _, metrics = run(pipeline)
    assert {way: float(metrics[f"a_{way}"]) for way in ("mean", "sum", "max", "min")} == {
        "mean": 2.5, "sum": 10, "max": 4, "min": 1,
    }  # fmt: skip
    assert isinstance(metrics, pp.Metrics)
    assert len(jax.tree.leaves(metrics)) == 1
    with pytest.raises(KeyError, match="no metric is named 'nothing'; the metrics are nonfinite/reward"):
        metrics["nothing"]


def test_early_stop_follows_any_metric():
    pipeline = pp.chain(GAE, pp.full_batch(4), SURROGATE, pp.early_stop("clip_fraction", -1.0))
    _, metrics = run(pipeline)
    assert (metrics["minibatches"], metrics["early_stopped"]) == (0, 1)
    with pytest.raises(ValueError, match=r"early_stop needs batch\.metrics\.nothing"):
        run(pp.chain(GAE, pp.full_batch(), SURROGATE, pp.early_stop("nothing", 1.0)))


def test_the_batch_after_the_head_can_be_returned():
    _, _, batch = run(pp.chain(GAE, pp.shuffled_minibatches(2), SURROGATE), return_batch=True)
    expected, _ = GAE.update(rollout(), pp.EmptyState(), pp.Context(key=KEY))
    np.testing.assert_allclose(batch.advantage, expected.advantage, rtol=1e-6)
    # A field that is written only to be returned needs no reader, and keeps its own value.
    second = pp.within(
        pp.gae(gamma=0.9, gae_lambda=0.5), name="short", write={"advantage": "extras.short", "target": "extras.target"}
    )
    _, _, batch = run(pp.chain(GAE, second, pp.shuffled_minibatches(2), SURROGATE), return_batch=True)
    expected, _ = pp.gae(gamma=0.9, gae_lambda=0.5).update(rollout(), pp.EmptyState(), pp.Context(key=KEY))
    np.testing.assert_allclose(batch.extras["short"], expected.advantage, rtol=1e-6)
    with pytest.raises(ValueError, match=r"short writes extras.short and extras.target, and no part after it reads"):
        run(pp.chain(GAE, second, pp.shuffled_minibatches(2), SURROGATE))


def test_a_function_of_batch_and_context_is_a_part():
    def scaled(batch, context):
        return batch.replace(reward=batch.reward * context.step)

    batch = rollout()
    context = pp.Context(key=KEY, step=3)
    assert_same(pp.stateless(scaled).update(batch, pp.EmptyState(), context)[0].reward, batch.reward * 3)
    default = pp.stateless(lambda batch, by=2.0: batch.replace(reward=batch.reward * by))
    assert_same(default.update(batch, pp.EmptyState(), context)[0].reward, batch.reward * 2)


def test_a_phase_that_does_not_train_a_leaf_leaves_it_to_the_bit():
    trains = lambda params: {"actor": {"policy": False}, "critic": {"value": True}}  # noqa: E731
    phase = pp.phase(pp.chain(pp.full_batch(2), pp.value_loss()), trains=trains)
    decaying = optax.adamw(0.1, weight_decay=0.5)  # moves what has no gradient
    state, _ = run(pp.chain(GAE, pp.phases(p=phase)), optimizer={"p": decaying}, params=two_entries(), policy=both)
    assert_same(state.params["actor"], two_entries()["actor"])
    assert not np.array_equal(state.params["critic"]["value"], two_entries()["critic"]["value"])


def test_finish_has_a_key_for_every_part():
    def keeps_key(name):
        def finish(batch, state, context):
            return jax.random.uniform(context.key)

        return part(lambda b, s, c: (b, s), name, lambda params, key: jnp.zeros(()), finish=finish)

    pipeline = pp.chain(keeps_key("first"), GAE, pp.full_batch(), SURROGATE, keeps_key("second"))
    state, _ = run(pipeline)
    assert pp.part_state(state, pipeline, "first") != pp.part_state(state, pipeline, "second")


@pytest.mark.parametrize("refresh", ["rollout", "epoch", "minibatch"])
def test_no_key_of_an_update_is_given_twice(refresh):
    seen = []

    def see(key):  # the key, and what a part may make from it
        for one in (key, *jax.random.split(key, 3)):
            jax.debug.callback(lambda data: seen.append(tuple(np.asarray(data).tolist())), jax.random.key_data(one))

    def looks(name):
        def update(batch, state, context):
            see(context.key)
            return batch, state

        def finish(batch, state, context):
            see(context.key)
            return state

        return part(update, name, finish=finish)

    def plan(key, batch, epoch):
        see(key)
        return jnp.arange(batch.log_prob.size).reshape(2, -1)

    def draw(item, batch, context):
        see(context.key)
        return item, None

    def divided(name):
        sampler = pp.sampler("looks", plan, draw, num_epochs=2, num_minibatches=2, axis="step", refresh=refresh)
        inside = (looks(f"{name} {place}") for place in ("one", "two", "three", "four"))
        return pp.chain(next(inside), next(inside), sampler, SURROGATE, next(inside), next(inside))

    shared = (looks("first"), looks("second"), looks("third"))
    phases = {name: pp.phase(divided(name), trains=None) for name in ("a", "b")}
    pipeline = pp.chain(*shared, GAE, pp.phases(**phases))
    optimizer = dict.fromkeys(phases, optax.sgd(0.1))
    batch = rollout().replace(shards=2)
    learner = pp.learner(evaluate, pipeline, optimizer)
    jax.block_until_ready(jax.jit(learner.update)(KEY, learner.init(make_params()), batch))
    jax.effects_barrier()
    # Per epoch a key for each shard's plan; per minibatch one for each shard's draw and each of the two parts after it.
    # Where they run again in each phase, the shared parts run once more for `finish`.
    runs = {"rollout": 2 * 2 + 3, "epoch": 2 * 2 * 5 + 3, "minibatch": 2 * 4 * 5 + 3}[refresh]
    finishes, loops = 2 * 4 + 3, 2 * (2 * 2 + 4 * (2 + 2))
    assert len(seen) == 4 * (runs + finishes + loops)
    assert len(set(seen)) == len(seen)


def test_a_large_number_in_a_masked_place_has_no_gradient():
    def squared(params, batch):
        distribution, value = evaluate(params, batch)
        return distribution, value**2

    batch = rollout()
    huge = batch.replace(obs=jnp.where(batch.mask[..., None] > 0, batch.obs, 1e30))
    pipeline = pp.chain(GAE, pp.shuffled_minibatches(1), SURROGATE, pp.value_loss())
    assert_same(run(pipeline, huge, policy=squared), run(pipeline, batch, policy=squared))


def test_a_policy_may_attend_to_masked_steps():
    def attending(params, batch):
        return evaluate(params, batch.replace(obs=batch.obs + jnp.cumsum(batch.obs, axis=0)))

    batch = rollout()
    batch = batch.replace(log_prob=attending(make_params(), batch)[0].log_prob(batch.action))
    pipeline = pp.chain(GAE, pp.segment_minibatches(1), SURROGATE, pp.policy_diagnostics())
    _, metrics = run(pipeline, batch, policy=attending)
    np.testing.assert_allclose([metrics["ratio_min"], metrics["ratio_max"]], 1, rtol=1e-5)


def test_an_index_that_names_nothing_is_counted():
    def plan(key, batch, epoch):
        return jnp.array([[0, 1], [2, batch.log_prob.size]])

    sampler = pp.sampler("odd", plan, lambda item, batch, context: (item, None), num_minibatches=2, axis="step")
    _, metrics = run(pp.chain(GAE, sampler, SURROGATE), rollout(masked=False))
    assert metrics["nonfinite/loss/policy"] == 1
    short = pp.sampler("short", plan, lambda item, batch, context: (item, None), num_minibatches=3, axis="step")
    with pytest.raises(
        ValueError, match=r"short: plan must return arrays with leading axis \[num_minibatches\] = \[3\]"
    ):
        run(pp.chain(GAE, short, SURROGATE))


def test_a_policy_in_microbatches_keeps_its_memory():
    policy = pp.Policy(lambda key: make_params(), evaluate, lambda num_envs: jnp.zeros((num_envs, 1)))
    assert pp.microbatched(policy, 4).initial_carry is policy.initial_carry


def test_a_phase_alone_is_refused_with_its_remedy():
    with pytest.raises(ValueError, match=r"put it into phases\(name=phase"):
        pp.learner(evaluate, pp.chain(GAE, pp.phase(pp.chain(pp.full_batch(), SURROGATE))), optax.sgd(1.0))


# --- lenses ----------------------------------------------------------------------------------------------------------


def test_within_runs_a_part_on_other_fields():
    batch = rollout()
    other = rollout(1)
    batch = batch.replace(extras={"reward": other.reward, "value": batch.value * 2, "next_value": batch.next_value * 2})
    read = {"reward": "extras.reward", "value": "extras.value", "next_value": "extras.next_value"}
    lens = pp.within(GAE, read=read, write={"advantage": "extras.advantage"}, name="second")
    both = pp.chain(GAE, lens, pp.combine_advantages({"advantage": 1.0, "extras.advantage": 0.5}))
    context = pp.Context(key=KEY)
    out, _ = both.update(batch, both.init(None), context)
    swapped = batch.replace(reward=other.reward, value=batch.value * 2, next_value=batch.next_value * 2)
    first, second = (GAE.update(b, pp.EmptyState(), context)[0] for b in (batch, swapped))
    np.testing.assert_allclose(out.advantage, first.advantage + 0.5 * second.advantage, rtol=1e-5)
    np.testing.assert_allclose(out.target, first.target)
    np.testing.assert_allclose(out.metrics["second/explained_variance"], second.metrics["explained_variance"])
    with pytest.raises(ValueError, match="give the path of its next_value"):
        pp.within(GAE, read={"reward": "extras.reward", "value": "extras.value"}, name="x")
    with pytest.raises(ValueError, match="gae does not write 'weight'"):
        pp.within(GAE, read={}, write={"weight": "extras.x"}, name="x")
    with pytest.raises(ValueError, match=r"within 'second': gae reads extras\.reward, which the batch does not have"):
        lens.update(rollout(), pp.EmptyState(), context)


def test_within_reads_the_policy_being_trained():
    params = make_params() | {"second": jnp.ones(3)}
    batch = rollout(masked=False)
    batch = batch.replace(extras={"target": batch.reward})
    loss = pp.within(pp.value_loss(), read={"value": "current.aux.second", "target": "extras.target"}, name="second")
    state, metrics = run(pp.chain(pp.full_batch(), loss), batch, params=params, policy=with_aux)
    gradient = jax.grad(lambda w: 0.5 * jnp.mean(jnp.square(batch.obs @ w - batch.reward)))(params["second"])
    np.testing.assert_allclose(state.params["second"], params["second"] - 0.1 * gradient, rtol=1e-5)
    assert_same(state.params["value"], params["value"])
    assert {"second/value_loss", "nonfinite/loss/second/value"} <= set(metrics)


def test_within_clips_the_value_of_a_critic_around_its_own():
    batch, now, old = rollout(masked=False), rollout(1).value, rollout(2).value
    batch = batch.replace(extras={"old": old}, target=batch.reward)
    batch = batch.replace(current=pp.Current(None, batch.log_prob, batch.value, {"now": now}))
    clipped = pp.clipped_value_loss(clip_eps=0.2)
    lens = pp.within(clipped, read={"current.value": "current.aux.now", "value": "extras.old"}, name="second")
    out, _ = lens.update(batch, lens.init(None), pp.Context(key=KEY))
    expected = pp.functional.clipped_value_loss(now, old, batch.reward, clip_eps=0.2)
    assert_same(out.losses["second/value"], expected)
    with pytest.raises(ValueError, match="clipped_value_loss would compare the value of one critic with the earlier"):
        pp.within(clipped, read={"value": "current.aux.now"}, name="second")


def test_within_writes_where_its_path_leads():
    batch = rollout().replace(extras={"second": {"reward": rollout(1).reward}})
    expected = GAE.update(batch, pp.EmptyState(), pp.Context(key=KEY))[0].advantage
    lens = pp.within(GAE, read={}, write={"advantage": "extras.second.advantage"}, name="second")
    out, _ = lens.update(batch, pp.EmptyState(), pp.Context(key=KEY))
    assert_same(out.extras["second"]["advantage"], expected)
    assert_same(out.extras["second"]["reward"], batch.extras["second"]["reward"])
    both = pp.combine_advantages({"extras.second.advantage": 2.0}).update(out, pp.EmptyState(), pp.Context(key=KEY))
    np.testing.assert_allclose(both[0].advantage, 2 * expected, rtol=1e-6)


def test_within_prefixes_losses_as_it_does_metrics():
    batch = rollout()
    current = pp.Current(None, batch.log_prob, batch.value)
    batch = batch.replace(current=current, advantage=batch.reward, target=batch.reward, weight=jnp.full(SEGMENTS, 2.0))
    context = pp.Context(key=KEY)

    def losses(*parts):
        pipeline = pp.chain(*parts)
        return pipeline.update(batch, pipeline.init(None), context)[0].losses

    plain, second = pp.value_loss(), pp.within(pp.value_loss(), name="second")
    both = losses(plain, second)
    assert set(both) == {"value", "second/value"}
    np.testing.assert_array_equal(both["second/value"], both["value"])
    inside = losses(plain, pp.within(pp.chain(pp.value_loss(), pp.loss_weight("value")), name="second"))
    np.testing.assert_array_equal(inside["second/value"], 2 * inside["value"])
    outside = losses(plain, pp.within(pp.loss_weight("value"), name="second"))  # it changes a loss that is there
    assert set(outside) == {"value"}
    np.testing.assert_array_equal(outside["value"], 2 * both["value"])
    named = pp.stateless(
        lambda batch: batch.add_loss("value", batch.reward), name="f", provides=("losses",), place="after_sampler"
    )
    with pytest.raises(ValueError, match="within 'second': a loss named 'second/value' is already in this chain"):
        losses(second, pp.within(named, name="second"))


# --- samplers --------------------------------------------------------------------------------------------------------


def recording_rows(shape):
    """Keeps `extras["row"]`, -1 where it is masked."""

    def update(batch, state, context):
        rows, count = state
        return batch, (rows.at[count].set(jnp.where(batch.mask.astype(bool), batch.extras["row"], -1)), count + 1)

    return part(update, "recorder", lambda params, key: (jnp.full(shape, -1), jnp.int32(0)), place="after_sampler")


@pytest.mark.parametrize("burn_in", [0, 1])
def test_time_chunks_count_every_step_once(burn_in):
    rows = jnp.arange(TIME * SEGMENTS).reshape(TIME, SEGMENTS)
    batch = rollout(masked=False).replace(
        extras={"row": rows}, carry=jnp.ones((SEGMENTS, 1)), reset=jnp.zeros((TIME, SEGMENTS))
    )
    recorder = recording_rows((6, 2 + burn_in, 2))
    sampler = pp.time_chunks(6, length=2, burn_in=burn_in)
    pipeline = pp.chain(GAE, sampler, recorder, pp.value_loss())
    state, _ = run(pipeline, batch)
    seen, count = pp.part_state(state, pipeline, "recorder")
    assert count == 6
    assert sorted(int(x) for x in np.asarray(seen).ravel() if x >= 0) == list(range(TIME * SEGMENTS))
    context = pp.Context(key=KEY, params=make_params(), evaluate=evaluate)
    minibatch, _ = sampler.update(GAE.update(batch, pp.EmptyState(), context)[0], pp.EmptyState(), context)
    steps, starts = np.asarray(minibatch.extras["row"]) // SEGMENTS, np.asarray(minibatch.extras["row"])[0] // SEGMENTS
    np.testing.assert_array_equal(steps, starts + np.arange(2 + burn_in)[:, None])
    np.testing.assert_array_equal(minibatch.reset[0], starts > 0)
    with pytest.raises(ValueError, match="length=4 must divide the 6 steps"):
        run(pp.chain(GAE, pp.time_chunks(2, length=4), pp.value_loss()), batch)


def test_vtrace_after_a_sampler_keeps_the_recorded_value_before_a_masked_step():
    batch, mask = rollout(masked=False), np.random.default_rng(0).random((TIME, SEGMENTS)) < 0.6
    record = part(lambda b, s, c: (b, b.advantage), "record", lambda params, key: jnp.zeros((TIME, SEGMENTS)))
    record = dataclasses.replace(record, place="after_sampler")
    pipeline = pp.chain(pp.full_batch(), pp.vtrace(gamma=0.9), record, pp.value_loss())
    state, _ = run(pipeline, batch.replace(mask=jnp.asarray(mask, jnp.float32)))
    policy, value = evaluate(make_params(), batch)
    known = mask[1:] & ~np.asarray(batch.truncated, bool)[:-1]
    following = np.append(np.where(known, value[1:], batch.next_value[:-1]), batch.next_value[-1:], axis=0)
    log_ratio = policy.log_prob(batch.action) - batch.log_prob
    steps = batch.reward, value, jnp.asarray(following), batch.terminated, batch.truncated
    expected = pp.functional.vtrace(log_ratio, *steps, gamma=0.9, mask=jnp.asarray(mask))
    np.testing.assert_allclose(pp.part_state(state, pipeline, "record"), expected.error, rtol=1e-5, atol=1e-6)


def test_time_chunks_take_all_agents_of_a_segment_along():
    agents = 3
    rows = jnp.arange(TIME * SEGMENTS * agents).reshape(TIME, SEGMENTS, agents)
    batch = pp.Batch(
        log_prob=1.0 * rows, extras={"row": rows}, per_segment={"number": jnp.arange(SEGMENTS)},
        carry=jnp.ones((SEGMENTS, agents, 2)), reset=jnp.zeros((TIME, SEGMENTS, agents)),
    )  # fmt: skip
    sampler = pp.time_chunks(6, length=2, burn_in=1)
    buffer = jnp.full((TIME, SEGMENTS, agents), -1.0)
    for item in sampler.plan(KEY, batch, 0):
        windows, weight = sampler.draw(item, batch, pp.Context(key=KEY))
        minibatch = sampler.take(batch, windows, weight)
        segment, start = np.asarray(minibatch.per_segment["number"]), np.asarray(windows.start)
        expected = np.asarray(rows)[start + np.arange(3)[:, None], segment]
        np.testing.assert_array_equal(minibatch.extras["row"], expected)
        np.testing.assert_array_equal(minibatch.mask, np.broadcast_to(windows.counts[..., None], expected.shape))
        np.testing.assert_array_equal(minibatch.reset[0], np.broadcast_to((start > 0)[:, None], (2, agents)))
        np.testing.assert_array_equal(minibatch.reset[1:], 0)
        buffer = sampler.put(buffer, windows, jnp.where(minibatch.mask, minibatch.log_prob, jnp.nan))
    np.testing.assert_array_equal(buffer, rows)  # every step once, and no step that only warms up


def test_a_sampler_of_ones_own_draws_what_it_plans():
    def plan(key, batch, epoch):
        return jnp.argsort(batch.reward.ravel())[-4:].reshape(2, 2)

    sampler = pp.sampler("best", plan, lambda item, batch, context: (item, None), num_minibatches=2, axis="step")
    rows = jnp.arange(TIME * SEGMENTS).reshape(TIME, SEGMENTS)
    recorder = recording_rows((2, 2))
    pipeline = pp.chain(GAE, sampler, recorder, pp.value_loss())
    batch = rollout(masked=False)
    batch = batch.replace(extras={"row": rows}, mask=jnp.ones_like(batch.reward))
    state, _ = run(pipeline, batch)
    seen, _ = pp.part_state(state, pipeline, "recorder")
    np.testing.assert_array_equal(seen.ravel(), np.argsort(np.asarray(batch.reward).ravel())[-4:])


def test_fields_of_different_sizes_after_the_head_are_refused():
    def twice(batch):
        fields = ("obs", "action", "log_prob", "advantage")  # but not the target
        return batch.replace(**{name: jnp.concatenate([getattr(batch, name)] * 2, 1) for name in fields})

    pipeline = pp.chain(GAE, pp.stateless(twice), pp.shuffled_minibatches(2), SURROGATE, pp.value_loss())
    sizes = re.escape(f"log_prob {(TIME, 2 * SEGMENTS)}, value {(TIME, SEGMENTS)}")
    with pytest.raises(ValueError, match=f"learner, after gae, twice: .*{sizes}"):
        run(pipeline, rollout(masked=False))


def test_samplers_plan_on_what_the_head_left():
    rows = jnp.arange(TIME * SEGMENTS).reshape(TIME, SEGMENTS)
    batch = rollout(masked=False).replace(extras={"row": rows}, mask=jnp.ones((TIME, SEGMENTS)))

    def double(batch):
        fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
        twice = {
            name: jnp.concatenate([x, x + (100 if name == "row" else 0)], axis=1)
            for name, x in fields.items()
            if isinstance(x, jax.Array)
        }
        return batch.replace(**twice, extras={"row": jnp.concatenate([rows, rows + 100], axis=1)})

    recorder = recording_rows((2, TIME * SEGMENTS))
    for refresh in ("rollout", "epoch"):
        sampler = pp.shuffled_minibatches(2, refresh=refresh)
        pipeline = pp.chain(pp.stateless(double), GAE, sampler, recorder, pp.value_loss())
        state, _ = run(pipeline, batch)
        seen, _ = pp.part_state(state, pipeline, "recorder")
        assert sorted(np.asarray(seen).ravel()) == sorted([*range(24), *range(100, 124)])
    with pytest.raises(ValueError, match=r'refresh="minibatch" writes values back into the rollout of shape \(6, 4\)'):
        run(
            pp.chain(pp.stateless(double), GAE, pp.shuffled_minibatches(2, refresh="minibatch"), pp.value_loss()), batch
        )


# --- phases ----------------------------------------------------------------------------------------------------------


def both(params, batch):
    return Softmax(batch.obs @ params["actor"]["policy"]), batch.obs @ params["critic"]["value"]


def two_entries():
    params = make_params()
    return {"actor": {"policy": params["policy"]}, "critic": {"value": params["value"]}}


def test_a_later_phase_sees_the_policy_that_an_earlier_one_trained():
    def look(batch, state, context):
        return batch.add_metrics(moved=jnp.max(jnp.abs(batch.log_ratio))), state

    for refresh in ("epoch", "minibatch"):
        actor = pp.chain(pp.full_batch(), SURROGATE)
        critic = pp.chain(part(look), pp.full_batch(refresh=refresh), pp.value_loss())
        batch = rollout(masked=False, behavior=make_params())
        state, metrics = run(
            pp.chain(GAE, pp.phases(actor=actor, critic=critic)),
            batch,
            optimizer={"actor": optax.sgd(1.0), "critic": optax.sgd(0.1)},
            params=two_entries(),
            policy=both,
        )
        log_prob = both(state.params, batch)[0].log_prob(batch.action)
        np.testing.assert_allclose(metrics["critic/moved"], jnp.max(jnp.abs(log_prob - batch.log_prob)), rtol=1e-4)


def test_phases_require_what_their_chains_do():
    actor = pp.chain(pp.full_batch(), SURROGATE)
    with pytest.raises(ValueError, match="phases needs advantage, which only gae after it produces"):
        pp.chain(pp.phases(actor=actor), GAE)


@pytest.mark.parametrize(
    ("trains", "moved"),
    [
        (None, {"actor", "critic"}),
        ("critic", {"critic"}),
        (("actor", "critic"), {"actor", "critic"}),
        (lambda params: {"actor": {"policy": False}, "critic": {"value": True}}, {"critic"}),
    ],
)
def test_a_phase_trains_what_it_says(trains, moved):
    auxiliary = pp.phase(pp.chain(pp.full_batch(2), SURROGATE, pp.value_loss()), trains=trains)
    state, _ = run(
        pp.chain(GAE, pp.phases(auxiliary=auxiliary)),
        optimizer={"auxiliary": optax.sgd(0.1)},
        params=two_entries(),
        policy=both,
    )
    changed = {
        name for name, tree in two_entries().items() if not np.array_equal(*map(_only, (tree, state.params[name])))
    }
    assert changed == moved


def _only(tree: Any) -> np.ndarray:
    [leaf] = jax.tree.leaves(tree)
    return np.asarray(leaf)


def test_a_phase_runs_every_so_many_updates_and_replays():
    batch = rollout(masked=False)
    like = jax.eval_shape(lambda: batch.replace(target=batch.value, truncated=None))
    seen = []

    def look(batch, state, context):
        seen.append(batch.log_prob.shape)
        return batch.add_metrics("sum", counted=jnp.sum(batch.mask)), state

    auxiliary = pp.chain(pp.replay(3, like), pp.full_batch(), part(look), pp.value_loss())
    pipeline = pp.chain(
        GAE,
        pp.phases(policy=pp.phase(pp.chain(pp.full_batch(), SURROGATE), trains="actor"),
                  auxiliary=pp.phase(auxiliary, trains=None, every=2)),
    )  # fmt: skip
    learner = pp.learner(both, pipeline, {"policy": optax.sgd(0.1), "auxiliary": optax.sgd(0.1)})
    state, update = learner.init(two_entries()), jax.jit(learner.update)
    ran, counted = [], []
    for _ in range(5):
        state, metrics = update(KEY, state, batch)
        ran.append(int(metrics["auxiliary/minibatches"]))
        counted.append(float(metrics["auxiliary/counted"]))
    assert ran == [0, 1, 0, 1, 0]
    # what there is in updates 1 and 3, their own rollouts included: two rollouts and the latest three
    assert counted == [0, 2 * TIME * SEGMENTS, 0, 3 * TIME * SEGMENTS, 0]
    assert (TIME, 3 * SEGMENTS) in seen


@pytest.mark.parametrize("refresh", ["rollout", "epoch"])
def test_replayed_rollouts_are_those_that_the_shared_parts_left(refresh):
    batch, seen = rollout(masked=False).replace(truncated=None), []
    like = jax.eval_shape(lambda: batch)

    def look(batch, state, context):
        jax.debug.callback(lambda reward: seen.append(np.asarray(reward).tolist()), batch.reward[0, ::SEGMENTS])
        return batch, state

    scale = pp.stateless(lambda b: b.replace(reward=b.reward / 100), name="scale", place="before_sampler")
    again = pp.chain(pp.replay(3, like), part(look, place="before_sampler"), GAE, pp.full_batch(refresh=refresh))
    pipeline = pp.chain(scale, pp.phases(aux=pp.phase(pp.chain(again, pp.value_loss()), trains=None)))
    learner = pp.learner(evaluate, pipeline, {"aux": optax.sgd(0.1)})
    state, update = learner.init(make_params()), jax.jit(learner.update)
    for number in (100.0, 200.0, 300.0):
        state, _ = jax.block_until_ready(update(KEY, state, batch.replace(reward=jnp.full_like(batch.reward, number))))
    jax.effects_barrier()
    assert seen[-1] == [1, 2, 3]


def test_a_replay_after_other_parts_of_its_chain_is_refused():
    batch = rollout()
    scale = pp.stateless(lambda b: b.replace(reward=b.reward / 100), name="scale", place="before_sampler")
    chain = pp.chain(scale, pp.replay(3, batch), GAE, pp.full_batch(), pp.value_loss())
    with pytest.raises(ValueError, match=r"replay must be the first part of its chain, but scale is: put scale before"):
        pp.learner(evaluate, chain, optax.sgd(0.1))


@pytest.mark.parametrize(
    ("axis", "drawn", "message"),
    [
        ("step", (lambda item: (item[0], None)), r"indices of shape \[M\], got \(\)"),
        ("step", (lambda item: (item, jnp.ones(()))), r"one weight for each index, \(6,\), got \(\)"),
        ("step", (lambda item: (item * 1.0, None)), "draw must return integers, got float32"),
        ("window", (lambda item: (item, None)), "draw must return Windows for axis='window'"),
        (
            "window",
            (lambda item: (pp.Windows(item[:2], item[:2], jnp.ones((2, 1), bool)), None)),
            r"counts \[L, M\] for M windows, got \(2, 1\) for starts of shape \(2,\)",
        ),
    ],
)
def test_what_a_sampler_of_ones_own_draws_is_checked(axis, drawn, message):
    sampler = pp.sampler(
        "mine",
        lambda key, batch, epoch: jnp.arange(12).reshape(2, 6),
        lambda item, batch, context: drawn(item),
        num_minibatches=2,
        axis=axis,
    )
    with pytest.raises((ValueError, TypeError), match=f"mine: .*{message}"):
        run(pp.chain(GAE, sampler, SURROGATE))


def test_replaying_one_rollout_changes_nothing():
    batch = rollout()
    part = pp.replay(1, batch)
    replayed, _ = part.update(batch, part.init(None), pp.Context(key=KEY))
    assert_same(replayed, batch)
    with pytest.raises(ValueError, match="the rollout has a mask, but like has none"):
        pp.replay(1, batch.replace(mask=None)).update(batch, part.init(None), pp.Context(key=KEY))


# --- chains ----------------------------------------------------------------------------------------------------------


def test_an_identity_changes_no_key():
    noisy = part(lambda b, s, c: (b.replace(reward=jax.random.normal(c.key, b.reward.shape)), s), "noisy")
    context, batch = pp.Context(key=KEY), rollout()
    expected = noisy.update(batch, (), context)[0].reward
    for chained in (pp.chain(noisy), pp.chain(pp.identity(), noisy), pp.chain(noisy, pp.identity(), pp.identity())):
        assert_same(chained.update(batch, chained.init(None), context)[0].reward, expected)


def test_a_stop_is_honoured_if_a_part_declares_it():
    def stop(discard, **declared):
        def update(batch, state, context):
            return batch.replace(stop=pp.Stop(jnp.asarray(discard), jnp.asarray(False))), state

        return part(update, "undeclared", **declared)

    parts = (GAE, pp.full_batch(3), SURROGATE)
    with pytest.raises(ValueError, match=r"surrogate, undeclared\) requested a stop but does not declare it"):
        run(pp.chain(*parts, stop(True)))
    _, metrics = run(pp.chain(*parts, stop(True, provides=("stop",))))
    assert (metrics["minibatches"], metrics["early_stopped"]) == (0, 1)
    _, metrics = run(pp.chain(*parts, pp.kl_early_stop(0.0), stop(False)))  # it cannot take the first one back
    assert (metrics["minibatches"], metrics["early_stopped"]) == (0, 1)
    with pytest.raises(ValueError, match="requested a stop, which only parts after it may do"):
        run(pp.chain(stop(True), GAE, pp.full_batch(), SURROGATE))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((GAE, pp.full_batch(), pp.entropy_bonus(coef=0.1)), "gae writes advantage and target, and no part after it"),
        ((GAE, pp.prioritized_sampler(2, alpha=1.0, beta=0.5), SURROGATE), "prioritized_sampler writes weight, and no"),
        ((GAE, pp.full_batch(), SURROGATE, GAE), "gae writes advantage and target, and no part after it reads them"),
        (
            (GAE, pp.advantage_normalize(), pp.segment_minibatches(2), GAE, SURROGATE),  # it is overwritten
            "advantage_normalize writes advantage, and no part after it reads it",
        ),
    ],
)
def test_what_nothing_reads_is_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        pp.learner(evaluate, pp.chain(*parts), optax.sgd(1.0))


def _changed(field):
    return pp.stateless(lambda batch: batch, name=f"change_{field}", requires=(field,), provides=(field,), reads=())


PERTURBED, PENALTY = pp.regularizers.perturbed_mean(), pp.kl_penalty(coef=1.0)
VALUE, ENTROPY = pp.value_loss(), pp.entropy_bonus(coef=0.1)
CAPS = pp.regularizers.smoothness_loss(temporal=None)
TOO_LATE = [  # a part after the loss that should have used what it changes, the parts after it, and the field
    (PERTURBED, (VALUE, ENTROPY), "current.log_prob"),
    (PERTURBED, (pp.policy_diagnostics(), pp.kl_early_stop(0.1)), "current.log_prob"),  # they add no loss
    (PERTURBED, (PENALTY,), "current.log_prob"),  # which is no substitute for a policy loss
    (pp.advantage_normalize(), (), "advantage"),
    (pp.advantage_normalize(), (VALUE, CAPS), "advantage"),
    (pp.advantage_normalize(), (pp.regularizers.proximal_average(decay=0.9), VALUE), "advantage"),
    (pp.combine_advantages({"advantage": 2.0}), (VALUE,), "advantage"),
    (pp.tokens.importance_correction(high=2.0), (VALUE,), "advantage"),
    (pp.advantage_weight(), (VALUE,), "advantage"),
    (pp.regularizers.proximal_average(decay=0.9), (PENALTY, VALUE), "advantage"),
    (_changed("mask"), (pp.tokens.clip_cov(clip_eps=0.1, name="second"),), "mask"),
]


@pytest.mark.parametrize(("part", "after", "field"), TOO_LATE, ids=lambda x: getattr(x, "name", None))
def test_a_change_after_the_loss_that_should_use_it_is_refused(part, after, field):
    error = rf"{part.name} changes {field} after clipped_surrogate .*: put {part.name} before clipped_surrogate$"
    with pytest.raises(ValueError, match=error):
        pp.learner(evaluate, pp.chain(GAE, pp.full_batch(), SURROGATE, part, *after), optax.sgd(1.0))


@pytest.mark.parametrize(
    "parts",
    [
        (ENTROPY, PENALTY, VALUE, PERTURBED, SURROGATE),
        (PENALTY, pp.regularizers.proximal_average(decay=0.9), SURROGATE),
        (SURROGATE, pp.advantage_normalize(), pp.clipped_surrogate(clip_eps=0.1, name="second")),
        (SURROGATE, pp.advantage_normalize(), pp.stateless(lambda b: b, name="unknown"), VALUE),
        (SURROGATE, pp.gae(gamma=0.9, gae_lambda=1.0), VALUE),  # a new target, not another advantage
        (SURROGATE, _changed("current"), VALUE),  # perhaps only the value
        (
            SURROGATE,
            PERTURBED,
            pp.vtrace(gamma=0.9, policy_gradient=True),
            pp.tokens.clip_cov(clip_eps=0.1, name="second"),
        ),
    ],
)
def test_a_change_for_the_losses_after_it_is_accepted(parts):
    pp.learner(evaluate, pp.chain(GAE, pp.full_batch(), *parts), optax.sgd(1.0))


def test_a_lens_declares_what_it_reads_instead():
    read = {"current.value": "current.aux.v", "value": "extras.v", "target": "extras.r"}
    lens = pp.within(pp.clipped_value_loss(clip_eps=0.2), name="lens", read=read)
    assert (lens.requires, lens.reads) == (("extras.r",), ("mask", *read.values()))


def test_who_reads_all_extras_reads_each_of_them():
    made = pp.stateless(lambda b: b, name="made", reads=(), provides=("extras.novelty",))
    used = pp.stateless(
        lambda b: b.replace(reward=b.reward), name="used", reads=("extras", "reward"), provides=("reward",)
    )
    pp.learner(evaluate, pp.chain(made, used, GAE, pp.full_batch(), SURROGATE, pp.value_loss()), optax.sgd(1.0))


def test_a_loss_of_sequences_needs_the_time_axis():
    gspo = pp.policy_loss(pp.functional.gspo, clip_eps=0.1)
    pp.chain(GAE, pp.segment_minibatches(2), gspo)
    partial = pp.policy_loss(functools.partial(pp.functional.gspo, clip_eps=0.1))
    for loss in (gspo, partial):
        with pytest.raises(ValueError, match="policy_loss works along time, but shuffled_minibatches"):
            pp.chain(GAE, pp.shuffled_minibatches(2), loss)


def test_a_loss_before_the_sampler_is_refused():
    early = pp.stateless(lambda b: b.add_loss("early", b.reward), name="early")
    with pytest.raises(ValueError, match="the loss 'early' was added before the sampler"):
        run(pp.chain(early, GAE, pp.full_batch(), SURROGATE))


def test_of_two_estimators_the_last_explains_variance():
    second, reader = pp.gae(gamma=0.0, gae_lambda=0.0), pp.stateless(lambda b: b)  # the first must be of use
    _, metrics = run(pp.chain(GAE, reader, second, pp.full_batch(), SURROGATE, pp.value_loss()))
    _, alone = run(pp.chain(second, pp.full_batch(), SURROGATE, pp.value_loss()))
    np.testing.assert_allclose(metrics["explained_variance"], alone["explained_variance"])


def test_an_error_inside_entropy_is_not_hidden():
    class Broken(Softmax):
        def entropy(self):
            return self.nothing

    def policy(params, batch):
        distribution, value = evaluate(params, batch)
        return Broken(distribution.logits), value

    with pytest.raises(AttributeError, match="nothing"):
        run(pp.chain(pp.full_batch(), pp.entropy_bonus(coef=0.1)), policy=policy)


def test_a_part_may_write_current_without_being_a_sampler():
    odd = pp.stateless(lambda batch: batch, name="odd", provides=("current",))
    assert int(run(pp.chain(odd, GAE, pp.full_batch(), SURROGATE))[1]["minibatches"]) == 1
    with pytest.raises(ValueError, match="the pipeline has no sampler"):
        pp.learner(evaluate, pp.chain(odd, SURROGATE), optax.sgd(1.0))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "the parameter tree is empty"),
        ({"w": jnp.ones(2), "act": jnp.tanh}, r"at \['act'\], which is not an array"),
    ],
)
def test_parameters_that_cannot_be_trained_are_refused(params, message):
    learner = pp.learner(evaluate, pp.chain(GAE, pp.full_batch(), SURROGATE), optax.sgd(1.0))
    with pytest.raises((ValueError, TypeError), match=message):
        learner.init(params)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"extras": {"x": jnp.zeros(SEGMENTS)}}, r"extras\['x'\] must begin with the axes \[T, N\].*per_segment"),
        ({"per_segment": {"x": jnp.zeros((TIME, SEGMENTS))}}, r"per_segment\['x'\] must begin with the axis \[N\]"),
        ({"next_obs": jnp.zeros((TIME, 3))}, "next_obs must begin"),
    ],
)
def test_what_is_sampled_is_said_and_not_guessed(fields, message):
    with pytest.raises(ValueError, match=message):
        run(pp.chain(GAE, pp.full_batch(), SURROGATE), rollout().replace(**fields))


def test_print_shows_stages_and_fields():
    actor = pp.chain(pp.full_batch(), SURROGATE)
    text = str(pp.chain(pp.stateless(lambda b: b, name="mine"), GAE, pp.phases(actor=actor)))
    lines = text.splitlines()
    assert lines[0].split() == ["rollout", "mine", "reads", "undeclared", "fields"]
    assert "writes advantage, target" in lines[1]
    assert any(line.strip().startswith("minibatch") and "clipped_surrogate" in line for line in lines)


# --- steps that are skipped ------------------------------------------------------------------------------------------


@functools.cache
def _skipping():
    def scale(batch, state, context):
        state = 0.9 * state + 0.1 * jnp.mean(batch.reward)
        return batch.replace(reward=batch.reward / (1 + jnp.abs(state))), state

    def count(batch, state, context):
        return batch, state + 1

    pipeline = pp.chain(
        part(scale, "scale", lambda params, key: jnp.ones(())),
        GAE,
        pp.full_batch(2),
        SURROGATE,
        part(count, "count", lambda params, key: jnp.zeros(())),
    )
    learner = pp.learner(evaluate, pipeline, optax.apply_if_finite(optax.sgd(0.1), max_consecutive_errors=100))
    return pipeline, learner, jax.jit(learner.update)


def test_a_skipped_step_keeps_the_states_of_parts():
    pipeline, learner, update = _skipping()
    state, batch = learner.init(make_params()), rollout(masked=False)
    state, _ = update(KEY, state, batch)
    spoiled, metrics = update(KEY, state, batch.replace(reward=batch.reward.at[0, 0].set(jnp.nan)))
    assert (metrics["nonfinite/gradient"], metrics["minibatches"]) == (2, 0)
    assert_same(spoiled.params, state.params)
    for name in ("scale", "count"):
        assert_same(*(pp.part_state(s, pipeline, name) for s in (spoiled, state)))
    recovered, metrics = update(KEY, spoiled, batch)
    assert pp.nonfinite_report(metrics) is None
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(recovered))


@pytest.mark.parametrize("wrap", [lambda part: part, pp.chain], ids=["part", "chain"])
def test_a_lens_does_not_mix_two_critics(wrap):
    with pytest.raises(ValueError, match="the value of one critic with the next_value of another"):
        pp.within(wrap(GAE), name="cost", read={"value": "extras.v"}, write={"advantage": "extras.a"})
    clipped = wrap(pp.clipped_value_loss(clip_eps=0.2))
    with pytest.raises(ValueError, match="the value of one critic with the earlier value of another"):
        pp.within(clipped, name="cost", read={"value": "current.aux.cost"})


def test_a_lens_after_the_sampler_takes_both_values_of_a_critic():
    """After a sampler a part reads current.value, too, which a lens on "value" alone would leave as it is."""
    read = {"value": "extras.v", "next_value": "extras.next_v"}
    batch = rollout(masked=False)
    batch = batch.replace(extras={"v": batch.value + 100, "next_v": batch.next_value + 100, "t": batch.value})
    for part, names in (
        (pp.within(GAE, name="cost", read=read, write={"advantage": "advantage"}), "gae"),
        (
            pp.within(
                pp.clipped_value_loss(clip_eps=0.2), name="cost", read={"value": "extras.v", "target": "extras.t"}
            ),
            "clipped_value_loss",
        ),
    ):
        learner = pp.learner(evaluate, pp.chain(GAE, pp.full_batch(), part, SURROGATE, VALUE), optax.sgd(1.0))
        with pytest.raises(
            pp.errors.UserValueError, match=f"within 'cost': after the sampler, {names} also reads current"
        ):
            jax.eval_shape(learner.update, KEY, jax.eval_shape(learner.init, make_params()), batch)


def test_a_lens_names_a_field_that_exists_only_after_the_sampler():
    lens = pp.within(GAE, name="cost", read={"current.value": "extras.v"}, write={"advantage": "extras.a"})
    batch = rollout(masked=False)
    batch = batch.replace(extras={"v": batch.value})
    with pytest.raises(pp.errors.UserValueError, match=r"reads current\.value, which exists only after the sampler"):
        lens.update(batch, lens.init(make_params()), pp.Context(key=KEY))


def test_a_phase_that_does_not_run_keeps_its_states():
    penalty = pp.kl_penalty(coef=1.0, target_kl=0.01)
    policy = pp.chain(pp.full_batch(), SURROGATE, penalty)
    pipeline = pp.chain(GAE, pp.phases(policy=pp.phase(policy, trains=None, every=3)))
    learner = pp.learner(evaluate, pipeline, {"policy": optax.sgd(0.0)})
    state, update, coefs = learner.init(make_params()), jax.jit(learner.update), []
    batch = rollout(masked=False)
    batch = batch.replace(log_prob=evaluate(make_params(), batch)[0].log_prob(batch.action))
    for _ in range(7):
        state, _ = update(KEY, state, batch)
        coefs.append(float(pp.part_state(state, pipeline, "policy/kl_penalty").coef))
    assert coefs == [1, 1, 0.5, 0.5, 0.5, 0.25, 0.25]  # the policy does not move, so each of its phases halves it


def test_a_chain_in_a_lens_declares_what_its_parts_do():
    own = pp.stateless(lambda b: b, name="own", reads=(), provides=("next_value",), place="before_sampler")
    lens = pp.within(pp.chain(own, GAE), name="cost", read={"value": "extras.v"}, write={"advantage": "extras.a"})
    assert (lens.place, lens.needs_time) == ("before_sampler", True)
    assert "next_value" not in lens.reads  # a part of the chain writes it
    with pytest.raises(ValueError, match="cost works on the whole rollout"):
        pp.chain(pp.full_batch(), lens)
    with pytest.raises(TypeError, match="a part that is not a sampler, got the sampler full_batch"):
        pp.within(pp.chain(GAE, pp.full_batch()), name="cost")


@pytest.mark.parametrize("masked", [False, True])
def test_losses_of_segments_are_weighted(masked):
    """With and without a mask, like those of elements, which have the axis of time in front."""
    batch, context = example_batch(after_sampler=True), example_context()
    batch = batch if masked else batch.replace(mask=None)
    chain = pp.chain(SURROGATE, pp.tokens.aggregate("policy", by="sequence_mean"))
    plain, weighted = (
        each.update(batch, each.init({}), context)[0].losses["policy"]
        for each in (chain, pp.chain(chain, pp.loss_weight("policy")))
    )
    np.testing.assert_allclose(weighted, plain * batch.weight, rtol=1e-6)
    assert weighted.shape == batch.weight.shape


def test_a_loss_that_is_one_number_cannot_be_weighted():
    whole = part(
        lambda b, s, c: (b.add_loss("whole", jnp.sum(b.current.log_prob), per="batch"), s), provides=("losses",)
    )
    sampler = pp.prioritized_sampler(2, alpha=0.8, beta=0.5)
    with pytest.raises(ValueError, match="loss 'whole' is a single number, which cannot be weighted"):
        run(pp.chain(GAE, sampler, SURROGATE, whole, pp.loss_weight("whole")))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_limits_of_the_optimizer_may_be_arrays(dtype):
    """In the dtype of the parameters, as in a sweep."""
    gradient = {"w": jnp.asarray([3.0, 4.0], dtype)}

    def step(norm, eps):
        optimizer = pp.clipped_adam(1.0, norm, eps=eps)
        return optimizer.update(gradient, optimizer.init(gradient), step=0)[0]["w"]

    expected = step(0.5, 0.25)
    swept = jax.vmap(step)(jnp.array([0.5, 1.0]), jnp.array([0.25, 1.0]))
    assert expected.dtype == swept.dtype == step(np.float64(0.5), np.float64(0.25)).dtype == dtype
    np.testing.assert_allclose(np.asarray(swept[0], float), np.asarray(expected, float), rtol=1e-2)
    assert not np.allclose(np.asarray(swept[1], float), np.asarray(expected, float), rtol=0.05)


def test_a_chain_in_a_lens_amends_and_finishes_and_draws_keys_of_its_own():
    seen = {}

    def drawing(name):
        def init(params, key=None):
            seen[f"init {name}"] = None if key is None else jax.random.key_data(key).tolist()
            return jnp.zeros(())

        def update(batch, state, context):
            seen[name] = context.key
            return batch, state + 1

        def amend(params, old, new):
            return jax.tree.map(lambda x: x + new, params)

        def finish(batch, state, context):
            return state + 10

        return pp.Part(init, update, name, amend=amend, finish=finish)

    inner = pp.within(pp.chain(drawing("a"), drawing("b")), read={}, write={}, name="lens")
    whole = pp.chain(inner, drawing("c"), drawing("d"))
    params = {"w": jnp.zeros(())}
    states = whole.init(params, jax.random.key(0))
    assert len({str(seen[f"init {name}"]) for name in "abcd"}) == 4
    batch = pp.Batch(log_prob=jnp.zeros((2, 3)))
    context = pp.Context(key=jax.random.key(1), step=jnp.zeros((), int), params=params, evaluate=None)
    _, after = whole.update(batch, states, context)
    assert len({str(jax.random.key_data(seen[name]).tolist()) for name in "abcd"}) == 4
    assert float(whole.amend(params, states, after)["w"]) == 4
    assert jax.tree.leaves(whole.finish(batch, after, context)) == [11, 11, 11, 11]
