"""Policy losses for sequences of tokens, per element; `clip_cov` and `kl_cov` compare all tokens of the batch."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from ._common import (
    Array,
    ShapeError,
    along_time,
    check_floating,
    check_same_shape,
    checked_hyperparameter,
    checked_scalar,
    known_values,
    masked_mean,
    zero_masked,
)
from ._losses import clip_range, clipped_surrogate, outside_clip_range, policy_inputs
from ._policy_losses import importance_weighted_surrogate

Level = Literal["sequence", "token"]


def policy_gradient_loss(log_ratio: Array, advantage: Array, *, mask: Array | None = None) -> Array:
    r"""Compute REINFORCE's loss per element. Gradients flow to `log_ratio`; `advantage` is a constant.

    .. math:: L_i = -A_i \left(1 + \ell_i - \mathrm{sg}(\ell_i)\right), \qquad
              \nabla L_i = -A_i \nabla \log\pi(a_i)

    Its gradient is that of :math:`-A_i \log\pi(a_i)`, and its value is :math:`-A_i`, so that it does not depend on the
    behavior policy. GPG is this loss with the advantage of `group_advantage(..., scale=None)`.

    Args:
        log_ratio: log pi_current(a) - log pi_behavior(a), any shape, in nats.
        advantage: same shape.
        mask: None, or 0/1 of the same shape: loss and gradient are 0 for masked elements, whatever they contain.

    Returns:
        The loss per element (to be minimized), same shape, in the dtype of `log_ratio`.

    Raises:
        ShapeError: shapes differ. TypeError: an input is not floating.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> jax.grad(lambda l: policy_gradient_loss(l, jnp.array([2.])).sum())(jnp.array([.5])).tolist()
        [-2.0]

    Reference: Williams 1992, Simple Statistical Gradient-Following Algorithms, eq. 4. GPG: Chu et al. 2025,
        arXiv:2504.02546.
    """
    logs, gains = policy_inputs("policy_gradient_loss", log_ratio, advantage, mask)
    return _weighted_log_prob(gains, logs).astype(jnp.result_type(log_ratio))


def cispo(
    log_ratio: Array,
    advantage: Array,
    *,
    clip_eps: float | Array,
    clip_eps_high: float | Array | None = None,
    mask: Array | None = None,
) -> Array:
    r"""Compute REINFORCE's loss with a clipped importance weight, a constant. Gradients flow to `log_ratio` only.

    .. math:: L_i = -w_i A_i \left(1 + \ell_i - \mathrm{sg}(\ell_i)\right), \qquad
              w_i = \mathrm{sg}\left(\mathrm{clip}(e^{\ell_i}, 1-\epsilon, 1+\epsilon_{high})\right)

    Unlike in PPO, elements outside the clip range keep a gradient, :math:`-w_i A_i \nabla \log\pi(a_i)`. The value
    is :math:`-w_i A_i`; the paper's, :math:`-w_i A_i \log\pi(a_i)`, has the same gradient. MiniMax-M1 does not use the
    lower bound: give `clip_eps=1`. TRL's `epsilon_high` is :math:`1 + \epsilon_{high}`.

    Args:
        log_ratio: log pi_current(a) - log pi_behavior(a), any shape, in nats.
        advantage: same shape.
        clip_eps: clip range of the weight below 1 (and above, unless `clip_eps_high` is given), > 0.
        clip_eps_high: clip range of the weight above 1; None: the same as `clip_eps`.
        mask: None, or 0/1 of the same shape: loss and gradient are 0 for masked elements, whatever they contain.

    Returns:
        The loss per element (to be minimized), same shape, in the dtype of `log_ratio`.

    Raises:
        ShapeError: shapes differ. TypeError: an input is not floating. ValueError: a hyperparameter is out of range.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> ratio, advantage = jnp.array([1., 4.]), jnp.array([1., 1.])
        >>> jax.grad(lambda l: cispo(l, advantage, clip_eps=1., clip_eps_high=2.).sum())(jnp.log(ratio)).tolist()
        [-1.0, -3.0]

    Reference: MiniMax 2025, MiniMax-M1, arXiv:2506.13585, eqs. 4 and 5.
    """
    logs, gains = policy_inputs("cispo", log_ratio, advantage, mask)
    low, high = clip_range("cispo", clip_eps, clip_eps_high, logs)
    # An infinite upper end is replaced by the largest finite number, so that an advantage of 0 has a loss of 0.
    most = jnp.minimum(1 + high, jnp.finfo(logs.dtype).max)
    weight = jax.lax.stop_gradient(jnp.clip(jnp.exp(logs), 1 - low, most))
    return _weighted_log_prob(weight * gains, logs).astype(jnp.result_type(log_ratio))


def sapo(
    log_ratio: Array,
    advantage: Array,
    *,
    tau: float | Array = 1.0,
    tau_negative: float | Array = 1.05,
    mask: Array | None = None,
) -> Array:
    r"""Compute a policy loss with a soft gate in place of the clip. Gradients flow to `log_ratio` only.

    .. math:: L_i = -f_{\tau_i}(r_i) A_i, \qquad f_\tau(r) = \frac{4}{\tau}\,\sigma\left(\tau (r - 1)\right), \qquad
              r_i = e^{\ell_i}, \qquad \tau_i = \tau \text{ if } A_i > 0 \text{ else } \tau_{negative}

    The slope of the gate is 1 at a ratio of 1, and decreases smoothly to 0 on both sides. Finite inputs give finite
    losses and gradients.

    Args:
        log_ratio: log pi_current(a) - log pi_behavior(a), any shape, in nats.
        advantage: same shape, a constant.
        tau: temperature where the advantage is positive, > 0; a larger one suppresses distant ratios more.
        tau_negative: temperature elsewhere, > 0; the paper recommends a larger one.
        mask: None, or 0/1 of the same shape: loss and gradient are 0 for masked elements, whatever they contain.

    Returns:
        The loss per element (to be minimized), same shape, in the dtype of `log_ratio`. Aggregate it with
        `aggregate(..., by="sequence_mean")`, as in the paper.

    Raises:
        ShapeError: shapes differ. TypeError: an input is not floating. ValueError: a temperature is out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> sapo(jnp.zeros(2), jnp.array([1., -1.]), tau=1., tau_negative=2.).tolist()
        [-2.0, 1.0]

    Reference: Gao et al. 2025, Soft Adaptive Policy Optimization, arXiv:2511.20347.
    """
    logs, gains = policy_inputs("sapo", log_ratio, advantage, mask)
    both = {"tau": tau, "tau_negative": tau_negative}
    positive, negative = (
        checked_hyperparameter("sapo", name, value, logs.shape, 0, open_low=True, dtype=logs.dtype)
        for name, value in both.items()
    )
    gate = _soft_gate(logs, jnp.where(gains > 0, positive, negative))
    return (-gains * gate).astype(jnp.result_type(log_ratio))


@jax.custom_jvp
def _soft_gate(log_ratio: Array, tau: Array) -> Array:
    return 4 / tau * jax.nn.sigmoid(tau * jnp.expm1(log_ratio))


@_soft_gate.defjvp
def _(primals: Any, tangents: Any) -> Any:
    """The slope is 4 r p (1 - p), computed as an exponential, in which an infinite r has the limit 0."""
    log_ratio, tau = primals
    x = tau * jnp.expm1(log_ratio)
    slope = 4 * jnp.exp(log_ratio + jax.nn.log_sigmoid(x) + jax.nn.log_sigmoid(-x))
    return _soft_gate(*primals), slope * tangents[0]


@along_time
def sequence_log_ratio(
    log_ratio: Array,
    *,
    level: Level = "sequence",
    reduction: Literal["mean", "sum"] = "mean",
    mask: Array | None = None,
) -> Array:
    r"""Replace each token's log-ratio by that of its sequence. `level` determines where gradients flow.

    .. math:: s = \frac{1}{\sum_t m_t} \sum_t m_t \ell_t \quad \text{or} \quad s = \sum_t m_t \ell_t

    With `level="sequence"`, gradients flow to all tokens of the sequence through s. With `level="token"` the value is
    :math:`\mathrm{sg}(s) + \ell_t - \mathrm{sg}(\ell_t)`: the number of the sequence, with the gradient of the token.
    It turns any loss of a log-ratio into a sequence loss: `gspo` is `clipped_surrogate` of it, and a truncated weight
    of a sequence is `importance_sampling_weight` of the sum.

    Args:
        log_ratio: `[T, ...]`, log pi_current(a) - log pi_behavior(a), in nats; axis 0 runs over the tokens of a
            sequence.
        level: "sequence" or "token": where gradients flow.
        reduction: "mean" (the log of the geometric mean of the ratios) or "sum" (the log-ratio of the whole sequence).
        mask: None, or `[T, ...]` of 0/1: masked tokens do not count, and are 0 in the result and its gradient.

    Returns:
        `[T, ...]`, the same number for every unmasked token of a sequence, in the dtype of `log_ratio`.

    Raises:
        ShapeError: shapes differ, or there is no time axis. TypeError: `log_ratio` is not floating. ValueError: unknown
            `level` or `reduction`.

    Example:
        >>> import jax.numpy as jnp
        >>> sequence_log_ratio(jnp.array([.25, .75, 9.]), mask=jnp.array([1, 1, 0])).tolist()
        [0.5, 0.5, 0.0]

    Reference: Zheng et al. 2025, Group Sequence Policy Optimization, arXiv:2507.18071, eqs. 7 and 14.
    """
    where = "sequence_log_ratio"
    check_floating(where, log_ratio=log_ratio)
    check_same_shape(where, log_ratio=log_ratio, mask=mask)
    _check_level(where, level)
    if reduction not in ("mean", "sum"):
        raise ValueError(f'{where}: reduction must be "mean" or "sum", got {reduction!r}')
    (logs,) = zero_masked(where, mask, log_ratio)
    shared = _sequence_log_ratio(where, logs, level, reduction, mask)
    return shared.astype(jnp.result_type(log_ratio))


def _sequence_log_ratio(where: str, logs: Array, level: str, reduction: str, mask: Array | None) -> Array:
    keep = _keep(where, logs, mask)
    one = _mean_over_tokens(logs, keep) if reduction == "mean" else jnp.sum(logs, axis=0, keepdims=True)
    whole = jnp.broadcast_to(one, logs.shape)
    if level == "token":
        whole = jax.lax.stop_gradient(whole) + (logs - jax.lax.stop_gradient(logs))
    return jnp.where(keep, whole, 0)


@along_time
def gspo(
    log_ratio: Array,
    advantage: Array,
    *,
    clip_eps: float | Array,
    clip_eps_high: float | Array | None = None,
    dual_clip: float | Array | None = None,
    level: Level = "sequence",
    mask: Array | None = None,
) -> Array:
    r"""Compute the clipped surrogate of the ratio of whole sequences. Gradients flow to `log_ratio` as `level` says.

    .. math:: L_t = -\min\left(s A_t,\ \mathrm{clip}(s, 1-\epsilon, 1+\epsilon_{high}) A_t\right), \qquad
              s = \exp\left(\frac{1}{\sum_u m_u} \sum_u m_u \ell_u\right)

    With `level="token"` (GSPO-token), the gradient of :math:`L_t` flows to token t only. If the advantage is the same
    for all tokens of a sequence, the sums of both variants over a sequence have the same gradient. The loss of a
    sequence with A < 0 is infinite where its ratio overflows, unless `dual_clip` bounds it; see `clipped_surrogate`.

    Args:
        log_ratio: `[T, ...]`, log pi_current(a) - log pi_behavior(a), in nats; axis 0 runs over the tokens of a
            sequence.
        advantage: same shape, a constant.
        clip_eps: clip range of s below 1 (and above, unless `clip_eps_high` is given), > 0; the paper uses 3e-4 and
            4e-4.
        clip_eps_high: clip range of s above 1; None: the same as `clip_eps`.
        dual_clip: None, or c > 1, as in `clipped_surrogate`.
        level: "sequence" or "token": where gradients flow.
        mask: None, or 0/1 of the same shape: masked tokens do not count; their loss and gradient are 0.

    Returns:
        The loss per token (to be minimized), `[T, ...]`, in the dtype of `log_ratio`. Aggregate it with
        `aggregate(..., by="sequence_mean")`, as in the paper.

    Raises:
        ShapeError: shapes differ, or there is no time axis. TypeError: an input is not floating. ValueError: a
            hyperparameter is out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> gspo(jnp.log(jnp.array([1., 4.])), jnp.ones(2), clip_eps=.5).tolist()  # the geometric mean is 2
        [-1.5, -1.5]

    Reference: Zheng et al. 2025, Group Sequence Policy Optimization, arXiv:2507.18071, eqs. 5 to 7, 13 and 14.
    """
    _check_level("gspo", level)
    logs, gains = policy_inputs("gspo", log_ratio, advantage, mask)
    shared = _sequence_log_ratio("gspo", logs, level, "mean", mask)
    loss = clipped_surrogate(
        shared, gains, clip_eps=clip_eps, clip_eps_high=clip_eps_high, dual_clip=dual_clip, mask=mask
    )
    return loss.astype(jnp.result_type(log_ratio))


@along_time
def gmpo(
    log_ratio: Array,
    advantage: Array,
    *,
    clip_eps: float | Array = 0.4,
    clip_eps_high: float | Array | None = None,
    mask: Array | None = None,
) -> Array:
    r"""Compute the geometric mean of clipped token ratios, times the advantage. Gradients flow to `log_ratio` only.

    .. math:: L_t = -\bar A \exp\left(\frac{1}{\sum_u m_u}\sum_u m_u \ell'_u\right), \qquad
              \ell'_u = \begin{cases} \min(\ell_u, \epsilon_{high}) & A_u \ge 0 \\
                                      \max(\ell_u, -\epsilon) & A_u < 0 \end{cases}

    The clip range is that of the *log*-ratio, in nats: the ratio is clipped to :math:`(e^{-\epsilon},
    e^{\epsilon_{high}})`. :math:`\bar A` is the mean of the advantage over the unmasked tokens. The loss of a sequence
    with :math:`\bar A < 0` is infinite where the geometric mean overflows, in float32 from 88 nats.

    Args:
        log_ratio: `[T, ...]`, log pi_current(a) - log pi_behavior(a), in nats; axis 0 runs over the tokens of a
            sequence.
        advantage: same shape, a constant; usually the same for all tokens of a sequence.
        clip_eps: clip range of the log-ratio below 0 (and above, unless `clip_eps_high` is given), > 0, in nats.
        clip_eps_high: clip range of the log-ratio above 0, in nats; None: the same as `clip_eps`.
        mask: None, or 0/1 of the same shape: masked tokens do not count; their loss and gradient are 0.

    Returns:
        The loss of the sequence for each of its unmasked tokens (to be minimized), `[T, ...]`, in the dtype of
        `log_ratio`. Aggregate it with `aggregate(..., by="sequence_mean")`.

    Raises:
        ShapeError: shapes differ, or there is no time axis. TypeError: an input is not floating. ValueError: a
            hyperparameter is out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> loss = gmpo(jnp.array([-.2, 2.]), jnp.ones(2), clip_eps=.4)  # exp((-.2 + .4) / 2)
        >>> [round(float(l), 4) for l in loss]
        [-1.1052, -1.1052]

    Reference: Zhao et al. 2025, Geometric-Mean Policy Optimization, arXiv:2507.20673.
    """
    logs, gains = policy_inputs("gmpo", log_ratio, advantage, mask)
    low, high = clip_range("gmpo", clip_eps, clip_eps_high, logs)
    keep = _keep("gmpo", logs, mask)
    clipped = jnp.where(gains < 0, jnp.maximum(logs, -low), jnp.minimum(logs, high))
    gain, mean = _mean_over_tokens(gains, keep), _mean_over_tokens(clipped, keep)
    loss = -gain * jnp.exp(jnp.where(gain == 0, 0, mean))  # 0 * inf would be NaN
    return jnp.where(keep, loss, 0).astype(jnp.result_type(log_ratio))


def clip_cov(
    log_ratio: Array,
    advantage: Array,
    log_prob: Array,
    *,
    key: Array,
    clip_eps: float | Array,
    clip_eps_high: float | Array | None = None,
    fraction: float | Array = 2e-4,
    cov_low: float | Array = 1.0,
    cov_high: float | Array = 5.0,
    mask: Array | None = None,
) -> Array:
    r"""Drop a few tokens of high covariance from the clipped surrogate. Gradients flow to `log_ratio` of the others.

    .. math:: c_i = (A_i - \bar A)(\log\pi(a_i) - \overline{\log\pi}), \qquad
              L_i = 0 \text{ for } \lfloor \text{fraction} \cdot n \rfloor \text{ random tokens with } low < c_i < high

    Tokens that combine a high advantage with a high probability make the entropy collapse. The means are over the n
    unmasked tokens; at least one token is drawn, if there is one in the range that the surrogate does not clip. All
    other tokens have the loss of `clipped_surrogate`, and its limits. The arrays may have any layout; all tokens are
    compared.

    Args:
        log_ratio: log pi_current(a) - log pi_behavior(a), any shape, in nats.
        advantage: same shape, a constant.
        log_prob: log pi_current(a), same shape, in nats; a constant.
        key: PRNG key of the draw.
        clip_eps, clip_eps_high: as in `clipped_surrogate`.
        fraction: fraction of the tokens to drop, in [0, 1].
        cov_low, cov_high: the range of covariances from which tokens are drawn.
        mask: None, or 0/1 of the same shape: masked tokens do not count; their loss and gradient are 0.

    Returns:
        The loss per element (to be minimized), same shape, in the dtype of `log_ratio`.

    Raises:
        ShapeError: shapes differ. TypeError: an input is not floating. ValueError: a hyperparameter is out of range, or
            `cov_low` is not less than `cov_high`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> log_prob, advantage = jnp.array([-3., -1.]), jnp.array([-1., 1.])  # both covariances are 1
        >>> key = jax.random.key(0)
        >>> clip_cov(jnp.zeros(2), advantage, log_prob, key=key, clip_eps=.2, fraction=1., cov_low=.5).tolist()
        [0.0, 0.0]

    Reference: Cui et al. 2025, The Entropy Mechanism of Reinforcement Learning, arXiv:2505.22617, Clip-Cov.
    """
    where = "clip_cov"
    cov, keep = _covariance(where, log_ratio, advantage, log_prob, mask)
    limits = {"cov_low": cov_low, "cov_high": cov_high}
    floor, ceiling = (checked_scalar(where, name, x, -jnp.inf) for name, x in limits.items())
    known = known_values(floor), known_values(ceiling)
    if known[0] is not None and known[1] is not None and not known[0] < known[1]:
        raise ValueError(f"{where}: cov_low must be less than cov_high, got {cov_low!r} and {cov_high!r}")
    still = jax.lax.stop_gradient(log_ratio).astype(cov.dtype)
    below, above = outside_clip_range(still, *clip_range(where, clip_eps, clip_eps_high, cov))
    clipped = jnp.where(jnp.asarray(advantage) < 0, below, above)
    eligible = keep & ~clipped & (cov > floor) & (cov < ceiling)
    drawn = _foremost(jax.random.uniform(key, cov.shape), eligible, _share(where, fraction, keep))
    kept = jnp.where(drawn, 0, log_ratio)  # the gradient of an infinite loss would be NaN where it is dropped
    loss = clipped_surrogate(kept, advantage, clip_eps=clip_eps, clip_eps_high=clip_eps_high, mask=mask)
    return jnp.where(drawn, 0, loss)


def kl_cov(
    log_ratio: Array,
    advantage: Array,
    log_prob: Array,
    *,
    fraction: float | Array = 2e-4,
    coef: float | Array = 1.0,
    mask: Array | None = None,
) -> Array:
    r"""Add a divergence penalty for the tokens of highest covariance. Gradients flow to `log_ratio` only.

    .. math:: L_i = -r_i A_i + \text{coef}\, |\ell_i| \text{ for the } \lfloor \text{fraction} \cdot n \rfloor
              \text{ tokens of largest } c_i, \quad L_i = -r_i A_i \text{ for the others}

    The covariance :math:`c_i` is that of `clip_cov`. The ratio is not clipped, so the loss is infinite where
    :math:`e^{\ell_i}` overflows, in float32 from a log-ratio of 88. At least one token is penalized. The arrays may
    have any layout; all tokens are compared.

    Args:
        log_ratio: log pi_current(a) - log pi_behavior(a), any shape, in nats.
        advantage: same shape, a constant.
        log_prob: log pi_current(a), same shape, in nats; a constant.
        fraction: fraction of the tokens to penalize, in [0, 1].
        coef: coefficient of the penalty, >= 0.
        mask: None, or 0/1 of the same shape: masked tokens do not count; their loss and gradient are 0.

    Returns:
        The loss per element (to be minimized), same shape, in the dtype of `log_ratio`.

    Raises:
        ShapeError: shapes differ. TypeError: an input is not floating. ValueError: a hyperparameter is out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> log_prob, advantage = jnp.array([-3., -1., -1.]), jnp.array([0., 1., 2.])
        >>> [round(float(l), 4) for l in kl_cov(jnp.full(3, .1), advantage, log_prob, fraction=.5, coef=10.)]
        [1.0, -1.1052, -2.2103]

    Reference: Cui et al. 2025, The Entropy Mechanism of Reinforcement Learning, arXiv:2505.22617, KL-Cov.
    """
    where = "kl_cov"
    logs, gains = policy_inputs(where, log_ratio, advantage, mask)
    cov, keep = _covariance(where, log_ratio, advantage, log_prob, mask)
    scale = checked_scalar(where, "coef", coef, 0)
    chosen = _foremost(cov, keep, _share(where, fraction, keep))
    loss = importance_weighted_surrogate(logs, gains)
    return (loss + jnp.where(chosen, scale * jnp.abs(logs), 0)).astype(jnp.result_type(log_ratio))


def _covariance(
    where: str, log_ratio: Array, advantage: Array, log_prob: Array, mask: Array | None
) -> tuple[Array, Array]:
    """Return the summand of the covariance of each token, a constant, and whether the token counts."""
    check_floating(where, log_prob=log_prob)
    check_same_shape(where, log_ratio=log_ratio, advantage=advantage, log_prob=log_prob, mask=mask)
    gains, logs = zero_masked(where, mask, *jax.lax.stop_gradient((advantage, log_prob)))
    cov = (gains - masked_mean(gains, mask)) * (logs - masked_mean(logs, mask))
    return cov, jnp.ones_like(cov, bool) if mask is None else jnp.asarray(mask).astype(bool)


def _share(where: str, fraction: Any, keep: Array) -> Array:
    """Return the number of tokens that a fraction of the unmasked ones is, at least 1."""
    part = checked_scalar(where, "fraction", fraction, 0, 1)
    return jnp.maximum(jnp.floor(part * jnp.sum(keep)), 1)


def _foremost(score: Array, eligible: Array, number: Array) -> Array:
    """Mark the eligible elements of highest score, at most `number`."""
    order = jnp.argsort(jnp.where(eligible, -score, jnp.inf).ravel())
    return (jnp.argsort(order) < number).reshape(score.shape) & eligible


def _weighted_log_prob(weight: Array, log_ratio: Array) -> Array:
    """Return -weight, with the gradient of -weight * log pi."""
    return -weight * (1 + (log_ratio - jax.lax.stop_gradient(log_ratio)))


def _mean_over_tokens(x: Array, keep: Array) -> Array:
    """Return the mean over the tokens of each sequence that count, `[1, ...]`; 0 for a sequence without any.

    Each token is divided before the sum, which could otherwise overflow.
    """
    share = 1 / jnp.maximum(jnp.sum(keep, axis=0, keepdims=True, dtype=x.dtype), 1)
    return jnp.sum(jnp.where(keep, x, 0) * share, axis=0, keepdims=True)


def _keep(where: str, like: Array, mask: Array | None) -> Array:
    """Return the mask as booleans, after checking that there is a time axis."""
    if not like.ndim:
        raise ShapeError(
            f"{where} works along axis 0, the tokens of a sequence; the log_ratio given is a single number"
        )
    return jnp.ones_like(like, bool) if mask is None else jnp.asarray(mask).astype(bool)


def _check_level(where: str, level: str) -> None:
    if level not in ("sequence", "token"):
        raise ValueError(f'{where}: level must be "sequence" or "token", got {level!r}')
