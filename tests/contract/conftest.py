"""What tests of engines and of vLLM's schedulers share."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.vllm.engine_request import encoded_request
from tests.harness.worker.engine_bench import EngineBench
from tests.harness.worker.fake_engine import fake_engine
from tests.harness.worker.fake_scheduler import fake_payload


@pytest.fixture(scope="module", params=["in memory", "vLLM"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A bench with each engine, which is made once."""
    if request.param == "in memory":
        yield EngineBench(fake_engine(world=2), fake_payload)
        return
    pytest.importorskip("vllm")
    from coordinator.protocol.terms import Tier
    from tests.harness.vllm.real_engine import real_engine

    def payload(name: str, prompt: Any, tokens: int) -> bytes:
        settings = {"max_tokens": tokens}
        return encoded_request(name, list(prompt), "", Tier.STANDARD, settings)[1]

    with real_engine(tmp_path_factory.mktemp("engine")) as engine:
        yield EngineBench(engine, payload)


@pytest.fixture
def bench(made: EngineBench) -> Iterator[EngineBench]:
    """It has neither tasks nor leases at first, and must be able to give all of them up."""
    before = made.engine.pages.counts().free
    yield made
    made.clear()
    assert made.engine.pages.counts().free == before


@pytest.fixture(params=[1, 2], ids=["dp", "tp2"])
def width(request: pytest.FixtureRequest) -> int:
    """The width of the group."""
    return int(request.param)


@pytest.fixture(scope="module")
def base() -> Any:
    """Configuration of the demo model."""
    from tests.harness.vllm.mode_schedulers import base_config

    return base_config()


@pytest.fixture
def hasher(base: Any) -> Any:
    """What computes block hashes."""
    from tests.harness.vllm.mode_schedulers import hasher_of

    return hasher_of(base)
