"""Signals that ask a run to stop or to save."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from ._messages import logger
from ._processes import agree

STOP = ("SIGINT", "SIGTERM", "SIGHUP")
REASONS = (*STOP, "StopRun")
SAVE = "SIGUSR1"
TOGETHER = 0.2
"""Seconds within which signals count as one: a closing terminal, or a wrapper that forwards them, sends several."""


class Interrupt:
    """Turns the first Ctrl-C, SIGTERM or SIGHUP into a request to save and stop, and SIGUSR1 into a request to save.

    A second signal to stop ends the process at once, whatever it is doing. Python runs signal handlers between two
    steps of the main thread, which may be waiting for a device. Therefore a separate thread receives the signals
    through a socket.

    Attributes:
        asked: the name of the first request to stop, such as "SIGTERM", or None.
        reason: who asked to stop, and why, for the result of the run.
        save: whether a checkpoint was requested. The run resets it.
    """

    def __init__(self, end: Callable[[int], Any] = os._exit) -> None:
        self.asked: str | None = None
        self.reason: dict[str, str] = {}
        self.save = False
        self._end, self._first = end, 0.0
        self._before: dict[int, Any] = {}

    def ask(self, name: str, reason: str = "") -> None:
        """Ask to save and stop."""
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
        self._received, self._sent = socket.socketpair()  # Windows does not accept a pipe here
        self._sent.setblocking(False)
        self._fd_before = signal.set_wakeup_fd(self._sent.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.asked:
            # Without this, Python would collect garbage among JAX's objects on exit, which takes longer than saving.
            atexit.register(gc.freeze)
        if not self._before:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd_before)
        self._sent.close()  # ends the thread
        self._thread.join()
        self._received.close()

    def _handle(self, number: int, frame: Any) -> None:
        del frame
        if (name := signal.Signals(number).name) == SAVE:
            self.save = True
        else:
            self.ask(name)

    def _listen(self) -> None:
        while received := self._received.recv(1):
            number, now = received[0], time.monotonic()
            if number not in self._before:
                continue
            if (name := signal.Signals(number).name) == SAVE:
                logger.warning("saving")
            elif not self._first:
                self._first = now
                logger.warning(f"{name}: saving; again to abort")
            elif now - self._first > TOGETHER:
                self._end(128 + number)
