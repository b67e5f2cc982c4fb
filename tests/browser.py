"""A real Chromium for tests, headless, driven by the DevTools protocol over a pipe."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.limits import end

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_TIMEOUT_S = 60.0
_SHIFT = 8
_KEYS = {
    "ArrowRight": 39,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowDown": 40,
    "Home": 36,
    "End": 35,
    "Tab": 9,
    "Enter": 13,
    "[": 219,
    "]": 221,
}


class Navigated(AssertionError):
    """A command that reached a page just before another replaced it."""


class Browser:
    """One page. `complaints` has the errors that the page logged, such as violations of its Content-Security-Policy."""

    def __init__(self, process: subprocess.Popen[bytes], into: int, out: int) -> None:
        self._process, self._into, self._out = process, into, out
        self._number, self._rest = 0, b""
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Returns the answer to a command. Raises AssertionError on an error or without an answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._into, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            answer = self._read(deadline)
            self._note(answer)
            if answer.get("id") == self._number:
                if "navigated" in answer.get("error", {}).get("message", ""):
                    raise Navigated(method)
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, **features: str) -> None:
        """Emulates media features, such as prefers_color_scheme="dark", for the page."""
        named = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=named)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url="about:blank")  # with a new fragment alone the page would not reload
        self.call("Page.navigate", url=url)
        self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """Returns the value of an expression, or of the promise that it returns."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """Returns the visible text of the first match; "" if nothing matches."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def until(self, script: str, *, timeout_s: float = _TIMEOUT_S) -> None:
        """Waits until an expression is true. Raises AssertionError with the page's text."""
        deadline = time.monotonic() + timeout_s
        while not self._is_true(script):
            assert time.monotonic() < deadline, (
                f"not true: {script}\n{self.evaluate('document.body?.innerText')}\n{self.complaints}"
            )
            time.sleep(0.05)

    def _is_true(self, script: str) -> bool:
        """False also for an expression that reads from an element that is not there yet."""
        caught = "catch (error) { if (error instanceof TypeError) return false; throw error; }"
        tried = f"(() => {{ try {{ return !!({script}); }} {caught} }})()"
        with suppress(Navigated):  # the next page may report it
            return self.evaluate(tried)
        return False

    def press(self, *keys: str) -> None:
        for key in keys:
            key, modifiers = key.removeprefix("Shift+"), _SHIFT if key.startswith("Shift+") else 0
            typed = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
            for kind in ("keyDown", "keyUp"):
                self.call(
                    "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=_KEYS[key], modifiers=modifiers, **typed
                )

    def picture(self) -> bytes:
        """Returns a PNG of the visible part of the page."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"].get("exception", {}).get("description", params)))
        if message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left = max(0.0, deadline - time.monotonic())
            readable, _, _ = select.select([self._out], [], [], left)
            assert readable, "chromium does not answer"
            self._rest += os.read(self._out, 1 << 20)
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)


@contextmanager
def running_browser(folder: Path) -> Iterator[Browser]:
    """folder: for the browser's profile."""
    assert CHROMIUM is not None, "the caller skips where there is none"
    commands, into = os.pipe()
    out, answers = os.pipe()

    def to_3_and_4() -> None:
        # First duplicate above 4, since a pipe may have one of these numbers.
        kept = os.dup2(commands, 50), os.dup2(answers, 51)
        for number, fd in zip((3, 4), kept, strict=True):
            os.dup2(fd, number)

    process = subprocess.Popen(
        [
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=to_3_and_4,
        close_fds=False,
    )
    for fd in (commands, answers):
        os.close(fd)
    try:
        yield Browser(process, into, out)
    finally:
        for fd in (into, out):
            os.close(fd)
        end(process)
