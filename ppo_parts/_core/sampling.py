"""Samplers, which choose the elements of minibatches, and functions that take elements and write them back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from .._base.checked import Count, checked
from .._base.hyperparameters import check_takes
from .._base.trees import on_automatic_mesh
from ..errors import ShapeError, UserTypeError, UserValueError
from ..functional._common import known_values, nan_where, unsqueeze
from .batch import PER_SEGMENT, PER_STEP, Array, Batch, field_axes, kind
from .part import PART_KEY, Context, Divider, Part, PartState, no_state
from .policy import evaluate_current
from .shards import join_shards, map_shards, split

Axis = Literal["step", "segment", "window"]
Refresh = Literal["rollout", "epoch", "every_epoch", "minibatch"]
Plan = Callable[[Array, Batch, Array | int], Any]
Draw = Callable[[Any, Batch, Context], tuple[Any, Array | None]]


class Windows(NamedTuple):
    """The indices that `draw` returns with `axis="window"`, M pieces of L steps.

    Attributes:
        start, segment: `[M]` integers; window m has the steps start[m], ..., start[m] + L - 1 of a segment.
        counts: `[L, M]` booleans, True for steps that are trained on. False masks a step, which then only warms up a
            recurrent state.
    """

    start: Array
    segment: Array
    counts: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler(Divider):
    """A part that divides a chain into parts that see the rollout and parts that see minibatches.

    Its attributes are the arguments of `sampler`, but `plan` and `draw` receive the whole rollout. If the rollout has
    S > 1 shards, the leaves of their results have an additional axis `[S]` before `[M]` (in a plan, after
    `[num_minibatches]`), and indices are positions within a shard.
    """

    num_epochs: int
    num_minibatches: int
    axis: Axis
    refresh: Refresh
    plan: Plan
    draw: Draw

    def take(self, batch: Batch, indices: Any, weight: Array | None) -> Batch:
        """Return the minibatch with these indices; metrics and losses start empty."""
        if self.axis == "step" and batch.carry is not None:
            says = f"{self.name} takes single steps, but the batch has a recurrent carry: use segment_minibatches()"
            raise UserValueError(says)
        self._check_drawn(indices, weight, batch.log_prob.shape[1], batch.shards)
        batch = batch.replace(metrics={}, reductions=(), losses={})
        weight = None if weight is None else weight.reshape(-1)
        if indices is None:
            return batch.replace(weight=weight)
        minibatch = batch.replace(axes=("step",) if self.axis == "step" else batch.axes, weight=weight)
        if batch.shards == 1:
            return minibatch.replace(**self._take(batch, indices))
        taken, axes = map_shards(self._take, batch, indices), field_axes(minibatch)
        return minibatch.replace(**{name: join_shards(x, axes[name]) for name, x in taken.items()})

    def _check_drawn(self, indices: Any, weight: Array | None, segments: int, shards: int) -> None:
        """Raise unless `draw` returned integers `[M]` or `Windows`, and one weight for each; each shard is a row."""
        windows, where = isinstance(indices, Windows), f"{self.name}: draw must return"
        if indices is None and self.axis != "step":  # all segments
            drawn: tuple[Any, ...] = ()
            shape: tuple[int, ...] = (segments,) if shards == 1 else (shards, segments // shards)
        elif indices is None or windows != (self.axis == "window") or isinstance(indices, (list, tuple)) != windows:
            expected = "Windows" if self.axis == "window" else "an array"
            raise UserTypeError(f"{where} {expected} for axis={self.axis!r}, got {type(indices).__name__}")
        else:
            drawn = (indices.start, indices.segment) if windows else (indices,)
            shape = jnp.shape(drawn[0])
        for x in drawn:
            if not jnp.issubdtype(jnp.result_type(x), jnp.integer):
                raise UserTypeError(f"{where} integers, got {jnp.result_type(x)}")
            if jnp.ndim(x) != (1 if shards == 1 else 2) or jnp.shape(x) != shape:
                rows = "[M]" if shards == 1 else f"[{shards}, M], one row for each shard"
                raise ShapeError(f"{where} indices of shape {rows}, got {jnp.shape(x)}")
        if 0 in shape:
            raise UserValueError(f"{where} at least one index, got shape {shape}")
        if windows and (*jnp.shape(indices.counts)[:-2], jnp.shape(indices.counts)[-1]) != shape:
            raise ShapeError(
                f"{where} counts [L, M] for M windows, got {jnp.shape(indices.counts)} for starts of shape {shape}"
            )
        if weight is not None and jnp.shape(weight) != shape:
            raise ShapeError(f"{where} one weight for each index, {shape}, got {jnp.shape(weight)}")

    def _take(self, batch: Batch, indices: Any) -> dict[str, Any]:
        """Return the fields of a batch with one shard at these indices; an index out of range gives NaN."""
        rows, segments, inside = self._locate(indices, *batch.log_prob.shape[:2])
        # Samplers draw indices in range, so "clip" avoids the default mode's handling of other indices.
        take = functools.partial(jnp.take, axis=0, mode="clip")
        flat = jax.tree.map(lambda x: jax.lax.collapse(x, 0, 2), {name: getattr(batch, name) for name in PER_STEP})
        per_segment = {name: getattr(batch, name) for name in PER_SEGMENT}
        taken = jax.tree.map(functools.partial(take, indices=rows), flat)
        taken |= jax.tree.map(functools.partial(take, indices=segments), per_segment)
        log_prob, mask = taken["log_prob"], taken["mask"]
        inside = unsqueeze(inside if self.axis == "step" else inside[None], log_prob.ndim)
        taken["log_prob"] = nan_where(~inside, log_prob)
        if mask is not None:  # "clip" takes another element's mask, which might hide the NaN
            taken["mask"] = jnp.where(inside, mask, 1).astype(mask.dtype)
        return taken | _mask_windows(taken, indices) if self.axis == "window" else taken

    def put(self, buffer: Array, indices: Any, rows: Array, shards: int = 1) -> Array:
        """Return `buffer` `[T, N]` with the rows of a minibatch written back."""
        rows = rows.astype(buffer.dtype)
        if indices is None:
            return rows
        if shards > 1:
            along = 0 if self.axis == "step" else 1
            put = jax.vmap(self.put, in_axes=(1, 0, along), out_axes=1)
            return jax.lax.collapse(put(split(buffer, shards, 1), indices, split(rows, shards, along)), 1, 3)
        flat, places = jax.lax.collapse(buffer, 0, 2), self._locate(indices, *buffer.shape[:2])[0]
        if self.axis == "window":  # do not write warm-up steps, in which windows may overlap
            counts = unsqueeze(indices.counts, rows.ndim)
            places, rows = jnp.where(indices.counts, places, len(flat)), jnp.where(counts, rows, 0)
        return flat.at[places].set(rows, mode="drop").reshape(buffer.shape)

    def _locate(self, indices: Any, time: int, segments: int) -> tuple[Array, Array, Array]:
        """Return rows of the flattened rollout, `[M]` or `[L, M]`, their segments, and whether indices are in range."""
        if self.axis == "step":
            return indices, indices % segments, (indices >= 0) & (indices < time * segments)
        if self.axis == "window":
            start, segment, length = indices.start, indices.segment, indices.counts.shape[0]
        else:  # a segment is a window of all steps
            start, segment, length = jnp.zeros_like(indices), indices, time
        inside = (start >= 0) & (start + length <= time) & (segment >= 0) & (segment < segments)
        return (start[None] + jnp.arange(length)[:, None]) * segments + segment[None], segment, inside


@checked
def sampler(
    name: str,
    plan: Plan,
    draw: Draw,
    *,
    num_epochs: Count = 1,
    num_minibatches: Count,
    axis: Axis,
    refresh: Refresh = "rollout",
    weighted: bool = False,
    requires: tuple[str, ...] = (),
) -> Part:
    """Make a sampler from functions that choose the elements of the rollout for each minibatch.

    These functions need no code for shards. If the rollout has several shards, `plan` and `draw` are called for every
    shard (with `vmap`), each time with a different key and the batch of one shard, `[T, N / S]`, whose `batch.shards`
    is 1. A minibatch consists of the elements drawn from all shards.

    Args:
        name: the sampler's name in error messages.
        plan: `plan(key, batch, epoch) -> tree`, where every leaf has the leading axis `[num_minibatches]`. It is called
            once per epoch, with the batch after the parts before the sampler (with `refresh="minibatch"`, before them).
        draw: `draw(item, batch, context) -> (indices, weight)`. `item` is one row of the plan, the indices are integers
            `[M]` (or `Windows`, or None for the whole batch), and the weight is `[M]` or None. An index out of range
            makes the log-probability and the loss NaN, which the learner counts.
        num_epochs: number of passes over the rollout.
        num_minibatches: number of minibatches per epoch.
        axis: the meaning of an index. "step" means a row t*N + n of the flattened rollout, "segment" a column, and
            "window" a piece of a segment.
        refresh: as in `shuffled_minibatches`.
        weighted: whether `draw` returns a weight, which is written to `batch.weight`.
        requires: fields of the batch that `plan` or `draw` read.

    Example:
        Use the newest half of every rollout, in order:

        >>> import jax.numpy as jnp, ppo_parts as pp
        >>> def plan(key, batch, epoch):
        ...     steps = batch.log_prob.size
        ...     return jnp.arange(steps // 2, steps).reshape(2, -1)
        >>> def draw(item, batch, context):
        ...     return item, None
        >>> newest = pp.sampler("newest", plan, draw, num_minibatches=2, axis="step")
    """
    check_takes(name, "plan", plan, ("key", "batch", "epoch"))
    check_takes(name, "draw", draw, ("item", "batch", "context"))
    return sampler_of_shards(
        name, _plan_shards(plan), _draw_shards(name, draw), num_epochs=num_epochs, num_minibatches=num_minibatches,
        axis=axis, refresh=refresh, weighted=weighted, requires=requires,
    )  # fmt: skip


def sampler_of_shards(
    name: str, plan: Plan, draw: Draw, *, num_epochs: int, num_minibatches: int, axis: Axis, refresh: Refresh,
    weighted: bool = False, requires: tuple[str, ...] = (),
) -> Part:  # fmt: skip
    """Make a sampler whose `plan` and `draw` receive the whole rollout, with all its shards; see `Sampler`."""

    def update(batch: Batch, state: PartState, context: Context) -> tuple[Batch, PartState]:
        # If a sampler runs as a plain part, it draws the minibatch at the position of the context.
        return on_automatic_mesh(drawn, batch.log_prob)(batch, context), state

    def drawn(batch: Batch, context: Context) -> Batch:
        index, plan_key = context.minibatch, jax.random.fold_in(context.key, context.epoch)
        if (known := known_values(index)) is not None and known not in range(num_minibatches):
            raise UserValueError(f"must be in [0, {num_minibatches}), got {index}", where=name, argument="minibatch")
        draw_key = jax.random.fold_in(jax.random.fold_in(plan_key, PART_KEY), index)
        items = plan(plan_key, batch, context.epoch)
        check_plan(made, items)
        item = jax.tree.map(lambda x: jnp.asarray(x)[index], items)
        indices, weight = draw(item, batch, context.replace(key=draw_key))
        minibatch = made.take(batch, indices, weight)
        outside = (index < 0) | (index >= num_minibatches)
        minibatch = minibatch.replace(log_prob=nan_where(outside, minibatch.log_prob))
        return minibatch.replace(current=evaluate_current(context.evaluate, context.params, minibatch))

    made = Sampler(
        no_state, update, name, requires=requires, provides=("weight",) if weighted else (), reads=(),
        place="before_sampler", cuts_time=axis == "step", num_epochs=num_epochs, num_minibatches=num_minibatches,
        axis=axis, refresh=refresh, plan=plan, draw=draw,
    )  # fmt: skip
    return made


def check_plan(sampler: Sampler, items: Any) -> None:
    """Raise unless the plan of an epoch has one row per minibatch."""
    sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves(items)}
    if sizes != {(sampler.num_minibatches,)}:
        raise UserValueError(
            f"{sampler.name}: plan must return arrays with leading axis [num_minibatches] = "
            f"[{sampler.num_minibatches}], but their leading axes are {sorted(sizes)}"
        )


def _mask_windows(taken: dict[str, Any], windows: Windows) -> dict[str, Any]:
    """Return the mask without warm-up steps, and resets that zero the state in windows that begin after step 0."""
    log_prob, mask, reset = (taken[name] for name in ("log_prob", "mask", "reset"))
    counts = jnp.broadcast_to(unsqueeze(windows.counts, log_prob.ndim), log_prob.shape)
    if reset is not None:
        begins_later = unsqueeze(windows.start > 0, reset.ndim - 1)
        reset = reset.at[0].set(jnp.where(begins_later, 1, reset[0]).astype(reset.dtype))
    return {"mask": counts if mask is None else jnp.where(counts, mask, 0).astype(mask.dtype), "reset": reset}


def _plan_shards(plan: Plan) -> Plan:
    """Wrap `plan` so that it plans every shard, `[num_minibatches, shards, ...]`."""

    def planned(key: Array, batch: Batch, epoch: Array | int) -> Any:
        if batch.shards == 1:
            return plan(key, batch, epoch)
        keys = jax.random.split(key, batch.shards)
        try:
            items = map_shards(lambda shard, key: plan(key, shard, epoch), batch, keys)
        except UserValueError as error:
            message = f"{error.message} (a plan is made for each of {batch.shards} shards)"
            raise UserValueError(message, where=error.where, argument=error.argument) from error
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, min(1, x.ndim - 1)), items)

    return planned


def _draw_shards(name: str, draw: Draw) -> Draw:
    """Wrap `draw` so that it draws the indices and weights of every shard, `[shards, ...]`."""

    def of_shard(item: Any, batch: Batch, context: Context) -> tuple[Any, Array | None]:
        result = draw(item, batch, context)
        if not isinstance(result, tuple) or len(result) != 2:
            raise UserTypeError(f"{name}: draw must return (indices, weight), got {kind(result)}")
        return result

    def drawn(item: Any, batch: Batch, context: Context) -> tuple[Any, Array | None]:
        if batch.shards == 1:
            return of_shard(item, batch, context)
        keys = jax.random.split(context.key, batch.shards)
        return map_shards(lambda shard, item, key: of_shard(item, shard, context.replace(key=key)), batch, item, keys)

    return drawn
