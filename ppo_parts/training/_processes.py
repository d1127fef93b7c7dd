"""Several processes that train together: how they find each other, agree, and what is left if one is lost.

All processes run the same programs in the same order. Whatever depends on one of them, such as a signal, a clock, or
what a file holds, has to be agreed on before the next program is chosen.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from .._errors import UserError, UserValueError

TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
"""Variables that torchrun sets."""


class ProcessLostError(UserError, ConnectionError):
    """Another process of a distributed run has ended."""


def initialize(heartbeat_timeout: int) -> None:
    """Connect this process with the others of its run; nothing may have used a device before.

    JAX recognises Slurm, Open MPI, Kubernetes and Cloud TPUs. The variables of torchrun are read here; as torchrun may
    listen at its own port, the next one is used.

    Args:
        heartbeat_timeout: seconds without a sign of life after which a process counts as lost.

    Raises:
        UserValueError: there are no other processes, or they do not answer.
    """
    if jax.distributed.is_initialized():
        return
    found = [os.environ.get(name) for name in TORCHRUN]
    given: dict[str, Any] = {}
    if all(found):
        address, port, size, rank = map(str, found)
        given = {"coordinator_address": f"{address}:{int(port) + 1}", "num_processes": int(size)}
        given["process_id"] = int(rank)
        if "LOCAL_RANK" in os.environ:
            given["local_device_ids"] = int(os.environ["LOCAL_RANK"])
    limits = {"heartbeat_timeout_seconds": heartbeat_timeout, "shutdown_timeout_seconds": heartbeat_timeout}
    try:
        jax.distributed.initialize(**given, **limits)
    except (ValueError, RuntimeError) as error:
        raise UserValueError(
            f"run: distributed=True: {' '.join(str(error).split())[:300]}. Processes are started by srun, mpirun, a "
            f"Job of Kubernetes or torchrun; or set {', '.join(TORCHRUN)} for each of them"
        ) from error


def is_first() -> bool:
    """Whether this is the first process of its run, which writes the files."""
    return jax.process_index() == 0


def agreed(*numbers: float) -> list[float]:
    """The largest of each number over all processes, which all have to call this."""
    if jax.process_count() == 1:
        return list(numbers)
    return np.max(multihost_utils.process_allgather(np.asarray(numbers, np.float32)), axis=0).tolist()


def of_first(tree: Any, like: Any) -> Any:
    """A tree of arrays as the first process has it; the others give anything, and `like` has the shapes and dtypes."""

    def is_key(x: Any) -> bool:
        return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)

    def raw(x: Any) -> Any:
        return np.asarray(jax.random.key_data(x) if is_key(x) else x)

    def empty(x: Any) -> Any:
        shape = jax.eval_shape(jax.random.key_data, x) if is_key(x) else x
        return np.zeros(shape.shape, shape.dtype)

    numbers = multihost_utils.broadcast_one_to_all(jax.tree.map(raw, tree) if is_first() else jax.tree.map(empty, like))

    def restored(x: Any, like: Any) -> Any:
        return jax.random.wrap_key_data(jnp.asarray(x), impl=jax.random.key_impl(like)) if is_key(like) else x

    return jax.tree.map(restored, numbers, like)


@contextlib.contextmanager
def together(what: str) -> Iterator[None]:
    """Raise in all processes if the body raises in one."""
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    (some,) = agreed(failed is not None)
    if failed is not None:
        raise failed
    if some:
        raise UserError(f"another process could not {what}: its own message says why")


@contextlib.contextmanager
def noticing_losses() -> Iterator[None]:
    """Say in a sentence that another process is lost, which is otherwise an error of a collective operation."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        raise ProcessLostError(
            f"another process of this run does not answer, so it ends here ({' '.join(str(error).split())[:200]}). Its "
            "last checkpoint is sound: start all processes again with --resume"
        ) from error
