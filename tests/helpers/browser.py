"""A page in Chromium, by its DevTools protocol over a pair of pipes: no driver, no network."""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--remote-debugging-pipe"),
)
LIMIT_S = 60.0


class Page:
    """One page, and what the browser said of it.

    Attributes:
        messages: of the console and of the browser's log.
        requests: addresses that the page fetched.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._rest = to_browser, from_browser, b""
        self._numbers, self._session = itertools.count(1), ""
        self.messages: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        found = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, path: Path, *, width: int, height: int, dark: bool = False) -> None:
        """Load a file on a screen of this size, in pixels of CSS."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        self._loaded = False
        self._call("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._take(self._read())

    def value(self, script: str) -> Any:
        """What an expression of JavaScript comes to."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Write what the screen shows, as PNG of 128 colors, which is small."""
        from PIL import Image

        shown = io.BytesIO(base64.b64decode(self._call("Page.captureScreenshot")["data"]))
        Image.open(shown).convert("RGB").quantize(128).save(path, optimize=True)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": number, "method": method, "params": parameters, **session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                found: dict[str, Any] = answer["result"]
                return found
            self._take(answer)

    def _take(self, event: Mapping[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.consoleAPICalled" | "Runtime.exceptionThrown":
                self.messages.append(json.dumps(parameters))
            case "Log.entryAdded":
                self.messages.append(parameters["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])

    def _read(self) -> dict[str, Any]:
        ends = time.monotonic() + LIMIT_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, ends - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._from, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


@contextlib.contextmanager
def browser_page(profile: Path) -> Iterator[Page]:
    """A page of a browser of its own, with an empty profile folder."""
    (read_here, write_there), (read_there, write_here) = os.pipe(), os.pipe()
    # The protocol's descriptors are 3 and 4; a shell puts ours there.
    put = f'exec "$@" 3<&{read_there} 4>&{write_there}'
    command = [PROGRAM, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
    with (profile.parent / "browser.log").open("wb") as log:
        browser = subprocess.Popen(
            ["bash", "-c", put, "bash", *command],
            pass_fds=(read_there, write_there),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    os.close(read_there)
    os.close(write_there)
    try:
        yield Page(write_here, read_here)
    finally:
        os.close(write_here)  # the browser ends with its pipe
        os.close(read_here)
        try:
            browser.wait(10)
        except subprocess.TimeoutExpired:
            browser.kill()
            browser.wait()
