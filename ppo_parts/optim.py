"""Optax transformations that use the step, the metrics or the losses that the learner passes."""

from ._parts.optim import natural_gradient as natural_gradient
from ._parts.optim import scale_by_kl_adaptive_rate as scale_by_kl_adaptive_rate
from ._parts.optim import scale_by_update_schedule as scale_by_update_schedule

__all__ = [name for name in dir() if name[0] != "_"]  # for `help`
