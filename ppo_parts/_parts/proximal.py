"""Parts that change the policies to which the losses after them refer, and self-imitation."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from .. import functional
from .._base.doors import checked
from .._base.errors import UserTypeError
from .._base.hyperparameters import Numeric
from .._core.policy import POLICY_READS, evaluate_policy
from .._core.types import Array, Batch, Context, Params, Part, stateless
from ..distributions import Normal
from ..functional import masked_mean
from ..functional._arguments import CorrectionMode, check_order
from ..functional._common import accumulator_dtype
from .common import at_step, check_numbers, loss_part
from .losses import require_critic


class ProximalAverageState(NamedTuple):
    """State of `proximal_average`: the average of the parameters, and the sum of the weights in it."""

    params: Any
    weight: Array


def proximal_average(*, decay: Numeric) -> Part:
    r"""Let the losses after this part refer to an average of the parameters instead of the behavior policy (PPO-EWMA).

    .. math:: \theta_{prox} \leftarrow \frac{\sum_k \beta^k \theta_{-k}}{\sum_k \beta^k}, \qquad
              A_i \leftarrow \frac{\pi_{prox}(a_i|s_i)}{\pi_{old}(a_i|s_i)} A_i, \qquad
              \log\pi_{old} \leftarrow \log\pi_{prox}

    :math:`\theta_{-k}` are the parameters k gradient steps ago. A surrogate clips around the policy of their average,
    which is evaluated here; an importance weight of the advantage corrects for the behavior policy. Metric:
    `off_policy_weight`, the mean of the weight.

    Args:
        decay: factor beta by which older parameters count less, in [0, 1]; the average spans about 1 / (1 - beta)
            gradient steps.

    Place: after the sampler and the parts that change the advantage; before the policy loss. Parts before it refer to
    the behavior policy.

    Example:
        >>> import ppo_parts as pp
        >>> ppo_ewma = pp.chain(pp.regularizers.proximal_average(decay=.889), pp.clipped_surrogate(clip_eps=.2))

    Reference: Hilton et al. 2021, Batch size-invariance for policy optimization, arXiv:2110.00641.
    """
    numbers = check_numbers("proximal_average", decay=decay)

    def init(params: Params, key: Array | None = None) -> ProximalAverageState:
        zeros = jax.tree.map(lambda x: jnp.zeros_like(x, dtype=accumulator_dtype(x)), params)
        return ProximalAverageState(zeros, jnp.zeros(()))

    def update(batch: Batch, state: ProximalAverageState, context: Context) -> tuple[Batch, ProximalAverageState]:
        weight = (at_step(numbers, batch, context)["decay"] * state.weight + 1).astype(state.weight.dtype)
        latest = jax.lax.stop_gradient(context.params)
        mean = jax.tree.map(lambda m, x: m + ((x - m) / weight).astype(m.dtype), state.params, latest)
        params = jax.tree.map(lambda m, x: m.astype(x.dtype), mean, latest)
        proximal = evaluate_policy(context.evaluate, params, batch).distribution
        log_prob = proximal.log_prob(batch.action).astype(batch.log_prob.dtype)
        if batch.mask is not None:
            log_prob = jnp.where(batch.mask.astype(bool), log_prob, batch.log_prob)
        correction = jnp.exp(log_prob - batch.log_prob)
        batch = batch.add_metrics(off_policy_weight=masked_mean(correction, batch.mask))
        advantage = (correction * batch.advantage).astype(batch.advantage.dtype)
        return batch.replace(log_prob=log_prob, advantage=advantage), ProximalAverageState(mean, weight)

    return Part(
        init,
        update,
        "proximal_average",
        requires=("advantage",),
        provides=("advantage", "log_prob"),
        reads=("log_prob", *POLICY_READS),
        place="after_sampler",
        numbers=tuple(numbers.values()),
    )


def perturbed_mean(*, scale: Numeric = 0.5) -> Part:
    r"""Let the policy loss after this part see a Gaussian policy whose mean is perturbed (robust policy optimization).

    .. math:: \log\pi(a_i|s_i) \leftarrow \log\mathcal N(a_i; \mu(s_i) + z_i, \sigma(s_i)), \qquad
              z_i \sim \mathcal U(-\alpha, \alpha)

    z is drawn for every dimension and minibatch, so that the policy keeps exploring. Actions are sampled without it, so
    the ratio of the first minibatch is not 1. Only `current.log_prob` changes: parts that read the distribution, such
    as an entropy bonus, see the policy itself.

    Args:
        scale: the largest perturbation alpha, >= 0, in the units of the action.

    Place: after the sampler and before the policy loss (`learner` checks the order); the policy is a
    `distributions.Normal`.

    Example:
        >>> import ppo_parts as pp
        >>> rpo = pp.chain(pp.regularizers.perturbed_mean(scale=.5), pp.clipped_surrogate(clip_eps=.2))

    Reference: Rahman and Xue 2022, Robust Policy Optimization in Deep Reinforcement Learning, arXiv:2212.07536.
    """
    numbers = check_numbers("perturbed_mean", scale=scale)

    def update(batch: Batch, context: Context) -> Batch:
        policy, alpha = batch.current.distribution, at_step(numbers, batch, context)["scale"]
        if not isinstance(policy, Normal):
            kind = type(policy).__name__
            raise UserTypeError(f"perturbed_mean: the policy must be a distributions.Normal, got a {kind}")
        shift = alpha * jax.random.uniform(context.key, policy.loc.shape, accumulator_dtype(policy.loc), -1, 1)
        perturbed = Normal((policy.loc + shift).astype(policy.loc.dtype), policy.scale)
        log_prob = perturbed.log_prob(batch.action)
        if batch.mask is not None:  # masked elements keep a ratio of 1, as in the policy itself
            log_prob = jnp.where(batch.mask.astype(bool), log_prob, batch.current.log_prob)
        return batch.replace(current=batch.current._replace(log_prob=log_prob))

    reads = ("current.distribution", "current.log_prob", "action", "mask")
    declared: Any = {"provides": ("current.log_prob",), "reads": reads, "place": "after_sampler"}
    return stateless(update, name="perturbed_mean", numbers=tuple(numbers.values()), **declared)


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

    Use it if `batch.log_prob`, to which the losses refer, is not that of the policy that sampled the actions, for
    example because the inference engine rounds differently. Metrics: `<name>_weight`, the mean weight, and
    `<name>_fraction`, the share of elements whose ratio was outside [low, high].

    Args:
        high, low, mode: as in `functional.importance_sampling_weight`.
        level: "token", the ratio of each step; or "sequence", the product over the unmasked steps of its segment.
        reference: key in `extras` of the log-probabilities at the time of sampling, `[T, N]`.
        name: prefix of the metrics.

    Place: after the advantage, before the policy loss; on either side of the sampler, which must keep the time axis for
    "sequence".

    Example:
        >>> import ppo_parts as pp
        >>> truncated = pp.tokens.importance_correction(high=2.)
        >>> masked = pp.tokens.importance_correction(low=.5, high=2., mode="mask", level="sequence")
    """
    where = "importance_correction"
    numbers = check_numbers(where, high=high, low=low)
    if not any(map(callable, numbers.values())):
        check_order(where, numbers, "low", "high")

    def update(batch: Batch, context: Context) -> Batch:
        now = at_step(numbers, batch, context)
        log_ratio = jax.lax.stop_gradient(batch.log_prob - batch.extras[reference])
        if level == "sequence":
            log_ratio = functional.sequence_log_ratio(log_ratio, reduction="sum", mask=batch.mask)
        weight = functional.importance_sampling_weight(log_ratio, **now, mode=mode, mask=batch.mask)
        ratio = jnp.exp(log_ratio)
        outside = (ratio > now["high"]) | (ratio < now["low"])
        measured = {"weight": weight, "fraction": outside.astype(weight.dtype)}
        batch = batch.add_metrics(**{f"{name}_{key}": masked_mean(x, batch.mask) for key, x in measured.items()})
        advantage = batch.advantage if batch.mask is None else jnp.where(batch.mask.astype(bool), batch.advantage, 0)
        return batch.replace(advantage=(weight * advantage).astype(advantage.dtype))

    requires, reads = ("advantage", f"extras.{reference}"), ("log_prob", "mask")
    declared: Any = {"requires": requires, "provides": ("advantage",), "reads": reads}
    return stateless(update, name=where, numbers=tuple(numbers.values()), needs_time=level == "sequence", **declared)


@checked
def self_imitation(*, coef: Numeric = 1.0, value_coef: Numeric = 0.01, name: str = "self_imitation") -> Part:
    r"""Add the self-imitation loss, which learns from steps whose return was higher than the value, as the loss `name`.

    .. math:: L_i = c \left( -\log\pi(a_i|s_i) (R_i - V(s_i))_+ + \frac{\beta}{2} (R_i - V(s_i))_+^2 \right)

    These are `functional.self_imitation_loss` and `functional.self_imitation_value_loss`. R is `batch.target`, so use
    `gae` with `gae_lambda=1`, or read another field with `within`. Metrics: `<name>_loss`, without the coefficient c,
    and `<name>_fraction`, the share of steps that were better.

    Args:
        coef: coefficient c, >= 0.
        value_coef: weight beta of the value's term, >= 0.
        name: key in `losses`.

    Place: after the sampler, usually in a `phase` that replays rollouts; needs a critic.

    Example:
        >>> import ppo_parts as pp
        >>> imitate = pp.within(pp.exploration.self_imitation(), read={"target": "extras.returns"}, name="monte_carlo")
    """
    where = "self_imitation"

    def loss(batch: Batch, context: Context, value_coef: Any) -> tuple[Array, dict[str, Array]]:
        require_critic(where, batch)
        current = batch.current
        advantage = jax.lax.stop_gradient(batch.target - current.value)
        policy = functional.self_imitation_loss(current.log_prob, advantage, mask=batch.mask)
        value = functional.self_imitation_value_loss(current.value, batch.target, mask=batch.mask)
        both, better = (policy + value_coef * value).astype(policy.dtype), (advantage > 0).astype(policy.dtype)
        return both, {f"{name}_loss": both, f"{name}_fraction": better}

    numbers, reads = check_numbers(where, value_coef=value_coef), ("current.log_prob", "current.value")
    return loss_part(where, name, loss, numbers, coef=coef, requires=("target",), reads=reads)
