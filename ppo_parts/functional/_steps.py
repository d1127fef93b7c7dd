"""The inputs of the advantage estimators: how they are checked, and what a mask does to them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._arguments import fit
from ._common import Array, ShapeError, accumulator_dtype, known_values, visible
from ._errors import UserValueError

HYPERPARAMETERS = ("gamma", "gae_lambda", "rho_clip", "c_clip", "pg_rho_clip", "pg_lambda")


class Steps(NamedTuple):
    """What an estimator reads, for all steps `[T, ...]` or for one step `[...]`; None for what is not given.

    `gamma`, `gae_lambda` and the fields after `log_ratio` may be single numbers. Only `vtrace` has ratios and clips.
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

    def rows(self, rows: slice) -> Steps:
        """Select some of the steps; a hyperparameter that is a single number stays the same."""
        return jax.tree.map(lambda x: x[rows] if x.ndim else x, self)


def unless(flag: Array | None, x: Array) -> Array:
    """Compute `(1 - flag) * x` with a select, because x may be anything where the flag is 1, including NaN.

    None means that no flag is set. A flag may be a probability; outside [0, 1] the result is NaN.
    """
    if flag is None:
        return x
    if flag.dtype == bool:
        return jnp.where(flag, 0, x)
    keep = 1 - flag.astype(x.dtype)
    keep = jnp.where((keep >= 0) & (keep <= 1), keep, jnp.nan)  # a flag that was traced, and so not checked
    return keep * jnp.where(keep <= 0, 0, x)


def fitted(where: str, x: Steps) -> Steps:
    """Return the inputs as JAX arrays, the hyperparameters in the dtype to compute in and in a shape that fits."""
    shape, dtype = jnp.shape(x.value), accumulator_dtype(x.value)
    if not shape:
        raise ShapeError(f"{where} works along axis 0, time, and the value given is a single number")
    given = {name: getattr(x, name) for name in HYPERPARAMETERS if getattr(x, name) is not None}
    fit_to = {name: fit(where, name, number, shape, dtype) for name, number in given.items()}
    return jax.tree.map(jnp.asarray, x._replace(**fit_to))


def cut_at_masked(x: Steps, next_counts: Array | None = None) -> Steps:
    """Mark masked steps, and the steps before them, as truncated, so that no trace passes from or to a masked step.

    Args:
        x: all steps, or one.
        next_counts: for one step, whether the step that follows counts; for all steps this is known from the mask.
    """
    if x.mask is None:
        return x
    counts = x.mask.astype(bool)
    if next_counts is None:
        next_counts = jnp.concatenate([counts[1:], jnp.ones_like(counts[:1])])
    cut = ~(counts & next_counts)
    # What the flag holds elsewhere stays as it is, for `effective`.
    return x._replace(
        truncated=cut if x.truncated is None else jnp.where(cut, 1, x.truncated).astype(x.truncated.dtype)
    )


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
    if (
        values["mask_mode"] != "skip"
        or flags[-1] is None
        or any(x is not None and known_values(x) is None for x in flags)
    ):
        return
    if (found := unfinished(*flags)).any():
        step = tuple(int(i) for i in np.argwhere(found)[0])
        raise UserValueError(
            f'{where}: mask_mode="skip", and the last unmasked step of a sequence, {step}, is neither terminated nor '
            "truncated, but padding follows it: mark it as terminated, or as truncated if next_value has its bootstrap"
        )


def effective(x: Steps) -> Steps:
    """Return the steps as the equations read them: in the accumulator dtype, flags as such, masked contents as 0.

    The reward is NaN where a flag that was traced, and so not checked, is neither 0 nor 1.

    Replacing the contents of masked steps makes their gradients 0; masking the results would leave 0 * NaN.
    """
    keep = None if x.mask is None else x.mask.astype(bool)
    read = {
        name: getattr(x, name).astype(x.gamma.dtype)
        for name in ("reward", "value", "next_value", "log_ratio")
        if getattr(x, name) is not None
    }
    read["terminated"] = x.terminated
    for flag in (x.truncated, x.mask):
        read["reward"] = read["reward"] if flag is None else visible(read["reward"], flag)
    if keep is not None:
        read = {name: jnp.where(keep, field, 0) for name, field in read.items()}
    return x._replace(truncated=None if x.truncated is None else x.truncated.astype(bool), **read)
