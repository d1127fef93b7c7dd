"""The inputs of the advantage estimators: how they are checked, and what a mask does to them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._common import (
    Array,
    ShapeError,
    accumulator_dtype,
    check_arrays,
    check_flags,
    check_floating,
    check_same_shape,
    checked_hyperparameter,
    known_values,
)


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

    None means that no flag is set.
    """
    if flag is None:
        return x
    if flag.dtype == bool:
        return jnp.where(flag, 0, x)
    keep = 1 - flag.astype(x.dtype)
    return keep * jnp.where(keep <= 0, 0, x)


def validate(where: str, x: Steps) -> Steps:
    """Return the inputs as JAX arrays, after checking their shapes and, where they are known, their numbers.

    The hyperparameters are converted to the dtype to compute in.
    """
    ratios = {} if x.rho_clip is None else {"log_ratio": x.log_ratio}
    check_arrays(where, reward=x.reward, terminated=x.terminated)
    check_floating(where, value=x.value, next_value=x.next_value, **ratios)
    ends = {"terminated": x.terminated, "truncated": x.truncated, "mask": x.mask}
    check_same_shape(where, reward=x.reward, value=x.value, next_value=x.next_value, **ratios, **ends)
    shape, dtype = jnp.shape(x.value), accumulator_dtype(x.value)
    if not shape:
        raise ShapeError(f"{where} works along axis 0, time, and the value given is a single number")
    check_flags(where, truncated=x.truncated, mask=x.mask)
    check_terminated(where, x.terminated, x.mask)
    numbers = {"gamma": (0, 1), "gae_lambda": (0, 1)} | ({} if x.pg_lambda is None else {"pg_lambda": (0, 1)})
    clips = {name: (0, np.inf) for name in ("rho_clip", "c_clip", "pg_rho_clip") if getattr(x, name) is not None}
    fit = {
        name: checked_hyperparameter(where, name, getattr(x, name), shape, *bounds, open_low=name in clips, dtype=dtype)
        for name, bounds in (numbers | clips).items()
    }
    return jax.tree.map(jnp.asarray, x._replace(**fit))


def check_terminated(where: str, terminated: Any, mask: Any) -> None:
    """Raise if an unmasked element of `terminated` is known not to be a probability."""
    ends, counts = known_values(terminated), known_values(True if mask is None else mask)
    if ends is None or counts is None:
        return
    odd = ~((ends >= 0) & (ends <= 1)) & counts.astype(bool)
    if odd.any():
        raise ValueError(
            f"{where}: terminated must hold 0 and 1, or probabilities between them, got {ends[odd].flat[0]}"
        )


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
    return x._replace(truncated=cut if x.truncated is None else x.truncated.astype(bool) | cut)


def end_before_padding(where: str, x: Steps) -> Steps:
    """Check that padding follows the end of a sequence; make the reward NaN where it does not.

    Padding is the masked steps until the end of the array. Nothing follows the last unmasked step before it, so that
    step must have a flag that says how it ends.
    """
    keep = jnp.asarray(x.mask).astype(bool)
    padding = jnp.cumsum(keep[::-1], axis=0)[::-1] == 0
    before = jnp.concatenate([padding[1:], jnp.zeros_like(padding[:1])])
    ends = x.terminated > 0 if x.truncated is None else (x.terminated > 0) | x.truncated.astype(bool)
    unfinished = keep & before & ~ends
    if (known := known_values(unfinished)) is not None and known.any():
        step = tuple(int(i) for i in np.argwhere(known)[0])
        raise ValueError(
            f'{where}: mask_mode="skip", and the last unmasked step of a sequence, {step}, is neither terminated nor '
            "truncated, but padding follows it: mark it as terminated, or as truncated if next_value has its bootstrap"
        )
    reward = x.reward.astype(jnp.result_type(x.reward, x.value))
    return x._replace(reward=jnp.where(unfinished, jnp.nan, reward))


def effective(x: Steps) -> Steps:
    """Return the steps as the equations read them: in the accumulator dtype, flags as such, masked contents as 0.

    Replacing the contents of masked steps makes their gradients 0; masking the results would leave 0 * NaN.
    """
    keep = None if x.mask is None else x.mask.astype(bool)
    read = {
        name: getattr(x, name).astype(x.gamma.dtype)
        for name in ("reward", "value", "next_value", "log_ratio")
        if getattr(x, name) is not None
    }
    read["terminated"] = x.terminated
    if keep is not None:
        read = {name: jnp.where(keep, field, 0) for name, field in read.items()}
    return x._replace(truncated=None if x.truncated is None else x.truncated.astype(bool), **read)
