"""Optax transformations that use the learner's step or metrics: rates that follow a schedule or a divergence."""

from ._parts.optim import scale_by_kl_adaptive_rate as scale_by_kl_adaptive_rate
from ._parts.optim import scale_by_update_schedule as scale_by_update_schedule
