"""Measurements of the policy and of the environment in new rollouts, without training: evidence for `diagnose`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base.doors import checked
from .._base.errors import UserValueError
from .._core.moments import Moments
from .._core.policy import evaluate_policy
from .._core.types import Array, Batch
from ..envs import is_discrete
from ..functional import gae
from ._train import Train, TrainState

PROBE = "probe/"
"""The first part of the names of all measurements."""
ROLLOUTS = 4


@checked
def probe(train: Train, state: TrainState, config: Any = None) -> dict[str, Array]:
    """Collect rollouts with the policy of `state`, and measure what the metrics of a run do not show.

    It is pure: jit it, and vmap it over the states of several seeds. A measurement that does not apply is NaN, for
    example that of the bounds of discrete actions.

    Args:
        train: the run.
        state: its state, such as that of a checkpoint.
        config: its configuration, of which `gamma`, `gae_lambda` and `vf_coef` are used (0.99, 0.95 and 0.5 without).

    Raises:
        ValueError: the policy has no critic.

    Returns:
        Scalars by name:

        * `probe/log_ratio`: largest :math:`|\\log \\pi(a) - \\log \\pi_{rollout}(a)|` with unchanged parameters;
          `probe/log_ratio_inside`: the same where the action is strictly inside its bounds.
        * `probe/memory_after_reset`: effect of a state before a reset on the outputs after it.
        * `probe/same_envs`: share of environments with the same observations as the first one.
        * `probe/obs_rms`, `probe/obs_std`: largest root mean square, and largest deviation, of an input.
        * `probe/obs_seen`: observations in running statistics, divided by those that the run has collected.
        * `probe/action_at_bound`: share of action components within 1 % of their bounds, or beyond them.
        * `probe/reward_mean`, `probe/target_rms`: of the rewards and value targets of the learner.
        * `probe/terminated`, `probe/truncated`: numbers of ends.
        * `probe/jump_at_end`: how far observations jump after a flagged end, divided by the larger jump one step before
          or after it; below 1, the flags belong to other steps.
        * `probe/dead_units`: share of hidden units that no gradient reaches.
        * `probe/value_dominance`: norm of the value loss's gradient divided by the policy's, on shared parameters.
    """
    settings = {"gamma": 0.99, "gae_lambda": 0.95, "vf_coef": 0.5} | fields_of(config)
    params = state.learner.params

    def collect(carry: tuple[Any, Batch], key: Array) -> tuple[tuple[Any, Batch], tuple[Array, Array, Array]]:
        rollout_state, batch, _ = train.rollout.collect(key, params, carry[0])
        return (rollout_state, batch), (jnp.sum(batch.terminated), jnp.sum(batch.truncated), _jump_at_end(batch))

    # Several rollouts for the ends of episodes, which may be longer than one; the last one is looked at.
    empty = jax.eval_shape(train.rollout.collect, state.key, params, state.rollout)[1]
    start = state.rollout, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), empty)
    (_, batch), (terminated, truncated, jump) = jax.lax.scan(collect, start, jax.random.split(state.key, ROLLOUTS))
    output = evaluate_policy(train.policy, params, batch)
    if output.value is None or batch.value is None:
        raise UserValueError("must have a critic, which this policy lacks", where="probe", argument="train")
    log_ratio = jnp.abs(output.distribution.log_prob(batch.action) - batch.log_prob)
    advantage, target = gae(
        batch.reward, batch.value, batch.next_value, batch.terminated, batch.truncated,
        gamma=settings["gamma"], gae_lambda=settings["gae_lambda"], mask=batch.mask,
    )  # fmt: skip
    at_bound = _at_bound(train.env.action_space, batch.action)
    inside = None if at_bound is None else ~jnp.any(at_bound.reshape(*log_ratio.shape, -1), axis=-1)
    obs = _numbers(batch)
    rows = obs.reshape(-1, obs.shape[-1])
    collected = state.learner.step * train.steps_per_update
    moments = [x.seen for x in jax.tree.leaves(state.rollout.env_state, is_leaf=_is_moments) if _is_moments(x)]
    found = {
        "log_ratio": jnp.max(log_ratio),
        "log_ratio_inside": jnp.nan if inside is None else jnp.max(log_ratio, where=inside, initial=0),
        "memory_after_reset": _memory_after_reset(train, params, batch),
        "same_envs": jnp.mean(jnp.all(obs[:, 1:] == obs[:, :1], axis=(0, 2))) if obs.shape[1] > 1 else jnp.nan,
        "obs_rms": jnp.max(jnp.sqrt(jnp.mean(rows**2, axis=0))),
        "obs_std": jnp.max(jnp.std(rows, axis=0)),
        "obs_seen": jnp.min(jnp.stack([jnp.min(x) for x in moments])) / collected if moments else jnp.nan,
        "action_at_bound": jnp.nan if at_bound is None else jnp.mean(at_bound),
        "reward_mean": jnp.mean(batch.reward),
        "target_rms": jnp.sqrt(jnp.mean(target**2)),
        "terminated": jnp.sum(terminated),
        "truncated": jnp.sum(truncated),
        "jump_at_end": jnp.nanmean(jump),
        **_gradients(train, params, batch, advantage, target, settings["vf_coef"]),
    }
    return {PROBE + name: jnp.asarray(x, jnp.float32) for name, x in found.items()}


def fields_of(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration: a dataclass, a mapping, or None."""
    if dataclasses.is_dataclass(config):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return dict(config) if isinstance(config, Mapping) else {}


def _is_moments(x: Any) -> bool:
    return isinstance(x, Moments)


def _numbers(batch: Batch) -> Array:
    """Return the floating observations as `[T, N, features]`; agents are features, too."""
    shape = batch.reward.shape[:2]
    leaves = [x for x in jax.tree.leaves(batch.obs) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.concatenate([x.reshape(*shape, -1) for x in leaves] or [jnp.full((*shape, 1), jnp.nan)], axis=-1)


def _at_bound(space: Any, action: Any) -> Array | None:
    """Return which components of actions are within 1 % of a bound, or beyond it; None without bounds."""
    if is_discrete(space) or not np.all(np.isfinite([np.min(space.low), np.max(space.high)])):
        return None
    low, high = (np.broadcast_to(np.asarray(x, np.float32), action.shape) for x in (space.low, space.high))
    margin = 0.005 * (high - low)
    return (action <= low + margin) | (action >= high - margin)


def _memory_after_reset(train: Train, params: Any, batch: Batch) -> Array | float:
    if batch.carry is None:
        return jnp.nan
    first = jax.tree.map(lambda x: x[:1], batch.replace(carry=None, per_segment={}, shared={}))

    def after(fill: float) -> Array:
        carry = jax.tree.map(lambda x: jnp.full_like(x, fill), batch.carry)
        output = evaluate_policy(train.policy, params, first.replace(carry=carry, reset=jnp.ones_like(first.reset)))
        return jnp.stack([output.distribution.log_prob(first.action), jnp.asarray(output.value)])

    return jnp.max(jnp.abs(after(0.5) - after(0.0)))


def _jump_at_end(batch: Batch) -> Array:
    obs = _numbers(batch)
    change = jnp.abs(jnp.diff(obs, axis=0))
    typical = jnp.broadcast_to(jnp.mean(change, axis=(0, 1), keepdims=True), change.shape)
    jump = jnp.max(jnp.where(typical > 0, change / typical, 0), axis=-1)  # [T - 1, N]: from step t to t + 1
    ended = ((batch.terminated == 1) | (batch.truncated == 1)).reshape(*batch.reward.shape[:2], -1).all(-1)[:-1]

    def mean(offset: int) -> Array:
        return jnp.mean(jump, where=jnp.roll(ended, offset, axis=0).at[0].set(False).at[-1].set(False))

    return mean(0) / jnp.maximum(mean(-1), mean(1))


def _gradients(
    train: Train, params: Any, batch: Batch, advantage: Array, target: Array, vf_coef: Any
) -> dict[str, Array | float]:
    """Compare the gradients of both losses on the parameters that they share, and count units that none reaches."""
    scaled = (advantage - jnp.mean(advantage)) / (jnp.std(advantage) + 1e-8)
    noise = jax.random.normal(jax.random.key(0), (2, *batch.reward.shape))

    def losses(params: Any) -> Array:
        output = evaluate_policy(train.policy, params, batch)
        log_prob, value = output.distribution.log_prob(batch.action), jnp.asarray(output.value)
        policy_loss, value_loss = -jnp.mean(scaled * log_prob), vf_coef * jnp.mean((value - target) ** 2) / 2
        # Random weights, so that the gradient of a living unit does not cancel to exactly 0.
        return jnp.stack([policy_loss, value_loss, jnp.mean(noise[0] * log_prob + noise[1] * value)])

    each = jax.jacrev(losses)(params)
    leaves = jax.tree_util.tree_leaves_with_path(each)
    norms = jnp.stack([jnp.sqrt(jnp.sum(x[:2].reshape(2, -1) ** 2, axis=1)) for _, x in leaves])
    shared = jnp.all(norms > 0, axis=1)
    policy, value = jnp.sqrt(jnp.sum(jnp.where(shared[:, None], norms, 0) ** 2, axis=0))
    biases = [x[2] for path, x in leaves if "bias" in jax.tree_util.keystr(path) and x.ndim == 2]
    dead = jnp.mean(jnp.concatenate([x == 0 for x in biases])) if biases else jnp.nan
    return {"value_dominance": jnp.where(jnp.any(shared), value / policy, jnp.nan), "dead_units": dead}
