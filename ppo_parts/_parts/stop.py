"""Parts that stop an update early because of the policy's divergence or any other metric."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp

from .. import functional
from .._base.checked import checked
from .._base.hyperparameters import Numeric
from .._core.batch import Array, Batch
from .._core.part import Context, Part, stateless
from ..functional import KLEstimator, masked_mean
from ..functional._common import masked_sum
from .common import check_numbers


@checked
def kl_early_stop(
    target_kl: Numeric,
    *,
    estimator: KLEstimator = "k3",
    reduction: Literal["mean", "sum"] = "mean",
    check: Literal["minibatch", "epoch"] = "minibatch",
    name: str = "early_stop_kl",
) -> Part:
    """Stop the gradient steps of this phase in this update when the policy has moved too far.

    The divergence is measured *before* the minibatch's step, with `functional.approx_kl`. It exceeds the threshold if
    it is greater than `target_kl` or NaN.

    * With `check="minibatch"`, neither the minibatch that exceeds the threshold nor any later one is applied, as in
      Stable-Baselines3, whose threshold is 1.5 times its `target_kl`.
    * With `check="epoch"`, the last minibatch of each epoch is checked, and all steps of that epoch are applied, as in
      CleanRL, and in jaxagents with `estimator="k1", reduction="sum"`.

    Without `vmap`, a stop saves the remaining computation. Metric: `<name>`, the mean divergence of the minibatches
    that ran. The learner adds `minibatches`, `epochs` and `early_stopped`.

    Args:
        target_kl: threshold in nats, >= 0.
        estimator: as in `functional.approx_kl`.
        reduction: reduction over the elements of a minibatch, "mean" or "sum" (which grows with the minibatch).
        check: "minibatch" or "epoch".
        name: key in `metrics`.

    Place: after the sampler.

    Example:
        >>> import ppo_parts as pp
        >>> cleanrl = pp.kl_early_stop(.01, check="epoch")
        >>> stable_baselines3 = pp.kl_early_stop(1.5 * .01)

    Reference: Dossa et al. 2021, An Empirical Investigation of Early Stopping Optimizations in PPO, IEEE Access.
    """
    where = "kl_early_stop"
    numbers = check_numbers(where, target_kl=target_kl)

    def update(batch: Batch, context: Context, target_kl: Any) -> Batch:
        divergence = functional.approx_kl(batch.current_log_ratio(), estimator=estimator, mask=batch.mask)
        reduce = masked_mean if reduction == "mean" else masked_sum
        judged = reduce(divergence, batch.mask)
        batch = batch.add_metrics(**{name: judged})
        return _stop_if_above(target_kl, judged, batch, context, check)

    reads = ("current.log_prob", "log_prob", "mask")
    return stateless(
        update, name=where, provides=("stop",), reads=reads, place="after_sampler", elementwise=True, numbers=numbers
    )


@checked
def early_stop(metric: str, limit: Numeric, *, check: Literal["minibatch", "epoch"] = "minibatch") -> Part:
    """Stop the gradient steps of this phase in this update when a metric exceeds a limit or is NaN.

    Args:
        metric: name of a minibatch metric that an earlier part adds, such as "clip_fraction". The learner's own
            metrics, such as "grad_norm", do not exist yet when parts run.
        limit: any number.
        check: "minibatch" or "epoch", as in `kl_early_stop`.

    Place: after the sampler and the part that adds the metric.

    Example:
        >>> import ppo_parts as pp
        >>> pipeline = pp.chain(
        ...     pp.full_batch(10), pp.clipped_surrogate(clip_eps=.2), pp.early_stop("clip_fraction", .3)
        ... )
    """
    numbers = check_numbers("early_stop", limit=limit)

    def update(batch: Batch, context: Context, limit: Any) -> Batch:
        return _stop_if_above(limit, batch.metrics[metric], batch, context, check)

    needed = (f"metrics.{metric}",)
    return stateless(
        update, name="early_stop", requires=needed, provides=("stop",), reads=(), place="after_sampler",
        elementwise=True, numbers=numbers,
    )  # fmt: skip


def _stop_if_above(limit: Array | float, value: Array, batch: Batch, context: Context, check: str) -> Batch:
    """Request a stop if the value is greater than the limit or NaN."""
    exceeds = ~(value <= limit)
    if check == "minibatch":
        return batch.add_stop(discard=exceeds)
    return batch.add_stop(after=exceeds & jnp.equal(context.minibatch, context.num_minibatches - 1))
