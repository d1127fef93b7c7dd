"""What rollouts and environments need to know about an action space."""

from __future__ import annotations

from typing import Any


def count_options(space: Any) -> tuple[int, ...]:
    """Return how many options each choice of an action has: `(n,)` for `Discrete`, `nvec`, or `()` for a box.

    Example:
        >>> from ppo_parts import envs
        >>> envs.count_options(envs.MultiDiscrete((3, 2))), envs.count_options(envs.Discrete(4))
        ((3, 2), (4,))
    """
    if hasattr(space, "nvec"):
        return tuple(map(int, space.nvec))
    return (int(space.n),) if hasattr(space, "n") else ()
