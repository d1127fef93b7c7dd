"""Train ten vmapped seeds again and again on a busy CPU: does it ever deadlock?

    python -m benchmarks vmapped_init --runs 500

Each run initializes ten sets of parameters and makes two updates. A program that finishes no run for `--patience`
seconds counts as deadlocked, and is ended. Why that used to happen: docs/decisions/0004-batched-lapack.md.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import jax

from ppo_parts import training
from recipes import cleanrl_ppo, pufferlib_ppo

from ._timing import positive, write

SEEDS = 10
SIZES: dict[str, Any] = {"total_timesteps": 64, "num_envs": 4, "num_steps": 8, "num_minibatches": 2, "update_epochs": 1}
PROCESSES = multiprocessing.get_context("spawn")  # a fork would inherit the parent's threads


def program(name: str) -> training.Train:
    """A short run of a recipe, with networks of the usual size."""
    if name == "feed-forward":
        return cleanrl_ppo.make_train(cleanrl_ppo.Config(**SIZES))
    return pufferlib_ppo.make_train(pufferlib_ppo.Config(**SIZES, memory="lstm"))


def train(name: str, runs: int, finished: Connection) -> None:
    """Train, and say after compiling and after each run how many there have been."""
    keys = [jax.random.split(key, SEEDS) for key in jax.random.split(jax.random.key(0), runs)]
    train_seeds = jax.jit(jax.vmap(program(name))).lower(keys[0]).compile()
    finished.send(0)
    for number, seeds in enumerate(keys, 1):
        jax.block_until_ready(train_seeds(seeds))
        finished.send(number)


def compute_forever() -> None:
    """Keep a core busy, as long as there is somebody to end it."""
    while multiprocessing.parent_process().is_alive():
        pass


@contextlib.contextmanager
def started(*processes: Any) -> Iterator[None]:
    """Processes that are ended, whatever they do, when the block is left."""
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def measure(name: str, runs: int, load: int, patience: float) -> dict[str, Any]:
    """Whether `runs` runs come to an end beside `load` busy processes.

    Raises:
        EOFError: the program failed, for a reason that it has printed.
    """
    finished, send = PROCESSES.Pipe(duplex=False)
    trainer = PROCESSES.Process(target=train, args=(name, runs, send))
    others = [PROCESSES.Process(target=compute_forever) for _ in range(load)]
    with started(trainer, *others):
        send.close()  # the trainer has its own end
        done, began = finished.recv(), time.monotonic()
        while done < runs and finished.poll(patience):
            done = finished.recv()
    return {
        "program": name,
        "seeds": SEEDS,
        "runs": runs,
        "finished": done,
        "stood_still": done < runs,
        "busy_processes": load,
        "seconds": round(time.monotonic() - began),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=positive, default=500)
    parser.add_argument("--programs", nargs="+", default=["feed-forward", "lstm"], choices=["feed-forward", "lstm"])
    parser.add_argument("--load", type=int, default=2, help="processes beside it that keep a core busy each")
    parser.add_argument("--patience", type=float, default=60, help="seconds for a run")
    parser.add_argument("--json", metavar="PATH", help="write the results here")
    options = parser.parse_args()
    results = []
    for name in options.programs:
        results.append(measure(name, options.runs, options.load, options.patience))
        print(f"{name}: {results[-1]}", flush=True)
        write(options.json, "benchmarks vmapped_init", results)
    if any(row["stood_still"] for row in results):
        raise SystemExit("stood still")
