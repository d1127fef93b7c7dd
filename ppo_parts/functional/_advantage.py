"""Advantage estimators: one backward recursion, A_t = delta_t + c_t * A_{t+1}."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._common import Array, ShapeError, accumulator, floating, same_shape


class Advantages(NamedTuple):
    """Result of `gae`: `advantage` and `target` (= advantage + value), both `[T, ...]`."""

    advantage: Array
    target: Array


class VTrace(NamedTuple):
    """Result of `vtrace`: `error`, `target` (= error + value) and `policy_advantage`, all `[T, ...]`."""

    error: Array
    target: Array
    policy_advantage: Array


def next_values(
    value: Array,
    last_value: Array,
    truncated: Array | None = None,
    final_value: Array | None = None,
) -> Array:
    r"""V of the observation that followed each step, by shifting `value` one step back.

    .. math:: v'_t = \begin{cases} \text{final\_value}_t & \text{if truncated}_t \\
              \text{last\_value} & \text{if } t = T-1 \\ v_{t+1} & \text{else} \end{cases}

    With automatic resets the observation stored at t+1 is the first of a *new* episode wherever step t ended
    one. Where it terminated the number is never used; where it was truncated, V of the observation that
    really followed (the final observation) has to stand there.

    Args:
        value: `[T, ...]`, V(obs[t]).
        last_value: `[...]`, V of the observation after the last step.
        truncated: `[T, ...]`, 1 where the episode was cut by a time limit at step t; None: nowhere.
        final_value: `[T, ...]`, V(final observation); read only where `truncated` is 1.

    Returns:
        `[T, ...]` next values, in the dtype of `value`.

    Raises:
        ShapeError: shapes do not fit.
        ValueError: `truncated` without `final_value`, or the reverse.

    Example:
        >>> import jax.numpy as jnp
        >>> next_values(jnp.array([1., 2., 3.]), jnp.array(4.), jnp.array([0, 1, 0]), jnp.array([0., 9., 0.])).tolist()
        [2.0, 9.0, 4.0]

    Reference: Pardo et al. 2018, Time Limits in Reinforcement Learning, arXiv:1712.00378, eq. 6.
    """
    floating("next_values", value=value)
    if (truncated is None) != (final_value is None):
        raise ValueError(
            "next_values: give truncated and final_value together (final_value is V of the final "
            "observation of each truncated episode), or neither"
        )
    same_shape("next_values", value=value, truncated=truncated, final_value=final_value)
    if jnp.shape(last_value) != value.shape[1:]:
        raise ShapeError(
            f"next_values: last_value must have shape {value.shape[1:]}, value's without its time axis, "
            f"got {jnp.shape(last_value)}"
        )
    shifted = jnp.concatenate([value[1:], jnp.asarray(last_value, value.dtype)[None]])
    if truncated is None or final_value is None:
        return shifted
    return jnp.where(jnp.asarray(truncated).astype(bool), final_value, shifted).astype(value.dtype)


def gae(
    reward: Array,
    value: Array,
    next_value: Array,
    terminated: Array,
    truncated: Array | None = None,
    *,
    gamma: float | Array,
    gae_lambda: float | Array,
    mask: Array | None = None,
) -> Advantages:
    r"""Generalized advantage estimation, right at terminations *and* truncations.

    .. math::
        \delta_t &= r_t + \gamma (1 - \text{terminated}_t)\, v'_t - v_t \\
        A_t &= \delta_t + \gamma\lambda (1 - \text{terminated}_t)(1 - \text{truncated}_t)\, A_{t+1},
        \qquad A_T = 0 \\
        \text{target}_t &= A_t + v_t

    A termination removes the bootstrap and cuts the trace; a truncation cuts the trace and keeps the
    bootstrap, which is why `next_value` is an input of its own (see `next_values`). `gae_lambda=0` gives the
    one-step TD error, 1 the discounted return minus the value.

    Args:
        reward: `[T, ...]`, of the transition out of step t, in reward units.
        value: `[T, ...]`, V(obs[t]), floating; its dtype is that of the result.
        next_value: `[T, ...]`, V of the observation that followed step t.
        terminated: `[T, ...]`, 1 (or True) where the transition out of step t ended the episode. Numbers
            between 0 and 1 are read as probabilities.
        truncated: `[T, ...]`, 1 where a time limit cut the episode there; None: nowhere.
        gamma: discount per step, in [0, 1].
        gae_lambda: trace decay, in [0, 1].
        mask: `[T, ...]`, 1 where the step counts; None: everywhere. A step before a masked one is treated as
            truncated, so that nothing of a masked step reaches another; masked places return 0.

    Returns:
        `Advantages(advantage, target)`, each `[T, ...]`.

    Raises:
        ShapeError: inputs of different shapes. TypeError: `value` is not floating.

    Note:
        Narrow floats (bfloat16, float16) are accumulated in float32 and cast back.

    Example:
        Two steps, the second terminates: A_1 = 1 - 0.5 = 0.5 and A_0 = (1 + 0.9*0.5 - 0.5) + 0.9*0.5*A_1.

        >>> import jax.numpy as jnp
        >>> ones, half = jnp.ones(2), jnp.full(2, .5)
        >>> out = gae(ones, half, half, jnp.array([0, 1]), gamma=.9, gae_lambda=.5)
        >>> [round(float(a), 4) for a in out.advantage]
        [1.175, 0.5]

    Reference: Schulman et al. 2016, arXiv:1506.02438, eq. 16. Truncation: Pardo et al. 2018, arXiv:1712.00378.
    """
    floating("gae", value=value)
    same_shape(
        "gae", reward=reward, value=value, next_value=next_value, terminated=terminated, truncated=truncated, mask=mask
    )
    dtype = accumulator(value)
    gamma, gae_lambda = jnp.asarray(gamma, dtype), jnp.asarray(gae_lambda, dtype)

    def step(later: Array, *now: Any) -> Array:
        reward, value, next_value, terminated, cut, mask, gamma, gae_lambda = now
        delta = jnp.asarray(reward, dtype) + _unless(terminated, gamma * jnp.asarray(next_value, dtype)) - value
        trace = _cut(_unless(terminated, gamma * gae_lambda), cut)
        return _drop(delta, mask) + _drop(trace, mask) * later

    # Everything in one pass: delta and the trace never go to memory, which is a third faster for wide rows on CPUs.
    per_step = (jnp.broadcast_to(x, value.shape) if x.ndim else x for x in (gamma, gae_lambda))
    inputs = (reward, value, next_value, terminated, _boundary(truncated, mask), mask, *per_step)
    advantage = _backwards(step, jnp.zeros(value.shape[1:], dtype), *inputs)
    target = _drop(advantage + value, mask)
    return Advantages(advantage.astype(value.dtype), target.astype(value.dtype))


def vtrace(
    log_ratio: Array,
    reward: Array,
    value: Array,
    next_value: Array,
    terminated: Array,
    truncated: Array | None = None,
    *,
    gamma: float | Array,
    gae_lambda: float | Array = 1.0,
    rho_clip: float | Array = 1.0,
    c_clip: float | Array = 1.0,
    mask: Array | None = None,
) -> VTrace:
    r"""V-trace: GAE whose TD errors and traces are weighted by clipped importance ratios.

    .. math::
        \rho_t &= \min(e^{\ell_t}, \bar\rho), \qquad c_t = \min(e^{\ell_t}, \bar c) \\
        \delta_t &= r_t + \gamma (1 - \text{terminated}_t)\, v'_t - v_t \\
        e_t &= \rho_t \delta_t + \gamma\lambda\, c_t (1 - \text{terminated}_t)(1 - \text{truncated}_t)\, e_{t+1} \\
        \text{target}_t &= e_t + v_t \\
        A^{\pi}_t &= \rho_t \left(r_t + \gamma (1 - \text{terminated}_t)\, w_t - v_t\right)

    where :math:`w_t` is :math:`\text{target}_{t+1}` inside an episode and :math:`v'_t` where the trace is cut: at a
    truncation and at the end of the batch the next step belongs to something else. With ratio 1 and both
    clips at least 1, `error` is `gae`'s advantage.

    Three estimators share this name: `error` is what PufferLib and JaxDEM use as PPO's advantage,
    `policy_advantage` is IMPALA's, and both have `target` as the value target.

    Args:
        log_ratio: `[T, ...]`, log pi_current(a_t) - log pi_behaviour(a_t), in nats.
        reward, value, next_value, terminated, truncated, gamma, mask: as in `gae`.
        gae_lambda: trace decay, in [0, 1]; 1 is IMPALA's.
        rho_clip: upper clip of the ratio that weighs the TD error, > 0.
        c_clip: upper clip of the ratio that weighs the trace, > 0.

    Returns:
        `VTrace(error, target, policy_advantage)`, each `[T, ...]` in the dtype of `value`.

    Raises:
        ShapeError: inputs of different shapes. TypeError: `value` or `log_ratio` is not floating.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.ones(2)
        >>> out = vtrace(jnp.log(jnp.array([2., .5])), x, 0 * x, 0 * x, 0 * x, gamma=1.)
        >>> out.error.tolist()  # e_1 = .5 * 1, e_0 = 1 * 1 + 1 * e_1
        [1.5, 0.5]

    Reference: Espeholt et al. 2018, IMPALA, arXiv:1802.01561, eq. 1 and section 4.2.
    """
    floating("vtrace", value=value, log_ratio=log_ratio)
    same_shape(
        "vtrace",
        log_ratio=log_ratio,
        reward=reward,
        value=value,
        next_value=next_value,
        terminated=terminated,
        truncated=truncated,
        mask=mask,
    )
    dtype = accumulator(value)
    ratio = jnp.exp(log_ratio.astype(dtype))
    rho = jnp.minimum(ratio, rho_clip)
    c = jnp.minimum(ratio, c_clip)
    reward, next_value = jnp.asarray(reward, dtype), jnp.asarray(next_value, dtype)
    gamma, gae_lambda = jnp.asarray(gamma, dtype), jnp.asarray(gae_lambda, dtype)
    cut = _boundary(truncated, mask)
    delta = _drop(rho * (reward + _unless(terminated, gamma * next_value) - value), mask)
    trace = _drop(_cut(_unless(terminated, gamma * gae_lambda * c), cut), mask)
    error = reverse_recurrence(delta, trace)
    target = _drop(error + value, mask)
    follows = jnp.concatenate([target[1:], next_value[-1:]])
    if cut is not None:
        follows = jnp.where(cut, next_value, follows)
    policy_advantage = _drop(rho * (reward + _unless(terminated, gamma * follows) - value), mask)
    return VTrace(error.astype(value.dtype), target.astype(value.dtype), policy_advantage.astype(value.dtype))


def reverse_recurrence(delta: Array, trace: Array) -> Array:
    r"""Solve :math:`A_t = \delta_t + c_t A_{t+1}`, :math:`A_T = 0`, backwards along axis 0.

    Args:
        delta: `[T, ...]`.
        trace: `[T, ...]`, :math:`c_t`; the last row is never read.

    Returns:
        `[T, ...]`, A.

    Example:
        >>> import jax.numpy as jnp
        >>> reverse_recurrence(jnp.ones(3), jnp.full(3, .5)).tolist()
        [1.75, 1.5, 1.0]
    """
    return _backwards(lambda later, delta, trace: delta + trace * later, jnp.zeros_like(delta[0]), delta, trace)


def _backwards(step: Callable[..., Array], last: Array, *inputs: Any) -> Array:
    """Every result of `later = step(later, *inputs_t)`, from the last row to the first, beginning with `later = last`.

    Inputs without axes (numbers, None) are the same at each step. Not unrolled: XLA's CPU compiler turns an unrolled
    scan into a fusion that is several times slower.
    """
    varies = [x is not None and jnp.ndim(x) > 0 for x in inputs]

    def body(later: Array, rows: list[Array]) -> tuple[Array, Array]:
        row = iter(rows)
        now = (next(row) if varied else x for x, varied in zip(inputs, varies, strict=True))
        later = step(later, *now).astype(last.dtype)
        return later, later

    rows = [x for x, varied in zip(inputs, varies, strict=True) if varied]
    return jax.lax.scan(body, last, rows, reverse=True)[1]


def _boundary(truncated: Array | None, mask: Array | None) -> Array | None:
    """True where the trace is cut for a reason other than termination; None where it never is."""
    cut = None if truncated is None else jnp.asarray(truncated).astype(bool)
    if mask is not None:
        keep = jnp.asarray(mask).astype(bool)
        before_masked = jnp.concatenate([~keep[1:], jnp.zeros_like(keep[:1])])
        cut = before_masked if cut is None else cut | before_masked
    return cut


def _cut(trace: Array, cut: Array | None) -> Array:
    return trace if cut is None else jnp.where(cut, 0, trace)


def _unless(terminated: Array, x: Array) -> Array:
    """`(1 - terminated) * x`, by a select: after a termination x may be anything, NaN too."""
    terminated = jnp.asarray(terminated)
    if terminated.dtype == bool:
        return jnp.where(terminated, 0, x)
    keep = 1 - terminated.astype(x.dtype)
    return jnp.where(keep > 0, keep * x, 0)


def _drop(x: Array, mask: Array | None) -> Array:
    return x if mask is None else jnp.where(jnp.asarray(mask).astype(bool), x, 0)
