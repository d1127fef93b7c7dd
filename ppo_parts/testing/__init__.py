"""Checks of the laws that every part obeys (`check_part`), and of a recorded update (`compare_update`).

The tests of this repository check its own parts against the same laws. `_check` runs the laws in `_laws` on the batch
and policy of `_example`. `_compare` reads a `_record` and computes it again with a chain (`_replay`). Where the results
differ, it searches (`_explain`) the table in `_choices`, which edits the chain as text (`_calls`).
"""

from ._check import check_hyperparameters as check_hyperparameters
from ._check import check_part as check_part
from ._choices import CHAIN as CHAIN
from ._choices import OPTIMIZER as OPTIMIZER
from ._compare import UpdateComparison as UpdateComparison
from ._compare import compare_update as compare_update
from ._example import example_batch as example_batch
from ._example import example_context as example_context
from ._laws import LAWS as LAWS
from ._laws import Subject as Subject
from ._replay import Difference as Difference
