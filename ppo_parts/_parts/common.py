"""Helpers for parts: checks of hyperparameters, and functions that make a part from a loss per element."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base.hyperparameters import check_number
from .._base.moments import Moments
from .._core.batch import Array, Batch
from .._core.part import Context, Part, stateless
from ..functional import masked_mean
from ..functional._arguments import fit
from ..functional._common import masked_sum

OPTIONAL = ("clip_eps_high", "dual_clip", "pg_rho_clip", "pg_lambda", "temporal", "spatial", "length")
"""Hyperparameters that may be None."""

PER_ELEMENT = (
    "gamma", "gae_lambda", "rho_clip", "c_clip", "pg_rho_clip", "pg_lambda", "clip_eps", "clip_eps_high", "dual_clip",
    "coef",
)  # fmt: skip
"""Hyperparameters that may be a `field`, with one number per element."""


def check_numbers(where: str, **given: Any) -> dict[str, Any]:
    """Return hyperparameters after checking that each is a number in its range, or can become one."""

    def checked(name: str, value: Any) -> Any:
        absent = value is None and name in OPTIONAL
        return None if absent else check_number(where, name, value, field=name in PER_ELEMENT)

    return {name: checked(name, value) for name, value in given.items()}


def is_zero(value: Any) -> bool:
    """Return whether a hyperparameter is known to be 0 in every update."""
    return not callable(value) and not isinstance(value, jax.core.Tracer) and not np.any(np.asarray(value))


def loss_part(
    where: str,
    name: str,
    loss: Callable[..., Any],
    numbers: Mapping[str, Any] | None = None,
    **declared: Any,
) -> Part:
    """Make a part that adds `coef` times a loss per element, `loss(batch, context, **numbers)`, as the loss `name`.

    `loss` receives the values of the hyperparameters in this update; without `coef` in `declared`, the coefficient is
    1. The metric is `<name>_loss`, the mean without the coefficient. If the function returns `(loss, measured)`, the
    metrics are the means of the arrays `measured` instead.
    """
    weight = check_numbers(where, coef=declared.pop("coef")) if "coef" in declared else {}

    def update(batch: Batch, context: Context, /, **values: Any) -> Batch:
        coef = values.pop("coef") if weight else 1.0
        result = loss(batch, context, **values)
        value, measured = result if isinstance(result, tuple) else (result, {f"{name}_loss": result})
        batch = batch.add_loss(name, (fit(where, "coef", coef, value.shape, None) * value).astype(value.dtype))
        means = {key: masked_mean(jax.lax.stop_gradient(x), batch.mask) for key, x in measured.items()}
        return batch.add_metrics(**means)

    of_loss: dict[str, Any] = {"provides": ("losses",), "place": "after_sampler", "policy_loss": False}
    declared = of_loss | declared | {"reads": (*declared["reads"], "mask")}
    return stateless(update, name=where, numbers={**(numbers or {}), **weight}, **declared)


def moments_of(x: Array, mask: Array | None) -> Moments:
    """Return the moments of the unmasked elements of an array."""
    mean = masked_mean(x, mask)
    return Moments(mean, masked_mean(jnp.square(x - mean), mask), masked_sum(jnp.ones_like(x), mask))
