"""Parts that change the policies to which the losses after them refer."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._base.errors import UserTypeError
from .._base.hyperparameters import Numeric
from .._core.policy import POLICY_READS, evaluate_policy
from .._core.types import Array, Batch, Context, Params, Part, stateless
from ..distributions import Normal
from ..functional import masked_mean
from ..functional._common import accumulator_dtype
from .common import at_step, check_numbers


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
