"""Samplers, the parts that divide a rollout into minibatches."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .. import functional
from .._base.checked import Count, checked
from .._base.hyperparameters import Numeric, check_count, spread_nan
from .._core.batch import Array, Batch
from .._core.part import Context, Part, read_numbers
from .._core.sampling import Axis, Refresh, Windows, sampler, sampler_of_shards
from .._core.shards import map_shards
from ..errors import UserTypeError, UserValueError
from ..functional._arguments import FROM_0
from ..functional._common import accumulator_dtype, check_range, check_same_shape
from .common import check_numbers, is_zero


@checked
def shuffled_minibatches(num_minibatches: Count, num_epochs: Count = 1, *, refresh: Refresh = "rollout") -> Part:
    """Draw minibatches `[M]`, M = T*N/num_minibatches; each epoch uses every step exactly once, in a new random order.

    The minibatches have no time axis, so recurrent policies and parts that work along time need `segment_minibatches`.

    Args:
        num_minibatches: number of minibatches per epoch; must divide T*N.
        num_epochs: number of passes over the rollout.
        refresh: how often the parts before the sampler run again, with values and ratios of the current policy.
            "rollout" runs them only once. "epoch" evaluates the whole rollout again and runs them before each epoch
            after the first; "every_epoch" includes the first, for rollouts of an older policy. "minibatch" runs them
            before each minibatch, after the values and log-ratios of the previous minibatch have been written back.

    Example:
        >>> import ppo_parts as pp
        >>> sampler = pp.shuffled_minibatches(num_minibatches=4, num_epochs=4)

    Reference: Huang et al. 2022, The 37 Implementation Details of PPO, detail 6. Refresh per epoch: Andrychowicz et al.
    2021, arXiv:2006.05990, section 3.5; per minibatch: PufferLib 3.0.
    """
    return _shuffled("shuffled_minibatches", "step", num_minibatches, num_epochs, refresh)


@checked
def segment_minibatches(num_minibatches: Count, num_epochs: Count = 1, *, refresh: Refresh = "rollout") -> Part:
    """Draw minibatches `[T, M]` of segments (such as environments), each once per epoch, in random order.

    Use this sampler for recurrent policies, and if parts that work along time, such as `vtrace`, follow it.

    Args:
        num_minibatches: number of minibatches per epoch; must divide the number of segments N.
        num_epochs: number of passes over the rollout.
        refresh: as in `shuffled_minibatches`.

    Example:
        >>> import ppo_parts as pp
        >>> sampler = pp.segment_minibatches(num_minibatches=2, num_epochs=4)

    Reference: Huang et al. 2022, detail 35.
    """
    return _shuffled("segment_minibatches", "segment", num_minibatches, num_epochs, refresh)


@checked
def full_batch(num_epochs: Count = 1, *, refresh: Refresh = "rollout") -> Part:
    """Use the whole rollout as one minibatch `[T, N]`, `num_epochs` times, without copying or shuffling.

    Args:
        num_epochs: number of gradient steps.
        refresh: as in `shuffled_minibatches`.

    Example:
        >>> import ppo_parts as pp
        >>> sampler = pp.full_batch(num_epochs=10)

    Reference: Schulman et al. 2017, arXiv:1707.06347, algorithm 1, with M = NT.
    """
    return sampler(
        "full_batch", lambda key, batch, epoch: jnp.zeros((1,), jnp.int32), lambda item, batch, context: (None, None),
        axis="segment", num_epochs=num_epochs, num_minibatches=1, refresh=refresh,
    )  # fmt: skip


@checked
def given_indices(
    indices: Any, axis: Literal["step", "segment"] = "step", weights: Any = None, *, refresh: Refresh = "rollout"
) -> Part:
    """Use exactly the given minibatches, in the given order, for parity tests and debugging.

    Args:
        indices: integers `[K, M]` for K minibatches of one epoch, or `[E, K, M]` for E epochs (which matter to
            `kl_early_stop(check="epoch")`). They are rows of the flattened time-major rollout, t*N + n. Traced integers
            cannot be checked; integers out of range make the loss NaN. The rollout must have one shard.
        axis: "step", or "segment" if the integers are segment numbers instead.
        weights: importance weights with the shape of `indices`, or None.
        refresh: as in `shuffled_minibatches`.

    Example:
        >>> import ppo_parts as pp
        >>> sampler = pp.given_indices([[0, 3], [1, 2]])  # two minibatches of two steps
    """
    table = _check_indices(indices, weights)
    traced = isinstance(table, jax.core.Tracer)

    def plan(key: Array, batch: Batch, epoch: Array | int) -> Any:
        if batch.shards > 1:
            raise UserValueError(
                f"given_indices: indices are those of a rollout with one shard, but this one has {batch.shards}: use "
                "shards=1, or make a sampler whose plan is that of each shard, with pp.sampler"
            )
        size = _number_of(axis, batch)
        if not traced and (table.min() < 0 or table.max() >= size):
            raise UserValueError(
                f"given_indices: indices must lie in [0, {size}) for {axis}s of this batch, got "
                f"{table.min()} to {table.max()}"
            )
        given = None if weights is None else jnp.asarray(weights, batch.log_prob.dtype).reshape(table.shape)
        return jax.tree.map(lambda x: x[epoch], (jnp.asarray(table, jnp.int32), given))

    epochs, minibatches = table.shape[:2]
    return sampler_of_shards(
        "given_indices", plan, lambda item, batch, context: item, axis=axis, num_epochs=epochs,
        num_minibatches=minibatches, refresh=refresh, weighted=weights is not None,
    )  # fmt: skip


def _check_indices(indices: Any, weights: Any) -> Any:
    """Return the indices `[E, K, M]`, after checking them and their weights."""
    where, traced = "given_indices", isinstance(indices, jax.core.Tracer)
    try:
        table = indices if traced else np.asarray(indices)
    except ValueError:
        raise UserValueError(f"{where}: all minibatches must have one size, got {indices!r}") from None
    if not jnp.issubdtype(table.dtype, np.integer):
        raise UserTypeError(f"{where}: indices must be integers, got {table.dtype}")
    if table.ndim not in (2, 3) or table.size == 0:
        raise UserValueError(f"{where}: indices must be [K, M] or [E, K, M], got shape {table.shape}")
    if weights is not None:
        if np.shape(weights) != table.shape:
            raise UserValueError(f"{where}: weights have shape {np.shape(weights)}, indices {table.shape}")
        check_range(where, "weights", weights, FROM_0)
    return table.reshape((-1, *table.shape[-2:]))


@checked
def prioritized_sampler(
    num_minibatches: Count,
    num_epochs: Count = 1,
    *,
    alpha: Numeric,
    beta: Numeric,
    segments_per_minibatch: Count | None = None,
    eps: Numeric = 1e-6,
    refresh: Refresh = "rollout",
) -> Part:
    r"""Draw minibatches `[T, M]` of segments in proportion to a power of their summed absolute advantage.

    .. math:: P_n \propto \left(\sum_t |A_{tn}|\right)^{\alpha} + \epsilon, \qquad w = (N' P_n)^{-\beta}

    N' is the number of segments with a positive priority; see `functional.segment_priorities` and
    `functional.importance_weights`. Each minibatch is drawn independently and without replacement, so a segment can be
    in several minibatches of an epoch, or in none. Weights with beta = 1 would be unbiased if draws were with
    replacement. `advantage_weight`, or a loss with `coef=pp.field("weight")`, applies the weight. Fully masked segments
    are never drawn if there are enough others. If the rollout has S shards, M / S segments are drawn from each shard,
    as if it were the whole rollout.

    Args:
        num_minibatches: minibatches per epoch; must divide the N segments if `segments_per_minibatch` is None.
        num_epochs: factor by which the number of minibatches is multiplied.
        alpha, eps: exponent of the priority, >= 0 (0 means uniform), and the number added to the priority, >= 0.
        beta: exponent of the weight, in [0, 1].
        segments_per_minibatch: M; None means N / num_minibatches.
        refresh: as in `shuffled_minibatches`; with "minibatch", each draw uses updated priorities, as in PufferLib.

    Place: after `gae` or `vtrace`, whose advantage it reads.

    Example:
        >>> import ppo_parts as pp
        >>> sampler = pp.prioritized_sampler(8, alpha=.8, beta=pp.linear_schedule(.2, 1., 1000))

    Reference: PufferLib 3.0; Schaul et al. 2016, arXiv:1511.05952, eq. 1 and section 3.4.
    """
    where = "prioritized_sampler"
    numbers = check_numbers(where, alpha=alpha, beta=beta, eps=eps)

    def plan(key: Array, batch: Batch, epoch: Array | int) -> Array:
        return jax.random.split(key, num_minibatches)

    def draw(item: Array, batch: Batch, context: Context) -> tuple[Array, Array]:
        segments = _number_of("segment", batch)
        size = segments_per_minibatch or _divided(where, num_minibatches, segments, "segments N")
        size = _divided(where, batch.shards, size, "segments of a minibatch", "shards")
        segments = segments // batch.shards
        if size > segments:
            raise UserValueError(f"{where}: {size} of {segments} segments cannot be drawn without replacement")
        alpha, beta, eps = read_numbers(numbers, batch, context.step).values()

        check_same_shape(where, log_prob=batch.log_prob, advantage=batch.advantage)

        def drawn(batch: Batch, key: Array) -> tuple[Array, Array]:
            # Compute at least in float32, because small probabilities would be 0 in float16.
            advantage = _steps_of_segments(batch.advantage.astype(accumulator_dtype(batch.advantage)))
            mask = None if batch.mask is None else _steps_of_segments(batch.mask)
            probabilities = functional.segment_priorities(advantage, alpha=alpha, eps=eps, mask=mask)
            indices = functional.sample_without_replacement(key, probabilities, size)
            weight = functional.importance_weights(probabilities, indices, beta=beta)
            # If a hyperparameter is out of range, use row -1, which does not exist, so that the learner sees a NaN.
            indices = jnp.where(jnp.isnan(spread_nan(jnp.zeros(()), alpha, beta, eps)), -1, indices)
            return indices, weight.astype(batch.advantage.dtype)

        if batch.shards == 1:
            return drawn(batch, item)
        return map_shards(drawn, batch, jax.random.split(item, batch.shards))

    return sampler_of_shards(
        where, plan, draw, axis="segment", num_epochs=num_epochs, num_minibatches=num_minibatches, refresh=refresh,
        weighted=not is_zero(beta), requires=("advantage",),
    )  # fmt: skip


def _steps_of_segments(x: Array) -> Array:
    """Reshape `[T, N, ...]` to `[..., N]`, so that the agents of a segment count as additional steps."""
    return x.reshape((*x.shape[:2], -1)).swapaxes(1, 2).reshape(-1, x.shape[1])


@checked
def time_chunks(
    num_minibatches: Count, num_epochs: Count = 1, *, length: Count, burn_in: int = 0, refresh: Refresh = "rollout"
) -> Part:
    """Draw minibatches `[burn_in + length, M]` of pieces of `length` steps; each epoch uses every step once.

    A recurrent policy first processes up to `burn_in` steps before the piece. It starts from the recorded state at the
    beginning of the rollout, and from zeros elsewhere. The burn-in steps are masked, so they have no loss and do not
    affect any statistic.

    Args:
        num_minibatches: number of minibatches per epoch; must divide the number of pieces, N * T / length.
        num_epochs: number of passes over the rollout.
        length: number of steps per piece; must divide T.
        burn_in: number of steps that warm up the recurrent state; burn_in + length must be at most T. These steps are
            masked, so parts after the sampler cannot use `mask_mode="skip"`.
        refresh: as in `shuffled_minibatches`.

    Example:
        >>> import ppo_parts as pp
        >>> sampler = pp.time_chunks(num_minibatches=4, length=16, burn_in=8)

    Reference: Kapturowski et al. 2019, Recurrent Experience Replay (R2D2), section 3.
    """
    where = "time_chunks"
    check_count(where, "burn_in", burn_in, 0)

    def plan(key: Array, batch: Batch, epoch: Array | int) -> Array:
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
        _divided(where, num_minibatches, pieces, "pieces, N * T / length,")
        return functional.permutation(key, pieces).reshape(num_minibatches, -1)

    def draw(item: Array, batch: Batch, context: Context) -> tuple[Windows, None]:
        segments = batch.log_prob.shape[1]
        first, segment = item // segments * length, item % segments
        start = jnp.maximum(first - burn_in, 0)
        step = start[None] + jnp.arange(burn_in + length)[:, None]
        return Windows(start, segment, (step >= first[None]) & (step < first[None] + length)), None

    return sampler(
        where, plan, draw, axis="window", num_epochs=num_epochs, num_minibatches=num_minibatches, refresh=refresh
    )


def _shuffled(where: str, axis: Axis, num_minibatches: int, num_epochs: int, refresh: Refresh) -> Part:
    def plan(key: Array, batch: Batch, epoch: Array | int) -> Array:
        size = _number_of(axis, batch)
        _divided(where, num_minibatches, size, "steps T*N" if axis == "step" else "segments N")
        return functional.permutation(key, size).reshape(num_minibatches, -1)

    return sampler(
        where, plan, lambda item, batch, context: (item, None), axis=axis, num_epochs=num_epochs,
        num_minibatches=num_minibatches, refresh=refresh,
    )  # fmt: skip


def _number_of(axis: Axis, batch: Batch) -> int:
    """Return the number of steps or segments of the rollout."""
    time, segments = batch.log_prob.shape[:2]
    return time * segments if axis == "step" else segments


def _divided(where: str, number: int, size: int, what: str, name: str = "num_minibatches") -> int:
    if size % number:
        divisors = [d for d in range(1, size + 1) if size % d == 0]
        near = sorted(divisors, key=lambda d: abs(d - number))[:3]
        raise UserValueError(
            f"must divide the {size} {what} of this batch, got {number}; nearest that do: "
            f"{', '.join(map(str, sorted(near)))}",
            where=where,
            argument=name,
        )
    return size // number
