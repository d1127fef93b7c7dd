"""The kernel as it would run on a GPU.

No GPU is needed: lowering for CUDA goes as far as the Triton program, which is read here.
"""

import functools
import math
import re
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppo_parts import functional
from ppo_parts.functional import _kernel, _recurrence

STEPS, ENVS = 128, 32768


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
    estimate = jax.jit(
        lambda given: getattr(functional, name)(**given, gamma=0.99, gae_lambda=0.95, implementation="pallas")
    )
    jax.clear_caches()
    with mock.patch.object(_recurrence, "has_device", lambda platform: platform == "cuda"):
        (found,) = kernels(estimate.trace(given).lower(lowering_platforms=("cuda",)))
    jax.clear_caches()
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
