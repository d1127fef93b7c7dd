"""A small example rollout of a linear policy, with everything that a part may read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.batch import ABSENT, Array, Batch, Current, Output
from .._core.part import Context
from .._core.policy import evaluate_policy
from ..distributions import Categorical, Normal
from ..functional._common import unsqueeze

TIME, SEGMENTS, OBS, ACTIONS = 6, 4, 3, 2
STEP = 3
FLOATS = ("log_prob", "value", "reward", "next_value", "advantage", "target", "log_ratio")
TREES = ("obs", "next_obs", "behavior", "losses", "extras")


def evaluate(params: Any, batch: Any) -> tuple[Categorical, Array]:
    """Return a linear policy and a linear critic."""
    return Categorical(batch.obs @ params["policy"]), batch.obs @ params["value"]


def evaluate_gaussian(params: Any, batch: Any) -> tuple[Normal, Array]:
    """Return a linear policy and critic for continuous actions `[..., ACTIONS]`."""
    loc = batch.obs @ params["policy"]
    return Normal(loc, 0.5 + jax.nn.sigmoid(loc)), batch.obs @ params["value"]


def evaluate_either(params: Any, batch: Any) -> Output:
    """Evaluate the example policy, which is Gaussian if actions are continuous."""
    continuous = jnp.issubdtype(batch.action.dtype, jnp.floating)
    return Output(*(evaluate_gaussian if continuous else evaluate)(params, batch))


def make_params(seed: int = 0, dtype: Any = jnp.float32) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    policy, value = rng.normal(size=(OBS, ACTIONS)), rng.normal(size=OBS)
    return {"policy": jnp.asarray(policy, dtype), "value": jnp.asarray(value, dtype)}


def make_rollout(
    seed: int = 0,
    shape: tuple[int, int] = (TIME, SEGMENTS),
    *,
    masked: bool = True,
    ends: bool = True,
    behavior: Any = None,
    dtype: Any = jnp.float32,
) -> Batch:
    """Make a `[T, N]` rollout of a linear policy, with its values, log-probabilities and next values.

    With `masked`, some steps do not count, including the whole last segment. With `ends`, some steps terminate, and
    some are truncated and followed by another observation. `behavior` has the parameters that acted; None draws them.
    """
    rng = np.random.default_rng(seed)
    obs = rng.normal(size=(*shape, OBS))
    action = rng.integers(ACTIONS, size=shape)
    kind = rng.choice(3, size=shape, p=(0.6, 0.2, 0.2) if ends else (1, 0, 0))
    kind[1, 0] = 2 * ends  # a truncation between two steps that count
    batch = Batch(
        obs=jnp.asarray(obs, dtype),
        action=jnp.asarray(action),
        reward=jnp.asarray(rng.normal(size=shape), dtype),
        terminated=jnp.asarray(kind == 1, dtype),
        truncated=jnp.asarray(kind == 2, dtype),
    )
    distribution, value = evaluate(make_params(seed + 100, dtype) if behavior is None else behavior, batch)
    following = np.concatenate([np.asarray(value)[1:], np.asarray(rng.normal(size=(1, *shape[1:])), value.dtype)])
    next_value = jnp.asarray(np.where(kind == 2, rng.normal(size=shape), following), dtype)
    if masked:
        mask = rng.random(size=shape) < 0.7
        mask[:, -1] = False
        mask[:3, 0] = True
        batch = batch.replace(mask=jnp.asarray(mask, dtype))
    return batch.replace(log_prob=distribution.log_prob(batch.action), value=value, next_value=next_value)


def example_batch(
    seed: int = 0, dtype: Any = jnp.float32, *, after_sampler: bool = False, continuous: bool = False, **fields: Any
) -> Batch:
    """Make a small batch with every field that the parts of this package read.

    Args:
        seed: seed of the random numbers.
        dtype: dtype of all floating arrays.
        after_sampler: whether to add what samplers and losses write, which is a weight per segment, the loss and the
            metric "given", and the policy being trained as `current`.
        continuous: whether actions are `[6, 4, 2]` and the policy is Gaussian, instead of two discrete actions.
        **fields: additional fields, or other values of fields.

    Returns:
        A `Batch` of 6 steps in 4 segments, some of which are masked, terminated or truncated.

    Example:
        >>> import jax.numpy as jnp
        >>> batch = example_batch(extras={"novelty": jnp.ones((6, 4))})
        >>> batch.reward.shape, batch.obs.shape
        ((6, 4), (6, 4, 3))
    """
    batch = make_rollout(seed, dtype=dtype)
    if continuous:
        batch = batch.replace(action=jnp.asarray(batch.obs[..., :ACTIONS] + 0.1, dtype))
    behavior = evaluate_either(make_params(seed + 100, dtype), batch).distribution
    next_obs = jnp.roll(batch.obs, -1, axis=0)
    batch = batch.replace(behavior=behavior, next_obs=next_obs, log_prob=behavior.log_prob(batch.action))
    rng = np.random.default_rng(seed + 1)
    normal = {
        name: jnp.asarray(0.3 * rng.normal(size=(TIME, SEGMENTS)), dtype)
        for name in ("advantage", "target", "log_ratio", "loss", "extra")
    }
    loss, extra = normal.pop("loss"), normal.pop("extra")
    per_segment = {"group": jnp.asarray([0, 1, 1, 0]), "score": jnp.asarray(rng.normal(size=SEGMENTS), dtype)}
    batch = batch.replace(**normal, extras={"own": extra}, per_segment=per_segment)
    if after_sampler:
        weight = jnp.asarray(rng.random(SEGMENTS) + 0.5, dtype)
        batch = batch.replace(weight=weight, losses={"given": loss}, metrics={"given": jnp.zeros((), dtype)})
    batch = batch.replace(**fields)
    return add_current(batch, make_params(seed, dtype)) if after_sampler else batch


def add_current(batch: Batch, params: Any, evaluate: Any = evaluate_either) -> Batch:
    """Evaluate the policy being trained; unlike a learner, keep its results for masked elements."""
    output = evaluate_policy(evaluate, params, batch)
    log_prob, value = output.distribution.log_prob(batch.action), ABSENT if output.value is None else output.value
    return batch.replace(current=Current(output.distribution, log_prob, aux=output.aux, value=value))


def example_context(seed: int = 0, dtype: Any = jnp.float32) -> Context:
    """Make the context of the first of two minibatches in the fourth update, with parameters of `dtype`.

    Example:
        >>> int(example_context().step)
        3
    """
    return Context(
        key=jax.random.key(seed),
        step=jnp.int32(STEP),
        params=make_params(seed, dtype),
        evaluate=evaluate_either,
        minibatch=jnp.int32(0),
        num_minibatches=2,
    )


def poison(batch: Batch, kind: str) -> Batch:
    """Return `batch` with other numbers (those of other elements, "noise", or "nan") wherever the mask is 0."""
    keep, rng = np.asarray(batch.mask, bool), np.random.default_rng(5)

    def replace(x: Array, keep: Any = keep) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            noise: Any = 1 - x
        else:
            noise = np.full(x.shape, np.nan) if kind == "nan" else rng.permutation(np.ravel(x)).reshape(x.shape)
        return jnp.where(unsqueeze(keep, x.ndim), x, jnp.asarray(noise, x.dtype))

    fields = (*FLOATS, *TREES, "action", "terminated", "truncated")
    changed = {field: jax.tree.map(replace, getattr(batch, field)) for field in fields}
    return batch.replace(**changed, per_segment=jax.tree.map(lambda x: replace(x, keep.any(axis=0)), batch.per_segment))
