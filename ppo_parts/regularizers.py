"""Parts that regularize a policy: an entropy target, bounds, smoothness, perturbed and averaged policies."""

from ._parts.regularizers import adaptive_entropy_bonus as adaptive_entropy_bonus
from ._parts.regularizers import bounds_loss as bounds_loss
from ._parts.regularizers import perturbed_mean as perturbed_mean
from ._parts.regularizers import proximal_average as proximal_average
from ._parts.regularizers import smoothness_loss as smoothness_loss

__all__ = [name for name in dir() if name[0] != "_"]  # for `help`
