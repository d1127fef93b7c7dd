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

    def rows(self, rows: slice) -> Steps:
        """Select some of the steps; a hyperparameter that is a single number stays the same."""
        return jax.tree.map(lambda x: x[rows] if x.ndim else x, self)

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


class Estimator(NamedTuple):
    """An estimator, given by its equations, and three ways to compute it.

    The equations are elementwise: they compute a single step or all steps at once.

    Attributes:
        where: its name in error messages.
        terms: `steps -> (delta, trace)` of the recursion A_t = delta_t + trace_t A_{t+1}.
        policy_advantage: `(steps, next target) -> policy advantage`; None: there is none. "skip" excludes it.
        skip: whether masked steps are passed over, and not treated as the ends of trajectories.
    """

    where: str
    terms: Callable[[Steps], tuple[Array, Array]]
    policy_advantage: Callable[[Steps, Array], Array] | None = None
    skip: bool = False

    def prepared(self, x: Steps, stop_gradient: bool) -> Steps:
        """Return the steps with hyperparameters in the dtype to compute in, and in a shape that fits."""
        shape, dtype = x.value.shape, accumulator_dtype(x.value)
        given = {name: getattr(x, name) for name in HYPERPARAMETERS if getattr(x, name) is not None}
        x = x._replace(**{name: fit(self.where, name, number, shape, dtype) for name, number in given.items()})
        if self.skip:  # where it was known, it has been checked
            reward = x.reward.astype(jnp.result_type(x.reward, x.value))
            left = unfinished(x.terminated, x.truncated, x.mask)
            x = x._replace(reward=jnp.where(left, jnp.nan, reward))
        # Applied to the inputs, so that no derivatives of the computation are traced.
        return jax.lax.stop_gradient(x) if stop_gradient else x

    def solver(self, x: Steps, implementation: Implementation) -> Callable[[Steps], tuple[Array, ...]]:
        """Return the function that computes the solution, the target (= solution + value) and the policy advantage."""
        ways = {"scan": self._by_scan, "associative": self._by_associative_scan, "pallas": self._by_kernel}
        return choose(self.where, implementation, x.value, ways)

    def _by_scan(self, x: Steps) -> tuple[Array, ...]:
        x = self._cut(x)
        # For wide rows, a single pass never writes delta and the trace to memory, which saves a third of the time on
        # CPUs. Narrow rows are too short to vectorize, so everything that can be is computed for all steps at once. The
        # same holds for bfloat16, which the single pass would have to convert row by row.
        if _narrow(x.value.shape[1:]) or x.value.dtype != x.gamma.dtype:
            terms = self._terms(x)
            error = jax.lax.scan(recur, zeros_like_rows(*terms), terms, reverse=True)[1]
        else:
            error = scan(lambda later, now: recur(later, self._terms(now)), self._first(x), x)
        return _cast(self._outputs(x, error), x)

    def _by_associative_scan(self, x: Steps) -> tuple[Array, ...]:
        x = self._cut(x)
        return _cast(self._outputs(x, associative(*self._terms(x))), x)

    def _by_kernel(self, x: Steps) -> tuple[Array, ...]:
        from . import _kernel  # on demand, because Pallas takes a while to import

        zeros = self._first(x)
        last_target = zeros + effective(x.rows(slice(-1, None))).next_value[0]
        counts = None if x.mask is None else zeros == 0
        return _kernel.backwards(self._step, (zeros, last_target, counts), x)

    def _step(self, later: tuple[Array, Array, Array | None], now: Steps) -> tuple[Any, tuple[Array, ...]]:
        """Compute all outputs of one step from the error, the target and the mask of the step that follows it."""
        error, next_target, next_counts = later
        now = self._cut(now, next_counts)
        error, _ = recur(error, self._terms(now))
        outputs = self._outputs(now, error, next_target)
        counts = None if now.mask is None else now.counts()
        return (error, outputs[1], counts), _cast(outputs, now)

    def _cut(self, x: Steps, next_counts: Array | None = None) -> Steps:
        """Mark masked steps, and those before them, as truncated, so that no trace passes from or to a masked step.

        For one step, `next_counts` is whether the step that follows counts; for all of them the mask tells.
        """
        if self.skip or x.mask is None:
            return x
        counts = x.counts()
        if next_counts is None:
            next_counts = jnp.concatenate([counts[1:], jnp.ones_like(counts[:1])])
        cut = ~(counts & next_counts)
        # Elsewhere the flag stays as it is, so that one that is neither 0 nor 1 is seen.
        truncated = cut if x.truncated is None else jnp.where(cut, 1, x.truncated).astype(x.truncated.dtype)
        return x._replace(truncated=truncated)

    def _terms(self, x: Steps) -> tuple[Array, Array]:
        delta, trace = self.terms(effective(x))
        if self.skip:  # A_t = A_{t+1} at masked steps
            delta, trace = jnp.where(x.counts(), delta, 0), jnp.where(x.counts(), trace, 1)
        return delta, trace

    def _first(self, x: Steps) -> Array:
        return zeros_like_rows(*self._terms(x.rows(slice(0))))

    def _outputs(self, x: Steps, error: Array, next_target: Array | None = None) -> tuple[Array, ...]:
        """Compute the outputs of all steps, or of one, from the solution of the recursion."""
        if self.skip:
            error = jnp.where(x.counts(), error, 0)
        x = effective(x)
        target = error + x.value
        if self.policy_advantage is None:
            return error, target
        if next_target is None:
            next_target = jnp.concatenate([target[1:], x.next_value[-1:]])
        return error, target, self.policy_advantage(x, next_target)


def effective(x: Steps) -> Steps:
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


def _narrow(shape: tuple[Any, ...]) -> bool:
    """Return whether a row has fewer than 64 elements; a size that `jax.export` leaves open counts as large."""
    sizes = [n for n in shape if isinstance(n, int)]
    return len(sizes) == len(shape) and math.prod(sizes) < 64


def _cast(outputs: tuple[Array, ...], x: Steps) -> tuple[Array, ...]:
    return tuple(output.astype(x.value.dtype) for output in outputs)


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
