"""Functions for several agents: zero-sum games, and an optimizer for each agent."""

from ._parts.optim import per_agent as per_agent
from ._parts.zero_sum import zero_sum as zero_sum

__all__ = [name for name in dir() if name[0] != "_"]  # for `help`
