"""Chromium without a window, steered through a pipe by its DevTools protocol."""

import json
import os
import shutil
import subprocess
import tempfile
from base64 import b64decode
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
    "--disable-dev-shm-usage",
)  # fmt: skip


def chromium() -> str | None:
    """The browser, if it and the shell that starts it are installed."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    return browser if shutil.which("bash") else None


class Browser:
    """A page in Chromium; `events` has what the browser has told, its requests among them."""

    def __init__(self, width: int = 1280, height: int = 900) -> None:
        browser = chromium()
        assert browser
        theirs, self._write = os.pipe()
        self._read, answers = os.pipe()
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command = [browser, *FLAGS, f"--user-data-dir={self._folder.name}"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{answers}', "bash", *command],
            pass_fds=(theirs, answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs)
        os.close(answers)
        self._count, self._buffer, self._session = 0, b"", ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            received = os.read(self._read, 1 << 20)
            assert received, "Chromium has ended"
            self._buffer += received
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        self._count += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._count, "method": method, "params": params, **session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != self._count:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, file: Path) -> None:
        """Open a file."""
        self.events.clear()
        self.call("Page.navigate", url=file.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._message())

    def run(self, script: str) -> Any:
        """Run the body of a function in the page, where `p` is the opened page."""
        wrapped = f"(async () => {{ const p = await window.opened; {script} }})()"
        answer = self.call(
            "Runtime.evaluate", expression=wrapped, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def resize(self, width: int, height: int) -> None:
        """The window in CSS pixels; narrow ones are phones."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
            mobile=width < 500,
        )  # fmt: skip

    def mouse(self, points: list[tuple[float, float]]) -> None:
        """Press, move and release the mouse."""
        kinds = ["mousePressed", *["mouseMoved"] * (len(points) - 1), "mouseReleased"]
        for kind, (x, y) in zip(kinds, [*points, points[-1]], strict=True):
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1,
                buttons=0 if kind == "mouseReleased" else 1,
            )  # fmt: skip

    def touch(self, points: list[tuple[float, float]]) -> None:
        """Touch the screen, move the finger and lift it."""
        for i, (x, y) in enumerate(points):
            kind = "touchMove" if i else "touchStart"
            self.call("Input.dispatchTouchEvent", type=kind, touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def requests(self) -> list[str]:
        """The addresses of everything that was requested."""
        sent = [e for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def complaints(self) -> list[str]:
        """What went to the console as an error, and exceptions that nothing caught."""
        logged = [e["params"]["entry"] for e in self.events if e["method"] == "Log.entryAdded"]
        thrown = [e for e in self.events if e["method"] == "Runtime.exceptionThrown"]
        return [entry["text"] for entry in logged if entry["level"] == "error"] + list(
            map(str, thrown)
        )

    def screenshot(self, file: Path) -> Path:
        """What the window shows, as a PNG."""
        file.write_bytes(b64decode(self.call("Page.captureScreenshot")["data"]))
        return file

    def close(self) -> None:
        """End the browser."""
        self.call("Browser.close")
        self._process.wait(20)
        os.close(self._read)
        os.close(self._write)
        self._folder.cleanup()
