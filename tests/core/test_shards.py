"""Samplers do not mix shards, shards change only what is drawn, and n devices with n shards equal one device.

The numbers are the same under `shard_map`, `pmap`, `vmap` and on explicit meshes.
"""

import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_parts as pp
from benchmarks.devices import read_operations
from ppo_parts import envs
from ppo_parts import functional as f
from ppo_parts._core.pieces import evaluate_shards
from ppo_parts.envs._wrappers import with_observations
from tests.common import DEVICES, OBS, P, alone, assert_close, estimator_inputs, mesh_of_all
from tests.core.common import GAE, KEY, SURROGATE, VALUE, Categorical, evaluate, make_params, part, rollout, run
from tests.envs import test_host_envs
from tests.envs.common import altered, bit_game, clock

SHARDS, T, N = 4, 6, 16
LOSSES = (pp.advantage_normalize(), SURROGATE, VALUE, pp.entropy_bonus(coef=0.01))
ROWS, OTHER = jnp.arange(T * N).reshape(T, N), jax.random.key(1)


def with_memory(params, batch):
    """Evaluate a recurrent policy whose memory of what it saw decays."""

    def step(memory, inputs):
        obs, reset = inputs
        memory = 0.5 * jnp.where(reset[..., None], 0, memory) + jnp.tanh(obs @ params["memory"])
        return memory, memory

    carry, seen = jax.lax.scan(step, batch.carry, (batch.obs, batch.reset.astype(bool)))
    return (*evaluate(params, batch.replace(obs=seen)), carry)


def params_with_memory():
    return make_params() | {"memory": jnp.eye(OBS) + 0.1}


def recurrent_batch(shards=SHARDS):
    batch = rollout(shape=(T, N))
    return batch.replace(shards=shards, carry=jnp.ones((N, OBS)), reset=batch.terminated)


def updated(policy, params, batch, *parts):
    return run(pp.chain(*parts), batch, params=params, policy=policy, optimizer=optax.adam(0.05))


def both_ways(axis, refresh, *, weighted):
    """Return a sampler of known elements of a rollout with several shards, and `given_indices` for one shard."""
    rng, own = np.random.default_rng(0), N // SHARDS
    order = rng.permutation(T * own if axis == "step" else own).reshape(2, -1)  # the order is the same in each shard
    weights = rng.random(order.shape).astype(np.float32) if weighted else None
    several = pp.sampler(
        "several", lambda *_: (jnp.asarray(order), weights), lambda item, *_: item, num_minibatches=2, num_epochs=2,
        axis=axis, refresh=refresh, weighted=weighted,
    )  # fmt: skip
    rows = order // own * N + order % own if axis == "step" else order
    rows = np.concatenate([rows + shard * own for shard in range(SHARDS)], axis=1)
    every = np.tile(weights, (2, 1, SHARDS)) if weighted else None
    return several, pp.given_indices(np.stack([rows] * 2), axis, every, refresh=refresh)


def newest(key, batch, epoch):
    """Plan without knowing of shards: draw the last steps of a rollout in a random order."""
    assert batch.shards == 1
    steps = np.prod(batch.log_prob.shape[:2])
    return jax.random.permutation(key, jnp.arange(steps // 2, steps)).reshape(2, -1)


DRAWN = {
    "full": (pp.full_batch(), 1),
    "shuffled": (pp.shuffled_minibatches(3), 1),
    "segments": (pp.segment_minibatches(2), 1),
    "chunks": (pp.time_chunks(3, length=2, burn_in=1), 1),
    "prioritized": (pp.prioritized_sampler(2, alpha=0.8, beta=0.4), None),
    "newest": (pp.sampler("newest", newest, lambda item, *_: (item, None), num_minibatches=2, axis="step"), 0.5),
}


@pytest.mark.parametrize("shards", [1, SHARDS])
@pytest.mark.parametrize("name", DRAWN)
def test_a_minibatch_has_a_block_of_elements_from_each_shard(name, shards):
    sampler, share = DRAWN[name]
    number = jnp.broadcast_to(ROWS[..., None], (T, N, 2))  # it is the same for two agents
    batch = pp.Batch(
        log_prob=number * 1.0, advantage=number * 1.0, extras={"number": number, "none": number[..., :0]}, shards=shards
    )
    batch = batch.replace(per_segment={"number": jnp.arange(N)}, shared={"table": jnp.arange(3)})

    @jax.jit
    def minibatches(key):
        """Draw an epoch, and write its minibatches back into a buffer, except steps that only warm up."""
        plan = sampler.plan(key, batch, 0)
        found, buffer = [], jnp.full(number.shape, -1.0)
        for i in range(len(jax.tree.leaves(plan)[0])):
            indices, weight = sampler.draw(jax.tree.map(lambda x, i=i: x[i], plan), batch, pp.Context(key=key))
            found.append(one := sampler.take(batch, indices, weight))
            rows = one.log_prob if one.mask is None else jnp.where(one.mask, one.log_prob, jnp.nan)
            buffer = sampler.put(buffer, indices, rows, shards)
        return found, buffer

    seen, (drawn, buffer) = [], minibatches(KEY)
    for one in drawn:
        numbers = np.asarray(one.extras["number"])[..., 0]
        for shard, block in enumerate(np.split(numbers, shards, axis=-1)):
            assert set(block.reshape(-1) % N // (N // shards)) == {shard}
        segment = np.asarray(one.per_segment["number"])
        np.testing.assert_array_equal(numbers % N, np.broadcast_to(segment, numbers.shape))
        np.testing.assert_array_equal(one.log_prob, one.extras["number"])  # no index is outside
        np.testing.assert_array_equal(one.shared["table"], np.arange(3))
        assert one.shards == shards
        if len(numbers) == T and numbers.ndim == 2:  # whole segments
            np.testing.assert_array_equal(numbers // N, np.broadcast_to(np.arange(T)[:, None], numbers.shape))
        assert one.weight is None or one.weight.shape == numbers.shape[-1:]
        assert one.mask is None or np.array_equal(one.mask[..., 0], one.mask[..., 1])
        counts = np.ones_like(numbers, bool) if one.mask is None else np.asarray(one.mask)[..., 0].astype(bool)
        seen.append(numbers[counts])
    if share is not None:
        seen = np.concatenate([x.reshape(-1) for x in seen])
        assert len(seen) == len(set(seen)) == share * T * N  # every step once, or the newest half of every shard
        np.testing.assert_array_equal(buffer, jnp.where(jnp.isin(number, seen), number, -1))
    same = [np.array_equal(one.log_prob, two.log_prob) for one, two in zip(drawn, minibatches(OTHER)[0], strict=True)]
    assert all(same) if name == "full" else not any(same)


def test_an_index_outside_its_shard_is_nan():
    batch = pp.Batch(log_prob=ROWS * 1.0, mask=jnp.ones((T, N)).at[:, jnp.array([7, 15])].set(0), shards=2)
    drawn = jnp.array([0, N]), None
    sampler = pp.sampler("own", lambda *_: jnp.zeros(1), lambda *_: drawn, num_minibatches=1, axis="segment")
    minibatch = sampler.take(batch, *sampler.draw(jnp.zeros(2), batch, pp.Context(key=KEY)))
    np.testing.assert_array_equal(jnp.isnan(minibatch.log_prob[0]), [False, True, False, True])
    np.testing.assert_array_equal(minibatch.mask, 1)  # the mask of the last segment, in its place, must not hide it


@pytest.mark.parametrize(("axis", "refresh"), [("step", "minibatch"), ("segment", "epoch")])
def test_an_update_depends_on_what_is_drawn_only(axis, refresh):
    weighted = pp.value_loss(coef=pp.field("weight"), name="weighted")
    vtrace, losses = pp.vtrace(gamma=0.9, gae_lambda=0.8), (*LOSSES, weighted)
    several, one = both_ways(axis, refresh, weighted=True)
    batch = rollout(shape=(T, N))
    expected = updated(evaluate, make_params(), batch, vtrace, one, *losses)
    actual = updated(evaluate, make_params(), batch.replace(shards=SHARDS), vtrace, several, *losses)
    assert_close(actual, expected, 2e-5, 1e-5)


@pytest.mark.parametrize("pieces", [False, True])
def test_a_recurrent_policy_is_evaluated_shard_by_shard(monkeypatch, pieces):
    """The same holds in pieces of two segments of each shard."""
    monkeypatch.setattr(jax, "device_count", lambda: SHARDS)
    shapes = set()

    def looked_at(params, batch):
        shapes.add(batch.obs.shape[:2])
        return with_memory(params, batch)

    several, one = [pp.full_batch()] * 2 if pieces else both_ways("segment", "epoch", weighted=False)
    params, policy = params_with_memory(), pp.microbatched(looked_at, T * 2) if pieces else looked_at
    expected = updated(with_memory, params, recurrent_batch(1), GAE, one, *LOSSES)
    assert_close(updated(policy, params, recurrent_batch(), GAE, several, *LOSSES), expected, 2e-5, 1e-5)
    assert ({(T, 2)} if pieces else {(T, N // 2 // SHARDS), (T, N // SHARDS)}) <= shapes


def test_a_recurrent_policy_is_evaluated_in_as_many_blocks_as_there_may_be_devices(monkeypatch):
    def blocks(devices):
        monkeypatch.setattr(jax, "device_count", lambda: devices)
        seen = []

        def looked_at(params, batch):
            seen.append(batch.obs.shape[1])
            return evaluate(params, batch)

        jax.eval_shape(functools.partial(evaluate_shards, looked_at), make_params(), recurrent_batch(8))
        return N // min(seen)

    assert [blocks(devices) for devices in (1, 2, 3, 4, 5, 8, 16)] == [1, 2, 2, 4, 4, 8, 8]


def test_replay_keeps_rollouts_within_their_shard():
    latest = [pp.Batch(log_prob=ROWS + i * 1000.0, per_segment={"i": jnp.arange(N)}, shards=SHARDS) for i in range(2)]
    part, context = pp.replay(2, latest[0]), pp.Context(key=KEY)
    batch = jax.jit(lambda a, b: part.update(b, part.finish(a, part.init(None), context), context)[0])(*latest)
    each = zip(np.split(batch.log_prob, SHARDS, 1), np.split(batch.per_segment["i"], SHARDS), strict=True)
    for shard, (steps, segments) in enumerate(each):
        own = np.arange(shard * 4, shard * 4 + 4)
        np.testing.assert_array_equal(steps[0], [*own, *(own + 1000)])
        np.testing.assert_array_equal(segments, [*own, *own])
    assert bool(jnp.all(batch.mask == 1))


def clocks(number):
    """Make environments that end at different times, some of them by a time limit."""
    limit = 2 + jnp.arange(number) % 5
    ends = {"terminated": limit == 4, "truncated": limit != 4}
    env = altered(clock(limit), **{name: lambda out, some=some: out.truncated & some for name, some in ends.items()})
    phase = jnp.cos(limit * 1.0)[:, None]
    return with_observations(env, lambda age: jnp.concatenate([jnp.sin(age + limit[:, None]), phase, age / 5], axis=-1))


def guessing(params, batch):
    """Evaluate a policy of several agents, each of which sees a bit."""
    bit = params * batch.obs.obs[..., 0]
    return Categorical(jnp.stack([bit, -bit], axis=-1)), bit


REMEMBERING = pp.Policy(lambda key: params_with_memory(), with_memory, lambda n: jnp.zeros((n, OBS)))
COLLECTED = {"memory": (clocks(8), REMEMBERING, params_with_memory()), "agents": (bit_game(mortal=True), guessing, 1.0)}


@pytest.mark.lenient_ranks  # the game needs this
@pytest.mark.parametrize("name", COLLECTED)
def test_a_rollout_with_shards_is_the_same_rollout(name):
    env, policy, params = COLLECTED[name]

    @functools.partial(jax.jit, static_argnums=0)
    def collected(shards):
        made = pp.rollout(env, policy, num_envs=8, num_steps=7, shards=shards)
        return made.collect(KEY, params, made.init(KEY))

    state, batch, metrics = collected(np.int64(4))
    assert batch.shards == 4
    assert bool(jnp.any(batch.truncated))
    assert bool(jnp.any(batch.terminated))
    assert_close((state, batch.replace(shards=1), metrics), collected(1), 1e-6)


def test_shards_normalize_by_what_all_saw_before_the_rollout_and_they_saw_since():
    steps, shards = 5, 2

    @jax.jit
    def collected():
        plain = pp.rollout(clocks(8), evaluate, num_envs=8, num_steps=steps)
        env = envs.normalize_reward(envs.normalize_observation(clocks(8)), gamma=0.0)
        made = pp.rollout(env, evaluate, num_envs=8, num_steps=steps, shards=shards)
        end, raw, _ = plain.collect(KEY, make_params(), plain.init(KEY))
        state, batch, _ = made.collect(KEY, make_params(), made.init(KEY))
        return jnp.append(raw.obs, end.obs[None], axis=0), raw.reward, state, batch

    raw, reward, state, batch = jax.tree.map(np.asarray, collected())
    moments = state.env_state.inner.moments
    assert_close((moments.mean, moments.var, moments.seen), (raw.mean((0, 1)), raw.var((0, 1)), 6 * 8.0), 1e-6)
    assert_close(state.env_state.moments.var, reward.var(), 1e-6)
    for own in np.split(np.arange(8), shards):
        for t in range(steps):
            seen = np.concatenate([raw[0], raw[1 : t + 1, own].reshape(-1, 3)])
            shown = (raw[t, own] - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-8)
            assert_close(batch.obs[t, own], np.clip(shown, -10, 10), 1e-4, 1e-4)
            scale = np.sqrt(reward[: t + 1, own].var() + 1e-8)
            assert_close(batch.reward[t, own], np.clip(reward[t, own] / scale, -10, 10), 1e-4)


def test_explained_variance_of_shards_is_that_of_all():
    rng, shape = np.random.default_rng(0), (T, N)
    target, noise = rng.normal(size=shape), 0.5 * rng.normal(size=shape)
    masked = np.ones(shape)
    masked[:, :4] = masked[2:4] = 0  # there is a shard without a step
    part = pp.gae(gamma=0.0, gae_lambda=0.0)  # the target is the reward
    update = jax.jit(lambda batch: part.update(batch, part.init(None), pp.Context(key=KEY))[0])
    for mask in (None, masked):
        for scale, shift in ((1, 0), (1, 1e3), (0, 1 / 3), (1e-3, -1e6)):
            aim = jnp.asarray(scale * target + shift, jnp.float32)
            value = aim + jnp.asarray(scale * noise, jnp.float32)
            flat = jnp.zeros(shape)
            batch = pp.Batch(log_prob=flat, value=value, next_value=flat, reward=aim, terminated=flat)
            batch = batch.replace(mask=None if mask is None else jnp.asarray(mask), shards=SHARDS)
            found = update(batch).metrics["explained_variance"]
            assert_close(found, pp.functional.explained_variance(value, aim, mask=batch.mask), 2e-5)
            assert bool(jnp.isnan(found)) == (scale < 1)


SAMPLERS = {
    "shuffled": pp.shuffled_minibatches,
    "segments": pp.segment_minibatches,
    "prioritized": functools.partial(pp.prioritized_sampler, alpha=0.8, beta=0.4),
}
LARGE = (32, 64)
COVERING = [("segments", "epoch"), ("prioritized", "minibatch")]
MINIBATCHES = 4


def compiled_on_devices(f, state, batch, explicit=False):
    """Compile `f(key, state, batch)` for a batch divided over all devices; return the program and its arguments."""
    mesh = jax.make_mesh((DEVICES,), ("devices",))  # the axes are explicit, and `sharding` makes them automatic
    sharding = batch.sharding(mesh)
    if explicit:  # as the user would place it
        sharding = jax.tree.map(lambda x: jax.sharding.NamedSharding(mesh, x.spec), sharding)
    placed = jax.device_put(batch, sharding)
    whole = jax.device_put((KEY, state), jax.sharding.NamedSharding(placed.log_prob.sharding.mesh, P()))
    return jax.jit(f).lower(*whole, placed).compile(), (*whole, placed)


def check_learner(cases):
    """Check learners for these pairs of a sampler and a refresh."""
    assert jax.device_count() == DEVICES == SHARDS
    batch = rollout(shape=LARGE).replace(shards=SHARDS)
    for sampler, refresh in cases:
        head = GAE, SAMPLERS[sampler](2, num_epochs=2, refresh=refresh), LOSSES[0]
        weighs = pp.advantage_weight() if sampler == "prioritized" else pp.identity()
        learner = pp.learner(evaluate, pp.chain(*head, weighs, *LOSSES[1:]), optax.adam(0.05))
        state = learner.init(make_params())
        one = jax.jit(learner.update).lower(KEY, state, batch).compile()
        several, arguments = compiled_on_devices(learner.update, state, batch, (sampler, refresh) == COVERING[0])
        assert_close(several(*arguments), one(KEY, state, batch), 2e-5, 1e-5)
        check_communication(read_operations(several), sampler, refresh)
        if sampler != "prioritized":
            share = several.cost_analysis()["flops"] / one.cost_analysis()["flops"]
            assert share == pytest.approx(1 / DEVICES, rel=0.1)  # each device also does some work for itself


def check_communication(found, sampler, refresh):
    """Check what each minibatch sends: gradient, losses with metrics, the advantage's mean and variance, priorities."""
    policy = sorted(make_params()["policy"].shape)
    gradients = [x for x in found if policy in [sorted(shape) for shape in x.shapes]]
    assert [x.times for x in gradients] == [MINIBATCHES], found
    gathers = [x for x in found if x.kind != "all-reduce"]
    assert {x.kind for x in gathers} <= ({"all-gather"} if sampler == "prioritized" else set()), found
    assert all(x.bytes == 4 * LARGE[1] and x.times == MINIBATCHES for x in gathers), found
    assert all(x.bytes < LARGE[0] * LARGE[1] for x in found), found  # none grows with the batch
    number = sum(x.times for x in found if x.kind == "all-reduce")
    estimates = {"rollout": 1, "epoch": 2, "minibatch": MINIBATCHES}[refresh]  # for the explained variance, all at once
    apart = refresh != "rollout"  # non-finite numbers are counted before the loop in which estimates are made
    assert number <= 4 * MINIBATCHES + estimates + apart, found


def opaque(params, batch):
    """Evaluate a policy whose distribution is not a pytree."""
    distribution, value = evaluate(params, batch)
    return SimpleNamespace(log_prob=distribution.log_prob), value, batch.carry


def check_recurrent():
    """Check rollouts and updates of a recurrent policy, in pieces of segments, with an early stop and two phases."""
    env = envs.normalize_reward(envs.normalize_observation(clocks(16)), gamma=0.9)
    shape = {"num_envs": 16, "num_steps": 12, "shards": SHARDS}
    made = pp.rollout(env, REMEMBERING, **shape)
    params, init = params_with_memory(), jax.jit(made.init)(KEY)
    mesh = jax.make_mesh((2, DEVICES // 2), ("hosts", "devices"))
    sharding = made.sharding(mesh)
    placed = jax.device_put(init, sharding)
    assert len({str(shard.index) for shard in placed.obs.addressable_shards}) == DEVICES
    whole = jax.device_put((KEY, params), jax.sharding.NamedSharding(placed.obs.sharding.mesh, P()))
    compiled = jax.jit(made.collect).lower(*whole, placed).compile()
    state, batch, metrics = compiled(*whole, placed)
    expected = jax.jit(made.collect)(KEY, params, init)
    assert_close((state, batch, metrics), expected, 2e-5, 1e-5)
    jax.tree.map(lambda x, stays: [x.sharding.is_equivalent_to(stays, x.ndim)].index(True), state, sharding)
    sums = [(x.kind, x.times) for x in read_operations(compiled)]  # there are none within the steps
    assert sums == [("all-reduce", 1)] * len(sums), sums
    assert len(sums) <= 4, sums  # for rounds, episodes, means and variances
    assert batch.log_prob.sharding.is_equivalent_to(batch.sharding(mesh).log_prob, 2)

    chunks = pp.chain(GAE, pp.time_chunks(2, 2, length=4, burn_in=2), *LOSSES, pp.kl_early_stop(1e-3))
    learner = pp.learner(REMEMBERING, chunks, optax.sgd(0.5))
    learner_state = learner.init(params)
    several, arguments = compiled_on_devices(learner.update, learner_state, batch)
    found = several(*arguments)
    assert_close(found, jax.jit(learner.update)(KEY, learner_state, expected[1]), 2e-5, 1e-5)
    assert found[1]["early_stopped"] == 1
    memory = sorted(params["memory"].shape)
    sums = [x.times for x in read_operations(several) if memory in [sorted(shape) for shape in x.shapes]]
    assert sum(sums) == 4, sums  # once per minibatch, and not in every step of the recurrence
    assert {x.kind for x in read_operations(several)} == {"all-reduce"}

    message = "several shards: the distribution must be a pytree of arrays, but SimpleNamespace is not"
    with pytest.raises(TypeError, match=f"for a recurrent policy and {message}"):
        updated(opaque, make_params(), recurrent_batch(), GAE, pp.full_batch(), *LOSSES[1:3])


@pytest.mark.slow
def test_devices_with_every_sampler_and_refresh():
    alone(check_learner, [*itertools.product(SAMPLERS, ("rollout", "epoch", "minibatch"))])


def shard_map(function, in_specs, out_specs):
    """Map over all devices, whose axis is `d`."""
    return jax.shard_map(function, mesh=mesh_of_all("Auto"), in_specs=in_specs, out_specs=out_specs)


def estimates(given, gamma, way="auto"):
    """Compute all that recurs, with gradients; `gamma` may be one for each device."""
    on_policy = {name: x for name, x in given.items() if name != "log_ratio"}
    settings = {"gamma": gamma, "gae_lambda": 0.8}

    def total(value):
        return jnp.sum(jnp.square(f.gae(**on_policy | {"value": value}, **settings, stop_gradient=False).target))

    return {
        "gae": f.gae(**on_policy, **settings),
        "vtrace": f.vtrace(**given, **settings),
        "recurrence": f.reverse_recurrence(given["reward"], given["value"], implementation=way),
        "gradient": jax.grad(total)(given["value"]),
    }


def check_functional(columns, ways, kinds):
    """Check `columns` for all devices in these ways in `shard_map`, and on meshes of these kinds."""
    given, columnwise = estimator_inputs(5, columns), P(None, "d")
    expected = jax.jit(lambda given: estimates(given, 0.9))(given)
    for way in ways:
        mapped = shard_map(lambda given, way=way: estimates(given, 0.9, way), (columnwise,), columnwise)
        assert_close(jax.jit(mapped)(given), expected, 1e-5, 1e-5)
    for kind in kinds:
        sharding = jax.sharding.NamedSharding(mesh_of_all(kind), columnwise)
        result = jax.jit(lambda given: estimates(given, 0.9))(jax.device_put(given, sharding))
        assert_close(result, expected, 1e-5, 1e-5)
        assert result["gae"].advantage.sharding.is_equivalent_to(sharding, 2)


def check_what_devices_share(columns):
    given, columnwise = estimator_inputs(5, columns), P(None, "d")

    def without_gradient(given):  # JAX sums the gradient of what the devices share over them
        return {name: x for name, x in estimates(given, 0.9).items() if name != "gradient"}

    own, first = given["reward"], {name: x[:, : columns // DEVICES] for name, x in given.items()}
    of_shared = shard_map(lambda own, all: without_gradient(all | {"reward": own}), (columnwise, P()), columnwise)
    tiled = {name: jnp.tile(x, DEVICES) for name, x in first.items()} | {"reward": own}
    assert_close(jax.jit(of_shared)(own, first), jax.jit(without_gradient)(tiled), 1e-5, 1e-5)


def check_one_gamma_for_each_device(columns):
    given, gamma = estimator_inputs(5, columns), jnp.linspace(0.5, 0.9, DEVICES)
    per_column, columnwise = jnp.repeat(gamma, columns // DEVICES), P(None, "d")
    varied = jax.jit(lambda given: estimates(given, per_column))(given)
    mapped = shard_map(lambda given, gamma: estimates(given, gamma[0]), (columnwise, P("d")), columnwise)
    assert_close(jax.jit(mapped)(given, gamma), varied, 1e-5, 1e-5)
    split = jax.tree.map(lambda x: jnp.stack(jnp.split(x, DEVICES, 1)), given)
    back = lambda tree: jax.tree.map(lambda x: jnp.concatenate(list(np.asarray(x)), 1), tree)  # noqa: E731
    for mapped in (jax.pmap, lambda function: jax.jit(jax.vmap(function))):
        assert_close(back(mapped(estimates)(split, gamma)), varied, 1e-5, 1e-5)


def check_a_learner_for_each_device():
    """Check that each device can have a learner for its own columns."""
    losses = pp.clipped_surrogate(clip_eps=0.2, dual_clip=3.0), pp.clipped_value_loss(clip_eps=0.2)
    losses = pp.advantage_normalize(), *losses, pp.policy_diagnostics(), pp.kl_early_stop(0.01)
    constant = part(lambda b, s, c: (b, jnp.ones(())), "constant", jnp.zeros(()), finish=lambda b, s, c: jnp.ones(()))
    often = pp.chain(pp.shuffled_minibatches(2), *losses, constant)
    seldom = pp.chain(constant, pp.full_batch(2, refresh="epoch"), VALUE, constant)
    phases = {"often": pp.phase(often, trains=None), "seldom": pp.phase(seldom, trains=None, every=2)}
    pipeline = pp.chain(pp.gae(gamma=0.9, gae_lambda=0.8), pp.phases(**phases))
    learner = pp.learner(evaluate, pipeline, dict.fromkeys(phases, optax.adam(0.1)))
    state, key = learner.init(make_params()), jax.random.key(0)
    batch, update = rollout(shape=(6, 4 * DEVICES)), jax.jit(learner.update)
    parts = [jax.tree.map(lambda x, i=i: x[:, 4 * i : 4 * i + 4], batch) for i in range(DEVICES)]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *(update(key, state, part) for part in parts))
    after = lambda batch: jax.tree.map(lambda x: x[None], learner.update(key, state, batch))  # noqa: E731
    assert_close(jax.jit(shard_map(after, (P(None, "d"),), P("d")))(batch), expected, 1e-5, 1e-5)


def check_all():
    """Check everything in one process, because starting it takes longer than most of the checks."""
    assert jax.device_count() == DEVICES
    check_functional(8, ("auto", "associative"), ("Explicit",))
    check_functional(512, (), ("Auto",))  # wide rows take another way through the scan
    check_what_devices_share(8)
    check_one_gamma_for_each_device(8)
    check_a_learner_for_each_device()
    test_host_envs.check_several_devices()
    check_learner(COVERING)
    check_recurrent()


def test_several_devices():
    alone(check_all)
