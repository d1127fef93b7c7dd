"""What the contract has besides losses per element: outputs, optimizers that listen, amended parameters, and lenses."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict
from jax.experimental import checkify

import ppo_parts as pp
from ppo_parts._base.hyperparameters import spread_nan
from ppo_parts.testing import example_batch
from tests.common import SEGMENTS, TIME, assert_close, assert_same, evaluate, make_params, rollout
from tests.core import common
from tests.core.common import GAE, KEY, ROWS, SURROGATE, VALUE, both, part, probe, recorder, run, two_entries

CONTEXT = pp.Context(key=KEY)


def test_chains_without_a_critic_run():
    batch = rollout().replace(value=None, next_value=None)
    reinforce = pp.stateless(lambda b: b.replace(advantage=b.reward), name="reinforce", provides=("advantage",))
    pipeline = pp.chain(reinforce, pp.full_batch(2, refresh="epoch"), SURROGATE)
    state, metrics = run(pipeline, batch, policy=common.without_critic)
    assert float(jnp.sum(jnp.abs(state.params["policy"] - make_params()["policy"]))) > 0
    assert "nonfinite/value" not in metrics


@pytest.mark.parametrize("size", [None, 1])
def test_context_evaluate_always_returns_an_output(size):
    seen = []

    def recurrent(params, batch):
        carry = jnp.zeros((SEGMENTS, 2)) if batch.carry is None else batch.carry + 1
        return (*evaluate(params, batch), carry)

    def look(batch, state, context):
        output = context.evaluate(context.params, batch)
        seen.append((type(output), output.carry.shape))
        return batch, state

    batch = rollout().replace(carry=jnp.zeros((SEGMENTS, 2)), reset=jnp.zeros((TIME, SEGMENTS)))
    policy = pp.microbatched(recurrent, size) if size else recurrent
    pipeline = pp.chain(part(look), GAE, pp.segment_minibatches(2), part(look), SURROGATE)
    jax.eval_shape(lambda: run(pipeline, batch, policy=policy))
    assert set(seen) == {(pp.Output, (SEGMENTS, 2)), (pp.Output, (SEGMENTS // 2, 2))}
    whole = pp.Policy(lambda key: make_params(), recurrent, lambda num_envs: jnp.zeros((num_envs, 2)))
    assert pp.microbatched(whole, 4).initial_carry is whole.initial_carry


def test_accumulated_gradients_equal_a_large_batch_and_the_optimizer_is_told_the_step():
    batch, optimizer = rollout(masked=False), pp.clipped_adam(pp.linear_schedule(0.1, 0.0, 4), max_grad_norm=0.5)
    whole, parts = (pp.chain(GAE, x, SURROGATE, VALUE) for x in (pp.full_batch(2), pp.segment_minibatches(2, 2)))
    accumulated, *_, metrics = run(parts, batch, batch, optimizer=optax.MultiSteps(optimizer, 2))
    assert_close(accumulated.params, run(whole, batch, batch, optimizer=optimizer)[0].params)
    assert metrics["minibatches"] == 4


def test_a_hyperparameter_may_be_a_field():
    """Fields with equal numbers do what the number does; the gallery has others, such as TRGPPO's."""
    data = {"gamma": 0.45, "clip": 0.2, "weight": 2.0, "dual": 3.0}
    batch = rollout().add_extras(**{name: jnp.full((TIME, SEGMENTS), x) for name, x in data.items()})
    batch = batch.replace(per_segment={"coef": jnp.full(SEGMENTS, 0.5)}, shared={"bonus": jnp.float32(0.1)})
    masked = batch.mask == 0
    batch = batch.add_extras(clip=jnp.where(masked, -1, batch.extras["clip"]))  # numbers of masked steps do not count

    def update(gamma, clip, weight, dual, coef, bonus, *batches):
        head = pp.gae(gamma=gamma, gae_lambda=0.8), pp.combine_advantages({"advantage": weight})
        surrogate = pp.clipped_surrogate(clip_eps=clip, dual_clip=dual)
        losses = surrogate, pp.value_loss(coef=coef), pp.entropy_bonus(coef=bonus)
        learner = pp.learner(evaluate, pp.chain(*head, pp.segment_minibatches(2), *losses), optax.sgd(0.1))
        state, update = learner.init(make_params(), KEY), jax.jit(learner.update)
        return [update(KEY, state, batch) for batch in batches]

    fields = [pp.field(f"extras.{name}") * (2 if name == "gamma" else 1) for name in data]
    fields += [pp.field("per_segment.coef"), pp.field("shared.bonus")]
    outside = batch.add_extras(clip=jnp.where(masked, 0.2, -1))
    found, spoilt = update(*fields, batch, outside)
    expected, metrics = update(0.9, 0.2, 2.0, 3.0, 0.5, 0.1, batch)[0]
    assert_same((found[0], {name: found[1][name] for name in metrics}), (expected, dict(metrics)))
    spo = pp.policy_loss(pp.functional.simple_policy_optimization, clip_eps=pp.field("extras.clip"))
    assert run(pp.chain(GAE, pp.full_batch(), spo), outside)[1]["nonfinite/range/policy_loss/clip_eps"] == 1
    assert spoilt[1]["nonfinite/loss/policy"] == spoilt[1]["nonfinite/range/clipped_surrogate/clip_eps"] == 2
    assert not any(name.startswith("nonfinite/range/") for name in metrics)  # these numbers are known beforehand
    assert pp.gae(gamma=fields[0], gae_lambda=0.8).requires == ("extras.gamma",)


DRAWN = pp.segment_minibatches(2, num_epochs=2, refresh="minibatch")
STREAMS = (
    (1, (pp.vtrace(gamma=0.9), DRAWN), (0.5, 0.25), pp.value_loss(coef=0.1)),
    (2, (GAE, DRAWN), pp.field("extras.weights") * 0.5, pp.clipped_value_loss(clip_eps=1e9, coef=0.1)),
    (1, (pp.segment_minibatches(2), GAE), (0.5, 0.25), pp.critics.critic_loss(pp.functional.value_loss, coef=0.1)),
    (1, (GAE, DRAWN, pp.advantage_normalize()), (0.25, 0.75), pp.value_loss(coef=0.1)),  # each stream by itself
)


@pytest.mark.parametrize(("shards", "estimators", "weights", "critic"), STREAMS)
def test_streams_are_estimated_and_learned_separately(shards, estimators, weights, critic):
    """Two streams, one twice the other, do what that one does, because estimates are linear and errors are squared."""

    def two(x):
        return jnp.stack([x, 2 * x], axis=-1)

    def several(params, batch):
        distribution, value = evaluate(params, batch)
        return distribution, two(value)

    batch = rollout().replace(shards=shards)
    streams = batch.replace(**{name: two(getattr(batch, name)) for name in ("reward", "value", "next_value")})
    streams = streams.add_extras(weights=jnp.stack([jnp.ones((TIME, SEGMENTS)), jnp.full((TIME, SEGMENTS), 0.5)], -1))
    weighted = pp.combine_advantages({"advantage": weights})
    expected = run(pp.chain(*estimators, SURROGATE, pp.value_loss(coef=0.5)), batch)
    found = run(pp.chain(*estimators, weighted, SURROGATE, critic), streams, policy=several)
    assert_close(found[0].params, expected[0].params)
    kept = {"nonfinite/advantage", "explained_variance"} & expected[1].keys()
    assert_close(*({name: metrics[name] for name in kept} for _, metrics in (found, expected)))


def test_an_update_is_differentiable():
    batch = rollout()

    def after(hyperparameters):
        rate, coef, gamma = hyperparameters
        losses = (SURROGATE, VALUE, pp.entropy_bonus(coef=coef), pp.kl_early_stop(10.0))
        pipeline = pp.chain(pp.gae(gamma=gamma, gae_lambda=0.8), pp.full_batch(2), *losses)
        state, _ = run(pipeline, batch, optimizer=optax.sgd(rate))
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(state.params))

    at = jnp.array([0.1, 0.5, 0.9])
    both = jax.jit(jax.value_and_grad(after))
    _, gradient = both(at)
    for index, step in enumerate((0.01, 0.05)):
        move = jnp.zeros(3).at[index].set(step)
        numeric = (both(at + move)[0] - both(at - move)[0]) / (2 * step)
        np.testing.assert_allclose(gradient[index], numeric, rtol=0.02)
        assert abs(numeric) > 0.001
    assert gradient[2] == 0  # advantages are constants


def test_gradient_metrics_are_reported():
    norms = lambda gradient: {f"grad_norm_{name}": optax.tree.norm(g) for name, g in gradient.items()}  # noqa: E731
    _, metrics = run(pp.chain(GAE, pp.full_batch(), SURROGATE, VALUE), gradient_metrics=norms)
    whole = jnp.hypot(metrics["grad_norm_policy"], metrics["grad_norm_value"])
    np.testing.assert_allclose(metrics["grad_norm"], whole, rtol=1e-5)
    large = make_params() | {"unused": jnp.zeros(2**22)}
    learner = pp.learner(evaluate, pp.chain(GAE, pp.full_batch(), SURROGATE, VALUE), optax.sgd(0.1))
    program = str(jax.make_jaxpr(learner.update)(KEY, learner.init(large), rollout()))
    assert "f32[4194304]" in program
    assert not any(f"f32[{2**22 + small}]" in program for small in range(1, 100))  # the gradient is not copied


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_limits_of_the_optimizer_may_be_arrays(dtype):
    """They are converted to the dtype of the parameters, as in a sweep."""
    gradient = {"w": jnp.asarray([3.0, 4.0], dtype)}

    def step(norm, eps):
        optimizer = pp.clipped_adam(1.0, norm, eps=eps)
        return optimizer.update(gradient, optimizer.init(gradient), step=0)[0]["w"]

    expected = jax.jit(lambda: step(0.5, 0.25))()
    swept = jax.jit(jax.vmap(step))(jnp.array([0.5, 1.0]), jnp.array([0.25, 1.0]))
    of_numpy = jax.eval_shape(lambda: step(np.float64(0.5), np.float64(0.25)))
    assert expected.dtype == swept.dtype == of_numpy.dtype == dtype
    np.testing.assert_allclose(np.asarray(swept[0], float), np.asarray(expected, float), rtol=1e-2)
    assert not np.allclose(np.asarray(swept[1], float), np.asarray(expected, float), rtol=0.05)


def test_parts_begin_with_keys_of_their_own_amend_and_finish():
    """Parts are on both sides of the sampler; those after it, in a lens, run once in each of three minibatches."""

    def halve(params, opt_state, old, new, context):
        return {**params, "value": params["value"] * 0.5 ** (new[0] - old[0])}, opt_state

    def finish(batch, state, context):
        assert batch.log_prob.shape == (TIME, SEGMENTS)
        return state[0], jnp.mean(batch.current.value)

    def own(name):
        init = lambda params, key: (jnp.zeros(()), jax.random.uniform(key))  # noqa: E731
        update = lambda batch, state, context: (batch, (state[0] + 1, state[1]))  # noqa: E731
        return part(update, name, init=init, amend=halve, finish=finish)

    def own_states(state):
        before, second, lens = (pp.part_state(state, pipeline, name) for name in ("before", "second", "lens"))
        return before, second, *lens

    batch = rollout(masked=False)
    lens = pp.within(pp.chain(own("third"), own("fourth")), read={}, write={}, name="lens")
    pipeline = pp.chain(own("before"), GAE, own("second"), pp.full_batch(3), SURROGATE, lens)
    learner = pp.learner(evaluate, pipeline, optax.sgd(0.1))
    states = [learner.init(make_params(), jax.random.key(seed)) for seed in range(2)]
    assert len({float(drawn) for state in states for _, drawn in own_states(state)}) == 8
    state, _ = jax.jit(learner.update)(KEY, states[0], batch)
    counts, values = zip(*own_states(state), strict=True)
    assert counts == (1, 1, 3, 3)
    np.testing.assert_allclose(state.params["value"], make_params()["value"] * 0.5**8, rtol=1e-6)
    np.testing.assert_allclose(values, jnp.mean(evaluate(state.params, batch)[1]), rtol=1e-5)
    with pytest.raises(pp.errors.UserValueError, match="the parts are before, gae, second, clipped_surrogate, lens"):
        pp.part_state(state, pipeline, "nothing")


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.contrib.prodigy()], ids=["sgd", "prodigy"])
def test_a_state_that_contains_the_parameters_can_be_donated(optimizer):
    """Either a part or the optimizer keeps them. The given parameters stay, and weak types do not compile again."""
    mirror = part(lambda b, s, c: (b, c.params), "mirror", init=lambda params, key: params)
    learner = pp.learner(evaluate, pp.chain(mirror, GAE, pp.full_batch(), SURROGATE), optimizer)
    params = make_params() | {"weak": jnp.asarray(0.5)}
    update, state = jax.jit(learner.update, donate_argnums=1), learner.init(params)
    for _ in range(2):
        state, _ = update(KEY, state, rollout())
    assert int(state.step) == 2
    assert np.isfinite(params["weak"])  # they are not deleted
    assert update._cache_size() == 1


def test_rows_and_numbers_out_of_range_are_counted():
    """On CPUs, the exponential of a constant NaN that is selected may be any number."""

    @jax.jit
    def update(alpha, row, batch):
        plan, draw = lambda *_: jnp.zeros(1, int), lambda *_: (jnp.array([0, row]), None)
        own = pp.sampler("own", plan, draw, num_minibatches=1, axis="segment")
        drawn = pp.prioritized_sampler(1, alpha=alpha, beta=0.0)
        return [run(pp.chain(GAE, sampler, SURROGATE), batch)[1] for sampler in (own, drawn)]

    assert all(pp.nonfinite_report(x) is None for x in update(1.0, 1, rollout()))
    assert "loss" in pp.nonfinite_report(update(1.0, -1, rollout())[0])
    assert "loss" in pp.nonfinite_report(update(-1.0, 1, rollout())[1])
    assert np.isnan(jax.jit(lambda x, n: jnp.exp(spread_nan(x, n)))(jnp.zeros(64), jnp.float32(jnp.nan))).all()
    error, _ = checkify.checkify(update, errors=checkify.float_checks)(1.0, 1, rollout())
    assert error.get() is None  # no NaN is computed where nothing is wrong


@pytest.mark.parametrize("refresh", ["rollout", "epoch", "minibatch"])
def test_no_key_of_an_update_is_given_twice(refresh):
    seen = []

    def see(key):
        jax.debug.callback(seen.append, jax.random.key_data(key))

    def look(first, second, *others):  # `update` and `amend` return the first two; the last one is the context
        see(others[-1].key)
        return first, second

    def looks(name):
        return part(look, name, finish=lambda *given: look(*given)[1], amend=look)

    def plan(key, batch, epoch):
        see(key)
        return jnp.arange(batch.log_prob.size).reshape(2, -1)

    def draw(item, batch, context):
        see(context.key)
        return item, None

    def divided(name):
        sampler = pp.sampler("looks", plan, draw, num_epochs=2, num_minibatches=2, axis="step", refresh=refresh)
        inside = [looks(f"{name} {place}") for place in ("one", "two", "three", "four")]
        lens = pp.within(pp.chain(*inside[2:]), read={}, write={}, name=f"{name} lens")
        return pp.chain(*inside[:2], sampler, SURROGATE, lens)

    phases = {name: pp.phase(divided(name), trains=None) for name in ("a", "b")}
    pipeline = pp.chain(looks("first"), looks("second"), looks("third"), GAE, pp.phases(**phases))
    jax.block_until_ready(run(pipeline, rollout().replace(shards=2), optimizer=dict.fromkeys(phases, optax.sgd(0.1))))
    jax.effects_barrier()
    # Per epoch, each shard's plan has a key; per minibatch, each shard's draw has one, and each part after it has two.
    # If the shared parts run again in each phase, they run once more for `finish`.
    runs = {"rollout": 2 * 2 + 3, "epoch": 2 * 2 * 5 + 3, "minibatch": 2 * 4 * 5 + 3}[refresh]
    finishes, loops = 2 * 4 + 3, 2 * (2 * 2 + 4 * (2 + 2 * 2))
    assert len(seen) == 2 * runs + finishes + loops
    given = jax.random.wrap_key_data(jnp.stack(seen))
    made = jax.vmap(lambda key: jax.random.split(key, 3))(given)  # the parts could make these
    every = jax.random.key_data(jnp.append(given, made))
    assert len(np.unique(every, axis=0)) == len(every) == 4 * len(seen)


def test_losses_and_metrics_are_reduced_as_they_say():
    def update(batch, state, context):
        batch = batch.add_loss("segment", jnp.arange(1.0, SEGMENTS + 1) + 0 * batch.current.value[0], per="segment")
        batch = batch.add_loss("number", 0.0, per="batch").add_metrics(where=jnp.ones(()))  # a name like any other
        batch = batch.add_loss("scalar", jnp.float32(7) + 0 * jnp.sum(batch.current.value), per="batch")
        for way in ("mean", "sum", "max", "min"):
            batch = batch.add_metrics(way, **{way: 1.0 + context.epoch})
        return batch, state

    _, metrics = run(pp.chain(pp.full_batch(4), part(update, place="after_sampler")))
    assert float(metrics["loss"]) == 7 + (1 + 2 + 3) / 3  # the last segment is masked throughout
    assert [float(metrics[way]) for way in ("mean", "sum", "max", "min")] == [2.5, 10, 4, 1]
    assert isinstance(metrics, pp.Metrics)
    assert len(jax.tree.leaves(metrics)) == 1
    with pytest.raises(KeyError, match="no metric is named 'nothing'; the metrics are nonfinite/mask"):
        metrics["nothing"]


def stopping(discard, **declared):
    return part(lambda b, s, c: (b.replace(stop=None).add_stop(discard=discard), s), "undeclared", **declared)


STOPS = (
    (pp.early_stop("clip_fraction", -1.0),),  # the metric does not matter
    (stopping(True, provides=("stop",)),),
    (pp.kl_early_stop(0.0), stopping(False)),  # the second one cannot take back the first stop
)


@pytest.mark.parametrize("stops", STOPS)
def test_a_stop_is_honoured_and_what_it_discards_is_not_amended(stops):
    amending = part(name="amending", amend=lambda params, *rest: jax.tree.map(jnp.zeros_like, (params, rest[0])))
    state, metrics = run(pp.chain(GAE, pp.full_batch(3), SURROGATE, amending, *stops))
    assert (metrics["minibatches"], metrics["early_stopped"]) == (0, 1)
    assert_same(state.params, make_params())


def test_the_last_of_two_estimators_explains_variance():
    second, reader = pp.gae(gamma=0.0, gae_lambda=0.0), pp.stateless(lambda b: b)  # the first estimator must be of use
    batch = rollout()
    _, metrics = run(pp.chain(GAE, reader, second, pp.full_batch(), SURROGATE, VALUE), batch)
    expected = pp.functional.explained_variance(batch.value, batch.reward, mask=batch.mask)
    np.testing.assert_allclose(metrics["explained_variance"], expected, rtol=1e-5)


def test_masked_steps_may_be_attended_to_and_have_no_gradient():
    """In minibatches that keep time, masked places keep other numbers, whose square is infinite here."""

    def to_the_fourth(params, batch):
        distribution, value = evaluate(params, batch)
        return distribution, jnp.square(jnp.square(value))  # its gradient is inf * 0

    batch = rollout()
    huge = batch.replace(obs=jnp.where(batch.mask[..., None] > 0, batch.obs, 1e30))
    pipeline = pp.chain(GAE, pp.segment_minibatches(1), SURROGATE, VALUE)
    assert_same(run(pipeline, huge, policy=to_the_fourth), run(pipeline, batch, policy=to_the_fourth))

    def attending(params, batch):
        return evaluate(params, batch.replace(obs=batch.obs + jnp.cumsum(batch.obs, axis=0)))

    batch = rollout()
    batch = batch.replace(log_prob=attending(make_params(), batch)[0].log_prob(batch.action))
    pipeline = pp.chain(GAE, pp.segment_minibatches(1), SURROGATE, pp.policy_diagnostics())
    _, metrics = run(pipeline, batch, policy=attending)
    np.testing.assert_allclose([metrics["ratio_min"], metrics["ratio_max"]], 1, rtol=1e-5)


def test_vtrace_after_a_sampler_keeps_the_recorded_value_before_a_masked_step():
    batch, mask = rollout(masked=False), np.random.default_rng(0).random((TIME, SEGMENTS)) < 0.6
    record = part(lambda b, s, c: (b, b.advantage), "record", jnp.zeros((TIME, SEGMENTS)), place="after_sampler")
    pipeline = pp.chain(pp.full_batch(), pp.vtrace(gamma=0.9), record, VALUE)
    state, _ = run(pipeline, batch.replace(mask=jnp.asarray(mask, jnp.float32)))
    policy, value = evaluate(make_params(), batch)
    known = mask[1:] & ~np.asarray(batch.truncated, bool)[:-1]
    following = np.append(np.where(known, value[1:], batch.next_value[:-1]), batch.next_value[-1:], axis=0)
    log_ratio = policy.log_prob(batch.action) - batch.log_prob
    steps = batch.reward, value, jnp.asarray(following), batch.terminated, batch.truncated
    expected = pp.functional.vtrace(log_ratio, *steps, gamma=0.9, mask=jnp.asarray(mask))
    np.testing.assert_allclose(pp.part_state(state, pipeline, "record"), expected.error, rtol=1e-5, atol=1e-6)


def test_within_reads_and_writes_where_its_paths_lead():
    """Here the paths are an estimator's, one to a nested field; RND's loops in the gallery have a critic's, too."""
    batch = rollout().replace(extras={"second": {"reward": rollout(1).reward}})
    expected = GAE.update(batch, (), CONTEXT)[0].advantage
    lens = pp.within(GAE, read={}, write={"advantage": "extras.second.advantage"}, name="second")
    out, _ = lens.update(batch, (), CONTEXT)
    assert_same(out.extras["second"], {"reward": batch.extras["second"]["reward"], "advantage": expected})
    double = pp.combine_advantages({"extras.second.advantage": 2.0}).update(out, (), CONTEXT)
    np.testing.assert_allclose(double[0].advantage, 2 * expected, rtol=1e-6)


def test_within_prefixes_losses_as_it_does_metrics():
    batch = example_batch(after_sampler=True, losses={})

    def losses(*parts):
        pipeline = pp.chain(*parts)
        return pipeline.update(batch, pipeline.init(None), CONTEXT)[0].losses

    second = pp.within(VALUE, name="second")
    both = losses(VALUE, second)
    assert set(both) == {"value", "second/value"}
    np.testing.assert_array_equal(both["second/value"], both["value"])

    doubled = lambda batch: batch.replace(losses={"value": 2 * batch.losses["value"]})  # noqa: E731
    twice = pp.stateless(doubled, requires=("losses",), provides=("losses",), place="after_sampler")
    inside = losses(VALUE, pp.within(pp.chain(VALUE, twice), name="second"))
    np.testing.assert_array_equal(inside["second/value"], 2 * inside["value"])
    outside = losses(VALUE, pp.within(twice, name="second"))  # it changes a loss that exists
    assert set(outside) == {"value"}
    np.testing.assert_array_equal(outside["value"], 2 * both["value"])
    with pytest.raises(ValueError, match="within 'second': a loss named 'second/value' is already in this chain"):
        losses(second, second)


def test_a_lens_reads_what_there_is_and_both_values_of_a_critic():
    """After a sampler, a part also reads current.value, which a lens on "value" alone would leave as it is."""
    batch = rollout(masked=False).add_extras(x=jnp.zeros((TIME, SEGMENTS)))
    evaluated = pp.Current(evaluate(make_params(), batch)[0], batch.log_prob, batch.value)
    for read, current, says in (
        (dict.fromkeys(("value", "next_value"), "extras.x"), evaluated, "gae would .* with current.value of another"),
        ({"current.value": "extras.x"}, None, r"gae reads current\.value, which exists only after the sampler"),
        ({"reward": "extras.y"}, None, r"gae reads extras\.y, which the batch does not have"),
    ):
        lens = pp.within(GAE, name="cost", read=read, write={"advantage": "advantage"})
        with pytest.raises(pp.errors.UserValueError, match=f"within 'cost': .*{says}"):
            lens.update(batch.replace(current=current), lens.init(make_params()), CONTEXT)


def test_a_lens_declares_what_its_part_does():
    read = {"current.value": "current.aux.v", "value": "extras.v", "target": "extras.r"}
    lens = pp.within(pp.clipped_value_loss(clip_eps=0.2), name="lens", read=read)
    assert (lens.requires, lens.reads) == (("extras.v", "extras.r"), ("mask", *read.values()))
    own = pp.stateless(lambda b: b, name="own", reads=(), provides=("next_value",), place="before_sampler")
    lens = pp.within(pp.chain(own, GAE), name="cost", read={"value": "extras.v"}, write={"advantage": "extras.a"})
    assert (lens.place, lens.needs_time) == ("before_sampler", True)
    assert "next_value" not in lens.reads  # a part of the chain writes it
    with pytest.raises(ValueError, match="cost works on the whole rollout"):
        pp.chain(pp.full_batch(), lens)


@pytest.mark.parametrize("refresh", ["rollout", "epoch"])
def test_samplers_plan_on_what_the_head_left(refresh):
    def doubled(batch):
        batch = jax.tree.map(lambda x: jnp.concatenate([x, x], axis=1), batch)
        return batch.add_extras(row=jnp.concatenate([ROWS, ROWS + 100], axis=1))

    sampler = pp.shuffled_minibatches(2, refresh=refresh)
    pipeline = pp.chain(pp.stateless(doubled), GAE, sampler, recorder(2, TIME * SEGMENTS), VALUE)
    state, _ = run(pipeline, rollout(masked=False))
    seen = pp.part_state(state, pipeline, "recorder")[0]
    assert sorted(np.asarray(seen).ravel()) == sorted([*range(24), *range(100, 124)])


MOVED = probe("moved", lambda batch, context: jnp.max(jnp.abs(batch.log_ratio)))


@pytest.mark.parametrize("refresh", ["epoch", "minibatch"])
def test_a_later_phase_sees_the_policy_that_an_earlier_one_trained(refresh):
    critic, batch = pp.chain(MOVED, pp.full_batch(refresh=refresh), VALUE), rollout(masked=False)
    phases = pp.phases(actor=pp.chain(pp.full_batch(), SURROGATE), critic=critic)
    optimizer = {"actor": optax.sgd(1.0), "critic": optax.sgd(0.1)}
    state, metrics = run(pp.chain(GAE, phases), batch, optimizer=optimizer, params=two_entries(), policy=both)
    log_prob = both(state.params, batch)[0].log_prob(batch.action)
    np.testing.assert_allclose(metrics["critic/moved"], jnp.max(jnp.abs(log_prob - batch.log_prob)), rtol=1e-4)


@pytest.mark.parametrize(("refresh", "moves"), [("epoch", 0.0), ("every_epoch", 1.0)])
def test_the_first_epoch_may_evaluate_the_rollout_of_an_older_policy(refresh, moves):
    batch = rollout(masked=False)
    _, metrics = run(pp.chain(MOVED, GAE, pp.full_batch(refresh=refresh), SURROGATE), batch)
    log_prob = evaluate(make_params(), batch)[0].log_prob(batch.action)
    np.testing.assert_allclose(metrics["moved"], moves * jnp.max(jnp.abs(log_prob - batch.log_prob)), rtol=1e-4)


@pytest.mark.parametrize("trains", [None, "critic", lambda p: {"actor": {"policy": False}, "critic": {"value": True}}])
def test_a_phase_trains_what_it_says(trains):
    """This holds to the bit, although the optimizer also moves parameters without a gradient."""
    phase = pp.phase(pp.chain(pp.full_batch(2), SURROGATE, VALUE), trains=trains)
    decaying = {"p": optax.adamw(0.1, weight_decay=0.5)}
    params = two_entries() if callable(trains) else FrozenDict(two_entries())
    state, _ = run(pp.chain(GAE, pp.phases(p=phase)), optimizer=decaying, params=params, policy=both)
    (policy, value), (old_policy, old_value) = (jax.tree.leaves(x) for x in (state.params, two_entries()))
    assert not np.array_equal(value, old_value)
    assert np.array_equal(policy, old_policy) == (trains is not None)


def test_a_phase_that_does_not_run_does_not_finish():
    policy = pp.chain(pp.full_batch(), SURROGATE, pp.kl_penalty(coef=1.0, target_kl=0.01))
    pipeline = pp.chain(GAE, pp.phases(policy=pp.phase(policy, trains=None, every=3)))
    learner = pp.learner(evaluate, pipeline, {"policy": optax.sgd(0.0)})
    state, update, coefs, epochs = learner.init(make_params()), jax.jit(learner.update), [], []
    batch = rollout(masked=False, behavior=make_params())
    for _ in range(7):
        state, metrics = update(KEY, state, batch)
        coefs.append(float(pp.part_state(state, pipeline, "policy/kl_penalty").coef))
        epochs.append(float(metrics["policy/epochs"]))
    assert coefs == [1, 1, 0.5, 0.5, 0.5, 0.25, 0.25]  # the policy does not move, so each of its phases halves it
    assert epochs == [0, 0, 1, 0, 0, 1, 0]
    seen = []
    look = part(lambda b, s, c: (b, s), place="after_sampler", finish=lambda b, s, c: seen.append(b.advantage) or s)
    for refresh, every in itertools.product(("rollout", "epoch"), (1, 2)):
        phase = pp.phase(pp.chain(pp.full_batch(refresh=refresh), VALUE, look), trains=None, every=every)
        pipeline = pp.chain(GAE, pp.phases(policy=phase))
        jax.eval_shape(lambda: run(pipeline, batch, optimizer={"policy": optax.sgd(0.0)}))  # noqa: B023
    assert len(seen) == 4
    assert not any(advantage is None for advantage in seen)


@pytest.mark.parametrize("refresh", ["rollout", "epoch"])
def test_replayed_rollouts_are_those_that_the_shared_parts_left(refresh):
    batch, seen = rollout(masked=False).replace(truncated=None), []

    def look(batch, state, context):
        jax.debug.callback(lambda reward: seen.append(np.asarray(reward).tolist()), batch.reward[0, ::SEGMENTS])
        return batch, state

    scale = pp.stateless(lambda b: b.replace(reward=b.reward / 100), name="scale", place="before_sampler")
    again = (pp.replay(3, batch), part(look, place="before_sampler"), GAE, pp.full_batch(refresh=refresh), VALUE)
    pipeline = pp.chain(scale, pp.phases(aux=pp.phase(pp.chain(*again), trains=None)))
    batches = [batch.replace(reward=jnp.full_like(batch.reward, number)) for number in (100.0, 200.0, 300.0)]
    jax.block_until_ready(run(pipeline, *batches, optimizer={"aux": optax.sgd(0.1)}))
    jax.effects_barrier()
    assert seen[-1] == [1, 2, 3]
    keys = jax.random.split(KEY, rollout().log_prob.shape)  # as a policy that draws leaves them
    whole = rollout().add_extras(policy_key=keys)
    alone = pp.replay(1, whole)
    found, _ = alone.update(whole, alone.init(None), CONTEXT)
    assert_same(jax.random.key_data(found.extras["policy_key"]), jax.random.key_data(keys))
    assert_same(found.replace(extras={}), whole.replace(extras={}))


def _changed(field):
    return pp.stateless(lambda batch: batch, name=f"change_{field}", requires=(field,), provides=(field,), reads=())


PERTURBED, PENALTY = pp.regularizers.perturbed_mean(), pp.kl_penalty(coef=1.0)
ENTROPY, AVERAGE = pp.entropy_bonus(coef=0.1), pp.regularizers.proximal_average(decay=0.9)
SECOND = pp.policy_loss(pp.functional.clip_cov, clip_eps=0.1, name="second")
NORMALIZE = pp.advantage_normalize()
MADE = pp.stateless(lambda b: b.add_extras(novelty=b.reward), reads=(), provides=("extras.novelty",))
WEIGHED = {"requires": ("advantage",), "reads": ("current",), "provides": ("losses",), "place": "after_sampler"}
OWN = pp.stateless(lambda b: b, name="own", **WEIGHED)
OWN_REGULARIZER = pp.stateless(lambda b: b, name="own_regularizer", policy_loss=False, **WEIGHED)
TOO_LATE = [  # a part after the loss that should have used its change, the parts after it, and the changed field
    (PERTURBED, (VALUE, ENTROPY), "current.log_prob"),
    (PERTURBED, (pp.policy_diagnostics(), pp.kl_early_stop(0.1)), "current.log_prob"),  # these parts add no loss
    (PERTURBED, (PENALTY,), "current.log_prob"),  # a penalty does not replace a policy loss
    (PERTURBED, (pp.chain(OWN_REGULARIZER),), "current.log_prob"),  # nor does this one, although it reads the advantage
    (PERTURBED, (pp.within(pp.chain(OWN_REGULARIZER), name="lens"),), "current.log_prob"),
    (NORMALIZE, (), "advantage"),
    (NORMALIZE, (VALUE, pp.regularizers.smoothness_loss(temporal=None)), "advantage"),
    (NORMALIZE, (AVERAGE, VALUE), "advantage"),
    (pp.combine_advantages({"advantage": 2.0}), (VALUE,), "advantage"),
    (pp.tokens.importance_correction(high=2.0), (VALUE,), "advantage"),
    (pp.advantage_weight(), (VALUE,), "advantage"),
    (AVERAGE, (PENALTY, VALUE), "advantage"),
    (_changed("mask"), (SECOND,), "mask"),
]


@pytest.mark.parametrize(("part", "after", "field"), TOO_LATE, ids=lambda x: getattr(x, "name", None))
def test_a_change_after_the_loss_that_should_use_it_is_refused(part, after, field):
    error = rf"{part.name} changes {field} after clipped_surrogate .*: put {part.name} before clipped_surrogate$"
    with pytest.raises(ValueError, match=error):
        pp.learner(evaluate, pp.chain(GAE, pp.full_batch(), SURROGATE, part, *after), optax.sgd(1.0))


def test_a_change_for_the_losses_after_it_is_accepted():
    for parts in (
        (ENTROPY, PENALTY, VALUE, PERTURBED, SURROGATE),
        (PENALTY, AVERAGE, SURROGATE),
        (SURROGATE, NORMALIZE, pp.clipped_surrogate(clip_eps=0.1, name="second")),
        (SURROGATE, NORMALIZE, pp.stateless(lambda b: b, name="unknown"), VALUE),
        (SURROGATE, NORMALIZE, OWN),  # `OWN` may be a policy loss
        (SURROGATE, NORMALIZE, pp.within(pp.chain(VALUE, SECOND), name="lens")),
        (SURROGATE, pp.gae(gamma=0.9, gae_lambda=1.0), VALUE),  # there is a new target, but no new advantage
        (SURROGATE, _changed("current"), VALUE),  # perhaps only the value changes
        (SURROGATE, PERTURBED, pp.vtrace(gamma=0.9, policy_gradient=True), SECOND),
    ):
        pp.learner(evaluate, pp.chain(GAE, pp.full_batch(), *parts), optax.sgd(1.0))


def test_a_part_may_write_what_others_read():
    """The policy may read fields that no part reads."""
    written = [pp.stateless(lambda b: b, reads=(), provides=(name,)) for name in ("carry", "mask", "next_obs")]
    double = pp.stateless(lambda batch: batch.replace(obs=2 * batch.obs), provides=("obs",))
    of_extras = pp.stateless(lambda b: b, reads=("extras", "reward"), provides=("reward",))
    odd = pp.stateless(lambda b: b, name="odd", provides=("current",))  # it is not a sampler
    for head in ((odd, GAE), *((GAE, writes) for writes in (double, *written)), (MADE, of_extras, GAE)):
        pipeline = pp.chain(*head, pp.full_batch(), SURROGATE)
        assert "minibatches" in jax.eval_shape(lambda batch, pipeline=pipeline: run(pipeline, batch), rollout())[1]


def test_print_shows_stages_and_fields():
    phases = pp.phases(actor=pp.chain(pp.full_batch(), SURROGATE))
    lines = str(pp.chain(pp.stateless(lambda b: b, name="mine"), GAE, phases)).splitlines()
    assert lines[0].split() == ["rollout", "mine", "reads", "undeclared", "fields"]
    assert lines[4].endswith("reads every field")
    mine, sampler = pp.stateless(lambda b: b, requires=("reward",)), pp.prioritized_sampler(2, alpha=1.0, beta=0.0)
    reads = [line.partition("reads ")[2] for line in str(pp.chain(GAE, mine, sampler, SURROGATE)).splitlines()]
    assert reads[1:3] == ["reward and undeclared fields", "advantage and all other fields"]
    assert "writes advantage, target" in lines[1]
    assert [line.split()[0] for line in lines[2:]] == ["phases", "actor:", "sampler", "minibatch"]
