"""Parts for tasks with a symmetry: mirrored copies of the rollout, and a loss that makes the policy symmetric."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .. import functional
from .._base.checked import checked
from .._base.hyperparameters import Numeric
from .._base.trees import are_alike, shapes_of
from .._core.batch import PER_SEGMENT, PER_STEP, POLICY_READS, Array, Batch, field_axes
from .._core.part import Context, Part, stateless
from .._core.policy import evaluate_policy
from .._core.shards import beside
from ..errors import UserTypeError, UserValueError
from .common import loss_part
from .regularizers import check_no_memory, mode_of


def _mirror(where: str, name: str, mirror: Callable[[Any], Any], x: Any) -> Any:
    """Return `mirror(x)` after checking that it has the structure, shapes and dtypes of `x`."""
    mirrored = mirror(x)
    if not are_alike(mirrored, x):
        got = f"got {shapes_of(mirrored)} for {shapes_of(x)}"
        raise UserTypeError(f"must keep structure, shapes and dtypes, {got}", where=where, argument=name)
    return mirrored


@checked
def mirror_segments(*, observation: Callable[[Any], Any], action: Callable[[Any], Any]) -> Part:
    r"""Append a mirrored copy of every segment to the rollout, giving `[T, 2 N]`, for tasks with a symmetry.

    .. math:: (s, a) \mapsto (T_o(s),\, T_a(a))

    The copies repeat all other fields, such as log-probabilities, values, advantages and targets, so the ratio of a
    copy is :math:`\pi(T_a(a)|T_o(s)) / \pi_{old}(a|s)`, which is 1 for a symmetric policy. The copies follow the
    segments of their shard.

    Args:
        observation: function T_o of observations with leaves `[T, N, ...]`; for example, it permutes the entries of the
            last axis and changes their signs.
        action: function T_a of actions `[T, N, ...]`.

    Place: before the sampler, after `gae` or `vtrace`, which then run on N segments only. `refresh="minibatch"` cannot
    follow it. The policy must have no memory, and the rollout no `keep_distribution`, because distributions cannot be
    mirrored.

    Example:
        >>> import jax.numpy as jnp, ppo_parts as pp
        >>> signs = jnp.array([1., -1., -1.])  # a pole that falls to the other side
        >>> symmetric = pp.chain(
        ...     pp.gae(gamma=.99, gae_lambda=.95),
        ...     pp.symmetry.mirror_segments(observation=lambda obs: signs * obs, action=lambda action: -action),
        ...     pp.shuffled_minibatches(8, num_epochs=4), pp.clipped_surrogate(clip_eps=.2), pp.value_loss(coef=.5),
        ... )

    Reference: Mittal et al. 2024, Symmetry Considerations for Learning Task Symmetric Robot Policies, arXiv:2403.04359;
    rsl_rl, `use_data_augmentation`.
    """
    where = "mirror_segments"

    def update(batch: Batch) -> Batch:
        if batch.carry is not None:
            raise UserValueError(f"{where}: the policy has a memory, whose state after mirrored segments is not known")
        if batch.behavior is not None:
            raise UserValueError(
                f"{where}: distributions cannot be mirrored: leave keep_distribution out of the rollout, and use an "
                'estimator of the divergence other than "analytic"'
            )
        mirrored = batch.replace(
            obs=_mirror(where, "observation", observation, batch.obs),
            action=_mirror(where, "action", action, batch.action),
        )
        if batch.next_obs is not None:
            mirrored = mirrored.replace(next_obs=_mirror(where, "observation", observation, batch.next_obs))

        def both(name: str, axis: int) -> Any:
            pairs = getattr(batch, name), getattr(mirrored, name)
            return jax.tree.map(lambda *pair: beside(jnp.stack(pair), batch.shards, axis), *pairs)

        return batch.replace(**{name: both(name, axis) for name, axis in field_axes(batch).items()})

    written = tuple(name for name in (*PER_STEP, *PER_SEGMENT) if name not in ("behavior", "carry", "reset"))
    return stateless(
        update, name=where, requires=("advantage",), provides=written, reads=written, place="before_sampler"
    )


@checked
def mirror_loss(
    *, observation: Callable[[Any], Any], action: Callable[[Array], Array], coef: Numeric = 1.0, name: str = "mirror"
) -> Part:
    r"""Add `coef` times the squared distance from a symmetric policy, `functional.mirror_loss`, as the loss `name`.

    The policy is evaluated once more, on mirrored observations. Its mode there is compared with the mirrored mode,
    which is a constant. If there are several symmetries, add a part with a different name for each. Metric:
    `<name>_loss`, without the coefficient.

    Args:
        observation: function T_o of observations with leaves `[M, ...]` or `[T, M, ...]`.
        action: function T_a of actions `[..., D]`.
        coef: coefficient, >= 0.
        name: key in `losses`.

    Place: after the sampler. The policy must have continuous actions and no memory.

    Example:
        >>> import jax.numpy as jnp, ppo_parts as pp
        >>> signs = jnp.array([1., -1., -1.])  # a pole that falls to the other side
        >>> part = pp.symmetry.mirror_loss(observation=lambda obs: signs * obs, action=lambda action: -action, coef=.5)
    """
    where = "mirror_loss"

    def loss(batch: Batch, context: Context) -> Array:
        check_no_memory(where, batch)
        seen = batch.replace(obs=_mirror(where, "observation", observation, batch.obs))
        other = evaluate_policy(context.evaluate, context.params, seen).distribution
        mirrored = _mirror(where, "action", action, mode_of(where, batch.current.distribution))
        return functional.mirror_loss(mode_of(where, other), mirrored, mask=batch.mask)

    return loss_part(where, name, loss, coef=coef, reads=("current.distribution", *POLICY_READS))
