"""Headless Chromium over its debugging pipe: no driver, no library."""

import json
import os
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe", "--no-first-run")
TIMEOUT_S = 30.0


class Page:
    """One tab. Use as a context manager. `problems` are exceptions and console errors of the page."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM is not None
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        command = shlex.join([PROGRAM, *FLAGS, f"--user-data-dir={profile}", "about:blank"])
        self._process = subprocess.Popen(
            ["bash", "-c", f"exec {command} 3<&{to_browser} 4>&{from_browser}"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.problems: list[Any] = []

    def __enter__(self) -> "Page":
        try:
            self._attach()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _attach(self) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not (tabs := [tab for tab in self.call("Target.getTargets")["targetInfos"] if tab["type"] == "page"]):
            assert time.monotonic() < deadline_s, "the browser opened no tab"
        self._session = self.call("Target.attachToTarget", targetId=tabs[0]["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(10)
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, **params: Any) -> Any:
        """One command of the DevTools protocol."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == self._number:
                assert "error" not in reply, reply
                return reply["result"]
            if reply.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.problems.append(reply["params"])

    def _next(self) -> Any:
        while b"\0" not in self._buffer:
            piece = os.read(self._read, 65536)
            assert piece, "the browser ended"
            self._buffer += piece
        line, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(line)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true in the page."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not self.evaluate(expression):
            assert time.monotonic() < deadline_s, f"{expression} did not come true; the page says {self.text('body')!r}"
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        """What a person reads there."""
        return str(self.evaluate(f"document.querySelector({selector!r}).innerText"))

    def type(self, text: str) -> None:
        """Into whatever has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int, text: str = "") -> None:
        """One key."""
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text=text if kind == "keyDown" else ""
            )
