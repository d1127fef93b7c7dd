"""Policy losses per token for sequences of tokens; `clip_cov` and `kl_cov` compare all tokens of the batch."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ._arguments import Fixed, Floats, Key, Level, Reduction, Single, array_function, check_order
from ._common import Array, Number, boolean_mask
from ._policy_losses import clip_bounds, clipped_surrogate, importance_weighted_surrogate, outside_clip_range
from ._statistics import masked_mean


@array_function()
def policy_gradient_loss(log_ratio: Floats, advantage: Fixed, *, mask: Array | None = None) -> Array:
    r"""Compute the REINFORCE loss per element. Gradients flow to `log_ratio`; `advantage` is a constant.

    .. math:: L_i = -A_i \left(1 + \ell_i - \mathrm{sg}(\ell_i)\right), \qquad
              \nabla L_i = -A_i \nabla \log\pi(a_i)

    Its value is :math:`-A_i`, so it does not depend on the behavior policy. GPG is this loss with the advantage of
    `group_advantage(..., scale=None)`. Arguments and result are as in `clipped_surrogate`.

    Example:
        >>> jax.grad(lambda l: policy_gradient_loss(l, jnp.array([2.])).sum())(jnp.array([.5])).tolist()
        [-2.0]

    Reference: Williams 1992, Simple Statistical Gradient-Following Algorithms, eq. 4; GPG: arXiv:2504.02546.
    """
    return _weighted_log_prob(advantage, log_ratio)


@array_function()
def cispo(
    log_ratio: Floats,
    advantage: Fixed,
    *,
    clip_eps: Number,
    clip_eps_high: Number | None = None,
    mask: Array | None = None,
) -> Array:
    r"""Compute the REINFORCE loss with a clipped, constant importance weight. Gradients flow to `log_ratio` only.

    .. math:: L_i = -w_i A_i \left(1 + \ell_i - \mathrm{sg}(\ell_i)\right), \qquad
              w_i = \mathrm{sg}\left(\mathrm{clip}(e^{\ell_i}, 1-\epsilon, 1+\epsilon_{high})\right)

    Unlike in PPO, elements outside the clip range keep the gradient of the paper's :math:`-w_i A_i \log\pi(a_i)`.
    MiniMax-M1 has no lower bound, which is `clip_eps=1`. TRL's `epsilon_high` is :math:`1 + \epsilon_{high}`.

    Args:
        clip_eps, clip_eps_high: clip range of the weight below and above 1.
        log_ratio, advantage, mask: as in `clipped_surrogate`, as is the result.

    Example:
        >>> ratio, advantage = jnp.array([1., 4.]), jnp.array([1., 1.])
        >>> jax.grad(lambda l: cispo(l, advantage, clip_eps=1., clip_eps_high=2.).sum())(jnp.log(ratio)).tolist()
        [-1.0, -3.0]

    Reference: MiniMax 2025, MiniMax-M1, arXiv:2506.13585, eqs. 4 and 5.
    """
    weight = jnp.clip(jax.lax.stop_gradient(jnp.exp(log_ratio)), *clip_bounds(clip_eps, clip_eps_high))
    return _weighted_log_prob(weight * advantage, log_ratio)


@array_function()
def sapo(
    log_ratio: Floats, advantage: Fixed, *, tau: Number = 1.0, tau_negative: Number = 1.05, mask: Array | None = None
) -> Array:
    r"""Compute a policy loss with a soft gate in place of the clip. Gradients flow to `log_ratio` only.

    .. math:: L_i = -f_{\tau_i}(r_i) A_i, \qquad f_\tau(r) = \frac{4}{\tau}\,\sigma\left(\tau (r - 1)\right), \qquad
              r_i = e^{\ell_i}, \qquad \tau_i = \tau \text{ if } A_i > 0 \text{ else } \tau_{negative}

    The slope of the gate is 1 at a ratio of 1, and decreases smoothly to 0 on both sides.

    Args:
        tau, tau_negative: temperatures where the advantage is positive and where it is not, > 0; a larger one
            suppresses distant ratios more.
        log_ratio, advantage, mask: as in `clipped_surrogate`, as is the result. Aggregate it with
            `aggregate(..., by="sequence_mean")`, as in the paper.

    Example:
        >>> sapo(jnp.zeros(2), jnp.array([1., -1.]), tau=1., tau_negative=2.).tolist()
        [-2.0, 1.0]

    Reference: Gao et al. 2025, Soft Adaptive Policy Optimization, arXiv:2511.20347.
    """
    tau = jnp.minimum(jnp.where(advantage > 0, tau, tau_negative), math.sqrt(jnp.finfo(log_ratio.dtype).max))  # not inf
    # Beyond this limit, the sigmoid is 1 and its slope is 0, but the ratio may be infinite.
    limited = jnp.minimum(log_ratio, jnp.log1p(200 / tau))
    return -advantage * 4 / tau * jax.nn.sigmoid(tau * jnp.expm1(limited))


@array_function(along_time=True)
def sequence_log_ratio(
    log_ratio: Floats, *, level: Level = "sequence", reduction: Reduction = "mean", mask: Array | None = None
) -> Array:
    r"""Replace each token's log-ratio by its sequence's log-ratio. `level` determines where gradients flow.

    .. math:: s = \frac{1}{\sum_t m_t} \sum_t m_t \ell_t \quad \text{or} \quad s = \sum_t m_t \ell_t

    This turns any loss of a log-ratio into a sequence loss. For example, `gspo` is `clipped_surrogate` of the mean, and
    a truncated sequence weight is `importance_sampling_weight` of the sum.

    Args:
        log_ratio: `[T, ...]`, log pi_current(a) - log pi_behavior(a), in nats; axis 0 runs over the tokens of a
            sequence.
        level: "sequence" lets gradients flow to all tokens of the sequence. "token" gives the same number with the
            gradient of the token, :math:`\mathrm{sg}(s) + \ell_t - \mathrm{sg}(\ell_t)`.
        reduction: "mean" (the log of the geometric mean of the ratios) or "sum" (the log-ratio of the whole sequence).
        mask: None, or `[T, ...]` of 0/1; masked tokens do not count.

    Returns:
        `[T, ...]`, the same number for every unmasked token of a sequence.

    Example:
        >>> sequence_log_ratio(jnp.array([.25, .75, 9.]), mask=jnp.array([1, 1, 0])).tolist()
        [0.5, 0.5, 0.0]

    Reference: Zheng et al. 2025, Group Sequence Policy Optimization, arXiv:2507.18071, eqs. 7 and 14.
    """
    keep = boolean_mask(mask, log_ratio)
    one = _mean_over_tokens(log_ratio, keep) if reduction == "mean" else jnp.sum(log_ratio, axis=0, keepdims=True)
    whole = jnp.broadcast_to(one, log_ratio.shape)
    if level == "token":
        whole = jax.lax.stop_gradient(whole) + (log_ratio - jax.lax.stop_gradient(log_ratio))
    return jnp.where(keep, whole, 0)


@array_function(along_time=True)
def gspo(
    log_ratio: Floats,
    advantage: Fixed,
    *,
    clip_eps: Number,
    clip_eps_high: Number | None = None,
    dual_clip: Number | None = None,
    level: Level = "sequence",
    mask: Array | None = None,
) -> Array:
    r"""Compute the clipped surrogate with the ratios of whole sequences. Gradients flow to `log_ratio` as `level` says.

    .. math:: L_t = -\min\left(s A_t,\ \mathrm{clip}(s, 1-\epsilon, 1+\epsilon_{high}) A_t\right), \qquad
              s = \exp\left(\frac{1}{\sum_u m_u} \sum_u m_u \ell_u\right)

    The loss of a sequence with A < 0 is infinite where its ratio overflows, unless `dual_clip` bounds it.

    Args:
        log_ratio, advantage, dual_clip, mask: as in `clipped_surrogate`, but `[T, ...]`; axis 0 runs over the tokens of
            a sequence. The result is one loss per token. Aggregate it with `aggregate(..., by="sequence_mean")`, as in
            the paper.
        clip_eps, clip_eps_high: clip range of s below and above 1; the paper uses 3e-4 and 4e-4.
        level: as in `sequence_log_ratio`; "token" is GSPO-token.

    Example:
        >>> gspo(jnp.log(jnp.array([1., 4.])), jnp.ones(2), clip_eps=.5).tolist()  # the geometric mean is 2
        [-1.5, -1.5]

    Reference: Zheng et al. 2025, Group Sequence Policy Optimization, arXiv:2507.18071, eqs. 5 to 7, 13 and 14.
    """
    shared = sequence_log_ratio(log_ratio, level=level, mask=mask)
    return clipped_surrogate(shared, advantage, clip_eps=clip_eps, clip_eps_high=clip_eps_high, dual_clip=dual_clip)


@array_function(along_time=True)
def gmpo(
    log_ratio: Floats,
    advantage: Fixed,
    *,
    clip_eps: Number = 0.4,
    clip_eps_high: Number | None = None,
    mask: Array | None = None,
) -> Array:
    r"""Compute the geometric mean of clipped token ratios times the advantage. Gradients flow to `log_ratio` only.

    .. math:: L_t = -\bar A \exp\left(\frac{1}{\sum_u m_u}\sum_u m_u \ell'_u\right), \qquad
              \ell'_u = \begin{cases} \min(\ell_u, \epsilon_{high}) & A_u \ge 0 \\
                                      \max(\ell_u, -\epsilon) & A_u < 0 \end{cases}

    :math:`\bar A` is the mean of the advantage over the unmasked tokens. The loss of a sequence with :math:`\bar A < 0`
    is infinite where the geometric mean overflows.

    Args:
        log_ratio, advantage, mask: as in `gspo`. The result is the sequence's loss at each of its unmasked tokens.
        clip_eps, clip_eps_high: clip range of the *log*-ratio below and above 0, > 0, in nats; None means the same as
            `clip_eps`.

    Example:
        >>> loss = gmpo(jnp.array([-.2, 2.]), jnp.ones(2), clip_eps=.4)  # exp((-.2 + .4) / 2)
        >>> [round(float(l), 4) for l in loss]
        [-1.1052, -1.1052]

    Reference: Zhao et al. 2025, Geometric-Mean Policy Optimization, arXiv:2507.20673.
    """
    keep = boolean_mask(mask, log_ratio)
    high = clip_eps if clip_eps_high is None else clip_eps_high
    clipped = jnp.where(advantage < 0, jnp.maximum(log_ratio, -clip_eps), jnp.minimum(log_ratio, high))
    gain, mean = _mean_over_tokens(advantage, keep), _mean_over_tokens(clipped, keep)
    loss = -gain * jnp.exp(jnp.where(gain == 0, 0, mean))  # 0 * inf would be NaN
    return jnp.where(keep, loss, 0)


@array_function(also=lambda where, values: check_order(where, values, "cov_low", "cov_high", strict=True))
def clip_cov(
    log_ratio: Floats,
    advantage: Fixed,
    log_prob: Fixed,
    *,
    key: Key,
    clip_eps: Number,
    clip_eps_high: Number | None = None,
    fraction: Single = 2e-4,
    cov_low: Single = 1.0,
    cov_high: Single = 5.0,
    mask: Array | None = None,
) -> Array:
    r"""Drop a few high-covariance tokens from the clipped surrogate. Gradients flow to `log_ratio` of the others.

    .. math:: c_i = (A_i - \mathrm{mean}\, A)(\log\pi(a_i) - \mathrm{mean} \log\pi), \qquad
              L_i = 0 \text{ for } \lfloor \text{fraction} \cdot n \rfloor \text{ random tokens with } low < c_i < high

    The means are over the n unmasked tokens, which may have any layout. Tokens that the surrogate clips are not drawn;
    of the others, at least one is drawn if any is in the range. All others have the loss of `clipped_surrogate`.

    Args:
        log_prob: log pi_current(a), in nats, with the shape of `log_ratio`; a constant.
        key: PRNG key for the draw.
        fraction: fraction of the tokens to drop, in [0, 1].
        cov_low, cov_high: the range of covariances from which tokens are drawn, `cov_low` < `cov_high`.
        log_ratio, advantage, clip_eps, clip_eps_high, mask: as in `clipped_surrogate`, as is the result.

    Example:
        >>> log_prob, advantage = jnp.array([-3., -1.]), jnp.array([-1., 1.])  # both covariances are 1
        >>> key = jax.random.key(0)
        >>> clip_cov(jnp.zeros(2), advantage, log_prob, key=key, clip_eps=.2, fraction=1., cov_low=.5).tolist()
        [0.0, 0.0]

    Reference: Cui et al. 2025, The Entropy Mechanism of Reinforcement Learning, arXiv:2505.22617, Clip-Cov.
    """
    cov, keep = _covariance(advantage, log_prob, mask)
    below, above = outside_clip_range(jax.lax.stop_gradient(log_ratio), clip_eps, clip_eps_high)
    eligible = keep & ~jnp.where(advantage < 0, below, above) & (cov > cov_low) & (cov < cov_high)
    drawn = _foremost(jax.random.uniform(key, cov.shape), eligible, fraction, keep)
    left = jnp.where(drawn, 0, log_ratio)  # where an infinite loss is dropped, its gradient would be NaN
    loss = clipped_surrogate(left, advantage, clip_eps=clip_eps, clip_eps_high=clip_eps_high)
    return jnp.where(drawn, 0, loss)


@array_function()
def kl_cov(
    log_ratio: Floats,
    advantage: Fixed,
    log_prob: Fixed,
    *,
    fraction: Single = 2e-4,
    coef: Single = 1.0,
    mask: Array | None = None,
) -> Array:
    r"""Add a divergence penalty for the tokens with the highest covariance. Gradients flow to `log_ratio` only.

    .. math:: L_i = -r_i A_i + \text{coef}\, |\ell_i| \text{ for the } \lfloor \text{fraction} \cdot n \rfloor
              \text{ tokens of largest } c_i, \quad L_i = -r_i A_i \text{ for the others}

    The covariance :math:`c_i` is defined in `clip_cov`. Without a clip, the loss is infinite where
    :math:`e^{\ell_i}` overflows, unless A is 0. At least one token is penalized.

    Args:
        log_ratio, advantage, log_prob, mask: as in `clip_cov`, as is the result.
        fraction: fraction of the tokens to penalize, in [0, 1].
        coef: coefficient of the penalty, >= 0.

    Example:
        >>> log_prob, advantage = jnp.array([-3., -1., -1.]), jnp.array([0., 1., 2.])
        >>> [round(float(l), 4) for l in kl_cov(jnp.full(3, .1), advantage, log_prob, fraction=.5, coef=10.)]
        [1.0, -1.1052, -2.2103]

    Reference: Cui et al. 2025, The Entropy Mechanism of Reinforcement Learning, arXiv:2505.22617, KL-Cov.
    """
    cov, keep = _covariance(advantage, log_prob, mask)
    chosen = _foremost(cov, keep, fraction, keep)
    loss = importance_weighted_surrogate(log_ratio, advantage)
    return loss + jnp.where(chosen, coef * jnp.abs(log_ratio), 0)


def _covariance(advantage: Array, log_prob: Array, mask: Array | None) -> tuple[Array, Array]:
    """Return each token's term of the covariance, and whether the token counts."""
    cov = (advantage - masked_mean(advantage, mask)) * (log_prob - masked_mean(log_prob, mask))
    return cov, boolean_mask(mask, cov)


def _foremost(score: Array, eligible: Array, fraction: Any, keep: Array) -> Array:
    """Mark the eligible tokens with the highest scores, at most a fraction of the unmasked ones, or 1 of them."""
    order = jnp.argsort(jnp.where(eligible, -score, jnp.inf).ravel())
    rank = jnp.argsort(order)  # the inverse of a permutation
    number = jnp.maximum(jnp.floor(fraction * jnp.sum(keep)), 1)
    return (rank < number).reshape(score.shape) & eligible


def _weighted_log_prob(weight: Array, log_ratio: Array) -> Array:
    """Return -weight, with the gradient of -weight * log pi."""
    return -weight * (1 + (log_ratio - jax.lax.stop_gradient(log_ratio)))


def _mean_over_tokens(x: Array, keep: Array) -> Array:
    """Return the mean over the unmasked tokens of each sequence, `[1, ...]`; it is 0 if a sequence has none.

    Each token is divided before the sum, because the sum could otherwise overflow.
    """
    share = 1 / jnp.maximum(jnp.sum(keep, axis=0, keepdims=True, dtype=x.dtype), 1)
    return jnp.sum(jnp.where(keep, x, 0) * share, axis=0, keepdims=True)
