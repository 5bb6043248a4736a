"""A real browser for tests: headless Chromium, spoken to in its DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]
_SECONDS = 60.0


def find_chromium() -> str | None:
    """The browser's program, if one is installed."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One process; what it keeps lies in ``folder``."""

    def __init__(self, program: str, folder: Path) -> None:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # It reads file 3 and writes file 4.
        command = ["bash", "-c", f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}', program, *_FLAGS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={folder}", "about:blank"], pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._held = b""
        self._sent = 0
        self.events: list[dict[str, Any]] = []

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """A command's result; events that come meanwhile are kept in ``events``."""
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _SECONDS
        while True:
            answer = self._read(deadline)
            if answer.get("id") == self._sent:
                assert "error" not in answer, answer["error"]
                found: dict[str, Any] = answer["result"]
                return found
            self.events.append(answer)

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._held:
            assert select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))[0], "the browser is silent"
            more = os.read(self._in, 1 << 20)
            assert more, "the browser has ended"
            self._held += more
        line, _, self._held = self._held.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)
        self._process.kill()
        self._process.wait(_SECONDS)


class Tab:
    """One page, in a context of its own: no storage is shared with another."""

    def __init__(self, browser: Browser, url: str, width: int = 1000, height: int = 800) -> None:
        self._browser = browser
        self._context = browser.ask("Target.createBrowserContext")["browserContextId"]
        target = browser.ask("Target.createTarget", url="about:blank", browserContextId=self._context)["targetId"]
        self._session = browser.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.ask(f"{domain}.enable")
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.ask("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.ask(method, self._session, **parameters)

    def value(self, script: str) -> Any:
        """What an expression of the page's gives."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + _SECONDS
        while not self.value(script):
            assert time.monotonic() < deadline, f"not so in a minute: {script}"
            time.sleep(0.02)

    def type(self, text: str) -> None:
        """Text into what has the focus."""
        self.ask("Input.insertText", text=text)

    def press(self, key: str, code: int, text: str = "") -> None:
        common: Mapping[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.ask("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        self.ask("Input.dispatchKeyEvent", type="keyUp", **common)

    def colours(self, scheme: str) -> None:
        """As for a reader whose system is ``light`` or ``dark``."""
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self) -> bytes:
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])

    def complaints(self) -> list[str]:
        """Errors of the page so far, what its policy forbade among them."""
        found = []
        for event in self._mine():
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                found.append(str(event["params"]["entry"]))
        return found

    def asked(self) -> list[str]:
        """Every address that was asked for so far."""
        return [
            event["params"]["request"]["url"]
            for event in self._mine()
            if event["method"] == "Network.requestWillBeSent"
        ]

    def _mine(self) -> list[dict[str, Any]]:
        self.value("0")  # what has come is read
        return [event for event in self._browser.events if event.get("sessionId") == self._session]

    def close(self) -> None:
        self._browser.ask("Target.disposeBrowserContext", browserContextId=self._context)
