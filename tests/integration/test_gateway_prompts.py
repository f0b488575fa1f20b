"""A gateway's work on a prompt is done once, in a thread where it is long, whatever the API."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.engine.text_streams import END_TOKENS
from gateway.engine.tokenizing import LONG_CHARS
from tests.harness.cells import counting_gateway
from tests.harness.cells.counting_gateway import WORK_FILE
from tests.harness.cells.gateway_cell import FakeCell, GatewayProcess, Ran
from worker.demo import MODEL_DIR

pytestmark = [pytest.mark.timeout(300)]

CONTEXT_TOKENS = 32_768
TEXT = "the quick brown fox jumps over the lazy dog. " * 1_000
"""Long enough for the thread of long prompts."""
SHORT = "the quick brown fox"
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}]},
    "/v1/responses": {"input": TEXT},
    "/v1/messages": {"messages": [{"role": "user", "content": TEXT}]},
}


@pytest.fixture(scope="module")
def work_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work") / "work.jsonl"


@pytest.fixture(scope="module")
def gateway(
    own_cell: FakeCell, tmp_path_factory: pytest.TempPathFactory, work_file: Path
) -> Iterator[GatewayProcess]:
    override = json.dumps({"max_position_embeddings": CONTEXT_TOKENS})
    process = GatewayProcess(
        tmp_path_factory.mktemp("gateway"),
        MODEL_DIR,
        own_cell,
        module=counting_gateway.__name__,
        env={WORK_FILE: str(work_file)},
        engine_args=("--max-model-len", str(CONTEXT_TOKENS), "--hf-overrides", override),
    )
    yield process
    process.close()


@pytest.fixture
async def cell(own_cell: FakeCell, gateway: GatewayProcess) -> AsyncIterator[FakeCell]:
    own_cell.reset()
    own_cell.behave = one_token
    yield own_cell
    own_cell.reset()


async def one_token(ran: Ran) -> None:
    ran.tokens(0, [300], "length")


async def work_of(
    gateway: GatewayProcess, work_file: Path, path: str, request: dict[str, Any]
) -> list[dict[str, Any]]:
    """What the gateway does for one request."""
    work_file.write_text("")
    most = {"max_output_tokens": 1} if path == "/v1/responses" else {"max_tokens": 1}
    body = {"model": "demo", "stream": True, **most, **request}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in work_file.read_text().splitlines()]


@pytest.mark.usefixtures("cell")
@pytest.mark.parametrize("path", REQUESTS)
async def test_a_long_prompt_is_worked_on_once(
    gateway: GatewayProcess, work_file: Path, path: str
) -> None:
    work = await work_of(gateway, work_file, path, REQUESTS[path])
    long = [each for each in work if each["size"] > LONG_CHARS]
    assert [each["what"] for each in long] == ["check", "tokenize"]
    check, tokenize = long
    assert tokenize["size"] >= len(TEXT)
    assert tokenize["thread"].startswith("long-prompts"), "the event loop goes on"
    assert [each["size"] for each in work if each["what"] == "begin"] == [END_TOKENS]
    assert check["thread"] == "MainThread", "a thread is worth it for larger bodies alone"


@pytest.mark.usefixtures("cell")
async def test_a_short_prompt_is_tokenized_in_a_thread_that_no_long_one_has(
    gateway: GatewayProcess, work_file: Path
) -> None:
    work = await work_of(gateway, work_file, "/v1/completions", {"prompt": SHORT})
    (tokenize,) = (each for each in work if each["what"] == "tokenize")
    assert tokenize["size"] == len(SHORT)
    assert not tokenize["thread"].startswith(("long-prompts", "MainThread"))
