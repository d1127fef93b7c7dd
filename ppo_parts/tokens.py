"""Parts for sequences of tokens: outcome rewards, group advantages, and aggregation of losses."""

from ._parts.tokens import aggregate as aggregate
from ._parts.tokens import group_advantage as group_advantage
from ._parts.tokens import importance_correction as importance_correction
from ._parts.tokens import outcome_reward as outcome_reward
from ._parts.tokens import reward_to_go as reward_to_go

__all__ = [name for name in dir() if name[0] != "_"]  # for `help`
