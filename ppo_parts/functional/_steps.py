"""The advantage estimators: what they read, and what a mask does to it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._arguments import fit
from ._common import Array, accumulator_dtype, boolean_mask, known_values, nan_if_not_flag, where_flag
from ._errors import UserValueError

HYPERPARAMETERS = ("gamma", "gae_lambda", "rho_clip", "c_clip", "pg_rho_clip", "pg_lambda")


class Steps(NamedTuple):
    """What an estimator reads, `[T, ...]`; None for what is not given.

    Hyperparameters may be single numbers. Only `vtrace` has ratios and clips.
    """

    reward: Array
    value: Array
    next_value: Array
    terminated: Array
    truncated: Array | None
    mask: Array | None
    gamma: Any
    gae_lambda: Any
    log_ratio: Any = None
    rho_clip: Any = None
    c_clip: Any = None
    pg_rho_clip: Any = None
    pg_lambda: Any = None


def zero_where(flag: Array | None, x: Array) -> Array:
    """Compute `(1 - flag) * x` with a select, because x may be anything where the flag is 1, including NaN.

    None means that no flag is set. A flag may be a probability; outside [0, 1] the result is NaN.
    """
    if flag is None or flag.dtype == bool:
        return where_flag(flag, 0, x)
    keep = 1 - flag.astype(x.dtype)
    keep = jnp.where((keep >= 0) & (keep <= 1), keep, jnp.nan)  # a flag that was traced, and so not checked
    return keep * jnp.where(keep <= 0, 0, x)


def prepare(where: str, x: Steps, stop_gradient: bool, *, skip: bool = False) -> Steps:
    """Return the steps as the equations read them: in the dtype to compute in, and with the mask applied.

    With `skip`, masked steps are passed over; otherwise they are the ends of trajectories.
    """
    shape, dtype = x.value.shape, accumulator_dtype(x.value)
    given = {name: getattr(x, name) for name in HYPERPARAMETERS if getattr(x, name) is not None}
    x = x._replace(**{name: fit(where, name, number, shape, dtype) for name, number in given.items()})
    # Applied to the inputs, so that no derivatives of the computation are traced.
    x = jax.lax.stop_gradient(x) if stop_gradient else x
    names = [name for name in ("reward", "value", "next_value", "log_ratio") if getattr(x, name) is not None]
    read = {name: getattr(x, name).astype(dtype) for name in names} | {"terminated": x.terminated}
    if x.mask is None:
        return x._replace(**read)
    counts = boolean_mask(x.mask, x.value)
    if skip:  # where it was known, it has been checked
        read["reward"] = jnp.where(unfinished(x.terminated, x.truncated, x.mask), jnp.nan, read["reward"])
    else:
        # No trace passes from or to a masked step: it, and the one before it, are truncated.
        cut = ~(counts & jnp.concatenate([counts[1:], jnp.ones_like(counts[:1])]))
        # Elsewhere the flag stays as it is, so that one that is neither 0 nor 1 is seen.
        truncated = cut if x.truncated is None else jnp.where(cut, 1, x.truncated).astype(x.truncated.dtype)
        x = x._replace(truncated=truncated)
    # Replacing the contents of masked steps makes their gradients 0; masking the results would leave 0 * NaN.
    read["reward"] = nan_if_not_flag(read["reward"], x.mask)
    return x._replace(**{name: jnp.where(counts, field, 0) for name, field in read.items()})


def unfinished(terminated: Any, truncated: Any | None, mask: Any) -> Any:
    """Return whether a step is the last unmasked one before padding, but has no flag that says how it ends.

    Padding is the masked steps until the end of the array. Nothing follows the step before it.
    """
    xp = jnp if any(isinstance(x, jax.core.Tracer) for x in (terminated, truncated, mask)) else np
    keep = xp.asarray(mask).astype(bool)
    padding = xp.cumsum(keep[::-1], axis=0)[::-1] == 0
    before = xp.concatenate([padding[1:], xp.zeros_like(padding[:1])])
    ends = xp.asarray(terminated) > 0
    return keep & before & ~(ends if truncated is None else ends | xp.asarray(truncated).astype(bool))


def check_padding(where: str, values: dict[str, Any]) -> None:
    """Raise if padding is known to follow a step of a sequence that has not ended."""
    flags = [values[name] for name in ("terminated", "truncated", "mask")]
    if values["mask_mode"] != "skip" or flags[-1] is None:
        return
    if any(x is not None and known_values(x) is None for x in flags):
        return
    if (found := unfinished(*flags)).any():
        step = tuple(int(i) for i in np.argwhere(found)[0])
        raise UserValueError(
            f'{where}: mask_mode="skip", and the last unmasked step of a sequence, {step}, is neither terminated nor '
            "truncated, but padding follows it: mark it as terminated, or as truncated if next_value has its bootstrap"
        )
