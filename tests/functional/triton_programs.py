"""The GPU kernels as Triton programs, without a GPU: JAX lowers a kernel for CUDA on any machine, as far as its IR."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.gpu import GAMMA, as_if_there_were_a_gpu
from ppo_parts import functional

STEPS, ENVS = 128, 32768


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
