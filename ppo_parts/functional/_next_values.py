"""Values of the observations that followed."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ._arguments import public
from ._common import Array, kept, visible
from ._errors import ShapeError, UserValueError


@public(raw=True, along_time=True, apart="last_value")
def next_values(
    value: Array,
    last_value: Array,
    truncated: Array | None = None,
    final_value: Array | None = None,
    *,
    mask: Array | None = None,
) -> Array:
    r"""Return V of the observation that followed each step, by shifting `value` one step back. Gradients flow.

    .. math:: v'_t = \begin{cases} \text{final\_value}_t & \text{if truncated}_t \\
              \text{last\_value} & \text{if } t = T-1 \\ v_{t+1} & \text{else} \end{cases}

    With automatic resets, the observation stored at t+1 is the first of a *new* episode wherever step t ended
    one. After a termination its value is never used. After a truncation it must be replaced by V of the observation
    that actually followed (the final observation).

    Args:
        value: `[T, ...]`, V(obs[t]), floating; its dtype is that of the result.
        last_value: `[...]`, V of the observation after the last step.
        truncated: `[T, ...]`, 1 where a time limit cut the episode at step t, else 0; None: nowhere.
        final_value: `[T, ...]`, V(final observation); read only where `truncated` is 1.
        mask: None, or `[T, ...]` of 0/1: the value that follows is that of the next unmasked step, and `last_value`
            where there is none, for `gae(mask_mode="skip")`.

    Raises:
        ShapeError: shapes do not match. TypeError: `value` is not floating. ValueError: `truncated` without
            `final_value`, or the reverse; a known element of `truncated` or `mask` is not 0 or 1.

    Example:
        >>> import jax.numpy as jnp
        >>> next_values(jnp.array([1., 2., 3.]), jnp.array(4.), jnp.array([0, 1, 0]), jnp.array([0., 9., 0.])).tolist()
        [2.0, 9.0, 4.0]

    Reference: Pardo et al. 2018, Time Limits in Reinforcement Learning, arXiv:1712.00378, partial-episode bootstrap.
    """
    if (truncated is None) != (final_value is None):
        raise UserValueError(
            "next_values: give truncated and final_value together (final_value is V of the final "
            "observation of each truncated episode), or neither"
        )
    if jnp.shape(last_value) != value.shape[1:]:
        raise ShapeError(
            f"next_values: last_value must have shape {value.shape[1:]}, value's without its time axis, "
            f"got {jnp.shape(last_value)}"
        )
    shifted = jnp.concatenate([value, jnp.asarray(last_value, value.dtype)[None]])[1:]
    if mask is not None:
        shifted = _skip(visible(shifted, mask), kept(mask, shifted))
    if truncated is None or final_value is None:
        return shifted
    followed = jnp.where(kept(truncated, value), final_value, shifted).astype(value.dtype)
    return jnp.where(kept(mask, value), visible(followed, truncated), followed)


def _skip(shifted: Array, keep: Array) -> Array:
    """Replace the value of the step that follows by the value of the next unmasked one."""
    following = jnp.concatenate([keep[1:], jnp.ones_like(keep[:1])])  # the last value always counts

    def step(later: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        value, counts = now
        later = jnp.where(counts, value, later)
        return later, later

    last = jnp.where(following[-1], shifted[-1], 0)  # varies like the mask inside `shard_map`
    return jax.lax.scan(step, last, (shifted, following), reverse=True)[1]
