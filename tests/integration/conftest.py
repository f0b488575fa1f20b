"""What several modules start in the same way; a module may define its own."""

import os
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from tests.harness.cells import hasty_gateway
from tests.harness.cells.bare_cell import BareCell, bare_cell
from tests.harness.cells.gateway_cell import FakeCell, GatewayProcess, Ran
from tests.harness.cells.hasty_gateway import HASTY_S, patience
from tests.harness.cells.product import Product, product
from tests.harness.cells.random_load import RANDOM_ARGS
from tests.harness.cells.shared import PATIENCE, PAUSE_LIMIT_MS, SharedCell
from worker.demo import MODEL_DIR


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """The environment as it was, after each test.

    vLLM sets variables when it is configured, `LD_PRELOAD` among them. Processes that start later
    would have them too, and those who fork warm processes would import everything again.
    """
    before = dict(os.environ)
    yield
    # Only what has changed: other threads may be reading the rest.
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    for name, value in before.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


@pytest.fixture(scope="session")
def shared_cell() -> Iterator[FakeCell]:
    """The cell of the gateway that modules share."""
    cell = FakeCell()
    yield cell
    cell.close()


@pytest.fixture(scope="module")
def own_cell() -> Iterator[FakeCell]:
    """A cell of the module's own, for a gateway of its own."""
    cell = FakeCell()
    yield cell
    cell.close()


@pytest.fixture(scope="session")
def shared_product(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    """Two ranks in fp32, so that tokens must be identical, in whatever layout the last test left.

    For modules of the `xdist_group` "ranks-product", which need no other settings and end no rank.
    """
    settings = {"batches": {"lines_at_once": 4, "lease_ms": 2_000}}
    with product(
        tmp_path_factory.mktemp("product"),
        ranks=2,
        engine_args=["--dtype", "float32"],
        settings=settings,
    ) as up:
        yield up


@pytest.fixture
def cell(shared_cell: FakeCell, gateway: GatewayProcess) -> FakeCell:
    """The cell of a gateway, which answers everybody with two tokens."""

    async def answer_shortly(ran: Ran) -> None:
        ran.tokens(0, [300, 301], "length")

    shared_cell.reset()
    shared_cell.behave = answer_shortly
    return shared_cell


@pytest.fixture(scope="session")
def gateway(
    shared_cell: FakeCell, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """One for all modules that neither end it nor need other settings.

    They are of one `xdist_group`, "gateway", so that one worker has it.
    """
    process = GatewayProcess(tmp_path_factory.mktemp("gateway"), MODEL_DIR, shared_cell)
    yield process
    process.close()


@pytest.fixture(scope="session")
def hasty_cell() -> Iterator[FakeCell]:
    """The cell of the hasty gateway."""
    cell = FakeCell()
    yield cell
    cell.close()


@pytest.fixture(scope="session")
def hasty(
    hasty_cell: FakeCell, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """A gateway whose waits are short, in the same group: what a test of a wait is to use."""
    process = GatewayProcess(
        tmp_path_factory.mktemp("hasty"),
        MODEL_DIR,
        hasty_cell,
        module=hasty_gateway.__name__,
        env=patience(HASTY_S),
    )
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
            **PATIENCE,
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
            **PATIENCE,
        )
    )
    yield shared
    shared.close()


@pytest.fixture
def pair(shared_pair: SharedCell) -> Iterator[BareCell]:
    """The cell of two ranks, at rest; its tests are of one xdist group, and kill nothing."""
    with shared_pair.at_rest() as cell:
        yield cell
