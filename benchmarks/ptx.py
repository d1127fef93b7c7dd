"""The compilation of the GPU kernels, without a GPU: their Triton IR, and the PTX and registers that it compiles to.

`python -m benchmarks ptx --json benchmarks/results/gpu_ptx.json`

JAX lowers a kernel for CUDA on any machine, as far as Triton's intermediate representation (IR). Where the package
`triton` is installed (`pip install triton`, on Linux), its compiler and its ptxas continue from there. On a GPU, XLA
compiles the same IR with its own Triton and ptxas, so the number of registers may differ slightly.

*Bytes per element* are what a kernel reads and writes if it touches each array once, which the tests check on the IR.
The *limit* is how many elements per second a memory bandwidth of 3.35 TB/s (an H100 with SXM) allows then.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ppo_parts import functional
from ppo_parts.functional import _recurrence

from . import _timing

H100 = 3.35e12  # bytes per second, as published
HOPPER = 90  # compute capability times ten: H100 and H200
STEPS, ENVS = 128, 32768
GAMMA = {"gamma": 0.99, "gae_lambda": 0.95}


class Kernel(NamedTuple):
    """A Triton kernel as JAX lowers it: its IR as text, threads / 32 and programs, and the arrays that it is given."""

    name: str
    ir: str
    warps: int
    programs: int
    arrays: tuple[tuple[tuple[int, ...], int], ...]  # shape and bytes of an item, of all inputs and outputs

    @property
    def bytes(self) -> int:
        """The size of all arrays."""
        return sum(math.prod(shape) * size for shape, size in self.arrays)


class Case(NamedTuple):
    """A function of arrays of these shapes and dtypes that calls one kernel, and the number of elements."""

    function: Callable[..., Any]
    arrays: dict[str, Any]
    elements: int


@contextlib.contextmanager
def as_if_there_were_a_gpu() -> Iterator[None]:
    """Let `implementation="pallas"` be lowered on a machine without a GPU; it cannot run there."""
    has = _recurrence.has
    _recurrence.has = lambda platform: platform == "cuda"
    try:
        yield
    finally:
        _recurrence.has = has


def lowered(function: Callable[..., Any], *args: Any) -> Any:
    """The function lowered for CUDA."""
    with as_if_there_were_a_gpu():
        return jax.jit(lambda *args: function(*args)).trace(*args).lower(lowering_platforms=("cuda",))


def kernels(module: Any) -> list[Kernel]:
    """The Triton kernels of what `lowered` returns.

    Raises:
        NotImplementedError: this version of JAX compiles kernels while it lowers them, and keeps no IR.
    """
    from jax._src.lib.mlir import ir
    from jax._src.pallas.triton.lowering import _new_ir_context

    found: list[Kernel] = []

    def arrays(values: Any) -> Iterator[tuple[tuple[int, ...], int]]:
        for value in values:
            kind = ir.RankedTensorType(value.type)
            bits = int(re.sub(r"\D", "", str(kind.element_type)))
            yield tuple(kind.shape), max(1, bits // 8)

    def visit(op: Any) -> Any:
        op = op.operation
        if op.name == "stablehlo.custom_call" and "triton" in str(op.attributes["call_target_name"]):
            if "mhlo.backend_config" not in op.attributes:
                raise NotImplementedError(f"jax {jax.__version__} compiles kernels while it lowers them")
            config = {item.name: item.attr for item in op.attributes["mhlo.backend_config"]}
            if "ir" not in config:
                raise NotImplementedError(f"jax {jax.__version__} compiles kernels while it lowers them")
            with _new_ir_context():
                text = ir.Module.parse(config["ir"].value_bytes).operation.get_asm(enable_debug_info=False)
            name, warps = str(config["name"]).strip('"'), int(config["num_warps"].value)
            programs = math.prod(int(config[f"grid_{axis}"].value) for axis in "xyz")
            found.append(Kernel(name, text, warps, programs, (*arrays(op.operands), *arrays(op.results))))
        return ir.WalkResult.ADVANCE

    module.compiler_ir("stablehlo").operation.walk(visit)
    return found


def compile_kernel(kernel: Kernel, capability: int = HOPPER) -> dict[str, Any]:
    """Registers, bytes of spilled registers, shared memory, barriers, and accesses to global memory in the PTX."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # multiply-adds are fused, as XLA does
    import triton
    from triton.backends.compiler import GPUTarget

    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "kernel.ttir", Path(folder) / "kernel.cubin"
        source.write_text(kernel.ir)
        options = {"num_warps": kernel.warps}
        result = triton.compile(str(source), target=GPUTarget("cuda", capability, 32), options=options)
        binary.write_bytes(result.asm["cubin"])
        command = (triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary))
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    resources = {name: int(number) for name, number in re.findall(r"([A-Z]+):(\d+)", said.split(kernel.name, 1)[1])}
    ptx = result.asm["ptx"]
    accesses = re.findall(r"\b(ld|st)\.global\S*?((?:\.v\d)?\.b\d+)", ptx)
    return {
        "registers": resources["REG"],
        "spilled_bytes": resources["STACK"] + resources["LOCAL"],
        "shared_bytes": result.metadata.shared,
        "barriers": ptx.count("bar.sync"),
        "accesses": dict(sorted(Counter(f"{kind}{width}" for kind, width in accesses).items())),
        "triton": triton.__version__,
    }


def cases() -> dict[str, Case]:
    """The kernels at the sizes that `python -m benchmarks gpu` times."""

    def shapes(names: str, shape: tuple[int, ...], dtype: Any) -> dict[str, Any]:
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name in names.split()}

    def steps(names: str, dtype: Any = jnp.float32) -> dict[str, Any]:
        flags = {name: jax.ShapeDtypeStruct((STEPS, ENVS), bool) for name in ("terminated", "truncated")}
        return {**shapes(names, (STEPS, ENVS), dtype), **flags}

    def estimator(name: str) -> Callable[..., Any]:
        return lambda given: getattr(functional, name)(**given, **GAMMA, implementation="pallas")

    def recurrence(given: Any) -> Any:
        return functional.reverse_recurrence(**given, implementation="pallas")

    values, size = "reward value next_value", STEPS * ENVS
    only_terminated = {name: x for name, x in steps(values).items() if name != "truncated"}
    return {
        "gae": Case(estimator("gae"), steps(values), size),
        "gae, without truncations": Case(estimator("gae"), only_terminated, size),
        "gae, bfloat16": Case(estimator("gae"), steps(values, jnp.bfloat16), size),
        "vtrace": Case(estimator("vtrace"), steps(f"log_ratio {values}"), size),
        "reverse_recurrence": Case(recurrence, shapes("delta trace", (STEPS, ENVS), jnp.float32), size),
    }


def measure(name: str, case: Case) -> dict[str, Any]:
    """One row of the table."""
    (kernel,) = kernels(lowered(case.function, case.arrays))
    row = {
        "kernel": name,
        "elements": case.elements,
        "warps": kernel.warps,
        "programs": kernel.programs,
        "bytes_per_element": kernel.bytes / case.elements,
    }
    return row | (compile_kernel(kernel) if importlib.util.find_spec("triton") else {})


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    head = "kernel, bytes per element, limit on an H100 (elements/s), warps, registers, spilled bytes, barriers"
    lines = [[name.strip() for name in head.split(", ")], ["---"] * 7]
    for row in rows:
        each = row["bytes_per_element"]
        counts = (str(row.get(name, "")) for name in ("warps", "registers", "spilled_bytes", "barriers"))
        lines.append([row["kernel"], f"{each:.1f}", f"{H100 / each / 1e9:.3g} G", *counts])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Print the table; write it with `--json`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", metavar="PATH", help="write the results here")
    options = parser.parse_args()
    if not importlib.util.find_spec("triton"):
        print("triton is not installed, so the kernels are lowered and not compiled\n")
    rows = [measure(name, case) for name, case in cases().items()]
    print(table(rows))
    _timing.write(options.json, "benchmarks ptx", rows)
