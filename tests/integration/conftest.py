"""What several modules of gateway tests start in the same way; a module may define its own."""

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from tests.harness.cells.gateway_cell import FakeCell, GatewayProcess, Ran
from worker.demo import MODEL_DIR


@pytest.fixture(scope="module")
def shared_cell() -> Iterator[FakeCell]:
    cell = FakeCell()
    yield cell
    cell.close()


@pytest.fixture
def cell(shared_cell: FakeCell, gateway: GatewayProcess) -> FakeCell:
    """The cell of a gateway, which answers everybody with two tokens."""

    async def answer_shortly(ran: Ran) -> None:
        ran.tokens(0, [300, 301], "length")

    shared_cell.reset()
    shared_cell.behave = answer_shortly
    return shared_cell


@pytest.fixture(scope="module")
def gateway(
    request: pytest.FixtureRequest,
    shared_cell: FakeCell,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[GatewayProcess]:
    folder, warm = tmp_path_factory.mktemp("gateway"), not hasattr(request.module, "rss_mib")
    process = GatewayProcess(folder, MODEL_DIR, shared_cell, warm=warm)
    yield process
    process.close()


@pytest.fixture
async def client(gateway: GatewayProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=200) as made:
        yield made
