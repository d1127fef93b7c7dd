"""Communication between devices, and the work of each, read from compiled programs; nothing is run.

    python -m benchmarks devices --json benchmarks/results/devices.jsonl#devices

The programs are those of training runs (a rollout and an update) for 1 to 64 simulated devices, so the counts are the
same on every machine. Strong scaling divides a fixed number of environments; weak scaling gives each device as many.
"""

import dataclasses
import math
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from ppo_parts import training
from ppo_parts.recipes import cleanrl_ppo, ippo, pufferlib_ppo

from ._records import collect, make_parser

KINDS = "all-gather|all-reduce|all-to-all|collective-permute|collective-broadcast|reduce-scatter"
DEVICES = (1, 2, 4, 8, 16, 32, 64)
ENVS = 32  # of each device under weak scaling, and of each of 64 shards under strong scaling
COMPARED = 4  # number of devices for which programs with one shard are counted, too
SIZES = {"num_steps": 16, "total_timesteps": 10**9, "num_minibatches": 4, "update_epochs": 2}
RECIPES: dict[str, tuple[Any, Any]] = {
    "CleanRL, shuffled minibatches": (cleanrl_ppo, cleanrl_ppo.Config()),
    "PufferLib, LSTM, prioritized segments": (pufferlib_ppo, pufferlib_ppo.Config(memory="lstm")),
    "IPPO, switch riddle, GRU": (ippo, ippo.PRESETS["riddle"]),
}


class Operation(NamedTuple):
    """An operation of a program: how often it runs, the shapes of the arrays that it returns, bytes and FLOPs."""

    kind: str
    times: int
    shapes: list[tuple[int, ...]]
    bytes: int
    flops: int


def read_shape(text: str) -> tuple[int, ...]:
    """Parse a shape such as "4,2"."""
    return tuple(int(x) for x in text.split(",") if x)


def read_operations(compiled: Any, kinds: str = KINDS) -> list[Operation]:
    """Return the collectives of a program, or its products of matrices if `kinds` is "dot".

    Operations in loops count as often as they run, and all branches count. (XLA's own count of FLOPs ignores loops.)
    """
    computation = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\n((?:.*\n)*?)\}", re.MULTILINE)
    found = computation.findall(compiled.as_text())
    [entry], bodies = (name for begins, name, _ in found if begins), {name: body for _, name, body in found}

    def visit(name: str, times: int) -> list[Operation]:
        found, shape_of = [], dict(re.findall(r"%([\w.\-]+) = [a-z]+\d*\[([\d,]*)\]", bodies[name]))
        for line in bodies[name].splitlines():
            if operation := re.search(rf" = (.*?) ({kinds})(?:-start)?\(%?([\w.\-]+)", line):
                arrays = re.findall(r"[a-z]+(\d*)\[([\d,]*)\]", operation[1])  # such as f32[4,2] and pred[]
                shapes = [read_shape(shape) for _, shape in arrays]
                widths = [int(bits or 8) // 8 for bits, _ in arrays]
                size = sum(width * math.prod(shape) for width, shape in zip(widths, shapes, strict=True))
                summed, flops = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line), 0
                if summed:
                    left = read_shape(shape_of[operation[3]])
                    flops = 2 * math.prod(shapes[0]) * math.prod(left[i] for i in read_shape(summed[1]))
                found.append(Operation(operation[2], times, shapes, size, flops))
            length = re.search(r"known_trip_count[^\d]*(\d+)", line)
            loop = " while(" in line
            called = re.findall(r"(?:body|condition|to_apply|calls|_computation)=%?([\w.\-]+)", line)
            for group in re.findall(r"branch_computations=\{(.*?)\}", line):
                called += re.findall(r"[\w.\-]+", group)
            for inner in called:
                inside = visit(inner, times * int(length[1]) if loop and length else times)
                assert not (inside and loop and not length), f"a loop of unknown length: {line}"
                found += inside
        return found

    return visit(entry, 1)


def measure(module: Any, config: Any, num_devices: int, one_shard: bool = False) -> dict[str, Any]:
    """Compile a rollout and an update for this many devices, and count; `one_shard`: samplers mix all devices' data."""
    train = module.make_train(config)
    program = training.Program(train, 0, training.RunOptions(num_devices=num_devices))
    if one_shard:
        train = module.make_train(dataclasses.replace(config, shards=1))
    state = train.state_shapes()
    step = program.jit(train.step, out_shardings=(program.sharding, None))
    if program.mesh is not None:
        state = jax.tree.map(lambda x, y: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=y), state, program.sharding)
    compiled = step.lower(state).compile()
    found = read_operations(compiled)
    kinds = {kind: [one for one in found if one.kind == kind] for kind in sorted({one.kind for one in found})}
    return {
        "operations": {kind: sum(one.times for one in each) for kind, each in kinds.items()},
        "bytes": {kind: sum(one.times * one.bytes for one in each) for kind, each in kinds.items()},
        "flops": sum(x.times * x.flops for x in read_operations(compiled, "dot")),
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
    }


def main() -> None:
    """Print a row for each program; write them with `--json`."""
    options = make_parser(__doc__, json=None).parse_args()
    flags = f"--xla_force_host_platform_device_count={DEVICES[-1]} --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    jax.config.update("jax_platforms", "cpu")

    def rows() -> Iterator[dict[str, Any]]:
        for name, (module, config) in RECIPES.items():
            sizes = {field: x for field, x in SIZES.items() if hasattr(config, field)}
            for scaling in ("one shard", "strong", "weak"):
                for devices in [COMPARED] if scaling == "one shard" else DEVICES:
                    shards = devices if scaling == "weak" else DEVICES[-1]
                    sized = dataclasses.replace(config, **sizes, num_envs=ENVS * shards, shards=shards, microbatch=None)
                    row = {"recipe": name, "scaling": scaling, "devices": devices}
                    row |= {"num_envs": sized.num_envs, "num_steps": sized.num_steps}
                    yield row | measure(module, sized, devices, scaling == "one shard")

    collect(options.json, rows())
