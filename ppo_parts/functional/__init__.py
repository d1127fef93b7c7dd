"""The mathematics of PPO, as functions that map arrays to arrays and need no `Batch`, state or network.

Axis 0 is time wherever time matters, and any axes may follow. The float dtype is preserved (narrow floats are computed
in float32), and losses are returned per element. The beginning of each docstring states which arguments receive
gradients. Where `mask` is 0, the result and its gradient are 0, whatever the inputs contain. A hyperparameter is a
number or an array whose shape fits the other arrays; the derivative of a loss with respect to it is correct almost
everywhere. In signatures, `Floats` are arrays of floats, `Real` ones may also hold integers or flags, `Fixed` ones
receive no gradient, and `Wide` ones have one more axis, the last.

Concrete values are checked, and errors name the argument. All functions raise `ShapeError` if shapes do not match
(nothing is broadcast), `TypeError` if an argument is not of the documented type, and `ValueError` for numbers outside
the documented range, flags other than 0 and 1, and unknown option names. Traced values cannot be checked. The functions
compile once for each shape, even when they are called outside `jit`.
"""

from ._arguments import Aggregation as Aggregation
from ._arguments import Baseline as Baseline
from ._arguments import Implementation as Implementation
from ._arguments import KLEstimator as KLEstimator
from ._arguments import MaskMode as MaskMode
from ._arguments import Scale as Scale
from ._errors import ShapeError as ShapeError
from ._gae import Advantages as Advantages
from ._gae import gae as gae
from ._gae import next_values as next_values
from ._gae import reward_to_go as reward_to_go
from ._groups import aggregate as aggregate
from ._groups import group_advantage as group_advantage
from ._groups import outcome_reward as outcome_reward
from ._permutation import permutation as permutation
from ._policy_losses import bounds_loss as bounds_loss
from ._policy_losses import clipped_surrogate as clipped_surrogate
from ._policy_losses import discovered_policy_optimization as discovered_policy_optimization
from ._policy_losses import importance_sampling_weight as importance_sampling_weight
from ._policy_losses import importance_weighted_surrogate as importance_weighted_surrogate
from ._policy_losses import mirror_descent_surrogate as mirror_descent_surrogate
from ._policy_losses import mirror_loss as mirror_loss
from ._policy_losses import rollback_surrogate as rollback_surrogate
from ._policy_losses import simple_policy_optimization as simple_policy_optimization
from ._policy_losses import smoothness_loss as smoothness_loss
from ._recurrence import reverse_recurrence as reverse_recurrence
from ._sampling import importance_weights as importance_weights
from ._sampling import sample_without_replacement as sample_without_replacement
from ._sampling import segment_priorities as segment_priorities
from ._sequence_losses import cispo as cispo
from ._sequence_losses import clip_cov as clip_cov
from ._sequence_losses import gmpo as gmpo
from ._sequence_losses import gspo as gspo
from ._sequence_losses import kl_cov as kl_cov
from ._sequence_losses import policy_gradient_loss as policy_gradient_loss
from ._sequence_losses import sapo as sapo
from ._sequence_losses import sequence_log_ratio as sequence_log_ratio
from ._statistics import advantage_normalize as advantage_normalize
from ._statistics import approx_kl as approx_kl
from ._statistics import clip_fraction as clip_fraction
from ._statistics import explained_variance as explained_variance
from ._statistics import masked_mean as masked_mean
from ._value_losses import categorical_value as categorical_value
from ._value_losses import categorical_value_loss as categorical_value_loss
from ._value_losses import clipped_value_loss as clipped_value_loss
from ._value_losses import huber_value_loss as huber_value_loss
from ._value_losses import quantile_value_loss as quantile_value_loss
from ._value_losses import rescale_head as rescale_head
from ._value_losses import value_loss as value_loss
from ._vtrace import VTrace as VTrace
from ._vtrace import vtrace as vtrace
