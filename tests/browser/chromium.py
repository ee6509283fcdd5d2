"""A headless Chromium, driven over a pipe with the DevTools protocol: no driver, no port and no library in between."""

import base64
import contextlib
import itertools
import json
import os
import select
import subprocess
import tempfile
import time
from pathlib import Path

# One process without a sandbox of its own, as in containers: the pages are ours.
OPTIONS = (
    "--headless=shell", "--no-sandbox", "--no-zygote", "--single-process", "--disable-gpu", "--disable-dev-shm-usage",
    "--no-first-run", "--no-pings", "--disable-background-networking", "--disable-component-update",
    "--disable-domain-reliability", "--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
SECONDS = 60.0


class Chromium:
    """A browser with one page, and everything that happens in it.

    Parameters
    ----------
    program : path
    """

    def __init__(self, program: Path):
        self._folder = tempfile.TemporaryDirectory(prefix="chromium-")
        (to, self._write), (self._read, back) = os.pipe(), os.pipe()

        def descriptors():
            # Chromium reads commands from descriptor 3 and writes to 4.
            os.dup2(to, 13), os.dup2(back, 14)
            os.dup2(13, 3), os.dup2(14, 4)

        beside = program.parent
        fonts = Path(self._folder.name) / "fonts.conf"
        fonts.write_text(
            f"<fontconfig><dir>{beside / 'fonts'}</dir><cachedir>{self._folder.name}</cachedir></fontconfig>"
        )
        environment = {
            **os.environ,
            "HOME": self._folder.name,
            "LD_LIBRARY_PATH": str(beside / "lib"),
            "FONTCONFIG_FILE": str(fonts),
        }
        self._process = subprocess.Popen(
            [str(program), *OPTIONS, f"--user-data-dir={self._folder.name}", "about:blank"],
            preexec_fn=descriptors, close_fds=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env=environment,
        )  # fmt: skip
        os.close(to), os.close(back)
        self._numbers, self._rest, self.events = itertools.count(1), b"", []
        self._session = None
        targets = self._until(
            lambda: [one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        )
        found = self.call("Target.attachToTarget", targetId=targets[0]["targetId"], flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters):
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + SECONDS
        while True:
            found = self._message(end)
            if found.get("id") == number:
                assert "error" not in found, found
                return found["result"]
            self.events.append(found)

    def _message(self, end: float) -> dict:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(end - time.monotonic(), 0))
            assert ready, "Chromium does not answer"
            data = os.read(self._read, 1 << 16)
            assert data, "Chromium has ended"
            self._rest += data
        one, self._rest = self._rest.split(b"\0", 1)
        return json.loads(one)

    def _until(self, ready):
        end = time.monotonic() + SECONDS
        while not (found := ready()):
            assert time.monotonic() < end
            time.sleep(0.05)
        return found

    def evaluate(self, expression: str):
        """The value of an expression of JavaScript on the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, url: str, dark: bool = False) -> None:
        """Go to an address and wait until all of it is loaded."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Emulation.setDeviceMetricsOverride", width=1100, height=1200, deviceScaleFactor=1, mobile=False)
        self.events.clear()
        self.call("Page.navigate", url=url)
        self._until(lambda: self.evaluate("document.readyState === 'complete' && location.href") == url)

    def requests(self) -> list[str]:
        """The addresses that the page has asked for."""
        sent = (one["params"] for one in self.events if one.get("method") == "Network.requestWillBeSent")
        return [one["request"]["url"] for one in sent]

    def complaints(self) -> list[str]:
        """What the console shows: errors and warnings of scripts, the network and the security policy."""
        kinds = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        return [json.dumps(one["params"]) for one in self.events if one.get("method") in kinds]

    def screenshot(self) -> bytes:
        """The page as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError, AssertionError):
            self._session = None
            self.call("Browser.close")
        self._process.kill()
        self._process.wait()
        os.close(self._read), os.close(self._write)
        with contextlib.suppress(OSError):
            self._folder.cleanup()
