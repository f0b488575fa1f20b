"""The admin API over a real core and real rank sessions: answers, refusals, waiting, keys."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from comm_pool.layout import Rank
from coordinator.admin import app
from coordinator.admin.access import BODY_BYTES_MAX
from coordinator.admin.actions import TEXT_CHARS_MAX
from coordinator.admin.port import build_metrics
from coordinator.model.events import RankExited
from coordinator.protocol.config import check_config
from coordinator.protocol.messages.launcher import RenewRanks
from coordinator.protocol.metrics_wire import TENANT_OUTPUT_TOKENS
from coordinator.server import cell_log
from coordinator.server.core_actor import CoreActor, monotonic_ms
from coordinator.server.observers import observe
from coordinator.server.outbox import Outbox
from coordinator.server.server import CellServer
from tests.harness.coordinator.admin_cell import TOKEN, Cell, admin_cell, client, error_of

KEY = "an-admin-key-of-the-test"
READS = ("layout", "ranks", "switches", "decisions", "status", "live")


@pytest.fixture
async def cell() -> AsyncIterator[Cell]:
    async with admin_cell() as running:
        yield running


async def switch(cell: Cell, layout: str, **body: str) -> Any:
    answer = await cell.http.post("/admin/layout?wait=1", json={"layout": layout, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_switches_are_made_and_shown(cell: Cell) -> None:
    async with cell.ranks:
        await cell.serving()
        before = await cell.get("/admin/layout")
        assert (before["layout"], before["target"], before["serving"]) == ("dp4", "dp4", True)
        answer = await switch(cell, "tp2+dp2", carry="pause")
        assert answer["epoch"] > before["epoch"]
        assert (answer["layout"], answer["serving"]) == ("tp2+dp2", True)
        assert [group["ranks"] for group in answer["groups"]] == [[0, 1], [2], [3]]
        assert answer["groups"][0]["mode"] == "tp"
        assert answer["switch"]["from"] == "dp4"
        await switch(cell, "tp4")
        switches = (await cell.get("/admin/switches?last=2"))["switches"]
        assert [(each["from"], each["to"]) for each in switches] == [
            ("dp4", "tp2+dp2"),
            ("tp2+dp2", "tp4"),
        ]
        assert {"epoch", "cause", "tasks", "decide_ms", "park_ms", "gap_ms_max"} <= set(switches[0])
        assert switches[0]["outcome"] == "served"
        answer = await cell.get("/admin/decisions?last=1")
        assert answer["step_times"][0]["curves"]["dp"][0] == {"tokens": 1, "ms": 0.9}
        decisions = answer["decisions"]
        assert decisions[0]["choice"] == "tp4"
        assert decisions[0]["time"].endswith("+00:00")


async def test_the_layout_that_serves_is_answered_at_once(cell: Cell) -> None:
    async with cell.ranks:
        await cell.serving()
        epoch = (await cell.get("/admin/layout"))["epoch"]
        assert (await switch(cell, "dp4"))["epoch"] == epoch


async def test_without_wait_the_answer_comes_before_the_switch(cell: Cell) -> None:
    async with cell.ranks:
        await cell.serving()
        cell.ranks.obeys = False
        answer = await cell.http.post("/admin/layout", json={"layout": "tp4"})
        assert answer.status_code == 200
        assert (answer.json()["target"], answer.json()["serving"]) == ("tp4", False)


async def test_waiting_has_an_end(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "WAIT_LIMIT_S", 0.1)
    async with cell.ranks:
        await cell.serving()
        cell.ranks.obeys = False
        answer = await cell.http.post("/admin/layout?wait=1", json={"layout": "tp4"})
    assert answer.status_code == 504
    assert error_of(answer)["code"] == "deadline_exceeded"


async def test_a_later_switch_ends_the_wait_for_an_earlier_one(cell: Cell) -> None:
    async with cell.ranks:
        await cell.serving()
        cell.ranks.obeys = False
        first = asyncio.create_task(cell.http.post("/admin/layout?wait=1", json={"layout": "tp4"}))
        await asyncio.sleep(0.05)
        await cell.http.post("/admin/layout", json={"layout": "tp2+tp2"})
        answer = await first
    assert answer.status_code == 409
    assert "'tp4' gave way to 'tp2+tp2'" in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("body", "param", "sentence"),
    [
        ({"layout": "tp3+dp1"}, "layout", "Width 3"),
        ({"layout": "dp5"}, "layout", "exactly 4"),
        ({"layout": "dp1+tp2+dp1"}, "layout", "multiple of 2"),
        ({"layout": ""}, "layout", "is empty"),
        ({"layout": "sp2+dp2"}, "layout", "cannot compute this model in sp"),
        ({"layout": "dp3+off1"}, "layout", "every available rank must serve"),
        ({"layout": "tp4", "carry": "teleport"}, "carry", "is no carry plan"),
        ({"layout": 4}, "layout", "string"),
        ({}, "layout", "Field required"),
        ({"layout": "tp4", "force": True}, "force", "Extra inputs"),
    ],
)
async def test_what_cannot_be_is_refused(
    cell: Cell, body: dict[str, Any], param: str, sentence: str
) -> None:
    async with cell.ranks:
        await cell.serving()
        answer = await cell.http.post("/admin/layout?wait=1", json=body)
        assert answer.status_code == 400
        error = error_of(answer)
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert sentence in error["message"]
        assert (await cell.get("/admin/layout"))["target"] == "dp4"


async def test_before_the_ranks_are_there_a_switch_is_to_be_tried_again(cell: Cell) -> None:
    answer = await cell.http.post("/admin/layout", json={"layout": "tp4"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert error_of(answer)["code"] == "recovering"


async def test_ranks_and_status_tell_what_is_known(cell: Cell) -> None:
    assert (await cell.get("/admin/ranks"))["ranks"][0]["phase"] == "never heard"
    async with cell.ranks:
        await cell.serving()
        ranks = (await cell.get("/admin/ranks"))["ranks"]
        assert [rank["pid"] for rank in ranks] == [1000, 1001, 1002, 1003]
        assert {"phase", "heartbeat_age_ms", "lease_left_ms", "restarts", "memory"} <= set(ranks[0])
        status = await cell.get("/admin/status")
        assert (status["model"], status["layout"], status["gateways"]) == ("demo", "dp4", 0)
        assert set(status["queue"]["tiers"]) == {"interactive", "standard", "batch"}


async def test_metrics_are_valid_and_count_switches(cell: Cell) -> None:
    async with cell.ranks:
        await cell.serving()
        await switch(cell, "tp4")
        text = (await cell.http.get("/metrics")).text
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["aileron_switch_total", "dp4", "served", "tp4"] == 1
    assert samples["aileron_ranks_alive",] == 4
    assert samples["aileron_serving",] == 1
    assert samples["aileron_queue_depth", "standard"] == 0
    assert ("aileron_heartbeat_age_seconds", "3") in samples
    assert [key[1:] for key in samples if key[0] == "aileron_layout_info"] == [("tp4",)]
    assert samples["aileron_has_served",] == 1


async def test_a_cell_that_only_loads_has_not_served(cell: Cell) -> None:
    text = (await cell.http.get("/metrics")).text
    assert "aileron_has_served 0.0" in text


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/favicon.ico", 404, "unknown_url"),
        ("GET", "/docs", 404, "unknown_url"),
        ("DELETE", "/admin/layout", 405, "method_not_allowed"),
        ("GET", "/admin/switches?last=0", 400, "invalid_value"),
        ("GET", "/admin/switches?last=many", 400, "invalid_value"),
        ("GET", "/admin/decisions?last=1001", 400, "invalid_value"),
    ],
)
async def test_errors_have_one_shape(
    cell: Cell, method: str, path: str, status: int, code: str
) -> None:
    answer = await cell.http.request(method, path)
    assert answer.status_code == status
    assert error_of(answer)["code"] == code


async def test_a_request_for_the_model_is_sent_to_the_serving_port(cell: Cell) -> None:
    answer = await cell.http.post("/v1/chat/completions", json={})
    assert answer.status_code == 404
    assert "serving port" in error_of(answer)["message"]


async def test_refused_methods_come_with_the_allowed_ones(cell: Cell) -> None:
    methods = {"/admin/renew": "POST", "/admin/layout": "GET, HEAD, POST", "/": "GET, HEAD"}
    for path, allowed in methods.items():
        answer = await cell.http.request("PUT", path)
        assert answer.status_code == 405
        assert answer.headers["allow"] == allowed


@pytest.mark.parametrize("path", ["/health", "/metrics", "/admin/layout", "/admin/status", "/"])
async def test_head_is_get(cell: Cell, path: str) -> None:
    """The server in front drops the body."""
    answer = await cell.http.head(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == (await cell.http.get(path)).headers["content-type"]


async def test_bodies_are_checked_before_they_are_read(cell: Cell) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b"{"

    kind = {"Content-Type": "application/json"}
    bad = await cell.http.post("/admin/layout", content=b"{nonsense", headers=kind)
    assert (bad.status_code, error_of(bad)["code"]) == (400, "invalid_json")
    for nothing in (b"", b"[]", b"null"):
        answer = await cell.http.post("/admin/layout", content=nothing, headers=kind)
        assert (answer.status_code, error_of(answer)["param"]) == (400, "body")
    plain = await cell.http.post("/admin/layout", content=b'{"layout": "tp4"}')
    assert "application/json" in error_of(plain)["message"]
    long = await cell.http.post("/admin/layout", content=b" " * (BODY_BYTES_MAX + 1))
    assert (long.status_code, error_of(long)["code"]) == (413, "request_too_large")
    chunked = await cell.http.post("/admin/layout", content=endless())
    assert (chunked.status_code, error_of(chunked)["code"]) == (411, "length_required")


async def test_web_pages_cannot_switch(cell: Cell) -> None:
    answer = await cell.http.post(
        "/admin/layout", json={"layout": "tp4"}, headers={"Origin": "https://evil.example"}
    )
    assert (answer.status_code, error_of(answer)["code"]) == (403, "cross_origin")


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_only_our_page_of_the_same_scheme_may_ask(cell: Cell, scheme: str) -> None:
    url = f"{scheme}://127.0.0.1:8001"
    for origin, status in ((url, 400), ("http://127.0.0.1:8002", 403), ("ftp://127.0.0.1", 403)):
        answer = await cell.http.post(
            f"{url}/admin/layout", json={"layout": "none"}, headers={"Origin": origin}
        )
        assert answer.status_code == status, origin
    other = "http" if scheme == "https" else "https"
    answer = await cell.http.post(
        f"{url}/admin/layout",
        json={"layout": "none"},
        headers={"Origin": f"{other}://127.0.0.1:8001"},
    )
    assert answer.status_code == 403


async def test_ranks_are_renewed_through_their_launcher(cell: Cell) -> None:
    async with cell.ranks:
        await cell.serving()
        answer = await cell.http.post("/admin/renew")
        assert answer.status_code == 503
        assert error_of(answer)["code"] == "no_launcher"
        launcher = Outbox()
        cell.context.owner.launcher_outboxes.add(launcher)
        answer = await cell.http.post("/admin/renew")
        assert answer.status_code == 200
        assert answer.json()["layout"] == "dp4"
        said = await launcher.take()
        assert isinstance(said, RenewRanks)
        ranks: Any = cell.context.core.views.ranks(monotonic_ms())["ranks"]
        known = tuple((each["rank"], each["incarnation"]) for each in ranks)
        assert said.ranks == known
        answer = await cell.http.post("/admin/renew", json={"ranks": [3, 2]})
        assert answer.status_code == 200
        said = await launcher.take()
        assert isinstance(said, RenewRanks)
        assert said.ranks == known[2:]
        for wrong in ([1, 2], [0, 1, 2], [4], [0, 0], [-1], ["0"], 0):
            answer = await cell.http.post("/admin/renew", json={"ranks": wrong})
            assert answer.status_code in (400, 422), wrong
        answer = await cell.http.post("/admin/renew", json={"ranks": [4, 7]})
        assert error_of(answer)["message"] == "Rank 4 does not exist: the ranks are 0 to 3."
        answer = await cell.http.post("/admin/renew", json={"ranks": [1, 2]})
        assert "name one rank, those of one group, such as 0 1, or none" in str(error_of(answer))


async def test_nothing_is_put_back_where_every_mode_serves(cell: Cell) -> None:
    answer = await cell.http.post("/admin/put-back", json={"mode": "no-mode"})
    assert answer.status_code == 400
    message = error_of(answer)["message"]
    assert message == "There is nothing to put back: every mode serves."


async def test_usage_is_by_tenant_and_tier(cell: Cell) -> None:
    for tenant, count in (("acme", 3), ("other-one", 2)):
        cell.context.usage.add(TENANT_OUTPUT_TOKENS, (tenant, "batch"), count, time.time())
    by_day = await cell.get("/admin/usage")
    rows = [(row["tenant"], row["tier"], row["output_tokens"]) for row in by_day["usage"]]
    assert rows == [("acme", "batch", 3), ("other-one", "batch", 2)]
    assert set(by_day) == {"by", "since", "is_cut", "usage"}
    assert by_day["usage"][0].keys() == {
        *("begin", "tenant", "tier", "requests", "prompt_tokens", "cached_tokens"),
        "output_tokens",
    }
    by_hour = await cell.get("/admin/usage?by=hour&last=2&tenant=acme")
    assert [row["tenant"] for row in by_hour["usage"]] == ["acme"]
    refused = await cell.http.get("/admin/usage?by=year")
    assert (refused.status_code, error_of(refused)["param"]) == (400, "by")


async def test_the_metric_of_tenants_is_on_only_on_demand(cell: Cell) -> None:
    cell.context.usage.add(TENANT_OUTPUT_TOKENS, ("acme", "batch"), 3, time.time())
    assert "acme" not in (await cell.http.get("/metrics")).text
    core, owner = cell.context.core, cell.context.owner
    config = check_config({"model": {"path": "demo"}, "usage": {"tenant_metric": True}})
    assert isinstance(owner, CoreActor)
    server = CellServer(owner, TOKEN, 4, cell.context.usage)
    text = build_metrics(core, server, observe(core, owner, server, config), config).render()
    line = b'aileron_tenant_tokens_total{kind="output",tenant="acme",tier="batch"} 3.0'
    assert line in text


async def test_operators_actions_are_logged_with_who_asked(cell: Cell) -> None:
    async with cell.ranks:
        await cell.serving()
        with capture_logs() as lines:
            await switch(cell, "tp2+dp2", carry="pause")
            await cell.http.post("/admin/layout", json={"layout": "x" * 1_000})
            await cell.http.post("/admin/renew", json={"ranks": [0, 1]})
            await cell.http.post("/admin/put-back", json={"mode": "tp2"})
            async with client(cell.context, KEY) as guarded:
                await guarded.post("/admin/layout", json={"layout": "dp4"})
                own = {"Authorization": f"Bearer {KEY}"}
                await guarded.post("/admin/layout", json={"layout": "dp4"}, headers=own)
    actions = [line for line in lines if line["event"].startswith("admin_")]
    about = [
        tuple(line.get(name) for name in ("action", "caller", "status", "error"))
        for line in actions
    ]
    assert about == [
        ("layout", "loopback", 200, None),
        ("layout", "loopback", 400, "invalid_value"),
        ("renew", "loopback", 503, "no_launcher"),
        ("put-back", "loopback", 400, "invalid_value"),
        (None, None, 401, None),
        ("layout", "admin key", 200, None),
    ]
    assert (actions[0]["layout"], actions[0]["carry"]) == ("tp2+dp2", "pause")
    assert len(actions[1]["layout"]) == TEXT_CHARS_MAX
    assert actions[2]["ranks"] == [0, 1]
    assert all(line["address"] == "127.0.0.1" for line in actions)
    assert KEY not in str(lines)


async def test_switches_and_ranks_are_logged(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_log, "SETTLE_MS", 50)
    with capture_logs() as lines:

        async def logged(event: str, count: int = 1) -> list[Any]:
            async with asyncio.timeout(10):
                while True:
                    found = [line for line in lines if line["event"] == event]
                    if len(found) >= count:
                        return found
                    await asyncio.sleep(0.01)

        async with cell.ranks:
            await cell.serving()
            await logged("switch_measured")
            lines.clear()
            answer = await switch(cell, "tp2+dp2", carry="pause")
            [begun], [served] = await logged("switch_begun"), await logged("switch_served")
            [measured] = await logged("switch_measured")
            about = {
                "epoch": answer["epoch"],
                "from_layout": "dp4",
                "to_layout": "tp2+dp2",
                "cause": "operator",
                "carry": "pause",
                "log_level": "info",
            }
            assert {**begun, **about, "event": "switch_begun"} == begun
            assert {**served, **about, "event": "switch_served"} == served
            assert served["total_ms"] >= 0
            assert measured["epoch"] == answer["epoch"]
            await cell.context.owner.post(RankExited(Rank(3)))
            [left] = await logged("rank_left")
            assert (left["rank"], left["log_level"]) == (3, "warning")
            [_, lost] = await logged("switch_begun", 2)
            assert lost["to_layout"] == "tp2+dp1+off1"
