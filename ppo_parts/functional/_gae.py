"""Generalized advantage estimation, the values from which it bootstraps, and returns that need no critic."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from ._arguments import AnyArray, Fixed, Floats, MaskMode, Real, array_function
from ._common import Array, Number, boolean_mask, known_values, zero_where
from ._errors import ShapeError, UserValueError
from ._recurrence import choose_solver, reverse_recurrence


@functools.partial(export.register_namedtuple_serialization, serialized_name=f"{__name__}.Advantages")
class Advantages(NamedTuple):
    """Result of `gae`: `advantage` and `target` (= advantage + value), both `[T, ...]`."""

    advantage: Array
    target: Array


def unfinished(terminated: Any, truncated: Any | None, mask: Any) -> Any:
    """Return whether each step is the last one before padding but is marked neither as terminated nor as truncated.

    Padding consists of the masked steps at the end of the array. The step before it has no successor.
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
            "truncated, but padding follows it: mark it as terminated, or as truncated with V of what followed"
        )


@array_function(like="value", along_time=True, also=check_padding)
def gae(
    reward: Real,
    value: Floats,
    next_value: Floats,
    terminated: Array,
    truncated: Array | None = None,
    *,
    gamma: Number,
    gae_lambda: Number,
    mask: Array | None = None,
    mask_mode: MaskMode = "cut",
    stop_gradient: bool = True,
) -> Advantages:
    r"""Compute generalized advantage estimates, correct at terminations *and* truncations. Gradients are stopped.

    With `stop_gradient=False`, they flow to all floating inputs (to `terminated`, only where it is less than 1).

    .. math::
        \delta_t &= r_t + \gamma (1 - \text{terminated}_t)\, v'_t - v_t \\
        A_t &= \delta_t + \gamma\lambda (1 - \text{terminated}_t)(1 - \text{truncated}_t)\, A_{t+1},
        \qquad A_T = 0 \\
        \text{target}_t &= A_t + v_t

    A termination removes the bootstrap and cuts the trace. A truncation cuts the trace but keeps the bootstrap, so
    `next_value` is a separate input (see `next_values`). For several reward streams of the same episodes, map over the
    first three arguments with `jax.vmap`.

    Args:
        reward: `[T, ...]`, the reward of the transition from step t, in reward units.
        value: `[T, ...]`, V(obs[t]), floating; the result has its dtype. Narrow floats are accumulated in float32.
        next_value: `[T, ...]`, V of the observation that followed step t.
        terminated: `[T, ...]`, 1 (or True) where the transition from step t ended the episode. Numbers between 0 and 1
            are probabilities, so pass `discount == 0`, not a discount.
        truncated: `[T, ...]`, 1 (or True) where a time limit cut the episode at step t, else 0; None means nowhere.
        gamma: discount per step, in [0, 1]. It is a number, or an array with the shape of the inputs or of their axes
            after T; axes of size 1 are broadcast, so `[T, 1]` is one discount per step.
        gae_lambda: trace decay, in [0, 1]; a number or an array, like `gamma`.
        mask: `[T, ...]`, 1 where the step counts; None means everywhere.
        mask_mode: how a masked step affects the steps before it. "cut" treats the step before a masked one as
            truncated; its `next_value` counts unless it is marked as terminated. "skip" gives the result that the
            arrays would give without the masked steps, such as tokens that a tool wrote; next values must skip them,
            too (`mask` of `next_values`). The last step before padding (the masked steps at the end) must be marked as
            terminated or truncated; otherwise known inputs raise an error, and traced inputs give NaN.
        stop_gradient: whether the result is constant under differentiation.

    Example:
        Two steps, of which the second terminates: A_1 = 1 - 0.5 = 0.5 and A_0 = (1 + 0.9*0.5 - 0.5) + 0.9*0.5*A_1.

        >>> ones, half = jnp.ones(2), jnp.full(2, .5)
        >>> out = gae(ones, half, half, jnp.array([0, 1]), gamma=.9, gae_lambda=.5)
        >>> [round(float(a), 4) for a in out.advantage]
        [1.175, 0.5]

    Reference: Schulman et al. 2016, arXiv:1506.02438, eq. 16. Truncation: Pardo et al. 2018, arXiv:1712.00378.
    """
    if skip := mask_mode == "skip" and mask is not None:  # known values have been checked already
        reward = jnp.where(unfinished(terminated, truncated, mask), jnp.nan, reward)
    terminated, truncated = masked_ends(terminated, truncated, mask, skip=skip)
    delta = reward + gamma * zero_where(terminated, next_value) - value
    trace = zero_where(truncated, zero_where(terminated, jnp.asarray(gamma * gae_lambda)))
    if skip:  # A_t = A_{t+1} at masked steps
        keep = boolean_mask(mask, delta)
        delta, trace = jnp.where(keep, delta, 0), jnp.where(keep, trace, 1)
    # The recurrence, written as a plain loop:
    #
    #     A = 0
    #     for t in reversed(range(T)):
    #         A = advantage[t] = delta[t] + trace[t] * A
    advantage = choose_solver()((delta, trace))
    advantage = jnp.where(keep, advantage, 0) if skip else advantage
    return Advantages(advantage, advantage + value)


def masked_ends(
    terminated: Array, truncated: Array | None, mask: Array | None, *, skip: bool = False
) -> tuple[Array, Array | None]:
    """Return the flags with the mask applied, so that masked steps are skipped or end trajectories."""
    cut = None if truncated is None else truncated.astype(bool)
    if mask is None:
        return terminated, cut
    counts = mask.astype(bool)
    if not skip:  # a masked step and the step before it are truncated, so no trace crosses them
        ends = ~(counts & jnp.concatenate([counts[1:], jnp.ones_like(counts[:1])]))
        cut = ends if cut is None else cut | ends
    return jnp.where(counts, terminated, False), cut


@array_function(raw=True, along_time=True)
def next_values(
    value: Floats,
    last_value: AnyArray,
    truncated: Array | None = None,
    final_value: Array | None = None,
    *,
    mask: Array | None = None,
) -> Array:
    r"""Return V of the observation that followed each step, by shifting `value` one step back. Gradients flow.

    .. math:: v'_t = \begin{cases} \text{final_value}_t & \text{if truncated}_t \\
              \text{last_value} & \text{if } t = T-1 \\ v_{t+1} & \text{else} \end{cases}

    With automatic resets, the observation at t+1 is the first of a *new* episode wherever step t ended one. After a
    termination, its value is never used. After a truncation, V of the final observation must replace it.

    Args:
        value: `[T, ...]`, V(obs[t]), floating; the result has its dtype.
        last_value: `[...]`, V of the observation after the last step.
        truncated: `[T, ...]`, 1 where a time limit cut the episode at step t, else 0; None means nowhere.
        final_value: `[T, ...]`, V(final observation), given together with `truncated`, and used only where that is 1.
        mask: None, or `[T, ...]` of 0/1. With a mask, the next value is the value of the next unmasked step, or
            `last_value` if there is none, as `gae(mask_mode="skip")` needs. Masked steps return 0.

    Example:
        >>> next_values(jnp.array([1., 2., 3.]), jnp.array(4.), jnp.array([0, 1, 0]), jnp.array([0., 9., 0.])).tolist()
        [2.0, 9.0, 4.0]

    Reference: Pardo et al. 2018, Time Limits in Reinforcement Learning, arXiv:1712.00378, partial-episode bootstrap.
    """
    if (truncated is None) != (final_value is None):
        raise UserValueError(
            "next_values: give truncated and final_value together (final_value is V of the final "
            "observation of each truncated episode), or neither"
        )
    if jnp.shape(last_value) != value.shape[1:]:
        raise ShapeError(
            f"next_values: last_value must have shape {value.shape[1:]}, value's without its time axis, "
            f"got {jnp.shape(last_value)}"
        )
    shifted = jnp.concatenate([value, jnp.asarray(last_value, value.dtype)[None]])[1:]
    if mask is not None:  # carry each value back over masked steps; `last_value` always counts
        keep = boolean_mask(mask, shifted)
        repeats = 1 - jnp.concatenate([keep[1:], jnp.ones_like(keep[:1])]).astype(shifted.dtype)
        solve = choose_solver(times=lambda repeats, later: jnp.where(repeats == 0, 0, later))
        shifted = solve((jnp.where(repeats == 0, shifted, 0), repeats))
    if truncated is not None and final_value is not None:
        shifted = jnp.where(boolean_mask(truncated, value), final_value, shifted).astype(value.dtype)
    return shifted if mask is None else jnp.where(boolean_mask(mask, value), shifted, 0)


@array_function(along_time=True)
def reward_to_go(
    reward: Fixed,
    terminated: Array | None = None,
    truncated: Array | None = None,
    *,
    gamma: Number = 1.0,
    mask: Array | None = None,
) -> Array:
    r"""Compute the discounted sum of each reward and all later rewards of the episode. Gradients are stopped.

    .. math:: R_t = r_t + \gamma (1 - \text{terminated}_t)(1 - \text{truncated}_t)\, R_{t+1}, \qquad R_T = 0

    Args:
        reward: `[T, ...]`, reward of the transition from step t, floating, in reward units; the result has its dtype.
        terminated, truncated: None, or `[T, ...]`, as in `gae`. Rewards after a truncation count as 0.
        gamma: discount per unmasked step, in [0, 1].
        mask: None, or 0/1 `[T, ...]`. Masked steps are skipped, as with `gae(mask_mode="skip")`, and return 0.

    Example:
        >>> reward_to_go(jnp.ones(4), jnp.array([0, 1, 0, 0]), gamma=.5).tolist()
        [1.5, 1.0, 1.5, 1.0]

    Reference: Williams 1992, Simple Statistical Gradient-Following Algorithms, Machine Learning 8; Hu 2025,
    REINFORCE++, arXiv:2501.03262.
    """
    keep, trace = boolean_mask(mask, reward), jnp.broadcast_to(gamma, reward.shape)
    ends = None if truncated is None else boolean_mask(truncated, trace)
    trace = zero_where(ends, zero_where(terminated, trace))
    later = reverse_recurrence(reward, jax.lax.stop_gradient(jnp.where(keep, trace, 1)))
    return jnp.where(keep, later, 0)
