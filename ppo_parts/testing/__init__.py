"""The laws that every part obeys, for parts of your own: `check_part` runs them. It needs JAX and NumPy only.

The tests of this repository hold its own parts to the same laws.
"""

from ._check import check_hyperparameters as check_hyperparameters
from ._check import check_part as check_part
from ._example import Softmax as Softmax
from ._example import example_batch as example_batch
from ._example import example_context as example_context
from ._laws import LAWS as LAWS
from ._laws import Subject as Subject
