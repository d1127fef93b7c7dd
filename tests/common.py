"""What the tests share: the linear policy and the rollouts of `ppo_parts.testing`, and comparisons of trees."""

from typing import Any

import jax
import numpy as np

from ppo_parts.distributions import Categorical as Categorical
from ppo_parts.testing._example import ACTIONS as ACTIONS
from ppo_parts.testing._example import FLOATS as FLOATS
from ppo_parts.testing._example import OBS as OBS
from ppo_parts.testing._example import SEGMENTS as SEGMENTS
from ppo_parts.testing._example import TIME as TIME
from ppo_parts.testing._example import evaluate as evaluate
from ppo_parts.testing._example import evaluate_gaussian as evaluate_gaussian
from ppo_parts.testing._example import make_params as make_params
from ppo_parts.testing._example import poisoned as poisoned
from ppo_parts.testing._example import rollout as rollout


def assert_same(actual: Any, expected: Any) -> None:
    """Two trees are equal to the last bit, NaN included."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for path, x in jax.tree_util.tree_leaves_with_path(actual):
        y = dict(jax.tree_util.tree_leaves_with_path(expected))[path]
        np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))


def assert_close(actual: Any, expected: Any, rtol: float = 2e-5, atol: float = 1e-6) -> None:
    """Two trees are equal but for rounding."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))
