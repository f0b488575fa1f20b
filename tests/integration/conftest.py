"""What several modules of gateway tests start in the same way; a module may define its own."""

from collections.abc import Iterator

import pytest

from tests.harness.gateway_cell import FakeCell, GatewayProcess
from worker.demo import MODEL_DIR


@pytest.fixture(scope="module")
def shared_cell() -> Iterator[FakeCell]:
    cell = FakeCell()
    yield cell
    cell.close()


@pytest.fixture(scope="module")
def gateway(
    shared_cell: FakeCell, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    process = GatewayProcess(tmp_path_factory.mktemp("gateway"), MODEL_DIR, shared_cell)
    yield process
    process.close()
