"""What several modules start in the same way; a module may define its own."""

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from tests.harness.cells.bare_cell import BareCell, bare_cell
from tests.harness.cells.gateway_cell import FakeCell, GatewayProcess, Ran
from tests.harness.cells.random_load import RANDOM_ARGS
from tests.harness.cells.shared import PAUSE_LIMIT_MS, SharedCell
from tests.harness.vllm.references import LOGITS_ARGS
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


@pytest.fixture(scope="session")
def shared_four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedCell]:
    """Four ranks in fp32, also in two shares of two, whose prompts take several steps."""
    shared = SharedCell(
        lambda: bare_cell(
            tmp_path_factory.mktemp("four-ranks"),
            ranks=4,
            engine_args=[*RANDOM_ARGS],
            mixed=("sp2tp2",),
            pause_limit_ms=PAUSE_LIMIT_MS,
        )
    )
    yield shared
    shared.close()


@pytest.fixture
def four_ranks(shared_four_ranks: SharedCell) -> Iterator[BareCell]:
    """The cell of four ranks, at rest; its tests are of one xdist group, and kill nothing."""
    with shared_four_ranks.at_rest() as cell:
        yield cell


@pytest.fixture(scope="session")
def shared_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedCell]:
    """Two ranks in fp32: as many as there are cores where tests run."""
    shared = SharedCell(
        lambda: bare_cell(
            tmp_path_factory.mktemp("pair"),
            ranks=2,
            engine_args=["--dtype", "float32", "--max-model-len", "1024"],
            pause_limit_ms=60_000,
        )
    )
    yield shared
    shared.close()


@pytest.fixture
def pair(shared_pair: SharedCell) -> Iterator[BareCell]:
    """The cell of two ranks, at rest; its tests are of one xdist group, and kill nothing."""
    with shared_pair.at_rest() as cell:
        yield cell


@pytest.fixture(scope="session")
def shared_logits_cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedCell]:
    """Four ranks in fp32 that tell raw logits of the whole vocabulary."""
    shared = SharedCell(
        lambda: bare_cell(
            tmp_path_factory.mktemp("logits"),
            ranks=4,
            engine_args=["--dtype", "float32", *LOGITS_ARGS],
        )
    )
    yield shared
    shared.close()


@pytest.fixture
def logits_cell(shared_logits_cell: SharedCell) -> Iterator[BareCell]:
    """The cell that tells logits, at rest."""
    with shared_logits_cell.at_rest() as cell:
        yield cell
