"""Categorical distributions over one or several choices, and masks for their logits."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ShapeError, UserTypeError, UserValueError
from ..functional._common import (
    Array,
    accumulator_dtype,
    check_arrays,
    check_flags,
    check_floating,
    known_values,
    nan_where,
)
from ._distribution import TreeDistribution, check_draw, has_few, split_entries, sum_entries
from ._joint import Joint


class Categorical(TreeDistribution):
    r"""Categorical distribution over n actions, :math:`\pi(a) = e^{z_a} / \sum_k e^{z_k}`.

    Unlike in `distrax.Categorical`, the logits are normalized once, on construction, and gradients use a select instead
    of a scatter, which makes PPO's loss faster.

    Args:
        logits: `[..., n]`; they may be -inf (see also `mask_logits`).

    Attributes:
        logits: `[..., n]`, the normalized logits, which are log-probabilities.

    Example:
        >>> policy = Categorical(jnp.log(jnp.array([1., 3.])))
        >>> round(float(jnp.exp(policy.log_prob(1))), 4), round(float(policy.entropy()), 4)
        (0.75, 0.5623)
    """

    def __init__(self, logits: Array) -> None:
        check_floating("Categorical", "logits", logits)
        if not jnp.shape(logits)[-1:] > (0,):
            got = jnp.shape(logits)
            raise ShapeError(f"Categorical: the last axis of logits must be that of the actions, got shape {got}")
        wide = jnp.asarray(logits, accumulator_dtype(jnp.asarray(logits)))
        self.logits = _normalize(wide).astype(jnp.result_type(logits))

    @property
    def probs(self) -> Array:
        """Return the probabilities, `[..., n]`."""
        return jnp.exp(self.logits)

    def sample(self, *, seed: Array, sample_shape: Sequence[int] = ()) -> Array:
        """Draw actions, integers `[*sample_shape, ...]`."""
        sample_shape = check_draw("Categorical", seed, sample_shape)
        wide = self.logits.astype(accumulator_dtype(self.logits))  # bfloat16 noise would never draw rare actions
        return jax.random.categorical(seed, wide, shape=(*sample_shape, *self.logits.shape[:-1]))

    def mode(self) -> Array:
        """Return the most probable action."""
        return jnp.argmax(self.logits, axis=-1)

    def log_prob(self, value: Array) -> Array:
        """Return the log-probability of actions `[...]`, which may have additional leading axes.

        An action other than 0, 1, ..., n - 1 raises a ValueError if it is known, and gives NaN if it is traced.
        """
        self._check_action(self._shape[:-1], value)
        if (known := known_values(value)) is not None:
            known = np.asarray(known, np.float64)  # NumPy does not compare bfloat16 with integers
            if (wrong := known[~np.isin(known, range(self._shape[-1]))]).size:
                last = self._shape[-1] - 1
                raise UserValueError(f"Categorical: an action must be one of 0, ..., {last}, got {wrong.flat[0]:g}")
        value, shape = jnp.asarray(value), self._shape
        if jnp.issubdtype(value.dtype, jnp.floating):
            value = value.astype(accumulator_dtype(value))  # n may be too large for bfloat16 or int8
            value = jnp.where(value == jnp.floor(value), value, jnp.nan)
        with jax.numpy_dtype_promotion("standard"):
            value = value.astype(jnp.promote_types(value.dtype, jnp.int32))
        every = (*value.shape, shape[-1])
        option, logits = jax.lax.broadcasted_iota(value.dtype, every, value.ndim), jnp.broadcast_to(self.logits, every)
        is_chosen = value[..., None] == option
        chosen = sum_entries(lambda chosen, logit: jnp.where(chosen, logit, 0), is_chosen, logits)
        return jnp.where((value >= 0) & (value < shape[-1]), chosen, jnp.nan)

    def entropy(self) -> Array:
        """Return the entropy in nats; impossible actions contribute 0."""

        def term(logits: Array) -> Array:
            probs = jnp.exp(logits)
            return -probs * jnp.where(probs > 0, logits, 0)

        wide = self.logits.astype(accumulator_dtype(self.logits))
        return sum_entries(term, wide).astype(self.logits.dtype)

    def kl_divergence(self, other: Categorical) -> Array:
        r"""Return KL(self || other) in nats, :math:`\sum_a \pi_1(a) (\log\pi_1(a) - \log\pi_2(a))`.

        It is infinite (with `mask_logits`, extremely large) if an action is possible only under self.
        """
        self._check_comparable(other)
        dtype = jnp.result_type(self.logits, other.logits)

        def term(own: Array, others: Array) -> Array:
            probs = jnp.exp(own)
            ours, theirs = (jnp.where(probs > 0, x, 0) for x in (own, others))
            return probs * (ours - theirs)

        return sum_entries(term, *(x.logits.astype(accumulator_dtype(x.logits)) for x in (self, other))).astype(dtype)

    @property
    def _shape(self) -> tuple[int, ...]:
        return self.logits.shape


def _normalize(logits: Array) -> Array:
    """Compute `jax.nn.log_softmax`, for few options without reductions (see `sum_entries`)."""
    if not has_few(logits):
        return jax.nn.log_softmax(logits)
    options = split_entries(logits)
    largest = jax.lax.stop_gradient(functools.reduce(jnp.maximum, options))
    shifted = [x - largest for x in options]
    total = jnp.log(functools.reduce(jnp.add, map(jnp.exp, shifted)))
    return jnp.stack([x - total for x in shifted], axis=-1)


class MultiCategorical(Joint):
    """A `Joint` of K categorical choices whose actions are one array `[..., K]` of integers.

    Args:
        logits: K arrays `[..., n_k]`; choices may have different numbers of options. With `nvec`, one array
            `[..., n_1 + ... + n_K]`, such as the output of a layer.
        nvec: the number of options of each choice, if `logits` is one array.

    Attributes:
        parts: K `Categorical` distributions.

    Example:
        >>> policy = MultiCategorical([jnp.zeros(2), jnp.zeros(4)])
        >>> round(float(policy.log_prob(jnp.array([1, 3]))), 4)  # -log 2 - log 4
        -2.0794
        >>> MultiCategorical(jnp.zeros((5, 6)), nvec=(2, 4)).mode().shape
        (5, 2)

    Reference: Huang et al. 2022, The 37 Implementation Details of PPO, detail 37.
    """

    def __init__(self, logits: Any, nvec: Sequence[int] | None = None) -> None:
        if nvec is None and hasattr(logits, "ndim"):
            remedy = "give nvec, the numbers of options, or a list of arrays"
            raise UserTypeError(f"MultiCategorical: logits are one array of shape {jnp.shape(logits)}: {remedy}")
        if nvec is not None:
            check_floating("MultiCategorical", "logits", logits)
            sizes = np.asarray(nvec)
            if sizes.ndim != 1 or sizes.dtype.kind not in "iu" or (sizes < 1).any():
                raise UserValueError(f"MultiCategorical: nvec must contain integers of at least 1, got {nvec!r}")
            nvec = sizes.tolist()
            if jnp.shape(logits)[-1:] != (sum(nvec),):
                must = f"have sum(nvec) = {sum(nvec)} entries for nvec={tuple(nvec)}, got shape {jnp.shape(logits)}"
                raise ShapeError(f"MultiCategorical: the last axis of logits must {must}")
            logits = jnp.split(logits, list(itertools.accumulate(nvec[:-1])), axis=-1)
        elif not isinstance(logits, Iterable):
            says = f"must be a list of arrays, got {logits!r}"
            raise UserTypeError(says, where="MultiCategorical", argument="logits")
        self.parts = [Categorical(part) for part in logits]
        if len({part.logits.shape[:-1] for part in self.parts}) != 1:
            shapes = ", ".join(str(part.logits.shape) for part in self.parts) or "no arrays"
            raise ShapeError(f"MultiCategorical: logits must agree in all axes but the last, got {shapes}")

    @property
    def logits(self) -> Array:
        """Return the concatenated logits of all choices, `[..., n_1 + ... + n_K]`."""
        return jnp.concatenate([part.logits for part in self.parts], axis=-1)

    def _entries(self, value: Any) -> list[Any]:
        self._check_action((*self.parts[0].logits.shape[:-1], len(self.parts)), value)
        return [value[..., k] for k in range(len(self.parts))]

    def _together(self, values: list[Any]) -> Array:
        return jnp.stack(values, axis=-1)


def mask_logits(logits: Array, available: Array) -> Array:
    """Mask logits so that unavailable options have probability 0 and do not contribute to entropy or gradients.

    Args:
        logits: `[..., n]`; the result has this shape.
        available: `[..., n]`, 1 (or True) where the option may be taken, else 0. Each row must have at least one such
            option; traced rows without one, as in padding, have equal logits, which are finite. Where a traced array is
            negative, such as the -inf of an additive mask, logits are NaN.

    Example:
        >>> policy = Categorical(mask_logits(jnp.zeros(4), jnp.array([1, 1, 0, 0])))
        >>> policy.probs.tolist(), round(float(policy.entropy()), 4)
        ([0.5, 0.5, 0.0, 0.0], 0.6931)

    Reference: Huang and Ontanon 2022, arXiv:2006.14171.
    """
    logits = check_floating("mask_logits", "logits", logits)
    check_arrays("mask_logits", available=available)
    if jnp.shape(available) != jnp.shape(logits):
        raise ShapeError(f"mask_logits: logits have shape {jnp.shape(logits)}, available {jnp.shape(available)}")
    check_flags("mask_logits", available=available)
    if (known := known_values(available)) is not None and not np.atleast_1d(known).astype(bool).any(axis=-1).all():
        raise UserValueError("must have an option in each row", where="mask_logits", argument="available")
    flags = jnp.asarray(available)
    masked = jnp.where(flags.astype(bool), logits, jnp.finfo(jnp.result_type(logits)).min)
    return masked if flags.dtype == bool else nan_where(~(flags >= 0), masked)
