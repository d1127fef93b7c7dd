"""Parts for sequences of tokens: rewards and advantages of whole sequences, corrections, and aggregation of losses."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .. import functional
from .._base.checked import Count, checked
from .._base.hyperparameters import Numeric, value_at
from .._core.batch import Batch, field_at, require
from .._core.part import Part, stateless
from ..errors import UserValueError
from ..functional import masked_mean
from ..functional._arguments import DDOF, CorrectionMode, check_order
from ..functional._common import accumulator_dtype, boolean_mask, check_floating, check_same_shape, masked_sum
from ..functional._groups import check_aggregate, check_scale, per_sequence
from .common import check_numbers, is_zero


@checked
def outcome_reward(*, score: str = "score", kl_coef: Numeric = 0.0, reference: str = "reference_log_prob") -> Part:
    """Write `reward` with `functional.outcome_reward`, the score at the last token minus a divergence penalty.

    Args:
        score: name of an entry of `per_segment`, one number per sequence.
        kl_coef: coefficient of the penalty, >= 0; with 0, `reference` is not read.
        reference: name of an entry of `extras`, the log-probabilities of the tokens under the reference policy.

    Place: before the sampler.

    Example:
        >>> import ppo_parts as pp
        >>> part = pp.tokens.outcome_reward(kl_coef=.05)
    """
    numbers = check_numbers("outcome_reward", kl_coef=kl_coef)
    required = [f"per_segment.{score}", *([] if is_zero(kl_coef) else [f"extras.{reference}"])]

    def update(batch: Batch, kl_coef: Any) -> Batch:
        scores, *references = (field_at(batch, path) for path in required)
        logs = dict(zip(("log_prob", "reference_log_prob"), (batch.log_prob, *references), strict=False))
        return batch.replace(reward=functional.outcome_reward(scores, **logs, kl_coef=kl_coef, mask=batch.mask))

    return stateless(
        update, name="outcome_reward", requires=tuple(required), provides=("reward",), reads=("log_prob", "mask"),
        place="before_sampler", needs_time=True, numbers=numbers,
    )  # fmt: skip


@checked
def reward_to_go(*, gamma: Numeric = 1.0) -> Part:
    """Write `advantage` with `functional.reward_to_go`, the sum of this and all later rewards, without a critic.

    REINFORCE++ is `outcome_reward`, this part, and `advantage_normalize` before the sampler.

    Args:
        gamma: discount per unmasked step, in [0, 1].

    Place: before the sampler.

    Example:
        >>> import ppo_parts as pp
        >>> pipeline = pp.chain(
        ...     pp.tokens.outcome_reward(kl_coef=.01), pp.tokens.reward_to_go(), pp.advantage_normalize(ddof=1),
        ... )
    """
    numbers, flags = check_numbers("reward_to_go", gamma=gamma), ("terminated", "truncated", "mask")

    def update(batch: Batch, gamma: Any) -> Batch:
        given = {name: getattr(batch, name) for name in flags}
        return batch.replace(advantage=functional.reward_to_go(batch.reward, **given, gamma=gamma))

    return stateless(
        update, name="reward_to_go", requires=("reward",), provides=("advantage",), reads=flags, place="before_sampler",
        needs_time=True, numbers=numbers,
    )  # fmt: skip


@checked
def group_advantage(
    *,
    group: str | Count = "group",
    score: str | None = None,
    baseline: functional.Baseline | Literal["given"] = "mean",
    scale: functional.Scale | None = "group",
    ddof: int = 1,
    eps: Numeric = 1e-6,
) -> Part:
    """Write `advantage`, which compares the reward of a sequence with its group and is the same for all its steps.

    `functional.group_advantage` has the settings of GRPO, Dr.GRPO, RLOO, OPO and ReMax. Metric: `zero_advantage`, the
    fraction of sequences whose advantage is 0, which contribute nothing.

    Args:
        group: name of an entry of `per_segment`, integers in [0, N) that say which segments form a group; or the
            group size, if groups are neighboring segments.
        score: name of an entry of `per_segment`, one number per sequence; None means the sum of the unmasked rewards.
        baseline: a name as in `functional.group_advantage`, or "given" for the entry "baseline" of `per_segment`.
        scale, ddof, eps: as in `functional.group_advantage`.

    Place: before the sampler, so that a sampler may separate the segments of a group.

    Example:
        >>> import ppo_parts as pp
        >>> grpo = pp.chain(
        ...     pp.tokens.group_advantage(group=8), pp.segment_minibatches(4),
        ...     pp.clipped_surrogate(clip_eps=.2), pp.tokens.aggregate("policy", by="sequence_mean"),
        ... )
    """
    where = "group_advantage"
    size = None if isinstance(group, str) else group
    DDOF.check(where, "ddof", ddof)
    check_scale(where, baseline, scale)

    def check_group(size: int) -> None:
        if size == 1 and baseline not in ("none", "given"):
            raise UserValueError(
                "must name groups of several segments, because one that is compared with itself has an advantage of 0, "
                f'got {group!r}: sample several for each prompt, or use baseline="none" or "given" with scale=None',
                where=where,
                argument="group",
            )

    check_group(size or 2)

    def update(batch: Batch, eps: Any) -> Batch:
        keep = boolean_mask(batch.mask, batch.log_prob)
        if keep.ndim != 2:
            raise UserValueError(f"{where}: the batch must have the axes [T, N] only, got shape {keep.shape}")
        if size is None:
            check_group(keep.shape[1])
        elif (segments := keep.shape[1] // batch.shards) % size:
            raise UserValueError(
                f"must divide the {segments} segments of {'this batch' if batch.shards == 1 else 'a shard'}, got "
                f"{size}: use another number of sequences, or name an entry of per_segment",
                where=where,
                argument="group",
            )
        if score is None:
            require(batch, where, reward='give it, or score="score" with the entry "score" of per_segment')
            reward = masked_sum(batch.reward.astype(accumulator_dtype(batch.reward)), batch.mask, axis=0)
        else:
            reward = check_floating(where, f"per_segment[{score!r}]", field_at(batch, f"per_segment.{score}"))
        counts = jnp.any(keep, axis=0)
        base: Any = field_at(batch, "per_segment.baseline") if baseline == "given" else baseline
        advantage = functional.group_advantage(
            reward,
            field_at(batch, f"per_segment.{group}") if size is None else jnp.arange(len(reward)) // size,
            baseline=base,
            scale=scale,
            ddof=ddof,
            eps=eps,
            length=jnp.sum(keep, axis=0) if baseline == "length_weighted" else None,
            mask=counts,
        )
        batch = batch.add_metrics(zero_advantage=masked_mean((advantage == 0).astype(advantage.dtype), counts))
        return batch.replace(advantage=jnp.where(keep, advantage, 0).astype(batch.log_prob.dtype))

    entries = (group if size is None else None, score, "baseline" if baseline == "given" else None)
    requires = tuple(f"per_segment.{entry}" for entry in entries if entry is not None)
    reads = ("log_prob", "mask", *["reward"] * (score is None))
    return stateless(
        update, name=where, requires=requires, provides=("advantage",), reads=reads, place="before_sampler",
        needs_time=True, numbers=check_numbers(where, eps=eps),
    )  # fmt: skip


@checked
def aggregate(
    loss: str = "policy", *, by: functional.Aggregation = "sequence_mean", length: Numeric | None = None
) -> Part:
    """Choose how token losses are reduced to one number, as `functional.aggregate` does.

    The metric of the loss, such as `policy_loss`, stays the mean over all tokens.

    Args:
        loss: key of `losses`, a loss per element.
        by, length: as in `functional.aggregate`. "token_mean" changes nothing.

    Place: after that loss, and after a sampler that keeps time (`segment_minibatches`, `full_batch`).

    Example:
        >>> import ppo_parts as pp
        >>> dr_grpo = pp.tokens.aggregate("policy", by="sequence_sum", length=1024)
    """
    where = "aggregate"
    check_aggregate(where, {"by": by, "length": length})

    def update(batch: Batch, length: Any) -> Batch:
        if loss not in batch.losses:
            there = ", ".join(batch.losses) or "none yet (put it after the losses)"
            raise UserValueError(f"{where}: no loss is named {loss!r}; the losses are: {there}")
        tokens = batch.losses[loss]
        if by == "token_mean":
            return batch
        if batch.log_prob.ndim != 2:
            raise UserValueError(f"{where}: the batch must have the axes [T, N] only, got shape {batch.log_prob.shape}")
        if jnp.shape(tokens) != jnp.shape(batch.log_prob):
            raise UserValueError(f"{where}: the loss {loss!r} is not per element: it has shape {jnp.shape(tokens)}")
        reduced = per_sequence(tokens, by, mask=batch.mask, length=length).astype(tokens.dtype)
        others = {name: x for name, x in batch.losses.items() if name != loss}
        return batch.replace(losses=others).add_loss(loss, reduced, per="segment")

    return stateless(
        update, name=where, requires=("losses",), provides=() if by == "token_mean" else ("losses",), reads=("mask",),
        place="after_sampler", needs_time=by != "token_mean", policy_loss=False,
        numbers=check_numbers(where, length=length),
    )  # fmt: skip


@checked
def importance_correction(
    *,
    high: Numeric,
    low: Numeric = 0.0,
    mode: CorrectionMode = "truncate",
    level: Literal["token", "sequence"] = "token",
    reference: str = "sampler_log_prob",
    name: str = "correction",
) -> Part:
    r"""Multiply the advantage by `functional.importance_sampling_weight` of :math:`\pi_{old} / \pi_{sampler}`.

    Use it if `batch.log_prob`, to which the losses refer, is not from the policy that sampled the actions, for example
    because the inference engine rounds differently. Metrics: `<name>_weight`, the mean weight, and `<name>_fraction`,
    the share of elements whose ratio was outside [low, high].

    Args:
        high, low, mode: as in `functional.importance_sampling_weight`.
        level: "token" uses the ratio of each step, and "sequence" the product over the unmasked steps of its segment.
        reference: key in `extras` of the log-probabilities at the time of sampling, `[T, N]`.
        name: prefix of the metrics.

    Place: after the parts that write the advantage and before the policy loss; before or after the sampler, which must
    keep the time axis for "sequence".

    Example:
        >>> import ppo_parts as pp
        >>> truncated = pp.tokens.importance_correction(high=2.)
        >>> masked = pp.tokens.importance_correction(low=.5, high=2., mode="mask", level="sequence")
    """
    where = "importance_correction"
    numbers = check_numbers(where, low=low, high=high)
    first = {name: value_at(x, np.int32(0)) for name, x in numbers.items()}
    check_order(where, first, "low", "high")

    def update(batch: Batch, low: Any, high: Any) -> Batch:
        check_same_shape(where, advantage=batch.advantage, log_prob=batch.log_prob)
        log_ratio = jax.lax.stop_gradient(batch.log_prob - batch.extras[reference])
        if level == "sequence":
            log_ratio = functional.sequence_log_ratio(log_ratio, reduction="sum", mask=batch.mask)
        weight = functional.importance_sampling_weight(log_ratio, high=high, low=low, mode=mode, mask=batch.mask)
        ratio = jnp.exp(log_ratio)
        outside = (ratio > high) | (ratio < low)
        measured = {"weight": weight, "fraction": outside.astype(weight.dtype)}
        batch = batch.add_metrics(**{f"{name}_{key}": masked_mean(x, batch.mask) for key, x in measured.items()})
        advantage = jnp.where(boolean_mask(batch.mask, batch.advantage), batch.advantage, 0)
        return batch.replace(advantage=(weight * advantage).astype(advantage.dtype))

    return stateless(
        update, name=where, requires=("advantage", f"extras.{reference}"), provides=("advantage",),
        reads=("log_prob", "mask"), needs_time=level == "sequence", numbers=numbers,
    )  # fmt: skip
