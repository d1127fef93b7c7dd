"""Operations on pytrees that JAX does not have."""

from __future__ import annotations

from typing import Any

import jax


def without_weak_types(tree: Any) -> Any:
    """The tree without weak types (a Python number in a state has one), which would change from call to call."""

    def strengthened(x: Any) -> Any:
        dtype = jax.numpy.result_type(x)
        return x if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key) else jax.lax.convert_element_type(x, dtype)

    return jax.tree.map(strengthened, tree)
