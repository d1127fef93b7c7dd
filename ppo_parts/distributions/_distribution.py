"""Action distributions: Gaussian, gSDE, squashed Gaussian, beta, categorical, multi-discrete; masks for actions.

Any object with `log_prob`, `entropy` and `sample` works with the learner, including the distributions of distrax. This
module has those that PPO needs most. All of them have the same methods, and are pytrees of arrays that begin with the
same batch axes, so that `jax.tree.map`, `vmap`, `scan` and checkpoints treat them like any other data. They compute at
least in float32, and their results have the dtype of their parameters: use float32 parameters if a bfloat16
log-probability is too coarse.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base.errors import UserTypeError, UserValueError
from ..functional._common import ShapeError, accumulator_dtype, check_flags, check_floating, known_values

Array = jax.Array


class _Distribution:
    """A pytree whose attributes are arrays or trees of arrays, with the methods that are defined by the others."""

    def __init_subclass__(cls) -> None:
        def flatten(x: Any) -> tuple[tuple[Any, ...], tuple[str, ...]]:
            return tuple(vars(x).values()), tuple(vars(x))

        def unflatten(names: tuple[str, ...], values: Any) -> Any:
            made = object.__new__(cls)
            vars(made).update(zip(names, values, strict=True))
            return made

        jax.tree_util.register_pytree_node(cls, flatten, unflatten)

    def sample(self, *, seed: Array, sample_shape: Sequence[int] = ()) -> Array:
        raise NotImplementedError

    def log_prob(self, value: Array) -> Array:
        raise NotImplementedError

    def sample_and_log_prob(self, *, seed: Array, sample_shape: Sequence[int] = ()) -> tuple[Array, Array]:
        """Draw actions like `sample`, and return them with exactly the log-probability that `log_prob` computes."""
        value = self.sample(seed=seed, sample_shape=sample_shape)
        return value, self.log_prob(value)

    def _check_same_kind(self, other: Any) -> None:
        if type(other) is not type(self):
            raise UserTypeError(
                f"{type(self).__name__}.kl_divergence: the other distribution must be a {type(self).__name__}, too, "
                f"got {type(other).__name__}"
            )


class Normal(_Distribution):
    r"""Diagonal Gaussian, :math:`a \sim \mathcal N(\mu, \mathrm{diag}(\sigma^2))`, independent over the last axis.

    .. math:: \log\pi(a) = \sum_d -\tfrac12 \left(\frac{a_d - \mu_d}{\sigma_d}\right)^2 - \log\sigma_d
              - \tfrac12 \log 2\pi

    The last axis is the action, so log-probability and entropy are summed over it.

    Args:
        loc: `[..., D]`, mean.
        scale: `[..., D]`, standard deviation, > 0; or `[D]` or a number, which is the same for all means.

    Attributes:
        loc, scale: `[..., D]`, of one dtype.

    Raises:
        TypeError: `loc` is not floating. ValueError: shapes do not fit, or a known scale is negative.

    Example:
        >>> import jax.numpy as jnp
        >>> policy = Normal(jnp.zeros((5, 2)), jnp.array([1., 2.]))
        >>> policy.log_prob(jnp.zeros((5, 2))).shape, round(float(policy.entropy()[0]), 4)
        ((5,), 3.531)
    """

    def __init__(self, loc: Array, scale: Any) -> None:
        check_floating("Normal", loc=loc)
        if not jnp.ndim(loc):
            raise ShapeError("Normal: loc is a single number; its last axis must be that of the action, [..., D]")
        dtype = jnp.result_type(loc, scale)
        self.loc = jnp.asarray(loc, dtype)
        self.scale = _fit_to_loc("Normal", "scale", scale, self.loc, dtype)
        if (known := known_values(self.scale)) is not None and np.any(known < 0):
            raise UserValueError(f"must be greater than 0, got {np.min(known)}", where="Normal", argument="scale")

    def sample(self, *, seed: Array, sample_shape: Sequence[int] = ()) -> Array:
        """Draw actions, `[*sample_shape, ..., D]`, differentiable with respect to the parameters."""
        return self._draw(seed, sample_shape).astype(self.loc.dtype)

    def mode(self) -> Array:
        """The mean."""
        return self.loc

    def log_prob(self, value: Array) -> Array:
        """Log-density of actions `[..., D]`, summed over D; they may have additional leading axes."""
        _check_trailing_axes(type(self).__name__, "its mean", self.loc.shape, value)
        loc, scale = self._wide(jnp.shape(value))
        return jnp.sum(_log_density(value, loc, scale), axis=-1).astype(self.loc.dtype)

    def entropy(self) -> Array:
        r"""Entropy in nats, :math:`\sum_d \log\sigma_d + \tfrac12 \log 2\pi e`."""
        _, scale = self._wide(self.loc.shape)
        return jnp.sum(jnp.log(scale) + 0.5 * (1 + math.log(2 * math.pi)), axis=-1).astype(self.loc.dtype)

    def kl_divergence(self, other: Normal) -> Array:
        r"""KL(self || other) in nats.

        .. math:: \sum_d \log\frac{\sigma_{2d}}{\sigma_{1d}} + \frac{\sigma_{1d}^2 + (\mu_{1d} - \mu_{2d})^2}
                  {2 \sigma_{2d}^2} - \frac12
        """
        self._check_same_kind(other)
        _check_equal_shapes(type(self).__name__, self.loc, other.loc)
        log_ratio, shift = _relation(self._wide(self.loc.shape), other._wide(self.loc.shape))
        divergence = 0.5 * (jnp.expm1(2 * log_ratio) - 2 * log_ratio + jnp.square(shift))
        return jnp.sum(divergence, axis=-1).astype(jnp.result_type(self.loc, other.loc))

    def _draw(self, seed: Array, sample_shape: Sequence[int]) -> Array:
        """Draw samples in the accumulator dtype."""
        loc, scale = self._wide((*sample_shape, *self.loc.shape))
        return loc + scale * jax.random.normal(seed, loc.shape, loc.dtype)

    def _wide(self, shape: tuple[int, ...]) -> tuple[Array, Array]:
        """Broadcast mean and standard deviation to a shape, in the accumulator dtype."""
        dtype = accumulator_dtype(self.loc)
        loc, scale = (jnp.broadcast_to(x.astype(dtype), shape) for x in (self.loc, self.scale))
        return loc, scale


class StateDependentNormal(Normal):
    r"""Gaussian whose noise is a linear function of features of the state: generalized state-dependent exploration.

    .. math:: a = \mu(s) + (\sigma \odot \theta)^\top \phi(s), \qquad \theta \sim \mathcal N(0, 1)^{L \times D}, \qquad
              \log\pi(a) = \log\mathcal N\!\left(a;\ \mu(s), \sqrt{(\sigma^2)^\top \phi(s)^2 + \epsilon}\right)

    Samples that are drawn with the same key have the same matrix :math:`\theta`, one for each element of the batch, so
    with `ppo_parts.rollout(noise_steps=k)` each environment keeps its matrix for k steps. Over these steps, similar
    states get similar noise, and the noise does not average out, unlike noise that is independent at each step.

    Args:
        loc: `[..., D]`, mean.
        features: `[..., L]`, :math:`\phi(s)`, usually the last hidden layer of the actor, with `jax.lax.stop_gradient`.
        std: `[L, D]`, :math:`\sigma`, >= 0; or `[..., L, D]`.
        eps: added to the variance of log-probability, entropy and divergence.

    Attributes:
        loc, scale: `[..., D]`, mean and standard deviation of the action.
        features: `[..., L]`.
        std: `[..., L, D]`.

    Raises:
        TypeError: `loc` is not floating. ValueError: shapes do not fit.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> policy = StateDependentNormal(jnp.zeros((2, 1)), jnp.array([[3., 4.], [6., 8.]]), jnp.ones((2, 1)))
        >>> policy.scale.tolist()
        [[5.0], [10.0]]
        >>> first, same, other = (policy.sample(seed=jax.random.key(k)) for k in (0, 0, 1))
        >>> jnp.array_equal(first, same).item(), jnp.array_equal(first, other).item()
        (True, False)

    Reference: Raffin et al. 2021, Smooth Exploration for Robotic Reinforcement Learning, arXiv:2005.05719, section 3.
    """

    def __init__(self, loc: Array, features: Array, std: Array, eps: float = 1e-6) -> None:
        check_floating("StateDependentNormal", loc=loc, features=features, std=std)
        (*leading, size), shape = jnp.shape(loc) or (0,), jnp.shape(features)
        wide = (*shape, size)
        if shape[:-1] != tuple(leading) or jnp.shape(std) not in (wide, wide[-2:]) or not shape:
            raise ShapeError(
                f"StateDependentNormal: loc must be [..., D], features [..., L] and std [L, D] or [..., L, D], got "
                f"shapes {jnp.shape(loc)}, {shape} and {jnp.shape(std)}"
            )
        dtype = accumulator_dtype(jnp.asarray(loc))
        squares = [jnp.square(jnp.asarray(x, dtype)) for x in (features, std)]
        super().__init__(loc, jnp.sqrt(jnp.einsum("...l,...ld->...d", *squares) + eps).astype(jnp.result_type(loc)))
        self.features, self.std = jnp.asarray(features), jnp.broadcast_to(std, wide)

    def _draw(self, seed: Array, sample_shape: Sequence[int]) -> Array:
        loc, _ = self._wide((*sample_shape, *self.loc.shape))
        theta = jax.random.normal(seed, (*sample_shape, *self.std.shape), loc.dtype)  # one matrix for each sample
        weights = self.features.astype(loc.dtype)[..., None] * self.std.astype(loc.dtype)
        return loc + jnp.sum(jnp.broadcast_to(weights, theta.shape) * theta, axis=-2)


class TanhNormal(_Distribution):
    r"""Gaussian squashed into a box, :math:`a = m + h \tanh(u),\ u \sim \mathcal N(\mu, \sigma)`, in each dimension.

    .. math:: \log\pi(a) = \sum_d \log\mathcal N(u_d; \mu_d, \sigma_d) - \log h_d - \log(1 - \tanh^2 u_d),
              \qquad u = \mathrm{artanh}((a - m) / h)

    Large u are rounded to the edge of the box, where artanh is infinite: in float32 all u above 9 give the same number.
    Therefore every action within a relative `eps` of an edge is replaced by that edge, and the edge has the probability
    of all actions that it replaces,

    .. math:: \log\pi(m + h) = \log\Phi((\mu - u_{max}) / \sigma), \qquad u_{max} = \mathrm{artanh}(1 - \epsilon)

    (log-mass at the edge, log-density inside). This is exactly the distribution of the samples, and log-ratios and
    their gradients stay moderate, no matter how far the mean is outside the box. With the density of the clipped action
    instead, any small change of such a mean would make the ratio overflow. The entropy has no closed form;
    `entropy_bonus` estimates it.

    Args:
        loc: `[..., D]`, mean of u.
        scale: `[..., D]`, `[D]` or a number, standard deviation of u, > 0.
        low, high: `[..., D]`, `[D]` or numbers, the bounds of the box; m is its middle and h half its width.
        eps: relative width of an edge; 1e-6 is 16 units in the last place of float32, and gives u_max = 7.25. The edge
            is wider if the box is narrow and far from 0, and in bfloat16.

    Attributes:
        base: `Normal` of u.
        middle, half, eps: `[..., D]`, m, h and the width of an edge.

    Raises:
        TypeError: `loc` is not floating. ValueError: shapes do not fit; the box is empty or infinite; `eps` is not in
            [0, 1), or a known scale is negative.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> policy = TanhNormal(jnp.array([0., 50.]), jnp.ones(2), -2., 2.)
        >>> [round(float(x), 4) for x in policy.log_prob(jnp.array([[0., 2.], [1., 2.]]))]
        [-1.6121, -1.4753]

    Reference: Haarnoja et al. 2018, arXiv:1801.01290, appendix C; the edge is Tobin's 1958 censored likelihood.
    """

    def __init__(self, loc: Array, scale: Any, low: Any = -1.0, high: Any = 1.0, eps: float = 1e-6) -> None:
        self._squash(Normal(loc, scale), low, high, eps)

    def _squash(self, base: Normal, low: Any, high: Any, eps: float) -> None:
        """Set the attributes."""
        known = known_values(eps)
        if known is not None and not np.all((known >= 0) & (known < 1)):
            raise UserValueError(f"must lie in [0, 1), got {eps!r}", where=type(self).__name__, argument="eps")
        self.base, name = base, type(self).__name__
        dtype, wide = base.loc.dtype, accumulator_dtype(base.loc)
        resolution = 4 * float(jnp.finfo(dtype).eps)
        _check_box(name, low, high, dtype)
        low, high = (_fit_to_loc(name, bound, x, base.loc, wide) for bound, x in (("low", low), ("high", high)))
        self.middle, self.half = (high + low) / 2, (high - low) / 2
        # In a narrow box far from 0, an action has few digits left to resolve the box, so the edge must be wider.
        self.eps = jnp.maximum(eps, resolution * (1 + jnp.abs(self.middle) / self.half))

    def sample(self, *, seed: Array, sample_shape: Sequence[int] = ()) -> Array:
        """Draw actions, `[*sample_shape, ..., D]`, differentiable with respect to the parameters inside the box."""
        return self._squashed(self.base._draw(seed, sample_shape))

    def mode(self) -> Array:
        """The squashed mean (strictly speaking the median, because squashing moves the mode)."""
        return self._squashed(self.base._wide(self.base.loc.shape)[0])

    def log_prob(self, value: Array) -> Array:
        """Log-probability of actions `[..., D]`, summed over D; they may have additional leading axes."""
        _check_trailing_axes(type(self).__name__, "its mean", self.base.loc.shape, value)
        shape = jnp.shape(value)
        loc, scale = self.base._wide(shape)
        middle, half, eps = (jnp.broadcast_to(x, shape) for x in (self.middle, self.half, self.eps))
        x = (value - middle) / half
        edge, limit = jnp.abs(x) > 1 - eps / 2, 1 - eps
        u = jnp.arctanh(jnp.clip(x, -limit, limit))
        slope = 2 * (math.log(2) - u - jax.nn.softplus(-2 * u))  # log(1 - tanh(u)^2), without cancellation
        density = _log_density(jnp.where(edge, jax.lax.stop_gradient(loc), u), loc, scale) - slope
        beyond = (jnp.sign(x) * loc - jnp.arctanh(limit)) / scale
        mass = jax.scipy.special.log_ndtr(jnp.where(edge, beyond, 0))
        total = jnp.sum(jnp.where(edge, mass, density - jnp.log(half)), axis=-1)
        return total.astype(self.base.loc.dtype)

    def entropy(self) -> Array:
        """Raise `NotImplementedError`: there is no closed form; `ppo_parts.entropy_bonus` estimates it from samples."""
        raise NotImplementedError(
            f"{type(self).__name__} has no entropy in closed form; ppo_parts.entropy_bonus estimates it from samples"
        )

    def kl_divergence(self, other: TanhNormal) -> Array:
        r"""KL(self || other) in nats, of two distributions in the same box.

        This is the divergence of the sampled distributions, with the density inside and the mass of the two edges.
        Squashing cancels, so it equals the divergence of two Gaussians censored at :math:`\pm u_{max}`, summed over the
        dimensions:

        .. math:: \int_{-u_{max}}^{u_{max}} p(u) \log\frac{p(u)}{q(u)} du
                  + P_- \log\frac{P_-}{Q_-} + P_+ \log\frac{P_+}{Q_+},
                  \qquad P_\pm = \Phi\left(\frac{\pm\mu_1 - u_{max}}{\sigma_1}\right)

        where Q is the same for the other distribution. The integral is a sum of moments of a truncated Gaussian. If
        hardly any mass of self is in the edges, this equals the divergence of the two Gaussians. It is never larger,
        and approaches 0 if both distributions are in the same edge.

        Raises:
            ValueError: the boxes differ, so each has edges that the other does not have. If they differ but are traced,
                and so cannot be compared yet, the divergence is infinite instead.
        """
        self._check_same_kind(other)
        _check_equal_shapes(type(self).__name__, self.base.loc, other.base.loc)
        boxes = [jnp.stack([x.middle, x.half, x.eps]) for x in (self, other)]
        same = jnp.all(boxes[0] == boxes[1], axis=0)
        if not isinstance(same, jax.core.Tracer) and not np.all(same):
            described = " and ".join(f"low={m - h}, high={m + h}, eps={eps}" for m, h, eps in boxes)
            raise UserValueError(
                f"{type(self).__name__}.kl_divergence: the two must have the same box and eps, got {described}"
            )
        shape = self.base.loc.shape
        (loc, scale), (other_loc, other_scale) = self.base._wide(shape), other.base._wide(shape)
        log_ratio, shift = _relation((loc, scale), (other_loc, other_scale))
        u_max = jnp.arctanh(1 - self.eps)
        below, above = (-u_max - loc) / scale, (u_max - loc) / scale
        # Moments of a standard Gaussian between the edges. The nearer tail gives more precise probabilities.
        near, far = jnp.where(below > 0, -above, below), jnp.where(below > 0, -below, above)
        inside = jax.scipy.special.ndtr(far) - jax.scipy.special.ndtr(near)
        density_below, density_above = (jnp.exp(_log_density(z, 0.0, 1.0)) for z in (below, above))
        first = density_below - density_above
        excess = below * density_below - above * density_above  # the second moment, less `inside`
        growth = jnp.expm1(2 * log_ratio)
        within = inside * 0.5 * (growth - 2 * log_ratio + jnp.square(shift))
        within += 0.5 * growth * excess + jnp.exp(log_ratio) * shift * first

        def edge(sign: float) -> Array:
            log_p = jax.scipy.special.log_ndtr((sign * loc - u_max) / scale)
            log_q = jax.scipy.special.log_ndtr((sign * other_loc - u_max) / other_scale)
            return jnp.exp(log_p) * (log_p - log_q)

        divergence = jnp.where(same, within + edge(-1.0) + edge(1.0), jnp.inf)
        return jnp.sum(divergence, axis=-1).astype(jnp.result_type(self.base.loc, other.base.loc))

    def _squashed(self, u: Array) -> Array:
        middle, half, eps = (jnp.broadcast_to(x, u.shape) for x in (self.middle, self.half, self.eps))
        x = jnp.tanh(u)
        return (middle + half * jnp.where(jnp.abs(x) > 1 - eps, jnp.sign(x), x)).astype(self.base.loc.dtype)


class StateDependentTanhNormal(TanhNormal):
    r"""Squashed Gaussian with state-dependent noise: `TanhNormal` of a `StateDependentNormal`.

    .. math:: a = m + h \tanh\!\left(\mu(s) + (\sigma \odot \theta)^\top \phi(s)\right), \qquad
              \theta \sim \mathcal N(0, 1)^{L \times D}

    As with `StateDependentNormal`, samples that are drawn with the same key have the same matrix :math:`\theta`.

    Args:
        loc: `[..., D]`, mean before squashing.
        features: `[..., L]`, :math:`\phi(s)`, with `jax.lax.stop_gradient`.
        std: `[L, D]` or `[..., L, D]`, :math:`\sigma`, >= 0.
        low, high: `[..., D]`, `[D]` or numbers, the bounds of the box; m is its middle and h half its width.
        eps: relative width of an edge; see `TanhNormal`.

    Attributes:
        base: `StateDependentNormal` of the action before squashing.
        middle, half, eps: `[..., D]`, m, h and the width of an edge.

    Raises:
        TypeError: `loc` is not floating. ValueError: shapes do not fit; the box is empty or infinite; `eps` is not in
            [0, 1), or a known scale is negative.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> loc, features, std = jnp.zeros((2, 1)), jnp.array([[3., 4.], [0., 0.1]]), jnp.ones((2, 1))
        >>> policy = StateDependentTanhNormal(loc, features, std, -2., 2.)
        >>> bool(jnp.all(jnp.abs(policy.sample(seed=jax.random.key(0))) <= 2)), policy.base.scale.shape
        (True, (2, 1))

    Reference: Raffin et al. 2021, Smooth Exploration for Robotic Reinforcement Learning, arXiv:2005.05719, section 3.
    """

    def __init__(
        self, loc: Array, features: Array, std: Array, low: Any = -1.0, high: Any = 1.0, eps: float = 1e-6
    ) -> None:
        self._squash(StateDependentNormal(loc, features, std), low, high, eps)


class Beta(_Distribution):
    r"""Beta distribution scaled to a box, :math:`a = l + (h - l) x,\ x \sim \mathrm{Beta}(\alpha, \beta)`, independent.

    .. math:: \log\pi(a) = \sum_d (\alpha_d - 1) \log x_d + (\beta_d - 1) \log(1 - x_d) - \log B(\alpha_d, \beta_d)
              - \log(h_d - l_d), \qquad x = \frac{a - l}{h - l}

    All actions are inside the box, so none has to be clipped, and entropy and divergence have a closed form. If alpha
    and beta are above 1, as in the example, the density has one maximum and is 0 at the edges; otherwise it may be
    infinite there. For a log-density that is finite for every action, x is clipped into [1e-6, 1 - 1e-6], both in
    `log_prob` and in samples. Entropy and divergence are those of the distribution without this clip.

    Log-density, entropy and divergence are computed without the cancellation of large log-gammas, so that they stay
    accurate for narrow distributions. Wherever alpha and beta are used, they are clipped into [1e-6, 1e9]; those
    outside have a gradient of 0. Negative ones give NaN.

    Args:
        alpha: `[..., D]`, > 0.
        beta: `[..., D]`, `[D]` or a number, > 0.
        low, high: `[..., D]`, `[D]` or numbers, the bounds l and h of the box.

    Attributes:
        alpha, beta: `[..., D]`, of one dtype.
        low, high: `[..., D]`.

    Raises:
        TypeError: `alpha` is not floating. ValueError: shapes do not fit; the box is empty or infinite.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> outputs = jnp.array([[0.5413, 0.5413, 0.5413, 2.9489]])  # of a network, `[..., 2 * D]`
        >>> alpha, beta = jnp.split(1 + jax.nn.softplus(outputs), 2, axis=-1)
        >>> policy = Beta(alpha, beta, -2., 2.)
        >>> [round(float(x), 2) for x in (*alpha[0], *beta[0], *policy.mode()[0])]
        [2.0, 2.0, 2.0, 4.0, 0.0, -1.0]
        >>> round(float(policy.log_prob(policy.mode())[0]), 3), round(float(policy.entropy()[0]), 3)
        (-1.621, 2.285)

    Reference: Chou et al. 2017, Improving Stochastic Policy Gradients in Continuous Control with Deep Reinforcement
    Learning using the Beta Distribution, PMLR 70.
    """

    def __init__(self, alpha: Array, beta: Any, low: Any = -1.0, high: Any = 1.0) -> None:
        check_floating("Beta", alpha=alpha)
        if not jnp.ndim(alpha):
            raise ShapeError("Beta: alpha is a single number; its last axis must be that of the action, [..., D]")
        dtype = jnp.result_type(alpha, beta)
        _check_box("Beta", low, high, dtype)
        self.alpha = jnp.asarray(alpha, dtype)
        self.beta = _fit_to_loc("Beta", "beta", beta, self.alpha, dtype, first="alpha")
        self.low, self.high = (
            _fit_to_loc("Beta", name, x, self.alpha, accumulator_dtype(self.alpha), first="alpha")
            for name, x in (("low", low), ("high", high))
        )

    def sample(self, *, seed: Array, sample_shape: Sequence[int] = ()) -> Array:
        """Draw actions, `[*sample_shape, ..., D]`, differentiable with respect to `alpha` and `beta`."""
        alpha, beta = self._wide((*sample_shape, *self.alpha.shape))
        return self._scaled(jax.random.beta(seed, alpha, beta, dtype=alpha.dtype))

    def mode(self) -> Array:
        r"""The most probable action, :math:`x = (\alpha - 1) / (\alpha + \beta - 2)`, where alpha and beta are above 1.

        Elsewhere the density has no maximum inside the box, or is uniform, and this is the mean,
        :math:`x = \alpha / (\alpha + \beta)`.
        """
        alpha, beta = self._wide(self.alpha.shape)
        peaked = (alpha > 1) & (beta > 1)
        above = [jnp.where(peaked, x - 1, x) for x in (alpha, beta)]
        return self._scaled(above[0] / (above[0] + above[1]))

    def log_prob(self, value: Array) -> Array:
        """Log-density of actions `[..., D]`, summed over D; they may have additional leading axes.

        Actions at the edge of the box or beyond have the density at the nearest x of [1e-6, 1 - 1e-6].
        """
        _check_trailing_axes("Beta", "its alpha", self.alpha.shape, value)
        shape = jnp.shape(value)
        alpha, beta = self._wide(shape)
        low, high = (jnp.broadcast_to(x, shape) for x in (self.low, self.high))
        # 1 - x is computed from the upper edge, because actions near that edge resolve it better than x.
        x, rest = (_inside(distance / (high - low)) for distance in (value - low, high - value))
        total = alpha + beta
        peak = 0.5 * (jnp.log(alpha * (beta / total)) - math.log(2 * math.pi))  # of Stirling's approximation
        peak += _beyond_stirling(total) - _beyond_stirling(alpha) - _beyond_stirling(beta)
        density = peak - _deviance(alpha, beta, x, rest) - jnp.log(x) - jnp.log(rest) - jnp.log(high - low)
        return jnp.sum(density, axis=-1).astype(self.alpha.dtype)

    def entropy(self) -> Array:
        r"""Entropy in nats, with the digamma function :math:`\psi`.

        .. math:: \sum_d \log B(\alpha_d, \beta_d) - (\alpha_d - 1) \psi(\alpha_d) - (\beta_d - 1) \psi(\beta_d)
                  + (\alpha_d + \beta_d - 2) \psi(\alpha_d + \beta_d) + \log(h_d - l_d)
        """
        alpha, beta = self._wide(self.alpha.shape)
        total = alpha + beta

        def term(x: Array, count: int) -> Array:
            """Return log Gamma(x) - (x - count) psi(x), without the terms that cancel or are gathered below."""
            rest, slope = _with_slope(_beyond_stirling, x)
            return rest - (x - count) * slope - 0.5 * count / x

        entropy = 0.5 * (jnp.log(alpha / total) + jnp.log(beta / total) - jnp.log(total) + 1 + math.log(2 * math.pi))
        entropy += term(alpha, 1) + term(beta, 1) - term(total, 2)
        return jnp.sum(entropy + jnp.log(self.high - self.low), axis=-1).astype(self.alpha.dtype)

    def kl_divergence(self, other: Beta) -> Array:
        r"""KL(self || other) in nats, of two distributions in the same box.

        .. math:: \sum_d \log\frac{B(\alpha_{2d}, \beta_{2d})}{B(\alpha_{1d}, \beta_{1d})}
                  + (\alpha_{1d} - \alpha_{2d}) \psi(\alpha_{1d}) + (\beta_{1d} - \beta_{2d}) \psi(\beta_{1d})
                  + (\alpha_{2d} - \alpha_{1d} + \beta_{2d} - \beta_{1d}) \psi(\alpha_{1d} + \beta_{1d})

        Raises:
            ValueError: the boxes differ, so each allows actions that the other does not. If they differ but are traced,
                and so cannot be compared yet, the divergence is infinite instead.
        """
        self._check_same_kind(other)
        _check_equal_shapes("Beta", self.alpha, other.alpha)
        same = (self.low == other.low) & (self.high == other.high)
        if not isinstance(same, jax.core.Tracer) and not np.all(same):
            described = " and ".join(f"low={x.low}, high={x.high}" for x in (self, other))
            raise UserValueError(f"Beta.kl_divergence: the two must have the same box, got {described}")
        alpha, beta = self._wide(self.alpha.shape)
        other_alpha, other_beta = other._wide(self.alpha.shape)

        total, other_total = alpha + beta, other_alpha + other_beta
        divergence = _deviance(other_alpha, other_beta, alpha / total, beta / total)
        divergence += _beyond_bregman(alpha, other_alpha) + _beyond_bregman(beta, other_beta)
        divergence -= _beyond_bregman(total, other_total)
        divergence = jnp.maximum(divergence, 0)  # rounding matters if parameters differ by orders of magnitude
        divergence = jnp.sum(jnp.where(same, divergence, jnp.inf), axis=-1)
        return divergence.astype(jnp.result_type(self.alpha, other.alpha))

    def _wide(self, shape: tuple[int, ...]) -> tuple[Array, Array]:
        """Broadcast alpha and beta to a shape, in the accumulator dtype, and limit them."""
        dtype = accumulator_dtype(self.alpha)
        alpha, beta = (jnp.broadcast_to(x.astype(dtype), shape) for x in (self.alpha, self.beta))
        # Within these limits no intermediate result of a gradient overflows in float32.
        alpha, beta = (jnp.where(x >= 0, jnp.clip(x, 1e-6, 1e9), jnp.nan) for x in (alpha, beta))
        return alpha, beta

    def _scaled(self, x: Array) -> Array:
        low, high = (jnp.broadcast_to(bound, x.shape) for bound in (self.low, self.high))
        return (low + (high - low) * _inside(x)).astype(self.alpha.dtype)


class Categorical(_Distribution):
    r"""One of n actions, :math:`\pi(a) = e^{z_a} / \sum_k e^{z_k}`.

    Unlike `distrax.Categorical`, this normalizes the logits once, on construction, and every gradient is a select
    instead of a scatter. This is faster in PPO's loss, which needs the log-probability and entropy of the same logits.

    Args:
        logits: `[..., n]`, -inf allowed (see also `mask_logits`).

    Attributes:
        logits: `[..., n]`, normalized, that is, log-probabilities.

    Raises:
        TypeError: `logits` are not floating. ValueError: they have no axis.

    Example:
        >>> import jax.numpy as jnp
        >>> policy = Categorical(jnp.log(jnp.array([1., 3.])))
        >>> round(float(jnp.exp(policy.log_prob(1))), 4), round(float(policy.entropy()), 4)
        (0.75, 0.5623)
    """

    def __init__(self, logits: Array) -> None:
        check_floating("Categorical", logits=logits)
        if not jnp.ndim(logits):
            raise ShapeError("Categorical: logits are a single number; their last axis must be that of the actions")
        wide = jnp.asarray(logits, accumulator_dtype(jnp.asarray(logits)))
        self.logits = jax.nn.log_softmax(wide).astype(jnp.result_type(logits))

    @property
    def probs(self) -> Array:
        """Probabilities `[..., n]`."""
        return jnp.exp(self.logits)

    def sample(self, *, seed: Array, sample_shape: Sequence[int] = ()) -> Array:
        """Draw actions, int32 `[*sample_shape, ...]`."""
        wide = self.logits.astype(accumulator_dtype(self.logits))  # random bfloat16 would never draw rare actions
        return jax.random.categorical(seed, wide, shape=(*sample_shape, *self.logits.shape[:-1]))

    def mode(self) -> Array:
        """The most probable action."""
        return jnp.argmax(self.logits, axis=-1)

    def log_prob(self, value: Array) -> Array:
        """Log-probability of actions `[...]`, with any additional leading axes; NaN except for 0, 1, ..., n - 1."""
        value, shape = jnp.asarray(value), self.logits.shape
        if value.shape[value.ndim - len(shape) + 1 :] != shape[:-1]:
            raise ShapeError(
                f"Categorical: actions have shape {value.shape} and their logits {shape}, but nothing is broadcast"
            )
        if jnp.issubdtype(value.dtype, jnp.floating):
            value = value.astype(accumulator_dtype(value))  # n may be more than bfloat16 or int8 can hold
            value = jnp.where(value == jnp.floor(value), value, jnp.nan)
        value = value.astype(jnp.promote_types(value.dtype, jnp.int32))
        every = (*value.shape, shape[-1])
        option = jax.lax.broadcasted_iota(jnp.int32, every, value.ndim)
        chosen = jnp.sum(jnp.where(value[..., None] == option, jnp.broadcast_to(self.logits, every), 0), axis=-1)
        return jnp.where((value >= 0) & (value < shape[-1]), chosen, jnp.nan)

    def entropy(self) -> Array:
        """Entropy in nats; impossible actions contribute 0."""
        logits = self.logits.astype(accumulator_dtype(self.logits))
        probs = jnp.exp(logits)
        return -jnp.sum(probs * jnp.where(probs > 0, logits, 0), axis=-1).astype(self.logits.dtype)

    def kl_divergence(self, other: Categorical) -> Array:
        r"""KL(self || other) in nats, :math:`\sum_a \pi_1(a) (\log\pi_1(a) - \log\pi_2(a))`.

        Actions that are impossible under self contribute 0. The divergence is infinite (with `mask_logits`, as large as
        a float can be) if an action is possible under self but not under the other.
        """
        self._check_same_kind(other)
        _check_equal_shapes("Categorical", self.logits, other.logits)
        dtype = jnp.result_type(self.logits, other.logits)
        own, others = (x.logits.astype(accumulator_dtype(x.logits)) for x in (self, other))
        probs = jnp.exp(own)
        ours, theirs = (jnp.where(probs > 0, x, 0) for x in (own, others))
        return jnp.sum(probs * (ours - theirs), axis=-1).astype(dtype)


class MultiCategorical(_Distribution):
    """Several independent categorical choices: an action `[..., K]` has one integer for each of K choices.

    Args:
        logits: K arrays `[..., n_k]`; the choices may have different numbers of options. With `nvec` one array
            `[..., n_1 + ... + n_K]`, such as the output of one layer.
        nvec: the numbers of options, if `logits` is one array.

    Attributes:
        parts: K `Categorical`s.

    Raises:
        TypeError: an array is not floating; `logits` is one array, and there is no `nvec`. ValueError: there are no
            arrays, or their leading axes differ; `nvec` does not add up to the last axis.

    Example:
        >>> import jax.numpy as jnp
        >>> policy = MultiCategorical([jnp.zeros(2), jnp.zeros(4)])
        >>> round(float(policy.log_prob(jnp.array([1, 3]))), 4)  # -log 2 - log 4
        -2.0794
        >>> MultiCategorical(jnp.zeros((5, 6)), nvec=(2, 4)).mode().shape
        (5, 2)

    Reference: Huang et al. 2022, The 37 Implementation Details of PPO, detail 37.
    """

    def __init__(self, logits: Any, nvec: Sequence[int] | None = None) -> None:
        if nvec is None and hasattr(logits, "ndim"):
            raise UserTypeError(
                f"MultiCategorical: logits are one array of shape {jnp.shape(logits)}: give nvec, the numbers of "
                "options, or a list of arrays"
            )
        if nvec is not None:
            sizes = np.asarray(nvec)
            if sizes.ndim != 1 or sizes.dtype.kind not in "iu" or (sizes < 1).any():
                raise UserValueError(f"MultiCategorical: nvec must contain whole numbers of at least 1, got {nvec!r}")
            nvec = sizes.tolist()
            if jnp.shape(logits)[-1:] != (sum(nvec),):
                raise ShapeError(
                    f"MultiCategorical: the last axis of logits must have sum(nvec) = {sum(nvec)} entries for "
                    f"nvec={tuple(nvec)}, got shape {jnp.shape(logits)}"
                )
            logits = jnp.split(logits, list(itertools.accumulate(nvec[:-1])), axis=-1)
        self.parts = [Categorical(part) for part in logits]
        if len({part.logits.shape[:-1] for part in self.parts}) != 1:
            shapes = ", ".join(str(part.logits.shape) for part in self.parts) or "no arrays"
            raise ShapeError(f"MultiCategorical: logits must agree in all axes but the last, got {shapes}")

    @property
    def logits(self) -> Array:
        """The logits of all choices, one after another, `[..., n_1 + ... + n_K]`."""
        return jnp.concatenate([part.logits for part in self.parts], axis=-1)

    def sample(self, *, seed: Array, sample_shape: Sequence[int] = ()) -> Array:
        """Draw actions, int32 `[*sample_shape, ..., K]`."""
        keys = jax.random.split(seed, len(self.parts))
        drawn = [
            part.sample(seed=key, sample_shape=tuple(sample_shape)) for part, key in zip(self.parts, keys, strict=True)
        ]
        return jnp.stack(drawn, axis=-1)

    def mode(self) -> Array:
        """The most probable option of each choice."""
        return jnp.stack([part.mode() for part in self.parts], axis=-1)

    def log_prob(self, value: Array) -> Array:
        """Log-probability of actions `[..., K]`, summed over K; they may have additional leading axes."""
        batch = self.parts[0].logits.shape[:-1]
        _check_trailing_axes("MultiCategorical", "its choices", (*batch, len(self.parts)), value)
        return _total(part.log_prob(value[..., k]) for k, part in enumerate(self.parts))

    def entropy(self) -> Array:
        """Sum of the entropies, in nats."""
        return _total(part.entropy() for part in self.parts)

    def kl_divergence(self, other: MultiCategorical) -> Array:
        """KL(self || other) in nats, summed over the choices."""
        self._check_same_kind(other)
        if len(self.parts) != len(other.parts):
            raise ShapeError(
                f"MultiCategorical.kl_divergence: the two distributions have {len(self.parts)} and {len(other.parts)} "
                "choices"
            )
        return _total(ours.kl_divergence(theirs) for ours, theirs in zip(self.parts, other.parts, strict=True))


def mask_logits(logits: Array, available: Array) -> Array:
    """Mask logits so that unavailable options have probability 0, and do not contribute to entropy or gradients.

    Args:
        logits: `[..., n]`.
        available: `[..., n]`, 1 (or True) where the option may be taken; at least one option in each row.

    Returns:
        `[..., n]`, logits for `Categorical`.

    Raises:
        TypeError: `logits` are not floating. ValueError: the shapes differ, or a known element of `available` is not 0
            or 1.

    Example:
        >>> import jax.numpy as jnp
        >>> policy = Categorical(mask_logits(jnp.zeros(4), jnp.array([1, 1, 0, 0])))
        >>> policy.probs.tolist(), round(float(policy.entropy()), 4)
        ([0.5, 0.5, 0.0, 0.0], 0.6931)

    Reference: Huang and Ontanon 2022, arXiv:2006.14171.
    """
    if jnp.shape(available) != jnp.shape(logits):
        raise ShapeError(f"mask_logits: logits have shape {jnp.shape(logits)}, available {jnp.shape(available)}")
    check_floating("mask_logits", logits=logits)
    check_flags("mask_logits", available=available)
    return jnp.where(jnp.asarray(available).astype(bool), logits, jnp.finfo(jnp.result_type(logits)).min)


def _log_density(value: Any, loc: Any, scale: Any) -> Array:
    """Return the log-density of a Gaussian for each dimension."""
    return -0.5 * jnp.square((value - loc) / scale) - jnp.log(scale) - 0.5 * math.log(2 * math.pi)


def _relation(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return the log-ratio of the standard deviations, and the difference of the means in units of the second one."""
    (loc, scale), (other_loc, other_scale) = first, second
    return jnp.log(scale / other_scale), (loc - other_loc) / other_scale


def _inside(x: Array) -> Array:
    """Clip a coordinate of the unit interval to a distance of 1e-6 from both ends, where the log-density is finite."""
    return jnp.clip(x, 1e-6, 1 - 1e-6)


def _beyond_stirling(x: Array) -> Array:
    r"""Return the remainder of Stirling's approximation of log Gamma.

    .. math:: \log\Gamma(x) - (x - \tfrac12) \log x + x - \tfrac12 \log 2\pi

    It decreases by :math:`(x + 1/2) \log(1 + 1/x) - 1` from x to x + 1. After four such steps, a few terms of the
    asymptotic series are exact in float32. No large numbers cancel.
    """
    return sum((x + k + 0.5) * jnp.log1p(1 / (x + k)) - 1 for k in range(4)) + _stirling_series(x + 4)


def _stirling_series(x: Array) -> Array:
    """Return the first terms of the asymptotic series of `_beyond_stirling`; at x = 4 the others add up to 5e-10."""
    far = 1 / x
    square = far * far
    return far * (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square * (1 / 1680 - square / 1188))))


def _beyond_bregman(x: Array, y: Array) -> Array:
    r"""Return the remainder of the Bregman divergence of log Gamma after its leading terms.

    .. math:: \log\Gamma(y) - \log\Gamma(x) - (y - x) \psi(x) - \left(y \log\frac{y}{x} - y + x\right)

    It is a sum of `_excess`, so that the divergence of nearby numbers stays accurate. As in `_beyond_stirling`, four
    steps lead from small x and y to numbers for which the series is accurate.
    """

    def gap(y: Array, x: Array) -> Array:
        return _excess((y - x) / x, y / x)

    near = jnp.minimum(x, y) < 4
    far_x, far_y = (jnp.where(near, number + 4, number) for number in (x, y))
    steps = sum(gap(y + k, x + k) for k in range(4)) + far_y * gap(far_x, far_y) - y * gap(x, y)
    series, slope = _with_slope(_stirling_series, far_x)
    return jnp.where(near, steps, 0) + 0.5 * gap(far_y, far_x) + _stirling_series(far_y) - series - (y - x) * slope


def _with_slope(function: Any, x: Array) -> tuple[Array, Array]:
    """Return the values of an elementwise function, and of its derivative."""
    return jax.jvp(function, (x,), (jnp.ones_like(x),))


def _excess(t: Array, ratio: Array) -> Array:
    """Return t - log(1 + t) >= 0, accurately for small t, and for a `ratio`, 1 + t, near 0."""
    r = t / (2 + t)
    square = jnp.square(r)  # log(1 + t) = 2 artanh(r)
    small = t * r - 2 * r * square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square / 9)))
    return jnp.where(jnp.abs(t) < 0.3, small, t - jnp.log(ratio))


@jax.custom_jvp
def _deviance(alpha: Array, beta: Array, x: Array, rest: Array) -> Array:
    r"""Return :math:`\alpha \log(m / x) + \beta \log((1 - m) / (1 - x))` >= 0 for the mean m; `rest` is 1 - x.

    As a sum of two nonnegative terms, it stays accurate where x is near the mean.
    """
    mean, other = alpha / (alpha + beta), beta / (alpha + beta)
    distance = jnp.where(x < rest, x - mean, other - rest)
    return alpha * _excess(distance / mean, x / mean) + beta * _excess(-distance / other, rest / other)


_deviance.defjvps(  # these partial derivatives have no terms that cancel
    lambda t, _, alpha, beta, x, rest: t * jnp.log(alpha / (alpha + beta) / x),
    lambda t, _, alpha, beta, x, rest: t * jnp.log(beta / (alpha + beta) / rest),
    lambda t, _, alpha, beta, x, rest: -t * alpha / x,
    lambda t, _, alpha, beta, x, rest: -t * beta / rest,
)


def _total(summands: Any) -> Array:
    """Add arrays without starting from 0, which would be one more addition."""
    first, *rest = summands
    return sum(rest, first)


def _fit_to_loc(where: str, name: str, x: Any, loc: Array, dtype: Any, first: str = "loc") -> Array:
    """Broadcast `x` to the shape of `loc`; it has this shape, that of the last axis, or is a single number."""
    if jnp.shape(x) not in (loc.shape, loc.shape[-1:], ()):
        raise ShapeError(
            f"{where}: {first} has shape {loc.shape} and {name} {jnp.shape(x)}; {name} must have the shape of {first}, "
            f"{loc.shape[-1:]} or ()"
        )
    return jnp.broadcast_to(jnp.asarray(x, dtype), loc.shape)


def _check_box(where: str, low: Any, high: Any, dtype: Any) -> None:
    """Raise unless a box is finite, not empty, and wide enough for actions of a dtype; traced bounds pass."""
    if any(isinstance(x, jax.core.Tracer) for x in (low, high)):
        return
    least, most = np.asarray(low, float), np.asarray(high, float)
    if not (np.all(np.isfinite(least) & np.isfinite(most)) and np.all(least < most)):
        raise UserValueError(f"{where}: the box must be finite, with low < high, got low={low}, high={high}")
    if np.any(4 * float(jnp.finfo(dtype).eps) * np.maximum(np.abs(least), np.abs(most)) > (most - least) / 4):
        raise UserValueError(f"{where}: {dtype} cannot resolve the box low={low}, high={high}: use float32")


def _check_trailing_axes(where: str, whose: str, shape: tuple[int, ...], value: Any) -> None:
    """Raise `ShapeError` unless the trailing axes of actions match those of the distribution."""
    given = jnp.shape(value)
    if len(given) < len(shape) or given[len(given) - len(shape) :] != shape:
        raise ShapeError(f"{where}: an action has shape {given} and {whose} {shape}, but nothing is broadcast")


def _check_equal_shapes(where: str, ours: Array, theirs: Array) -> None:
    if ours.shape != theirs.shape:
        raise ShapeError(
            f"{where}.kl_divergence: the two distributions have the shapes {ours.shape} and {theirs.shape}, but "
            "nothing is broadcast"
        )
