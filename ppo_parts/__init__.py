"""PPO from parts: what optax is to gradient descent, for proximal policy optimization.

Small pure parts chain into an update; `learner` runs it. See `docs/concepts.md`.
"""

from optax import cosine_decay_schedule as cosine_decay_schedule
from optax import linear_schedule as linear_schedule

from . import distributions as distributions
from . import functional as functional
from ._advantage import advantage_normalize as advantage_normalize
from ._advantage import advantage_weight as advantage_weight
from ._advantage import gae as gae
from ._advantage import vtrace as vtrace
from ._chain import chain as chain
from ._chain import identity as identity
from ._checks import nonfinite_report as nonfinite_report
from ._errors import MissingPackage as MissingPackage
from ._errors import UserError as UserError
from ._errors import UserTimeoutError as UserTimeoutError
from ._errors import UserTypeError as UserTypeError
from ._errors import UserValueError as UserValueError
from ._learner import Learner as Learner
from ._learner import LearnerState as LearnerState
from ._learner import learner as learner
from ._learner import part_state as part_state
from ._lens import combine_advantages as combine_advantages
from ._lens import within as within
from ._losses import clipped_surrogate as clipped_surrogate
from ._losses import clipped_value_loss as clipped_value_loss
from ._losses import entropy_bonus as entropy_bonus
from ._losses import loss_weight as loss_weight
from ._losses import policy_diagnostics as policy_diagnostics
from ._losses import policy_loss as policy_loss
from ._losses import value_loss as value_loss
from ._metrics import Metrics as Metrics
from ._microbatch import microbatched as microbatched
from ._optim import clipped_adam as clipped_adam
from ._optim import per_agent as per_agent
from ._optim import scale_by_update_schedule as scale_by_update_schedule
from ._phases import phase as phase
from ._phases import phases as phases
from ._proximal import importance_correction as importance_correction
from ._proximal import perturbed_mean as perturbed_mean
from ._proximal import proximal_average as proximal_average
from ._proximal import self_imitation as self_imitation
from ._refresh import Estimates as Estimates
from ._refresh import Refresh as Refresh
from ._refresh import Upstream as Upstream
from ._refresh import UpstreamState as UpstreamState
from ._regularizers import adaptive_entropy_bonus as adaptive_entropy_bonus
from ._regularizers import bounds_loss as bounds_loss
from ._regularizers import kl_penalty as kl_penalty
from ._regularizers import smoothness_loss as smoothness_loss
from ._replay import replay as replay
from ._rollout import Rollout as Rollout
from ._rollout import RolloutState as RolloutState
from ._rollout import rollout as rollout
from ._sampler import Windows as Windows
from ._sampler import sampler as sampler
from ._samplers import full_batch as full_batch
from ._samplers import given_indices as given_indices
from ._samplers import prioritized_sampler as prioritized_sampler
from ._samplers import segment_minibatches as segment_minibatches
from ._samplers import shuffled_minibatches as shuffled_minibatches
from ._samplers import time_chunks as time_chunks
from ._sequences import aggregate as aggregate
from ._sequences import clip_cov as clip_cov
from ._sequences import group_advantage as group_advantage
from ._sequences import kl_cov as kl_cov
from ._sequences import outcome_reward as outcome_reward
from ._sequences import reward_to_go as reward_to_go
from ._stop import early_stop as early_stop
from ._stop import kl_early_stop as kl_early_stop
from ._types import Batch as Batch
from ._types import Context as Context
from ._types import Current as Current
from ._types import EmptyState as EmptyState
from ._types import Output as Output
from ._types import Part as Part
from ._types import Policy as Policy
from ._types import Stop as Stop
from ._types import stateless as stateless
from .functional import ShapeError as ShapeError

__version__ = "0.2.0"
