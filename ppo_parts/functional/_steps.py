"""What the advantage estimators read, and what a mask does to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._arguments import fit
from ._common import Array, accumulator_dtype, known_values
from ._errors import UserValueError


class Steps(NamedTuple):
    """What the equations of an estimator read, `[T, ...]`; only those of `vtrace` read ratios and clips."""

    reward: Array
    value: Array
    next_value: Array
    terminated: Array
    truncated: Array | None
    gamma: Array
    gae_lambda: Array
    log_ratio: Any = None
    rho_clip: Any = None
    c_clip: Any = None
    pg_rho_clip: Any = None
    pg_lambda: Any = None


def prepare(
    where: str, hyperparameters: Mapping[str, Any], *, terminated: Any, truncated: Any, mask: Any, stop_gradient: bool,
    skip: bool = False, **arrays: Array,
) -> Steps:  # fmt: skip
    """Return the arguments as the equations read them: in the dtype to compute in, and with the mask applied.

    With `skip`, masked steps are passed over; otherwise they are the ends of trajectories.
    """
    shape, dtype = arrays["value"].shape, accumulator_dtype(arrays["value"])
    given = {name: x for name, x in hyperparameters.items() if x is not None}
    numbers = {name: fit(where, name, x, shape, dtype) for name, x in given.items()}
    floats = {name: x.astype(dtype) for name, x in arrays.items()}
    if stop_gradient:  # of the inputs, so that no derivatives of the computation are traced
        floats, numbers, terminated = jax.lax.stop_gradient((floats, numbers, terminated))
    cut = None if truncated is None else truncated.astype(bool)
    if mask is not None:
        counts = mask.astype(bool)
        if skip:  # where it was known, it has been checked
            floats["reward"] = jnp.where(unfinished(terminated, truncated, mask), jnp.nan, floats["reward"])
        else:  # no trace passes from or to a masked step: it, and the one before it, are truncated
            ends = ~(counts & jnp.concatenate([counts[1:], jnp.ones_like(counts[:1])]))
            cut = ends if cut is None else cut | ends
        # Replacing the contents of masked steps makes their gradients 0; masking the results would leave 0 * NaN.
        terminated = jnp.where(counts, terminated, False)
        floats = {name: jnp.where(counts, x, 0) for name, x in floats.items()}
    return Steps(terminated=terminated, truncated=cut, **floats, **numbers)


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
