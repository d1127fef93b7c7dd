"""How the cost of an update grows: with environments, steps, agents, minibatches and seeds.

`python -m benchmarks growth --json benchmarks/results/growth.jsonl#cpu`

The update is that of `python -m benchmarks update`, its epochs and network included. One quantity grows at a time; the
minibatches share the rollout, the seeds are trained by one vmapped program. Memory is what the compiler reports: what
the program needs besides its inputs and outputs, and those. `beyond` is what it needs beyond what one gradient step on
one minibatch does, over the size of the rollout.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from . import _timing, update
from ._options import parser
from ._records import write

SWEEPS: dict[str, tuple[int, ...]] = {
    "environments": (8, 32, 128, 512),
    "steps": (32, 128, 512, 2048),
    "agents": (1, 4, 16, 64),
    "minibatches": (1, 4, 16, 64),
    "seeds": (1, 2, 4, 8, 16),
}
BASE = {"environments": 16, "steps": 128, "agents": 1, "minibatches": 4, "seeds": 1}


def program(
    environments: int, steps: int, agents: int, minibatches: int, seeds: int, epochs: int = update.EPOCHS
) -> tuple[Any, tuple[Any, ...]]:
    """Return the update of all seeds, and its arguments."""
    learner = update.cleanrl(minibatches, epochs)
    shape = (steps, environments) if agents == 1 else (steps, environments, agents)

    def start(key: jax.Array) -> tuple[Any, Any]:
        params = update.POLICY.init(key)
        return learner.init(params), update.rollout(key, params, *shape)

    keys = jax.random.split(jax.random.key(0), seeds)
    if seeds == 1:
        return learner.update, (keys[0], *start(keys[0]))
    return jax.vmap(learner.update), (keys, *jax.vmap(start)(keys))


def beyond_a_minibatch(setting: dict[str, int], needed: int, batch: Any) -> float:
    """Bytes that an update needs and one gradient step on one of its minibatches does not, in sizes of the rollout."""
    pieces = setting["minibatches"]
    function, args = program(**setting | {"steps": setting["steps"] // pieces, "minibatches": 1}, epochs=1)
    step = _timing.compile_cold(function, *args)[0].memory_analysis().temp_size_in_bytes
    return (needed - step) / sum(x.nbytes for x in jax.tree.leaves(batch))


def sweep(quantity: str, values: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """One row per value, timed in turn."""
    thunks, rows = {}, []
    for value in values:
        setting = BASE | {quantity: value}
        function, args = program(**setting)
        call, took = _timing.compile_cold(function, *args)
        thunks[str(value)] = functools.partial(call, *args)
        row = {"quantity": quantity, **setting, **{f"{name}_seconds": x for name, x in took.items()}}
        memory = call.memory_analysis()
        if memory:
            fields = ("temp", "argument", "output")
            row["bytes"] = {name: getattr(memory, f"{name}_size_in_bytes") for name in fields}
            row["beyond"] = beyond_a_minibatch(setting, memory.temp_size_in_bytes, args[2])
        rows.append(row)
    walls = _timing.interleaved(thunks, rounds)[0]
    for row, samples in zip(rows, walls.values(), strict=True):
        row["ms"] = _timing.quartiles(samples, 1e3)
        row["over_first"] = _timing.ratio(walls, str(row[quantity]), str(values[0]))
    return rows


def main() -> None:
    """Print the table; write it with `--json`."""
    options = parser(__doc__, rounds=9, json=None)
    options.add_argument("--quantities", nargs="+", choices=tuple(SWEEPS), default=tuple(SWEEPS))
    options.add_argument("--points", type=int, help="only the first so many values of each")
    given, results = options.parse_args(), []
    for quantity in given.quantities:
        for row in sweep(quantity, SWEEPS[quantity][: given.points], given.rounds):
            results.append(row)
            took = f"{row['ms']['median']:10.2f} ms  x{row['over_first']['median']:.2f}"
            built = f"compile {row['compile_seconds']:.1f} s"
            if "bytes" in row:
                built += f" {row['bytes']['temp'] / 2**20:8.2f} MiB temporary"
                built += f" beyond a minibatch {row['beyond']:.2f} rollouts"
            print(f"{quantity:13} {row[quantity]:6} {took} {built}", flush=True)
    write(given.json, results)
