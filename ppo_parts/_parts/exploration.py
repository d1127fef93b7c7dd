"""Random network distillation: a reward for new observations, and the loss of the network that predicts it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._base.errors import UserTypeError, UserValueError
from .._base.hyperparameters import Numeric, at, check_count, check_number
from .._core.moments import Moments, appended_if_any
from .._core.types import Array, Batch, Context, Params, Part
from ..functional import masked_mean
from .losses import measured_loss_part

Embed = Callable[[Any, Any], Array]


class RNDState(NamedTuple):
    """State of `rnd_reward`: the random network, discounted sums of errors `[N]`, and running moments of these sums."""

    target: Any
    discounted: Array
    moments: Moments


def rnd_reward(
    init: Callable[[Array], Any],
    embed: Embed,
    *,
    num_envs: int,
    gamma: Numeric = 0.99,
    predictor: str = "predictor",
    name: str = "rnd",
) -> Part:
    r"""Write a reward for observations that a network cannot yet predict: random network distillation (RND).

    .. math:: e_t = \frac{1}{K} \left\| \hat f(s_{t+1}) - f(s_{t+1}) \right\|^2, \qquad
              r_t = \frac{e_t}{\sigma}, \qquad R_t = \gamma R_{t-1} + e_t

    The network f is random and fixed; `rnd_loss` trains the predictor :math:`\hat f` to agree with it. :math:`\sigma`
    is the running standard deviation of the discounted sums R, which continue from episode to episode. The reward of
    masked steps is 0, and they do not enter the sums.

    The reward is `extras["<name>_reward"]`. A second `gae`, wrapped in `within`, gives it a separate advantage and
    critic. `extras["<name>_terminated"]` is 0 everywhere, so that this advantage looks beyond the ends of episodes, as
    in the paper. `extras["<name>_target"]`, `[T, N, K]`, is f of the next observations, for `rnd_loss`. Metric:
    `<name>_reward`, the mean.

    Args:
        init: function of a key that returns the parameters of a network; it is called with the learner's key to draw f.
        embed: function of these parameters and observations `[..., *shape]`, as the environment returns them, that
            returns `[..., K]`.
        num_envs: N.
        gamma: discount of the sums, in [0, 1]; a schedule counts learner updates.
        predictor: the entry of the parameters with those of the predictor.
        name: prefix of the entries and metrics that it writes; two such rewards in one chain need two names.

    Place: before the sampler. It needs `rollout(..., keep_next_obs=True)` and `learner.init(params, key)`. Observations
    should be standardized (`envs.normalize_observation`), because f is random.

    Raises:
        TypeError: `init` or `embed` is not a function. ValueError: (when initialized) there is no key, or the
            parameters have no entry `predictor`; (when traced) the rollout has another number of environments.

    Example:
        >>> import ppo_parts as pp
        >>> def init(key): ...
        >>> def embed(network, obs): ...
        >>> estimates = pp.chain(
        ...     pp.gae(gamma=.999, gae_lambda=.95),
        ...     pp.exploration.rnd_reward(init, embed, num_envs=8),
        ...     pp.within(
        ...         pp.gae(gamma=.99, gae_lambda=.95), name="intrinsic",
        ...         read={"reward": "extras.rnd_reward", "terminated": "extras.rnd_terminated",
        ...               "value": "extras.value_intrinsic", "next_value": "extras.next_value_intrinsic"},
        ...         write={"advantage": "extras.advantage_intrinsic", "target": "extras.target_intrinsic"},
        ...     ),
        ...     pp.combine_advantages({"advantage": 2., "extras.advantage_intrinsic": 1.}),
        ... )

    Reference: Burda et al. 2018, Exploration by Random Network Distillation, arXiv:1810.12894, sections 2.2 to 2.4.
    """
    where = "rnd_reward"
    for argument, function in {"init": init, "embed": embed}.items():
        if not callable(function):
            raise UserTypeError(f"{where}: {argument} must be a function, got {function!r}")
    check_count(where, "num_envs", num_envs)
    gamma = check_number(where, "gamma", gamma, 0, 1)

    def first(params: Params, key: Array | None = None) -> RNDState:
        _predictor(where, params, predictor)
        if key is None:
            raise UserValueError(f"{where}: the random network is drawn with a key: call learner.init(params, key)")
        return RNDState(init(key), jnp.zeros(num_envs), Moments.of(jnp.zeros(())))

    def update(batch: Batch, state: RNDState, context: Context) -> tuple[Batch, RNDState]:
        embedding = embed(state.target, batch.next_obs)
        predicted = embed(_predictor(where, context.params, predictor), batch.next_obs)
        error = jax.lax.stop_gradient(jnp.mean(jnp.square(predicted - embedding), axis=-1))
        if error.shape != batch.log_prob.shape:
            axes = ", ".join(map(str, batch.log_prob.shape))
            raise UserValueError(f"{where}: embed must return an array [{axes}, K] here, got shape {embedding.shape}")
        if error.shape[1:] != (num_envs,):
            raise UserValueError(f"{where}: num_envs={num_envs}, but the rollout has the axes {error.shape}, [T, N]")
        keep = jnp.ones_like(error, bool) if batch.mask is None else batch.mask.astype(bool)
        error, discount = jnp.where(keep, error, 0).astype(state.discounted.dtype), at(gamma, context.step)

        def add(total: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
            error, counts = now
            total = jnp.where(counts, discount * total + error, total).astype(total.dtype)
            return total, total

        last, sums = jax.lax.scan(add, state.discounted, (error, keep))
        mean = masked_mean(sums, keep)
        seen = Moments(mean, masked_mean(jnp.square(sums - mean), keep), jnp.sum(keep, dtype=sums.dtype))
        moments = appended_if_any(state.moments, seen)
        reward = (error / jnp.sqrt(moments.var + 1e-8)).astype(batch.log_prob.dtype)
        written = {f"{name}_reward": reward, f"{name}_terminated": jnp.zeros_like(reward)}
        written[f"{name}_target"] = embedding.astype(reward.dtype)
        batch = batch.add_extras(**written)
        measured = {f"{name}_reward": masked_mean(reward, batch.mask)}
        return batch.add_metrics(**measured), RNDState(state.target, last, moments)

    return Part(
        first,
        update,
        where,
        requires=("next_obs",),
        provides=tuple(f"extras.{name}_{what}" for what in ("reward", "terminated", "target")),
        reads=("log_prob", "mask"),
        place="before_sampler",
        needs_time=True,
        numbers=(gamma,),
    )


def rnd_loss(embed: Embed, *, coef: Numeric = 1.0, predictor: str = "predictor", name: str = "rnd") -> Part:
    r"""Add `coef` times the error of the predictor of `rnd_reward` as the loss `name`.

    .. math:: L_i = \frac{1}{K} \left\| \hat f(s'_i) - f(s'_i) \right\|^2

    Metric: `<name>_loss`, without the coefficient.

    Args:
        embed, predictor: as in `rnd_reward`.
        coef: coefficient, >= 0; a schedule counts learner updates.
        name: key in `losses`, and the `name` of the `rnd_reward`.

    Place: after the sampler, in a chain with `rnd_reward`.

    Example:
        >>> import ppo_parts as pp
        >>> def embed(network, obs): ...
        >>> part = pp.exploration.rnd_loss(embed)

    Reference: Burda et al. 2018, arXiv:1810.12894, section 2.2.
    """
    where = "rnd_loss"
    if not callable(embed):
        raise UserTypeError(f"{where}: embed must be a function, got {embed!r}")
    coef = check_number(where, "coef", coef, 0)

    def loss(batch: Batch, context: Context) -> Array:
        predicted = embed(_predictor(where, context.params, predictor), batch.next_obs)
        error = predicted - jax.lax.stop_gradient(batch.extras[f"{name}_target"])
        return jnp.mean(jnp.square(error), axis=-1).astype(batch.log_prob.dtype)

    return measured_loss_part(
        where, name, loss, coef=coef, requires=("next_obs", f"extras.{name}_target"), reads=("log_prob",)
    )


def _predictor(where: str, params: Params, entry: str) -> Any:
    if not isinstance(params, Mapping) or entry not in params:
        there = list(params) if isinstance(params, Mapping) else type(params).__name__
        raise UserValueError(
            f"{where}: the parameters must be a dictionary with an entry {entry!r} for the predictor, got {there}: "
            "draw it with the same init as the random network, and with another key"
        )
    return params[entry]
