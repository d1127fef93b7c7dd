"""Parts that add named losses, and measure the policy being trained; they are placed after the sampler."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import functional
from .._base.errors import UserTypeError, UserValueError
from .._base.hyperparameters import Numeric, at, check_count, check_number
from .._core.types import Array, Batch, Context, Part, require, stateless
from ..functional import masked_mean
from .advantage import align_weight


def clipped_surrogate(
    *,
    clip_eps: Numeric,
    clip_eps_high: Numeric | None = None,
    dual_clip: Numeric | None = None,
    name: str = "policy",
) -> Part:
    """Add PPO's clipped objective as the loss `name`; see `functional.clipped_surrogate` for the equation.

    Metrics (means over the minibatch): `policy_loss` and `clip_fraction`; with another `name`, `<name>_loss` and
    `<name>_clip_fraction`. `policy_diagnostics` measures divergences and ratios.

    Args:
        clip_eps: clip range, > 0; a schedule counts learner updates (so do the others).
        clip_eps_high: clip range above 1 (DAPO's clip-higher); None: `clip_eps`.
        dual_clip: None, or a bound c > 1 for elements with a negative advantage.
        name: key in `losses`.

    Place: after the sampler, and after the parts that change the advantage.

    Example:
        >>> import ppo_parts as pp
        >>> pp.clipped_surrogate(clip_eps=-.2)
        Traceback (most recent call last):
        ...
        ppo_parts.errors.UserValueError: clipped_surrogate: clip_eps must lie in (0, inf], got -0.2

    Reference: Schulman et al. 2017, arXiv:1707.06347, eq. 7. Dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5.
    """
    clip_eps = check_number("clipped_surrogate", "clip_eps", clip_eps, 0, open_low=True)
    if clip_eps_high is not None:
        clip_eps_high = check_number("clipped_surrogate", "clip_eps_high", clip_eps_high, 0, open_low=True)
    if dual_clip is not None:
        dual_clip = check_number("clipped_surrogate", "dual_clip", dual_clip, 1, open_low=True)

    def update(batch: Batch, context: Context) -> Batch:
        log_ratio = batch.current_log_ratio()
        low = at(clip_eps, context.step)
        high = None if clip_eps_high is None else at(clip_eps_high, context.step)
        bound = None if dual_clip is None else at(dual_clip, context.step)
        loss = functional.clipped_surrogate(
            log_ratio, batch.advantage, clip_eps=low, clip_eps_high=high, dual_clip=bound, mask=batch.mask
        )
        clipped = functional.clip_fraction(jax.lax.stop_gradient(log_ratio), clip_eps=low, clip_eps_high=high)
        prefix = "" if name == "policy" else f"{name}_"
        measured = {
            f"{name}_loss": masked_mean(jax.lax.stop_gradient(loss), batch.mask),
            f"{prefix}clip_fraction": masked_mean(clipped, batch.mask),
        }
        return batch.add_loss(name, loss).add_metrics(**measured)

    reads, numbers = ("current.log_prob", "log_prob"), (clip_eps, clip_eps_high, dual_clip)
    return loss_part("clipped_surrogate", update, requires=("advantage",), reads=reads, numbers=numbers)


def policy_loss(
    loss: Callable[..., Array], *, name: str = "policy", needs_time: bool = False, **hyperparameters: Any
) -> Part:
    r"""Add `loss(log_ratio, advantage, mask=mask, **hyperparameters)` as the loss `name`.

    This turns any policy loss into a part: one in `functional` that takes these arrays, or your own function of
    :math:`\log\pi_{current}(a) - \log\pi_{behavior}(a)` and the advantage that returns a loss per element. Metric:
    `<name>_loss`, the mean over the minibatch.

    Args:
        loss: the function. It is called once with `[1, 1]` arrays when the part is built, so that a hyperparameter
            that it rejects raises an error at once.
        name: key in `losses`.
        needs_time: whether the loss works along the time axis, so that the sampler must keep it, as
            `segment_minibatches` does. The sequence losses of `functional`, such as `gspo`, declare this themselves.
        **hyperparameters: keyword arguments of `loss`; a callable is a schedule of learner updates, of which only the
            first value is checked.

    Place: after the sampler, and after the parts that change the advantage.

    Raises:
        TypeError: `loss` is not a function, or does not take these arguments. ValueError: it rejects a hyperparameter,
            or returns another shape.

    Example:
        >>> import ppo_parts as pp
        >>> part = pp.policy_loss(pp.functional.clipped_surrogate, clip_eps=.2)
        >>> own = pp.policy_loss(lambda log_ratio, advantage, mask: -log_ratio * advantage)
    """
    check_loss("policy_loss", loss, ("log_ratio", "advantage"), hyperparameters)

    def per_element(batch: Batch, context: Context) -> Array:
        now = {key: at(value, context.step) for key, value in hyperparameters.items()}
        return loss(batch.current_log_ratio(), batch.advantage, mask=batch.mask, **now)

    numbers = tuple(hyperparameters.values())
    return policy_part("policy_loss", name, per_element, needs_time or works_along_time(loss), numbers)


def works_along_time(loss: Callable[..., Any]) -> bool:
    """Return whether a loss of `functional`, or a partial application of one, is a sequence loss."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    return getattr(loss, "along_time", False)


def policy_diagnostics() -> Part:
    """Measure how far the policy being trained has moved from the policy that acted.

    Metrics, over the unmasked elements of each minibatch: `approx_kl` (k3), `approx_kl_k1`, and `ratio_mean`,
    `ratio_min` and `ratio_max` of the importance ratio. Over the minibatches of an update they are averaged, except
    that `ratio_min` is the smallest and `ratio_max` the largest.

    Place: after the sampler.

    Example:
        >>> import ppo_parts as pp
        >>> part = pp.policy_diagnostics()

    Reference: Huang et al. 2022, The 37 Implementation Details of PPO, detail 12.
    """

    def update(batch: Batch) -> Batch:
        log_ratio = jax.lax.stop_gradient(batch.current_log_ratio())
        ratio = jnp.exp(log_ratio)
        keep = True if batch.mask is None else batch.mask.astype(bool)
        batch = batch.add_metrics(
            approx_kl=masked_mean(functional.approx_kl(log_ratio, mask=batch.mask), batch.mask),
            approx_kl_k1=masked_mean(functional.approx_kl(log_ratio, estimator="k1", mask=batch.mask), batch.mask),
            ratio_mean=masked_mean(ratio, batch.mask),
        )
        # Computed as a maximum, so that devices that share the minibatch reduce it together with `ratio_max`.
        batch = batch.add_metrics("min", ratio_min=-jnp.max(-ratio, where=keep, initial=-jnp.inf))
        return batch.add_metrics("max", ratio_max=jnp.max(ratio, where=keep, initial=-jnp.inf))

    return stateless(
        update, name="policy_diagnostics", reads=("current.log_prob", "log_prob", "mask"), place="after_sampler"
    )


def clipped_value_loss(*, clip_eps: Numeric, coef: Numeric = 1.0, name: str = "value") -> Part:
    """Add `coef` times the clipped value loss as the loss `name`; see `functional.clipped_value_loss`.

    The prediction is clipped around `batch.value`: the rollout's, or the latest one that `refresh` wrote back. Metric:
    `<name>_loss`, without the coefficient.

    Args:
        clip_eps: clip range, > 0, in reward units; a schedule counts learner updates.
        coef: coefficient, >= 0; a schedule counts learner updates. (With CleanRL's 0.5 and the factor 1/2 in the loss,
            the squared error has weight 0.25.)
        name: key in `losses`.

    Place: after the sampler; needs the `target` of `gae` or `vtrace`.

    Example:
        >>> import ppo_parts as pp
        >>> part = pp.clipped_value_loss(clip_eps=.2, coef=.5)

    Reference: OpenAI baselines' PPO2; Engstrom et al. 2020, arXiv:2005.12729, value function clipping.
    """
    clip_eps = check_number("clipped_value_loss", "clip_eps", clip_eps, 0, open_low=True)
    coef = check_number("clipped_value_loss", "coef", coef, 0)

    def loss(batch: Batch, context: Context) -> Array:
        require_critic("clipped_value_loss", batch)
        require(batch, "clipped_value_loss", value="it is the prediction to clip around; or use value_loss()")
        bound = at(clip_eps, context.step)
        return functional.clipped_value_loss(
            batch.current.value, batch.value, batch.target, clip_eps=bound, mask=batch.mask
        )

    reads, numbers = ("current.value", "value"), (clip_eps,)
    return measured_loss_part(
        "clipped_value_loss", name, loss, coef=coef, requires=("target",), reads=reads, numbers=numbers
    )


def value_loss(*, coef: Numeric = 1.0, name: str = "value") -> Part:
    """Add `coef` times half the squared error of the value as the loss `name`; see `functional.value_loss`.

    Metric: `<name>_loss`, without the coefficient.

    Args:
        coef: coefficient, >= 0; a schedule counts learner updates. For codebases without the factor 1/2 (jaxagents,
            Stable-Baselines3), double their coefficient.
        name: key in `losses`.

    Place: after the sampler; needs the `target` of `gae` or `vtrace`.

    Example:
        >>> import ppo_parts as pp
        >>> part = pp.value_loss(coef=1.)

    Reference: Schulman et al. 2017, arXiv:1707.06347, eq. 9.
    """
    coef = check_number("value_loss", "coef", coef, 0)

    def loss(batch: Batch, context: Context) -> Array:
        require_critic("value_loss", batch)
        return functional.value_loss(batch.current.value, batch.target, mask=batch.mask)

    return measured_loss_part("value_loss", name, loss, coef=coef, requires=("target",), reads=("current.value",))


def entropy_bonus(*, coef: Numeric, num_samples: int = 1, name: str = "entropy") -> Part:
    r"""Add :math:`-\text{coef} \cdot H(\pi(\cdot|s))` as the loss `name`.

    If the distribution does not define `entropy()` (a tanh-squashed Gaussian, for example), it is estimated from K =
    `num_samples` fresh samples, :math:`-\frac{1}{K}\sum_k \log\pi(a_k|s)`. The gradient flows through samples that are
    real numbers, so these must be differentiable with respect to all parameters; samples of a mixture are not, so its
    distribution must define `entropy()`. If a part of the action is discrete, the gradient is instead
    :math:`-\frac{1}{K}\sum_k \log\pi(a_k|s)\, \nabla\log\pi(a_k|s)`.

    Metric: `<name>`, in nats, without the coefficient.

    Args:
        coef: coefficient, >= 0; a schedule counts learner updates.
        num_samples: samples of the estimate; not used where the entropy has a closed form.
        name: key in `losses`, and the name of the metric.

    Place: after the sampler.

    Example:
        >>> import ppo_parts as pp
        >>> part = pp.entropy_bonus(coef=pp.linear_schedule(.01, 0., 1000))

    Reference: Schulman et al. 2017, arXiv:1707.06347, eq. 9; Williams and Peng 1991.
    """
    coef = check_number("entropy_bonus", "coef", coef, 0)
    check_count("entropy_bonus", "num_samples", num_samples)

    def update(batch: Batch, context: Context) -> Batch:
        entropy = entropy_of(batch.current.distribution, context.key, num_samples)
        batch = batch.add_loss(name, (-at(coef, context.step) * entropy).astype(entropy.dtype))
        return batch.add_metrics(**{name: masked_mean(entropy, batch.mask)})

    return loss_part("entropy_bonus", update, reads=("current.distribution",))


def loss_weight(*names: str) -> Part:
    """Multiply the named losses by the sampler's importance weight: L_i <- w_i L_i.

    Args:
        *names: keys of `losses`, e.g. "policy", "value".

    Place: after those losses and a sampler that provides weights. Losses have one number per element or per segment; a
    loss that is a single number is an error.

    Example:
        >>> import ppo_parts as pp
        >>> part = pp.loss_weight("policy", "value")

    Reference: Schaul et al. 2016, arXiv:1511.05952, section 3.4.
    """
    if not names or not all(isinstance(name, str) for name in names):
        raise UserTypeError(f'loss_weight: name the losses to weight, e.g. loss_weight("policy"), got {names!r}')

    def update(batch: Batch) -> Batch:
        found = {name: named_loss("loss_weight", batch, name) for name in names}
        weighed = {name: loss * _weight_of(batch, name, loss) for name, loss in found.items()}
        return batch.replace(losses={**batch.losses, **weighed})

    return stateless(
        update,
        name="loss_weight",
        requires=("losses", "weight"),
        provides=("losses",),
        reads=(),
        place="after_sampler",
    )


def _weight_of(batch: Batch, name: str, loss: Array) -> Array:
    """Return the weights with the axes of a loss, which has one number for each element or for each segment."""
    if not jnp.ndim(loss):
        raise UserValueError(
            f"loss_weight: the loss {name!r} is a single number, which cannot be weighted: put loss_weight before the "
            "part that reduces it"
        )
    if loss.ndim < len(batch.axes):  # one number for each segment
        return batch.weight.astype(loss.dtype)
    return align_weight(batch, loss)


def entropy_of(distribution: Any, key: Array, num_samples: int) -> Array:
    """Return the entropy per element, estimated from samples if it has no closed form."""
    entropy = _closed_form_entropy(distribution)
    if entropy is not None:
        return entropy
    if not hasattr(distribution, "sample"):
        raise UserTypeError(
            f"the distribution {type(distribution).__name__} defines neither entropy() nor sample(), from "
            "which the entropy could be estimated: define one of them, or leave the entropy out"
        )
    sample = distribution.sample(seed=key, sample_shape=(num_samples,))
    if all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(sample)):
        return -jnp.mean(distribution.log_prob(sample), axis=0)
    log_prob = distribution.log_prob(jax.lax.stop_gradient(sample))
    fixed = jax.lax.stop_gradient(log_prob)
    return -jnp.mean(fixed + fixed * (log_prob - fixed), axis=0)  # the value is -fixed, the slope -fixed * d(log_prob)


def _closed_form_entropy(distribution: Any) -> Array | None:
    """Return the entropy, or None if the distribution does not define it; other errors of `entropy()` are raised."""
    if not hasattr(distribution, "entropy"):
        return None
    try:
        return distribution.entropy()
    except NotImplementedError:
        return None


def require_critic(where: str, batch: Batch) -> None:
    """Raise unless the policy being trained has a value."""
    if batch.current.value is None:
        raise UserValueError(f"{where}: the policy has no value to learn: give it a critic, or leave {where} out")


def loss_part(
    where: str,
    update: Callable[..., Any],
    *,
    init: Callable[..., Any] | None = None,
    finish: Callable[[Batch, Any, Context], Any] | None = None,
    reads: tuple[str, ...],
    **declared: Any,
) -> Part:
    """Make a part that adds a loss: its place is after the sampler, and it reads the mask as well as `reads`.

    Without `init`, `update` is a function of the batch and the context, as for `stateless`.
    """
    declared |= {"provides": ("losses",), "reads": (*reads, "mask"), "place": "after_sampler"}
    if init is None:
        return stateless(update, name=where, **declared)
    return Part(init, update, where, finish=finish, **declared)


def measured_loss_part(
    where: str,
    name: str,
    loss: Callable[[Batch, Context], Array],
    *,
    coef: Numeric = 1.0,
    requires: tuple[str, ...] = (),
    reads: tuple[str, ...],
    needs_time: bool = False,
    numbers: tuple[Any, ...] = (),
) -> Part:
    """Make a part that adds `coef` times `loss(batch, context)`, a loss per element; see `add_measured_loss`."""

    def update(batch: Batch, context: Context) -> Batch:
        return add_measured_loss(batch, name, loss(batch, context), at(coef, context.step))

    return loss_part(where, update, requires=requires, reads=reads, needs_time=needs_time, numbers=numbers)


def policy_part(
    where: str,
    name: str,
    loss: Callable[[Batch, Context], Array],
    needs_time: bool = False,
    numbers: tuple[Any, ...] = (),
) -> Part:
    """Make a part that adds a loss per element, which is a function of the log-ratio and the advantage."""
    reads: Any = {"requires": ("advantage",), "reads": ("current.log_prob", "log_prob")}
    return measured_loss_part(where, name, loss, **reads, needs_time=needs_time, numbers=numbers)


def check_loss(
    where: str,
    loss: Callable[..., Array],
    inputs: tuple[str, str],
    hyperparameters: Mapping[str, Any],
    *,
    call: bool = True,
) -> None:
    """Raise unless `loss` takes two arrays, called `inputs`, a mask and these hyperparameters.

    With `call`, it is called with `[1, 1]` arrays and the first values of schedules; it must return a loss per element.
    """
    if not callable(loss):
        raise UserTypeError(f"{where}: give a function of {' and '.join(inputs)}, got {loss!r}")
    try:
        inspect.signature(loss).bind(None, None, mask=None, **hyperparameters)
    except TypeError as error:
        remedy = f"; write it as f({', '.join(inputs)}, *, mask=None, ...)" if "'mask'" in str(error) else ""
        unknown = [name for name in hyperparameters if name not in inspect.signature(loss).parameters]
        if unknown and "unexpected" not in str(error):
            remedy += f"; it has no {unknown[0]!r}"
        raise UserTypeError(f"{where}: {getattr(loss, '__name__', loss)} {error}{remedy}") from None
    if not call:
        return
    first = {key: at(value, 0) for key, value in hyperparameters.items()}
    probe = np.zeros((1, 1), np.float32)
    try:
        shape = getattr(jax.eval_shape(lambda x: loss(x, x, mask=None, **first), probe), "shape", "not an array")
    except (TypeError, ValueError) as error:
        raise (UserTypeError if isinstance(error, TypeError) else UserValueError)(f"{where}: {error}") from error
    if shape != probe.shape:
        raise UserValueError(
            f"{where}: the loss must have the shape of {inputs[0]}, got {shape} for {probe.shape}: return one number "
            "per element, because the learner takes the mean"
        )


def named_loss(where: str, batch: Batch, name: str) -> Array:
    """Return the loss of this name; raise if there is none."""
    if name not in batch.losses:
        there = ", ".join(batch.losses) or "none yet (put it after the losses)"
        raise UserValueError(f"{where}: no loss is named {name!r}; the losses are: {there}")
    return batch.losses[name]


def add_measured_loss(batch: Batch, name: str, loss: Array, coef: Array | float = 1.0) -> Batch:
    """Add the loss times its coefficient, and its mean without the coefficient as the metric `<name>_loss`."""
    measured = masked_mean(jax.lax.stop_gradient(loss), batch.mask)
    return batch.add_loss(name, (coef * loss).astype(loss.dtype)).add_metrics(**{f"{name}_loss": measured})
