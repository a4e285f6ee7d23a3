"""A headless Chromium, driven through a pipe by its own protocol: no driver, no network, a profile of its own."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

EXECUTABLES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


def chromium() -> str | None:
    """The path of a Chromium on this machine."""
    return next((found for name in EXECUTABLES if (found := shutil.which(name))), None)


class Browser:
    """One page of a browser. `errors` collects what the page's console and policy complain of."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, and its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(30.0)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def open(
        self, page: Path, *, dark: bool = False, width: int = 1440, height: int = 1000, frames: bool = True
    ) -> float:
        """Load a file; the seconds until its load event, and until a frame was drawn after that."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self._events.clear()
        start = time.perf_counter()
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(e["method"] == "Page.loadEventFired" for e in self._events):
            self._next(60.0)
        if frames:
            self.frames()
        return time.perf_counter() - start

    def frames(self) -> None:
        """Wait until what was asked for is drawn."""
        self.evaluate(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
        )

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"])[:800])
        return found["result"].get("value")

    def press(self, key: str, text: str = "") -> None:
        """One key."""
        known = {
            "Enter": 13,
            "Escape": 27,
            "ArrowDown": 40,
            "ArrowUp": 38,
            "ArrowLeft": 37,
            "ArrowRight": 39,
            "Tab": 9,
        }
        code = known.get(key, ord(key[0].upper()))
        for kind in ("keyDown", "keyUp"):
            more = {"text": text or (key if len(key) == 1 else "")} if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more)

    def type(self, text: str) -> None:
        """Text into what has the focus."""
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """What is seen, or the whole page, as PNG."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def _next(self, seconds: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._receive], [], [], seconds)[0]:
                raise TimeoutError("the browser does not answer")
            read = os.read(self._receive, 1 << 20)
            if not read:
                raise RuntimeError("the browser ended")
            self._buffer += read
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self._note(message)
        return message

    def _note(self, event: Mapping[str, Any]) -> None:
        self._events.append(dict(event))
        method, told = event["method"], event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(told["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.errors.append(told["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(told["args"])[:500])
        elif method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])


@contextmanager
def browser() -> Generator[Browser]:
    """A browser that ends with the block. Raises RuntimeError where there is none."""
    found = chromium()
    if found is None:
        raise RuntimeError("no Chromium")
    their_read, send = os.pipe()
    receive, their_write = os.pipe()
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (their_read, their_write)]

    def place() -> None:
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    # A browser that is still ending writes into its profile.
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [found, *FLAGS, f"--user-data-dir={profile}"],
            preexec_fn=place, pass_fds=(3, 4), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for fd in (their_read, their_write, *high):
            os.close(fd)
        try:
            yield Browser(send, receive)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(send)
            os.close(receive)
