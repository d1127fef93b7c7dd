"""The kernel as it would run on a GPU, and the benchmark that will run it.

No GPU is needed: lowering for CUDA goes as far as the Triton program, which is read here.
"""

import functools
import math
import re
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import __main__ as command_line
from benchmarks import _records, gpu
from ppo_parts import functional
from ppo_parts.functional import _kernel, _recurrence

# --- the kernels as Triton programs ---------------------------------------------------------------------------------


STEPS, ENVS = 128, 32768  # the sizes that `python -m benchmarks gpu` times


class Kernel(NamedTuple):
    """A Triton kernel as JAX lowers it: its IR as text, threads / 32 and programs, and the arrays that it is given."""

    ir: str
    warps: int
    programs: int
    arrays: tuple[tuple[tuple[int, ...], int], ...]  # shape and bytes of an item, of all inputs and outputs

    @property
    def bytes(self) -> int:
        """The size of all arrays."""
        return sum(math.prod(shape) * size for shape, size in self.arrays)


def kernels(module):
    """The Triton kernels of a lowered program."""
    from jax._src.lib.mlir import ir
    from jax._src.pallas.triton.lowering import _new_ir_context

    found = []

    def arrays(values):
        for value in values:
            kind = ir.RankedTensorType(value.type)
            bits = int(re.sub(r"\D", "", str(kind.element_type)))
            yield tuple(kind.shape), max(1, bits // 8)

    def visit(op):
        op = op.operation
        if op.name == "stablehlo.custom_call" and "triton" in str(op.attributes["call_target_name"]):
            config = {}
            if "mhlo.backend_config" in op.attributes:
                config = {item.name: item.attr for item in op.attributes["mhlo.backend_config"]}
            if "ir" not in config:
                pytest.skip(f"jax {jax.__version__} compiles kernels while it lowers them, and keeps no IR")
            with _new_ir_context():
                text = ir.Module.parse(config["ir"].value_bytes).operation.get_asm(enable_debug_info=False)
            warps = int(config["num_warps"].value)
            programs = math.prod(int(config[f"grid_{axis}"].value) for axis in "xyz")
            found.append(Kernel(text, warps, programs, (*arrays(op.operands), *arrays(op.results))))
        return ir.WalkResult.ADVANCE

    module.compiler_ir("stablehlo").operation.walk(visit)
    return found


@functools.cache
def kernel(name, envs=ENVS):
    """The kernel of an estimator; 1000 environments end in the middle of a block."""
    floats = ("log_ratio", "reward", "value", "next_value")[name == "gae" :]
    given = {field: jax.ShapeDtypeStruct((STEPS, envs), jnp.float32) for field in floats}
    given |= {field: jax.ShapeDtypeStruct((STEPS, envs), bool) for field in ("terminated", "truncated")}
    estimate = jax.jit(lambda given: getattr(functional, name)(**given, **gpu.GAMMA, implementation="pallas"))
    with gpu.as_if_there_were_a_gpu():
        (found,) = kernels(estimate.trace(given).lower(lowering_platforms=("cuda",)))
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
@pytest.mark.parametrize("name", ["gae", "vtrace"])
def test_every_array_is_touched_once(name):
    """Loads and stores of one program, times the programs, are the size of the arrays."""
    found = kernel(name)
    assert found.warps == _kernel.WARPS
    total = 0
    for access in accesses(found.ir, "load") + accesses(found.ir, "store"):
        count, size = elements(access.kind)
        total += count * size * found.programs * (STEPS // _kernel.ROWS if access.looped else 1)
    again = sum(size for shape, size in found.arrays if shape == (1,)) * (
        found.programs - 1
    )  # numbers, by each program
    unread = found.arrays[1][0] if name == "gae" else ()  # `vtrace` alone needs the value that follows a step
    assert total == found.bytes + again - (4 * np.prod(unread) if unread else 0)


@pytest.mark.skipif(_recurrence.unsupported(jnp.ones(1)) is not None, reason="this JAX has no kernel")
@pytest.mark.parametrize("name", ["gae", "vtrace"])
def test_ragged_blocks_are_masked(name):
    """Every access to an array has a mask that ends where the array does."""
    found = kernel(name, envs=1000)
    for what, unmasked in (("load", 1), ("store", 2)):
        for kind, operands, _ in accesses(found.ir, what):
            if not kind.startswith("tensor"):
                continue  # one number
            assert len(operands) > unmasked, (what, kind)
    ends = {int(n) for n in re.findall(r"arith\.constant (?:dense<)?(\d+)", found.ir)}
    assert 1000 in ends
    comparisons = re.findall(r"arith\.cmpi slt, .*tensor<(\w+)xi32>", found.ir)
    assert "32" in comparisons


# --- what a GPU will be asked ---------------------------------------------------------------------------------------


@pytest.mark.lenient_ranks  # the network's biases
def test_dry_run(tmp_path, monkeypatch, capsys):
    """Every section, end to end; a measurement that fails and one that comes too late do not stop the others."""
    path = tmp_path / "gpu.jsonl"
    measure, fails = gpu.timed, []

    def timed(plan, method, *args):
        fails.append(len(fails) == 2)  # the first after those of the device
        if fails[-1]:
            raise RuntimeError("out of memory\nand more")
        return measure(plan, method, *args)

    monkeypatch.setattr(gpu, "timed", timed)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "gpu", "--dry-run", "--json", f"{path}#dry"])
    command_line.main()
    rows = _records.read(path)["dry"]["results"]
    assert [row["section"] for row in rows if "failed" in row] == ["kernels"]
    assert "kernels  gae 3x40 float32" in (printed := capsys.readouterr().out)
    assert "failed: RuntimeError: out of memory\n" in printed
    found = {
        section: [row for row in rows if row["section"] == section] for section in {row["section"] for row in rows}
    }
    assert set(found) == {"device", "kernels", "train", "tune"}
    assert found["device"][0]["copied_bytes_per_second"] > 0
    (run,) = found["train"]
    assert run["steps_per_second"] * run["run_seconds"] == pytest.approx(4 * 8 * run["seeds"])
    assert len(found["tune"]) == 1
    gpus = [device for device in jax.devices() if device.platform == "gpu"]
    assert _recurrence.has_device("cuda") == bool(gpus)  # emulation has ended


def test_a_gpu_run_ends_in_time(tmp_path):
    bench = gpu.Bench(gpu.TINY, minutes=1.0, path=f"{tmp_path}/gpu.jsonl#one")
    bench.attempt("kernels", "one", lambda: [{"us": 1.0}])
    bench.began -= 40  # seconds, of which kernels has 24, train 54 and tune 60
    bench.longest["train"] = 15.0
    for section in ("kernels", "train", "tune"):
        bench.attempt(section, "another", lambda: [{"us": 1.0}])
    assert ["left_out" in row for row in bench.rows] == [False, True, True, False]
    assert bench.rows[1]["left_out"] == "1 minutes, of which kernels ends after 0.4, do not suffice for it"
    assert gpu.Bench(gpu.TINY, 1.0, None, ("device", "kernels")).ends["kernels"] == 60
    assert _records.read(tmp_path / "gpu.jsonl")["one"]["results"] == bench.rows
