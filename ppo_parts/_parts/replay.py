"""A part that replays earlier rollouts."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._base.checked import Count, checked
from .._base.trees import from_data, to_data
from .._core.batch import PER_SEGMENT, PER_STEP, Array, Batch, Params, field_axes
from .._core.part import Context, Part
from .._core.shards import beside
from ..errors import UserTypeError, UserValueError
from ..functional._common import unsqueeze

NEEDED = ("mask", "extras", "per_segment")
"""Fields that are stored if the rollout has entries in them, because later parts may need them."""


class ReplayState(NamedTuple):
    """The latest rollouts, as fields by name with leaves `[k, T, N, ...]`, and the number of rollouts stored."""

    fields: dict[str, Any]
    stored: Array


@checked
def replay(num_rollouts: Count, like: Batch) -> Part:
    """Replace the rollout with the latest k rollouts, including this one, side by side in each shard: `[T, k*N]`.

    Until k rollouts are stored, the missing ones are masked. `replay(1, like)` leaves the rollout unchanged. Each
    update stores its rollout after the parts that all phases share, even if the phase with this part does not run.

    Earlier rollouts keep the values and ratios with which they were stored. To correct for the current policy, put
    `vtrace` after the sampler instead of before it. Groups with the same number (`tokens.group_advantage`) are merged.

    Args:
        num_rollouts: number of rollouts, k.
        like: a batch of arrays or `jax.ShapeDtypeStruct` with the rollout's shapes. Only its fields are stored. It must
            have a mask and entries if the rollout has them. `jax.eval_shape(rollout.collect, key, params, state)[1]`
            makes such a batch; add the fields that shared parts write, such as `target` below.

    Place: first in its own phase, as `learner` checks. A sampler with `refresh="minibatch"` cannot follow it.

    Example:
        >>> import jax, jax.numpy as jnp, ppo_parts as pp
        >>> flat = jax.ShapeDtypeStruct((8, 2), jnp.float32)
        >>> like = pp.Batch(obs=jax.ShapeDtypeStruct((8, 2, 4), jnp.float32), action=flat, log_prob=flat, target=flat)
        >>> auxiliary = pp.phase(
        ...     pp.chain(pp.replay(16, like), pp.segment_minibatches(4, num_epochs=6), pp.value_loss()),
        ...     trains=None, every=16,
        ... )

    Reference: Cobbe et al. 2021, Phasic Policy Gradient, arXiv:2009.04416, algorithm 1.
    """
    if not isinstance(like, Batch):
        raise UserTypeError(f"replay: like must be a Batch with the shapes of the rollout, got {type(like).__name__}")
    kept = [name for name in (*PER_STEP, *PER_SEGMENT) if jax.tree.leaves(getattr(like, name))]
    if "log_prob" not in kept:
        raise UserValueError("replay: like has no log_prob, which determines the shape of a rollout")

    def init(params: Params, key: Array | None = None) -> ReplayState:
        fields = {name: getattr(like, name) for name in kept}
        stored = jax.eval_shape(lambda fields: jax.tree.map(to_data, fields), fields)
        empty = jax.tree.map(lambda x: jnp.zeros((num_rollouts, *x.shape), x.dtype), stored)
        return ReplayState(empty, jnp.zeros((), jnp.int32))

    def update(batch: Batch, state: ReplayState, context: Context) -> tuple[Batch, ReplayState]:
        latest, axes = _stored_with(batch, state), field_axes(batch)
        fields = {}
        for name, field in latest.fields.items():
            merge = functools.partial(beside, shards=batch.shards, axis=axes[name])
            fields[name] = jax.tree.map(lambda x, y, merge=merge: from_data(merge(x), y), field, getattr(batch, name))
        filled = jnp.arange(num_rollouts) < latest.stored
        filled = jnp.broadcast_to(filled[:, None], (num_rollouts, like.log_prob.shape[1]))
        slots = beside(filled, batch.shards, 0)
        log_prob = fields["log_prob"]
        counts = jnp.broadcast_to(unsqueeze(slots, log_prob.ndim - 1), log_prob.shape)
        mask = fields["mask"] * counts if "mask" in fields else counts.astype(log_prob.dtype)
        absent = dict.fromkeys((*PER_STEP, *PER_SEGMENT)) | {"extras": {}, "per_segment": {}}
        return batch.replace(**(absent | fields | {"mask": mask})), state  # `finish` stores, even without this

    def finish(batch: Batch, state: ReplayState, context: Context) -> ReplayState:
        return _stored_with(batch, state)

    return Part(init, update, "replay", provides=tuple(kept), place="first", finish=finish)


def _stored_with(batch: Batch, state: ReplayState) -> ReplayState:
    """Return the state with the oldest rollout replaced by this one."""
    needed = (*NEEDED, "truncated") if "terminated" in state.fields else NEEDED
    given = {name: getattr(batch, name) for name in state.fields}
    ours, theirs = (_paths(x) for x in (state.fields, given | {name: getattr(batch, name) for name in needed}))
    if different := ours ^ theirs:
        path = min(different)
        has, lacks = ("like", "the rollout") if path in ours else ("the rollout", "like")
        raise UserValueError(f"replay: {has} has {path}, but {lacks} does not: give like the fields of the rollout")

    def put(buffer: Array, x: Array) -> Array:
        x = to_data(x)
        if x.shape != buffer.shape[1:]:
            raise UserValueError(f"replay: a field of shape {x.shape} does not fit like, {buffer.shape[1:]}")
        if jnp.promote_types(x.dtype, buffer.dtype) != buffer.dtype:
            raise UserTypeError(
                f"replay: the rollout has {x.dtype} where like has {buffer.dtype}, which cannot hold it: give like the "
                "dtypes of the rollout"
            )
        return buffer.at[state.stored % len(buffer)].set(x.astype(buffer.dtype))

    return ReplayState(jax.tree.map(put, state.fields, given), state.stored + 1)


def _paths(fields: dict[str, Any]) -> set[str]:
    """Return the path of each array, such as "extras['score']"."""
    leaves = {name: jax.tree.leaves_with_path(field) for name, field in fields.items()}
    return {f"{name}{jax.tree_util.keystr(path)}" for name, each in leaves.items() for path, _ in each}
