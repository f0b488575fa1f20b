"""The live page in a real headless Chromium, over a real coordinator; its ranks have no engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.protocol import wire
from coordinator.protocol.measures import ITL, SLO_GOOD, SLO_TOTAL, TOKENS, TTFT, Measures, Tally
from coordinator.protocol.messages import PROTOCOL_VERSION, GatewayHello
from tests.harness.browser import NO_BROWSER, Page, browser, find_browser
from tests.harness.coordinator_process import TOKEN, Coordinator
from tests.harness.rank_sessions import RankSessions

AIO: Any = grpc.aio
BROWSER = find_browser()
KEY = "an-admin-key-of-the-test"

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(BROWSER is None, reason=NO_BROWSER),
]

COLOURS = """(() => {
  const canvas = document.getElementById("laneCanvas");
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const style = getComputedStyle(document.documentElement), found = {};
  for (const name of ["dp", "tp"]) {
    const hex = style.getPropertyValue("--" + name).trim();
    const [r, g, b] = [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16));
    found[name] = 0;
    for (let at = 0; at < data.length; at += 4)
      found[name] += data[at] === r && data[at + 1] === g && data[at + 2] === b;
  }
  return found;
})()"""
"""Pixels of the lanes in the colours of dp and tp."""


@asynccontextmanager
async def cell(folder: Path, world: int, **env: str) -> AsyncIterator[Coordinator]:
    coordinator = Coordinator(
        folder,
        cell={"ranks": world, "layout": f"dp{world}", "widths": [1, 2, 4]},
    )
    with coordinator.running(**env):
        target = f"127.0.0.1:{coordinator.grpc}"
        async with RankSessions(target, TOKEN, world, heartbeat_s=0.02 * world):
            yield coordinator


async def tell(coordinator: Coordinator, tally: Tally) -> None:
    """Tell the coordinator as a gateway does, until cancelled."""
    address = f"127.0.0.1:{coordinator.grpc}"
    async with AIO.insecure_channel(address, options=wire.CHANNEL_OPTIONS) as channel:
        call = channel.stream_stream(
            wire.GATEWAY_PATH,
            request_serializer=wire.encode,
            response_deserializer=wire.decode_gateway_down,
        )(metadata=((wire.TOKEN_METADATA_KEY, TOKEN),))
        await call.write(GatewayHello(PROTOCOL_VERSION, "g"))
        while True:
            tally.observe(TTFT, 0.03, "interactive", "chat")
            tally.observe(ITL, 0.004, "interactive")
            for measure in (TOKENS, SLO_TOTAL, SLO_GOOD):
                tally.count(measure, "interactive", by=5)
            await call.write(Measures(tally.families()))
            await asyncio.sleep(0.2)


async def painted(page: Page, mode: str) -> None:
    """Wait until the lanes show a mode."""
    await page.evaluate(
        "document.getElementById('span').value = '60';"
        "document.getElementById('span').dispatchEvent(new Event('change'))"
    )
    await page.until(f"({COLOURS})[{mode!r}] > 50")


def said(pattern: str) -> str:
    """Script: what is said below the switch control fits the pattern."""
    return f"/{pattern}/.test(document.getElementById('said').textContent)"


async def test_it_draws_updates_and_switches_at_four_ranks(tmp_path: Path) -> None:
    assert BROWSER is not None
    async with cell(tmp_path, 4) as coordinator, browser(BROWSER, tmp_path / "b") as page:
        telling = asyncio.create_task(tell(coordinator, Tally()))
        await coordinator.serving()
        await page.open(f"http://127.0.0.1:{coordinator.admin}/")
        await page.until("document.getElementById('layout').textContent === 'dp4 serves'")
        await page.until("document.documentElement.dataset.drawn > 2")
        await painted(page, "dp")
        await page.until("document.querySelector('.tile b').textContent !== ''")
        await page.until("/30|25|3\\d/.test(document.querySelectorAll('.tile b')[4].textContent)")
        assert await page.evaluate("document.getElementById('ranks').rows.length") == 4
        # By keyboard alone: into the field, type, Enter.
        await page.evaluate("document.getElementById('span').focus()")
        while await page.evaluate("document.activeElement.id") != "wanted":
            await page.key("Tab")
        await page.type("tp2+dp2")
        await page.key("Enter", "\r")
        await page.until(said("tp2.dp2 serves, epoch"))
        await page.until("document.getElementById('layout').textContent === 'tp2+dp2 serves'")
        mark = (
            "[...document.querySelectorAll('.mark')].find(each => each.ariaLabel.includes('tp2'))"
        )
        await page.until(f"!!{mark}")
        await page.evaluate(f"{mark}.focus()")
        story = await page.until("document.getElementById('tip').textContent")
        assert "dp4 → tp2+dp2  (served)\nbecause: operator" in story
        assert not await page.evaluate("document.getElementById('tip').hidden")
        assert (await coordinator.serving())["layout"] == "tp2+dp2"
        await painted(page, "tp")
        # What cannot be is said, in the server's words.
        await page.evaluate("document.getElementById('wanted').value = ''")
        await page.evaluate("document.getElementById('wanted').focus()")
        await page.type("tp3+dp1")
        await page.key("Enter", "\r")
        await page.until(said("Width 3"))
        assert [each for each in page.problems if "400" not in each] == []
        telling.cancel()


async def test_it_works_at_64_ranks_with_a_key_in_the_dark(tmp_path: Path) -> None:
    assert BROWSER is not None
    async with (
        cell(tmp_path, 64, AILERON_ADMIN_KEY=KEY) as coordinator,
        browser(BROWSER, tmp_path / "b") as page,
    ):
        await page.prefer("dark")
        await page.open(f"http://127.0.0.1:{coordinator.admin}/")
        await page.until("!document.getElementById('keyCard').hidden")
        await page.until("document.activeElement.id === 'key'")
        await page.type("wrong-" + KEY)
        await page.key("Enter", "\r")
        await page.until("/wrong or missing/.test(document.getElementById('keySaid').textContent)")
        await page.until("document.activeElement.id === 'key'")
        await page.type(KEY)
        await page.key("Enter", "\r")
        await page.until("document.getElementById('layout').textContent === 'dp64 serves'")
        assert await page.evaluate("document.getElementById('keyCard').hidden")
        wide = "+".join(["tp4"] * 16)
        await page.evaluate("document.getElementById('wanted').focus()")
        await page.type(wide)
        await page.key("Enter", "\r")
        await page.until(said(" serves, epoch"))
        await painted(page, "tp")
        assert await page.evaluate("document.getElementById('ranks').rows.length") == 64
        dark = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert dark == "rgb(15, 19, 24)"
        fits = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        assert await page.evaluate(fits)
        assert [each for each in page.problems if "401" not in each] == []
