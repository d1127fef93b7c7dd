"""A headless Chromium, driven through a pipe by its DevTools protocol, so that tests need no package for it."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
ARGUMENTS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe")


class Browser:
    """One page of a browser; `events` are what it has reported since it was opened."""

    def __init__(self, folder: Any) -> None:
        found = next(filter(None, map(shutil.which, NAMES)), None)
        if found is None:
            pytest.skip(f"no browser is installed: none of {', '.join(NAMES)} is on the path")
        (theirs, write), (read, ours) = os.pipe(), os.pipe()
        # It reads from 3 and writes to 4. The tests have threads, which forbid a function between fork and exec.
        pipes = [(os.POSIX_SPAWN_DUP2, theirs, 3), (os.POSIX_SPAWN_DUP2, ours, 4)]
        quiet = (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)
        arguments = [found, *ARGUMENTS, f"--user-data-dir={folder}", "about:blank"]
        self.process = os.posix_spawn(found, arguments, os.environ, file_actions=[*pipes, quiet])
        os.close(theirs)
        os.close(ours)
        self.commands, self.answers = os.fdopen(write, "wb", 0), os.fdopen(read, "rb")
        self.number, self.session, self.buffer = 0, None, b""
        self.events: list[dict[str, Any]] = []
        [target] = [x for x in self.send("Target.getTargets")["targetInfos"] if x["type"] == "page"]
        attached = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command; the events before it are kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        self.commands.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            got = self.answers.read1(1 << 20)
            assert got, "the browser has ended"
            self.buffer += got
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def open(self, address: str) -> None:
        """Go to an address and wait until it has loaded."""
        self.events.clear()
        self.send("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = 10, until: Callable[[Any], Any] = bool) -> Any:
        """The value of an expression, once it is true."""
        end = time.monotonic() + seconds
        while not until(value := self.evaluate(expression)):
            assert time.monotonic() < end, f"{expression} is {value!r} after {seconds} s"
            time.sleep(0.02)
        return value

    def width(self, pixels: int) -> None:
        """Set the width of the page, as that of a phone."""
        self.send("Emulation.setDeviceMetricsOverride", width=pixels, height=800, deviceScaleFactor=1, mobile=True)

    def press(self, key: str, code: int) -> None:
        """Press a key."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *error: Any) -> None:
        os.kill(self.process, signal.SIGTERM)
        os.waitpid(self.process, 0)
        self.commands.close()
        self.answers.close()
