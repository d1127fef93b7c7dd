"""Parts that make a policy explore: random network distillation and self-imitation."""

from ._parts.exploration import rnd_loss as rnd_loss
from ._parts.exploration import rnd_reward as rnd_reward
from ._parts.exploration import self_imitation as self_imitation

__all__ = [name for name in dir() if name[0] != "_"]  # for `help`
