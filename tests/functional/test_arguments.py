"""Laws of every public function, tested from one table: bad arguments, programs, dtypes, export, derivatives, masks."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from ppo_parts import errors
from ppo_parts import functional as f
from ppo_parts.functional._common import check_floating
from tests.registry import BEYOND

T, N, K = 8, 6, 5
FUNCTIONS = {name: x for name, x in vars(f).items() if inspect.isfunction(x)}
SHAPES = {  # shapes other than [T, N], by function and argument, or by argument
    **dict.fromkeys(("last_value", "score", "probabilities", "indices"), "n"),
    **dict.fromkeys(("logits", "quantiles", "mean", "mirrored", "other"), "tnk"),
    "kernel": "tk",
    "bias": "k",
    **{f"group_advantage {name}": "n" for name in ("reward", "group", "length", "mask")},
}
NUMBERS = {
    "clip_eps": 0.1, "clip_eps_high": 0.15, "dual_clip": 1.2, "high": 1.5, "fraction": 0.3, "cov_low": -1.0,
    "cov_high": 2.0, "bound": 0.1, "sigma": 0.7, "gamma": 0.9, "length": 4.0,
}  # fmt: skip
OTHERS = {
    "support": [-2.0, -1.0, 0.0, 1.0, 2.5], "old": (0.0, 1.0), "new": (0.5, 2.0), "key": jax.random.key(0),
    "size": 3, "axis": 0, "baseline": "length_weighted", "by": "sequence_sum",
}  # fmt: skip
FLAGS = ("terminated", "truncated", "mask")
WHOLE = ("group", "indices")
POSITIVE = {f"discovered_policy_optimization {name}" for name in ("alpha", "beta")} | {"mirror_descent_surrogate coef"}
SINGLE = ("eps", "kappa", "kl_coef", "cov_low", "cov_high", "fraction", "sigma")  # one number for all elements
SIZED = ("rescale_head", "sample_without_replacement", "permutation", "group_advantage")  # their sizes are static


def kinds(name):
    """Return the kind of every argument of a function."""
    own = inspect.getclosurevars(FUNCTIONS[name]).nonlocals["kinds"]
    assert list(own) == list(inspect.signature(FUNCTIONS[name]).parameters)
    return own


def arguments(name, dtype=jnp.float32, flags=bool, sizes=(T, N, K)):
    """Return a value for every argument of a function: the arrays, and the others."""
    sizes, rng, arrays, others = dict(zip("tnk", sizes, strict=True)), np.random.default_rng(0), {}, {}
    for argument, kind in kinds(name).items():
        shape = tuple(sizes[axis] for axis in SHAPES.get(f"{name} {argument}", SHAPES.get(argument, "tn")))
        if argument in OTHERS:
            others[argument] = OTHERS[argument]
        elif kind.role == "number":
            others[argument] = NUMBERS.get(argument, 0.5)
        elif kind.role == "static":
            others[argument] = inspect.signature(FUNCTIONS[name]).parameters[argument].default
        elif not all(isinstance(n, int) for n in shape):
            own = flags if argument in FLAGS else jnp.int32 if argument in WHOLE else dtype
            arrays[argument] = jax.ShapeDtypeStruct(shape, own)
        elif argument in FLAGS:
            arrays[argument] = jnp.asarray((rng.random(shape) < 0.3) ^ (argument == "mask"), flags)
        elif argument in WHOLE:
            arrays[argument] = jnp.arange(shape[0]) % 3
        elif argument == "probabilities":
            arrays[argument] = jnp.asarray(np.arange(1, 1 + shape[0]) / np.arange(1, 1 + shape[0]).sum(), dtype)
        else:
            drawn = rng.normal(size=shape)
            arrays[argument] = jnp.asarray(np.abs(drawn) if argument == "length" else drawn, dtype)
    return arrays, others


def call(name, arrays, others):
    return FUNCTIONS[name](**arrays, **others)


NO_ARRAYS = (None, "x", [1.0], 1j * jnp.ones((T, N)), jnp.ones((T, N), jnp.float8_e4m3fn), np.array("x"), object())
BAD = {  # values that no argument of a role may have
    "float": NO_ARRAYS,
    "array": NO_ARRAYS,
    "number": (None, "x", [0.5], True, 1j, np.nan, jnp.float8_e4m3fn(0.5), jnp.full((9, 9, 9, 9), 0.5)),
    "static": ("x", 1j, [1], 0.5, np.ones(2)),
    "other": (None, "x", 1j, [[1.0], 2.0], object()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bad_values_are_refused_by_name(name):
    """Whatever is wrong with an argument, the error is one of ours and names the argument."""
    arrays, others = arguments(name)
    given, unclear = arrays | others, []
    for argument, kind in kinds(name).items():
        optional = inspect.signature(FUNCTIONS[name]).parameters[argument].default is None
        bad = BAD[kind.role] + (NO_ARRAYS if argument in arrays else ())
        bad = [value for value in bad if value is not None or not optional]
        bad += [jnp.full(1, 0.5)] if argument in SINGLE else []
        bad += [np.ones((T, N), int)] if kind.check is check_floating else []
        if argument in arrays and len(arrays) > 1 and name not in ("rescale_head", "permutation"):
            bad.append(arrays[argument][..., None])
        for value in (*bad, *([2 * np.ones(np.shape(arrays[argument]))] if argument in FLAGS else [])):
            try:
                FUNCTIONS[name](**{**given, argument: value})
                unclear.append(f"{argument}={value!r} is accepted")
            except Exception as error:
                if not isinstance(error, (errors.UserError, f.ShapeError)) or argument not in str(error):
                    unclear.append(f"{argument}={value!r}: {type(error).__name__}: {str(error)[:100]}")
        if kind.role == "number":
            for number in (0.0,) if f"{name} {argument}" in POSITIVE else BEYOND[argument]:
                with pytest.raises(errors.UserValueError, match=rf"{argument} must lie in"):
                    FUNCTIONS[name](**{**given, argument: number})
            with pytest.raises(TypeError, match=argument):
                jax.eval_shape(lambda x, k=argument: FUNCTIONS[name](**{**given, k: x}), jnp.ones((), complex))
    assert unclear == []


def test_a_call_outside_jit_compiles_once():
    for name in FUNCTIONS:
        given = arguments(name)
        call(name, *given)
        with jax.no_tracing():
            call(name, *given)
    x = jnp.ones(77)
    with jax.no_tracing(), pytest.raises(RuntimeError, match="re-tracing"):
        f.value_loss(x, x)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_strict_promotion_and_export(name):
    """Every dtype and kind of flag works without promotion; an exported program takes any number of environments."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        for dtype, flags in ((jnp.float32, bool), (jnp.float64, jnp.int32), (jnp.bfloat16, jnp.float32)):
            arrays, others = arguments(name, dtype, flags)
            floats = {k: x for k, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating) and k not in FLAGS}
            rest = {k: x for k, x in arrays.items() if k not in floats}

            def total(floats, rest=rest, others=others):
                outputs = jax.tree.leaves(call(name, {**floats, **rest}, others))
                return sum(jnp.sum(x.astype(jnp.float64)) for x in outputs), outputs

            outputs = jax.eval_shape(jax.grad(total, has_aux=True), floats)[1]
            indices = name in ("sample_without_replacement", "permutation")
            assert {x.dtype for x in outputs} == {jnp.dtype(jnp.int32 if indices else dtype)}
    if name in SIZED:
        return
    arrays, others = arguments(name, sizes=(T, *export.symbolic_shape("n", constraints=("n >= 1",)), K))
    exported = export.export(jax.jit(lambda arrays: call(name, arrays, others)))(arrays)
    if hasattr(export, "register_namedtuple_serialization"):
        export.deserialize(exported.serialize())


NUMERIC = [name for name in FUNCTIONS if any(kind.role == "number" for kind in kinds(name).values())]
NUMERIC.remove("reward_to_go")  # its output is a constant, as that of the estimators is by default


@pytest.mark.parametrize("name", NUMERIC)
def test_derivatives_with_respect_to_hyperparameters(name):
    """Almost everywhere, they equal differences."""
    with jax.enable_x64(True):
        arrays, others = arguments(name, jnp.float64)
        numbers = {k: others.pop(k) for k, kind in kinds(name).items() if kind.role == "number"}
        if "stop_gradient" in others:
            others["stop_gradient"] = False
        weights = np.random.default_rng(1).normal(size=1000)

        @jax.jit
        @jax.value_and_grad
        def total(numbers):
            outputs = [jnp.ravel(x) for x in jax.tree.leaves(call(name, arrays, {**others, **numbers}))]
            return sum(jnp.vdot(x, weights[: x.size]) for x in outputs)

        _, gradient = total(numbers)
        for k, x in numbers.items():
            true = (total({**numbers, k: x + 1e-6})[0] - total({**numbers, k: x - 1e-6})[0]) / 2e-6
            np.testing.assert_allclose(gradient[k], true, rtol=1e-6, atol=1e-7, err_msg=k)
    moved = {k for k, x in gradient.items() if x}
    flat = {"clip_cov": {"fraction", "cov_low", "cov_high"}, "kl_cov": {"fraction"}, "clip_fraction": set(numbers)}
    assert moved == set(numbers) - flat.get(name, set())


FLOWING = ("log_ratio", "value", "next_value", "reward", "mean", "other", "logits", "quantiles", "loss", "x", "delta")
FLOWING += ("trace", "kernel", "bias")
FLOWS = {  # the arguments to which gradients flow, if these are not `FLOWING`
    **dict.fromkeys(("explained_variance", "segment_priorities", "importance_weights", "clip_fraction"), ()),
    **dict.fromkeys(("sample_without_replacement", "permutation", "group_advantage", "outcome_reward"), ()),
    **dict.fromkeys(("importance_sampling_weight", "reward_to_go"), ()),
    "advantage_normalize": ("advantage",),
    "next_values": ("value", "last_value", "final_value"),
}
VARIANTS = {name: ({}, {"stop_gradient": False}) for name in ("gae", "vtrace")}
VARIANTS["gae"] += ({"mask_mode": "skip", "stop_gradient": False},)
EACH = [(name, options) for name in FUNCTIONS for options in VARIANTS.get(name, ({},))]


@pytest.mark.parametrize(("name", "options"), EACH)
def test_gradients_flow_where_they_should_and_masked_elements_reach_nothing(name, options):
    arrays, others = arguments(name, flags=jnp.float32)
    if "mask_mode" in options:
        arrays["mask"] = arrays["mask"].at[-1].set(1)  # otherwise padding would have nothing to bootstrap from
    floats = {k: x for k, x in arrays.items() if k not in (*FLAGS, *WHOLE)}
    rest = {k: x for k, x in arrays.items() if k not in floats}

    def total(floats, rest):
        outputs = call(name, {**floats, **rest}, {**others, **options})
        each = [jnp.vdot(jnp.cos(jnp.arange(x.size)), x.ravel()) for x in jax.tree.leaves(outputs)]
        return sum(each), outputs

    results = jax.jit(jax.grad(total, has_aux=True))  # gradients and outputs
    mask = np.asarray(arrays["mask"]) if "mask" in arrays else None

    def spoilt(arrays, other):
        """Replace what the arrays have where the mask is 0."""
        names = [k for k, x in arrays.items() if mask is not None and x.shape[: mask.ndim] == mask.shape]
        keep = {k: mask.reshape(mask.shape + (1,) * (arrays[k].ndim - mask.ndim)) for k in names}
        return arrays | {k: jnp.where(keep[k], arrays[k], other) for k in names if k not in ("mask", *WHOLE)}

    expected = jax.device_get(results(spoilt(floats, 0), spoilt(rest, 0)))
    flows = () if name in VARIANTS and options.get("stop_gradient", True) else FLOWS.get(name, FLOWING)
    assert {k for k, x in expected[0].items() if np.any(x)} == set(flows) & set(floats)
    assert "radient" in FUNCTIONS[name].__doc__.partition("Args:")[0] or name == "permutation"
    for other in (np.nan, np.inf, -np.inf, 1e38, -1e38) if mask is not None else ():
        found = jax.device_get(results(spoilt(floats, other), spoilt(rest, other)))
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert np.all(np.isfinite(y))
            if np.shape(x)[: mask.ndim] == mask.shape:
                assert not np.any(x[mask == 0])
                x, y = x[mask == 1], y[mask == 1]
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "mask" in kinds(name)])
def test_a_mask_of_ones_is_no_mask_and_numpy_arrays_are_arrays(name):
    arrays, others = arguments(name)
    mask, floats = np.ones(arrays.pop("mask").shape, bool), {k: x for k, x in arrays.items() if k not in WHOLE + FLAGS}
    wide = {k: np.asarray(x) for k, x in arrays.items()} | {k: np.asarray(x, np.float64) for k, x in floats.items()}
    with_mask, without = (call(name, wide, {**others, "mask": m}) for m in (mask, None))
    for x, y in zip(jax.tree.leaves(with_mask), jax.tree.leaves(without), strict=True):
        assert x.dtype == jnp.float32
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
