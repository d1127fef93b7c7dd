"""What a distribution must have to be used here, and the check of it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import jax

from .._base.doors import checked
from .._base.errors import UserTypeError

Array = jax.Array

_CALLS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "log_prob": ("log_prob", ("value",), ()),
    "sample": ("sample", (), ("seed",)),
    "sample_shape": ("sample", (), ("seed", "sample_shape")),
    "entropy": ("entropy", (), ()),
    "mode": ("mode", (), ()),
    "kl_divergence": ("kl_divergence", ("other",), ()),
}
"""For each need: the method, its positional arguments and its keywords."""


class Distribution(Protocol):
    """What a policy returns as its distribution: any object with these two methods, also one of another library.

    | needed by | methods |
    |---|---|
    | the learner, for each loss | `log_prob(value)` |
    | rollouts | `sample(seed=key)`; they use `sample_and_log_prob(seed=key)` if there is one |
    | `entropy_bonus` | `entropy()`; if it is missing or raises `NotImplementedError`, `sample` with `sample_shape` |
    | actions without noise (evaluation, `export`) | `mode()` |
    | `kl_penalty` with the exact divergence | `kl_divergence(other)` |

    With several shards, microbatches or `keep_distribution`, it must be a pytree of arrays that begin with the axes of
    the batch, too. Those of this module have all of this, except that `TanhNormal` has no entropy in closed form.
    """

    def log_prob(self, value: Array) -> Array:
        """Log-probability of actions, one number for each element of the batch: summed over the action's axes."""

    def sample(self, *, seed: Array, sample_shape: Sequence[int] = ()) -> Array:
        """Draw actions, `[*sample_shape, ...]`, with a key of `jax.random`."""


@checked
def check_distribution(where: str, distribution: Any, needs: Sequence[str] = ("log_prob",)) -> None:
    """Raise unless a distribution has methods that can be called as they will be.

    Args:
        where: what needs the methods; the error begins with it.
        distribution: what a policy returned.
        needs: among "log_prob", "sample" (with a seed), "sample_shape" (`sample` with that, too), "entropy", "mode" and
            "kl_divergence".

    Raises:
        TypeError: a method is missing, or does not take these arguments.

    Example:
        >>> import jax.numpy as jnp, ppo_parts as pp
        >>> pp.distributions.check_distribution("rollout", pp.distributions.Categorical(jnp.zeros(3)), ("sample",))
    """
    array = isinstance(distribution, jax.Array)
    kind = f"an array of shape {distribution.shape}" if array else type(distribution).__name__
    for need in needs:
        method, positional, keywords = _CALLS[need]
        call = f"{method}({', '.join([*positional, *(f'{name}=' for name in keywords)])})"
        if not callable(getattr(distribution, method, None)):
            raise UserTypeError(
                f"{where}: a distribution needs {call}, but {kind} has no {method}: use one of "
                "ppo_parts.distributions, such as Categorical(logits), or one of distrax"
            )
        try:
            inspect.signature(getattr(distribution, method)).bind(*positional, **dict.fromkeys(keywords))
        except TypeError as error:
            raise UserTypeError(f"{where}: a distribution needs {call}, but {method} of {kind}: {error}") from None
        except ValueError:  # a callable without a signature
            pass
