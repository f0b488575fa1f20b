"""A real headless Chromium, driven over its DevTools protocol: one page at a time.

The browser of the machine is used, or the one that `AILERON_TEST_BROWSER` names; nothing is
downloaded. Without one the tests that need it are skipped, and say so.
"""

import asyncio
import base64
import itertools
import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

BROWSER_ENV = "AILERON_TEST_BROWSER"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
START_LIMIT_S = 60
CALL_LIMIT_S = 60
NO_BROWSER = (
    f"NOT TESTED in a browser: no Chromium is on PATH; install one or name it in {BROWSER_ENV}."
)


def find_browser() -> str | None:
    """Return the path of a Chromium."""
    named = os.environ.get(BROWSER_ENV, "")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.problems: list[str] = []
        """What the page or its policy complained about."""

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        said = await self._ask(method, **params)
        assert "error" not in said, said["error"]
        return dict(said["result"])

    async def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(CALL_LIMIT_S):
            while (said := await self._socket.receive_json()).get("id") != number:
                self._note(said)
        return dict(said)

    def _note(self, said: dict[str, Any]) -> None:
        params = said.get("params", {})
        if said["method"] == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif said["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(str(params["entry"]["text"]))

    async def evaluate(self, script: str) -> Any:
        """Return the value of an expression."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, script: str) -> Any:
        """Wait until an expression is true, and return its value."""
        deadline = time.monotonic() + CALL_LIMIT_S
        while not (value := await self.evaluate(script)):
            if time.monotonic() > deadline:
                shown = await self.evaluate("document.body.innerText")
                raise AssertionError(f"{script} did not come true.\n{self.problems}\n{shown}")
            await asyncio.sleep(0.05)
        return value

    async def open(self, url: str, *, width: int = 1360, height: int = 1500) -> None:
        """Load a page in a window of this size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        await self.call("Page.navigate", url=url)
        ready = f"location.href === {url!r} && document.readyState === 'complete'"
        async with asyncio.timeout(CALL_LIMIT_S):
            # Between two pages there is none that could answer.
            while True:
                answer = (await self._ask("Runtime.evaluate", expression=ready)).get("result", {})
                if answer.get("result", {}).get("value"):
                    return
                await asyncio.sleep(0.05)

    async def prefer(self, scheme: str) -> None:
        """Prefer light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def key(self, name: str, text: str = "") -> None:
        """Press and release a key."""
        codes = {"Tab": 9, "Enter": 13}
        code = {"windowsVirtualKeyCode": codes[name]} if name in codes else {}
        about = {"key": name, "text": text, **code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **about)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=name, **code)

    async def point(self, script: str) -> None:
        """Move the mouse onto the middle of an element."""
        at = await self.evaluate(
            f"(box => [box.left + box.width / 2, box.top + box.height / 2])"
            f"(({script}).getBoundingClientRect())"
        )
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1])

    async def type(self, text: str) -> None:
        """Type into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def screenshot(self) -> bytes:
        """Return a PNG of the window."""
        answer = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(answer["data"])


@asynccontextmanager
async def browser(executable: str, folder: Path) -> AsyncIterator[Page]:
    """Run a browser for the length of the block and yield its first tab."""
    process = await asyncio.create_subprocess_exec(
        executable,
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
        *("--no-proxy-server", "--remote-debugging-port=0", f"--user-data-dir={folder}"),
        "about:blank",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        port = await _port(process, folder / "DevToolsActivePort")
        async with aiohttp.ClientSession() as http:
            async with http.get(f"http://127.0.0.1:{port}/json/list") as answer:
                tabs = [tab for tab in await answer.json() if tab["type"] == "page"]
            address = tabs[0]["webSocketDebuggerUrl"]
            async with http.ws_connect(address, max_msg_size=0) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await page.call(f"{domain}.enable")
                yield page
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def _port(process: asyncio.subprocess.Process, file: Path) -> int:
    async with asyncio.timeout(START_LIMIT_S):
        while True:
            assert process.returncode is None, "the browser ended."
            lines = file.read_text().splitlines() if file.exists() else []
            if len(lines) >= 2:
                return int(lines[0])
            await asyncio.sleep(0.05)
