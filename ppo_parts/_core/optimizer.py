"""Functions that wrap an optax transformation as the optimizer of a learner, and tell whether it skips gradients."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..errors import UserError, UserTypeError
from .part import Part


def wrap_optimizer(where: str, optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer, extended to accept extra arguments; raise `TypeError` if it is not an optimizer."""
    if isinstance(optimizer, Part) or not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        called = f": did you forget to call it, {optimizer.__name__}(...)?" if hasattr(optimizer, "__name__") else ""
        got = f"the part {optimizer.name!r}" if isinstance(optimizer, Part) else f"{optimizer!r}{called}"
        raise UserTypeError(f"{where}: the optimizer must be an optax transformation, got {got}")
    takes = _keywords_of(optimizer.update)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        given = extra if takes is None else {name: value for name, value in extra.items() if name in takes}
        try:
            result = optimizer.update(updates, state, params, **given)
        except UserError:
            raise
        except KeyError as error:
            there = ", ".join(name for name in extra.get("metrics", ()) if "nonfinite/" not in name)
            remedy = f"if a metric is missing, add the part that records it; a minibatch has {there}"
            error.add_note(f"{where}: the optimizer raised this; {remedy}")
            raise
        except (TypeError, ValueError, AttributeError) as error:
            raise UserTypeError(
                f"{where}: the optimizer's update(gradient, state, params, {', '.join(f'{x}=' for x in given)}) raised "
                f"{type(error).__name__}: {error}. The state may be that of another optimizer. If this one is only for "
                "some parameters, such as scale_by_muon for matrices, use optax.masked or optax.partition. If it needs "
                "other arguments, or parameters of its own type (optax.lookahead), write a loop of your own"
            ) from error
        expected, got = ([jnp.shape(leaf) for leaf in jax.tree.leaves(x)] for x in (updates, result[0]))
        if expected != got:
            raise UserTypeError(
                f"{where}: the optimizer returned updates of the shapes {got} for a gradient of {expected}. One that "
                "only measures (optax.measure_with_ema) belongs in optax.monitor, chained with an optimizer; one that "
                "aggregates per-example gradients (optax.contrib.dpsgd) needs a loop of your own"
            )
        return result

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def _keywords_of(function: Any) -> frozenset[str] | None:
    """Return the names of the keyword arguments that a function accepts, or None if it accepts any name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a callable without a signature
        return frozenset()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


def last_finite(opt_state: Any) -> Any:
    """Return whether the last gradient was finite; None unless the optimizer skips others (`optax.apply_if_finite`)."""
    found = [jnp.all(x) for _, x in optax.tree_utils.tree_get_all_with_path(opt_state, "last_finite")]
    return jnp.all(jnp.stack(found)) if found else None
