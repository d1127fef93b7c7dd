"""PPO from parts: what optax is to gradient descent, for proximal policy optimization.

Small pure parts chain into an update; `learner` runs it. See `docs/concepts.md`.
"""

from . import agents as agents
from . import critics as critics
from . import distributions as distributions
from . import envs as envs
from . import errors as errors
from . import exploration as exploration
from . import functional as functional
from . import optim as optim
from . import regularizers as regularizers
from . import symmetry as symmetry
from . import tokens as tokens
from ._base.hyperparameters import field as field
from ._core.batch import Batch as Batch
from ._core.batch import Current as Current
from ._core.batch import Output as Output
from ._core.batch import Policy as Policy
from ._core.chain import chain as chain
from ._core.chain import identity as identity
from ._core.checks import nonfinite_report as nonfinite_report
from ._core.learner import Learner as Learner
from ._core.learner import LearnerState as LearnerState
from ._core.learner import learner as learner
from ._core.learner import part_state as part_state
from ._core.metrics import Metrics as Metrics
from ._core.part import Context as Context
from ._core.part import Part as Part
from ._core.part import stateless as stateless
from ._core.phases import phase as phase
from ._core.phases import phases as phases
from ._core.pieces import microbatched as microbatched
from ._core.sampling import Windows as Windows
from ._core.sampling import sampler as sampler
from ._parts.advantage import advantage_normalize as advantage_normalize
from ._parts.advantage import advantage_weight as advantage_weight
from ._parts.advantage import gae as gae
from ._parts.advantage import vtrace as vtrace
from ._parts.lens import combine_advantages as combine_advantages
from ._parts.lens import within as within
from ._parts.losses import clipped_surrogate as clipped_surrogate
from ._parts.losses import clipped_value_loss as clipped_value_loss
from ._parts.losses import entropy_bonus as entropy_bonus
from ._parts.losses import policy_diagnostics as policy_diagnostics
from ._parts.losses import policy_loss as policy_loss
from ._parts.losses import value_loss as value_loss
from ._parts.optim import clipped_adam as clipped_adam
from ._parts.optim import linear_schedule as linear_schedule
from ._parts.regularizers import kl_penalty as kl_penalty
from ._parts.replay import replay as replay
from ._parts.samplers import full_batch as full_batch
from ._parts.samplers import given_indices as given_indices
from ._parts.samplers import prioritized_sampler as prioritized_sampler
from ._parts.samplers import segment_minibatches as segment_minibatches
from ._parts.samplers import shuffled_minibatches as shuffled_minibatches
from ._parts.samplers import time_chunks as time_chunks
from ._parts.stop import early_stop as early_stop
from ._parts.stop import kl_early_stop as kl_early_stop
from .envs._rollout import Rollout as Rollout
from .envs._rollout import RolloutState as RolloutState
from .envs._rollout import rollout as rollout

__version__ = "0.3.0"
