"""V-trace."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import export

from ._arguments import Floats, Real, array_function
from ._common import Array, Number, zero_where
from ._gae import masked_ends
from ._recurrence import choose_solver


@functools.partial(export.register_namedtuple_serialization, serialized_name=f"{__name__}.VTrace")
class VTrace(NamedTuple):
    """Result of `vtrace`: `error`, `target` (= error + value) and `policy_advantage`, all `[T, ...]`."""

    error: Array
    target: Array
    policy_advantage: Array


@array_function(like="value", along_time=True)
def vtrace(
    log_ratio: Floats,
    reward: Real,
    value: Floats,
    next_value: Floats,
    terminated: Array,
    truncated: Array | None = None,
    *,
    gamma: Number,
    gae_lambda: Number = 1.0,
    rho_clip: Number = 1.0,
    c_clip: Number = 1.0,
    pg_rho_clip: Number | None = None,
    pg_lambda: Number | None = None,
    mask: Array | None = None,
    stop_gradient: bool = True,
) -> VTrace:
    r"""Compute V-trace: GAE with TD errors and traces weighted by clipped importance ratios. Gradients are stopped.

    With `stop_gradient=False`, gradients flow as in `gae`.

    .. math::
        \rho_t &= \min(e^{\ell_t}, \bar\rho), \qquad c_t = \min(e^{\ell_t}, \bar c) \\
        \delta_t &= r_t + \gamma (1 - \text{terminated}_t)\, v'_t - v_t \\
        e_t &= \rho_t \delta_t + \gamma\lambda\, c_t (1 - \text{terminated}_t)(1 - \text{truncated}_t)\, e_{t+1} \\
        \text{target}_t &= e_t + v_t \\
        A^{\pi}_t &= \min(e^{\ell_t}, \bar\rho_{pg})
        \left(r_t + \gamma (1 - \text{terminated}_t)\, w_t - v_t\right) \\
        w_t &= \lambda_{pg}\, \text{target}_{t+1} + (1 - \lambda_{pg})\, v'_t

    Where the trace is cut, at a truncation and at the end of the batch, :math:`w_t = v'_t`. If the ratio is 1 and both
    clips are at least 1, `error` equals the advantage of `gae`. PufferLib and JaxDEM use `error` as PPO's advantage,
    IMPALA uses `policy_advantage`, and all of them use `target` as the value target.

    Args:
        log_ratio: `[T, ...]`, log pi_current(a_t) - log pi_behavior(a_t), in nats.
        reward, value, next_value, terminated, truncated, gamma, mask, stop_gradient: as in `gae`.
        gae_lambda: trace decay, in [0, 1]; IMPALA uses 1.
        rho_clip, c_clip, pg_rho_clip: upper clips of the ratios that weight the TD error, the trace, and
            `policy_advantage` (None means `rho_clip`), > 0.
        pg_lambda: weight of the next target, relative to the next value, in `policy_advantage`, in [0, 1]; None means
            1, as in IMPALA. In rlax, it is the trace decay `lambda_`.

    Example:
        >>> x = jnp.ones(2)
        >>> out = vtrace(jnp.log(jnp.array([2., .5])), x, 0 * x, 0 * x, 0 * x, gamma=1.)
        >>> out.error.tolist()  # e_1 = .5 * 1, e_0 = 1 * 1 + 1 * e_1
        [1.5, 0.5]

    Reference: Espeholt et al. 2018, IMPALA, arXiv:1802.01561, eq. 1 and section 4.2. `pg_rho_clip` and `pg_lambda`:
    `rlax.vtrace_td_error_and_advantage`.
    """
    pg_rho_clip = rho_clip if pg_rho_clip is None else pg_rho_clip
    ratio = _bounded_ratio(log_ratio, rho_clip, c_clip, pg_rho_clip)
    terminated, truncated = masked_ends(terminated, truncated, mask)

    def td_error(next_value: Array, rho_clip: Number) -> Array:
        return jnp.minimum(ratio, rho_clip) * (reward + gamma * zero_where(terminated, next_value) - value)

    trace = zero_where(truncated, zero_where(terminated, gamma * gae_lambda * jnp.minimum(ratio, c_clip)))
    error = choose_solver()((td_error(next_value, rho_clip), trace))
    target = error + value
    follows = jnp.concatenate([target[1:], next_value[-1:]])
    if truncated is not None:
        follows = jnp.where(truncated, next_value, follows)
    if pg_lambda is not None:
        follows = pg_lambda * follows + (1 - pg_lambda) * next_value
    return VTrace(error, target, td_error(follows, pg_rho_clip))


def _bounded_ratio(log_ratio: Array, *clips: Number) -> Array:
    """Return the importance ratio, bounded far above all clips so that neither it nor its gradient overflows."""
    most = jax.lax.stop_gradient(functools.reduce(jnp.maximum, clips))
    bound = jnp.minimum(2 * most, jnp.finfo(log_ratio.dtype).max / 2)  # a clip may be infinite
    beyond = log_ratio > jnp.log(bound)
    return jnp.where(beyond, bound, jnp.exp(jnp.where(beyond, 0, log_ratio)))
