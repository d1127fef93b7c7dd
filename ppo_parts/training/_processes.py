"""Processes that train together, their messages, and signals that ask them to stop or to save.

They run the same programs in the same order, so they must agree on what only one knows: a signal, a clock or a file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from ..errors import UserError, UserValueError

logger = logging.getLogger("ppo_parts.training")
"""The logger of runs, whose messages a command line prints."""


class _Printer(logging.Handler):
    """A handler that prints warnings to stderr and other messages to stdout, in the first process of a run."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # the terminal or the pipe may be closed; the run must still be saved
            if record.levelno >= logging.WARNING:
                print(record.getMessage(), file=sys.stderr, flush=True)
            elif is_first():
                print(record.getMessage(), flush=True)


@contextlib.contextmanager
def print_messages() -> Iterator[None]:
    """Print the messages of runs in this context; elsewhere, the configuration of `logging` applies."""
    before, level = (logger.handlers, logger.propagate), logger.level
    others = [x for x in logger.handlers if not isinstance(x, _Printer)]  # nested contexts print once
    logger.handlers, logger.propagate = [*others, _Printer()], False  # the root logger would print them again
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before
        logger.setLevel(level)


TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
"""Environment variables that torchrun sets."""


def initialize(heartbeat_timeout: int) -> None:
    """Connect this process with the others of its run; call it before anything uses a device.

    JAX recognizes Slurm, Open MPI, Kubernetes and Cloud TPUs. This function reads the variables of torchrun, and uses
    the port after torchrun's, because torchrun may be listening on its own.
    """
    if jax.distributed.is_initialized():
        return
    given: dict[str, Any] = dict.fromkeys(("heartbeat_timeout_seconds", "shutdown_timeout_seconds"), heartbeat_timeout)
    if all(os.environ.get(name) for name in TORCHRUN):
        address, port, size, rank = (os.environ[name] for name in TORCHRUN)
        given["coordinator_address"] = f"{address}:{int(port) + 1}"
        given |= {"num_processes": int(size), "process_id": int(rank)}
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


def take_largest(*numbers: float) -> list[float]:
    """Return the maximum of each number over all processes, which must all call this."""
    if jax.process_count() == 1:
        return list(numbers)
    return np.max(process_allgather(np.asarray(numbers, np.float32)), axis=0).tolist()


@contextlib.contextmanager
def fail_together(what: str) -> Iterator[None]:
    """Raise in all processes if the body raises in one."""
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    (some,) = take_largest(failed is not None)
    if failed is not None:
        raise failed
    if some:
        raise UserError(f"another process could not {what}: its own message says why")


STOP, SAVE = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR2"), "SIGUSR1"  # submitit sends SIGUSR2
REASONS = (None, *STOP, "StopRun")
TOGETHER = 0.2
"""Seconds within which signals count as one, because closing terminals and wrappers send several."""


class Interrupt:
    """Turn the first signal of `STOP` into a request to save and stop, and SIGUSR1 into a request to save.

    A second stop signal ends the process without saving. Python runs signal handlers between bytecode steps of the main
    thread, so a signal waits for the end of a device call.
    """

    def __init__(self) -> None:
        self.reason: dict[str, str] = {}  # the first request to stop, such as "SIGTERM", and why
        self.save = False  # whether a checkpoint was requested; the run resets it
        self._first = 0.0
        self._before: dict[int, Any] = {}

    def ask(self, name: str, reason: str = "") -> None:
        if not self.reason:
            self.reason = {"interrupted_by": name} | ({"reason": reason} if reason else {})

    def agree(self) -> bool:
        """Return whether any process has been asked to stop; every process must call this."""
        (number,) = take_largest(REASONS.index(self.reason.get("interrupted_by")))
        if reason := REASONS[int(number)]:
            self.ask(reason)
        return number > 0

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread may handle signals
        for name in (*STOP, SAVE):
            number = getattr(signal, name, None)  # Windows has only the first two
            if number is None or (name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN):  # nohup
                continue
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None means not set by Python

    def _handle(self, number: int, frame: Any) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        if name == SAVE:
            self.save = True
            logger.warning("saving")
        elif not self._first:
            self._first = now
            self.ask(name)
            logger.warning(f"{name}: saving; again to abort")
        elif now - self._first > TOGETHER:
            os._exit(128 + number)
