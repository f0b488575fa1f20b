"""The live page in a real headless Chromium, over a real coordinator; its ranks have no engine."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.protocol import wire
from coordinator.protocol.messages.gateway import GatewayHello, Submit
from coordinator.protocol.messages.message import PROTOCOL_VERSION
from coordinator.protocol.messages.tasks import TaskHeader
from coordinator.protocol.metrics_wire import (
    ITL,
    SLO_GOOD,
    SLO_TOTAL,
    TOKENS,
    TTFT,
    Measures,
    Tally,
)
from coordinator.protocol.terms import TaskId, Tier
from tests.harness.browser.browser import NO_BROWSER, Page, browser, find_browser
from tests.harness.cells.coordinator_process import TOKEN, Coordinator
from tests.harness.cells.rank_sessions import PAGES, RankSessions

AIO: Any = grpc.aio
BROWSER = find_browser()
KEY = "an-admin-key-of-the-test"
TIERS = tuple(tier.name.lower() for tier in Tier)
RUN_LEAST = 16
"""Pixels side by side; two seconds of a minute are wider."""

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


CURVES = {
    "placed": ("t0", "t1", "t2"),
    "queued": ("t0", "t1", "t2"),
    "ttft": ("t0", "t1", "t2"),
    "tpot": ("t0", "t1", "t2"),
    "pages": ("t1",),
    "rate": ("sp",),
}
"""The colours of each chart's lines."""

LONGEST_RUNS = f"""Object.fromEntries(Object.entries({json.dumps(CURVES)}).map(([id, names]) => {{
  const canvas = document.getElementById(id), width = canvas.width;
  const data = canvas.getContext("2d").getImageData(0, 0, width, canvas.height).data;
  const style = getComputedStyle(document.documentElement);
  return [id, names.map(name => {{
    const hex = style.getPropertyValue("--" + name).trim();
    const wanted = [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16));
    let longest = 0, run = 0;
    for (let at = 0; at < data.length; at += 4) {{
      if (at / 4 % width === 0) run = 0;
      // The edges of a line are half transparent, which rounds its colour.
      const near = (part, i) => Math.abs(part - data[at + i]) < 4;
      run = data[at + 3] > 99 && wanted.every(near) ? run + 1 : 0;
      longest = Math.max(longest, run);
    }}
    return longest;
  }})];
}}))"""
"""By chart: how many pixels side by side each of its lines has in its own colour. A dot has two."""

TASKS = {
    "placed": {Tier.INTERACTIVE: 6, Tier.STANDARD: 4, Tier.BATCH: 2},
    "queued": {Tier.INTERACTIVE: 9, Tier.STANDARD: 5, Tier.BATCH: 2},
}
PROMPT_TOKENS = {"placed": 300, "queued": 480}
"""Four ranks have the pages of three of the first prompts each, which fill them.

The batch task of a rank leaves too little for one of the second.
"""


@asynccontextmanager
async def cell(
    folder: Path, world: int, *, blocks_used: int = 0, **env: str
) -> AsyncIterator[Coordinator]:
    coordinator = Coordinator(
        folder,
        cell={"ranks": world, "layout": f"dp{world}", "widths": [1, 2, 4]},
    )
    with coordinator.running(**env):
        target = f"127.0.0.1:{coordinator.grpc}"
        async with RankSessions(target, TOKEN, world, heartbeat_s=0.02 * world) as ranks:
            ranks.blocks_used = blocks_used
            yield coordinator


async def tell(coordinator: Coordinator, tally: Tally, tasks: Sequence[Submit] = ()) -> None:
    """Tell the coordinator as a gateway does, until cancelled; `tasks` never end."""
    address = f"127.0.0.1:{coordinator.grpc}"
    async with AIO.insecure_channel(address, options=wire.CHANNEL_OPTIONS) as channel:
        call = channel.stream_stream(
            wire.GATEWAY_PATH,
            request_serializer=wire.encode,
            response_deserializer=wire.decode_gateway_down,
        )(metadata=((wire.TOKEN_METADATA_KEY, TOKEN),))
        await call.write(GatewayHello(PROTOCOL_VERSION, "g"))
        for task in tasks:
            await call.write(task)
        while True:
            for slow, tier in enumerate(TIERS, start=1):
                tally.observe(TTFT, 0.03 * slow, tier, "chat")
                tally.observe(ITL, 0.004 * slow, tier)
                for measure in (TOKENS, SLO_TOTAL, SLO_GOOD):
                    tally.count(measure, tier, by=5)
            await call.write(Measures(tally.families()))
            await asyncio.sleep(0.2)


async def show_a_minute(page: Page) -> None:
    await page.evaluate(
        "document.getElementById('span').value = '60';"
        "document.getElementById('span').dispatchEvent(new Event('change'))"
    )


async def painted(page: Page, mode: str) -> None:
    """Wait until the lanes show a mode."""
    await show_a_minute(page)
    await page.until(f"({COLOURS})[{mode!r}] > 50")


def said(pattern: str) -> str:
    """Script: what is said below the switch control fits the pattern."""
    return f"/{pattern}/.test(document.getElementById('result').textContent)"


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


async def test_every_curve_is_drawn_in_its_own_colour(tmp_path: Path) -> None:
    """Pages are a quarter in use, and tasks of all tiers run and wait."""
    assert BROWSER is not None
    tasks = [
        Submit(
            TaskHeader(
                TaskId(f"{where}-{tier}-{number}"), "g", "tcp://g", PROMPT_TOKENS[where], 9, tier
            ),
            b"",
        )
        for where, counts in TASKS.items()
        for tier, count in counts.items()
        for number in range(count)
    ]
    async with (
        cell(tmp_path, 4, blocks_used=PAGES // 4) as coordinator,
        browser(BROWSER, tmp_path / "b") as page,
    ):
        await coordinator.serving()
        telling = asyncio.create_task(tell(coordinator, Tally(), tasks))
        await page.open(f"http://127.0.0.1:{coordinator.admin}/")
        await page.until("document.getElementById('layout').textContent === 'dp4 serves'")
        await show_a_minute(page)
        await page.until(f"Object.values({LONGEST_RUNS}).flat().every(run => run >= {RUN_LEAST})")
        for name, counts in TASKS.items():
            counted = await page.evaluate(f"samples.map(each => each.{name})")
            assert list(counts.values()) in counted, "the curves are of these tasks"
        # Another measure's colour is in no chart.
        strange = LONGEST_RUNS.replace('"t1"', '"shift"').replace('"sp"', '"shift"')
        assert (await page.evaluate(strange))["rate"] == [0]
        assert (await page.evaluate(strange))["pages"] == [0]
        assert not telling.done()
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
        await page.until("/key is wrong/.test(document.getElementById('keyError').textContent)")
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


async def test_a_viewer_sees_everything_and_switches_nothing(tmp_path: Path) -> None:
    assert BROWSER is not None
    keys: Any = {f"AILERON_{name}_KEY": f"{KEY}-{name}" for name in ("ADMIN", "VIEWER", "METRICS")}
    async with (
        cell(tmp_path, 4, **keys) as coordinator,
        browser(BROWSER, tmp_path / "b") as page,
    ):
        await page.open(f"http://127.0.0.1:{coordinator.admin}/")
        await page.until("document.activeElement.id === 'key'")
        await page.type(f"{KEY}-METRICS")
        await page.key("Enter", "\r")
        await page.until(
            "/needs the role viewer/.test(document.getElementById('keyError').textContent)"
        )
        await page.until("document.activeElement.id === 'key'")
        await page.type(f"{KEY}-VIEWER")
        await page.key("Enter", "\r")
        await page.until("document.getElementById('layout').textContent === 'dp4 serves'")
        await page.evaluate("document.getElementById('wanted').focus()")
        await page.type("tp4")
        await page.key("Enter", "\r")
        await page.until(said("needs the role operator"))
        assert await page.evaluate("document.getElementById('layout').textContent") == "dp4 serves"
