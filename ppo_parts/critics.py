"""Parts for critics: your own losses, and targets normalized by running moments."""

from ._parts.critics import ValueStatistics as ValueStatistics
from ._parts.critics import critic_loss as critic_loss
from ._parts.critics import normalize_target as normalize_target

__all__ = [name for name in dir() if name[0] != "_"]  # for `help`
