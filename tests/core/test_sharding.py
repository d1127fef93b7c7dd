"""More than one device: the same numbers under `shard_map`, `pmap`, `vmap` and on explicit meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ppo_parts as pp
from ppo_parts import functional as f
from tests.common import DEVICES, P, alone, evaluate, make_params, mesh_of_all, rollout
from tests.core import test_shards
from tests.envs import test_host_envs


def shard_map(function, in_specs, out_specs):
    """Over all devices, whose axis is `d`."""
    return jax.shard_map(function, mesh=mesh_of_all("Auto"), in_specs=in_specs, out_specs=out_specs)


def data(columns):
    rng = np.random.default_rng(0)
    floats = {name: rng.normal(size=(5, columns)) for name in ("log_ratio", "reward", "value", "next_value")}
    kind = rng.integers(4, size=(5, columns))
    given = floats | {"terminated": kind == 1, "truncated": kind == 2, "mask": kind != 3}
    return {name: jnp.asarray(x, jnp.float32) for name, x in given.items()}


def estimates(given, gamma, way="auto"):
    """All that recurs, with gradients; `gamma` may be one for each device."""
    on_policy = {name: x for name, x in given.items() if name != "log_ratio"}
    settings = {"gamma": gamma, "gae_lambda": 0.8}

    def total(value):
        out = f.gae(**on_policy | {"value": value}, **settings, stop_gradient=False)
        return jnp.sum(jnp.square(out.target))

    return {
        "gae": f.gae(**on_policy, **settings),
        "vtrace": f.vtrace(**given, **settings),
        "recurrence": f.reverse_recurrence(given["reward"], given["value"], implementation=way),
        "gradient": jax.grad(total)(given["value"]),
    }


def same(actual, expected):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), actual, expected)


def check_functional(columns, ways, kinds):
    """`columns` for all devices; in these ways in `shard_map`, and on meshes of these kinds."""
    given, columnwise = data(columns), P(None, "d")
    expected = jax.jit(lambda given: estimates(given, 0.9))(given)
    for way in ways:
        mapped = shard_map(lambda given, way=way: estimates(given, 0.9, way), (columnwise,), columnwise)
        same(jax.jit(mapped)(given), expected)
    for kind in kinds:
        sharding = jax.sharding.NamedSharding(mesh_of_all(kind), columnwise)
        placed = jax.device_put(given, sharding)
        result = jax.jit(lambda given: estimates(given, 0.9))(placed)
        same(result, expected)
        assert result["gae"].advantage.sharding.is_equivalent_to(sharding, 2)


def check_what_devices_share(columns):
    given, columnwise = data(columns), P(None, "d")

    def without_gradient(given):  # JAX sums over the devices the gradient of what they share
        return {name: x for name, x in estimates(given, 0.9).items() if name != "gradient"}

    own, first = given["reward"], {name: x[:, : columns // DEVICES] for name, x in given.items()}
    merged = lambda own, all: without_gradient(all | {"reward": own})  # noqa: E731
    of_shared = shard_map(merged, (columnwise, P()), columnwise)
    tiled = {name: jnp.tile(x, DEVICES) for name, x in first.items()} | {"reward": own}
    same(jax.jit(of_shared)(own, first), jax.jit(without_gradient)(tiled))


def check_one_gamma_for_each_device(columns):
    given, gamma = data(columns), jnp.linspace(0.5, 0.9, DEVICES)
    per_column, columnwise = jnp.repeat(gamma, columns // DEVICES), P(None, "d")
    varied = jax.jit(lambda given: estimates(given, per_column))(given)
    mapped = shard_map(lambda given, gamma: estimates(given, gamma[0]), (columnwise, P("d")), columnwise)
    same(jax.jit(mapped)(given, gamma), varied)
    split = jax.tree.map(lambda x: jnp.stack(jnp.split(x, DEVICES, 1)), given)
    back = lambda tree: jax.tree.map(lambda x: jnp.concatenate(list(np.asarray(x)), 1), tree)  # noqa: E731
    same(back(jax.pmap(estimates)(split, gamma)), varied)
    same(back(jax.jit(jax.vmap(estimates))(split, gamma)), varied)


def check_learner():
    """One learner for each device, on its own columns."""
    losses = pp.clipped_surrogate(clip_eps=0.2, dual_clip=3.0), pp.clipped_value_loss(clip_eps=0.2)
    head = pp.gae(gamma=0.9, gae_lambda=0.8), pp.shuffled_minibatches(2), pp.advantage_normalize()
    pipeline = pp.chain(*head, *losses, pp.policy_diagnostics())
    learner = pp.learner(evaluate, pipeline, optax.adam(0.1))
    state, key = learner.init(make_params()), jax.random.key(0)
    batch, update = rollout(shape=(6, 4 * DEVICES)), jax.jit(learner.update)
    parts = [jax.tree.map(lambda x, i=i: x[:, 4 * i : 4 * i + 4], batch) for i in range(DEVICES)]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *(update(key, state, part) for part in parts))

    def after(batch):
        return jax.tree.map(lambda x: x[None], learner.update(key, state, batch))

    same(jax.jit(shard_map(after, (P(None, "d"),), P("d")))(batch), expected)


def check_all():
    """In one process, as starting it takes longer than most of the checks."""
    assert jax.device_count() == DEVICES
    check_functional(8, ("auto", "associative"), ("Explicit",))
    check_functional(512, (), ("Auto",))  # wide rows take another way through the scan
    check_what_devices_share(8)
    check_one_gamma_for_each_device(8)
    check_learner()
    test_host_envs.check_several_devices()
    test_shards.check_learner(test_shards.COVERING)
    test_shards.check_recurrent()


def test_several_devices():
    alone(check_all)
