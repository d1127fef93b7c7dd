"""The advantage estimators: what they read, what a mask does to it, and how their recursion is computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._arguments import Implementation, fit
from ._common import Array, accumulator_dtype, chosen, known_values, visible
from ._errors import UserValueError
from ._recurrence import associative, choose, recur, scan, zeros_like_rows

HYPERPARAMETERS = ("gamma", "gae_lambda", "rho_clip", "c_clip", "pg_rho_clip", "pg_lambda")


class Steps(NamedTuple):
    """What an estimator reads, for all steps `[T, ...]` or for one step `[...]`; None for what is not given.

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

    def counts(self) -> Array:
        """Return the mask, which must be given, as booleans."""
        return jnp.asarray(self.mask).astype(bool)


def unless(flag: Array | None, x: Array) -> Array:
    """Compute `(1 - flag) * x` with a select, because x may be anything where the flag is 1, including NaN.

    None means that no flag is set. A flag may be a probability; outside [0, 1] the result is NaN.
    """
    if flag is None or flag.dtype == bool:
        return chosen(flag, 0, x)
    keep = 1 - flag.astype(x.dtype)
    keep = jnp.where((keep >= 0) & (keep <= 1), keep, jnp.nan)  # a flag that was traced, and so not checked
    return keep * jnp.where(keep <= 0, 0, x)


def solve(
    where: str,
    terms: Callable[[Steps], tuple[Array, Array]],
    x: Steps,
    implementation: Implementation,
    stop_gradient: bool,
    skip: bool = False,
) -> tuple[Array, Steps]:
    """Solve the recursion A_t = delta_t + trace_t A_{t+1} of an estimator.

    `terms`, `steps -> (delta, trace)`, is elementwise: it computes a single step or all steps at once. With `skip`,
    masked steps are passed over, and not treated as the ends of trajectories. Return the solution A, and the steps as
    the equations read them, both in the accumulator dtype.
    """
    x = _prepared(where, x, stop_gradient, skip)

    def of(x: Steps) -> tuple[Array, Array]:
        delta, trace = terms(_effective(x))
        if skip:  # A_t = A_{t+1} at masked steps
            delta, trace = jnp.where(x.counts(), delta, 0), jnp.where(x.counts(), trace, 1)
        return delta, trace

    def by_scan(x: Steps) -> Array:
        # For wide rows, a single pass never writes delta and the trace to memory, which saves a third of the time on
        # CPUs. Narrow rows are too short to vectorize, so everything that can be is computed for all steps at once. The
        # same holds for bfloat16, which the single pass would have to convert row by row.
        if _is_narrow(x.value.shape[1:]) or x.value.dtype != x.gamma.dtype:
            return scan(of(x))
        leaves, tree = jax.tree.flatten(x)

        def step(later: Array, rows: list[Array]) -> tuple[Array, Array]:
            row = iter(rows)
            return recur(later, of(jax.tree.unflatten(tree, [next(row) if leaf.ndim else leaf for leaf in leaves])))

        first = zeros_like_rows(*of(jax.tree.map(lambda leaf: leaf[:0] if leaf.ndim else leaf, x)))
        return jax.lax.scan(step, first, [leaf for leaf in leaves if leaf.ndim], reverse=True)[1]

    error = choose(implementation, by_scan, lambda x: associative(of(x)))(x)
    return jnp.where(x.counts(), error, 0) if skip else error, _effective(x)


def _prepared(where: str, x: Steps, stop_gradient: bool, skip: bool) -> Steps:
    """Return the steps with hyperparameters in the dtype to compute in, and with traces that end where they must."""
    shape, dtype = x.value.shape, accumulator_dtype(x.value)
    given = {name: getattr(x, name) for name in HYPERPARAMETERS if getattr(x, name) is not None}
    x = x._replace(**{name: fit(where, name, number, shape, dtype) for name, number in given.items()})
    if skip:  # where it was known, it has been checked
        reward = x.reward.astype(jnp.result_type(x.reward, x.value))
        left = unfinished(x.terminated, x.truncated, x.mask)
        x = x._replace(reward=jnp.where(left, jnp.nan, reward))
    # Applied to the inputs, so that no derivatives of the computation are traced.
    x = jax.lax.stop_gradient(x) if stop_gradient else x
    if skip or x.mask is None:
        return x
    # No trace passes from or to a masked step: it, and the one before it, are truncated.
    counts = x.counts()
    cut = ~(counts & jnp.concatenate([counts[1:], jnp.ones_like(counts[:1])]))
    # Elsewhere the flag stays as it is, so that one that is neither 0 nor 1 is seen.
    truncated = cut if x.truncated is None else jnp.where(cut, 1, x.truncated).astype(x.truncated.dtype)
    return x._replace(truncated=truncated)


def _effective(x: Steps) -> Steps:
    """Return the steps as the equations read them: in the accumulator dtype, with the contents of masked steps as 0.

    Replacing the contents of masked steps makes their gradients 0; masking the results would leave 0 * NaN.
    """
    read = {
        name: getattr(x, name).astype(x.gamma.dtype)
        for name in ("reward", "value", "next_value", "log_ratio")
        if getattr(x, name) is not None
    }
    read["terminated"] = x.terminated
    if x.mask is not None:
        read["reward"] = visible(read["reward"], x.mask)
        read = {name: jnp.where(x.counts(), field, 0) for name, field in read.items()}
    return x._replace(**read)


def _is_narrow(shape: tuple[Any, ...]) -> bool:
    """Return whether a row has fewer than 64 elements; a size that `jax.export` leaves open counts as large."""
    sizes = [n for n in shape if isinstance(n, int)]
    return len(sizes) == len(shape) and math.prod(sizes) < 64


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
