"""What the tests share: a tiny linear policy, and rollouts of it that are consistent with themselves."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ppo_parts as pp

TIME, SEGMENTS, OBS, ACTIONS = 6, 4, 3, 2
FLOATS = ("log_prob", "value", "reward", "next_value", "advantage", "target", "log_ratio")


class Softmax(NamedTuple):
    """A categorical distribution, the smallest object a part can work with."""

    logits: jax.Array

    def log_prob(self, action):
        return jnp.take_along_axis(jax.nn.log_softmax(self.logits), action[..., None], axis=-1)[..., 0]

    def entropy(self):
        log_p = jax.nn.log_softmax(self.logits)
        return -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)

    def kl_divergence(self, other):
        ours, theirs = jax.nn.log_softmax(self.logits), jax.nn.log_softmax(other.logits)
        return jnp.sum(jnp.exp(ours) * (ours - theirs), axis=-1)

    def sample(self, *, seed, sample_shape=()):
        return jax.random.categorical(seed, self.logits, shape=(*sample_shape, *self.logits.shape[:-1]))


def evaluate(params: Any, batch: pp.Batch) -> tuple[Softmax, jax.Array]:
    """A linear policy and a linear critic."""
    return Softmax(batch.obs @ params["policy"]), batch.obs @ params["value"]


def evaluate_gaussian(params: Any, batch: pp.Batch) -> tuple[pp.distributions.Normal, jax.Array]:
    """The same with continuous actions `[..., ACTIONS]`."""
    loc = batch.obs @ params["policy"]
    return pp.distributions.Normal(loc, 0.5 + jax.nn.sigmoid(loc)), batch.obs @ params["value"]


def make_params(seed: int = 0, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    policy, value = rng.normal(size=(OBS, ACTIONS)), rng.normal(size=OBS)
    return {"policy": jnp.asarray(policy, dtype), "value": jnp.asarray(value, dtype)}


def rollout(
    seed: int = 0,
    shape: tuple[int, int] = (TIME, SEGMENTS),
    *,
    masked: bool = True,
    ends: bool = True,
    behavior: Any = None,
    dtype: Any = jnp.float32,
) -> pp.Batch:
    """A `[T, N]` rollout of a linear policy: values and log-probabilities are its own, next values follow the values.

    `ends`: some steps terminate, some are truncated (bootstrapping from the value of an observation of their own).
    `masked`: some steps do not count, among them the whole of the last segment.
    """
    rng = np.random.default_rng(seed)
    obs = rng.normal(size=(*shape, OBS))
    action = rng.integers(ACTIONS, size=shape)
    kind = rng.choice(3, size=shape, p=(0.6, 0.2, 0.2) if ends else (1, 0, 0))
    batch = pp.Batch(
        obs=jnp.asarray(obs, dtype),
        action=jnp.asarray(action),
        reward=jnp.asarray(rng.normal(size=shape), dtype),
        terminated=jnp.asarray(kind == 1, dtype),
        truncated=jnp.asarray(kind == 2, dtype),
    )
    distribution, value = evaluate(make_params(seed + 100, dtype) if behavior is None else behavior, batch)
    next_value = np.concatenate([np.asarray(value)[1:], np.asarray(rng.normal(size=(1, *shape[1:])), value.dtype)])
    next_value = np.where(kind == 2, rng.normal(size=shape), next_value)
    if masked:
        mask = rng.random(size=shape) < 0.7
        mask[:, -1] = False
        mask[0, 0] = True
        batch = batch.replace(mask=jnp.asarray(mask, dtype))
    return batch.replace(
        log_prob=distribution.log_prob(batch.action), value=value, next_value=jnp.asarray(next_value, dtype)
    )


def poisoned(batch: pp.Batch, kind: str) -> pp.Batch:
    """`batch` with other numbers wherever the mask is 0: "noise" or "nan"."""
    keep, rng = np.asarray(batch.mask, bool), np.random.default_rng(5)

    def other(x: jax.Array) -> jax.Array:
        noise = np.full(x.shape, np.nan) if kind == "nan" else rng.normal(size=x.shape)
        where = keep.reshape(keep.shape + (1,) * (x.ndim - keep.ndim))
        return jnp.where(where, x, jnp.asarray(noise, x.dtype))

    floats = {field: other(getattr(batch, field)) for field in FLOATS if getattr(batch, field) is not None}
    action = jnp.where(
        keep.reshape(keep.shape + (1,) * (batch.action.ndim - keep.ndim)), batch.action, 1 - batch.action
    )
    losses = {name: other(loss) for name, loss in batch.losses.items()}
    return batch.replace(**floats, obs=other(batch.obs), action=action, losses=losses)


def assert_same(actual: Any, expected: Any) -> None:
    """Two trees are equal to the last bit, NaN included."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for path, x in jax.tree_util.tree_leaves_with_path(actual):
        y = dict(jax.tree_util.tree_leaves_with_path(expected))[path]
        np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))


def assert_close(actual: Any, expected: Any, rtol: float = 2e-5, atol: float = 1e-6) -> None:
    """Two trees are equal but for rounding."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))
