"""Parts that write or change `advantage` and `target`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .. import functional
from .._base.checked import checked
from .._base.hyperparameters import Numeric
from .._base.moments import Moments, merge_shards
from .._core.batch import Array, Batch, map_streams, require
from .._core.part import Context, Part, PartState, no_state, read_numbers, stateless
from .._core.policy import shift_values
from .._core.shards import map_shards, replicate
from ..errors import UserValueError
from ..functional._arguments import AXIS, DDOF
from ..functional._common import check_same_shape, zero_masked
from ..functional._statistics import share_explained, unmasked_element
from .common import check_numbers, moments_of


@checked
def gae(*, gamma: Numeric, gae_lambda: Numeric, mask_mode: functional.MaskMode = "cut") -> Part:
    """Write `advantage` and `target` with generalized advantage estimation, `functional.gae`.

    Before the sampler, it reads the rollout's values and adds the metric `explained_variance`. After a sampler that
    keeps time, it reads the values of the policy being trained, `current.value`, and also takes `next_value` from them,
    except at truncations, before masked steps and at the end of the rollout. Streams (see `Batch`) are estimated
    separately, and the metric is their mean. Gradients do not flow through this part.

    Args:
        gamma, gae_lambda: as in `functional.gae`.
        mask_mode: as in `functional.gae`. With "skip", the next value is the `value` of the next unmasked step, and
            `next_value` is used only at truncations and at the end of the rollout.

    Place: before the sampler, or after one that keeps time, such as `segment_minibatches` or `full_batch`.

    Example:
        >>> import ppo_parts as pp
        >>> part = pp.gae(gamma=.99, gae_lambda=.95)
        >>> pp.gae(gamma=1.5, gae_lambda=.95)
        Traceback (most recent call last):
        ...
        ppo_parts.errors.UserValueError: gae: gamma must lie in [0, 1], got 1.5
    """
    numbers = check_numbers("gae", gamma=gamma, gae_lambda=gae_lambda)
    estimate = functools.partial(functional.gae, mask_mode=mask_mode)
    return _estimator("gae", estimate, "advantage", numbers, skip=mask_mode == "skip")


@checked
def vtrace(
    *,
    gamma: Numeric,
    gae_lambda: Numeric = 1.0,
    rho_clip: Numeric = 1.0,
    c_clip: Numeric = 1.0,
    policy_gradient: bool = False,
    pg_rho_clip: Numeric | None = None,
    pg_lambda: Numeric | None = None,
) -> Part:
    """Write `advantage` and `target` with V-trace, `functional.vtrace`, and the latest importance ratios.

    Before the sampler, the ratio is `exp(log_ratio)`, which is 1 until a `refresh` writes it, and the part adds the
    metric `explained_variance`. After a sampler that keeps time, the policy being trained gives the ratios and values,
    as in `gae`. Gradients do not flow through this part.

    Args:
        policy_gradient: whether the advantage is IMPALA's `policy_advantage`, the only result that `pg_rho_clip` and
            `pg_lambda` affect, or the recurrence's `error` (as in PufferLib and JaxDEM).
        gamma, gae_lambda, rho_clip, c_clip, pg_rho_clip, pg_lambda: as in `functional.vtrace`.

    Place: before the sampler, or after one that keeps time, such as `segment_minibatches` or `prioritized_sampler`.

    Example:
        >>> import ppo_parts as pp
        >>> part = pp.vtrace(gamma=.99, gae_lambda=.95, rho_clip=1., c_clip=1.)
    """
    if not policy_gradient and not (pg_rho_clip is None and pg_lambda is None):
        raise UserValueError("vtrace: pg_rho_clip and pg_lambda have an effect only with policy_gradient=True")
    clips = {"rho_clip": rho_clip, "c_clip": c_clip, "pg_rho_clip": pg_rho_clip}
    numbers = check_numbers("vtrace", gamma=gamma, gae_lambda=gae_lambda, pg_lambda=pg_lambda, **clips)
    advantage = "policy_advantage" if policy_gradient else "error"
    return _estimator("vtrace", functional.vtrace, advantage, numbers, off_policy=True)


def _estimator(
    where: str, estimate: Callable[..., Any], advantage: str, numbers: dict[str, Any], *, off_policy: bool = False,
    skip: bool = False,
) -> Part:  # fmt: skip
    """Make a part that writes the advantage and the target that `estimate` returns.

    With `off_policy`, the estimate uses log-ratios. With `skip`, next values skip masked steps.
    """

    def update(batch: Batch, state: PartState, context: Context) -> tuple[Batch, PartState]:
        values = _latest_values(where, batch, skip=skip)
        ends = {name: getattr(batch, name) for name in ("terminated", "truncated", "mask")}
        ratio = (_latest_log_ratio(batch),) if off_policy else ()
        of_stream = functools.partial(estimate, *ratio, **ends, **read_numbers(numbers, batch, context.step))
        out = map_streams(of_stream, batch.terminated, *values)(*values)
        return _write(batch, getattr(out, advantage), out.target), state

    of_ratio = ("current.log_prob", "log_ratio", "log_prob") if off_policy else ()
    reads = ("reward", "value", "next_value", "terminated", "truncated", "mask", "current.value", *of_ratio)
    return Part(
        no_state, update, where, provides=("advantage", "target"), reads=reads, needs_time=True, numbers=numbers
    )


@checked
def advantage_normalize(*, axis: int | tuple[int, ...] | None = None, ddof: int = 0, eps: Numeric = 1e-8) -> Part:
    """Standardize `advantage` with `functional.advantage_normalize`, each stream (see `Batch`) separately.

    Args:
        axis: axes of the batch over which the statistics are computed; None means all. After `segment_minibatches`,
            axis 0 is time and axis 1 the segments; after a step sampler, there is only axis 0. Statistics over a single
            element raise an error, because the standardized advantage would always be 0.
        ddof, eps: as in `functional.advantage_normalize`.

    Place: after `gae` or `vtrace`. After the sampler, the statistics are computed over the minibatch; before it, over
    the whole rollout.

    Example:
        >>> import ppo_parts as pp
        >>> pipeline = pp.chain(pp.shuffled_minibatches(4), pp.advantage_normalize(ddof=1))
    """
    where = "advantage_normalize"
    DDOF.check(where, "ddof", ddof)
    axes, numbers = AXIS.check(where, "axis", axis) or (), check_numbers(where, eps=eps)

    def update(batch: Batch, eps: Any) -> Batch:
        element = batch.advantage if batch.log_prob is None else batch.log_prob
        shape = jnp.shape(element)
        of = f"axis={axis} of an advantage with axes {batch.axes} and shape {shape}"
        if any(not -len(shape) <= a < len(shape) for a in axes):
            raise UserValueError(f"{where}: {of} does not exist")
        if math.prod(shape if axis is None else [shape[a] for a in axes]) == 1:
            raise UserValueError(
                f"{where}: {of} leaves one element for each mean, so that the result is always 0: use fewer "
                "minibatches or other axes, or normalize before the sampler"
            )
        normalize = functools.partial(functional.advantage_normalize, mask=batch.mask, axis=axis, ddof=ddof, eps=eps)
        return batch.replace(advantage=map_streams(normalize, element, batch.advantage)(batch.advantage))

    written = ("advantage",)
    return stateless(update, name=where, requires=written, provides=written, reads=("mask",), numbers=numbers)


@checked
def advantage_weight() -> Part:
    """Multiply `advantage` by the sampler's importance weight: A_i <- w_i A_i.

    Place: after a sampler that provides weights (`prioritized_sampler`, `given_indices(weights=...)`), and after
    `advantage_normalize`, as in PufferLib. Before it, the weights would change the statistics.

    Example:
        >>> import ppo_parts as pp
        >>> pipeline = pp.chain(pp.prioritized_sampler(8, alpha=.8, beta=.2), pp.advantage_weight())

    Reference: PufferLib 3.0; Schaul et al. 2016, arXiv:1511.05952, section 3.4.
    """

    def update(batch: Batch) -> Batch:
        x, sampled = batch.advantage, len(batch.axes) - 1  # the weight is `[M]`, between time and agents
        weight = batch.weight.reshape((1,) * sampled + batch.weight.shape + (1,) * (x.ndim - sampled - 1))
        return batch.replace(advantage=x * weight.astype(x.dtype))

    return stateless(
        update, name="advantage_weight", requires=("advantage", "weight"), provides=("advantage",), reads=(),
        place="after_sampler",
    )  # fmt: skip


def _latest_values(where: str, batch: Batch, *, skip: bool = False) -> tuple[Array, Array, Array]:
    """Return rewards, and the values and next values of the latest policy evaluated on the batch."""
    require(
        batch,
        where,
        reward="an advantage needs the reward of every step",
        terminated="it is 1 where the transition out of step t ended the episode",
        value="it is V(obs) when the step was taken: give the policy a critic, or use an advantage that needs none, "
        "such as group_advantage()",
        next_value="it is V of the observation that followed step t; functional.next_values(...) builds it",
    )
    value, next_value = batch.value, batch.next_value
    if batch.current is not None:
        if batch.current.value is None:
            raise UserValueError(
                f"{where}: the policy has no value, and an advantage along time needs one: give the policy "
                "a critic, or write the advantage with your own part"
            )
        value = jax.lax.stop_gradient(batch.current.value)
    if skip or batch.current is not None:
        next_value = shift_values(batch, value, skip=skip)
    check_same_shape(where, reward=batch.reward, value=value, next_value=next_value)
    return batch.reward, value, next_value


def _latest_log_ratio(batch: Batch) -> Array:
    """Return the log-ratio of the latest policy evaluated on the batch."""
    if batch.current is not None:
        return jax.lax.stop_gradient(batch.current_log_ratio())
    return jnp.zeros_like(batch.terminated, batch.value.dtype) if batch.log_ratio is None else batch.log_ratio


def _write(batch: Batch, advantage: Array, target: Array) -> Batch:
    """Write the estimates and, before the sampler, the metric `explained_variance`."""
    if batch.current is None:
        explained = functools.partial(_explained_variance, batch)
        variance = map_streams(explained, batch.terminated, batch.value, target)(batch.value, target)
        # Do not use `add_metrics`, because in a chain with two estimators, the value learns the last one's target.
        variance = jnp.mean(variance) if variance.ndim else variance
        batch = batch.replace(metrics={**batch.metrics, "explained_variance": variance})
    return batch.replace(advantage=advantage, target=target)


def _explained_variance(batch: Batch, value: Array, target: Array) -> Array:
    """Compute `functional.explained_variance`; shards exchange their moments in a single step."""
    if batch.shards == 1:
        return functional.explained_variance(value, target, mask=batch.mask)

    def of_shard(shard: Batch) -> tuple[Array, Moments]:
        value, aim = zero_masked(shard.mask, *jax.lax.stop_gradient((shard.value, shard.target)))
        reference = unmasked_element(aim, shard.mask)
        reference = jnp.where(reference == -jnp.inf, 0, reference)  # all steps are masked
        total, error = (moments_of(x, shard.mask) for x in (aim - reference, aim - value))
        return reference, Moments(jnp.stack([total.mean, error.mean]), jnp.stack([total.var, error.var]), total.seen)

    references, each = jax.tree.map(replicate, map_shards(of_shard, batch.replace(value=value, target=target)))
    reference = unmasked_element(references, each.seen > 0)
    each = each._replace(mean=each.mean.at[:, 0].add(references - reference))
    total, error = merge_shards(each).var
    return share_explained(total, error, reference).astype(batch.value.dtype)
