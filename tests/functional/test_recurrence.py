"""The ways to run the backward recursion: each against the float64 reference, the kernel emulated and lowered for CUDA.

No GPU is needed: in interpret mode Pallas turns the kernel into XLA operations, and lowering for another platform goes
as far as the Triton program.
"""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_parts as pp
from ppo_parts import functional as f
from ppo_parts.functional import _kernel, _recurrence
from tests import reference
from tests.common import rollout

WAYS = ("scan", "associative", "pallas")
CLIPS = {"rho_clip": 1.5, "c_clip": 0.8}
HYPERPARAMETERS = {"gae": {"gamma": 0.9, "gae_lambda": 0.8}, "vtrace": {"gamma": 0.9, "gae_lambda": 0.8} | CLIPS}
FLOATS = ("log_ratio", "reward", "value", "next_value")


# What is patched is no part of the key of jit's caches. The precision of products is one, and there are none here: no
# other test has these, so that none is given a program that was traced while something was patched, or the reverse.
PATCHED = {"emulated": "tensorfloat32", "pretended": "bfloat16"}


@pytest.fixture
def emulated(monkeypatch):
    """As if there were a GPU, for whoever asks for the kernel by name."""
    monkeypatch.setattr(_recurrence, "has_device", lambda platform: platform == "cuda")
    monkeypatch.setattr(_kernel, "backwards", functools.partial(_kernel.backwards, interpret=True))
    with jax.default_matmul_precision(PATCHED["emulated"]):
        yield


@pytest.fixture
def pretended(monkeypatch):
    """As if there were a GPU; the kernel is the real one and can be lowered, not run."""
    monkeypatch.setattr(_recurrence, "has_device", lambda platform: platform == "cuda")
    with jax.default_matmul_precision(PATCHED["pretended"]):
        yield


def arrays(name, shape, dtype=jnp.float32, given=("truncated", "mask"), seed=0):
    """What the estimator reads, by name."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(3, size=shape, p=(0.6, 0.2, 0.2))
    floats = {field: jnp.asarray(rng.normal(size=shape), dtype) for field in FLOATS[name == "gae" :]}
    ends = {"terminated": kind == 1, "truncated": (kind == 2).astype(np.float32), "mask": rng.random(shape) < 0.7}
    return floats | {field: jnp.asarray(x) for field, x in ends.items() if field == "terminated" or field in given}


def estimator(name, way):
    """A new function each time: what a fixture patches is no part of jit's key."""
    return jax.jit(lambda named: getattr(f, name)(**named, **HYPERPARAMETERS[name], implementation=way))


@pytest.mark.parametrize("way", WAYS)
def test_equals_the_reference(emulated, way):
    """Also with ragged blocks of rows and columns, wide rows, and hyperparameters that vary from step to step."""
    for name, shape, given in (
        ("gae", (11, 3, 13), ("truncated", "mask")),
        ("vtrace", (11, 3, 13), ()),
        ("vtrace", (8, 64), ("truncated", "mask")),
    ):
        named = arrays(name, shape, given=given)
        expected = getattr(reference, name)(**named, **HYPERPARAMETERS[name])
        for x, y in zip(estimator(name, way)(named), expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    rng = np.random.default_rng(1)
    per_step = {field: jnp.asarray(rng.uniform(0.3, 1, (8, 64)), jnp.float32) for field in HYPERPARAMETERS["vtrace"]}
    got = f.vtrace(**named, **per_step, implementation=way)
    for n in (0, 63):
        column = {field: x[:, n] for field, x in (named | per_step).items()}
        for x, y in zip(got, f.vtrace(**column, implementation="scan"), strict=True):
            np.testing.assert_allclose(x[:, n], y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_bfloat16_is_accumulated_in_float32(emulated, way):
    named = arrays("vtrace", (20, 2), jnp.bfloat16)
    expected = reference.vtrace(**named, **HYPERPARAMETERS["vtrace"])
    for x, y in zip(estimator("vtrace", way)(named), expected, strict=True):
        assert x.dtype == jnp.bfloat16
        np.testing.assert_allclose(x.astype(jnp.float32), y, rtol=2**-8, atol=1e-4)  # one rounding, at the end
    ones = jnp.ones(512, jnp.bfloat16)  # a bfloat16 sum stays at 256
    assert jax.jit(lambda x: f.reverse_recurrence(x, x, implementation=way))(ones)[0] == 512
    delta, trace = np.random.default_rng(0).normal(size=(2, 11, 35)).astype(np.float32)
    expected, later = np.zeros_like(delta), 0.0
    for t in reversed(range(11)):
        expected[t] = later = delta[t] + trace[t] * later
    got = f.reverse_recurrence(jnp.asarray(delta), jnp.asarray(trace), implementation=way)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def accesses(jaxpr, inside=False):
    """The accesses to memory of a kernel in a program."""
    for eqn in jaxpr.eqns:
        here = inside or eqn.primitive.name == "pallas_call"
        if here and eqn.primitive.name in ("masked_load", "masked_swap", "get", "swap"):
            yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from accesses(inner, here)


@pytest.mark.parametrize(("name", "arrays_of_steps", "carried"), [("gae", 7, 1), ("vtrace", 9, 2)])
def test_the_kernel_touches_every_array_once_and_nothing_beyond_its_columns(emulated, name, arrays_of_steps, carried):
    """35 columns end in the middle of the second block: each access has a mask, but those of single numbers."""
    named = arrays(name, (11, 35), given=("truncated",))
    found = list(accesses(jax.make_jaxpr(estimator(name, "pallas"))(named).jaxpr))
    masked = [eqn for eqn in found if eqn.invars[-1].aval.dtype == bool and eqn.invars[-1].aval.shape == (32,)]
    assert len(masked) == 11 * arrays_of_steps + carried
    assert all(eqn.invars[0].aval.shape == (1,) for eqn in found if eqn not in masked)


def test_kernel_under_vmap(emulated):
    named = arrays("vtrace", (6, 35, 2))
    gamma = jnp.array([0.5, 0.9])

    def one(named, gamma):
        return f.vtrace(**named, gamma=gamma, gae_lambda=0.8, implementation="pallas")

    batched = jax.vmap(one, (2, 0), 2)(named, gamma)
    for n in range(2):
        expected = one({field: x[..., n] for field, x in named.items()}, gamma[n])
        for x, y in zip(batched, expected, strict=True):
            np.testing.assert_allclose(x[..., n], y, rtol=1e-6, atol=1e-6)


def test_derivatives_of_the_kernel_are_the_scans(emulated):
    named = arrays("vtrace", (9, 5))
    floats = {field: named.pop(field) for field in FLOATS}
    weights = jax.random.normal(jax.random.key(0), (3, 9, 5))

    def loss(way, floats, gamma):
        out = f.vtrace(**floats, **named, gamma=gamma, gae_lambda=0.8, stop_gradient=False, implementation=way)
        return sum(jnp.vdot(jnp.square(x), w) for x, w in zip(out, weights, strict=True))

    def derivatives(way):
        of = functools.partial(loss, way)
        first = jax.value_and_grad(of, (0, 1))(floats, 0.9)
        forward = jax.jvp(of, (floats, 0.9), (floats, 1.0))
        second = jax.grad(jax.grad(of, 1), 1)(floats, 0.9)
        return first, forward, second

    kernel, scan = (jax.tree.leaves(jax.jit(lambda way=way: derivatives(way))()) for way in ("pallas", "scan"))
    for x, y in zip(kernel, scan, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3)


def lowered(function, platform, *args):
    return jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def test_auto_follows_the_platform_of_the_program(pretended):
    """Compiled for CUDA it is the kernel; for the CPU, on the same machine, it is the scan, which runs here."""
    for name, dtype in (("vtrace", jnp.bfloat16), ("gae", jnp.float32)):
        named = arrays(name, (11, 35), dtype)
        auto = estimator(name, "auto")
        assert "triton" in lowered(auto, "cuda", named)
        assert "triton" not in lowered(auto, "rocm", named)
        for x, y in zip(auto(named), estimator(name, "scan")(named), strict=True):
            np.testing.assert_array_equal(x, y)
        batched = jax.vmap(auto)(jax.tree.map(lambda x: jnp.stack([x, x]), named))
        assert batched[0].shape == (2, 11, 35)
    gradient = jax.grad(lambda value: auto(named | {"value": value}).target.sum().astype(jnp.float32))
    assert "triton" not in lowered(gradient, "cuda", named["value"])


def test_auto_takes_no_kernel_where_there_is_none(pretended, monkeypatch):
    with jax.enable_x64(True):
        named = arrays("gae", (11, 35), jnp.float64)
        assert "triton" not in lowered(estimator("gae", "auto"), "cuda", named)
        with pytest.raises(ValueError, match=r'gae: implementation="pallas" cannot run, .* float64; leave'):
            estimator("gae", "pallas")(named)
    with pytest.raises(ValueError, match=r"nothing to compute in an array of shape \(3, 0\)"):
        estimator("gae", "pallas")(arrays("gae", (3, 0)))
    assert estimator("gae", "auto")(arrays("gae", (3, 0))).advantage.shape == (3, 0)
    monkeypatch.delattr("jax.experimental.pallas.triton.load")  # as in older versions of JAX
    assert "triton" not in lowered(estimator("gae", "auto"), "cuda", arrays("gae", (4, 2)))
    with pytest.raises(ValueError, match=r"has no jax\.experimental\.pallas\.triton\.load"):
        estimator("gae", "pallas")(arrays("gae", (4, 2)))


def test_auto_without_a_gpu_is_the_scan():
    named = arrays("gae", (4, 2))
    assert str(jax.make_jaxpr(estimator("gae", "auto"))(named)) == str(jax.make_jaxpr(estimator("gae", "scan"))(named))
    program = "import sys, jax.numpy as jnp; from ppo_parts import functional as f; x = jnp.ones(3); "
    program += "f.gae(x, x, x, x, gamma=1., gae_lambda=1.); print('jax.experimental.pallas' in sys.modules)"
    out = subprocess.run((sys.executable, "-c", program), capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


@pytest.mark.skipif(_recurrence.has_device("cuda"), reason="there is a GPU")
def test_the_kernel_by_name_needs_a_gpu():
    named = arrays("vtrace", (4, 2))
    remedy = 'no NVIDIA GPU is among JAX\'s devices; leave implementation at "auto"'
    with pytest.raises(ValueError, match=f'vtrace: implementation="pallas" cannot run, {remedy}'):
        estimator("vtrace", "pallas")(named)
    with pytest.raises(ValueError, match="reverse_recurrence: implementation"):
        f.reverse_recurrence(named["reward"], named["value"], implementation="pallas")
    with pytest.raises(ValueError, match=r"gae: implementation must be one of 'auto', .* got 'triton'"):
        estimator("gae", "triton")(arrays("gae", (4, 2)))


def test_parts_pass_it_on(emulated):
    batch, context = rollout(), pp.Context(key=jax.random.key(0))
    for make in (pp.gae, pp.vtrace):
        with pytest.raises(ValueError, match="implementation must be one of"):
            make(gamma=0.9, gae_lambda=0.8, implementation="unrolled")
        for way in WAYS:
            part = make(gamma=0.9, gae_lambda=0.8, implementation=way)
            jaxpr = str(jax.make_jaxpr(lambda batch, part=part: part.update(batch, (), context)[0])(batch))
            assert ("pallas_call" in jaxpr) == (way == "pallas")
            assert ("scan[" in jaxpr) == (way != "associative")  # the kernel loops, too
