"""Samplers: the parts that divide a rollout into minibatches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from . import functional
from ._errors import UserValueError
from ._hyperparameters import Numeric, at, choice, count, number, spread_nan
from ._policy import evaluate_current
from ._types import PER_STEP, Array, Batch, Context, EmptyState, Part, no_state

Refresh = Literal["rollout", "epoch", "minibatch"]
Axis = Literal["step", "segment"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler(Part):
    """A part that divides: parts before it see the rollout, parts after it see minibatches.

    Attributes:
        num_epochs: passes.
        num_minibatches: minibatches per epoch.
        axis: what an index means: "step", a row of the flattened time-major rollout (t*N + n), or "segment", a column.
        refresh: how often the parts before the sampler run again.
        plan: `plan(key, batch, epoch) -> tree` with leading axis `[num_minibatches]`, made at the start of an epoch.
        draw: `draw(item, batch, context) -> (indices [M] | None, weight [M] | None)`, `item` being one row of the plan
            and `batch` the rollout as the parts before the sampler left it. Indices None: everything, as it is.
    """

    num_epochs: int
    num_minibatches: int
    axis: Axis
    refresh: Refresh
    plan: Callable[[Array, Batch, Array | int], Any]
    draw: Callable[[Any, Batch, Context], tuple[Array | None, Array | None]]


def shuffled_minibatches(num_minibatches: int, num_epochs: int = 1, *, refresh: Refresh = "rollout") -> Part:
    """Every step exactly once per epoch, in a fresh random order: minibatches of T*N/num_minibatches steps, `[M]`.

    This cuts the time axis, so parts that work along time and recurrent policies need `segment_minibatches`.

    Args:
        num_minibatches: minibatches per epoch; has to divide T*N.
        num_epochs: passes over the rollout.
        refresh: how often the parts before the sampler run again, on values and ratios as the current policy sees them:
            "rollout": once; "epoch": before each epoch (the whole rollout evaluated again); "minibatch": before each
            minibatch, with the last minibatch's value and log-ratio written back.

    Raises:
        ValueError: sizes that do not divide, naming them; a recurrent batch.

    Example:
        >>> import ppo_parts as pp
        >>> sampler = pp.shuffled_minibatches(num_minibatches=4, num_epochs=4)

    Reference: Huang et al. 2022, The 37 Implementation Details of PPO, detail 6. Refresh per epoch: Andrychowicz et al.
    2021, arXiv:2006.05990, section 3.5; per minibatch: PufferLib 3.0.
    """
    return _shuffled("shuffled_minibatches", "step", num_minibatches, num_epochs, refresh)


def segment_minibatches(num_minibatches: int, num_epochs: int = 1, *, refresh: Refresh = "rollout") -> Part:
    """Every segment (environment, or environment and agent) once per epoch, in a fresh order, time kept: `[T, M]`.

    For recurrent policies, and for parts along time (`vtrace`) under the policy being trained.

    Args:
        num_minibatches: minibatches per epoch; has to divide the number of segments N.
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


def full_batch(num_epochs: int = 1, *, refresh: Refresh = "rollout") -> Part:
    """The whole rollout as one minibatch `[T, N]`, `num_epochs` times; nothing is copied or shuffled.

    Args:
        num_epochs: gradient steps.
        refresh: as in `shuffled_minibatches`.

    Example:
        >>> import ppo_parts as pp
        >>> sampler = pp.full_batch(num_epochs=10)

    Reference: Schulman et al. 2017, arXiv:1707.06347, algorithm 1, with M = NT.
    """
    count("full_batch", "num_epochs", num_epochs)

    def plan(key: Array, batch: Batch, epoch: Array | int) -> Array:
        del key, batch, epoch
        return jnp.zeros((1,), jnp.int32)

    def draw(item: Array, batch: Batch, context: Context) -> tuple[None, None]:
        del item, batch, context
        return None, None

    return _sampler("full_batch", num_epochs, 1, "segment", refresh, plan, draw)


def given_indices(indices: Any, axis: Axis = "step", weights: Any = None, *, refresh: Refresh = "rollout") -> Part:
    """Exactly these minibatches, in this order: for parity tests and debugging.

    Args:
        indices: integers `[K, M]`, K minibatches of one epoch, or `[E, K, M]`, epoch by epoch (which is what
            `kl_early_stop(check="epoch")` goes by). Rows of the flattened time-major rollout, t*N + n. Traced integers
            are taken as they are: whether they are in range cannot be known.
        axis: "segment": the integers are segment numbers instead.
        weights: importance weights of the shape of `indices`, or None.
        refresh: as in `shuffled_minibatches`.

    Raises:
        TypeError: not integers. ValueError: another rank, weights of another shape, an index out of range.

    Example:
        >>> import ppo_parts as pp
        >>> sampler = pp.given_indices([[0, 3], [1, 2]])  # two minibatches of two steps
    """
    choice("given_indices", "axis", axis, ("step", "segment"))
    traced = isinstance(indices, jax.core.Tracer)
    table = indices if traced else np.asarray(indices)
    if not jnp.issubdtype(table.dtype, np.integer):
        raise TypeError(f"given_indices: indices must be integers, got {table.dtype}")
    if table.ndim not in (2, 3) or table.size == 0:
        raise ValueError(f"given_indices: indices must be [K, M] or [E, K, M], got shape {table.shape}")
    if weights is not None and np.shape(weights) != table.shape:
        raise ValueError(f"given_indices: weights have shape {np.shape(weights)}, indices {table.shape}")
    table = table.reshape((-1, *table.shape[-2:])).astype(np.int32)

    def plan(key: Array, batch: Batch, epoch: Array | int) -> Any:
        del key
        size = _size("given_indices", batch, axis)
        if not traced and (table.min() < 0 or table.max() >= size):
            raise ValueError(
                f"given_indices: indices must lie in [0, {size}) for {axis}s of this batch, got "
                f"{table.min()} to {table.max()}"
            )
        rows = jnp.asarray(table)[epoch]
        if weights is None:
            return rows, None
        return rows, jnp.asarray(weights, batch.log_prob.dtype).reshape(table.shape)[epoch]

    def draw(item: Any, batch: Batch, context: Context) -> tuple[Array, Array | None]:
        del batch, context
        return item

    return _sampler("given_indices", table.shape[0], table.shape[1], axis, refresh, plan, draw, weights is not None)


def prioritized_sampler(
    num_minibatches: int,
    *,
    alpha: Numeric,
    beta: Numeric,
    num_epochs: int = 1,
    replacement: bool = False,
    normalize_weights: bool = False,
    segments_per_minibatch: int | None = None,
    eps: Numeric = 1e-6,
    refresh: Refresh = "rollout",
) -> Part:
    r"""Segments drawn in proportion to a power of their summed absolute advantage, time kept: `[T, M]`.

    .. math:: P_n \propto \Big(\sum_t |A_{tn}|\Big)^{\alpha} + \epsilon, \qquad w = (N P_n)^{-\beta}

    Each minibatch is a fresh draw, so a segment can come in several minibatches of an epoch and another in none. The
    weight goes to `batch.weight`; `advantage_weight` or `loss_weight` apply it. Masked steps do not count, and segments
    that are masked throughout are never drawn (as long as enough others exist).

    Args:
        num_minibatches: draws per epoch; divides the number of segments N unless `segments_per_minibatch` is given.
        alpha: exponent of the priority, >= 0 (0: uniform); a schedule counts learner updates.
        beta: exponent of the weight, in [0, 1] (1: unbiased); a schedule counts learner updates.
        num_epochs: multiplies the number of draws.
        replacement: whether one segment can come twice in a minibatch.
        normalize_weights: divide the weights by the largest any segment could have.
        segments_per_minibatch: M; None: N / num_minibatches.
        eps: added to every priority, >= 0, so that none has probability 0; a schedule counts learner updates.
        refresh: as in `shuffled_minibatches`; with "minibatch" each draw sees fresh priorities, as in PufferLib.

    Place: behind `gae` or `vtrace`, whose advantage it reads.

    Raises:
        ValueError: sizes that do not divide; more segments asked for than there are.

    Example:
        >>> import ppo_parts as pp
        >>> sampler = pp.prioritized_sampler(8, alpha=.8, beta=pp.linear_schedule(.2, 1., 1000))

    Reference: PufferLib 3.0; Schaul et al. 2016, arXiv:1511.05952, eq. 1 and section 3.4.
    """
    where = "prioritized_sampler"
    count(where, "num_minibatches", num_minibatches)
    count(where, "num_epochs", num_epochs)
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
        if size > segments and not replacement:
            raise ValueError(f"{where}: {size} of {segments} segments cannot be drawn without replacement")
        advantage, mask = batch.advantage, batch.mask
        powers = [at(x, context.step) for x in (alpha, beta, eps)]
        probabilities = functional.segment_priorities(
            advantage.reshape((*advantage.shape[:2], -1)).swapaxes(1, 2).reshape(-1, segments),
            None if mask is None else mask.reshape((*mask.shape[:2], -1)).swapaxes(1, 2).reshape(-1, segments),
            alpha=powers[0],
            eps=powers[2],
        )
        indices = jax.random.choice(item, segments, (size,), replace=replacement, p=probabilities)
        weight = functional.importance_weights(probabilities, indices, beta=powers[1], normalize=normalize_weights)
        return indices, spread_nan(weight, *powers)

    return _sampler(where, num_epochs, num_minibatches, "segment", refresh, plan, draw, True, ("advantage",))


def take(batch: Batch, indices: Array | None, weight: Array | None, axis: Axis) -> Batch:
    """The minibatch that `indices` name; metrics and losses start empty."""
    batch = batch.replace(metrics={}, losses={}, weight=weight)
    if indices is None:
        return batch
    time, segments = batch.log_prob.shape[:2]

    def pick(x: Array, along: int) -> Array:
        # Samplers draw from what is there: "clip" spares the default's handling of negative and outlying indices.
        return jnp.take(x, indices, axis=along, mode="clip")

    def rows(x: Array) -> Array:
        return pick(x, 1) if axis == "segment" else pick(x.reshape((time * segments, *x.shape[2:])), 0)

    def sampled_extra(x: Array) -> Array:
        return rows(x) if jnp.shape(x)[:2] == (time, segments) else x

    picked = {field: jax.tree.map(rows, getattr(batch, field)) for field in PER_STEP}
    carry = jax.tree.map(lambda x: pick(x, 0), batch.carry)
    extras = jax.tree.map(sampled_extra, batch.extras)
    axes = ("step",) if axis == "step" else batch.axes
    return batch.replace(**picked, carry=carry, extras=extras, axes=axes)


def put(buffer: Array, indices: Array | None, axis: Axis, rows: Array) -> Array:
    """`buffer` with the rows of a minibatch written back."""
    if indices is None:
        return rows.astype(buffer.dtype)
    if axis == "segment":
        return buffer.at[:, indices].set(rows)
    flat = buffer.reshape((-1, *buffer.shape[2:]))
    return flat.at[indices].set(rows).reshape(buffer.shape)


def _shuffled(where: str, axis: Axis, num_minibatches: int, num_epochs: int, refresh: Refresh) -> Part:
    count(where, "num_minibatches", num_minibatches)
    count(where, "num_epochs", num_epochs)

    def plan(key: Array, batch: Batch, epoch: Array | int) -> Array:
        del epoch
        size = _size(where, batch, axis)
        _share(where, num_minibatches, size, "steps T*N" if axis == "step" else "segments N")
        return functional.permutation(key, size).reshape(num_minibatches, -1)

    def draw(item: Array, batch: Batch, context: Context) -> tuple[Array, None]:
        del batch, context
        return item, None

    return _sampler(where, num_epochs, num_minibatches, axis, refresh, plan, draw)


def _sampler(
    where: str,
    num_epochs: int,
    num_minibatches: int,
    axis: Axis,
    refresh: Refresh,
    plan: Callable[..., Any],
    draw: Callable[..., Any],
    weighs: bool = False,
    requires: tuple[str, ...] = (),
) -> Sampler:
    choice(where, "refresh", refresh, ("rollout", "epoch", "minibatch"))

    def update(batch: Batch, state: EmptyState, context: Context) -> tuple[Batch, EmptyState]:
        # As a plain part: the first minibatch of the first epoch, under the context's parameters.
        item = jax.tree.map(lambda x: x[0], plan(context.key, batch, 0))
        indices, weight = draw(item, batch, context)
        minibatch = take(batch, indices, weight, axis)
        return minibatch.replace(current=evaluate_current(context.evaluate, context.params, minibatch)), state

    return Sampler(
        no_state,
        update,
        where,
        requires=requires,
        provides=("current", "weight") if weighs else ("current",),
        place="before_sampler",
        num_epochs=num_epochs,
        num_minibatches=num_minibatches,
        axis=axis,
        refresh=refresh,
        plan=plan,
        draw=draw,
    )


def _size(where: str, batch: Batch, axis: Axis) -> int:
    if axis == "step" and batch.carry is not None:
        raise ValueError(f"{where} takes single steps, but the batch has a recurrent carry: use segment_minibatches()")
    time, segments = batch.log_prob.shape[:2]
    return time * segments if axis == "step" else segments


def _share(where: str, num_minibatches: int, size: int, what: str) -> int:
    if size % num_minibatches:
        divisors = [d for d in range(1, size + 1) if size % d == 0]
        near = sorted(divisors, key=lambda d: abs(d - num_minibatches))[:3]
        raise UserValueError(
            f"{where}: num_minibatches={num_minibatches} does not divide the {size} {what} of this batch; "
            f"nearest that do: {', '.join(map(str, sorted(near)))}"
        )
    return size // num_minibatches
