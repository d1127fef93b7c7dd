"""PPO's whole loss for discrete actions, which a GPU computes with its gradient in one pass over the inputs."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from . import _recurrence
from ._common import (
    Array,
    ShapeError,
    accumulator_dtype,
    check_flags,
    check_floating,
    check_same_shape,
    checked_hyperparameter,
    masked_mean,
)
from ._fused_terms import FLOATS, NUMBERS, OPTIONAL, Inputs, combined, terms

LossImplementation = Literal["auto", "xla", "pallas"]
MOST_ACTIONS = 4096  # as many as one program of the kernel can keep in its registers


class PPOLoss(NamedTuple):
    """Result of `categorical_ppo_loss`: means over the unmasked elements, scalars. `loss` alone has a gradient."""

    loss: Array
    policy_loss: Array
    value_loss: Array
    entropy: Array
    approx_kl: Array
    clip_fraction: Array


def categorical_ppo_loss(
    logits: Array,
    action: Array,
    log_prob: Array,
    *,
    advantage: Array,
    value: Array,
    target: Array,
    old_value: Array | None = None,
    clip_eps: float | Array,
    clip_eps_high: float | Array | None = None,
    dual_clip: float | Array | None = None,
    value_clip_eps: float | Array | None = None,
    value_coef: float | Array,
    entropy_coef: float | Array,
    mask: Array | None = None,
    implementation: LossImplementation = "auto",
) -> PPOLoss:
    r"""Compute PPO's whole loss for discrete actions. Gradients flow from `loss` only, to `logits` and `value`.

    .. math::
        L &= \frac{1}{M} \sum_i L^{policy}_i + c_v L^{value}_i - c_e H(\pi_i), \qquad
        \ell_i = \log\pi_i(a_i) - \text{log\_prob}_i, \qquad \pi_i = \mathrm{softmax}(z_i)

    The means over the M unmasked elements are those of `clipped_surrogate`, `value_loss` (or `clipped_value_loss`),
    `approx_kl` (k3) and `clip_fraction`, which the rest of this module computes separately. Unlike them, this function
    reduces, so that the kernel writes nothing per element except the gradient. Everything is computed in float32 or
    wider.

    Args:
        logits: `[..., n]`, z; they need not be normalized, and -inf is allowed.
        action: `[...]`, integers in [0, n); the loss is NaN if an unmasked one is not.
        log_prob: `[...]`, log pi_behavior(a), in nats.
        advantage, value, target: `[...]`.
        old_value: `[...]`, the prediction that the value is clipped around; given if and only if `value_clip_eps` is.
        mask: None, or 0/1 `[...]`: masked elements have no effect and a gradient of 0, whatever they contain.
        clip_eps, clip_eps_high, dual_clip: as in `clipped_surrogate`; single numbers (so are the others).
        value_clip_eps: the clip range of `clipped_value_loss`, > 0, in reward units; None: `value_loss`.
        value_coef: weight c_v of the value loss (which has a factor 1/2), >= 0.
        entropy_coef: weight c_e of the entropy, >= 0.
        implementation: "xla": the functions named above. "pallas": one kernel on NVIDIA GPUs, for floats of 32 or 16
            bits and at most 4096 actions; in `jax.grad` the forward pass computes the gradient, too. "auto": the kernel
            if the program is compiled for a GPU that can run it, else XLA.

    Returns:
        `PPOLoss`, scalars in float32 (float64 if an input is); `value_loss` and `entropy` are without coefficients.

    Raises:
        ShapeError: shapes do not match. TypeError: not floating, or actions that are not integers. ValueError: a
            hyperparameter is out of its range; `implementation` is unknown, or "pallas" where the kernel cannot run.

    Example:
        >>> import jax.numpy as jnp
        >>> one = jnp.ones(3)
        >>> out = categorical_ppo_loss(jnp.zeros((3, 2)), jnp.array([0, 1, 0]), jnp.log(.5 * one),
        ...                            advantage=one, value=0 * one, target=one,
        ...                            clip_eps=.2, value_coef=.5, entropy_coef=.01)
        >>> [round(float(x), 4) for x in out]  # -1 + .5 * .5 - .01 * log(2)
        [-0.7569, -1.0, 0.5, 0.6931, 0.0, 0.0]

    Reference: Schulman et al. 2017, arXiv:1707.06347, eq. 9.
    """
    arrays = (logits, action, log_prob, advantage, value, target, old_value, mask)
    inputs = Inputs(*arrays, clip_eps, clip_eps_high, dual_clip, value_clip_eps, value_coef, entropy_coef)
    inputs = _validate("categorical_ppo_loss", inputs)
    fixed = jax.lax.stop_gradient(inputs)._replace(logits=inputs.logits, value=inputs.value)
    loss, *means = _choose("categorical_ppo_loss", implementation, inputs)(fixed)
    return PPOLoss(loss, *jax.lax.stop_gradient(means))


def _validate(where: str, x: Inputs) -> Inputs:
    """Return the inputs as JAX arrays of matching shapes, and the numbers as scalars within their ranges."""
    if (x.old_value is None) != (x.value_clip_eps is None):
        raise ValueError(f"{where}: give old_value and value_clip_eps together, or neither for the plain value loss")
    given = {name: array for name, array in x._asdict().items() if array is not None or name not in OPTIONAL}
    floats = {name: given[name] for name in FLOATS if name in given}
    check_floating(where, **floats)
    if not jnp.shape(x.logits) or not jnp.shape(x.logits)[-1]:
        raise ShapeError(
            f"{where}: logits have shape {jnp.shape(x.logits)}; their last axis must be that of the actions, [..., n]"
        )
    arrays = {name: array for name, array in given.items() if name not in NUMBERS}
    check_same_shape(where, **{**arrays, "logits": jnp.asarray(x.logits)[..., 0]})
    if not jnp.issubdtype(jnp.result_type(x.action), jnp.integer):
        raise TypeError(f"{where}: actions must be integers, got {jnp.result_type(x.action)}")
    check_flags(where, mask=x.mask)
    dtype = accumulator_dtype(*floats.values())
    numbers = {
        name: checked_hyperparameter(where, name, given[name], (), low, open_low=open_low, dtype=dtype)
        for name, (low, open_low) in NUMBERS.items()
        if name in given
    }
    return x._replace(**{name: jnp.asarray(array) for name, array in arrays.items()}, **numbers)


def _choose(where: str, implementation: LossImplementation, x: Inputs) -> Any:
    """Choose like `_recurrence.choose`: the requested implementation, or the one that suits the platform."""
    _recurrence.known(where, implementation, LossImplementation)
    if implementation == "xla":
        return _by_xla
    reasons = (_recurrence.unsupported(array) for name in FLOATS if (array := getattr(x, name)) is not None)
    reason = next(filter(None, reasons), None)
    if reason is None and x.logits.shape[-1] > MOST_ACTIONS:
        reason = f"it takes at most {MOST_ACTIONS} logits per element, got {x.logits.shape[-1]}"
    if implementation == "pallas":
        if reason := reason or (None if _recurrence.has("cuda") else "no NVIDIA GPU is among JAX's devices"):
            raise _recurrence.cannot_run(where, reason)
        return _by_kernel
    if reason or not _recurrence.has("cuda"):
        return _by_xla
    return lambda x: jax.lax.platform_dependent(x, cuda=_by_kernel, default=_by_xla)


def _by_xla(x: Inputs) -> tuple[Array, ...]:
    means = tuple(masked_mean(term, x.mask) for term in terms(x))
    return (combined(x, means), *means)


def _by_kernel(x: Inputs) -> tuple[Array, ...]:
    from . import _fused_kernel  # on demand: Pallas takes a while to import

    return _fused_kernel.loss_and_means(x)
