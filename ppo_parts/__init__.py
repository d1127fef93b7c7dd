"""PPO from parts: what optax is to gradient descent, for proximal policy optimization.

Small pure parts chain into an update; `learner` runs it. See `docs/concepts.md`.
"""

from importlib.metadata import version as _version

from optax import cosine_decay_schedule as cosine_decay_schedule
from optax import linear_schedule as linear_schedule

from . import functional as functional
from ._advantage import advantage_normalize as advantage_normalize
from ._advantage import advantage_weight as advantage_weight
from ._advantage import gae as gae
from ._advantage import vtrace as vtrace
from ._chain import chain as chain
from ._errors import UserError as UserError
from ._errors import UserTimeoutError as UserTimeoutError
from ._errors import UserTypeError as UserTypeError
from ._errors import UserValueError as UserValueError
from ._learner import Learner as Learner
from ._learner import LearnerState as LearnerState
from ._learner import learner as learner
from ._learner import nonfinite_report as nonfinite_report
from ._losses import clipped_surrogate as clipped_surrogate
from ._losses import clipped_value_loss as clipped_value_loss
from ._losses import entropy_bonus as entropy_bonus
from ._losses import loss_weight as loss_weight
from ._losses import value_loss as value_loss
from ._optim import per_agent as per_agent
from ._optim import per_update_learning_rate as per_update_learning_rate
from ._phases import phases as phases
from ._rollout import Rollout as Rollout
from ._rollout import RolloutState as RolloutState
from ._rollout import rollout as rollout
from ._samplers import full_batch as full_batch
from ._samplers import given_indices as given_indices
from ._samplers import prioritized_sampler as prioritized_sampler
from ._samplers import segment_minibatches as segment_minibatches
from ._samplers import shuffled_minibatches as shuffled_minibatches
from ._stop import kl_early_stop as kl_early_stop
from ._types import Batch as Batch
from ._types import Context as Context
from ._types import Current as Current
from ._types import EmptyState as EmptyState
from ._types import Part as Part
from ._types import Stop as Stop
from ._types import identity as identity
from ._types import stateless as stateless
from .functional import ShapeError as ShapeError

__version__ = _version("ppo_parts")
