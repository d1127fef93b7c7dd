"""Messages of a run: it logs to `ppo_parts.training`, and a command line prints what is logged."""

from __future__ import annotations

import contextlib
import difflib
import logging
import sys
from collections.abc import Iterable, Iterator

from ._processes import is_first

logger = logging.getLogger("ppo_parts.training")


class _Printer(logging.Handler):
    """Prints warnings on stderr, and everything else on stdout, in the first process of a run."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            print(record.getMessage(), file=sys.stderr, flush=True)
        elif is_first():
            print(record.getMessage(), flush=True)


@contextlib.contextmanager
def printed_messages() -> Iterator[None]:
    """Print the messages of runs inside this context; elsewhere they go where `logging` is configured to send them."""
    if any(isinstance(handler, _Printer) for handler in logger.handlers):  # inside another such context
        yield
        return
    printer, before = _Printer(), (logger.level, logger.propagate)
    logger.addHandler(printer)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # otherwise a handler of the root logger prints them again
    try:
        yield
    finally:
        logger.removeHandler(printer)
        logger.setLevel(before[0])
        logger.propagate = before[1]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest one, if there is one."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
