"""Parts for exploration: random network distillation, which rewards new observations, and self-imitation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._base.checked import Count, checked
from .._base.hyperparameters import Numeric, check_number
from .._base.moments import Moments
from .._base.trees import select
from .._core.batch import Array, Batch, Params
from .._core.part import Context, Part, read_numbers
from ..errors import UserValueError
from ..functional import masked_mean
from ..functional._common import boolean_mask, check_same_shape, zero_masked
from .common import check_numbers, loss_part, moments_of
from .losses import predicted

Embed = Callable[[Any, Any], Array]


class RNDState(NamedTuple):
    """State of `rnd_reward`: the random network, the discounted sums `[N]`, their moments, and the last step."""

    target: Any
    discounted: Array
    moments: Moments
    step: Array


@checked
def rnd_reward(
    init: Callable[[Array], Any], embed: Embed, *, num_envs: Count, gamma: Numeric = 0.99, predictor: str = "predictor"
) -> Part:
    r"""Write a reward for observations that a network cannot yet predict: random network distillation (RND).

    .. math:: e_t = \frac{1}{K} \left\| \hat f(s_{t+1}) - f(s_{t+1}) \right\|^2, \qquad
              r_t = \frac{e_t}{\sigma}, \qquad R_t = \gamma R_{t-1} + e_t

    The network f is random and fixed; `rnd_loss` trains the predictor :math:`\hat f` to agree with it. :math:`\sigma`
    is the running standard deviation of the discounted sums R, which continue from episode to episode. Masked steps
    have no reward and do not enter the sums. A rollout enters the sums once, even with a `refresh` or `phases`.

    The part writes three `extras`: `rnd_reward`, from which a second `gae`, in `within`, computes an advantage;
    `rnd_terminated`, which is 0 everywhere, so that this advantage looks beyond the ends of episodes; and `rnd_target`,
    `[T, N, K]`, f of the next observations, for `rnd_loss`. Metric: `rnd_reward`, the mean. If a chain has a second
    such part, put it and its loss in `within`, too.

    Args:
        init: function of a key that returns the parameters of a network.
        embed: function that maps these parameters and observations `[..., *shape]` to `[..., K]`.
        num_envs: number of environments, N.
        gamma: discount of the sums, in [0, 1].
        predictor: key of the predictor's parameters in the parameters of the policy.

    Place: before the sampler. It needs `rollout(..., keep_next_obs=True)` and `learner.init(params, key)`. Observations
    should be standardized (`envs.normalize_observation`), because f is random.

    Example:
        >>> import ppo_parts as pp
        >>> def init(key): ...
        >>> def embed(network, obs): ...
        >>> part = pp.exploration.rnd_reward(init, embed, num_envs=8)

    Reference: Burda et al. 2018, Exploration by Random Network Distillation, arXiv:1810.12894, sections 2.2 to 2.4.
    """
    where = "rnd_reward"
    numbers = {"gamma": check_number(where, "gamma", gamma)}

    def first(params: Params, key: Array | None = None) -> RNDState:
        _predictor(where, params, predictor)
        if key is None:
            raise UserValueError(f"{where}: the random network is drawn with a key: call learner.init(params, key)")
        return RNDState(init(key), jnp.zeros(num_envs), Moments.of(jnp.zeros(())), jnp.int32(-1))

    def update(batch: Batch, state: RNDState, context: Context) -> tuple[Batch, RNDState]:
        embedding = embed(state.target, batch.next_obs)
        prediction = embed(_predictor(where, context.params, predictor), batch.next_obs)
        error = jax.lax.stop_gradient(jnp.mean(jnp.square(prediction - embedding), axis=-1))
        if error.shape != batch.log_prob.shape:
            axes = ", ".join(map(str, batch.log_prob.shape))
            raise UserValueError(f"{where}: embed must return an array [{axes}, K] here, got shape {embedding.shape}")
        if error.shape[1:] != (num_envs,):
            remedy = ": fold agents into environments, with envs.fold_agents(env)" if error.ndim > 2 else ""
            says = f"num_envs={num_envs}, but the rollout has the axes {error.shape}, [T, N]"
            raise UserValueError(f"{where}: {says}{remedy}")
        keep = boolean_mask(batch.mask, error)
        error = jnp.where(keep, error, 0).astype(state.discounted.dtype)
        discount = read_numbers(numbers, batch, context.step)["gamma"]

        def add(total: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
            error, counts = now
            total = jnp.where(counts, discount * total + error, total).astype(total.dtype)
            return total, total

        last, sums = jax.lax.scan(add, state.discounted, (error, keep))
        last = jnp.where(jnp.isfinite(last), last, state.discounted)  # a non-finite error must not persist
        # A refresh or another phase runs this part again on a rollout, which must not enter the sums twice.
        new = last, state.moments.appended(moments_of(sums, keep)), jnp.asarray(context.step, jnp.int32)
        state = RNDState(state.target, *select(state.step != context.step, new, state[1:]))
        reward = (error / jnp.sqrt(state.moments.var + 1e-8)).astype(batch.log_prob.dtype)
        target, never = embedding.astype(reward.dtype), jnp.zeros_like(reward)
        batch = batch.add_extras(rnd_reward=reward, rnd_terminated=never, rnd_target=target)
        return batch.add_metrics(rnd_reward=masked_mean(reward, batch.mask)), state

    provides = ("extras.rnd_reward", "extras.rnd_terminated", "extras.rnd_target")
    return Part(
        first, update, where, requires=("next_obs",), provides=provides, reads=("log_prob", "mask"),
        place="before_sampler", needs_time=True, numbers=numbers,
    )  # fmt: skip


@checked
def rnd_loss(embed: Embed, *, coef: Numeric = 1.0, predictor: str = "predictor", name: str = "rnd") -> Part:
    r"""Add `coef` times the prediction error of the predictor in `rnd_reward` as the loss `name`.

    .. math:: L_i = \frac{1}{K} \left\| \hat f(s'_i) - f(s'_i) \right\|^2

    Metric: `<name>_loss`, without the coefficient.

    Args:
        embed, predictor: as in `rnd_reward`.
        coef: coefficient, >= 0.
        name: key in `losses`.

    Place: after the sampler, in a chain with `rnd_reward`.

    Example:
        >>> import ppo_parts as pp
        >>> def embed(network, obs): ...
        >>> part = pp.exploration.rnd_loss(embed)
    """
    where = "rnd_loss"

    def loss(batch: Batch, context: Context) -> Array:
        prediction = embed(_predictor(where, context.params, predictor), batch.next_obs)
        error = prediction - jax.lax.stop_gradient(batch.extras["rnd_target"])
        return jnp.mean(jnp.square(error), axis=-1).astype(batch.log_prob.dtype)

    requires = ("next_obs", "extras.rnd_target")
    return loss_part(where, name, loss, coef=coef, requires=requires, reads=("log_prob",))


def _predictor(where: str, params: Params, entry: str) -> Any:
    if not isinstance(params, Mapping) or entry not in params:
        there = list(params) if isinstance(params, Mapping) else type(params).__name__
        raise UserValueError(
            f"{where}: the parameters must be a dictionary with an entry {entry!r} for the predictor, got {there}: "
            "draw it with the same init as the random network, and with another key"
        )
    return params[entry]


@checked
def self_imitation(*, coef: Numeric = 1.0, value_coef: Numeric = 0.01, name: str = "self_imitation") -> Part:
    r"""Add a loss, `name`, that imitates the policy's own actions whose return was higher than the value.

    .. math:: L_i = c \left( -\log\pi(a_i|s_i) (R_i - V(s_i))_+ + \frac{\beta}{2} (R_i - V(s_i))_+^2 \right)

    R is `batch.target`, so use `gae` with `gae_lambda=1`, or read another field with `within`. Metrics: `<name>_loss`,
    without the coefficient c, and `<name>_fraction`, the share of steps whose return was higher.

    Args:
        coef: coefficient c, >= 0.
        value_coef: weight beta of the value term, >= 0.
        name: key in `losses`.

    Place: after the sampler, usually in a `phase` that replays rollouts; needs a critic.

    Example:
        >>> import ppo_parts as pp
        >>> imitate = pp.within(pp.exploration.self_imitation(), read={"target": "extras.returns"}, name="monte_carlo")

    Reference: Oh et al. 2018, Self-Imitation Learning, arXiv:1806.05635.
    """
    where = "self_imitation"

    def loss(batch: Batch, context: Context, value_coef: Any) -> tuple[Array, dict[str, Array]]:
        fields = (batch.current.log_prob, predicted(where, batch), jax.lax.stop_gradient(batch.target))
        check_same_shape(where, log_prob=fields[0], value=fields[1], target=fields[2])
        log_prob, value, target = zero_masked(batch.mask, *fields)
        better = jnp.maximum(target - value, 0)
        both = -log_prob * jax.lax.stop_gradient(better) + value_coef * 0.5 * jnp.square(better)
        measured = {f"{name}_loss": both, f"{name}_fraction": better > 0}
        dtype = batch.current.log_prob.dtype
        return both.astype(dtype), {key: x.astype(dtype) for key, x in measured.items()}

    numbers, reads = check_numbers(where, value_coef=value_coef), ("current.log_prob", "current.value")
    return loss_part(where, name, loss, numbers, coef=coef, requires=("target",), reads=reads)
