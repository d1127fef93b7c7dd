"""Advantages in two-player games in which one policy plays both sides."""

from __future__ import annotations

from .._base.checked import checked
from .._core.batch import Array, Batch, field_at
from .._core.chain import check_wrapped
from .._core.part import Part
from ..errors import UserValueError
from ..functional._common import unsqueeze
from .lens import wrap_part


@checked
def zero_sum(estimator: Part, *, seat: str = "extras.seat", next_seat: str = "extras.next_seat") -> Part:
    r"""Run an estimator in a zero-sum game of two players, both played by the policy (self-play).

    In each step one player moves, and the network predicts this player's value. Let :math:`\sigma_t` be 1 where the
    first player moves and -1 where the second player moves. `estimator` sees the first player's view: the reward, which
    is already the first player's, the value :math:`\sigma_t V(s_t)` and the next value :math:`\sigma_{t+1} V(s_{t+1})`.
    The advantage and the target that it writes are multiplied by :math:`\sigma_t`, so they belong to the player who
    moved. With `gae`,

    .. math::
        A_t = \sigma_t r_t + \gamma \sigma_t \sigma_{t+1} \left(V(s_{t+1}) + \lambda A_{t+1}\right) - V(s_t).

    In games with imperfect information, such as poker, use :math:`\lambda = 1`, because the opponent's observation
    lacks what the player knows, so an estimate that bootstraps from the opponent's value is biased.

    Args:
        estimator: the part that writes `advantage` and, possibly, `target`.
        seat: path of :math:`\sigma_t`, `[T, N]`. `rollout(keep_info=("seat", "next_seat"))` records both signs if the
            environment's `info` has them.
        next_seat: path of :math:`\sigma_{t+1}`, which belongs to the observation that followed step t, or to the final
            one where the episode was truncated; it is arbitrary where the episode terminated.

    Place: the same as for `estimator`.

    Example:
        >>> import ppo_parts as pp
        >>> part = pp.agents.zero_sum(pp.gae(gamma=1., gae_lambda=.95))

    Reference: the negamax form of minimax, Knuth and Moore 1975, An Analysis of Alpha-Beta Pruning,
    doi:10.1016/0004-3702(75)90019-3, section 2.
    """
    check_wrapped("zero_sum", estimator, "a part that writes the advantage, such as gae")
    if "advantage" not in estimator.provides:
        raise UserValueError(
            f"zero_sum: the part must write the advantage, but {estimator.name} writes "
            f"{', '.join(estimator.provides) or 'nothing'}"
        )

    written = [name for name in ("advantage", "target") if name in estimator.provides]

    def inner(batch: Batch) -> Batch:
        sign, next_sign = field_at(batch, seat), field_at(batch, next_seat)
        seen = batch.replace(value=_times(sign, batch.value), next_value=_times(next_sign, batch.next_value))
        if batch.current is None:
            return seen
        return seen.replace(current=batch.current._replace(value=_times(sign, batch.current.value)))

    def outer(batch: Batch, seen: Batch, result: Batch) -> Batch:
        signed = {name: _times(field_at(batch, seat), getattr(result, name)) for name in written}
        return result.replace(value=batch.value, next_value=batch.next_value, current=batch.current, **signed)

    requires = (*estimator.requires, *dict.fromkeys((seat, next_seat)))
    return wrap_part(
        estimator, "zero_sum", inner, outer, requires=requires, provides=estimator.provides, reads=estimator.reads
    )


def _times(sign: Array, x: Array | None) -> Array | None:
    """Multiply by a sign without changing the dtype; None stays None."""
    return None if x is None else unsqueeze(sign.astype(x.dtype), x.ndim) * x
