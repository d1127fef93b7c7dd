"""Advantages in games of two players, in which one policy plays both sides."""

from __future__ import annotations

import dataclasses
from typing import Any

from ._errors import UserTypeError, UserValueError
from ._types import Array, Batch, Context, Divider, Part, field_at


def zero_sum(estimator: Part, *, seat: str = "extras.seat", next_seat: str = "extras.next_seat") -> Part:
    r"""Run an estimator in a zero-sum game of two players, both of whom the policy plays (self-play).

    In each step one player moves, and the network's value is that player's. Let :math:`\sigma_t` be 1 where the first
    player moves and -1 where the second does. `estimator` sees the game of the first player: the reward, which is
    already that player's, the value :math:`\sigma_t V(s_t)` and the next value :math:`\sigma_{t+1} V(s_{t+1})`. The
    advantage and the target that it writes are multiplied by :math:`\sigma_t`, so that they are those of the player who
    moved. With `gae`,

    .. math::
        A_t = \sigma_t r_t + \gamma \sigma_t \sigma_{t+1} \left(V(s_{t+1}) + \lambda A_{t+1}\right) - V(s_t).

    In games with imperfect information, such as poker, use :math:`\lambda = 1`: the value of the opponent's observation
    does not know what the player knows, so an estimate that bootstraps from it is biased.

    Args:
        estimator: the part that writes `advantage` and, possibly, `target`.
        seat: path of :math:`\sigma_t`, `[T, N]`. `rollout(keep_info=("seat", "next_seat"))` keeps both signs where the
            environment's `info` has them.
        next_seat: path of :math:`\sigma_{t+1}`, which belongs to the observation that followed step t: the final one
            where the episode was truncated; anything where it terminated.

    Place: that of `estimator`.

    Raises:
        TypeError: `estimator` is not a part, or is a sampler. ValueError: it does not write an advantage.

    Example:
        >>> import ppo_parts as pp
        >>> part = pp.zero_sum(pp.gae(gamma=1., gae_lambda=.95))

    Reference: the negamax form of minimax, Knuth and Moore 1975, An Analysis of Alpha-Beta Pruning,
    doi:10.1016/0004-3702(75)90019-3, section 2.
    """
    if not isinstance(estimator, Part) or isinstance(estimator, Divider):
        raise UserTypeError(f"zero_sum: expected a part that writes the advantage, such as gae, got {estimator!r}")
    if "advantage" not in estimator.provides:
        raise UserValueError(
            f"zero_sum: the part must write the advantage, and {estimator.name} writes "
            f"{', '.join(estimator.provides) or 'nothing'}"
        )

    def update(batch: Batch, state: Any, context: Context) -> tuple[Batch, Any]:
        sign, next_sign = field_at(batch, seat), field_at(batch, next_seat)
        seen = batch.replace(value=_times(sign, batch.value), next_value=_times(next_sign, batch.next_value))
        if batch.current is not None:
            seen = seen.replace(current=batch.current._replace(value=_times(sign, batch.current.value)))
        out, state = estimator.update(seen, state, context)
        signed = {name: _times(sign, getattr(out, name)) for name in written}
        return out.replace(value=batch.value, next_value=batch.next_value, current=batch.current, **signed), state

    written = [name for name in ("advantage", "target") if name in estimator.provides]
    signs = tuple(dict.fromkeys((seat, next_seat)))
    return dataclasses.replace(estimator, update=update, name="zero_sum", requires=(*estimator.requires, *signs))


def _times(sign: Array, x: Array | None) -> Array | None:
    """Multiply by a sign without a change of the dtype; what is absent stays so."""
    return None if x is None else sign.astype(x.dtype) * x
