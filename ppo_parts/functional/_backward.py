"""The backward recursion A_t = delta_t + c_t A_{t+1}: on its own, and as the advantage estimators use it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._arguments import REALS, Implementation, public
from ._common import Array, ShapeError, accumulator_dtype
from ._recurrence import associative, choose, scan
from ._steps import Steps, cut_at_masked, effective, fitted, unfinished

Terms = Callable[[Steps], tuple[Array, Array]]
PolicyAdvantage = Callable[[Steps, Array], Array]


def estimate(
    where: str,
    steps: Steps,
    terms: Terms,
    stop_gradient: bool,
    implementation: Implementation,
    policy_advantage: PolicyAdvantage | None = None,
    *,
    mask_mode: str = "cut",
) -> tuple[Array, ...]:
    """Solve the recursion with these terms.

    The functions `terms` and `policy_advantage` are elementwise: they compute a single step or all steps at once.

    Args:
        where: name of the estimator in error messages.
        steps: the inputs, as the caller gave them.
        terms: `steps -> (delta, trace)`.
        stop_gradient: whether the result is constant under differentiation.
        implementation: as in `gae`.
        policy_advantage: `(steps, next target) -> policy advantage`; None: there is none. "skip" excludes it.
        mask_mode: as in `gae`.

    Returns:
        Error (the solution), target (= error + value) and, if there is one, the policy advantage.
    """
    steps = fitted(where, steps)
    skip = mask_mode == "skip" and steps.mask is not None
    if skip:  # where it was known, it has been checked
        reward = steps.reward.astype(jnp.result_type(steps.reward, steps.value))
        left = unfinished(steps.terminated, steps.truncated, steps.mask)
        steps = steps._replace(reward=jnp.where(left, jnp.nan, reward))
    if stop_gradient:  # applied to the inputs, so that no derivatives of the computation are traced
        steps = jax.lax.stop_gradient(steps)
    estimator = _Estimator(terms, policy_advantage, skip)
    return choose(
        where,
        implementation,
        steps.value,
        scan=estimator.by_scan,
        associative=estimator.by_associative_scan,
        pallas=estimator.by_kernel,
    )(steps)


class _Estimator(NamedTuple):
    """An estimator, given by its equations, and three ways to compute it."""

    terms: Terms
    policy_advantage: PolicyAdvantage | None
    skip: bool

    def by_scan(self, x: Steps) -> tuple[Array, ...]:
        x = self._cut(x)
        # For wide rows, a single pass never writes delta and the trace to memory, which saves a third of the time on
        # CPUs. Narrow rows are too short to vectorize, so everything that can be is computed for all steps at once. The
        # same holds for bfloat16, which the single pass would have to convert row by row.
        if _narrow(x.value.shape[1:]) or x.value.dtype != x.gamma.dtype:
            terms = self._terms(x)
            error = scan(_recur, _zeros(*terms), terms)
        else:
            error = scan(lambda later, now: _recur(later, self._terms(now)), self._first(x), x)
        return _cast(self._outputs(x, error), x)

    def by_associative_scan(self, x: Steps) -> tuple[Array, ...]:
        x = self._cut(x)
        return _cast(self._outputs(x, associative(*self._terms(x))), x)

    def by_kernel(self, x: Steps) -> tuple[Array, ...]:
        from . import _kernel  # on demand, because Pallas takes a while to import

        zeros = self._first(x)
        last_target = zeros + effective(x.rows(slice(-1, None))).next_value[0]
        counts = None if x.mask is None else zeros == 0
        return _kernel.backwards(self._step, (zeros, last_target, counts), x)

    def _step(self, later: tuple[Array, Array, Array | None], now: Steps) -> tuple[Any, tuple[Array, ...]]:
        """Compute all outputs of one step from the error, the target and the mask of the step that follows it."""
        error, next_target, next_counts = later
        now = self._cut(now, next_counts)
        error, _ = _recur(error, self._terms(now))
        outputs = self._outputs(now, error, next_target)
        counts = None if now.mask is None else now.mask.astype(bool)
        return (error, outputs[1], counts), _cast(outputs, now)

    def _cut(self, x: Steps, next_counts: Array | None = None) -> Steps:
        return x if self.skip else cut_at_masked(x, next_counts)

    def _terms(self, x: Steps) -> tuple[Array, Array]:
        delta, trace = self.terms(effective(x))
        if self.skip:  # A_t = A_{t+1} at masked steps
            counts = jnp.asarray(x.mask).astype(bool)
            delta, trace = jnp.where(counts, delta, 0), jnp.where(counts, trace, 1)
        return delta, trace

    def _first(self, x: Steps) -> Array:
        return _zeros(*self._terms(x.rows(slice(0))))

    def _outputs(self, x: Steps, error: Array, next_target: Array | None = None) -> tuple[Array, ...]:
        """Compute the outputs of all steps, or of one, from the solution of the recursion."""
        if self.skip:
            error = jnp.where(jnp.asarray(x.mask).astype(bool), error, 0)
        x = effective(x)
        target = error + x.value
        if self.policy_advantage is None:
            return error, target
        if next_target is None:
            next_target = jnp.concatenate([target[1:], x.next_value[-1:]])
        return error, target, self.policy_advantage(x, next_target)


def _narrow(shape: tuple[Any, ...]) -> bool:
    """Return whether a row has fewer than 64 elements; a size that `jax.export` leaves open counts as large."""
    sizes = [n for n in shape if isinstance(n, int)]
    return len(sizes) == len(shape) and math.prod(sizes) < 64


def _recur(later: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
    delta, trace = now
    error = delta + trace * later
    return error, error


def _cast(outputs: tuple[Array, ...], x: Steps) -> tuple[Array, ...]:
    return tuple(output.astype(x.value.dtype) for output in outputs)


def _zeros(delta: Array, trace: Array) -> Array:
    """Return the zeros that the recursion starts from, with the sharding of the data and, in `shard_map`, its type.

    Summing zero rows of the data creates such zeros.
    """
    return jnp.sum(delta[:0] + trace[:0], axis=0)


@public(raw=True, trace=REALS)
def reverse_recurrence(delta: Array, trace: Array, *, implementation: Implementation = "auto") -> Array:
    r"""Solve :math:`A_t = \delta_t + c_t A_{t+1}`, :math:`A_T = 0`, backwards along axis 0. Gradients flow.

    Args:
        delta: `[T, ...]`, floating; its dtype is that of the result. Narrow dtypes are accumulated in float32.
        trace: `[T, ...]`, :math:`c_t`; the last row has no effect, but must be finite.
        implementation: as in `gae`.

    Returns:
        `[T, ...]`, the solution A.

    Raises:
        ShapeError: `delta` and `trace` differ in shape. TypeError: `delta` is not floating. ValueError: as in `gae`.

    Example:
        >>> import jax.numpy as jnp
        >>> reverse_recurrence(jnp.ones(3), jnp.full(3, .5)).tolist()
        [1.75, 1.5, 1.0]
    """
    dtype = accumulator_dtype(delta)
    if not jnp.ndim(delta):
        raise ShapeError("reverse_recurrence works along axis 0, time, but delta is a single number")

    def widened(inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        return inputs[0].astype(dtype), inputs[1].astype(dtype)

    def step(later: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        later, _ = _recur(later, widened(now))
        return later, later.astype(delta.dtype)

    def in_kernel(inputs: tuple[Array, Array]) -> Array:
        from . import _kernel  # on demand: Pallas takes a while to import

        return _kernel.backwards(step, zeros, inputs)

    zeros = _zeros(*widened((delta, trace)))
    run = choose(
        "reverse_recurrence",
        implementation,
        delta,
        scan=lambda inputs: scan(_recur, zeros, widened(inputs)).astype(delta.dtype),
        associative=lambda inputs: associative(*widened(inputs)).astype(delta.dtype),
        pallas=in_kernel,
    )
    return run((delta, trace))
