"""Action distributions (Gaussian, gSDE, squashed Gaussian, beta, categorical and joint), and action masks.

Any object with the methods of `Distribution` works, including the distributions of distrax. The distributions of this
module are pytrees of arrays that begin with the same batch axes. They compute at least in float32, and their results
have the dtype of their parameters. Parameters of a wrong type raise a `TypeError`; shapes that do not fit, and known
numbers out of range, raise a `ValueError`.
"""

from ._beta import Beta as Beta
from ._categorical import Categorical as Categorical
from ._categorical import MultiCategorical as MultiCategorical
from ._categorical import mask_logits as mask_logits
from ._distribution import Distribution as Distribution
from ._joint import Joint as Joint
from ._normal import Normal as Normal
from ._normal import StateDependentNormal as StateDependentNormal
from ._tanh_normal import TanhNormal as TanhNormal
