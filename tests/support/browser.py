"""A real headless browser, driven over a pipe with the DevTools protocol: needs a Chromium and no Python package."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "headless_shell")
PATIENCE = 60.0  # seconds for one answer; only a browser that hangs takes that long


def find_browser() -> str | None:
    """$THINWIRE_BROWSER, or a Chromium or Chrome on the PATH."""
    return os.environ.get("THINWIRE_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


class DoesNotStart(Exception):
    """There is a browser, but it cannot be driven here."""


class Browser:
    """One page. `errors` collects what the console and the security policy complained about."""

    def __init__(self, process: subprocess.Popen[bytes], reads: int, writes: int) -> None:
        self.process, self.reads, self.writes = process, reads, writes
        self.buffer = b""
        self.number = 0
        self.session = ""
        self.events: list[dict[str, Any]] = []
        try:
            self.call("Browser.getVersion")
        except (AssertionError, OSError) as error:
            raise DoesNotStart(f"{find_browser()} does not start here") from error
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events on the way are kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.writes, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.reads], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            piece = os.read(self.reads, 1 << 20)
            assert piece, "the browser has ended"
            self.buffer += piece
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def open(self, page: Path, width: int = 1280, height: int = 900, dark: bool = False, media: str = "") -> None:
        """Load a page in a window of this size; what was collected before is forgotten."""
        self.events.clear()
        self.size(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media=media, features=scheme)
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())
        self.settle()

    def size(self, width: int, height: int) -> None:
        mobile = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def settle(self) -> None:
        """Two frames: what was resized is drawn again."""
        self.js("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def js(self, code: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """left, top, width and height in the window."""
        code = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        return self.js(f"(({{left, top, width, height}}) => [left, top, width, height])({code})")

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of the element."""
        self.js(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        left, top, width, height = self.box(selector)
        x, y = left + width / 2, top + height / 2
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    @property
    def errors(self) -> list[Any]:
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [event["params"] for event in self.events if event.get("method") in kinds]

    @property
    def requests(self) -> list[str]:
        sent = [event["params"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in sent]

    def screenshot(self, path: Path, whole: bool = True) -> None:
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True)["data"])


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Starts it with a profile of its own and ends it with all its processes."""
    program = find_browser()
    assert program, "no browser"
    to_read, to_write = os.pipe(), os.pipe()  # it reads commands from 3 and answers on 4
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = [
            "--headless=new",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            "--no-first-run",
            "--disable-gpu",
        ]
        flags += [
            "--disable-dev-shm-usage",
            "--disable-extensions",
            "--disable-background-networking",
            "--hide-scrollbars",
        ]
        flags += ["--no-sandbox"]  # it does not work as root and in many containers; the page is our own
        shell = f'exec "$0" "$@" 3<&{to_read[0]} 4>&{to_write[1]}'
        process = subprocess.Popen(
            ["bash", "-c", shell, program, *flags],
            pass_fds=(to_read[0], to_write[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read[0])
        os.close(to_write[1])
        try:
            yield Browser(process, to_write[0], to_read[1])
        finally:
            os.close(to_read[1])
            os.close(to_write[0])
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
