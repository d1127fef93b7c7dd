"""Distributions over actions from the output of a network, for any network library."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .. import distributions
from .._base.doors import checked
from .._base.errors import UserTypeError, UserValueError
from ..envs import count_options, is_discrete, size
from ..functional._common import check_array

Array = jax.Array


def action_size(space: Any) -> int:
    """Return how many outputs a policy head needs: one for each option of each choice, or D for D real numbers.

    Raises:
        ValueError: the space is neither discrete nor a box of vectors.

    Example:
        >>> from ppo_parts import envs
        >>> action_size(envs.make("CartPole-v1").action_space), action_size(envs.make("Pendulum-v1").action_space)
        (2, 1)
    """
    number = sum(count_options(space)) or size(space)
    if not is_discrete(space) and len(space.shape) != 1:
        raise UserValueError(
            f"action_size: the actions of distributions are vectors, but those of {space} have shape "
            f"{tuple(space.shape)}: wrap the environment in envs.flatten_action"
        )
    return number


@checked
def action_distribution(
    space: Any,
    head: Array,
    log_std: Any = None,
    *,
    available: Any = None,
    squash: bool = False,
    features: Array | None = None,
) -> Any:
    """Make the distribution over the actions of a space from the output of a network.

    Args:
        space: the action space, as in `ppo_parts.envs.Env`.
        head: `[..., n]` logits, those of several choices one after another; or `[..., D]` means.
        log_std: logarithm of the standard deviation, with the shape of `head` or of its last axes; required for
            continuous actions, and otherwise unused.
        available: `[..., n]`, True where a discrete action may be taken; None: all actions.
        squash: squash continuous actions into the box with tanh. Otherwise they are unbounded: clip them before they
            enter the environment.
        features: `[..., L]`, features of the state for gSDE, which receive no gradient; `log_std` is `[L, D]` then.

    Returns:
        `distributions.Categorical`, or `MultiCategorical` for a `MultiDiscrete` space; `Normal` or `TanhNormal`, and
        with `features` `StateDependentNormal` or `StateDependentTanhNormal`.

    Raises:
        TypeError: continuous actions without a standard deviation. ValueError: `squash` or `features` with discrete
            actions.

    Example:
        >>> import jax.numpy as jnp
        >>> from ppo_parts import envs
        >>> policy = action_distribution(envs.make("Pendulum-v1").action_space, jnp.zeros((3, 1)), jnp.zeros(1))
        >>> policy.mode().shape
        (3, 1)
    """
    check_array("action_distribution", "head", head)
    if features is not None:
        check_array("action_distribution", "features", features)
    options = count_options(space)
    if options:
        check_continuous("action_distribution", space, squash=squash)
        if features is not None:
            raise UserValueError(
                f"action_distribution: features must be None, because the actions are discrete, {space}"
            )
        logits = head if available is None else distributions.mask_logits(head, available)
        several = hasattr(space, "nvec")
        return distributions.MultiCategorical(logits, options) if several else distributions.Categorical(logits)
    if log_std is None:
        raise UserTypeError(
            "action_distribution: continuous actions need log_std, a parameter of shape [D] for example"
        )
    if features is not None:
        noise = jax.lax.stop_gradient(features), jnp.exp(log_std)
        if squash:
            return distributions.StateDependentTanhNormal(head, *noise, space.low, space.high)
        return distributions.StateDependentNormal(head, *noise)
    scale = jnp.broadcast_to(jnp.exp(log_std), head.shape)
    return distributions.TanhNormal(head, scale, space.low, space.high) if squash else distributions.Normal(head, scale)


def check_continuous(where: str, space: Any, **options: bool) -> None:
    """Raise if one of the options, which are for continuous actions, is given for discrete ones."""
    for name, given in options.items():
        if given and is_discrete(space):
            raise UserValueError(
                f"must be False, because the actions are discrete, {space}, got {given}", where=where, argument=name
            )
