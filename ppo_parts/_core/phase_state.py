"""The records of a phase, and the checks of the parts before its sampler."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._base.trees import select
from ..errors import UserValueError
from .batch import Array, Batch, Current, Evaluate, Params
from .chain import amend, check_states
from .checks import check_axes
from .part import Context, Part
from .policy import evaluate_current, shift_values
from .sampling import Sampler


class Estimates(NamedTuple):
    """The estimates of a policy for the rollout, each `[T, N]`; values of several streams have one more axis."""

    value: Array | None  # V of each observation, or None without a critic
    next_value: Array | None  # V of the observation that followed, or None without a critic
    log_ratio: Array  # log pi - log pi_behavior of the recorded actions

    @staticmethod
    def recorded(batch: Batch) -> Estimates:
        """Return the estimates of the behavior policy, as recorded in the rollout."""
        log_ratio = jnp.zeros_like(batch.log_prob) if batch.log_ratio is None else batch.log_ratio
        return Estimates.of(batch, None, log_ratio)

    @staticmethod
    def evaluated(evaluate: Evaluate, params: Params, batch: Batch) -> Estimates:
        """Return the estimates of the policy with these parameters."""
        current = evaluate_current(evaluate, params, batch)
        return Estimates.of(batch, current.value, current.log_prob - batch.log_prob)

    @staticmethod
    def of(batch: Batch, value: Array | None, log_ratio: Array) -> Estimates:
        """Make estimates in the dtypes of the rollout, with `next_value` computed from `value`."""
        log_ratio = log_ratio.astype(batch.log_prob.dtype)
        if value is None or batch.value is None:
            return Estimates(batch.value, batch.next_value, log_ratio)
        value = value.astype(batch.value.dtype)
        following = None if batch.next_value is None else shift_values(batch, value).astype(batch.next_value.dtype)
        return Estimates(value, following, log_ratio)

    def write_back(self, batch: Batch, sampler: Sampler, minibatch: Batch, indices: Any) -> Estimates:
        """Return the estimates after writing in those of a minibatch's `current`, the policy before its step."""
        current: Current = minibatch.current
        value, _, log_ratio = self
        log_ratio = sampler.put(log_ratio, indices, current.log_prob - minibatch.log_prob, minibatch.shards)
        if value is not None and current.value is not None:
            value = sampler.put(value, indices, current.value, minibatch.shards)
        return Estimates.of(batch, value, log_ratio)


class PhaseState(NamedTuple):
    """Everything that changes from minibatch to minibatch of a phase."""

    params: Params
    opt_state: Any
    before: tuple[Any, ...]  # the states of the parts before the sampler, first the shared ones and then its own
    after: tuple[Any, ...]  # the states of the parts after the sampler
    stopped: Array  # whether a part has stopped the phase
    estimates: Estimates | None = None  # from the latest evaluation of each step; None unless the refresh updates them


def check_and_amend(
    parts: tuple[Part, ...], batch: Batch, old: Any, new: Any, context: Context, opt_state: Any, keep_finite: bool
) -> tuple[tuple[Any, ...], Params, Any]:
    """Check the results of the parts before a sampler; return their states and what they amended.

    They must keep the kinds of their states, add no loss, request no stop, and leave fields of one size. With
    `keep_finite`, a part keeps its last finite state.
    """
    check_states("update", parts, old, new)
    names = ", ".join(part.name for part in parts)
    if batch.losses:
        raise UserValueError(
            f"learner: the loss {next(iter(batch.losses))!r} was added before the sampler (by one of {names}), where "
            "nothing is differentiated: put that part after the sampler"
        )
    if batch.stop is not None:
        raise UserValueError(
            f"learner: a part before the sampler (one of {names}) requested a stop, which only parts after it may do: "
            "put it after the sampler"
        )
    if parts:  # samplers would draw wrong elements if a field's size had changed
        check_axes(f"learner, after {names}", batch)
    if keep_finite:
        new = select_finite(new, old)
    return new, *amend(parts, context.params, opt_state, old, new, context)


def select_finite(new: tuple[Any, ...], old: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the new state of each part if it is finite, and otherwise the old one."""
    return tuple(select(all_finite(x), x, kept) for x, kept in zip(new, old, strict=True))


def all_finite(tree: Any) -> Array:
    """Return whether all floats in a tree are finite."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in floats], bool))
