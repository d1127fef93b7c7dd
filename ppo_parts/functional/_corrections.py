"""Importance weights that correct for actions of a policy other than the one whose log-probabilities are used."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ._arguments import CorrectionMode, check_order, fit, public
from ._common import Array, kept, zero_masked


@public(raw=True, also=lambda where, values: check_order(where, values, "low", "high"))
def importance_sampling_weight(
    log_ratio: Array,
    *,
    high: float | Array,
    low: float | Array = 0.0,
    mode: CorrectionMode = "truncate",
    mask: Array | None = None,
) -> Array:
    r"""Compute a bounded importance weight per element. Gradients are stopped.

    .. math:: w_i = \mathrm{clip}(e^{\ell_i}, low, high) \quad\text{("truncate")}, \qquad
              w_i = e^{\ell_i} \, [\, low \le e^{\ell_i} \le high \,] \quad\text{("mask")}

    Multiply losses or advantages by it where the policy that sampled the actions is not the one to which the ratio of
    the loss refers, for example because an inference engine rounds differently from the trainer. "truncate" bounds the
    variance; "mask" drops the elements outside the bounds.

    Args:
        log_ratio: l = log pi(a) - log pi_sampler(a), any shape, in nats. The weight has its shape and dtype, in which
            it is finite unless the log-ratio is NaN.
        high: largest weight, > 0.
        low: smallest weight, >= 0.
        mode: "truncate" or "mask".
        mask: None, or 0/1 of the same shape: the weight is 0 for masked elements, whatever they contain.

    Raises:
        ShapeError: `mask` has another shape. TypeError: `log_ratio` is not floating. ValueError: `mode` is unknown, a
            bound is out of range, or `low` exceeds `high`.

    Example:
        >>> import jax.numpy as jnp
        >>> log_ratio = jnp.log(jnp.array([.5, 1., 4.]))
        >>> [importance_sampling_weight(log_ratio, mode=mode, high=2.).tolist() for mode in ("truncate", "mask")]
        [[0.5, 1.0, 2.0], [0.5, 1.0, 0.0]]

    Reference: Ionides 2008, Truncated Importance Sampling, Journal of Computational and Graphical Statistics 17(2).
    """
    where, dtype = "importance_sampling_weight", jnp.result_type(log_ratio)  # the weight must be finite in this dtype
    (logs,) = zero_masked(mask, jax.lax.stop_gradient(log_ratio))
    most, least = (fit(where, name, x, logs.shape, logs.dtype) for name, x in (("high", high), ("low", low)))
    ratio = jnp.minimum(jnp.exp(logs), jnp.asarray(jnp.finfo(dtype).max, logs.dtype))
    inside = (ratio >= least) & (ratio <= most)
    weight = jnp.clip(ratio, least, most) if mode == "truncate" else jnp.where(inside, ratio, 0)
    return jnp.where(kept(mask, weight), weight, 0).astype(dtype)
