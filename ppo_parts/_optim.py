"""What optax cannot know: how many learner updates there have been."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ._hyperparameters import at, number


def per_update_learning_rate(learning_rate: Any | Callable[[Any], Any]) -> optax.GradientTransformationExtraArgs:
    r"""Scale updates by :math:`-\alpha(k)`, where k counts *learner updates*: constant within each.

    optax's own schedules count gradient steps, of which an update has num_minibatches * num_epochs, or fewer where it
    stopped early; mistaking one unit for the other makes a learning rate decay that many times too fast.

    Args:
        learning_rate: a number, >= 0, or a schedule of the number of updates so far (0 during the first).

    Returns:
        An optax transformation for the end of an `optax.chain`, in place of `optax.scale_by_learning_rate`. `learner`
        hands it the extra argument `step`.

    Example:
        >>> import optax, ppo_parts as pp
        >>> annealed = pp.linear_schedule(2.5e-4, 0., 976)  # over 976 updates
        >>> optimizer = optax.chain(
        ...     optax.clip_by_global_norm(.5), optax.scale_by_adam(eps=1e-5), pp.per_update_learning_rate(annealed)
        ... )

    Reference: Huang et al. 2022, The 37 Implementation Details of PPO, detail 4.
    """

    learning_rate = number("per_update_learning_rate", "learning_rate", learning_rate, 0)

    def init(params: Any) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None, *, step: Any = None, **extra: Any) -> tuple[Any, Any]:
        del params, extra
        if step is None:
            raise ValueError("per_update_learning_rate: needs the extra argument step=..., which learner() passes")
        scale = at(learning_rate, step)
        return jax.tree.map(lambda u: -jnp.asarray(scale, u.dtype) * u, updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def transformation(where: str, optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """The optimizer, ready for extra arguments; raises `TypeError` if it is none."""
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        called = f": did you forget to call it, {optimizer.__name__}(...)?" if hasattr(optimizer, "__name__") else ""
        raise TypeError(f"{where}: the optimizer must be an optax transformation, got {optimizer!r}{called}")
    return optax.with_extra_args_support(optimizer)


def per_agent(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Apply an optimizer to each agent's parameters apart: every leaf has the axis of agents in front.

    What works elementwise (Adam) is the same with and without it; global norms, as in `optax.clip_by_global_norm`, are
    then those of one agent, so that one agent's gradient does not shrink another's.

    Args:
        optimizer: any optax transformation.

    Example:
        >>> import optax, ppo_parts as pp
        >>> optimizer = pp.per_agent(optax.chain(optax.clip_by_global_norm(.5), optax.adam(3e-4)))
    """
    inner = transformation("per_agent", optimizer)

    def init(params: Any) -> Any:
        sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(params)}
        if len(sizes) != 1 or () in sizes:
            raise ValueError(
                "per_agent: every parameter needs the axis of agents in front, and the sizes of the first axes are "
                f"{sorted(sizes)}; shared parameters need no per_agent"
            )
        return jax.vmap(inner.init)(params)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return jax.vmap(lambda u, s, p: inner.update(u, s, p, **extra))(updates, state, params)

    return optax.GradientTransformationExtraArgs(init, update)
