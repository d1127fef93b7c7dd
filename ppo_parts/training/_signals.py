"""Signals that ask a run to stop or to save."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import threading
import time
from typing import Any

from ._messages import logger
from ._processes import agree

STOP = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR2")  # the last is submitit's
REASONS = (*STOP, "StopRun")
SAVE = "SIGUSR1"
TOGETHER = 0.2
"""Seconds within which signals count as one: a closing terminal, or a wrapper that forwards them, sends several."""


class Interrupt:
    """Turns the first signal of `STOP` into a request to save and stop, and SIGUSR1 into a request to save.

    A second signal to stop ends the process without saving. Python runs signal handlers between two steps of the main
    thread, so a signal waits for the end of a device call.
    """

    def __init__(self) -> None:
        self.asked: str | None = None  # the name of the first request to stop, such as "SIGTERM"
        self.reason: dict[str, str] = {}  # who asked, and why, for the result of the run
        self.save = False  # whether a checkpoint was requested; the run resets it
        self._first = 0.0
        self._before: dict[int, Any] = {}

    def ask(self, name: str, reason: str = "") -> None:
        if self.asked is None:
            self.reason = {"interrupted_by": name} | ({"reason": reason} if reason else {})
            self.asked = name

    def agree(self) -> bool:
        """Return whether any process of the run was asked to stop; all of them have to call this.

        A signal that arrives during the call counts in the next one, because the other processes do not know of it yet.
        """
        (number,) = agree(REASONS.index(self.asked) + 1 if self.asked in REASONS else 0)
        if number:
            self.ask(REASONS[int(number) - 1])
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
        if self.asked:
            # Without this, Python would collect garbage among JAX's objects on exit, which takes longer than saving.
            atexit.register(gc.freeze)
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: not set by Python

    def _handle(self, number: int, frame: Any) -> None:
        del frame
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
