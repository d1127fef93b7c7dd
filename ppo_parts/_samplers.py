"""Samplers: the parts that divide a rollout into minibatches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import functional
from ._errors import UserTypeError, UserValueError
from ._hyperparameters import Numeric, at, choice, count, number, spread_nan
from ._policy import evaluate_current
from ._refresh import Refresh, RefreshName, refresh_of
from ._shards import field_axes, joined, map_shards, pick, split
from ._trees import on_automatic_mesh
from ._types import PER_SEGMENT, PER_STEP, Array, Batch, Context, Divider, EmptyState, Part, no_state
from .functional._common import unsqueezed

Axis = Literal["step", "segment", "window"]
Plan = Callable[[Array, Batch, Array | int], Any]
Draw = Callable[[Any, Batch, Context], tuple[Any, Array | None]]


class Windows(NamedTuple):
    """The indices that `draw` returns with `axis="window"`: M pieces of L steps.

    Attributes:
        start, segment: `[M]` integers: window m has the steps start[m], ..., start[m] + L - 1 of a segment.
        counts: `[L, M]` booleans: True for steps that are trained on. False masks a step, which then only warms up a
            recurrent state.
    """

    start: Array
    segment: Array
    counts: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler(Divider):
    """A part that divides the chain: parts before it see the rollout, parts after it see minibatches.

    Attributes:
        num_epochs: passes over the rollout.
        num_minibatches: minibatches per epoch.
        axis: what an index means: "step", a row of the flattened time-major rollout (t*N + n); "segment", a column;
            "window", see `Windows`.
        refresh: how often the parts before the sampler run again.
        plan: `plan(key, batch, epoch) -> tree` with leading axis `[num_minibatches]`, made at the start of an epoch
            from the batch that the parts before the sampler left.
        draw: `draw(item, batch, context) -> (indices [M] | Windows | None, weight [M] | None)`, where `item` is one row
            of the plan. Indices None: the whole batch, unchanged. If the batch has S > 1 shards, all leaves have a
            leading axis `[S]`, and indices are positions within a shard.
    """

    num_epochs: int
    num_minibatches: int
    axis: Axis
    refresh: Refresh
    plan: Plan
    draw: Draw
    in_range: bool = False

    def take(self, batch: Batch, indices: Any, weight: Array | None) -> Batch:
        """Return the minibatch with these indices; metrics and losses start empty."""
        batch = batch.replace(metrics={}, reductions=(), losses={}, weight=weight)
        if indices is None:
            return batch.replace(weight=None if weight is None else weight.reshape(-1))
        time, segments = batch.log_prob.shape[0], batch.log_prob.shape[1] // batch.shards
        axes = ("step",) if self.axis == "step" else batch.axes
        if batch.shards == 1:
            minibatch = self._take(batch, indices, segments).replace(axes=axes)
        else:
            minibatch = self._take_shards(batch, indices, segments, axes)
            indices, weight = _in_one_row(indices), None if weight is None else weight.reshape(-1)
        if not self.in_range:
            minibatch = minibatch.replace(log_prob=self._nan_outside(minibatch.log_prob, indices, (time, segments)))
        minibatch = minibatch.replace(weight=weight)
        return _from_windows(minibatch, indices) if self.axis == "window" else minibatch

    def _take(self, batch: Batch, indices: Any, segments: int) -> Batch:
        """Take the rows from a batch with one shard."""

        def rows(x: Array, rows: Array, along: int) -> Array:
            # Samplers draw indices in range; "clip" avoids the default's handling of negative and outlying ones.
            return jnp.take(x, rows, axis=along, mode="clip")

        def per_step(x: Array) -> Array:
            if self.axis == "segment":
                return rows(x, indices, 1)
            return rows(x.reshape((-1, *x.shape[2:])), self._rows(indices, segments), 0)

        def per_segment(x: Array) -> Array:
            chosen = {"segment": lambda: indices, "window": lambda: indices.segment, "step": lambda: indices % segments}
            return rows(x, chosen[self.axis](), 0)

        picked = {field: jax.tree.map(per_step, getattr(batch, field)) for field in PER_STEP}
        return batch.replace(**picked, **{f: jax.tree.map(per_segment, getattr(batch, f)) for f in PER_SEGMENT})

    def _take_shards(self, batch: Batch, indices: Any, segments: int, axes: tuple[str, ...]) -> Batch:
        """Take the rows from every shard, side by side."""
        if self.axis == "window":
            counts = jnp.moveaxis(indices.counts, 0, 1)
            step: Array | None = indices.start[None] + jnp.arange(len(counts))[:, None, None]
            segment, own = jnp.broadcast_to(indices.segment[None], counts.shape), indices.segment
        else:
            step = indices // segments if self.axis == "step" else None
            segment = own = indices % segments if self.axis == "step" else indices

        def taken(x: Array, axis: int, along: int) -> Array:
            """`axis` has the segments of the rollout, `along` the elements of the minibatch."""
            if axis == 0:  # a field without time, which `pick` takes for a rollout of one step
                return joined(pick(split(x, batch.shards, 0)[None], None, own)[0], 0)
            return joined(pick(split(x, batch.shards, axis), step, segment), along)

        before, after = field_axes(batch), field_axes(batch.replace(axes=axes))
        fields = {
            name: jax.tree.map(lambda x, name=name: taken(x, before[name], after[name]), getattr(batch, name))
            for name in before
        }
        return batch.replace(**fields, axes=axes)

    def _nan_outside(self, log_prob: Array, indices: Any, shape: tuple[int, int]) -> Array:
        """Return the log-probabilities, with NaN where an index is out of range."""
        time, segments = shape
        if self.axis == "window":
            last = indices.start + indices.counts.shape[0] - 1
            inside = (indices.start >= 0) & (last < time) & (indices.segment >= 0) & (indices.segment < segments)
        else:
            inside = (indices >= 0) & (indices < (time * segments if self.axis == "step" else segments))
        leading = 1 if self.axis == "step" else 2
        inside = inside.reshape((1,) * (leading - 1) + inside.shape + (1,) * (log_prob.ndim - leading))
        return jnp.where(inside, log_prob, jnp.nan)

    def put(self, buffer: Array, indices: Any, rows: Array, shards: int = 1) -> Array:
        """Return `buffer` `[T, N]` with the rows of a minibatch written back."""
        if indices is None:
            return rows.astype(buffer.dtype)
        if shards > 1:
            along = 0 if self.axis == "step" else 1
            put = jax.vmap(self.put, in_axes=(1, 0, along), out_axes=1)
            return joined(put(split(buffer, shards, 1), indices, split(rows, shards, along)), 1)
        if self.axis == "segment":
            return buffer.at[:, indices].set(rows)
        flat, places = buffer.reshape((-1, *buffer.shape[2:])), self._rows(indices, buffer.shape[1])
        if self.axis == "window":  # do not write steps that only warm up: two windows may overlap in them
            counts = unsqueezed(indices.counts, rows.ndim)
            places, rows = jnp.where(indices.counts, places, len(flat)), jnp.where(counts, rows, 0)
        return flat.at[places].set(rows, mode="drop").reshape(buffer.shape)

    def _rows(self, indices: Any, segments: int) -> Array:
        """Return the indices of rows of the flattened rollout, `[M]` or `[L, M]`."""
        if self.axis == "step":
            return indices
        steps = indices.start[None] + jnp.arange(indices.counts.shape[0])[:, None]
        return steps * segments + indices.segment[None]


def sampler(
    name: str,
    plan: Plan,
    draw: Draw,
    *,
    num_epochs: int = 1,
    num_minibatches: int,
    axis: Axis,
    refresh: RefreshName | Refresh = "rollout",
    weighs: bool = False,
    requires: tuple[str, ...] = (),
    in_range: bool = False,
) -> Part:
    """Make a sampler from your own functions, which choose the elements of the rollout for each minibatch.

    These functions need no code for shards. If the rollout has several shards, `plan` and `draw` are called for every
    shard (by `vmap`), each time with a different key and with the batch of one shard, `[T, N / S]` and `batch.shards`
    1. A minibatch consists of the elements drawn from all shards.

    Args:
        name: its name in error messages.
        plan: `plan(key, batch, epoch) -> tree`, every leaf with leading axis `[num_minibatches]`; called once per epoch
            with the batch that the parts before the sampler left.
        draw: `draw(item, batch, context) -> (indices, weight)`: `item` is one row of the plan, the indices are integers
            `[M]` (or `Windows`, or None for the whole batch), the weight is `[M]` or None.
        num_epochs: passes over the rollout.
        num_minibatches: minibatches per epoch.
        axis: what an index means: "step": a row t*N + n of the flattened rollout; "segment": a column; "window": a
            piece of a segment.
        refresh: as in `shuffled_minibatches`.
        weighs: whether `draw` returns a weight, which goes to `batch.weight`.
        requires: fields of the batch that `plan` or `draw` read.
        in_range: whether all indices are guaranteed to be in range. Otherwise, elements with an index out of range have
            a log-probability of NaN, so that the loss is NaN and is counted.

    Example:
        The newest half of every rollout, in order:

        >>> import jax.numpy as jnp, ppo_parts as pp
        >>> def plan(key, batch, epoch):
        ...     steps = batch.log_prob.size
        ...     return jnp.arange(steps // 2, steps).reshape(2, -1)
        >>> def draw(item, batch, context):
        ...     return item, None
        >>> newest = pp.sampler("newest", plan, draw, num_minibatches=2, axis="step")
    """
    return _sampler(
        name,
        _plan_shards(plan),
        _draw_shards(draw),
        num_epochs=num_epochs,
        num_minibatches=num_minibatches,
        axis=axis,
        refresh=refresh,
        weighs=weighs,
        requires=requires,
        in_range=in_range,
    )


def _sampler(
    name: str,
    plan: Plan,
    draw: Draw,
    *,
    num_epochs: int,
    num_minibatches: int,
    axis: Axis,
    refresh: RefreshName | Refresh,
    weighs: bool = False,
    requires: tuple[str, ...] = (),
    in_range: bool = True,
) -> Part:
    """Make a sampler whose plan and draw receive the whole rollout, with all its shards; see `Sampler.draw`."""
    count(name, "num_minibatches", num_minibatches)
    count(name, "num_epochs", num_epochs)
    choice(name, "axis", axis, ("step", "segment", "window"))

    def update(batch: Batch, state: EmptyState, context: Context) -> tuple[Batch, EmptyState]:
        # As a plain part: the first minibatch of the first epoch, under the context's parameters.
        return on_automatic_mesh(first, batch.log_prob)(batch, context), state

    def first(batch: Batch, context: Context) -> Batch:
        item = jax.tree.map(lambda x: x[0], plan(context.key, batch, 0))
        indices, weight = draw(item, batch, context)
        minibatch = whole.take(batch, indices, weight)
        return minibatch.replace(current=evaluate_current(context.evaluate, context.params, minibatch))

    whole = Sampler(
        no_state,
        update,
        name,
        requires=requires,
        provides=("weight",) if weighs else (),
        reads=(),
        place="before_sampler",
        num_epochs=num_epochs,
        num_minibatches=num_minibatches,
        axis=axis,
        refresh=refresh_of(name, refresh),
        plan=plan,
        draw=draw,
        in_range=in_range,
    )
    return whole


def shuffled_minibatches(
    num_minibatches: int, num_epochs: int = 1, *, refresh: RefreshName | Refresh = "rollout"
) -> Part:
    """Use every step exactly once per epoch, in a new random order: minibatches of T*N/num_minibatches steps, `[M]`.

    This cuts the time axis, so parts that work along time and recurrent policies need `segment_minibatches`.

    Args:
        num_minibatches: minibatches per epoch; must divide T*N.
        num_epochs: passes over the rollout.
        refresh: how often the parts before the sampler run again, on values and ratios of the current policy.
            "rollout": only once; "epoch": before each epoch (the whole rollout is evaluated again); "minibatch": before
            each minibatch, after the value and log-ratio of the last minibatch have been written back.

    Raises:
        ValueError: sizes that do not divide, naming them; a recurrent batch.

    Example:
        >>> import ppo_parts as pp
        >>> sampler = pp.shuffled_minibatches(num_minibatches=4, num_epochs=4)

    Reference: Huang et al. 2022, The 37 Implementation Details of PPO, detail 6. Refresh per epoch: Andrychowicz et al.
    2021, arXiv:2006.05990, section 3.5; per minibatch: PufferLib 3.0.
    """
    return _shuffled("shuffled_minibatches", "step", num_minibatches, num_epochs, refresh)


def segment_minibatches(
    num_minibatches: int, num_epochs: int = 1, *, refresh: RefreshName | Refresh = "rollout"
) -> Part:
    """Use every segment (environment, or environment and agent) once per epoch, in a new random order: `[T, M]`.

    Use it for recurrent policies, and for parts that work along time (`vtrace`) under the policy being trained.

    Args:
        num_minibatches: minibatches per epoch; must divide the number of segments N.
        num_epochs: passes over the rollout.
        refresh: as in `shuffled_minibatches`.

    Raises:
        ValueError: sizes that do not divide, naming them.

    Example:
        >>> import ppo_parts as pp
        >>> sampler = pp.segment_minibatches(num_minibatches=2, num_epochs=4)

    Reference: Huang et al. 2022, detail 35.
    """
    return _shuffled("segment_minibatches", "segment", num_minibatches, num_epochs, refresh)


def full_batch(num_epochs: int = 1, *, refresh: RefreshName | Refresh = "rollout") -> Part:
    """Use the whole rollout as one minibatch `[T, N]`, `num_epochs` times, without copying or shuffling.

    Args:
        num_epochs: gradient steps.
        refresh: as in `shuffled_minibatches`.

    Example:
        >>> import ppo_parts as pp
        >>> sampler = pp.full_batch(num_epochs=10)

    Reference: Schulman et al. 2017, arXiv:1707.06347, algorithm 1, with M = NT.
    """

    def plan(key: Array, batch: Batch, epoch: Array | int) -> Array:
        del key, batch, epoch
        return jnp.zeros((1,), jnp.int32)

    def draw(item: Array, batch: Batch, context: Context) -> tuple[None, None]:
        del item, batch, context
        return None, None

    return _whole_passes("full_batch", plan, 1, num_epochs, "segment", refresh, draw)


def given_indices(
    indices: Any, axis: Axis = "step", weights: Any = None, *, refresh: RefreshName | Refresh = "rollout"
) -> Part:
    """Use exactly these minibatches, in this order, for parity tests and debugging.

    Args:
        indices: integers `[K, M]`, K minibatches of one epoch, or `[E, K, M]`, E epochs (which matter to
            `kl_early_stop(check="epoch")`). They are rows of the flattened time-major rollout, t*N + n. Traced
            integers cannot be checked: those that are out of range make the loss NaN. If the rollout has S shards,
            the M indices of a minibatch are S equal blocks, one for each shard in order.
        axis: "segment": the integers are segment numbers instead.
        weights: importance weights of the shape of `indices`, or None.
        refresh: as in `shuffled_minibatches`.

    Raises:
        TypeError: not integers. ValueError: another rank, weights of another shape, an index out of range or in a block
            of another shard.

    Example:
        >>> import ppo_parts as pp
        >>> sampler = pp.given_indices([[0, 3], [1, 2]])  # two minibatches of two steps
    """
    choice("given_indices", "axis", axis, ("step", "segment"))
    traced = isinstance(indices, jax.core.Tracer)
    table = indices if traced else np.asarray(indices)
    if not jnp.issubdtype(table.dtype, np.integer):
        raise UserTypeError(f"given_indices: indices must be integers, got {table.dtype}")
    if table.ndim not in (2, 3) or table.size == 0:
        raise UserValueError(f"given_indices: indices must be [K, M] or [E, K, M], got shape {table.shape}")
    if weights is not None and np.shape(weights) != table.shape:
        raise UserValueError(f"given_indices: weights have shape {np.shape(weights)}, indices {table.shape}")
    if not traced and table.max() > np.iinfo(np.int32).max:  # it would wrap around to an index that exists
        raise UserValueError(f"given_indices: indices must lie in [0, 2**31), got {table.min()} to {table.max()}")
    table = table.reshape((-1, *table.shape[-2:])).astype(np.int32)

    def plan(key: Array, batch: Batch, epoch: Array | int) -> Any:
        del key
        size, rows = _size("given_indices", batch, axis), table
        if not traced and (table.min() < 0 or table.max() >= size):
            raise UserValueError(
                f"given_indices: indices must lie in [0, {size}) for {axis}s of this batch, got "
                f"{table.min()} to {table.max()}"
            )
        if batch.shards > 1:
            rows = _within_shards(table, batch, axis)
            if not traced and rows.min() < 0:
                raise UserValueError(
                    f"given_indices: this batch has {batch.shards} shards, so each minibatch must be {batch.shards} "
                    f"equal blocks of indices, block s with {axis}s of shard s; another order has no meaning here"
                )
        if weights is None:
            return jnp.asarray(rows)[epoch], None
        return jnp.asarray(rows)[epoch], jnp.asarray(weights, batch.log_prob.dtype).reshape(rows.shape)[epoch]

    def draw(item: Any, batch: Batch, context: Context) -> tuple[Array, Array | None]:
        del batch, context
        return item

    epochs, minibatches = table.shape[:2]
    return _sampler(
        "given_indices",
        plan,
        draw,
        num_epochs=epochs,
        num_minibatches=minibatches,
        axis=axis,
        refresh=refresh,
        weighs=weights is not None,
        in_range=not traced,
    )


def _within_shards(table: Any, batch: Batch, axis: Axis) -> Any:
    """Convert indices `[..., M]` to `[..., S, M / S]` within the shards; -1 if an index belongs to another shard."""
    xp, size = jnp if isinstance(table, jax.Array) else np, table.shape[-1]
    _share("given_indices", batch.shards, size, "indices of a minibatch", "shards")
    table, segments = table.reshape((*table.shape[:-1], batch.shards, -1)), batch.log_prob.shape[1]
    own = segments // batch.shards
    step, segment = (table // segments, table % segments) if axis == "step" else (0, table)
    segment = segment - own * np.arange(batch.shards, dtype=np.int32).reshape((1,) * (table.ndim - 2) + (-1, 1))
    return xp.where((segment >= 0) & (segment < own), step * own + segment, -1)


def prioritized_sampler(
    num_minibatches: int,
    num_epochs: int = 1,
    *,
    alpha: Numeric,
    beta: Numeric,
    replacement: bool = False,
    normalize_weights: bool = False,
    segments_per_minibatch: int | None = None,
    eps: Numeric = 1e-6,
    refresh: RefreshName | Refresh = "rollout",
) -> Part:
    r"""Draw segments in proportion to a power of their summed absolute advantage; time is kept: `[T, M]`.

    .. math:: P_n \propto \Big(\sum_t |A_{tn}|\Big)^{\alpha} + \epsilon, \qquad w = (N P_n)^{-\beta}

    Each minibatch is drawn independently, so a segment can be in several minibatches of an epoch, or in none. The
    weight is written to `batch.weight`; `advantage_weight` or `loss_weight` applies it. Masked steps do not count, and
    fully masked segments are never drawn (if there are enough others). If the rollout has S shards, M / S
    segments are drawn from each shard, with probabilities and weights computed over its N / S segments.

    Args:
        num_minibatches: draws per epoch; divides the number of segments N unless `segments_per_minibatch` is given.
        num_epochs: multiplies the number of draws.
        alpha: exponent of the priority, >= 0 (0: uniform); a schedule counts learner updates.
        beta: exponent of the weight, in [0, 1] (1: unbiased); a schedule counts learner updates.
        replacement: whether a segment can be drawn twice for one minibatch.
        normalize_weights: divide the weights by the largest weight that any segment could have.
        segments_per_minibatch: M; None: N / num_minibatches.
        eps: added to every priority, >= 0, so that none has probability 0; a schedule counts learner updates.
        refresh: as in `shuffled_minibatches`; with "minibatch" each draw uses updated priorities, as in PufferLib.

    Place: after `gae` or `vtrace`, whose advantage it reads.

    Raises:
        ValueError: sizes that do not divide; more segments are requested than there are.

    Example:
        >>> import ppo_parts as pp
        >>> sampler = pp.prioritized_sampler(8, alpha=.8, beta=pp.linear_schedule(.2, 1., 1000))

    Reference: PufferLib 3.0; Schaul et al. 2016, arXiv:1511.05952, eq. 1 and section 3.4.
    """
    where = "prioritized_sampler"
    alpha = number(where, "alpha", alpha, 0)
    beta = number(where, "beta", beta, 0, 1)
    eps = number(where, "eps", eps, 0)
    if segments_per_minibatch is not None:
        count(where, "segments_per_minibatch", segments_per_minibatch)

    def plan(key: Array, batch: Batch, epoch: Array | int) -> Array:
        del epoch, batch
        return jax.random.split(key, num_minibatches)

    def draw(item: Array, batch: Batch, context: Context) -> tuple[Array, Array]:
        segments = _size(where, batch, "segment")
        size = segments_per_minibatch or _share(where, num_minibatches, segments, "segments N")
        size = _share(where, batch.shards, size, "segments of a minibatch", "shards")
        segments = segments // batch.shards
        if size > segments and not replacement:
            raise UserValueError(f"{where}: {size} of {segments} segments cannot be drawn without replacement")
        powers = [at(x, context.step) for x in (alpha, beta, eps)]

        def drawn(batch: Batch, key: Array) -> tuple[Array, Array]:
            advantage, mask = batch.advantage, batch.mask
            probabilities = functional.segment_priorities(
                advantage.reshape((*advantage.shape[:2], -1)).swapaxes(1, 2).reshape(-1, segments),
                alpha=powers[0],
                eps=powers[2],
                mask=None if mask is None else mask.reshape((*mask.shape[:2], -1)).swapaxes(1, 2).reshape(-1, segments),
            )
            indices = jax.random.choice(key, segments, (size,), replace=replacement, p=probabilities)
            weight = functional.importance_weights(probabilities, indices, beta=powers[1], normalize=normalize_weights)
            return indices, spread_nan(weight, *powers)

        if batch.shards == 1:
            return drawn(batch, item)
        return map_shards(drawn, batch, jax.random.split(item, batch.shards))

    return _sampler(
        where,
        plan,
        draw,
        num_epochs=num_epochs,
        num_minibatches=num_minibatches,
        axis="segment",
        refresh=refresh,
        weighs=not _is_zero(beta),
        requires=("advantage",),
    )


def time_chunks(
    num_minibatches: int,
    num_epochs: int = 1,
    *,
    length: int,
    burn_in: int = 0,
    refresh: RefreshName | Refresh = "rollout",
) -> Part:
    """Use pieces of `length` steps, every step once per epoch; time is kept: minibatches `[burn_in + length, M]`.

    A recurrent policy first processes up to `burn_in` steps before the piece. It starts from the recorded state at the
    beginning of the rollout, and from zeros elsewhere. The steps of the burn-in are masked: they have no loss and do
    not affect any statistic.

    Args:
        num_minibatches: minibatches per epoch; must divide the number of pieces, N * T / length.
        num_epochs: passes over the rollout.
        length: steps per piece; must divide T.
        burn_in: number of steps that warm up the recurrent state; burn_in + length is at most T.
        refresh: as in `shuffled_minibatches`.

    Raises:
        ValueError: sizes that do not divide, naming them.

    Example:
        >>> import ppo_parts as pp
        >>> sampler = pp.time_chunks(num_minibatches=4, length=16, burn_in=8)

    Reference: Kapturowski et al. 2019, Recurrent Experience Replay (R2D2), section 3.
    """
    where = "time_chunks"
    count(where, "length", length)
    if isinstance(burn_in, bool) or not isinstance(burn_in, int) or burn_in < 0:
        raise UserValueError(f"{where}: burn_in must be a whole number, 0 or more, got {burn_in!r}")

    def plan(key: Array, batch: Batch, epoch: Array | int) -> Array:
        del epoch
        time, segments = batch.log_prob.shape[:2]
        if batch.carry is not None and batch.reset is None:
            raise UserValueError(
                f"{where}: the batch has a recurrent carry but no reset, which is needed to start later windows from "
                "zeros: give the batch reset, [T, N], 1 where the state is zeroed before step t"
            )
        if time % length or burn_in + length > time:
            raise UserValueError(
                f"{where}: length={length} must divide the {time} steps of this batch, and burn_in + length = "
                f"{burn_in + length} must not exceed them"
            )
        pieces = segments * (time // length)
        _share(where, num_minibatches, pieces, "pieces, N * T / length,")
        return functional.permutation(key, pieces).reshape(num_minibatches, -1)

    def draw(item: Array, batch: Batch, context: Context) -> tuple[Windows, None]:
        del context
        segments = batch.log_prob.shape[1]
        first, segment = item // segments * length, item % segments
        start = jnp.maximum(first - burn_in, 0)
        step = start[None] + jnp.arange(burn_in + length)[:, None]
        return Windows(start, segment, (step >= first[None]) & (step < first[None] + length)), None

    return _whole_passes(where, plan, num_minibatches, num_epochs, "window", refresh, draw)


def _from_windows(minibatch: Batch, windows: Windows) -> Batch:
    """Return the batch of windows: warm-up steps are masked, and the state is zeroed in windows that begin later."""
    counts = jnp.broadcast_to(unsqueezed(windows.counts, minibatch.log_prob.ndim), minibatch.log_prob.shape)
    mask = counts if minibatch.mask is None else jnp.where(counts, minibatch.mask, 0)
    reset = minibatch.reset
    if reset is not None:
        begins_later = unsqueezed(windows.start > 0, reset.ndim - 1)
        reset = reset.at[0].set(jnp.where(begins_later, 1, reset[0]).astype(reset.dtype))
    return minibatch.replace(mask=mask, reset=reset)


def _is_zero(value: Any) -> bool:
    return not callable(value) and not isinstance(value, jax.core.Tracer) and not np.any(np.asarray(value))


def _shuffled(where: str, axis: Axis, num_minibatches: int, num_epochs: int, refresh: RefreshName | Refresh) -> Part:
    def plan(key: Array, batch: Batch, epoch: Array | int) -> Array:
        del epoch
        size = _size(where, batch, axis)
        _share(where, num_minibatches, size, "steps T*N" if axis == "step" else "segments N")
        return functional.permutation(key, size).reshape(num_minibatches, -1)

    return _whole_passes(where, plan, num_minibatches, num_epochs, axis, refresh)


def _as_planned(item: Any, batch: Batch, context: Context) -> tuple[Any, None]:
    del batch, context
    return item, None


def _whole_passes(
    where: str,
    plan: Plan,
    num_minibatches: int,
    num_epochs: int,
    axis: Axis,
    refresh: RefreshName | Refresh,
    draw: Draw = _as_planned,
) -> Part:
    """Make a sampler without weights whose plan has every step once per epoch."""
    options: dict[str, Any] = {"axis": axis, "refresh": refresh, "in_range": True}
    return sampler(where, plan, draw, num_epochs=num_epochs, num_minibatches=num_minibatches, **options)


def _plan_shards(plan: Plan) -> Plan:
    """Make a plan for every shard, `[num_minibatches, shards, ...]`."""

    def planned(key: Array, batch: Batch, epoch: Array | int) -> Any:
        if batch.shards == 1:
            return plan(key, batch, epoch)
        keys = jax.random.split(key, batch.shards)
        try:
            items = map_shards(lambda shard, key: plan(key, shard, epoch), batch, keys)
        except UserValueError as error:
            raise UserValueError(f"{error} (a plan is made for each of {batch.shards} shards)") from error
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, min(1, x.ndim - 1)), items)

    return planned


def _draw_shards(draw: Draw) -> Draw:
    """Draw the indices and weights of every shard, `[shards, ...]`."""

    def drawn(item: Any, batch: Batch, context: Context) -> tuple[Any, Array | None]:
        if batch.shards == 1:
            return draw(item, batch, context)
        keys = jax.random.split(context.key, batch.shards)
        return map_shards(lambda shard, item, key: draw(item, shard, context.replace(key=key)), batch, item, keys)

    return drawn


def _in_one_row(indices: Any) -> Any:
    """Reshape the indices of several shards from `[shards, M / shards]` to `[M]`."""
    if not isinstance(indices, Windows):
        return indices.reshape(-1)
    counts = jnp.moveaxis(indices.counts, 0, 1)
    return Windows(indices.start.reshape(-1), indices.segment.reshape(-1), joined(counts, 1))


def _size(where: str, batch: Batch, axis: Axis) -> int:
    if axis == "step" and batch.carry is not None:
        raise UserValueError(
            f"{where} takes single steps, but the batch has a recurrent carry: use segment_minibatches()"
        )
    time, segments = batch.log_prob.shape[:2]
    return time * segments if axis == "step" else segments


def _share(where: str, number: int, size: int, what: str, name: str = "num_minibatches") -> int:
    if size % number:
        divisors = [d for d in range(1, size + 1) if size % d == 0]
        near = sorted(divisors, key=lambda d: abs(d - number))[:3]
        raise UserValueError(
            f"{where}: {name}={number} does not divide the {size} {what} of this batch; "
            f"nearest that do: {', '.join(map(str, sorted(near)))}"
        )
    return size // number
