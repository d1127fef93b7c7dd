"""Parts that add named losses or measure the policy being trained; they are placed after the sampler."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import functional
from .._base.checked import checked
from .._base.hyperparameters import Field, Numeric, check_number, value_at
from .._core.batch import Array, Batch, field_at, map_streams
from .._core.part import Context, Part, stateless
from ..distributions import Joint
from ..errors import UserTypeError, UserValueError
from ..functional import masked_mean
from .common import check_numbers, loss_part


@checked
def clipped_surrogate(
    *, clip_eps: Numeric, clip_eps_high: Numeric | None = None, dual_clip: Numeric | None = None, name: str = "policy"
) -> Part:
    """Add PPO's clipped objective, `functional.clipped_surrogate`, as the loss `name`.

    Metrics: `policy_loss` and `clip_fraction`; with another `name`, `<name>_loss` and `<name>_clip_fraction`.

    Args:
        clip_eps, clip_eps_high, dual_clip: as in `functional.clipped_surrogate`.
        name: key in `losses`.

    Place: after the sampler, and after the parts that change the advantage.

    Example:
        >>> import ppo_parts as pp
        >>> part = pp.clipped_surrogate(clip_eps=.2)
        >>> pp.clipped_surrogate(clip_eps=-.2)
        Traceback (most recent call last):
        ...
        ppo_parts.errors.UserValueError: clipped_surrogate: clip_eps must lie in (0, inf], got -0.2
    """
    numbers = check_numbers("clipped_surrogate", clip_eps=clip_eps, clip_eps_high=clip_eps_high, dual_clip=dual_clip)

    def loss(batch: Batch, context: Context, dual_clip: Any, **clips: Any) -> tuple[Array, dict[str, Array]]:
        log_ratio = batch.current_log_ratio()
        surrogate = functional.clipped_surrogate(
            log_ratio, batch.advantage, **clips, dual_clip=dual_clip, mask=batch.mask
        )
        clipped = functional.clip_fraction(log_ratio, **clips)
        prefix = "" if name == "policy" else f"{name}_"
        return surrogate, {f"{name}_loss": surrogate, f"{prefix}clip_fraction": clipped}

    return loss_part(
        "clipped_surrogate", name, loss, numbers, requires=("advantage",), reads=("current.log_prob", "log_prob"),
        policy_loss=True, elementwise=True,
    )  # fmt: skip


@checked
def policy_loss(
    loss: Callable[..., Array], *, name: str = "policy", needs_time: bool = False, **hyperparameters: Any
) -> Part:
    r"""Add `loss(log_ratio, advantage, mask=mask, **hyperparameters)` as the loss `name`.

    Metric: `<name>_loss`.

    Args:
        loss: a policy loss of `functional`, or your own function of :math:`\log\pi_{current}(a) -
            \log\pi_{behavior}(a)` and the advantage that returns a loss per element. If it has a parameter `log_prob`
            or `key`, like `functional.clip_cov`, it receives :math:`\log\pi_{current}(a)` or a PRNG key. It is called
            once with `[1, 1]` arrays when the part is built, so that invalid hyperparameters raise an error at once.
        name: key in `losses`.
        needs_time: whether the loss works along the time axis, which the sampler must then keep. The sequence losses of
            `functional`, such as `gspo`, declare this themselves.
        **hyperparameters: keyword arguments of `loss`; a callable is a schedule of learner updates. Only its first
            value is checked, except for losses of `functional`, where later values out of range become NaN.

    Place: after the sampler, and after the parts that change the advantage.

    Example:
        >>> import ppo_parts as pp
        >>> part = pp.policy_loss(pp.functional.clipped_surrogate, clip_eps=.2)
        >>> own = pp.policy_loss(lambda log_ratio, advantage, mask: -log_ratio * advantage)
    """
    takes = _signature("policy_loss", loss).parameters.keys() - hyperparameters.keys()
    further: dict[str, Any] = {"log_prob": np.zeros((1, 1), np.float32)} if "log_prob" in takes else {}
    if "key" in takes:  # a key is made only if needed, because it starts JAX's backend
        further["key"] = jax.random.key(0)
    bounded = check_loss("policy_loss", loss, ("log_ratio", "advantage"), hyperparameters | further)
    along_time = declaration(loss, "along_time")

    def per_element(batch: Batch, context: Context, /, **now: Any) -> Array:
        inputs = {"log_prob": batch.current.log_prob, "key": context.key}
        now |= {name: inputs[name] for name in further}
        return loss(batch.current_log_ratio(), batch.advantage, mask=batch.mask, **now)

    return loss_part(
        "policy_loss", name, per_element, {x: bounded[x] for x in hyperparameters}, requires=("advantage",),
        reads=("current.log_prob", "log_prob"), needs_time=needs_time or bool(along_time), policy_loss=True,
        elementwise=along_time is False and not further,
    )  # fmt: skip


def declaration(loss: Callable[..., Any], name: str) -> Any:
    """Return what a loss of `functional`, or a partial application of one, declares by this name; None for others."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    return getattr(loss, name, None)


@checked
def policy_diagnostics() -> Part:
    """Measure how far the policy being trained has moved from the behavior policy.

    Metrics: `approx_kl` (k3), `approx_kl_k1`, and `ratio_mean`, `ratio_min` and `ratio_max` of the importance ratio.
    The minimum and maximum are over the whole update.

    Place: after the sampler.

    Example:
        >>> import ppo_parts as pp
        >>> part = pp.policy_diagnostics()

    Reference: Huang et al. 2022, The 37 Implementation Details of PPO, detail 12.
    """

    def update(batch: Batch) -> Batch:
        log_ratio = jax.lax.stop_gradient(batch.current_log_ratio())
        ratio = jnp.exp(log_ratio)
        keep: Any = None if batch.mask is None else batch.mask.astype(bool)
        measured = {
            "approx_kl": functional.approx_kl(log_ratio, mask=batch.mask),
            "approx_kl_k1": functional.approx_kl(log_ratio, estimator="k1", mask=batch.mask),
            "ratio_mean": ratio,
        }
        batch = batch.add_metrics(**{name: masked_mean(x, batch.mask) for name, x in measured.items()})
        # Compute the minimum as a maximum, so that devices that share a minibatch reduce both together.
        batch = batch.add_metrics("min", ratio_min=-jnp.max(-ratio, where=keep, initial=-jnp.inf))
        return batch.add_metrics("max", ratio_max=jnp.max(ratio, where=keep, initial=-jnp.inf))

    reads = ("current.log_prob", "log_prob", "mask")
    return stateless(update, name="policy_diagnostics", reads=reads, place="after_sampler", elementwise=True)


@checked
def clipped_value_loss(*, clip_eps: Numeric, coef: Numeric = 1.0, name: str = "value") -> Part:
    """Add `coef` times the clipped value loss, `functional.clipped_value_loss`, as the loss `name`.

    The prediction is clipped around `batch.value`. Metric: `<name>_loss`, without the coefficient.

    Args:
        clip_eps: clip range, > 0, in reward units.
        coef: coefficient, >= 0. With CleanRL's 0.5, the squared error has weight 0.25, because the loss has a factor of
            1/2.
        name: key in `losses`.

    Place: after the sampler; needs the `target` of `gae` or `vtrace`.

    Example:
        >>> import ppo_parts as pp
        >>> part = pp.clipped_value_loss(clip_eps=.2, coef=.5)
    """
    where, fields = "clipped_value_loss", ("current.value", "value", "target")
    numbers = check_numbers(where, clip_eps=clip_eps)
    return critic_part(where, functional.clipped_value_loss, fields, numbers, name=name, coef=coef, elementwise=True)


@checked
def value_loss(*, coef: Numeric = 1.0, name: str = "value") -> Part:
    """Add `coef` times half the squared error of the value, `functional.value_loss`, as the loss `name`.

    Metric: `<name>_loss`, without the coefficient.

    Args:
        coef: coefficient, >= 0. To reproduce codebases without the factor 1/2 (jaxagents, Stable-Baselines3), double
            their coefficient.
        name: key in `losses`.

    Place: after the sampler; needs the `target` of `gae` or `vtrace`.

    Example:
        >>> import ppo_parts as pp
        >>> part = pp.value_loss(coef=1.)
    """
    fields = ("current.value", "target")
    return critic_part("value_loss", functional.value_loss, fields, {}, name=name, coef=coef, elementwise=True)


def critic_part(
    where: str,
    loss: Callable[..., Array],
    fields: tuple[str, ...],
    numbers: Mapping[str, Any],
    *,
    name: str,
    coef: Numeric,
    elementwise: bool = False,
) -> Part:
    """Make a part from a loss of fields of the batch, the first of which is predicted by the policy being trained.

    If the fields have an additional last axis of streams, the loss is the sum over this axis.
    """

    def per_element(batch: Batch, context: Context, /, **now: Any) -> Array:
        arrays = predicted(where, batch, fields[0]), *(field_at(batch, path) for path in fields[1:])
        own, rank = functools.partial(loss, mask=batch.mask, **now), np.ndim(batch.log_prob)
        value = map_streams(own, batch.log_prob, *arrays, axis=rank)(*arrays)
        return jnp.sum(value, axis=-1) if np.ndim(batch.target) > rank else value

    return loss_part(
        where, name, per_element, numbers, coef=coef, requires=fields[1:], reads=fields[:1], elementwise=elementwise
    )


@checked
def entropy_bonus(*, coef: Numeric, name: str = "entropy") -> Part:
    r"""Add :math:`-\text{coef} \cdot H(\pi(\cdot|s))` as the loss `name`.

    If the distribution does not define `entropy()` (for example, a squashed Gaussian), the entropy is estimated from
    one fresh sample as :math:`-\log\pi(a|s)`. For continuous actions, the gradient flows through the sample, which must
    be differentiable with respect to all parameters (samples of a mixture, and of a `TanhNormal` at its bounds, are
    not). For discrete actions, the gradient is :math:`-\log\pi(a|s)\, \nabla\log\pi(a|s)`.

    Metric: `<name>`, in nats, without the coefficient.

    Args:
        coef: coefficient, >= 0.
        name: key in `losses`, and the name of the metric.

    Place: after the sampler.

    Example:
        >>> import ppo_parts as pp
        >>> part = pp.entropy_bonus(coef=pp.linear_schedule(.01, 0., 1000))

    Reference: Schulman et al. 2017, arXiv:1707.06347, eq. 9; Williams and Peng 1991.
    """

    def loss(batch: Batch, context: Context) -> tuple[Array, dict[str, Array]]:
        entropy = entropy_of(batch.current.distribution, context.key)
        return -entropy, {name: entropy}

    return loss_part("entropy_bonus", name, loss, coef=coef, reads=("current.distribution",), elementwise=True)


def entropy_of(distribution: Any, key: Array) -> Array:
    """Return the entropy per element, which is estimated from a sample if it has no closed form."""
    if hasattr(distribution, "entropy"):
        try:
            return distribution.entropy()
        except NotImplementedError:
            if isinstance(distribution, Joint):
                parts = distribution.leaves
                keys = jax.random.split(key, len(parts))
                each = [entropy_of(part, one) for part, one in zip(parts, keys, strict=True)]
                return sum(each[1:], each[0])
    if not hasattr(distribution, "sample"):
        raise UserTypeError(
            f"the distribution {type(distribution).__name__} defines neither entropy() nor sample(), from "
            "which the entropy could be estimated: define one of them, or leave the entropy out"
        )
    sample = distribution.sample(seed=key)
    if all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(sample)):
        return -distribution.log_prob(sample)
    log_prob = distribution.log_prob(jax.lax.stop_gradient(sample))
    fixed = jax.lax.stop_gradient(log_prob)
    return -(fixed + fixed * (log_prob - fixed))  # the value is -fixed, the slope -fixed * d(log_prob)


def predicted(where: str, batch: Batch, path: str = "current.value") -> Array:
    """Return a prediction of the policy being trained."""
    if (x := field_at(batch, path)) is None:
        what = path.removeprefix("current.")
        own = f"return Output(..., aux={{{what.removeprefix('aux.')!r}: ...}})"
        remedy = f"give it a critic, or leave {where} out" if what == "value" else own
        raise UserValueError(f"{where}: the policy returns no {what}: {remedy}")
    return x


def _signature(where: str, loss: Callable[..., Array]) -> inspect.Signature:
    try:
        return inspect.signature(loss)
    except ValueError:  # some functions that are written in C
        remedy = "wrap it in a function of your own"
        raise UserTypeError(f"{where}: {loss!r} does not tell its parameters: {remedy}") from None


def check_loss(
    where: str,
    loss: Callable[..., Array],
    inputs: tuple[str, str],
    hyperparameters: Mapping[str, Any],
    probe: bool = True,
) -> dict[str, Any]:
    """Raise unless `loss` can be called with two arrays, a mask and these hyperparameters; return the latter.

    If a loss of `functional` declares their ranges, later values of schedules and fields outside them become NaN. With
    `probe`, call `loss` with `[1, 1]` arrays and the first values of schedules; it must return a `[1, 1]` array.
    """
    signature, ours = _signature(where, loss), declaration(loss, "along_time") is not None
    if ours and (takes := [*signature.parameters][:2])[1:] != [inputs[1]]:
        says = f"takes {' and '.join(takes)}, not {' and '.join(inputs)}"
        kinds = "policy_loss takes those of log_ratio and advantage, critics.critic_loss those of prediction and target"
        raise UserTypeError(f"{where}: {getattr(loss, '__name__', loss)} {says}: {kinds}")
    try:
        signature.bind(None, None, mask=None, **hyperparameters)
    except TypeError as error:
        call = ", ".join((*inputs, *(f"{name}=..." for name in ("mask", *hyperparameters))))
        lacks_mask = str(error).endswith("unexpected keyword argument 'mask'")
        remedy = "; add the parameter mask, 1 where an element counts" if lacks_mask else ""
        says = f"the loss is called as {getattr(loss, '__name__', loss)}({call}): {error}{remedy}"
        raise UserTypeError(f"{where}: {says}") from None
    one = np.zeros((1, 1), np.float32)
    first = {key: one + 1 if isinstance(x, Field) else value_at(x, np.int32(0)) for key, x in hyperparameters.items()}
    result = jax.eval_shape(lambda x: loss(x, x, mask=None, **first), one) if probe else one
    if (shape := getattr(result, "shape", "not an array")) != one.shape:
        raise UserValueError(
            f"{where}: the loss must have the shape of {inputs[0]}, got {shape} for {one.shape}: return one number per "
            "element, because the learner takes the mean"
        )
    limits = declaration(loss, "limits") or {}
    return {
        key: check_number(where, key, x, limits[key], field=True)
        if key in limits and x is not None and np.shape(x) == () else x
        for key, x in hyperparameters.items()
    }  # fmt: skip
