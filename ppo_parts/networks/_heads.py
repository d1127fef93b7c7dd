"""Functions that make action distributions from the outputs of a network, for any network library."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import distributions
from .._base.checked import checked
from ..envs import count_numbers, count_options, is_discrete
from ..envs._spaces import is_tree, list_spaces, map_space
from ..errors import ShapeError, UserTypeError, UserValueError
from ..functional._arguments import fit
from ..functional._common import check_array

Array = jax.Array


def action_size(space: Any) -> int:
    """Return the number of outputs of a policy head, one for each option of each choice and for each real number.

    Raises:
        ValueError: if the space is neither discrete nor a box of vectors.

    Example:
        >>> from ppo_parts import envs
        >>> action_size(envs.make("CartPole-v1").action_space), action_size(envs.make("Pendulum-v1").action_space)
        (2, 1)
    """
    for box in (each for each in list_spaces(space) if not is_discrete(each)):
        if not count_numbers(box) or len(box.shape) != 1:
            must = "the actions of distributions must be vectors of at least one number"
            remedy = "wrap the environment in envs.flatten_action" if count_numbers(box) else "leave it out"
            raise UserValueError(f"action_size: {must}, but those of {box} have shape {tuple(box.shape)}: {remedy}")
    return sum(sum(count_options(each)) or count_numbers(each) for each in list_spaces(space))


def real_size(space: Any) -> int:
    """Return the number of real numbers in an action, each of which needs a standard deviation."""
    return sum(count_numbers(each) for each in list_spaces(space) if not is_discrete(each))


def _check_last_axis(name: str, x: Any, number: int, space: Any) -> None:
    if jnp.shape(x)[-1:] != (number,):
        message = f"must have {number} numbers along its last axis for {space}, got shape {jnp.shape(x)}"
        raise ShapeError(message, where="action_distribution", argument=name)


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
        head: `[..., n]` logits, concatenated if there are several choices, or `[..., D]` means. For a `Dict` or
            `Tuple`, the heads of its entries are concatenated, for a dict in alphabetical order.
        log_std: logarithm of the standard deviation, with the shape of the means or of their last axes; required for
            continuous actions, and otherwise unused.
        available: `[..., n]`, True where a discrete action may be taken; None means all actions. For a `Dict` or
            `Tuple`, a dict or a tuple of such masks.
        squash: whether to squash continuous actions into the box with tanh; otherwise they are unbounded
            (`envs.clip_action`).
        features: `[..., L]`, features of the state for gSDE, without gradient. `log_std` must then be `[L, D]`.

    Returns:
        `distributions.Categorical`, `MultiCategorical` for a `MultiDiscrete`, or a `Joint` for a `Dict` or `Tuple`. For
        a box, `Normal` or `TanhNormal`, and with `features`, `StateDependentNormal` or a `TanhNormal` of it.

    Raises:
        TypeError: if continuous actions have no standard deviation. ValueError: if `squash` or `features` is used with
            discrete actions, or `available` with continuous ones. ShapeError: if the number of outputs does not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from ppo_parts import envs
        >>> policy = action_distribution(envs.make("Pendulum-v1").action_space, jnp.zeros((3, 1)), jnp.zeros(1))
        >>> policy.mode().shape
        (3, 1)
    """
    head = check_array("action_distribution", "head", head)
    _check_last_axis("head", head, action_size(space), space)
    log_std = log_std if log_std is None else check_array("action_distribution", "log_std", log_std)
    if log_std is not None and jnp.ndim(log_std) and (number := real_size(space)):
        _check_last_axis("log_std", log_std, number, space)
        if features is None:
            fit("action_distribution", "log_std", log_std, (*head.shape[:-1], number), log_std.dtype)
    if features is not None:
        features = check_array("action_distribution", "features", features)
    if isinstance(available, Mapping) and is_tree(space) and (unknown := available.keys() - {*space.spaces}):
        says = f"available has masks of {', '.join(map(repr, sorted(unknown)))}"
        raise UserValueError(f"action_distribution: {says}, which the action space, {space}, does not have")
    if isinstance(available, (tuple, list)) and is_tree(space) and len(available) != len(space.spaces):
        says = f"available has {len(available)} masks for the {len(space.spaces)} entries of {space}"
        raise UserValueError(f"action_distribution: {says}: give None where all actions are available")
    if is_discrete(space) and (squash or features is not None):
        must = "squash must be False and features None, because the actions are discrete"
        raise UserValueError(f"action_distribution: {must}, {space}")
    if is_tree(space) and hasattr(available, "shape"):
        raise UserTypeError(f"action_distribution: available is one array, but needs one per entry of {space}")
    heads = _split(head, [action_size(each) for each in list_spaces(space)])
    log_stds = _split(log_std, [real_size(each) for each in list_spaces(space)])

    def of_entry(each: Any, mask: Any) -> Any:
        x, its_log_std = next(heads), next(log_stds)
        if options := count_options(each):
            logits = list(_split(x, options))
            if mask is not None:  # check each choice, because each needs an available option
                _check_last_axis("available", check_array("action_distribution", "available", mask), sum(options), each)
                logits = [*map(distributions.mask_logits, logits, _split(mask, options))]
            several = hasattr(each, "nvec")
            return distributions.MultiCategorical(logits) if several else distributions.Categorical(logits[0])
        if mask is not None:
            raise UserValueError(f"action_distribution: available must be None, because actions are continuous, {each}")
        if its_log_std is None:
            need = "continuous actions need log_std, a parameter of shape [D] for example"
            raise UserTypeError(f"action_distribution: {need}")
        if features is None:
            policy = distributions.Normal(x, jnp.broadcast_to(jnp.exp(its_log_std), x.shape))
        else:
            policy = distributions.StateDependentNormal(x, jax.lax.stop_gradient(features), jnp.exp(its_log_std))
        return distributions.TanhNormal(policy, each.low, each.high) if squash else policy

    made = map_space(of_entry, space, available)
    return distributions.Joint(made) if is_tree(space) else made


def _split(x: Any, sizes: Sequence[int]) -> Iterator[Any]:
    """Yield the piece of `x` for each entry of a space; None or a single number is shared by all entries."""
    if x is None or not jnp.ndim(x):
        return itertools.repeat(x)
    return (x[..., end - size : end] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True))
