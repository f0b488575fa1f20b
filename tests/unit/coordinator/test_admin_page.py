"""The live page's way in: who may ask without a key, what the page may do, what it is told."""

from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from coordinator.admin.access import AdminGuard
from coordinator.admin.key import ADMIN_KEY_ENV, AdminKeys
from coordinator.admin.page import page
from coordinator.protocol.metrics_wire import ITL, SLO_GOOD, SLO_TOTAL, TOKENS, TTFT, Tally
from coordinator.telemetry.history import AWAY, SAMPLES_MAX, STARTING, History

HOME = "http://127.0.0.1:8001"
KEY = "an-admin-key-of-the-test"


async def anything(scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse({})(scope, receive, send)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": HOME}, 200),
        ({"Host": "localhost:8001", "Origin": "http://localhost:8001"}, 200),
        ({"Host": "[::1]:8001"}, 200),
        ({"Sec-Fetch-Site": "same-origin", "Origin": HOME}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Origin": "null"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "http://127.0.0.1:8000"}, 403),
        ({"Origin": "http://localhost:8001"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Host": "rebound.example:8001"}, 403),
        ({"Host": "rebound.example:8001", "Origin": "http://rebound.example:8001"}, 403),
        ({"Host": "127.0.0.1.rebound.example"}, 403),
        ({"Host": "[::1"}, 403),
    ],
)
async def test_without_a_key_only_programs_and_the_page_itself_are_heard(
    headers: dict[str, str], status: int
) -> None:
    transport = httpx.ASGITransport(AdminGuard(anything, AdminKeys({})))
    async with httpx.AsyncClient(transport=transport, base_url=HOME) as http:
        for path in ("/admin/layout", "/metrics"):
            assert (await http.get(path, headers=headers)).status_code == status
        assert (await http.post("/admin/layout", json={}, headers=headers)).status_code == status


async def test_the_page_needs_no_key_and_all_that_it_asks_does() -> None:
    transport = httpx.ASGITransport(AdminGuard(anything, AdminKeys({ADMIN_KEY_ENV: KEY})))
    async with httpx.AsyncClient(transport=transport, base_url="http://cell.example") as http:
        assert (await http.get("/")).status_code == 200
        assert (await http.get("/admin/live")).status_code == 401
        right = {"Authorization": f"Bearer {KEY}", "Origin": "http://cell.example"}
        assert (await http.post("/admin/layout", json={}, headers=right)).status_code == 200


def test_the_page_loads_nothing_and_cannot_be_framed() -> None:
    answer = page()
    text = bytes(answer.body).decode()
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    for outside in ("src=", "@import", "url(", "http://", "https://", "innerHTML", "eval("):
        assert outside not in text, outside
    assert 'style="' not in text, "the policy would not let it"


def views(layout: str = "dp2", *, phases: tuple[str, ...] = ("serve", "serve")) -> tuple[Any, ...]:
    group = {"ranks": [0], "width": 1, "pages_total": 100, "pages_free": 75}
    tier = {"queued": 1, "placed": 2, "oldest_ms": 500}
    return (
        {"layout": layout, "target": layout, "epoch": 1, "serving": True, "groups": [group]},
        [{"available": phase == "serve", "phase": phase} for phase in phases],
        {"tiers": dict.fromkeys(("interactive", "standard", "batch"), tier)},
    )


def test_samples_tell_the_last_seconds() -> None:
    tally = Tally()
    history = History(tally)
    history.take(*views(), now_ms=1_000, wall_s=10.0)
    for _ in range(10):
        tally.observe(TTFT, 0.03, "interactive", "chat")
        tally.observe(TTFT, 0.03, "interactive", "text_completion")
        tally.observe(ITL, 0.004, "interactive")
    tally.count(TOKENS, "interactive", by=30)
    tally.count(SLO_TOTAL, "batch", by=4)
    tally.count(SLO_GOOD, "batch", by=3)
    history.take(*views(phases=("park", "never heard")), now_ms=2_000, wall_s=11.0)
    first, last = history.after(0)
    assert (first["n"], last["n"], last["t"]) == (1, 2, 11.0)
    assert first["ttft_ms"] == [[None, None]] * 3
    assert last["ttft_ms"][0] == [30.0, 39.8]
    assert last["tokens_per_s"] == 30
    assert last["slo"] == [None, None, 0.75]
    assert last["pages"] == [25, 100]
    assert last["oldest_s"] == [1.5, 1.5, 1.5]
    assert (first["ranks"], last["ranks"]) == ("ss", AWAY + STARTING)
    assert history.after(1) == [last]
    assert history.after(2) == []
    assert history.after(99) == [first, last], "a number of another coordinator"


def test_the_history_is_bounded() -> None:
    history = History(Tally())
    for second in range(SAMPLES_MAX + 50):
        history.take(*views(), now_ms=second, wall_s=float(second))
    kept = history.after(0)
    assert (len(kept), kept[-1]["n"]) == (SAMPLES_MAX, SAMPLES_MAX + 50)
    assert [each["n"] for each in history.after(SAMPLES_MAX + 48)] == [
        SAMPLES_MAX + 49,
        SAMPLES_MAX + 50,
    ]
