"""gae and vtrace against the slow reference, for whatever hypothesis thinks of.

Few layouts, because each is a compilation; the numbers, masks and episode ends are what varies.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_parts import functional as f
from tests import reference

ESTIMATORS = {"gae": jax.jit(f.gae), "vtrace": jax.jit(f.vtrace)}
LAYOUTS = (  # shape, dtype, and the flags that are given
    ((1, 1), "float32", ()),
    ((5, 2), "float32", ("truncated", "mask")),
    ((5, 2), "bfloat16", ("mask",)),
    ((4, 2, 3), "float32", ("truncated",)),
    ((4, 2, 3), "bfloat16", ("truncated", "mask")),
)


@st.composite
def batches(draw):
    """Arguments of an estimator by name. Numbers are small multiples of 1/4, so that hypothesis can shrink them."""
    shape, dtype, flags = draw(st.sampled_from(LAYOUTS))
    size = int(np.prod(shape))

    def numbers(low, high):
        drawn = draw(st.lists(st.integers(4 * low, 4 * high), min_size=size, max_size=size))
        return jnp.asarray(np.reshape(drawn, shape) / 4, dtype)

    named = {name: numbers(-8, 8) for name in ("reward", "value", "next_value")} | {"log_ratio": numbers(-2, 2)}
    kind = numbers(0, 1)  # both ends at once, too: the termination goes first
    named["terminated"] = kind == 1
    if "truncated" in flags:
        named["truncated"] = numbers(0, 1) >= 0.75
    if "mask" in flags:
        named["mask"] = numbers(0, 1) >= 0.25
    return named


hyperparameters = st.fixed_dictionaries(
    {
        "gamma": st.sampled_from((0.0, 0.5, 0.99, 1.0)),
        "gae_lambda": st.sampled_from((0.0, 0.3, 0.95, 1.0)),
        "rho_clip": st.sampled_from((0.5, 1.0, 4.0)),
        "c_clip": st.sampled_from((0.5, 1.0, 4.0)),
    }
)


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(batch=batches(), chosen=hyperparameters)
def test_equals_the_reference(name, batch, chosen):
    if name == "gae":
        del batch["log_ratio"], chosen["rho_clip"], chosen["c_clip"]
    actual, expected = ESTIMATORS[name](**batch, **chosen), getattr(reference, name)(**batch, **chosen)
    # bfloat16 inputs are exact here (multiples of 1/4) and the sums are float32: one rounding, of 2^-9, at the end
    rtol, atol = (1e-5, 1e-4) if batch["value"].dtype == jnp.float32 else (2**-8, 1e-3)
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == batch["value"].dtype
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=rtol, atol=atol)
