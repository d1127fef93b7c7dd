"""The fused loss against the functions that it replaces, and both kernels as they would run on a GPU.

No GPU is needed: in interpret mode Pallas turns a kernel into XLA operations, and lowering for CUDA goes as far as the
Triton program, which is read here.
"""

import functools
import importlib.util
import json
import re
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import __main__ as command_line
from benchmarks import gpu, ptx, report
from ppo_parts import distributions
from ppo_parts import functional as f
from ppo_parts.functional import _fused_kernel, _kernel, _recurrence

COEFFICIENTS = {"clip_eps": 0.2, "value_coef": 0.5, "entropy_coef": 0.01}
PLAIN = (COEFFICIENTS, ())
EVERYTHING = (COEFFICIENTS | {"clip_eps_high": 0.3, "dual_clip": 1.5, "value_clip_eps": 0.4}, ("old_value", "mask"))
CASES = {  # shape, number of actions, settings: single elements, blocks that are not full, and rows wider than a block
    "one": ((1,), 1, PLAIN),
    "ragged": ((3, 43), 5, EVERYTHING),
    "wide": ((2,), 513, PLAIN),
}


@pytest.fixture
def emulated(monkeypatch):
    """As if there were a GPU, for whoever asks for the kernel by name."""
    monkeypatch.setattr(_recurrence, "has", lambda platform: platform == "cuda")
    run = functools.partial(_fused_kernel.loss_and_means, interpret=True)
    monkeypatch.setattr(_fused_kernel, "loss_and_means", run)


def rows(shape, actions, optional=(), dtype=jnp.float32, seed=0):
    """What the loss reads, by name."""
    rng = np.random.default_rng(seed)
    names = ("log_prob", "advantage", "value", "target", *(name for name in optional if name != "mask"))
    floats = {name: jnp.asarray(rng.normal(size=shape), dtype) for name in names}
    floats["log_prob"] = -jnp.abs(floats["log_prob"])
    logits = jnp.asarray(2 * rng.normal(size=(*shape, actions)), dtype)
    action = jnp.asarray(rng.integers(min(actions, 100), size=shape), jnp.int8)  # any integers are actions
    given = {"logits": logits, "action": action, **floats}
    return given | ({"mask": jnp.asarray(rng.random(shape) < 0.7)} if "mask" in optional else {})


def by_parts(settings, logits, value, **given):
    """The same loss from the functions and the distribution that a chain uses."""
    policy, mask = distributions.Categorical(logits), given.get("mask")
    log_ratio = policy.log_prob(given["action"].astype(jnp.int32)) - given["log_prob"]
    if mask is not None:
        log_ratio = jnp.where(mask, log_ratio, 0)
    clip = {name: settings[name] for name in ("clip_eps", "clip_eps_high") if name in settings}
    surrogate = f.clipped_surrogate(
        log_ratio, given["advantage"], dual_clip=settings.get("dual_clip"), **clip, mask=mask
    )
    if "old_value" in given:
        critic = f.clipped_value_loss(
            value, given["old_value"], given["target"], clip_eps=settings["value_clip_eps"], mask=mask
        )
    else:
        critic = f.value_loss(value, given["target"], mask=mask)
    kl, clipped = f.approx_kl(log_ratio, mask=mask), f.clip_fraction(log_ratio, **clip, mask=mask)
    means = [f.masked_mean(x, mask) for x in (surrogate, critic, policy.entropy(), kl, clipped)]
    loss = means[0] + settings["value_coef"] * means[1] - settings["entropy_coef"] * means[2]
    return f.PPOLoss(loss, *means)


def differentiated(function, given):
    """The results, and the gradient of the loss in logits and value."""

    def of(logits, value):
        out = function(**given | {"logits": logits, "value": value})
        return out.loss, out

    (_, out), gradient = jax.value_and_grad(of, (0, 1), has_aux=True)(given["logits"], given["value"])
    return out, gradient


def fused(way, settings=COEFFICIENTS):
    """A new function each time: what a fixture patches is no part of jit's key."""
    return lambda **given: f.categorical_ppo_loss(**given, **settings, implementation=way)


def assert_close(actual, expected, rtol=2e-5, atol=1e-6):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=rtol, atol=atol)


@pytest.mark.parametrize("case", CASES)
def test_equals_the_separate_functions(emulated, case):
    shape, actions, (settings, optional) = CASES[case]

    @jax.jit
    def everything(given):
        ways = (functools.partial(by_parts, settings), fused("xla", settings), fused("pallas", settings))
        return [differentiated(way, given) for way in ways], ways[-1](**given)

    given = rows(shape, actions, optional)
    (expected, *results), alone = everything(given)
    for out, gradient in results:
        assert_close((out, gradient), expected)
        if "mask" in optional:
            assert not any(np.asarray(g)[~np.asarray(given["mask"])].any() for g in gradient)
    assert_close(alone, expected[0])  # the kernel that computes no gradient


@pytest.mark.parametrize("way", ["xla", "pallas"])
def test_what_is_masked_has_no_effect(emulated, way):
    settings, optional = EVERYTHING
    given = rows((7, 19), 3, optional)
    mask = given["mask"]

    def spoil(x):
        other = jnp.asarray(jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 99, x.dtype)
        return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x, other)

    spoiled = {name: x if name == "mask" else spoil(x) for name, x in given.items()}
    run = jax.jit(functools.partial(differentiated, fused(way, settings)))
    for x, y in zip(*(jax.tree.leaves(run(data)) for data in (given, spoiled)), strict=True):
        np.testing.assert_array_equal(x, y)
    nothing = given | {"mask": jnp.zeros_like(mask)}
    assert all(np.all(np.asarray(x) == 0) for x in jax.tree.leaves(run(nothing)))
    wrong = given | {"mask": jnp.ones_like(mask), "action": given["action"].at[0, 0].set(3)}
    assert np.isnan(run(wrong)[0].loss)  # there are three actions, and no fourth that padding would add


def test_extreme_numbers(emulated):
    """Ratios that overflow or vanish, and actions that are impossible, in one step each."""
    logits = jnp.array([[0.0, 0.0], [80.0, -80.0], [-80.0, 80.0], [0.0, -jnp.inf], [1e30, -1e30], [0.0, 0.0]])
    size = len(logits)
    given = {
        "logits": logits,
        "action": jnp.zeros(size, jnp.int32),
        "log_prob": jnp.array([-80.0, -80.0, 0.0, 0.0, 0.0, -87.0]),
        "advantage": jnp.array([1.0, 2.0, -1.0, -3.0, 1.0, -1.0]),
        "value": jnp.full(size, 1e15),
        "target": jnp.full(size, -1e15),
    }
    ways = (functools.partial(by_parts, COEFFICIENTS), fused("xla"), fused("pallas"))
    expected, plain, kernel = jax.jit(lambda given: [differentiated(way, given) for way in ways])(given)
    assert_close(plain, expected, atol=0)
    assert_close(kernel, expected, atol=0)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((plain, kernel)))
    out, _ = kernel
    assert out.clip_fraction == pytest.approx(4 / 6)  # two actions are certain under both policies
    assert out.approx_kl > 1e30


def test_narrow_floats_are_computed_in_float32(emulated):
    settings, optional = EVERYTHING
    given = rows((3, 41), 6, optional, jnp.bfloat16)
    wide = {name: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for name, x in given.items()}
    (out, gradient), plain, expected = jax.jit(
        lambda given, wide: [
            differentiated(fused(way, settings), data)
            for way, data in (("pallas", given), ("xla", given), ("xla", wide))
        ]
    )(given, wide)
    assert {x.dtype for x in (*out, *plain[0])} == {jnp.dtype("float32")}
    assert {g.dtype for g in (*gradient, *plain[1])} == {jnp.dtype("bfloat16")}
    for result, slopes in ((out, gradient), plain):
        assert_close(result, expected[0])
        assert_close(slopes, expected[1], rtol=2**-7)


def test_other_derivatives_of_the_kernel(emulated):
    """Forward mode, second order, a batch of problems, and numbers that are traced."""
    given = rows((11,), 3)
    logits = given.pop("logits")
    other = jax.random.normal(jax.random.key(0), logits.shape)

    def derivatives(way):
        def loss(logits, clip_eps=0.2):
            settings = COEFFICIENTS | {"clip_eps": clip_eps}
            return f.categorical_ppo_loss(logits, **given, **settings, implementation=way).loss

        forward = jax.jvp(loss, (logits,), (other,))
        second = jax.jvp(jax.grad(loss), (logits,), (other,))
        batched = jax.vmap(jax.value_and_grad(loss))(jnp.stack([logits, other]), jnp.array([0.1, 0.3]))
        return forward, second, batched

    assert_close(*(jax.jit(functools.partial(derivatives, way))() for way in ("pallas", "xla")))


@pytest.mark.parametrize("way", ["xla", "pallas"])
def test_only_the_loss_has_a_gradient(emulated, way):
    settings, optional = EVERYTHING
    given = rows((9,), 3, optional)
    floats = {name: x for name, x in given.items() if jnp.issubdtype(x.dtype, jnp.floating)}

    @jax.jit
    def slopes(floats):
        _, pullback = jax.vjp(lambda floats: fused(way, settings)(**given | floats), floats)
        only_loss = f.PPOLoss(1.0, *[0.0] * 5)
        seeds = (only_loss, f.PPOLoss(0.0, *[1.0] * 5))
        return [pullback(jax.tree.map(jnp.float32, seed))[0] for seed in seeds]

    of_loss, of_others = slopes(floats)
    assert {name for name, x in of_loss.items() if np.any(x)} == {"logits", "value"}
    assert not any(np.any(x) for x in of_others.values())


def test_costs_what_the_separate_functions_cost():
    """On a CPU, counted by the compiler."""
    given = rows((64,), 4)
    ways = (functools.partial(by_parts, COEFFICIENTS), fused("auto"))
    costs = [jax.jit(functools.partial(differentiated, way)).lower(given).compile().cost_analysis() for way in ways]
    for what in ("flops", "bytes accessed"):
        assert costs[1][what] <= 1.02 * costs[0][what], what


def lowered(function, platform, *args):
    return jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def test_the_implementation_follows_the_platform(monkeypatch):
    given = rows((5,), 3)

    def auto(given):
        return f.categorical_ppo_loss(**given, **COEFFICIENTS).loss

    def plain(given):
        return f.categorical_ppo_loss(**given, **COEFFICIENTS, implementation="xla").loss

    assert str(jax.make_jaxpr(auto)(given)) == str(jax.make_jaxpr(plain)(given))  # without a GPU
    with pytest.raises(ValueError, match="no NVIDIA GPU is among JAX's devices"):
        fused("pallas")(**given)
    monkeypatch.setattr(_recurrence, "has", lambda platform: platform == "cuda")
    assert "triton" in lowered(lambda given: auto(given), "cuda", given)
    assert "triton" in lowered(jax.grad(lambda x: auto(given | {"logits": x})), "cuda", given["logits"])
    for platform in ("cpu", "rocm"):
        assert "triton" not in lowered(lambda given: auto(given), platform, given)
    many = rows((2,), 5000)
    assert "triton" not in lowered(lambda given: auto(given), "cuda", many)
    with pytest.raises(ValueError, match="it takes at most 4096 logits per element, got 5000; leave"):
        fused("pallas")(**many)
    with jax.enable_x64(True), pytest.raises(ValueError, match="the values are float64"):
        fused("pallas")(**given | {"target": jnp.zeros(5)})


def test_in_shard_map(monkeypatch):
    """Each device runs the kernel on its own elements; here there is one."""
    monkeypatch.setattr(_recurrence, "has", lambda platform: platform == "cuda")
    given, mesh = rows((6,), 3), jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
    along = jax.sharding.PartitionSpec("d")

    def of(logits, given):
        return f.categorical_ppo_loss(**given | {"logits": logits}, **COEFFICIENTS).loss[None]

    gradient = jax.grad(lambda *args: of(*args)[0])
    for function in (of, gradient):
        mapped = jax.shard_map(function, mesh=mesh, in_specs=along, out_specs=along)
        assert "triton" in lowered(mapped, "cuda", given["logits"], given)


def test_bad_input():
    given = rows((5,), 3)
    for changes, settings, error, words in (
        ({"value": jnp.zeros((5, 1))}, {}, f.ShapeError, r"value \(5, 1\)"),
        ({"logits": jnp.zeros(())}, {}, f.ShapeError, "their last axis must be that of the actions"),
        ({"action": jnp.zeros(5)}, {}, TypeError, "actions must be integers, got float32"),
        ({"target": jnp.zeros(5, int)}, {}, TypeError, "target must be floating"),
        ({"old_value": jnp.zeros(5)}, {}, ValueError, "give old_value and value_clip_eps together"),
        ({}, {"value_clip_eps": 0.2}, ValueError, "give old_value and value_clip_eps together"),
        ({"mask": jnp.full(5, 2)}, {}, ValueError, "mask must hold 0 and 1, got 2"),
        ({}, {"clip_eps": 0.0}, ValueError, r"clip_eps must lie in \(0, inf\], got 0"),
        ({}, {"dual_clip": 1.0}, ValueError, r"dual_clip must lie in \(1, inf\]"),
        ({}, {"entropy_coef": -1.0}, ValueError, "entropy_coef must lie in"),
        ({}, {"value_coef": jnp.ones(5)}, f.ShapeError, "value_coef of shape"),
        ({}, {"implementation": "triton"}, ValueError, "implementation must be one of 'auto', 'xla', 'pallas'"),
    ):
        with pytest.raises(error, match=f"categorical_ppo_loss: .*{words}"):
            f.categorical_ppo_loss(**given | changes, **COEFFICIENTS | settings)


# --- the kernels as Triton programs ---------------------------------------------------------------------------------


@functools.cache
def kernel(name, ragged=False):
    """A kernel as `python -m benchmarks ptx` lowers it; `ragged` ends every axis in the middle of a block."""
    case = ptx.cases()[name]
    arrays = case.arrays
    if ragged:
        sizes = {ptx.ENVS: 1000, 18: 5, 4: 3}
        arrays = {
            name: jax.ShapeDtypeStruct(tuple(sizes.get(n, n) for n in x.shape), x.dtype) for name, x in arrays.items()
        }
    try:
        (found,) = ptx.kernels(ptx.lowered(case.function, arrays))
    except NotImplementedError as error:
        pytest.skip(str(error))
    return found


class Access(NamedTuple):
    """A load or store in a kernel: the type of its address, its operands, and whether it is in the loop over time."""

    kind: str
    operands: list[str]
    looped: bool


def accesses(ir, what):
    """The accesses to memory that have an effect.

    A store of Pallas also loads what it overwrites, which the compiler drops because nobody uses it.
    """
    found, loop = [], None
    for line in ir.splitlines():
        indent = len(line) - len(line.lstrip())
        if "scf.for" in line:
            loop = indent
        elif loop == indent and line.strip().startswith("}"):
            loop = None
        match = re.search(rf"(?:(%\S+) = )?tt\.{what} ([^:]*) : (.*)$", line)
        if match and not (what == "load" and len(re.findall(rf"{match[1]}(?!\w)", ir)) == 1):
            found.append(Access(match[3], match[2].split(", "), loop is not None))
    return found


def elements(kind):
    """The number of elements of a type such as `tensor<128x4x!tt.ptr<f32>>`, and the bytes of each."""
    sizes = re.match(r"tensor<((?:\d+x)*)", kind)
    bits = int(re.search(r"ptr<\D+(\d+)>", kind)[1])
    return int(np.prod([int(n) for n in sizes[1].split("x")[:-1]])) if sizes else 1, max(1, bits // 8)


@pytest.mark.skipif(_recurrence.unsupported(jnp.ones(1)) is not None, reason="this JAX has no kernel")
@pytest.mark.parametrize("name", ["gae", "vtrace", "the same with its gradient", "with its gradient, bfloat16"])
def test_every_array_is_touched_once(name):
    """Loads and stores of one program, times the programs, are the size of the arrays."""
    found = kernel(name)
    assert found.warps == (_kernel.WARPS if name in ("gae", "vtrace") else _fused_kernel.WARPS)
    total = 0
    for access in accesses(found.ir, "load") + accesses(found.ir, "store"):
        count, size = elements(access.kind)
        total += count * size * found.programs * (ptx.STEPS // _kernel.ROWS if access.looped else 1)
    again = sum(size for shape, size in found.arrays if shape == (1,)) * (
        found.programs - 1
    )  # numbers, by each program
    unread = found.arrays[1][0] if name == "gae" else ()  # `vtrace` alone needs the value that follows a step
    assert total == found.bytes + again - (4 * np.prod(unread) if unread else 0)


@pytest.mark.skipif(_recurrence.unsupported(jnp.ones(1)) is not None, reason="this JAX has no kernel")
@pytest.mark.parametrize("name", ["gae", "vtrace", "categorical_ppo_loss, 4 actions", "with its gradient, 18 actions"])
def test_ragged_blocks_are_masked(name):
    """Every access to an array has a mask that ends where the array does."""
    found = kernel(name, ragged=True)
    for what, unmasked in (("load", 1), ("store", 2)):
        for kind, operands, _ in accesses(found.ir, what):
            if not kind.startswith("tensor"):
                continue  # one number
            if what == "store" and kind == f"tensor<1x{_fused_kernel.COLUMNS}x!tt.ptr<f32>>":
                continue  # a row of the table, which has one for each program
            assert len(operands) > unmasked, (what, kind)
    ends = {int(n) for n in re.findall(r"arith\.constant (?:dense<)?(\d+)", found.ir)}
    assert 1000 in ends
    comparisons = re.findall(r"arith\.cmpi slt, .*tensor<(\w+)xi32>", found.ir)
    block = {"gae": "32", "vtrace": "32"}.get(name, "128")
    assert block in comparisons if "18" not in name else "64" in comparisons
    if "actions" in name:
        width = 4 if "4 actions" in name else 8
        assert str(width) in comparisons  # three of four, five of eight actions


def test_the_kernels_compile_to_ptx():
    if not importlib.util.find_spec("triton"):
        pytest.skip("triton is not installed: pip install triton")
    for name in ("gae", "the same with its gradient"):
        result = ptx.compile_kernel(kernel(name))
        assert result["spilled_bytes"] == 0
        assert result["registers"] <= 80  # at least 24 warps of 32 threads fit 65,536 registers
        if "gradient" in name:
            assert result["accesses"]["ld.v4.b32"] == result["accesses"]["st.v4.b32"] == 1  # four logits at a time


def test_the_page_has_the_recorded_table():
    record = json.loads((report.ROOT / "benchmarks/results/gpu_ptx.json").read_text())
    assert ptx.table(record["results"]) in (report.ROOT / "docs/gpu.md").read_text()
    assert {row["kernel"] for row in record["results"]} == set(ptx.cases())


# --- what a GPU will be asked ---------------------------------------------------------------------------------------


@pytest.mark.lenient_ranks  # the network's biases
def test_dry_run(tmp_path, monkeypatch, capsys):
    """Every section, end to end; a measurement that fails and one that comes too late do not stop the others."""
    path = tmp_path / "gpu.json"
    measure, fails = gpu.timed, []

    def timed(plan, method, *args):
        fails.append(len(fails) == 2)  # the first after those of the device
        if fails[-1]:
            raise RuntimeError("out of memory\nand more")
        return measure(plan, method, *args)

    monkeypatch.setattr(gpu, "timed", timed)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "gpu", "--dry-run", "--json", str(path)])
    command_line.main()
    rows = json.loads(path.read_text())["results"]
    assert [row["section"] for row in rows if "failed" in row] == ["kernels"]
    assert "kernels  gae 3x40 float32" in (printed := capsys.readouterr().out)
    assert "failed: RuntimeError: out of memory\n" in printed
    found = {
        section: [row for row in rows if row["section"] == section] for section in {row["section"] for row in rows}
    }
    assert set(found) == {"device", "kernels", "loss", "update", "train", "tune"}
    assert found["device"][0]["copied_bytes_per_second"] > 0
    assert {(row["way"], row["direction"]) for row in found["loss"]} == {
        (way, direction) for way in ("functions", "xla", "pallas") for direction in ("forward", "with gradient")
    }
    assert max(row["relative_error"] for row in (*found["loss"], *found["update"])) < 1e-4
    assert [row["way"] for row in found["update"]] == ["separate losses", "fused loss"]
    (run,) = found["train"]
    assert run["steps_per_second"] * run["run_seconds"] == pytest.approx(4 * 8 * run["seeds"])
    assert len(found["tune"]) == 2
    assert _recurrence.has("cuda") == bool([d for d in jax.devices() if d.platform == "gpu"])  # emulation has ended


def test_a_gpu_run_ends_in_time(tmp_path):
    bench = gpu.Bench(gpu.TINY, minutes=1.0, path=str(tmp_path / "gpu.json"))
    bench.attempt("loss", "one", lambda: [{"us": 1.0}])
    bench.began -= 40  # seconds, of which loss has 30, train 54 and tune 60
    bench.longest["train"] = 15.0
    for section in ("loss", "update", "train", "tune"):
        bench.attempt(section, "another", lambda: [{"us": 1.0}])
    assert ["left_out" in row for row in bench.rows] == [False, True, True, True, False]
    assert bench.rows[1]["left_out"] == "1 minutes, of which loss ends after 0.5, do not suffice for it"
    assert gpu.Bench(gpu.TINY, 1.0, None, ("device", "loss")).ends["loss"] == 60
    assert json.loads((tmp_path / "gpu.json").read_text())["results"] == bench.rows
