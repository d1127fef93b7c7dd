"""Advantage estimators: one backward recursion, A_t = delta_t + c_t * A_{t+1}."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._common import Array, ShapeError, accumulator, binary, concrete, fitting, floating, present, same_shape
from ._recurrence import Implementation, associative, choose, scan


class Advantages(NamedTuple):
    """Result of `gae`: `advantage` and `target` (= advantage + value), both `[T, ...]`."""

    advantage: Array
    target: Array


class VTrace(NamedTuple):
    """Result of `vtrace`: `error`, `target` (= error + value) and `policy_advantage`, all `[T, ...]`."""

    error: Array
    target: Array
    policy_advantage: Array


def next_values(
    value: Array,
    last_value: Array,
    truncated: Array | None = None,
    final_value: Array | None = None,
) -> Array:
    r"""Return V of the observation that followed each step, by shifting `value` one step back. Gradients flow.

    .. math:: v'_t = \begin{cases} \text{final\_value}_t & \text{if truncated}_t \\
              \text{last\_value} & \text{if } t = T-1 \\ v_{t+1} & \text{else} \end{cases}

    With automatic resets, the observation stored at t+1 is the first of a *new* episode wherever step t ended
    one. After a termination its value is never used. After a truncation it must be replaced by V of the observation
    that actually followed (the final observation).

    Args:
        value: `[T, ...]`, V(obs[t]).
        last_value: `[...]`, V of the observation after the last step.
        truncated: `[T, ...]`, 1 where a time limit cut the episode at step t, else 0; None: nowhere.
        final_value: `[T, ...]`, V(final observation); read only where `truncated` is 1.

    Returns:
        `[T, ...]` next values, in the dtype of `value`.

    Raises:
        ShapeError: shapes do not match.
        ValueError: `truncated` without `final_value`, or the reverse; a known element of `truncated` is not 0 or 1.

    Example:
        >>> import jax.numpy as jnp
        >>> next_values(jnp.array([1., 2., 3.]), jnp.array(4.), jnp.array([0, 1, 0]), jnp.array([0., 9., 0.])).tolist()
        [2.0, 9.0, 4.0]

    Reference: Pardo et al. 2018, Time Limits in Reinforcement Learning, arXiv:1712.00378, eq. 6.
    """
    floating("next_values", value=value)
    if (truncated is None) != (final_value is None):
        raise ValueError(
            "next_values: give truncated and final_value together (final_value is V of the final "
            "observation of each truncated episode), or neither"
        )
    same_shape("next_values", value=value, truncated=truncated, final_value=final_value)
    present("next_values", last_value=last_value)
    binary("next_values", truncated=truncated)
    value = jnp.asarray(value)
    if not value.ndim:
        raise ShapeError("next_values works along axis 0, time, and the value given is a single number")
    if jnp.shape(last_value) != value.shape[1:]:
        raise ShapeError(
            f"next_values: last_value must have shape {value.shape[1:]}, value's without its time axis, "
            f"got {jnp.shape(last_value)}"
        )
    shifted = jnp.concatenate([value[1:], jnp.asarray(last_value, value.dtype)[None]])
    if truncated is None or final_value is None:
        return shifted
    return jnp.where(jnp.asarray(truncated).astype(bool), final_value, shifted).astype(value.dtype)


def gae(
    reward: Array,
    value: Array,
    next_value: Array,
    terminated: Array,
    truncated: Array | None = None,
    *,
    gamma: float | Array,
    gae_lambda: float | Array,
    mask: Array | None = None,
    stop_gradient: bool = True,
    implementation: Implementation = "auto",
) -> Advantages:
    r"""Generalized advantage estimation, correct at terminations *and* truncations. Gradients are stopped.

    The result is constant when the loss is differentiated, so it may be computed inside the loss. With
    `stop_gradient=False`, gradients flow to all floating inputs.

    .. math::
        \delta_t &= r_t + \gamma (1 - \text{terminated}_t)\, v'_t - v_t \\
        A_t &= \delta_t + \gamma\lambda (1 - \text{terminated}_t)(1 - \text{truncated}_t)\, A_{t+1},
        \qquad A_T = 0 \\
        \text{target}_t &= A_t + v_t

    A termination removes the bootstrap and cuts the trace. A truncation cuts the trace and keeps the
    bootstrap, which is why `next_value` is a separate input (see `next_values`). `gae_lambda=0` gives the
    one-step TD error, and 1 gives the discounted return minus the value.

    Args:
        reward: `[T, ...]`, of the transition out of step t, in reward units.
        value: `[T, ...]`, V(obs[t]), floating; its dtype is that of the result.
        next_value: `[T, ...]`, V of the observation that followed step t.
        terminated: `[T, ...]`, 1 (or True) where the transition out of step t ended the episode. Numbers
            between 0 and 1 are read as probabilities. Other numbers raise an error where they are known; under tracing
            they are not checked, and NaN gives NaN.
        truncated: `[T, ...]`, 1 (or True) where a time limit cut the episode at step t, else 0; None: nowhere.
        gamma: discount per step, in [0, 1].
        gae_lambda: trace decay, in [0, 1].
        mask: `[T, ...]`, 1 where the step counts; None: everywhere. A step before a masked one is treated as
            truncated, so that a masked step does not affect any other step. Masked elements return 0 and have a
            gradient of 0, whatever the inputs contain.
        stop_gradient: whether the result is constant under differentiation.
        implementation: how the recursion runs; all choices compute the same numbers. "scan": one step after another,
            the best choice on CPUs. "associative": `lax.associative_scan`. "pallas": one fused kernel on NVIDIA GPUs,
            for values of 32 or 16 bits, with the derivatives of the scan. "auto": the kernel if the program is compiled
            for a GPU that can run it, the associative scan on other GPUs or for other values there, and the scan
            everywhere else.

    Returns:
        `Advantages(advantage, target)`, each `[T, ...]`.

    Raises:
        ShapeError: inputs of different shapes. TypeError: `value` or `next_value` is not floating. ValueError: a known
            number is out of its range; `implementation` is unknown, or "pallas" where the kernel cannot run.

    Note:
        Narrow floats (bfloat16, float16) are accumulated in float32 and cast back.

    Example:
        Two steps, of which the second terminates: A_1 = 1 - 0.5 = 0.5 and A_0 = (1 + 0.9*0.5 - 0.5) + 0.9*0.5*A_1.

        >>> import jax.numpy as jnp
        >>> ones, half = jnp.ones(2), jnp.full(2, .5)
        >>> out = gae(ones, half, half, jnp.array([0, 1]), gamma=.9, gae_lambda=.5)
        >>> [round(float(a), 4) for a in out.advantage]
        [1.175, 0.5]

    Reference: Schulman et al. 2016, arXiv:1506.02438, eq. 16. Truncation: Pardo et al. 2018, arXiv:1712.00378.
    """
    steps = _Steps(reward, value, next_value, terminated, truncated, mask, None, gamma, gae_lambda)
    return Advantages(*_estimate("gae", steps, stop_gradient, implementation))


def vtrace(
    log_ratio: Array,
    reward: Array,
    value: Array,
    next_value: Array,
    terminated: Array,
    truncated: Array | None = None,
    *,
    gamma: float | Array,
    gae_lambda: float | Array = 1.0,
    rho_clip: float | Array = 1.0,
    c_clip: float | Array = 1.0,
    mask: Array | None = None,
    stop_gradient: bool = True,
    implementation: Implementation = "auto",
) -> VTrace:
    r"""V-trace: GAE with TD errors and traces weighted by clipped importance ratios. Gradients are stopped.

    The result is constant when the loss is differentiated, so it may be computed inside the loss. With
    `stop_gradient=False`, gradients flow to all floating inputs.

    .. math::
        \rho_t &= \min(e^{\ell_t}, \bar\rho), \qquad c_t = \min(e^{\ell_t}, \bar c) \\
        \delta_t &= r_t + \gamma (1 - \text{terminated}_t)\, v'_t - v_t \\
        e_t &= \rho_t \delta_t + \gamma\lambda\, c_t (1 - \text{terminated}_t)(1 - \text{truncated}_t)\, e_{t+1} \\
        \text{target}_t &= e_t + v_t \\
        A^{\pi}_t &= \rho_t \left(r_t + \gamma (1 - \text{terminated}_t)\, w_t - v_t\right)

    where :math:`w_t` is :math:`\text{target}_{t+1}` inside an episode and :math:`v'_t` where the trace is cut, that is
    at a truncation and at the end of the batch, because the next row does not continue the episode there. With ratio 1
    and both clips at least 1, `error` equals `gae`'s advantage.

    Several estimators share this name: PufferLib and JaxDEM use `error` as PPO's advantage, IMPALA uses
    `policy_advantage`, and all of them use `target` as the value target.

    Args:
        log_ratio: `[T, ...]`, log pi_current(a_t) - log pi_behaviour(a_t), in nats.
        reward, value, next_value, terminated, truncated, gamma, mask, stop_gradient, implementation: as in `gae`.
        gae_lambda: trace decay, in [0, 1]; IMPALA uses 1.
        rho_clip: upper clip of the ratio that weights the TD error, > 0.
        c_clip: upper clip of the ratio that weights the trace, > 0.

    Returns:
        `VTrace(error, target, policy_advantage)`, each `[T, ...]` in the dtype of `value`.

    Raises:
        ShapeError: inputs of different shapes. TypeError: `value` or `log_ratio` is not floating. ValueError: as in
            `gae`.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.ones(2)
        >>> out = vtrace(jnp.log(jnp.array([2., .5])), x, 0 * x, 0 * x, 0 * x, gamma=1.)
        >>> out.error.tolist()  # e_1 = .5 * 1, e_0 = 1 * 1 + 1 * e_1
        [1.5, 0.5]

    Reference: Espeholt et al. 2018, IMPALA, arXiv:1802.01561, eq. 1 and section 4.2.
    """
    steps = _Steps(
        reward, value, next_value, terminated, truncated, mask, log_ratio, gamma, gae_lambda, rho_clip, c_clip
    )
    return VTrace(*_estimate("vtrace", steps, stop_gradient, implementation))


def reverse_recurrence(delta: Array, trace: Array, *, implementation: Implementation = "auto") -> Array:
    r"""Solve :math:`A_t = \delta_t + c_t A_{t+1}`, :math:`A_T = 0`, backwards along axis 0. Gradients flow.

    Args:
        delta: `[T, ...]`, floating; its dtype is that of the result. Narrow dtypes are accumulated in float32.
        trace: `[T, ...]`, :math:`c_t`; the last row has no effect.
        implementation: as in `gae`.

    Returns:
        `[T, ...]`, the solution A.

    Raises:
        ShapeError: `delta` and `trace` differ in shape. TypeError: `delta` is not floating. ValueError: as in `gae`.

    Example:
        >>> import jax.numpy as jnp
        >>> reverse_recurrence(jnp.ones(3), jnp.full(3, .5)).tolist()
        [1.75, 1.5, 1.0]
    """
    floating("reverse_recurrence", delta=delta)
    same_shape("reverse_recurrence", delta=delta, trace=trace)
    delta, trace, dtype = jnp.asarray(delta), jnp.asarray(trace), accumulator(delta)
    if not delta.ndim:
        raise ShapeError("reverse_recurrence works along axis 0, time, and the delta given is a single number")

    def widened(inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        return inputs[0].astype(dtype), inputs[1].astype(dtype)

    def step(later: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        later, _ = _recur(later, widened(now))
        return later, later.astype(delta.dtype)

    def in_kernel(inputs: tuple[Array, Array]) -> Array:
        from . import _kernel  # on demand: Pallas takes a while to import

        return _kernel.backwards(step, zeros, inputs)

    zeros = _zeros(*widened((delta, trace)))
    run = choose(
        "reverse_recurrence",
        implementation,
        delta,
        scan=lambda inputs: scan(_recur, zeros, widened(inputs)).astype(delta.dtype),
        associative=lambda inputs: associative(*widened(inputs)).astype(delta.dtype),
        pallas=in_kernel,
    )
    return run((delta, trace))


class _Steps(NamedTuple):
    """The inputs of the estimators, for all steps `[T, ...]` or for one `[...]`; None for inputs that are not given.

    gamma and the other hyperparameters may be numbers; `_checked` converts them to the dtype to compute in.
    """

    reward: Array
    value: Array
    next_value: Array
    terminated: Array
    truncated: Array | None
    mask: Array | None
    log_ratio: Array | None
    gamma: Any
    gae_lambda: Any
    rho_clip: Any = None
    c_clip: Any = None


def _estimate(where: str, x: _Steps, stop_gradient: bool, implementation: Implementation) -> tuple[Array, ...]:
    """Return error and target, and the policy advantage if there are ratios."""
    x = _checked(where, x)
    if stop_gradient:  # applied to the inputs, so that no derivatives of the computation below are traced
        x = jax.lax.stop_gradient(x)
    ways = {"scan": _by_scan, "associative": _by_associative_scan, "pallas": _by_kernel}
    return choose(where, implementation, x.value, **ways)(x)


def _checked(where: str, x: _Steps) -> _Steps:
    """Return the inputs as JAX arrays of matching shapes, with all known numbers checked against their ranges."""
    ratios = {} if x.rho_clip is None else {"log_ratio": x.log_ratio}
    present(where, reward=x.reward, terminated=x.terminated)
    floating(where, value=x.value, next_value=x.next_value, **ratios)
    ends = {"terminated": x.terminated, "truncated": x.truncated, "mask": x.mask}
    same_shape(where, reward=x.reward, value=x.value, next_value=x.next_value, **ratios, **ends)
    shape, dtype = jnp.shape(x.value), accumulator(x.value)
    if not shape:
        raise ShapeError(f"{where} works along axis 0, time, and the value given is a single number")
    binary(where, truncated=x.truncated, mask=x.mask)
    terminated, counts = concrete(x.terminated), concrete(True if x.mask is None else x.mask)
    if terminated is not None and counts is not None:
        odd = ~((terminated >= 0) & (terminated <= 1)) & counts.astype(bool)
        if odd.any():
            raise ValueError(
                f"{where}: terminated must hold 0 and 1, or probabilities between them, got {terminated[odd].flat[0]}"
            )
    numbers = {"gamma": (0, 1), "gae_lambda": (0, 1)}
    clips = {} if x.rho_clip is None else {"rho_clip": (0, np.inf), "c_clip": (0, np.inf)}
    fit = {
        name: fitting(where, name, getattr(x, name), shape, *bounds, open_low=name in clips, dtype=dtype)
        for name, bounds in (numbers | clips).items()
    }
    return jax.tree.map(jnp.asarray, x._replace(**fit))


def _by_scan(x: _Steps) -> tuple[Array, ...]:
    x = _bounded(x)
    # For wide rows, a single pass never writes delta and the trace to memory, which saves a third of the time on CPUs.
    # Narrow rows are too short to vectorize, so everything that can be is computed for all steps at once. The same
    # holds for bfloat16, which the single pass would have to convert row by row.
    if math.prod(x.value.shape[1:]) < 64 or x.value.dtype != x.gamma.dtype:
        terms = _terms(x)
        error = scan(_recur, _zeros(*terms), terms)
    else:
        error = scan(lambda later, now: _recur(later, _terms(now)), _first(x), x)
    return _finish(x, error)


def _by_associative_scan(x: _Steps) -> tuple[Array, ...]:
    x = _bounded(x)
    return _finish(x, associative(*_terms(x)))


def _by_kernel(x: _Steps) -> tuple[Array, ...]:
    from . import _kernel  # on demand: Pallas takes a while to import

    zeros = _first(x)
    follows = zeros + _kept(_rows(x, slice(-1, None))).next_value[0]
    counts = None if x.mask is None else zeros == 0
    return _kernel.backwards(_step, (zeros, follows, counts), x)


def _zeros(delta: Array, trace: Array) -> Array:
    """Return the zeros that the recursion starts from, with the sharding of the data and, in `shard_map`, its type.

    Summing zero rows of the data creates such zeros.
    """
    return jnp.sum(delta[:0] + trace[:0], axis=0)


def _first(x: _Steps) -> Array:
    return _zeros(*_terms(_rows(x, slice(0))))


def _rows(x: _Steps, rows: slice) -> _Steps:
    """Select some of the steps; a hyperparameter that is a single number stays the same."""
    return jax.tree.map(lambda field: field[rows] if field.ndim else field, x)


def _step(later: tuple[Array, Array, Array | None], now: _Steps) -> tuple[Any, tuple[Array, ...]]:
    """Compute all outputs of one step from the error, target and mask of the step that follows it."""
    error, follows, counts = later
    now = now._replace(truncated=_cut_before_masked(now.truncated, counts))
    error, _ = _recur(error, _terms(now))
    now = _kept(now)
    target = error + now.value
    outputs: tuple[Array, ...] = (error, target)
    if now.log_ratio is not None:
        outputs = (error, target, _policy_advantage(now, follows))
    counts = None if now.mask is None else now.mask.astype(bool)
    return (error, target, counts), tuple(out.astype(now.value.dtype) for out in outputs)


def _recur(later: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
    delta, trace = now
    error = delta + trace * later
    return error, error


def _terms(x: _Steps) -> tuple[Array, Array]:
    """Return delta (times rho) and the trace."""
    x = _kept(x)
    trace = _unless(x.terminated, x.gamma * x.gae_lambda * _weight(x, x.c_clip))
    if x.truncated is not None:
        trace = jnp.where(x.truncated.astype(bool), 0, trace)
    return _td_error(x, x.next_value), _drop(trace, x.mask)


def _finish(x: _Steps, error: Array) -> tuple[Array, ...]:
    """Compute the outputs from the solution of the recursion."""
    x = _kept(x)
    target = error + x.value
    outputs: tuple[Array, ...] = (error, target)
    if x.log_ratio is not None:
        follows = jnp.concatenate([target[1:], x.next_value[-1:].astype(target.dtype)])
        outputs = (error, target, _policy_advantage(x, follows))
    return tuple(out.astype(x.value.dtype) for out in outputs)


def _policy_advantage(x: _Steps, follows: Array) -> Array:
    if x.truncated is not None:
        follows = jnp.where(x.truncated.astype(bool), x.next_value.astype(follows.dtype), follows)
    return _drop(_td_error(x, follows), x.mask)


def _td_error(x: _Steps, follows: Array) -> Array:
    """rho (r + gamma (1 - terminated) v' - v)."""
    dtype = x.gamma.dtype
    delta = x.reward.astype(dtype) + x.gamma * _unless(x.terminated, follows.astype(dtype)) - x.value
    return _weight(x, x.rho_clip) * delta


def _weight(x: _Steps, clip: Array | None) -> Array | float:
    """Return the clipped ratio; 1 for `gae`, which has no ratios."""
    if x.log_ratio is None or clip is None:
        return 1.0
    # Both clips share one exponential. Its log-ratio is bounded first, so that neither it nor its gradient overflows.
    log_ratio, bound = x.log_ratio.astype(x.gamma.dtype), jnp.maximum(x.rho_clip, x.c_clip)
    beyond = log_ratio > jnp.log(bound)
    return jnp.minimum(jnp.where(beyond, bound, jnp.exp(jnp.where(beyond, 0, log_ratio))), clip)


def _bounded(x: _Steps) -> _Steps:
    """Mark every step before a masked one as truncated."""
    if x.mask is None:
        return x
    counts = x.mask.astype(bool)
    after = jnp.concatenate([counts[1:], jnp.ones_like(counts[:1])])
    return x._replace(truncated=_cut_before_masked(x.truncated, after))


def _cut_before_masked(truncated: Array | None, counts: Array | None) -> Array | None:
    """Return where the trace is cut other than by termination; `counts` is the mask of the step that follows."""
    if counts is None:
        return truncated
    return ~counts if truncated is None else truncated.astype(bool) | ~counts


def _unless(terminated: Array, x: Array) -> Array:
    """Compute `(1 - terminated) * x` with a select, because x may be anything after a termination, including NaN."""
    if terminated.dtype == bool:
        return jnp.where(terminated, 0, x)
    keep = 1 - terminated.astype(x.dtype)
    return keep * jnp.where(keep <= 0, 0, x)


def _kept(x: _Steps) -> _Steps:
    """Replace the contents of masked steps by 0, so that their gradients are 0 and not 0 * NaN."""
    if x.mask is None:
        return x
    held = ("reward", "value", "next_value", "terminated", "log_ratio")
    fields = {name: getattr(x, name) for name in held}
    return x._replace(**{name: _drop(field, x.mask) for name, field in fields.items() if field is not None})


def _drop(x: Array, mask: Array | None) -> Array:
    return x if mask is None else jnp.where(mask.astype(bool), x, 0)
