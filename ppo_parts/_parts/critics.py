"""Parts for critics that are not trained on the squared error in reward units."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from .._base.checked import checked
from .._base.hyperparameters import Numeric, check_takes
from .._core.batch import Array, Batch, Params
from .._core.part import Context, Part, read_numbers
from ..errors import UserValueError
from ..functional._common import check_same_shape
from .common import check_numbers, moments_of
from .losses import check_loss, critic_part, declaration


@checked
def critic_loss(
    loss: Callable[..., Array],
    *,
    prediction: str = "value",
    coef: Numeric = 1.0,
    name: str = "value",
    **hyperparameters: Any,
) -> Part:
    """Add `coef` times `loss(prediction, target, mask=mask, **hyperparameters)` as the loss `name`.

    Metric: `<name>_loss`, without the coefficient.

    Args:
        loss: a value loss of `functional`, or your own `f(prediction, target, mask)` that returns a loss per element.
        prediction: the entry of the policy's `Output` to compare with the target, "value" or one in `aux`, such as
            "aux.value_logits".
        coef: coefficient, >= 0.
        name: key in `losses`.
        **hyperparameters: keyword arguments of `loss`, as in `policy_loss`.

    Place: after the sampler; needs the `target` of `gae` or `vtrace`.

    Example:
        >>> import jax.numpy as jnp, ppo_parts as pp
        >>> huber = pp.critics.critic_loss(pp.functional.huber_value_loss, delta=1., coef=.5)
        >>> hl_gauss = pp.critics.critic_loss(
        ...     pp.functional.categorical_value_loss, prediction="aux.value_logits",
        ...     support=jnp.linspace(-10., 10., 51), sigma=.3,
        ... )
        >>> pp.critics.critic_loss(pp.functional.huber_value_loss, prediction="logits")
        Traceback (most recent call last):
        ...
        ppo_parts.errors.UserValueError: critic_loss: prediction must be "value" or "aux.<name>", got 'logits'
    """
    if prediction != "value" and not re.fullmatch(r"aux\..+", prediction):
        raise UserValueError(f'critic_loss: prediction must be "value" or "aux.<name>", got {prediction!r}')
    of_value = prediction == "value"  # the shape of an entry of `aux` is not known yet
    bounded = check_loss("critic_loss", loss, ("prediction", "target"), hyperparameters, probe=of_value)
    fields, elementwise = (f"current.{prediction}", "target"), declaration(loss, "along_time") is False
    return critic_part("critic_loss", loss, fields, bounded, name=name, coef=coef, elementwise=elementwise)


class ValueStatistics(NamedTuple):
    """Running mean and standard deviation of value targets, in reward units."""

    mean: Array
    scale: Array


@checked
def normalize_target(write: Callable[[Params, ValueStatistics, ValueStatistics], Params], *, rate: Numeric) -> Part:
    r"""Normalize targets with running statistics, and write them to `extras.target_normalized`.

    .. math:: \mu \leftarrow \mu + \beta (\bar y - \mu), \qquad
              \sigma^2 \leftarrow (1 - \beta) \sigma^2 + \beta\, \mathrm{Var}(y) + \beta (1 - \beta) (\bar y - \mu)^2,
              \qquad \hat y = \frac{y - \mu}{\sigma}

    This averages the first two moments of the rollout's targets y exponentially, from a mean of 0 and a variance of 1;
    :math:`\beta` is `rate`, and :math:`\sigma` is at least 1e-4. Metrics: `target_mean`, `target_scale`.

    The network must denormalize its prediction n, :math:`V = \sigma n(s) + \mu`, because values are in reward units
    everywhere else. The statistics are therefore parameters, which `write` sets. If `write` also rescales the last
    layer with `functional.rescale_head`, this is PopArt.

    Args:
        write: `write(params, old, new) -> params`, where `old` and `new` are the `ValueStatistics` before and after.
        rate: the weight of the new rollout in the statistics, in [0, 1], each time the part runs.
            `lambda step: 1 / (step + 1)` averages over all rollouts.

    Place: after `gae` or `vtrace`, before the sampler.

    Example:
        >>> import ppo_parts as pp
        >>> def write(params, old, new):
        ...     kernel, bias = pp.functional.rescale_head(params["kernel"], params["bias"], old, new)
        ...     return params | {"kernel": kernel, "bias": bias, "mean": new.mean, "scale": new.scale}
        >>> popart = pp.critics.normalize_target(write, rate=.01)
        >>> loss = pp.within(
        ...     pp.value_loss(coef=.5), name="normalized",
        ...     read={"current.value": "current.aux.value_normalized", "target": "extras.target_normalized"},
        ... )

    Reference: van Hasselt et al. 2016, PopArt, arXiv:1602.07714, eq. 5 and proposition 1.
    """
    where = "normalize_target"
    check_takes(where, "write", write, ("params", "old", "new"))
    numbers = check_numbers(where, rate=rate)

    def init(params: Params, key: Array | None = None) -> ValueStatistics:
        return ValueStatistics(jnp.zeros(()), jnp.ones(()))

    def update(batch: Batch, state: ValueStatistics, context: Context) -> tuple[Batch, ValueStatistics]:
        check_same_shape(where, target=batch.target, log_prob=batch.log_prob)  # of one stream
        share = jnp.asarray(read_numbers(numbers, batch, context.step)["rate"], state.mean.dtype)
        if batch.mask is not None:  # without unmasked targets, their mean is undefined
            share = jnp.where(jnp.any(batch.mask.astype(bool)), share, 0)
        dtype, target = batch.target.dtype, batch.target.astype(state.mean.dtype)
        center, spread, _ = moments_of(target, batch.mask)
        moved = center - state.mean
        variance = (1 - share) * jnp.square(state.scale) + share * (spread + (1 - share) * jnp.square(moved))
        state = ValueStatistics(state.mean + share * moved, jnp.maximum(jnp.sqrt(variance), 1e-4))
        batch = batch.add_extras(target_normalized=((target - state.mean) / state.scale).astype(dtype))
        return batch.add_metrics(target_mean=state.mean.astype(dtype), target_scale=state.scale.astype(dtype)), state

    def amend(params: Params, opt_state: Any, old: Any, new: Any, context: Context) -> tuple[Params, Any]:
        return write(params, old, new), opt_state

    return Part(
        init, update, where, requires=("target",), provides=("extras.target_normalized",), reads=("log_prob", "mask"),
        place="before_sampler", amend=amend, numbers=numbers,
    )  # fmt: skip
