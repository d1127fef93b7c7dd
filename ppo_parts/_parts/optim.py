"""Optax transformations for PPO: schedules that count learner updates, clipped Adam, and separate steps per agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._base.checked import Count, checked
from .._base.hyperparameters import Numeric, check_number, spread_nan, value_at
from .._core.batch import Array
from .._core.optimizer import wrap_optimizer
from ..errors import UserValueError
from ..functional._arguments import ANY, FROM_0, POSITIVE, check_order
from ..functional._common import Range


@checked
def linear_schedule(init_value: float, end_value: float, transition_steps: Count) -> optax.Schedule:
    """Make a schedule like `optax.linear_schedule` that ends exactly at `end_value`; raise for `transition_steps` < 1.

    Args:
        init_value, end_value: the values at step 0, and from step `transition_steps` on.
        transition_steps: number of learner updates over which the value changes, at least 1.

    Example:
        >>> import ppo_parts as pp
        >>> float(pp.linear_schedule(1., 0., 10)(5))
        0.5
    """
    where, ends = "linear_schedule", {"init_value": init_value, "end_value": end_value}
    first, last = (check_number(where, name, x, ANY, schedule=False) for name, x in ends.items())
    schedule = optax.linear_schedule(first, last, transition_steps)
    # In a compiled program, n * (1 / n) may differ from 1, so a value annealed to 0 could end below 0.
    return lambda step: jnp.where(jnp.less(step, transition_steps), schedule(step), last)


@checked
def scale_by_update_schedule(learning_rate: Numeric) -> optax.GradientTransformationExtraArgs:
    r"""Scale updates by :math:`-\alpha(k)`, where k counts *learner updates*; the rate is constant within an update.

    The schedules of optax count gradient steps, which are num_minibatches * num_epochs per update, or fewer after an
    early stop. A schedule that expects updates but counts gradient steps decays too fast by this factor.

    Args:
        learning_rate: a number, >= 0, or a schedule of the number of updates so far (0 during the first update).

    Returns:
        An optax transformation for the end of an `optax.chain`, in place of `optax.scale_by_learning_rate`. `learner`
        passes it the extra argument `step`. Chain it to `optax.scale_by_adam()`: `optax.adam` changes the sign itself.

    Example:
        >>> import optax, ppo_parts as pp
        >>> annealed = pp.linear_schedule(2.5e-4, 0., 976)  # over 976 updates
        >>> optimizer = optax.chain(
        ...     optax.clip_by_global_norm(.5), optax.scale_by_adam(eps=1e-5),
        ...     pp.optim.scale_by_update_schedule(annealed),
        ... )

    Reference: Huang et al. 2022, The 37 Implementation Details of PPO, detail 4.
    """
    learning_rate = check_number("scale_by_update_schedule", "learning_rate", learning_rate)

    def update(updates: Any, state: Any, params: Any = None, *, step: Any = None, **extra: Any) -> tuple[Any, Any]:
        if step is None:
            raise UserValueError(
                "scale_by_update_schedule: update needs the argument step=..., which learner() passes, unless a "
                "transformation around this one drops it"
            )
        return _scaled(updates, value_at(learning_rate, step)), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


class KLAdaptiveRateState(NamedTuple):
    """State of `scale_by_kl_adaptive_rate`: the rate, and the sum of the latest `steps` divergences."""

    learning_rate: Array
    total: Array
    steps: Array


@checked
def scale_by_kl_adaptive_rate(
    learning_rate: float,
    target_kl: float,
    *,
    metric: str = "approx_kl",
    average_over: Count | None = None,
    low: float = 1e-5,
    high: float = 1e-2,
) -> optax.GradientTransformationExtraArgs:
    r"""Scale updates by :math:`-\alpha`, a learning rate that follows the divergence d of the policy.

    .. math:: \alpha \leftarrow \max(\alpha / 1.5,\ \text{low}) \text{ if } d > 2 d_{targ}, \qquad
              \alpha \leftarrow \min(1.5 \alpha,\ \text{high}) \text{ if } 0 < d < d_{targ} / 2

    Args:
        learning_rate: the initial rate, in [low, high].
        target_kl: the divergence near which the rate keeps the policy's steps, in nats, > 0.
        metric: name of a metric that a part of the chain adds, the divergence of a minibatch before its step.
            `policy_diagnostics` adds "approx_kl".
        average_over: if None, the rate changes before each step, according to the divergence of this minibatch (rsl_rl,
            brax). With a number K, it changes after every K steps, according to their mean divergence (skrl and
            rl_games, where K is the number of minibatches in an epoch, or 1), and rises even if that is not above 0.
        low: lower bound of the rate, > 0.
        high: upper bound of the rate.

    Returns:
        An optax transformation for the end of an `optax.chain`. `learner` passes it the metrics. Its state has the
        entry `learning_rate`. Chain it to `optax.scale_by_adam()`: `optax.adam` changes the sign itself.

    Example:
        >>> import optax, ppo_parts as pp
        >>> optimizer = optax.chain(
        ...     optax.clip_by_global_norm(1.), optax.scale_by_adam(),
        ...     pp.optim.scale_by_kl_adaptive_rate(1e-3, target_kl=.01),
        ... )

    Reference: Rudin et al. 2022, Learning to Walk in Minutes, arXiv:2109.11978.
    """
    where = "scale_by_kl_adaptive_rate"
    target_kl, low, high = (
        check_number(where, name, value, POSITIVE, schedule=False)
        for name, value in {"target_kl": target_kl, "low": low, "high": high}.items()
    )
    check_order(where, {"low": low, "high": high}, "low", "high")
    traced = any(isinstance(x, jax.core.Tracer) for x in (low, high))
    limits = POSITIVE if traced else Range(float(low), float(high))
    learning_rate = check_number(where, "learning_rate", learning_rate, limits, schedule=False)

    def adapted(rate: Array, divergence: Array) -> Array:
        faster = divergence < target_kl / 2
        if average_over is None:
            faster &= divergence > 0
        rate = jnp.where(faster, jnp.minimum(rate * 1.5, high), rate)
        return jnp.where(divergence > 2 * target_kl, jnp.maximum(rate / 1.5, low), rate)

    def init(params: Any) -> KLAdaptiveRateState:
        rate = spread_nan(jnp.asarray(learning_rate, float), target_kl, low, high)
        return KLAdaptiveRateState(rate, jnp.zeros_like(rate), jnp.zeros((), jnp.int32))

    def update(updates: Any, state: KLAdaptiveRateState, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if metric not in (metrics := extra.get("metrics") or {}):
            part = "policy_diagnostics()" if metric == "approx_kl" else "kl_penalty(coef=0, name=...)"
            raise UserValueError(
                f"{where}: the metric {metric!r} does not exist; put a part that adds it into the chain, such as "
                f"{part}, and call update with metrics=..., as learner() does; the metrics are {list(metrics)}"
            )
        divergence = jnp.asarray(metrics[metric], state.learning_rate.dtype)
        total, steps, number = state.total + divergence, state.steps + 1, average_over or 1
        full = steps == number
        rate = jnp.where(full, adapted(state.learning_rate, total / number), state.learning_rate)
        state_after = KLAdaptiveRateState(rate, jnp.where(full, 0, total), jnp.where(full, 0, steps))
        return _scaled(updates, rate if average_over is None else state.learning_rate), state_after

    return optax.GradientTransformationExtraArgs(init, update)


def _scaled(updates: Any, rate: Array | float) -> Any:
    return jax.tree.map(lambda u: -jnp.asarray(rate, u.dtype) * u, updates)


@checked
def clipped_adam(
    learning_rate: Numeric, max_grad_norm: float, *, eps: float = 1e-5
) -> optax.GradientTransformationExtraArgs:
    """Adam with gradients clipped by their global norm, and a learning rate that is constant within an update.

    This is `optax.flatten(optax.chain(clip_by_global_norm(c), scale_by_adam(eps=e), scale_by_update_schedule(r)))`. All
    parameters are concatenated into one vector, so that the same computation takes fewer and larger operations.

    Args:
        learning_rate: a number, or a schedule of the number of updates so far.
        max_grad_norm: largest global norm of the gradient, > 0.
        eps: number added to the square root of the second moment, >= 0.

    Example:
        >>> import ppo_parts as pp
        >>> optimizer = pp.clipped_adam(pp.linear_schedule(2.5e-4, 0., 976), max_grad_norm=.5)

    Reference: Huang et al. 2022, The 37 Implementation Details of PPO, details 3, 4 and 11.
    """
    learning_rate = check_number("clipped_adam", "learning_rate", learning_rate)
    max_grad_norm = check_number("clipped_adam", "max_grad_norm", max_grad_norm, schedule=False)
    eps = check_number("clipped_adam", "eps", eps, schedule=False)
    clip = _in_dtype_of_updates(optax.clip_by_global_norm, max_grad_norm)
    adam = _in_dtype_of_updates(lambda eps: optax.scale_by_adam(eps=eps), eps)
    return optax.flatten(optax.chain(clip, adam, scale_by_update_schedule(learning_rate)))


def _in_dtype_of_updates(make: Callable[[Any], optax.GradientTransformation], value: Any) -> Any:
    """Return `make(value)`, and convert an array to the dtype of the updates, because optax rejects other dtypes."""
    if type(value) in (int, float):
        return make(value)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        converted = jnp.asarray(value, jnp.result_type(*jax.tree.leaves(updates)))
        return make(converted).update(updates, state, params)

    return optax.GradientTransformation(make(value).init, update)


@checked
def natural_gradient(
    max_kl: Numeric,
    *,
    divergence: str = "kl_penalty",
    damping: float = 0.1,
    cg_steps: Count = 15,
    backtracks: Count = 10,
) -> optax.GradientTransformationExtraArgs:
    r"""Step along the natural gradient, with a step size from a trust region and a line search, as in TRPO.

    .. math:: x \approx (F + \lambda I)^{-1} g, \qquad
              \theta \leftarrow \theta - 0.8^j \sqrt{\frac{2 \delta}{x^T (F + \lambda I)\, x}}\; x

    One of the losses of the chain is the divergence, for example `kl_penalty(coef=1.0, estimator="analytic")`. Its
    coefficient must be 1, because it multiplies the divergence. F is the Hessian of the divergence, and g is the
    gradient of the other losses. x is computed by conjugate gradients, and j is the first of 0, 1, ... for which the
    divergence is at most :math:`\delta` and the sum of the other losses decreases. If no j qualifies, nothing changes.

    Args:
        max_kl: largest divergence delta after the step, in nats, >= 0, or a schedule of the number of updates so far.
        divergence: name of the divergence loss.
        damping: lambda, >= 0.
        cg_steps: number of conjugate gradient steps.
        backtracks: how many values of j to try.

    Returns:
        An optax transformation, to be used alone, for `full_batch` or few large minibatches. Train the critic in a
        separate phase (`phases`), with another optimizer.

    Example:
        >>> import optax, ppo_parts as pp
        >>> surrogate = pp.policy_loss(pp.functional.importance_weighted_surrogate)
        >>> divergence = pp.kl_penalty(coef=1.0, estimator="analytic")
        >>> pipeline = pp.chain(
        ...     pp.gae(gamma=.99, gae_lambda=.95),
        ...     pp.phases(
        ...         actor=pp.chain(pp.full_batch(), pp.advantage_normalize(), surrogate, divergence),
        ...         critic=pp.chain(pp.shuffled_minibatches(16, num_epochs=10), pp.value_loss()),
        ...     ),
        ... )
        >>> optimizers = {"actor": pp.optim.natural_gradient(max_kl=.01), "critic": optax.adam(1e-3)}

    Reference: Schulman et al. 2015, Trust Region Policy Optimization, arXiv:1502.05477, section 6 and appendix C.
    """
    where = "natural_gradient"
    max_kl = check_number(where, "max_kl", max_kl, FROM_0)
    damping = check_number(where, "damping", damping, FROM_0, schedule=False)

    def update(updates: Any, state: Any, params: Any, *, losses_fn: Any, step: Any, **extra: Any) -> tuple[Any, Any]:
        limit = value_at(max_kl, step)

        def losses_at(params: Any) -> tuple[Array, Array]:
            """Return the divergence and the sum of the other losses."""
            losses = dict(losses_fn(params))
            if divergence not in losses or len(losses) == 1:
                raise UserValueError(
                    f"{where}: the losses must be {divergence!r}, which a part such as kl_penalty(coef=1.0, "
                    f'estimator="analytic") adds, and another; got {list(losses)}'
                )
            return losses.pop(divergence), sum(losses.values(), jnp.zeros(()))

        _, before = losses_at(params)
        slope, hessian = jax.linearize(jax.grad(lambda params: losses_at(params)[0]), params)
        gradient = optax.tree.sub(updates, slope)

        def damped(x: Any) -> Any:
            return optax.tree.add_scale(hessian(x), damping, x)

        x, _ = jax.scipy.sparse.linalg.cg(damped, gradient, tol=1e-10, maxiter=cg_steps)
        curvature = optax.tree.vdot(x, damped(x))
        size = jnp.sqrt(2 * limit / jnp.where(curvature > 0, curvature, jnp.inf))

        def try_next(tried: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            number, size, _ = tried
            kl, after = losses_at(optax.tree.add_scale(params, -size, x))
            found = (kl <= limit) & (after < before)
            return number + 1, jnp.where(found, size, 0.8 * size), found

        def goes_on(tried: tuple[Array, Array, Array]) -> Array:
            return ~tried[2] & (tried[0] < backtracks)

        _, size, found = jax.lax.while_loop(goes_on, try_next, (jnp.int32(0), size, jnp.bool_(False)))
        # Where the search fails, x may be infinite or NaN, so that 0 times x would not be 0.
        step = jax.tree.map(lambda u: jnp.where(found, -size.astype(u.dtype) * u, 0), x)
        return spread_nan(step, limit), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


@checked
def per_agent(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Apply an optimizer to each agent's parameters separately; every leaf has a leading agent axis.

    This does not change elementwise transformations such as Adam. Global norms, as in `optax.clip_by_global_norm`, are
    computed per agent, so one agent's gradient does not shrink another's. The optimizer does not receive the learner's
    extra arguments such as `grad` and `value_fn`, because they concern all agents together. For the same reason, write
    `optax.apply_if_finite` around `per_agent`: the learner counts a minibatch that one agent skips as skipped by all.

    Args:
        optimizer: any optax transformation.

    Raises:
        TypeError: if it is not an optax transformation. ValueError: from its `init`, if a leaf has no agent axis.

    Example:
        >>> import optax, ppo_parts as pp
        >>> optimizer = pp.agents.per_agent(optax.chain(optax.clip_by_global_norm(.5), optax.adam(3e-4)))
    """
    inner = wrap_optimizer("per_agent", optimizer)

    def init(params: Any) -> Any:
        sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(params)}
        if len(sizes) != 1 or () in sizes:
            raise UserValueError(
                "per_agent: the first axis of every parameter must be that of the agents, but the first axes have the "
                f"sizes {sorted(sizes)}; parameters that agents share do not need per_agent"
            )
        return jax.vmap(inner.init)(params)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        of_all = ("grad", "value_fn", "obj_fn", "grad_fn", "losses_fn")
        extra = {name: x for name, x in extra.items() if name not in of_all}
        return jax.vmap(lambda u, s, p: inner.update(u, s, p, **extra))(updates, state, params)

    return optax.GradientTransformationExtraArgs(init, update)
