"""Messages of a run: its errors, and what it logs to `ppo_parts.training`, which a command line prints."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

import jax

from .._base.errors import UserError

logger = logging.getLogger("ppo_parts.training")


class RunFolderError(UserError, OSError):
    """The folder of a run cannot be used, or can no longer be used."""


class RunExistsError(RunFolderError, FileExistsError):
    """The folder already contains a run, or another process is writing to it."""


class RunNotFoundError(RunFolderError, FileNotFoundError):
    """The run, or the checkpoint in it, does not exist."""


class NonFiniteError(UserError, FloatingPointError):
    """A run ended because of non-finite numbers."""


class MetricNotFoundError(UserError, KeyError):
    """No update has a metric of this name."""

    __str__ = Exception.__str__  # that of KeyError puts the message in quotes


for _error in (RunFolderError, RunExistsError, RunNotFoundError, NonFiniteError, MetricNotFoundError):
    _error.__module__ = "ppo_parts.training"  # the public module, so that tracebacks show the public name


class _Printer(logging.Handler):
    """Prints warnings on stderr, and everything else on stdout, in the first process of a run."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            print(record.getMessage(), file=sys.stderr, flush=True)
        elif jax.process_index() == 0:
            print(record.getMessage(), flush=True)


@contextlib.contextmanager
def printed_messages() -> Iterator[None]:
    """Print the messages of runs inside this context; elsewhere they go where `logging` is configured to send them."""
    handlers, level, propagate = logger.handlers, logger.level, logger.propagate
    others = [x for x in handlers if not isinstance(x, _Printer)]  # only one prints, also where contexts are nested
    logger.handlers = [*others, _Printer()]
    logger.propagate = False  # otherwise a handler of the root logger prints them again
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
