"""Several processes that train together: they run the same programs in the same order.

They must agree on all that depends on one of them, such as a signal, a clock or a file, before they choose a program.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from .._base.errors import UserError, UserValueError
from ._checkpoint import as_key, is_key, raw

TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
"""Variables that torchrun sets."""

LOST = ("Gloo", "NCCL", "RCCL", "coordination service", "Connection reset", "heartbeat")
"""If another process is gone, the error of a collective operation contains one of these words."""


class ProcessLostError(UserError, ConnectionError):
    """Another process of a distributed run has ended."""


def initialize(heartbeat_timeout: int) -> None:
    """Connect this process with the others of its run; nothing may have used a device before.

    JAX recognizes Slurm, Open MPI, Kubernetes and Cloud TPUs. The variables of torchrun are read here; as torchrun may
    listen at its own port, the next one is used.
    """
    if jax.distributed.is_initialized():
        return
    given: dict[str, Any] = dict.fromkeys(("heartbeat_timeout_seconds", "shutdown_timeout_seconds"), heartbeat_timeout)
    if all(os.environ.get(name) for name in TORCHRUN):
        address, port, size, rank = (os.environ[name] for name in TORCHRUN)
        given |= {"coordinator_address": f"{address}:{int(port) + 1}", "num_processes": int(size)}
        given["process_id"] = int(rank)
        if "LOCAL_RANK" in os.environ:
            given["local_device_ids"] = int(os.environ["LOCAL_RANK"])
    try:
        jax.distributed.initialize(**given)
    except (ValueError, RuntimeError) as error:
        raise UserValueError(
            f"run: distributed=True: {' '.join(str(error).split())[:300]}. Processes are started by srun, mpirun, a "
            f"Job of Kubernetes or torchrun; or set {', '.join(TORCHRUN)} for each of them"
        ) from error


def is_first() -> bool:
    """Return whether this is the first process of its run, which writes the files."""
    return jax.process_index() == 0


def agree(*numbers: float) -> list[float]:
    """Return the largest of each number over all processes; all of them must call this."""
    if jax.process_count() == 1:
        return list(numbers)
    return np.max(multihost_utils.process_allgather(np.asarray(numbers, np.float32)), axis=0).tolist()


def broadcast_first(tree: Any, like: Any) -> Any:
    """Return the arrays that the first process passes. The others may pass anything; `like` has shapes and dtypes."""
    wanted = raw(like)  # keys as their data
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), wanted)
    numbers = multihost_utils.broadcast_one_to_all(jax.tree.map(np.asarray, raw(tree)) if is_first() else zeros)
    return jax.tree.map(lambda like, x: as_key(like, x) if is_key(like) else x, like, numbers)


@contextlib.contextmanager
def together(what: str) -> Iterator[None]:
    """Raise in all processes if the body raises in one."""
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    (some,) = agree(failed is not None)
    if failed is not None:
        raise failed
    if some:
        raise UserError(f"another process could not {what}: its own message says why")


@contextlib.contextmanager
def noticing_losses() -> Iterator[None]:
    """Turn the error of a collective operation into a sentence that says that another process is lost."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        of_collective = any(word in str(error) for word in LOST)
        if jax.process_count() == 1 or isinstance(error, UserError) or not of_collective:
            raise
        raise ProcessLostError(
            f"another process of this run does not answer, so it ends here ({' '.join(str(error).split())[:200]}). Its "
            "last checkpoint is sound: start all processes again with --resume"
        ) from error
