"""Parts that regularize the policy, by a loss or by changing the policies to which later losses refer."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp

from .. import functional
from .._base.checked import checked
from .._base.hyperparameters import Numeric, check_number, value_at
from .._core.batch import POLICY_READS, Array, Batch, Params
from .._core.part import Context, Part, read_number, read_numbers, stateless
from .._core.policy import evaluate_policy
from ..distributions import Normal
from ..distributions._distribution import check_distribution
from ..errors import UserTypeError, UserValueError
from ..functional import KLEstimator, masked_mean
from ..functional._arguments import POSITIVE
from ..functional._common import accumulator_dtype, boolean_mask, check_same_shape, unsqueeze
from .common import check_numbers, is_zero, loss_part
from .losses import entropy_of

KLDirection = Literal["reference_to_current", "current_to_reference"]


class KLPenaltyState(NamedTuple):
    """State of an adaptive `kl_penalty`: the coefficient, and the divergence after the previous update."""

    coef: Array
    kl: Array


@checked
def kl_penalty(
    *,
    coef: Numeric,
    estimator: KLEstimator | Literal["analytic"] = "k3",
    direction: KLDirection = "reference_to_current",
    reference: str = "behavior",
    target_kl: Numeric | None = None,
    name: str = "kl_penalty",
) -> Part:
    r"""Add `coef` times the divergence between the policy being trained and a reference policy as the loss `name`.

    .. math:: L_i = \beta\, \mathrm{KL}(\pi_{ref} \,\|\, \pi) \quad\text{("reference_to_current")}, \qquad
              L_i = \beta\, \mathrm{KL}(\pi \,\|\, \pi_{ref}) \quad\text{("current_to_reference")}

    With `target_kl`, the coefficient adapts. After each update, :math:`\beta` is halved if the mean divergence d of the
    updated policy over the rollout is below :math:`d_{targ} / 1.5`, and doubled if d is above :math:`1.5\, d_{targ}`.

    k1, k2, k3 and "k3+" are estimates from the actions of the rollout (see `functional.approx_kl`). They estimate
    KL(reference ‖ current) if the reference is the behavior policy, and KL(current ‖ reference) while the current
    policy is close to the behavior policy. In the latter direction, only k2 and "k3+" have the gradient of the
    divergence. The gradient of k1 is 0 in expectation, so k1 raises an error, as does KL(reference ‖ current) for
    another reference, whose actions it would need. "analytic" calls `kl_divergence`.

    Metrics: `<name>`, the divergence in nats. With `target_kl` also `<name>_coef`, and `<name>_after`, the divergence
    after the previous update.

    Args:
        coef: coefficient beta, >= 0, or a schedule; 0 only measures the divergence, without a loss. With `target_kl`,
            it is the initial coefficient, > 0.
        estimator: "k1", "k2", "k3", "k3+" or "analytic".
        direction: "reference_to_current", as in PPO, or "current_to_reference", as in MDPO and GRPO.
        reference: "behavior", the policy that acted, or a key in `extras`, which holds the log-probabilities of the
            actions under another policy, `[T, N]` (with "analytic", its distribution).
        target_kl: None, or the divergence to keep, in nats, > 0.
        name: key in `losses`.

    Place: after the sampler; with `target_kl`, before `proximal_average`. "analytic" with the behavior policy needs
    `rollout(..., keep_distribution=True)`.

    Example:
        >>> import ppo_parts as pp
        >>> ppo_penalty = pp.chain(
        ...     pp.policy_loss(pp.functional.importance_weighted_surrogate),
        ...     pp.kl_penalty(coef=1., estimator="analytic", target_kl=.01),
        ... )
        >>> to_a_frozen_model = pp.kl_penalty(
        ...     coef=.04, estimator="k3+", direction="current_to_reference", reference="reference_log_prob"
        ... )

    Reference: Schulman et al. 2017, arXiv:1707.06347, section 4, eq. 8.
    """
    where = "kl_penalty"
    if estimator == "k1" and direction == "current_to_reference":
        raise UserValueError(f'{where}: in this direction the expected gradient of k1 is 0: use "k3+" or "k2"')
    adaptive, analytic, forward = target_kl is not None, estimator == "analytic", direction == "reference_to_current"
    of_behavior, only_measures = reference == "behavior", is_zero(coef)  # 0 * inf would be NaN
    if forward and not (of_behavior or analytic):
        remedy = 'direction="current_to_reference" or estimator="analytic"'
        raise UserValueError(f"{where}: only actions of {reference!r} could estimate this direction: use {remedy}")
    coef = check_number(where, "coef", coef, POSITIVE if adaptive else None, schedule=not adaptive, field=not adaptive)
    goal = {"target_kl": check_number(where, "target_kl", target_kl, POSITIVE)} if adaptive else {}
    numbers = {"coef": coef} | goal

    def divergence(batch: Batch) -> Array:
        if analytic:
            other, current = (batch.behavior if of_behavior else batch.extras[reference]), batch.current.distribution
            other = _current_where_masked(other, current, batch.mask)
            first, second = (other, current) if forward else (current, other)
            check_distribution('kl_penalty(estimator="analytic")', first, ("kl_divergence",))
            return first.kl_divergence(second)
        recorded = batch.log_prob if of_behavior else batch.extras[reference]
        log_ratio = batch.current.log_prob - recorded
        signed = log_ratio if forward else -log_ratio
        return functional.approx_kl(signed, estimator=cast(KLEstimator, estimator), mask=batch.mask)

    def init(params: Params, key: Array | None = None) -> tuple[()] | KLPenaltyState:
        return KLPenaltyState(jnp.asarray(coef, float), jnp.zeros((), float)) if adaptive else ()

    def update(batch: Batch, state: Any, context: Context) -> tuple[Batch, Any]:
        beta, kl = state.coef if adaptive else read_number(coef, batch, context.step), divergence(batch)
        measured = {name: masked_mean(jax.lax.stop_gradient(kl), batch.mask)}
        if adaptive:
            measured |= {f"{name}_coef": state.coef.astype(kl.dtype), f"{name}_after": state.kl.astype(kl.dtype)}
        batch = batch.add_metrics(**measured)
        return batch if only_measures else batch.add_loss(name, (beta * kl).astype(kl.dtype)), state

    def finish(batch: Batch, state: KLPenaltyState, context: Context) -> KLPenaltyState:
        goal = value_at(numbers["target_kl"], context.step)
        kl = masked_mean(divergence(batch), batch.mask).astype(state.kl.dtype)
        factor = jnp.where(kl < goal / 1.5, 0.5, jnp.where(kl > 1.5 * goal, 2.0, 1.0))
        if batch.mask is not None:  # if all steps are masked, no divergence was measured
            factor = jnp.where(jnp.any(batch.mask.astype(bool)), factor, 1)
        limits = jnp.finfo(state.coef.dtype)  # no factor could change 0 or infinity
        return KLPenaltyState(jnp.clip(state.coef * factor, limits.tiny, limits.max).astype(state.coef.dtype), kl)

    recorded = "behavior" if of_behavior else f"extras.{reference}"
    needed = () if of_behavior and not analytic else (recorded,)  # a rollout always has `log_prob`
    reads = ("current.distribution",) if analytic else ("current.log_prob", "log_prob")
    return Part(
        init, update, where, requires=needed, provides=() if only_measures else ("losses",),
        reads=(*reads, "mask"), place="after_sampler", finish=finish if adaptive else None, numbers=numbers,
        policy_loss=False, elementwise=True,
    )  # fmt: skip


def _current_where_masked(other: Any, current: Any, mask: Array | None) -> Any:
    """Replace masked elements, whose standard deviation the learner may have set to 0, by the current policy's.

    The divergence and its gradient are then 0 there; otherwise the gradient would be NaN.
    """
    structure: Any = jax.tree.structure(current)
    if mask is None or structure != jax.tree.structure(other):
        return other

    def chosen(x: Array, y: Array) -> Array:
        if jnp.shape(x) != jnp.shape(y) or jnp.shape(x)[: mask.ndim] != mask.shape:
            return x
        return jnp.where(unsqueeze(mask.astype(bool), jnp.ndim(x)), x, jax.lax.stop_gradient(y))

    return jax.tree.map(chosen, other, current)


@checked
def adaptive_entropy_bonus(
    *, target_entropy: Numeric, learning_rate: Numeric, coef: float | Array = 0.01, name: str = "entropy"
) -> Part:
    r"""Add an entropy bonus whose coefficient :math:`\alpha` adapts to keep the entropy near a target.

    .. math:: L_i = -\alpha H(\pi(\cdot|s_i)), \qquad
              \log\alpha \leftarrow \log\alpha - \eta \left(\bar H - H_{targ}\right)

    :math:`\bar H` is the mean over the minibatch. The coefficient grows as long as the entropy is below the target, so
    choose a target that the policy can reach. Metrics: `<name>`, in nats, and `<name>_coef`.

    Args:
        target_entropy: entropy in nats, which may be negative for continuous actions. Soft actor-critic uses minus the
            number of action dimensions.
        learning_rate: step eta per minibatch, >= 0. With 0, this part is `entropy_bonus`.
        coef: the initial coefficient, > 0.
        name: key in `losses`.

    Place: after the sampler.

    Example:
        >>> import ppo_parts as pp
        >>> part = pp.regularizers.adaptive_entropy_bonus(target_entropy=.5, learning_rate=.01, coef=.01)

    Reference: Haarnoja et al. 2018, Soft Actor-Critic Algorithms and Applications, arXiv:1812.05905, section 5.
    """
    where = "adaptive_entropy_bonus"
    numbers = check_numbers(where, target_entropy=target_entropy, learning_rate=learning_rate)
    coef = check_number(where, "coef", coef, POSITIVE, schedule=False)

    def init(params: Params, key: Array | None = None) -> Array:
        return jnp.log(jnp.asarray(coef, jnp.float32))  # the state is log alpha

    def update(batch: Batch, state: Array, context: Context) -> tuple[Batch, Array]:
        entropy = entropy_of(batch.current.distribution, context.key)
        now = read_numbers(numbers, batch, context.step)
        alpha = jnp.exp(state).astype(entropy.dtype)
        batch = batch.add_loss(name, -alpha * entropy)
        batch = batch.add_metrics(**{name: masked_mean(entropy, batch.mask), f"{name}_coef": alpha})
        # Unlike the mean entropy minus the target, this is 0 if all steps of a minibatch are masked.
        excess = masked_mean(jax.lax.stop_gradient(entropy).astype(jnp.float32) - now["target_entropy"], batch.mask)
        return batch, (state - now["learning_rate"] * excess).astype(jnp.float32)

    return Part(
        init, update, where, provides=("losses",), reads=("current.distribution", "mask"), place="after_sampler",
        numbers=numbers | {"coef": coef}, policy_loss=False,
    )  # fmt: skip


@checked
def bounds_loss(*, coef: Numeric, bound: Numeric = 1.1, name: str = "bounds") -> Part:
    """Add `coef` times a penalty for action means outside a soft bound, `functional.bounds_loss`.

    Metric: `<name>_loss`, without the coefficient.

    Args:
        coef: coefficient, >= 0.
        bound: the soft bound, >= 0, for actions whose bounds are -1 and 1.
        name: key in `losses`.

    Place: after the sampler; the policy must be a Gaussian whose mean is `loc`, such as `distributions.Normal`.

    Example:
        >>> import ppo_parts as pp
        >>> rl_games = pp.regularizers.bounds_loss(coef=1e-4)
    """

    def loss(batch: Batch, context: Context, bound: Any) -> Array:
        policy = batch.current.distribution
        if not hasattr(policy, "loc"):
            raise UserTypeError(
                "bounds_loss: the policy must be a Gaussian with a mean `loc`, such as distributions.Normal; got a "
                f"{type(policy).__name__}"
            )
        return functional.bounds_loss(policy.loc, bound=bound, mask=batch.mask)

    numbers = check_numbers("bounds_loss", bound=bound)
    reads = ("current.distribution",)
    return loss_part("bounds_loss", name, loss, numbers, coef=coef, reads=reads, elementwise=True)


@checked
def smoothness_loss(
    *,
    temporal: Numeric | None = 1.0,
    spatial: Numeric | None = 1.0,
    noise_scale: Numeric = 0.05,
    name: str = "smoothness",
) -> Part:
    r"""Add the CAPS penalty for actions that change between steps or under noise, `functional.smoothness_loss`.

    .. math:: L_i = \lambda_T \| \mu(s_i) - \mu(s'_i) \|_2 + \lambda_S \| \mu(s_i) - \mu(\bar s_i) \|_2,
              \qquad \bar s_i \sim \mathcal N(s_i, \sigma^2)

    :math:`\mu` is the mode of the policy, and s' is the next observation, or the final one where an episode ended. Each
    term needs one more evaluation of the policy. Metrics: `<name>_temporal` and `<name>_spatial`, the mean distances.

    Args:
        temporal: lambda_T, >= 0; None omits this term.
        spatial: lambda_S, >= 0; None omits this term. Only floating leaves of the observations get noise.
        noise_scale: standard deviation sigma of the noise, in the units of the observations, >= 0.
        name: key in `losses`.

    Place: after the sampler. The temporal term needs `rollout(..., keep_next_obs=True)`. The policy must have
    continuous actions and no memory.

    Example:
        >>> import ppo_parts as pp
        >>> part = pp.regularizers.smoothness_loss(temporal=1., spatial=5.)
    """
    where = "smoothness_loss"
    numbers = check_numbers(where, temporal=temporal, spatial=spatial, noise_scale=noise_scale)
    if temporal is None and spatial is None:
        raise UserValueError(f"{where}: give temporal, spatial or both")

    def loss(batch: Batch, context: Context, noise_scale: Any, **coefs: Any) -> tuple[Array, dict[str, Array]]:
        check_no_memory(where, batch)
        total, distances = jnp.zeros_like(batch.log_prob), {}
        for term, coef in coefs.items():
            if coef is None:
                continue
            obs = batch.next_obs if term == "temporal" else _with_noise(where, batch.obs, noise_scale, context.key)
            other = evaluate_policy(context.evaluate, context.params, batch.replace(obs=obs)).distribution
            modes = mode_of(where, batch.current.distribution), mode_of(where, other)
            distance = functional.smoothness_loss(*modes, mask=batch.mask)
            distances[f"{name}_{term}"] = distance
            total += (coef * distance).astype(distance.dtype)
        return total, distances

    requires = () if temporal is None else ("next_obs",)
    reads = ("current.distribution", *POLICY_READS)
    return loss_part(where, name, loss, numbers, requires=requires, reads=reads)


def check_no_memory(where: str, batch: Batch) -> None:
    """Raise if the policy is recurrent."""
    if batch.carry is not None:
        raise UserValueError(f"{where}: the policy has a memory, but this part evaluates single observations")


def mode_of(where: str, distribution: Any) -> Array:
    """Return the mode of the distribution as one vector per element."""
    mode: Any = distribution.mode() if hasattr(distribution, "mode") else None
    if not jnp.issubdtype(getattr(mode, "dtype", int), jnp.floating):
        raise UserTypeError(
            f"{where}: the policy must have continuous actions and a mode(), as distributions.Normal has; got a "
            f"{type(distribution).__name__}"
        )
    return mode


def _with_noise(where: str, obs: Any, scale: Any, key: Array) -> Any:
    """Add Gaussian noise to every floating-point leaf."""
    leaves, tree = jax.tree.flatten(obs)
    if not any(jnp.issubdtype(x.dtype, jnp.floating) for x in leaves):
        raise UserTypeError(
            f"{where}: the spatial term adds noise to observations, but these are not floating: convert them before "
            "the rollout, or omit the term with spatial=None"
        )

    def noisy(x: Array, key: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return (x + scale * jax.random.normal(key, x.shape, x.dtype)).astype(x.dtype)

    return jax.tree.unflatten(tree, map(noisy, leaves, jax.random.split(key, len(leaves))))


class ProximalAverageState(NamedTuple):
    """State of `proximal_average`: the average of the parameters, and the sum of its weights."""

    params: Any
    weight: Array


@checked
def proximal_average(*, decay: Numeric) -> Part:
    r"""Make later losses refer to an average of the parameters instead of the behavior policy (PPO-EWMA).

    .. math:: \theta_{prox} \leftarrow \frac{\sum_k \beta^k \theta_{-k}}{\sum_k \beta^k}, \qquad
              A_i \leftarrow \frac{\pi_{prox}(a_i|s_i)}{\pi_{old}(a_i|s_i)} A_i, \qquad
              \log\pi_{old} \leftarrow \log\pi_{prox}

    :math:`\theta_{-k}` are the parameters k gradient steps ago. This part evaluates the policy of their average, around
    which a surrogate then clips, and multiplies the advantage by an importance weight that corrects for the behavior
    policy. Metric: `off_policy_weight`, the mean of the weight.

    Args:
        decay: factor beta by which the weight of older parameters decays per gradient step, in [0, 1]. The average
            spans about 1 / (1 - beta) gradient steps.

    Place: after the sampler and the parts that change the advantage; before the policy loss. Parts before it refer to
    the behavior policy.

    Example:
        >>> import ppo_parts as pp
        >>> ppo_ewma = pp.chain(pp.regularizers.proximal_average(decay=.889), pp.clipped_surrogate(clip_eps=.2))

    Reference: Hilton et al. 2021, Batch size-invariance for policy optimization, arXiv:2110.00641.
    """
    numbers = check_numbers("proximal_average", decay=decay)

    def has_mean(x: Any) -> bool:
        return jnp.issubdtype(x.dtype, jnp.inexact)  # keys and integers do not

    def init(params: Params, key: Array | None = None) -> ProximalAverageState:
        zeros = jax.tree.map(lambda x: jnp.zeros_like(x, dtype=accumulator_dtype(x)) if has_mean(x) else (), params)
        return ProximalAverageState(zeros, jnp.zeros(()))

    def update(batch: Batch, state: ProximalAverageState, context: Context) -> tuple[Batch, ProximalAverageState]:
        weight = (read_numbers(numbers, batch, context.step)["decay"] * state.weight + 1).astype(state.weight.dtype)
        latest = jax.lax.stop_gradient(context.params)
        mean = jax.tree.map(
            lambda x, m: m + ((x - m) / weight).astype(m.dtype) if has_mean(x) else m, latest, state.params
        )
        params = jax.tree.map(lambda x, m: m.astype(x.dtype) if has_mean(x) else x, latest, mean)
        proximal = evaluate_policy(context.evaluate, params, batch).distribution
        log_prob = proximal.log_prob(batch.action).astype(batch.log_prob.dtype)
        log_prob = jnp.where(boolean_mask(batch.mask, log_prob), log_prob, batch.log_prob)
        correction = jnp.exp(log_prob - batch.log_prob)
        check_same_shape("proximal_average", advantage=batch.advantage, log_prob=log_prob)
        batch = batch.add_metrics(off_policy_weight=masked_mean(correction, batch.mask))
        advantage = (correction * batch.advantage).astype(batch.advantage.dtype)
        return batch.replace(log_prob=log_prob, advantage=advantage), ProximalAverageState(mean, weight)

    return Part(
        init, update, "proximal_average", requires=("advantage",), provides=("advantage", "log_prob"),
        reads=("log_prob", *POLICY_READS), place="after_sampler", numbers=numbers,
    )  # fmt: skip


@checked
def perturbed_mean(*, scale: Numeric = 0.5) -> Part:
    r"""Perturb the mean of a Gaussian policy for the policy loss after this part (robust policy optimization).

    .. math:: \log\pi(a_i|s_i) \leftarrow \log\mathcal N(a_i; \mu(s_i) + z_i, \sigma(s_i)), \qquad
              z_i \sim \mathcal U(-\alpha, \alpha)

    z is drawn anew for each dimension of each element of a minibatch, so that the policy keeps exploring. Actions are
    sampled without z, so the ratio is not 1 even in the first minibatch. Only `current.log_prob` changes; parts that
    read the distribution, such as an entropy bonus, see the unperturbed policy.

    Args:
        scale: the largest perturbation alpha, >= 0, in the units of the action.

    Place: after the sampler and before the policy loss (`learner` checks the order); the policy must be a
    `distributions.Normal`.

    Example:
        >>> import ppo_parts as pp
        >>> rpo = pp.chain(pp.regularizers.perturbed_mean(scale=.5), pp.clipped_surrogate(clip_eps=.2))

    Reference: Rahman and Xue 2022, Robust Policy Optimization in Deep Reinforcement Learning, arXiv:2212.07536.
    """

    def update(batch: Batch, context: Context, scale: Any) -> Batch:
        policy = batch.current.distribution
        if not isinstance(policy, Normal):
            kind = type(policy).__name__
            raise UserTypeError(f"perturbed_mean: the policy must be a distributions.Normal, got a {kind}")
        shift = scale * jax.random.uniform(context.key, policy.loc.shape, accumulator_dtype(policy.loc), -1, 1)
        perturbed = Normal((policy.loc + shift).astype(policy.loc.dtype), policy.scale)
        log_prob = perturbed.log_prob(batch.action)
        # Masked elements keep a ratio of 1, as without the perturbation.
        log_prob = jnp.where(boolean_mask(batch.mask, log_prob), log_prob, batch.current.log_prob)
        return batch.replace(current=batch.current._replace(log_prob=log_prob))

    reads = ("current.distribution", "current.log_prob", "action", "mask")
    return stateless(
        update, name="perturbed_mean", provides=("current.log_prob",), reads=reads, place="after_sampler",
        numbers=check_numbers("perturbed_mean", scale=scale),
    )  # fmt: skip
