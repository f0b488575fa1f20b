"""States of cells as the admin API gives them to the live page, and a server of the page with them.

They have what makes a page overflow: long layouts, causes and reasons, large numbers.
A test compares their form with what a real coordinator answers.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from coordinator.admin.page import page

START_S = 1_764_000_000.0
SAMPLES = 120
SWITCHES = 24
LONG_REASON = (
    "tp4 would take 41.2 ms a step and dp4 55.1 ms at 1,024 running tasks of 8,192 tokens each, so "
    "the objective of interactive tasks (time per output token, 50 ms) is kept by tp4 alone"
)
MODES = ("tp", "sp", "shift")


def live_state(world: int, parts: int = 1) -> dict[str, Any]:
    """The answer of `/admin/live` for a cell in groups of four; ranks hold parts of the weights."""
    layout = "+".join(f"{MODES[first // 4 % 3]}4" for first in range(0, world, 4))
    ranks = list(range(world))
    return {
        "model": "meta-llama/Llama-3.1-70B-Instruct-with-a-long-name-of-somebodys-own",
        "device": "cuda",
        "policy": "adaptive",
        "gateways": 12,
        "world": world,
        "widths": [1, 2, 4],
        "layout": layout,
        "target": layout,
        "epoch": 104_729,
        "serving": True,
        "groups": [
            {
                "ranks": ranks[first : first + 4],
                "mode": MODES[first // 4 % 3],
                "width": 4,
                "leader": first,
                "running": 1_024,
                "waiting": 12_345,
                "pages_free": 123_456,
                "pages_total": 1_234_567,
            }
            for first in range(0, world, 4)
        ],
        "ranks": [_rank(rank, parts) for rank in ranks],
        "queue": {"tiers": {}},
        "switches": [_switch(number, layout, world) for number in range(SWITCHES)],
        "samples": [_sample(number, layout, world) for number in range(1, SAMPLES + 1)],
    }


def _rank(rank: int, parts: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "available": rank % 17 != 16,
        "phase": "serve",
        "heartbeat_age_ms": 123_456,
        "lease_left_ms": 9_876,
        "restarts": 12,
        "pages": {"free": 1_234_567, "total": 12_345_678},
        "gauges": {"host_pages": 98_765, "host_pages_used": 12_345, "host_hits": 1_234_567}
        if parts > 1
        else {},
        "weights": {
            "part": rank % 4 * parts // 4,
            "parts": parts,
            "borrow": "ffn" if parts > 1 else "none",
            "whole_layers": 41 if parts > 1 else 0,
            "borrowing_bytes": {"ring": 786_432_000, "whole_layers": 16_121_856_000},
            "floor_ms": {"dp1": 24.4, "sp4": 24.9} if parts > 1 else {},
        },
    }


def _switch(number: int, layout: str, world: int) -> dict[str, Any]:
    time = datetime.fromtimestamp(START_S + number * 5, UTC).isoformat()
    return {
        "time": time,
        "epoch": 104_000 + number,
        "from": f"dp{world}",
        "to": layout,
        "cause": LONG_REASON,
        "outcome": "served",
        "carry": "reshard",
        "total_ms": 12_345.6,
        "stall_ms": 1_234.5,
        "gap_ms_max": 123_456.7,
        "reshard_bytes": 25_945_964_544,
        "tasks": {"reshard": 12_345, "pause": 0, "drain": 7, "recompute": 3},
    }


def _sample(number: int, layout: str, world: int) -> dict[str, Any]:
    return {
        "n": number,
        "t": START_S + number,
        "layout": layout,
        "target": layout,
        "epoch": 104_729,
        "serving": True,
        "ranks": "".join("x" if rank % 17 == 16 else "s" for rank in range(world)),
        "placed": [12_345, 2_345 + number, 345],
        "queued": [99_999, number * 7, 5],
        "oldest_s": [1.5, 2.5, 300.0],
        "pages": [123_456_789, 999_999_999],
        "tokens_per_s": 1_234_567 + number,
        "ttft_ms": [[12_345.6, 23_456.7], [345.6, 456.7], [5.0, 6.0]],
        "tpot_ms": [[12.34, 23.45], [34.56, 45.67], [56.78, 67.89]],
        "slo": [0.999, 0.955, 0.5],
    }


def decisions() -> list[dict[str, Any]]:
    """The answer of `/admin/decisions`: four, as the page asks for three of them."""
    return [
        {
            "time": datetime.fromtimestamp(START_S + number, UTC).isoformat(),
            "choice": "+".join(["tp4"] * 16),
            "reason": f"{LONG_REASON}, decision {number}",
        }
        for number in range(4)
    ]


@asynccontextmanager
async def page_server(state: dict[str, Any]) -> AsyncIterator[str]:
    """Serve the page over one state, and yield its address."""

    async def home(_: web.Request) -> web.Response:
        answer = page()
        return web.Response(body=bytes(answer.body), headers=dict(answer.headers))

    async def live(request: web.Request) -> web.Response:
        after = int(request.query["after"])
        newer = [each for each in state["samples"] if each["n"] > after]
        return web.json_response({**state, "coordinator": "one", "samples": newer})

    async def why(request: web.Request) -> web.Response:
        last = int(request.query["last"])
        return web.Response(text=json.dumps({"decisions": decisions()[-last:]}))

    app = web.Application()
    app.add_routes(
        [web.get("/", home), web.get("/admin/live", live), web.get("/admin/decisions", why)]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        yield f"http://127.0.0.1:{port}/"
    finally:
        await runner.cleanup()
