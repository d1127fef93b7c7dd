"""Functions that call the user's network and check its output."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..distributions._distribution import check_distribution
from ..errors import ShapeError, UserTypeError
from ..functional import next_values
from ..functional._common import unsqueeze
from .batch import ABSENT, Array, Batch, Current, Evaluate, Output, Params, Policy, kind, map_streams


def evaluate_policy(evaluate: Evaluate, params: Params, batch: Batch) -> Output:
    """Compute `evaluate(params, batch)` as an `Output`."""
    # Copy the containers, so that the caller's batch does not change if a user's function modifies them.
    try:
        result = evaluate(params, jax.tree.map(lambda x: x, batch))
    except (AttributeError, TypeError) as error:
        if not isinstance(error, UserTypeError):
            error.add_note(f"raised by evaluate(params, batch), here for observations with the axes {batch.axes}")
        if "NoneType" in str(error) and batch.carry is None:
            error.add_note("batch.carry and batch.reset are None: a recurrent network needs Policy(initial_carry=...)")
        raise
    if isinstance(result, tuple) and len(result) in (2, 3):
        result = Output(*result)
    if not isinstance(result, Output) or hasattr(result.value, "log_prob"):
        got = kind(result)
        if isinstance(result, Output):
            got = f"{kind(result.value)} as the value: exchange it with {kind(result.distribution)}"
        raise UserTypeError(
            "evaluate(params, batch) must return Output(...), (distribution, value) or (distribution, value, carry); "
            f"got {got}"
        )
    return result


def apply_policy(
    policy: Evaluate, params: Params, obs: Any, carry: Any = None, reset: Any = None, keys: Any = None
) -> Output:
    """Evaluate one step of a policy on observations `[N, ...]`; a recurrent policy gets a time axis of size 1.

    `keys` is the result of `policy_keys`.
    """
    if carry is None:
        return evaluate_policy(policy, params, Batch(obs=obs, extras=keys or {}, axes=("segment",)))
    obs, keys = jax.tree.map(lambda x: x[None], (obs, keys or {}))
    output = evaluate_policy(policy, params, Batch(obs=obs, carry=carry, reset=reset[None], extras=keys))
    if output.carry is None:
        raise UserTypeError(
            "evaluate(params, batch) of a recurrent policy must return its state after the batch's last step, as "
            "(distribution, value, carry) or Output(..., carry=...); got none"
        )

    def first(x: Array) -> Array:
        """Drop the time axis, or what broadcasts against it; a standard deviation `[D]` for all elements has none."""
        return x[0] if jnp.shape(x)[:1] == (1,) else x

    return output._replace(**jax.tree.map(first, {x: getattr(output, x) for x in ("distribution", "value", "aux")}))


def policy_keys(policy: Evaluate, key: Array, num_envs: int) -> dict[str, Array]:
    """Return the `extras` that a policy with `draws` needs for N observations; other policies need none.

    `key` is the key that samples the actions.
    """
    draws = isinstance(policy, Policy) and policy.draws
    return {"policy_key": jax.random.split(jax.random.fold_in(key, 2**31), num_envs)} if draws else {}


def carry_after(policy: Evaluate, output: Output, action: Any) -> Any:
    """Return the carry of a policy after a step with this action."""
    if not isinstance(policy, Policy) or policy.after_action is None:
        return output.carry
    return policy.after_action(output.carry, action, output)


def initial_carry_of(policy: Any) -> Any:
    """Return the `initial_carry` of a recurrent `Policy`, or None for anything else."""
    return policy.initial_carry if isinstance(policy, Policy) else None


def is_value(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Return whether an array has one number per element, or K > 1 numbers, one per stream."""
    return shape == expected or (shape[:-1] == expected and shape[-1] > 1)


def evaluate_current(evaluate: Evaluate, params: Params, batch: Batch) -> Current:
    """Compute the distribution, the log-probability of the batch's actions, the value and aux under `params`."""
    output, expected = evaluate_policy(evaluate, params, batch), jnp.shape(batch.log_prob)
    check_distribution("evaluate(params, batch)", output.distribution)
    action, value = batch.action, output.value
    if batch.mask is not None:  # padding may hold numbers that are not actions
        keep = batch.mask.astype(bool)
        action = jax.tree.map(
            lambda x: jnp.where(unsqueeze(keep, x.ndim), x, 0) if jnp.issubdtype(x.dtype, jnp.integer) else x, action
        )
    if value is not None and not is_value(jnp.shape(value), expected):
        shape, drop = jnp.shape(value), "drop the trailing axis of a Dense(1) with value[..., 0]"
        raise ShapeError(
            f"evaluate returned a value of shape {shape}, not {expected}, the leading axes of batch.obs: return one "
            f"number per element, or one for each of several streams{f'; {drop}' if shape == (*expected, 1) else ''}"
        )
    log_prob = output.distribution.log_prob(action)
    if jnp.shape(log_prob) != expected:
        raise ShapeError(
            f"the distribution's log_prob has shape {jnp.shape(log_prob)}, batch.log_prob {expected}: one number per "
            "element is needed; sum over the action's dimensions (distributions.Normal does)"
        )
    if value is not None and batch.value is not None and jnp.shape(value) != jnp.shape(batch.value):
        raise ShapeError(
            f"evaluate returned a value of shape {jnp.shape(value)}, but batch.value has {jnp.shape(batch.value)}: the "
            "rollout and the update must evaluate the same critic"
        )
    for leaf in jax.tree.leaves(output.aux):
        if jnp.shape(leaf)[: len(expected)] != expected:
            raise ShapeError(f"a leaf of aux has shape {jnp.shape(leaf)}: its leading axes must be {expected}")
    if batch.mask is not None:  # masked elements keep the recorded numbers, so their ratio is 1
        log_prob = jnp.where(keep, log_prob, batch.log_prob.astype(log_prob.dtype))
        if value is not None and batch.value is not None:
            value = jnp.where(unsqueeze(keep, value.ndim), value, batch.value.astype(value.dtype))
    return Current(output.distribution, log_prob, ABSENT if value is None else value, output.aux)


def shift_values(batch: Batch, value: Array, *, skip: bool = False) -> Array:
    """Compute `next_value` from the new values of the next step or, with `skip`, of the next unmasked step.

    At truncations, at the end of the rollout and (without `skip`) before masked steps, the observation that followed is
    not in the batch, so the recorded `next_value` is kept.
    """
    # The estimators that call this function declare that they read `terminated`, but not `log_prob`.
    like, mask = batch.log_prob if batch.terminated is None else batch.terminated, batch.mask if skip else None
    elsewhere = jnp.zeros_like(like, bool) if batch.truncated is None else batch.truncated.astype(bool)
    if batch.mask is not None and not skip:
        keep = batch.mask.astype(bool)
        elsewhere = elsewhere | jnp.concatenate([~keep[1:], jnp.zeros_like(keep[:1])])

    def shifted(value: Array, recorded: Array) -> Array:
        return next_values(value, recorded[-1], elsewhere, recorded, mask=mask)

    return map_streams(shifted, like, value, batch.next_value)(value, batch.next_value)
