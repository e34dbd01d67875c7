"""A real headless Chromium, spoken to over a pipe: opens a page, moves the pointer, takes pictures, and notes what the console says."""

from __future__ import annotations

import base64
import json
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync --disable-dev-shm-usage --hide-scrollbars --remote-debugging-pipe"
).split()
PATIENCE = 60.0


def find_browser() -> str | None:
    """Path of a Chromium or Chrome: $BROWSER_PATH, else what is installed."""
    return os.environ.get("BROWSER_PATH") or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    def __init__(self, out: int, back: int):
        self._out, self._number = os.fdopen(out, "wb", buffering=0), 0
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self.errors: list[str] = []  # of the console, uncaught ones, and resources that did not load
        self.requests: list[str] = []
        self._session: str | None = None
        threading.Thread(target=self._listen, args=(back,), daemon=True).start()

    def _listen(self, back: int) -> None:
        rest = b""
        with os.fdopen(back, "rb", buffering=0) as pipe:
            while chunk := pipe.read(65536):
                *whole, rest = (rest + chunk).split(b"\0")
                for message in whole:
                    self._note(json.loads(message))
        self._answers.put({"error": {"message": "the browser has ended"}})

    def _note(self, message: dict[str, Any]) -> None:
        told, values = message.get("method"), message.get("params", {})
        if told is None:
            self._answers.put(message)
        elif told == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(one.get("value", one.get("description"))) for one in values["args"]))
        elif told == "Runtime.exceptionThrown":
            details = values["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif told == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.errors.append(values["entry"]["text"])
        elif told == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])

    def call(self, method: str, /, **values: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": values}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._answers.get(timeout=PATIENCE)
            assert "error" not in answer, f"{method}: {answer['error']}"
            if answer.get("id") == self._number:
                return answer["result"]

    def open(self, page: Path, width: int = 1400, height: int = 900, *, dark: bool = False) -> None:
        """Opens `page` in a tab of its own; returns when its scripts have run."""
        self._session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.errors.clear()
        self.requests.clear()
        assert "errorText" not in self.call("Page.navigate", url=page.resolve().as_uri())
        self.value("new Promise(done => document.readyState === 'complete' ? done(1) : addEventListener('load', () => done(1)))")

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        if self._session:  # two frames later everything that follows the size has been drawn
            self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def value(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def middle(self, selector: str) -> tuple[float, float]:
        """Of the first element that matches, scrolled into view."""
        self.value(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center', behavior: 'instant'}})")
        found = json.loads(self.value(f"JSON.stringify(document.querySelector({selector!r}).getBoundingClientRect())"))
        return found["x"] + found["width"] / 2, found["y"] + found["height"] / 2

    def picture(self, out: Path) -> Path:
        """The whole page, however long."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        out.write_bytes(base64.b64decode(shot["data"]))
        return out


@contextmanager
def browser(path: str, profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile, ended with everything it started."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    line = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out} 2>"$PROFILE/stderr" >/dev/null'
    profile.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        ["bash", "-c", line, path, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(theirs_in, theirs_out),
        env=os.environ | {"PROFILE": str(profile)},
        start_new_session=True,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    one = Browser(ours_out, ours_in)
    try:
        yield one
        one._session = None
        one.call("Browser.close")
    finally:
        from tests.support.processes import end

        end(process)
