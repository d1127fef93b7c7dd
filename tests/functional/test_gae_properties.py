"""Properties of gae and vtrace, for whatever hypothesis thinks of: the reference, and that trajectories are apart.

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
REFERENCES = {"gae": reference.gae, "vtrace": reference.vtrace}
LAYOUTS = (  # shape, dtype, and the flags that are given
    ((1, 1), "float32", ()),
    ((5, 2), "float32", ("truncated", "mask")),
    ((5, 2), "bfloat16", ("mask",)),
    ((4, 2, 3), "float32", ("truncated",)),
    ((4, 2, 3), "bfloat16", ("truncated", "mask")),
)
quick = settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def batches(draw, layouts=LAYOUTS):
    """Arguments of an estimator by name. Numbers are small multiples of 1/4, so that hypothesis can shrink them."""
    shape, dtype, flags = draw(st.sampled_from(layouts))
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


def run(functions, name, batch, chosen):
    """The named estimator on what of `batch` and of the hyperparameters it takes."""
    if name == "gae":
        batch = {field: x for field, x in batch.items() if field != "log_ratio"}
        chosen = {field: x for field, x in chosen.items() if not field.endswith("clip")}
    return [np.asarray(x) for x in functions[name](**batch, **chosen)]


@pytest.mark.parametrize("name", ESTIMATORS)
@quick
@given(batch=batches(), chosen=hyperparameters)
def test_equals_the_reference(name, batch, chosen):
    actual, expected = run(ESTIMATORS, name, batch, chosen), run(REFERENCES, name, batch, chosen)
    # bfloat16 inputs are exact here (multiples of 1/4) and the sums are float32: one rounding, of 2^-9, at the end
    rtol, atol = (1e-5, 1e-4) if batch["value"].dtype == jnp.float32 else (2**-8, 1e-3)
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == batch["value"].dtype
        np.testing.assert_allclose(x.astype(np.float64), y, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", ESTIMATORS)
@quick
@given(batch=batches((((6, 2), "float32", ("truncated", "mask")),)), chosen=hyperparameters, data=st.data())
def test_a_batch_cut_where_an_episode_ends_gives_the_same(name, batch, chosen, data):
    """Cut every segment after step 2, by a termination or by a truncation: the halves know nothing of each other."""
    end = data.draw(st.sampled_from(("terminated", "truncated")))
    batch[end] = batch[end].at[2].set(True)
    whole = run(ESTIMATORS, name, batch, chosen)
    first = run(ESTIMATORS, name, {field: x[:3] for field, x in batch.items()}, chosen)
    second = run(ESTIMATORS, name, {field: x[3:] for field, x in batch.items()}, chosen)
    for x, a, b in zip(whole, first, second, strict=True):
        np.testing.assert_allclose(x, np.concatenate([a, b]), rtol=1e-6, atol=1e-6)


@quick
@given(batch=batches(LAYOUTS[1:2]), chosen=hyperparameters)
def test_vtrace_on_policy_equals_gae(batch, chosen):
    batch["log_ratio"] = 0 * batch["log_ratio"]
    chosen = {name: max(x, 1.0) if name.endswith("clip") else x for name, x in chosen.items()}
    advantage, target = run(ESTIMATORS, "gae", batch, chosen)
    error, vtrace_target, _ = run(ESTIMATORS, "vtrace", batch, chosen)
    np.testing.assert_array_equal(error, advantage)
    np.testing.assert_array_equal(vtrace_target, target)
