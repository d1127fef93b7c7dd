"""Checks of a learner's parameters and rollout, and reports of non-finite numbers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base.checked import checked
from .._base.trees import is_key
from ..errors import ShapeError, UserTypeError, UserValueError
from ..functional._common import (
    accumulator_dtype,
    check_floating,
    check_same_shape,
    masked_sum,
    nan_where,
    unsqueeze,
    valid_flags,
)
from .batch import PER_SEGMENT, PER_STEP, Array, Batch, Evaluate, Params, any_stream, require
from .metrics import Metrics
from .policy import initial_carry_of
from .shards import check_shards

TREES = ("obs", "action", "next_obs", "behavior", "extras")  # fields with leaves [T, N, ...]; the others are [T, N]
STREAMS = ("reward", "value", "next_value", "advantage", "target")  # they may have a last axis of K > 1 streams
RECORDED = tuple(field for field in PER_STEP if field not in (*TREES, "log_prob"))
FLAGS = ("mask", "terminated", "truncated", "reset")
COUNTED_BY_ELEMENT = (*FLAGS, "reward", "log_prob", "value", "next_value", "advantage", "parameters")
"""The `nonfinite/...` metrics that count elements; all others, such as those of parts, count minibatches."""


def check_params(params: Params) -> None:
    """Raise unless every leaf of the parameters is an array."""
    for path, leaf in jax.tree.leaves_with_path(params):
        if not isinstance(leaf, (jax.Array, np.ndarray, float, int, np.generic)):
            what = f"contain {leaf!r:.200} at {jax.tree_util.keystr(path)}" if path else f"are {leaf!r:.200}"
            split = "equinox.partition(model, equinox.is_inexact_array) or flax.nnx.split"
            remedy = f"partition a network module, as with {split}, and recombine it in evaluate"
            if hasattr(leaf, "init"):
                remedy = "pass what its init returns"
            raise UserTypeError(f"learner.init: the parameters {what}, which is not an array: {remedy}")
    if not jax.tree.leaves(params):
        raise UserValueError("learner.init: the parameter tree is empty, so there is nothing to train")


def check_trainable(params: Params) -> None:
    """Raise unless every leaf that a phase trains has a gradient."""
    for path, leaf in jax.tree.leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise UserTypeError(
                f"learner.init: the parameters to train contain {jnp.result_type(leaf)} at "
                f"{jax.tree_util.keystr(path) or 'the top'}, which has no gradient: remove it from the parameters, or "
                "name those to train with phase(..., trains=...)"
            )


def check_rollout(batch: Batch, policy: Evaluate) -> None:
    """Raise unless a learner can use `batch`, whose fields must be present and begin with the same axes `[T, N]`."""
    where = "learner.update"
    if not isinstance(batch, Batch):
        raise UserTypeError(f"{where}: expected a ppo_parts.Batch, got {type(batch).__name__}")
    require(
        batch,
        where,
        obs="pass the observation at each step, [T, N, ...]",
        action="pass the action taken there, [T, N, ...]",
        log_prob="pass its log-probability under the policy that acted, [T, N]; pp.rollout records it",
    )
    check_floating(where, "log_prob", batch.log_prob)
    if jnp.ndim(batch.log_prob) < 2:
        raise ShapeError(
            f"{where}: log_prob must have the axes [T, N] (time, segment), got shape {jnp.shape(batch.log_prob)}; for "
            "a single environment add an axis of size 1"
        )
    if batch.axes != ("time", "segment"):
        raise UserValueError(f"{where}: a rollout has axes=('time', 'segment'), got {batch.axes}; samplers change them")
    initial_carry, num_envs = initial_carry_of(policy), batch.log_prob.shape[1]
    if initial_carry and jax.eval_shape(lambda: initial_carry(num_envs)) is not None:
        before, first = "the policy's state before step 0, [N, ...]", "True at the first step of each episode, [T, N]"
        recorded = "pp.rollout records it"
        require(batch, where, carry=f"pass {before}; {recorded}", reset=f"pass {first}; {recorded}")
    if batch.weight is not None:
        raise UserValueError(f"{where}: weight belongs to minibatches: draw with given_indices(weights=...) instead")
    check_axes(where, batch)


def check_axes(where: str, batch: Batch) -> None:
    """Raise unless all fields of a rollout have the axes `[T, N]` of its log_prob, or `[N]` if they are per segment."""
    check_floating(where, "log_prob", batch.log_prob)
    fields = {name: getattr(batch, name) for name in RECORDED}
    for name, x in fields.items():
        if name in STREAMS and getattr(x, "ndim", 0) > batch.log_prob.ndim and x.shape[-1] > 1:
            fields[name] = x[..., 0]
    check_same_shape(where, log_prob=batch.log_prob, **fields)
    leading = batch.log_prob.shape[:2]
    check_shards(where, batch.shards, "the number of segments", leading[1])
    remedies = {
        "extras": "; what belongs to segments goes into per_segment, anything else into shared",
        "carry": "; it is the state before step 0 of each segment",
    }
    for name in (*TREES, *PER_SEGMENT):
        axes, expected = ("axis [N]", leading[1:]) if name in PER_SEGMENT else ("axes [T, N]", leading)
        for path, leaf in jax.tree.leaves_with_path(getattr(batch, name)):
            if jnp.shape(leaf)[: len(expected)] != expected:
                raise ShapeError(
                    f"{where}: {name}{jax.tree_util.keystr(path)} must begin with the {axes} = {expected} of log_prob, "
                    f"got shape {jnp.shape(leaf)}{remedies.get(name, '')}"
                )


def replace_masked(batch: Batch, *, keeps_time: bool) -> Batch:
    """Replace masked numbers that could make a gradient NaN, as 0 * inf does.

    If networks evaluate each step separately, all masked numbers (except pixels) become those of an unmasked step. If
    minibatches keep time or a policy has several agents, the results at other steps may depend on what a network reads
    at masked steps. Then 0 replaces a number only if it is not finite, if its square overflows, or if it is negative
    where a segment's other integers are not; floating actions are clipped to the range of the unmasked ones.
    """
    if batch.mask is None:
        return batch
    keep = batch.mask.astype(bool)
    axes, order = tuple(range(keep.ndim)), jnp.arange(keep.size).reshape(keep.shape)
    chosen = order == jnp.min(jnp.where(keep, order, keep.size))  # one unmasked element, or none
    alone = not keeps_time and batch.carry is None and keep.ndim == 2

    def filled(x: Array, kept: Array) -> Array:
        # With several devices, a sum moves less data than an index.
        valid = jnp.where(unsqueeze(chosen, x.ndim), jnp.nan_to_num(x), 0)
        return jnp.where(kept, x, jnp.sum(valid, axis=axes, dtype=x.dtype, keepdims=True))

    def finite(x: Array, kept: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            if not jnp.issubdtype(x.dtype, jnp.integer):
                return x
            # An embedding of an integer out of range is NaN.
            signed = jnp.any(kept & (x < 0), axis=(0, *range(2, x.ndim)), keepdims=True)
            return jnp.where(kept | (x >= 0) | signed, x, 0)
        wide = x.astype(accumulator_dtype(x))
        harmless = jnp.square(wide) <= jnp.finfo(wide.dtype).max  # False for NaN
        return jnp.where(harmless | kept, x, 0)

    def clipped(x: Array, kept: Array) -> Array:
        low = jnp.min(x, axes, keepdims=True, where=kept, initial=jnp.inf)
        high = jnp.max(x, axes, keepdims=True, where=kept, initial=-jnp.inf)
        return jnp.where(kept | ~jnp.any(keep), x, jnp.clip(x, low, high))

    def replace(name: str, x: Array) -> Array:
        if x.shape[: keep.ndim] != keep.shape or x.dtype == jnp.uint8 or is_key(x):
            return x
        kept = unsqueeze(keep, x.ndim)
        if alone or name == "behavior":  # no network reads it
            return filled(x, kept)
        x = finite(x, kept)
        return clipped(x, kept) if name == "action" and jnp.issubdtype(x.dtype, jnp.floating) else x

    fields = {name: getattr(batch, name) for name in TREES}
    return batch.replace(**{name: jax.tree.map(functools.partial(replace, name), x) for name, x in fields.items()})


def count_nonfinite(batch: Batch) -> tuple[Metrics, Batch]:
    """Count, for each field, the unmasked elements of the rollout that are not finite, and flags out of range.

    Also return the batch, with NaN as log-probability and reward where a flag is out of range, so all losses are NaN.
    """
    flags = {name: getattr(batch, name) for name in FLAGS}
    wrong = {name: ~valid_flags(name, x) for name, x in flags.items() if x is not None and x.dtype != bool}
    bad = {f"nonfinite/{name}": x for name, x in wrong.items()}
    for name in ("reward", "log_prob", "value", "next_value"):
        x = getattr(batch, name)
        if x is None or not jnp.issubdtype(x.dtype, jnp.floating):
            continue
        bad[f"nonfinite/{name}"] = any_stream(~jnp.isfinite(x), batch.log_prob)
        if name == "next_value" and batch.terminated is not None:
            # After a termination, `next_value` is not used and may be any number.
            bad[f"nonfinite/{name}"] &= ~(batch.terminated == 1)
    # Sum one stacked array, because each sum compiles to three kernels.
    whole = jnp.stack(list(bad.values())).astype(jnp.float32)
    counts = masked_sum(whole, batch.mask, axis=tuple(range(1, whole.ndim)))
    if wrong:
        kept = True if batch.mask is None else batch.mask != 0
        bad_steps = functools.reduce(jnp.logical_or, wrong.values()) & kept
        batch = batch.replace(log_prob=nan_where(bad_steps, batch.log_prob))
        if batch.reward is not None:
            reward = batch.reward
            batch = batch.replace(reward=nan_where(unsqueeze(bad_steps, reward.ndim), reward))
    return Metrics(counts, tuple(bad), tuple("sum" for _ in bad)), batch


@checked
def nonfinite_report(metrics: Mapping[str, Any]) -> str | None:
    """Describe in one sentence where non-finite numbers first arose in an update; return None if all are finite.

    Args:
        metrics: the metrics of one `Learner.update`, or of several with stacked arrays, which are summed.

    Example:
        >>> import ppo_parts as pp
        >>> pp.nonfinite_report({"nonfinite/reward": 2, "nonfinite/gradient": 1, "loss": 0.})
        'non-finite numbers arose first in reward (2 elements), then in gradient (1 minibatch)'
        >>> pp.nonfinite_report({"nonfinite/reward": 0}) is None
        True
    """
    order = (*COUNTED_BY_ELEMENT[:-1], "loss/", "gradient", "parameters")
    found: list[tuple[int, int, str]] = []
    for name, value in metrics.items():
        phase, marker, what = name.partition("nonfinite/")
        total = int(np.sum(value)) if marker else 0
        if total:
            one, several = ("element", "elements") if what in COUNTED_BY_ELEMENT else ("minibatch", "minibatches")
            many = f"{total} {one if total == 1 else several}{' out of range' if what in FLAGS else ''}"
            rank = next((i for i, start in enumerate(order) if what.startswith(start)), len(order))
            called, (owner, _, item) = what.replace("/", " ", 1), what.removeprefix("range/").rpartition("/")
            if what.startswith("range/"):  # a hyperparameter of a part, see `fold`
                rank, called, many = -1, f"{item} of {owner.removeprefix('rollout/')}", "out of range"
            # The loss that fails first makes the other losses of later minibatches fail, too.
            found.append((rank, -total * called.startswith("loss "), f"{phase}{called} ({many})"))
    listed = ", then in ".join(text for *_, text in sorted(set(found)))
    if found and min(found)[0] == order.index("loss/"):
        listed += "; rewards, log-probabilities and values were finite: look for actions and observations out of range"
    return f"non-finite numbers arose first in {listed}" if found else None
