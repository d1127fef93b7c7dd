"""Vmapped seeds come to an end on a busy CPU, however often: docs/decisions/0004-batched-lapack.md."""

import multiprocessing
import time

import jax
import pytest

from ppo_parts.recipes import cleanrl_ppo, pufferlib_ppo

RUNS, SEEDS, PATIENCE = 200, 10, 60
SIZES = {"total_timesteps": 64, "num_envs": 4, "num_steps": 8, "num_minibatches": 2, "update_epochs": 1}
PROCESSES = multiprocessing.get_context("spawn")  # a fork would inherit the parent's threads


def train(memory, finished):
    """Train ten seeds at a time, again and again; say after compiling and after each run how many there have been."""
    if memory:
        made = pufferlib_ppo.make_train(pufferlib_ppo.Config(**SIZES, memory=memory))
    else:
        made = cleanrl_ppo.make_train(cleanrl_ppo.Config(**SIZES))
    keys = [jax.random.split(key, SEEDS) for key in jax.random.split(jax.random.key(0), RUNS)]
    train_seeds = jax.jit(jax.vmap(made)).lower(keys[0]).compile()
    finished.send(0)
    for number, seeds in enumerate(keys, 1):
        jax.block_until_ready(train_seeds(seeds))
        finished.send(number)


def compute_until(end):
    while time.monotonic() < end:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("memory", [None, "lstm"])
def test_vmapped_seeds_never_stand_still(memory):
    finished, send = PROCESSES.Pipe(duplex=False)
    busy = [PROCESSES.Process(target=compute_until, args=(time.monotonic() + 600,)) for _ in range(2)]
    processes = [PROCESSES.Process(target=train, args=(memory, send)), *busy]
    for process in processes:
        process.start()
    send.close()  # the trainer has its own end
    try:
        done = finished.recv()
        while done < RUNS and finished.poll(PATIENCE):
            done = finished.recv()
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert done == RUNS
