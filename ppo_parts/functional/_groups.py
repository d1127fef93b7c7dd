"""Advantages and rewards of whole sequences, and the aggregation of token losses into one number."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ._arguments import (
    Aggregation,
    AnyBaseline,
    AnyFloats,
    Ddof,
    Fixed,
    Floats,
    Groups,
    Scale,
    Single,
    array_function,
    check_below,
)
from ._common import Array, accumulator_dtype, boolean_mask, known_values, masked_sum, zero_masked
from ._errors import ShapeError, UserValueError
from ._statistics import masked_mean


def check_scale(where: str, baseline: Any, scale: Any) -> None:
    """Raise if the advantage of equal rewards could be divided by a standard deviation of 0."""
    if scale == "group" and (not isinstance(baseline, str) or baseline in ("none", "given")):
        says = 'must be None or "batch" with this baseline, because a group of equal rewards has a deviation of 0'
        raise UserValueError(f'{says}, got "group"', where=where, argument="scale")


def _check_groups(where: str, values: dict[str, Any]) -> None:
    """Check the arguments of `group_advantage` together."""
    length, mask, baseline = values["length"], values["mask"], values["baseline"]
    check_scale(where, baseline, values["scale"])
    if (length is not None) != (isinstance(baseline, str) and baseline == "length_weighted"):
        raise UserValueError(f'{where}: length, in tokens, must be given if and only if baseline="length_weighted"')
    counts, lengths = known_values(True if mask is None else mask), None if length is None else known_values(length)
    if counts is not None and lengths is not None and (negative := (lengths < 0) & counts.astype(bool)).any():
        raise UserValueError(f"{where}: length must not be negative, got {lengths[negative][0]}")
    remedy = ": number the groups by np.unique(group, return_inverse=True)[1]"
    check_below(where, "group", values["group"], jnp.shape(values["reward"])[0], mask=mask, remedy=remedy)


@array_function(axes={"reward": "[N] (one number per sequence)"}, also=_check_groups)
def group_advantage(
    reward: Fixed,
    group: Groups,
    *,
    baseline: AnyBaseline = "mean",
    scale: Scale | None = "group",
    ddof: Ddof = 1,
    eps: Single = 1e-6,
    length: Array | None = None,
    mask: Array | None = None,
) -> Array:
    r"""Compare each sequence's reward with the rewards of its group (one prompt's samples). Gradients are stopped.

    .. math:: A_n = \frac{R_n - b_n}{\sigma + \epsilon}

    | algorithm | `baseline` | `scale` |
    |---|---|---|
    | GRPO | "mean": the mean of the group | "group": its standard deviation |
    | Dr.GRPO, GPG | "mean" | None: :math:`\sigma + \epsilon = 1` |
    | RLOO | "leave_one_out": the mean of the others | None |
    | OPO | "length_weighted": :math:`\sum_m l_m R_m / \sum_m l_m` | None |
    | ReMax | `[N]`: for example the reward of the greedy answer | None |
    | Lite PPO | "mean" | "batch": the standard deviation of all rewards |
    | REINFORCE++ baseline | "mean" | None, and then `advantage_normalize` over all tokens |

    If all rewards of a group are equal, or it has one element, its advantage is 0 (except with "none" or your own
    baseline, which need another `scale` than "group"). The advantage is NaN if the variance overflows, or if the group
    is traced and out of range.

    Args:
        reward: `[N]`, one number per sequence, floating.
        group: `[N]`, integers in [0, N); elements with the same number form a group.
        baseline: a name in the table, "none" (0), or an array `[N]`.
        scale: "group", "batch" or None.
        ddof: number subtracted from the count in the variance, 1 (as in verl, TRL and Tunix) or 0.
        eps: added to the standard deviation, in reward units (1e-6 in verl and Tunix, 1e-4 in TRL).
        length: `[N]`, number of tokens of each sequence, for "length_weighted".
        mask: None, or `[N]` of 0/1.

    Example:
        >>> reward, group = jnp.array([1., 0., 5., 3.]), jnp.array([0, 0, 1, 1])
        >>> group_advantage(reward, group, scale=None).tolist()
        [0.5, -0.5, 1.0, -1.0]
        >>> group_advantage(reward, group, baseline="leave_one_out", scale=None).tolist()
        [1.0, -1.0, 2.0, -2.0]

    Reference: GRPO: arXiv:2402.03300. Dr.GRPO: arXiv:2503.20783. RLOO: arXiv:2402.14740. OPO: arXiv:2505.23585. ReMax:
    arXiv:2310.10505. Lite PPO: arXiv:2508.08221. REINFORCE++: arXiv:2501.03262.
    """
    keep, size = boolean_mask(mask, reward).astype(reward.dtype), len(reward)

    def total(x: Array) -> Array:
        """Return, for each element, the sum over its group."""
        return jax.ops.segment_sum(x * keep, group, size)[group]

    count = total(keep)
    # Subtract one reward of the group first, so that equal rewards have an advantage of exactly 0.
    reference = jax.ops.segment_max(jnp.where(keep > 0, reward, -jnp.inf), group, size)[group]
    shifted = jnp.where(keep > 0, reward - reference, 0)
    mean = total(shifted) / jnp.maximum(count, 1)
    if not isinstance(baseline, str):
        advantage = reward - zero_masked(mask, jax.lax.stop_gradient(baseline))[0].astype(reward.dtype)
    elif baseline == "none":
        advantage = reward
    elif baseline == "length_weighted":
        lengths = zero_masked(mask, jax.lax.stop_gradient(jnp.asarray(length, reward.dtype)))[0]
        weight = total(lengths)
        advantage = shifted - total(lengths * shifted) / jnp.where(weight == 0, 1, weight)
        advantage = jnp.where(weight == 0, 0, advantage)  # the group has no tokens
    else:
        advantage = (shifted - mean) * keep
        if baseline == "leave_one_out":
            advantage = advantage * count / jnp.maximum(count - 1, 1)
    if scale == "group":
        variance = total(jnp.square(shifted - mean)) / jnp.maximum(count - ddof, 1)
    elif scale == "batch":
        everything = jnp.sum(keep)
        offset = (reward - jnp.sum(reward) / jnp.maximum(everything, 1)) * keep
        variance = jnp.sum(jnp.square(offset)) / jnp.maximum(everything - ddof, 1)
    if scale is not None:
        deviation = jnp.sqrt(variance) + eps
        # If the variance overflows, the advantage must not become 0, as if the rewards were equal.
        advantage = advantage / jnp.where(deviation == 0, 1, jnp.where(deviation == jnp.inf, jnp.nan, deviation))
    outside = (group < 0) | (group >= size)
    return jnp.where(keep == 0, 0, jnp.where(outside, jnp.nan, advantage))


def _check_outcome(where: str, values: dict[str, Any]) -> None:
    coef, log_prob, score = values["kl_coef"], jnp.shape(values["log_prob"]), jnp.shape(values["score"])
    if log_prob[1:] != score:
        raise ShapeError(
            f"{where}: score must have the shape of log_prob without axis 0, the tokens; got score {score} and "
            f"log_prob {log_prob}"
        )
    if values["reference_log_prob"] is None and ((known := known_values(coef)) is None or known):
        raise UserValueError(f"{where}: kl_coef={coef!r} needs reference_log_prob, of the same tokens")


@array_function(like="log_prob", along_time=True, also=_check_outcome)
def outcome_reward(
    score: AnyFloats,
    *,
    log_prob: Fixed,
    reference_log_prob: Fixed | None = None,
    kl_coef: Single = 0.0,
    mask: Array | None = None,
) -> Array:
    r"""Turn the score of a sequence into token rewards, minus a divergence penalty. Gradients are stopped.

    .. math:: r_t = [\,t = \text{last}\,]\, R - \text{coef}\left(\log\pi(a_t) - \log\pi_{ref}(a_t)\right)

    The last unmasked token receives the score. The difference of log-probabilities is the estimate k1 of
    :math:`\mathrm{KL}(\pi \| \pi_{ref})`.

    Args:
        score: `[...]`, one number per sequence, floating, in reward units.
        log_prob: `[T, ...]`, log-probabilities of the tokens under the policy that chose them, in nats; the rewards
            have their dtype.
        reference_log_prob: `[T, ...]`, log-probabilities under the reference policy; None means no penalty.
        kl_coef: coefficient, >= 0, in reward units per nat; if it is above 0, `reference_log_prob` must be given.
        mask: None, or `[T, ...]` of 0/1.

    Example:
        >>> log_prob, reference = jnp.array([-1., -1., -1.]), jnp.array([-1.5, -1., 0.])
        >>> mask = jnp.array([1, 1, 0])
        >>> penalty = {"reference_log_prob": reference, "kl_coef": .5}
        >>> outcome_reward(jnp.array(2.), log_prob=log_prob, mask=mask, **penalty).tolist()
        [-0.25, 2.0, 0.0]

    Reference: Ziegler et al. 2019, arXiv:1909.08593, eq. 2; Hu 2025, REINFORCE++, arXiv:2501.03262.
    """
    keep = boolean_mask(mask, log_prob)
    later = jnp.cumsum(keep[::-1], axis=0)[::-1]  # number of unmasked tokens from here to the end
    outcome = jax.lax.stop_gradient(jnp.asarray(score, log_prob.dtype))[None]
    reward = jnp.where(keep & (later == 1), outcome, 0)
    if reference_log_prob is not None:  # log-probabilities may be infinite where the coefficient is 0
        reward -= jnp.where(kl_coef == 0, 0, kl_coef * (log_prob - reference_log_prob))
    return jnp.where(keep, reward, 0)


def check_aggregate(where: str, values: dict[str, Any]) -> None:
    if values["length"] is not None and (by := values["by"]) != "sequence_sum":
        raise UserValueError(f'{where}: length divides the sums of by="sequence_sum"; leave it out with by={by!r}')


@array_function(along_time=True, also=check_aggregate)
def aggregate(
    loss: Floats, *, by: Aggregation = "token_mean", length: Single | None = None, mask: Array | None = None
) -> Array:
    r"""Reduce token losses to one number. Gradients flow to `loss`.

    | `by` | value | used by |
    |---|---|---|
    | "token_mean" | :math:`\sum_{tn} m L / \sum_{tn} m` | DAPO |
    | "sequence_mean" | mean over sequences of :math:`\sum_t m L / \sum_t m` | GRPO, GSPO, SAPO |
    | "sequence_sum" | mean over sequences of :math:`\sum_t m L` | RLOO |
    | "sequence_sum" with `length` | mean over sequences of :math:`\sum_t m L / \text{length}` | Dr.GRPO |

    A mean over sequences covers those with an unmasked token; if there are none, the result is 0.

    Args:
        loss: `[T, ...]`, one number per token; axis 0 runs over the tokens of a sequence.
        by: a name in the table.
        length: None, or the constant by which the sums of "sequence_sum" are divided, > 0, such as the largest length.
        mask: None, or `[T, ...]` of 0/1.

    Example:
        >>> loss, mask = jnp.array([[1., 4.], [3., 0.]]), jnp.array([[1, 1], [1, 0]])  # two tokens, and one
        >>> ways = ("token_mean", "sequence_mean", "sequence_sum")
        >>> [round(float(aggregate(loss, by=by, mask=mask)), 4) for by in ways]
        [2.6667, 3.0, 4.0]

    Reference: Yu et al. 2025, DAPO, arXiv:2503.14476, section 3.3; Liu et al. 2025, Dr.GRPO, arXiv:2503.20783.
    """
    if by == "token_mean":
        return masked_mean(loss, mask)
    sequences = per_sequence(loss, by, length, mask)
    return masked_mean(sequences, None if mask is None else jnp.any(boolean_mask(mask, loss), axis=0))


def per_sequence(loss: Array, by: str, length: Any, mask: Array | None) -> Array:
    """Return one loss per sequence in the accumulator dtype; the caller averages them over the sequences."""
    wide = jnp.asarray(loss).astype(accumulator_dtype(loss))
    if by == "sequence_mean":
        return masked_mean(wide, mask, axis=0)
    return masked_sum(wide, mask, axis=0) / (1 if length is None else jnp.asarray(length, wide.dtype))
