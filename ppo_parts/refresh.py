"""The protocol of refreshes: how often the parts before the sampler run again, and on whose estimates."""

from ._core.refresh import EachEpoch as EachEpoch
from ._core.refresh import Estimates as Estimates
from ._core.refresh import PhaseState as PhaseState
from ._core.refresh import Refresh as Refresh
from ._core.refresh import Upstream as Upstream
