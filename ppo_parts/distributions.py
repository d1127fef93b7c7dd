"""Action distributions: categorical, multi-discrete and squashed, and masks for unavailable actions.

Any object with `log_prob`, `entropy` and `sample` works with the learner, those of distrax among them; these are the
ones PPO needs most. All are pytrees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import distrax
import jax
import jax.numpy as jnp
import numpy as np

from .functional._common import ShapeError, accumulator

Array = jax.Array


def _pytree(cls: Any) -> Any:
    """Register a class whose attributes are all arrays or trees of them, as distrax does with its own."""

    def unflatten(names: Any, values: Any) -> Any:
        made = object.__new__(cls)
        vars(made).update(zip(names, values, strict=True))
        return made

    jax.tree_util.register_pytree_node(cls, lambda x: (tuple(vars(x).values()), tuple(vars(x))), unflatten)
    return cls


@_pytree
class TanhNormal:
    r"""Gaussian squashed into a box, :math:`a = m + h \tanh(u),\ u \sim \mathcal N(\mu, \sigma)`, dimensions apart.

    .. math:: \log\pi(a) = \sum_d \log\mathcal N(u_d; \mu_d, \sigma_d) - \log h_d - \log(1 - \tanh^2 u_d),
              \qquad u = \mathrm{artanh}((a - m) / h)

    tanh runs into the edge of the box, where artanh is infinite: in float32 all u above 9 give one number. So what
    comes within a relative `eps` of an edge is that edge, and the edge has the probability of all it stands for,

    .. math:: \log\pi(m + h) = \log\Phi((\mu - u_{max}) / \sigma), \qquad u_{max} = \mathrm{artanh}(1 - \epsilon)

    (log-mass there, log-density inside). This is the distribution that is sampled from, exactly; log-ratios and their
    gradients stay moderate however far the mean is outside. With the density of a clipped action instead, a mean far
    outside makes any small change of it a ratio that overflows. The entropy has no closed form; `entropy_bonus`
    estimates it.

    Args:
        loc: `[..., D]`, mean of u.
        scale: `[..., D]`, deviation of u, > 0.
        low, high: `[D]` or numbers, the box; m is its middle and h half its width.
        eps: relative width of an edge; 1e-6 is 16 units in the last place of float32, and u_max 7.25. Wider where the
            box is narrow and far from 0.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> policy = TanhNormal(jnp.array([0., 50.]), jnp.ones(2), -2., 2.)
        >>> [round(float(x), 4) for x in jax.vmap(policy.log_prob)(jnp.array([[0., 2.], [1., 2.]]))]
        [-1.6121, -1.4753]

    Reference: Haarnoja et al. 2018, arXiv:1801.01290, appendix C; the edge is Tobin's 1958 censored likelihood.
    """

    def __init__(self, loc: Array, scale: Array, low: Any = -1.0, high: Any = 1.0, eps: float = 1e-6) -> None:
        known = not any(isinstance(x, jax.core.Tracer) for x in (low, high))
        if known and not (np.all(np.isfinite(low) & np.isfinite(high)) and np.all(np.less(low, high))):
            raise ValueError(f"TanhNormal: the box must be finite, with low < high, got low={low}, high={high}")
        dtype = accumulator(loc, scale)
        loc, scale, low, high = (jnp.asarray(x, dtype) for x in (loc, scale, low, high))
        self.base = distrax.Normal(loc, scale)
        self.middle, self.half = (high + low) / 2, (high - low) / 2
        # An action far from 0 in a narrow box has few digits left within it, and its edge has to be found again.
        self.eps = jnp.maximum(eps, 4 * jnp.finfo(dtype).eps * (1 + jnp.abs(self.middle) / self.half))

    def _squashed(self, u: Array) -> Array:
        x = jnp.tanh(u)
        return self.middle + self.half * jnp.where(jnp.abs(x) > 1 - self.eps, jnp.sign(x), x)

    def sample(self, *, seed: Array, sample_shape: Sequence[int] = ()) -> Array:
        """Actions, `[*sample_shape, ..., D]`; inside the box differentiable with respect to `loc` and `scale`."""
        return self._squashed(self.base.sample(seed=seed, sample_shape=tuple(sample_shape)))

    def mode(self) -> Array:
        """The squashed mean (the median, strictly: squashing moves the mode)."""
        return self._squashed(self.base.mode())

    def log_prob(self, value: Array) -> Array:
        """Log-probability of actions `[..., D]`, summed over D."""
        shape = self.base.loc.shape
        if jnp.shape(value)[-len(shape) :] != shape:
            raise ShapeError(
                f"TanhNormal: an action has shape {jnp.shape(value)}, its mean {shape}: nothing is broadcast"
            )
        x = (value - self.middle) / self.half
        edge, limit = jnp.abs(x) > 1 - self.eps / 2, 1 - self.eps
        u = jnp.arctanh(jnp.clip(x, -limit, limit))
        slope = 2 * (jnp.log(2.0) - u - jax.nn.softplus(-2 * u))  # log(1 - tanh(u)^2), without cancellation
        density = self.base.log_prob(jnp.where(edge, jax.lax.stop_gradient(self.base.loc), u)) - slope
        beyond = (jnp.sign(x) * self.base.loc - jnp.arctanh(limit)) / self.base.scale
        mass = jax.scipy.special.log_ndtr(jnp.where(edge, beyond, 0))
        return jnp.sum(jnp.where(edge, mass, density - jnp.log(self.half)), axis=-1)

    def entropy(self) -> Array:
        """Not defined in closed form; `ppo_parts.entropy_bonus` estimates it from samples."""
        raise NotImplementedError("a squashed Gaussian has no closed-form entropy")


@_pytree
class Categorical:
    r"""One of n actions, :math:`\pi(a) = e^{z_a} / \sum_k e^{z_k}`.

    As `distrax.Categorical`, but the logits are normalised once, in the beginning, and every gradient is a select
    instead of a scatter: faster in PPO's loss, where log-probability and entropy are taken of the same logits.

    Args:
        logits: `[..., n]`, -inf allowed (see also `mask_logits`).

    Attributes:
        logits: `[..., n]`, normalised: log-probabilities.

    Example:
        >>> import jax.numpy as jnp
        >>> policy = Categorical(jnp.log(jnp.array([1., 3.])))
        >>> round(float(jnp.exp(policy.log_prob(1))), 4), round(float(policy.entropy()), 4)
        (0.75, 0.5623)
    """

    def __init__(self, logits: Array) -> None:
        self.logits = jax.nn.log_softmax(logits)

    @property
    def probs(self) -> Array:
        """Probabilities `[..., n]`."""
        return jnp.exp(self.logits)

    def sample(self, *, seed: Array, sample_shape: Sequence[int] = ()) -> Array:
        """Actions, int32 `[*sample_shape, ...]`."""
        return jax.random.categorical(seed, self.logits, shape=(*sample_shape, *self.logits.shape[:-1]))

    def mode(self) -> Array:
        """The most probable action."""
        return jnp.argmax(self.logits, axis=-1)

    def log_prob(self, value: Array) -> Array:
        """Log-probability of actions `[...]`, integers; NaN for those that are not in [0, n)."""
        value, shape = jnp.asarray(value), self.logits.shape
        if value.shape[value.ndim - len(shape) + 1 :] != shape[:-1]:
            raise ShapeError(
                f"Categorical: actions have shape {value.shape}, their logits {shape}: nothing is broadcast"
            )
        every = (*value.shape, shape[-1])
        option = jax.lax.broadcasted_iota(jnp.int32, every, value.ndim)
        chosen = jnp.sum(jnp.where(value[..., None] == option, jnp.broadcast_to(self.logits, every), 0), axis=-1)
        return jnp.where((value >= 0) & (value < shape[-1]), chosen, jnp.nan)

    def entropy(self) -> Array:
        """In nats; impossible actions add nothing."""
        probs = self.probs
        return -jnp.sum(probs * jnp.where(probs > 0, self.logits, 0), axis=-1)


@_pytree
class MultiCategorical:
    """Independent categorical actions side by side: action `[..., K]`, one integer for each of K choices.

    Args:
        logits: K arrays `[..., n_k]`; the numbers of options may differ.

    Example:
        >>> import jax.numpy as jnp
        >>> policy = MultiCategorical([jnp.zeros(2), jnp.zeros(4)])
        >>> round(float(policy.log_prob(jnp.array([1, 3]))), 4)  # -log 2 - log 4
        -2.0794

    Reference: Huang et al. 2022, The 37 Implementation Details of PPO, detail 37.
    """

    def __init__(self, logits: Sequence[Array]) -> None:
        self.parts = [Categorical(part) for part in logits]

    def sample(self, *, seed: Array, sample_shape: Sequence[int] = ()) -> Array:
        """Actions, `[*sample_shape, ..., K]`."""
        keys = jax.random.split(seed, len(self.parts))
        drawn = [
            part.sample(seed=key, sample_shape=tuple(sample_shape)) for part, key in zip(self.parts, keys, strict=True)
        ]
        return jnp.stack(drawn, axis=-1)

    def mode(self) -> Array:
        """The most probable option of each choice."""
        return jnp.stack([part.mode() for part in self.parts], axis=-1)

    def log_prob(self, value: Array) -> Array:
        """Log-probability of actions `[..., K]`, summed over K."""
        return sum(
            (p.log_prob(value[..., k]) for k, p in enumerate(self.parts[1:], 1)), self.parts[0].log_prob(value[..., 0])
        )

    def entropy(self) -> Array:
        """Sum of the entropies."""
        return sum((part.entropy() for part in self.parts[1:]), self.parts[0].entropy())


def mask_logits(logits: Array, available: Array) -> Array:
    """Logits in which options that are not available have probability 0, and take no part in entropy or gradients.

    Args:
        logits: `[..., n]`.
        available: `[..., n]`, 1 (or True) where the option may be taken; at least one of each row.

    Returns:
        `[..., n]`; give it to `Categorical`.

    Example:
        >>> import jax.numpy as jnp
        >>> policy = Categorical(mask_logits(jnp.zeros(4), jnp.array([1, 1, 0, 0])))
        >>> policy.probs.tolist(), round(float(policy.entropy()), 4)
        ([0.5, 0.5, 0.0, 0.0], 0.6931)

    Reference: Huang and Ontanon 2022, arXiv:2006.14171.
    """
    if jnp.shape(available) != jnp.shape(logits):
        raise ValueError(f"mask_logits: logits have shape {jnp.shape(logits)}, available {jnp.shape(available)}")
    return jnp.where(jnp.asarray(available).astype(bool), logits, jnp.finfo(logits.dtype).min)
