"""The admin API over a real core and real rank sessions, without a port."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import httpx

from comm_pool.layout import parse_layout
from coordinator.admin.app import AdminContext, build_admin
from coordinator.admin.key import ADMIN_KEY_ENV, AdminKeys
from coordinator.admin.port import build_metrics
from coordinator.core.core import Core
from coordinator.model.settings import CoreSettings
from coordinator.protocol.config import check_config
from coordinator.protocol.terms import Carry
from coordinator.server.core_actor import CoreActor, monotonic_ms
from coordinator.server.observers import observe
from coordinator.server.server import CellServer
from coordinator.telemetry.history import History
from tests.harness.cells.rank_sessions import RankSessions

TOKEN = "a-shared-secret-of-the-test"
WIDTHS = (1, 2, 4)


@dataclasses.dataclass
class Cell:
    context: AdminContext
    http: httpx.AsyncClient
    ranks: RankSessions

    async def get(self, path: str) -> Any:
        answer = await self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def serving(self) -> None:
        async with asyncio.timeout(10):
            while not self.context.core.views.is_serving:
                await asyncio.sleep(0.01)


def client(context: AdminContext, key: str = "", **more: str) -> httpx.AsyncClient:
    """`more` are variables of other roles."""
    keys = AdminKeys({ADMIN_KEY_ENV: key, **more})
    transport = httpx.ASGITransport(build_admin(context, keys))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8001", timeout=30)


@contextlib.asynccontextmanager
async def admin_cell() -> AsyncIterator[Cell]:
    """Run a cell of four ranks, which tests open themselves, for the length of the block."""
    settings = CoreSettings(world=4, layout=parse_layout("dp4", 4, WIDTHS), recover_ms=12_000)
    core = Core(settings, "c1", monotonic_ms())
    owner = CoreActor(core, tick_ms=20, clock=monotonic_ms)
    server = CellServer(owner, TOKEN, world=4)
    of_cell = {"ranks": 4, "widths": list(WIDTHS), "layout": "dp4"}
    config = check_config({"model": {"path": "demo"}, "cell": of_cell})
    metrics = build_metrics(core, server, observe(core, owner, server, config), config)
    context = AdminContext(
        core=core,
        owner=owner,
        metrics=metrics,
        history=History(server.aggregator.tally),
        clock=monotonic_ms,
        world=4,
        widths=WIDTHS,
        default_carry=Carry.RECOMPUTE,
        facts={"model": "demo", "device": "cpu", "policy": "fixed"},
        usage=server.aggregator.usage,
    )
    port = await server.start("127.0.0.1:0")
    running = asyncio.create_task(owner.run())
    async with client(context) as http:
        yield Cell(context, http, RankSessions(f"127.0.0.1:{port}", TOKEN, 4))
    await server.stop()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error in OpenAI's shape, with exactly its fields."""
    body: dict[str, Any] = answer.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])
