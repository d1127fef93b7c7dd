"""Parts for sequences of tokens: rewards and advantages of whole sequences, losses that compare tokens, aggregation."""

from __future__ import annotations

from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from .. import functional
from .._base.errors import UserTypeError, UserValueError
from .._base.hyperparameters import Numeric, at, check_choice, check_count, check_ddof, check_number
from .._core.types import Array, Batch, Context, Part, field_at, stateless
from ..functional import masked_mean
from ..functional._common import known_values
from ..functional._groups import per_sequence
from .losses import named_loss, policy_part


def outcome_reward(*, score: str = "score", kl_coef: Numeric = 0.0, reference: str = "reference_log_prob") -> Part:
    """Write `reward`: the score at the last token, minus a penalty for leaving the reference policy.

    See `functional.outcome_reward` for the equation. The penalty estimates KL(policy that acted ‖ reference).

    Args:
        score: name of an entry of `per_segment`, one number per sequence.
        kl_coef: coefficient of the penalty, >= 0; a schedule counts learner updates. 0: `reference` is not read.
        reference: name of an entry of `extras`, the log-probabilities of the tokens under the reference policy.

    Place: before the sampler.

    Example:
        >>> import ppo_parts as pp
        >>> part = pp.tokens.outcome_reward(kl_coef=.05)

    Reference: Ziegler et al. 2019, arXiv:1909.08593, eq. 2.
    """
    kl_coef = check_number("outcome_reward", "kl_coef", kl_coef, 0)
    free = not callable(kl_coef) and not isinstance(kl_coef, jax.Array) and kl_coef == 0

    def update(batch: Batch, context: Context) -> Batch:
        coef = at(kl_coef, context.step)
        reward = functional.outcome_reward(
            field_at(batch, f"per_segment.{score}"),
            log_prob=batch.log_prob,
            reference_log_prob=None if free else field_at(batch, f"extras.{reference}"),
            kl_coef=coef,
            mask=batch.mask,
        )
        return batch.replace(reward=reward)

    return stateless(
        update,
        name="outcome_reward",
        requires=(f"per_segment.{score}", *(() if free else (f"extras.{reference}",))),
        provides=("reward",),
        reads=("log_prob", "mask"),
        place="before_sampler",
        needs_time=True,
        numbers=(kl_coef,),
    )


def reward_to_go(*, gamma: Numeric = 1.0) -> Part:
    """Write `advantage`: the sum of this reward and all later ones, without a critic; see `functional.reward_to_go`.

    REINFORCE++ is `outcome_reward`, this part, and `advantage_normalize` before the sampler.

    Args:
        gamma: discount per unmasked step, in [0, 1]; a schedule counts learner updates.

    Place: before the sampler.

    Example:
        >>> import ppo_parts as pp
        >>> pipeline = pp.chain(
        ...     pp.tokens.outcome_reward(kl_coef=.01), pp.tokens.reward_to_go(), pp.advantage_normalize(ddof=1),
        ... )

    Reference: Williams 1992; REINFORCE++: Hu 2025, arXiv:2501.03262.
    """
    gamma = check_number("reward_to_go", "gamma", gamma, 0, 1)

    def update(batch: Batch, context: Context) -> Batch:
        discount = at(gamma, context.step)
        flags = {"terminated": batch.terminated, "truncated": batch.truncated, "mask": batch.mask}
        advantage = functional.reward_to_go(batch.reward, gamma=discount, **flags)
        return batch.replace(advantage=advantage)

    return stateless(
        update,
        name="reward_to_go",
        requires=("reward",),
        provides=("advantage",),
        reads=("terminated", "truncated", "mask"),
        place="before_sampler",
        needs_time=True,
        numbers=(gamma,),
    )


def group_advantage(
    *,
    group: str | int = "group",
    score: str | None = None,
    baseline: functional.Baseline | str = "mean",
    scale: functional.Scale | None = "group",
    ddof: int = 1,
    eps: Numeric = 1e-6,
) -> Part:
    """Write `advantage`: the reward of each sequence compared with those of its group, the same for all its steps.

    See `functional.group_advantage` for the equation, and for the settings of GRPO, Dr.GRPO, RLOO, OPO and ReMax.
    Metric: `zero_advantage`, the fraction of the sequences whose advantage is 0, so that they contribute nothing.

    Args:
        group: name of an entry of `per_segment`, whole numbers in [0, N) that say which segments form a group; or the
            size of the groups, which are then neighboring segments.
        score: name of an entry of `per_segment`, one number per sequence; None: the sum of the unmasked rewards.
        baseline: "mean", "leave_one_out", "length_weighted", "none", or "given": the entry "baseline" of `per_segment`.
        scale: "group", "batch" or None: the standard deviation to divide by.
        ddof: 1 (sample) or 0 (population).
        eps: added to the standard deviation, >= 0; a schedule counts learner updates.

    Place: before the sampler, so that a sampler may separate the segments of a group.

    Example:
        >>> import ppo_parts as pp
        >>> grpo = pp.chain(
        ...     pp.tokens.group_advantage(group=8), pp.segment_minibatches(4),
        ...     pp.clipped_surrogate(clip_eps=.2), pp.tokens.aggregate("policy", by="sequence_mean"),
        ... )

    Reference: Shao et al. 2024, arXiv:2402.03300, section 4.1.2; see `functional.group_advantage`.
    """
    where = "group_advantage"
    size = group if isinstance(group, int) and not isinstance(group, bool) else None
    if size is None and not isinstance(group, str):
        raise UserTypeError(f"{where}: group must be the name of an entry of per_segment or a size, got {group!r}")
    if size is not None:
        check_count(where, "group", size)
    check_choice(where, "baseline", baseline, (*get_args(functional.Baseline), "given"))
    check_choice(where, "scale", scale, (*get_args(functional.Scale), None))
    check_ddof(where, ddof)
    eps = check_number(where, "eps", eps, 0)

    def check_group(size: int) -> None:
        if size == 1 and (scale == "group" or baseline not in ("none", "given")):
            raise UserValueError(
                "must name groups of several segments, because one that is compared with itself has an advantage of 0, "
                f'got {group!r}: sample several for each prompt, or use baseline="none" or "given" with scale=None',
                where=where,
                argument="group",
            )

    check_group(size or 2)

    def update(batch: Batch, context: Context) -> Batch:
        keep = jnp.ones_like(batch.log_prob, bool) if batch.mask is None else batch.mask.astype(bool)
        if keep.ndim != 2:
            raise UserValueError(f"{where}: the batch must have the axes [T, N] only, got shape {keep.shape}")
        check_group(keep.shape[1])
        reward = _scores(where, batch, score, keep)
        some = jnp.any(keep, axis=0)
        number_at = at(eps, context.step)
        base: Any = field_at(batch, "per_segment.baseline") if baseline == "given" else baseline
        advantage = functional.group_advantage(
            reward,
            field_at(batch, f"per_segment.{group}") if size is None else _neighbors(where, reward, size),
            baseline=base,
            scale=scale,
            ddof=ddof,
            eps=number_at,
            length=jnp.sum(keep, axis=0, dtype=reward.dtype),
            mask=some,
        )
        batch = batch.add_metrics(zero_advantage=masked_mean((advantage == 0).astype(advantage.dtype), some))
        whole = jnp.where(keep, advantage, 0).astype(batch.log_prob.dtype)
        return batch.replace(advantage=whole)

    entries = [name for name in (group if size is None else None, score) if name is not None]
    entries += ["baseline"] * (baseline == "given")
    return stateless(
        update,
        name=where,
        requires=(*(f"per_segment.{name}" for name in entries), *(("reward",) if score is None else ())),
        provides=("advantage",),
        reads=("log_prob", "mask"),
        place="before_sampler",
        needs_time=True,
        numbers=(eps,),
    )


def aggregate(
    loss: str = "policy", *, by: functional.Aggregation = "sequence_mean", length: Numeric | None = None
) -> Part:
    """Choose how the losses of tokens become one number; see `functional.aggregate` for the methods that use each way.

    Without this part a loss is averaged over all unmasked tokens of the minibatch ("token_mean").

    Args:
        loss: key of `losses`, a loss per element.
        by: "token_mean" (no change), "sequence_mean" or "sequence_sum".
        length: the constant that divides the sums of "sequence_sum", > 0; a schedule counts learner updates.

    Place: after that loss, and after a sampler that keeps time (`segment_minibatches`, `full_batch`).

    Example:
        >>> import ppo_parts as pp
        >>> dr_grpo = pp.chain(
        ...     pp.tokens.group_advantage(group=8, scale=None), pp.segment_minibatches(4),
        ...     pp.clipped_surrogate(clip_eps=.2), pp.tokens.aggregate("policy", by="sequence_sum", length=1024),
        ... )

    Reference: Yu et al. 2025, DAPO, arXiv:2503.14476, section 3.3; Liu et al. 2025, Dr.GRPO, arXiv:2503.20783.
    """
    where = "aggregate"
    check_choice(where, "by", by, get_args(functional.Aggregation))
    if not isinstance(loss, str):
        raise UserTypeError(f'{where}: name the loss, e.g. aggregate("policy"), got {loss!r}')
    if length is not None and by != "sequence_sum":
        raise UserValueError(f'{where}: length divides the sums of by="sequence_sum"; leave it out with by={by!r}')
    if length is not None:
        length = check_number(where, "length", length, 0, open_low=True)

    def update(batch: Batch, context: Context) -> Batch:
        tokens = named_loss(where, batch, loss)
        if by == "token_mean":
            return batch.replace(losses=dict(batch.losses))
        losses = {name: x for name, x in batch.losses.items() if name != loss}
        if jnp.shape(tokens) != jnp.shape(batch.log_prob):
            raise UserValueError(f"{where}: the loss {loss!r} is not per element: it has shape {jnp.shape(tokens)}")
        now = None if length is None else at(length, context.step)
        reduced = per_sequence(tokens, by, now, batch.mask).astype(tokens.dtype)
        return batch.replace(losses=losses).add_loss(loss, reduced, per="segment")

    return stateless(
        update,
        name=where,
        requires=("losses",),
        provides=("losses",),
        reads=("mask",),
        place="after_sampler",
        needs_time=by != "token_mean",
        numbers=(length,),
    )


def clip_cov(
    *,
    clip_eps: Numeric,
    clip_eps_high: Numeric | None = None,
    fraction: Numeric = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    name: str = "policy",
) -> Part:
    """Add the clipped surrogate without a few tokens of high covariance as the loss `name`; see `functional.clip_cov`.

    The means and the draw are over the minibatch. Metric: `<name>_loss`.

    Args:
        clip_eps: clip range, > 0; a schedule counts learner updates (so does that of `fraction`).
        clip_eps_high: clip range above 1; None: `clip_eps`.
        fraction: fraction of the tokens to drop, in [0, 1].
        cov_low, cov_high: the range of covariances from which tokens are drawn.
        name: key in `losses`.

    Place: after the sampler, and after the parts that change the advantage.

    Example:
        >>> import ppo_parts as pp
        >>> part = pp.tokens.clip_cov(clip_eps=.2)

    Reference: Cui et al. 2025, arXiv:2505.22617, Clip-Cov.
    """
    clip_eps = check_number("clip_cov", "clip_eps", clip_eps, 0, open_low=True)
    if clip_eps_high is not None:
        clip_eps_high = check_number("clip_cov", "clip_eps_high", clip_eps_high, 0, open_low=True)
    fraction = check_number("clip_cov", "fraction", fraction, 0, 1)
    for argument, value in {"cov_low": cov_low, "cov_high": cov_high}.items():
        check_number("clip_cov", argument, value, -np.inf, schedule=False)
    known = known_values(cov_low), known_values(cov_high)
    if known[0] is not None and known[1] is not None and not known[0] < known[1]:
        raise UserValueError(f"clip_cov: cov_low must be less than cov_high, got {cov_low!r} and {cov_high!r}")

    def loss(batch: Batch, context: Context) -> Array:
        below, part = at(clip_eps, context.step), at(fraction, context.step)
        above = None if clip_eps_high is None else at(clip_eps_high, context.step)
        return functional.clip_cov(
            batch.current_log_ratio(),
            batch.advantage,
            batch.current.log_prob,
            key=context.key,
            clip_eps=below,
            clip_eps_high=above,
            fraction=part,
            cov_low=cov_low,
            cov_high=cov_high,
            mask=batch.mask,
        )

    return policy_part("clip_cov", name, loss, numbers=(clip_eps, clip_eps_high, fraction))


def kl_cov(*, fraction: Numeric = 2e-4, coef: Numeric = 1.0, name: str = "policy") -> Part:
    """Add the surrogate with a penalty on high-covariance tokens as the loss `name`; see `functional.kl_cov`.

    The tokens of the minibatch are compared with each other. Metric: `<name>_loss`.

    Args:
        fraction: fraction of the tokens to penalize, in [0, 1]; a schedule counts learner updates.
        coef: coefficient of the penalty, >= 0; a schedule counts learner updates.
        name: key in `losses`.

    Place: after the sampler, and after the parts that change the advantage.

    Example:
        >>> import ppo_parts as pp
        >>> part = pp.tokens.kl_cov(fraction=2e-3)

    Reference: Cui et al. 2025, arXiv:2505.22617, KL-Cov.
    """
    fraction = check_number("kl_cov", "fraction", fraction, 0, 1)
    coef = check_number("kl_cov", "coef", coef, 0)

    def loss(batch: Batch, context: Context) -> Array:
        part, scale = at(fraction, context.step), at(coef, context.step)
        return functional.kl_cov(
            batch.current_log_ratio(),
            batch.advantage,
            batch.current.log_prob,
            fraction=part,
            coef=scale,
            mask=batch.mask,
        )

    return policy_part("kl_cov", name, loss, numbers=(fraction, coef))


def _scores(where: str, batch: Batch, score: str | None, keep: Array) -> Array:
    """Return one number per segment: the sum of its unmasked rewards, or an entry of `per_segment`."""
    if score is None:
        return jnp.sum(jnp.where(keep, batch.reward, 0), axis=0)
    return field_at(batch, f"per_segment.{score}")


def _neighbors(where: str, reward: Array, size: int) -> Array:
    """Return the group of each segment, where neighboring segments form groups of equal size."""
    if reward.shape[0] % size:
        raise UserValueError(
            f"must divide the {reward.shape[0]} segments of this batch, got {size}: use another num_envs, or name an "
            "entry of per_segment",
            where=where,
            argument="group",
        )
    return jnp.arange(reward.shape[0]) // size
