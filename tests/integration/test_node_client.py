"""OpenAI's Node client against a real gateway: whole answers, streams, errors and retries.

Node comes with the test packages of this project (see `tests.harness.browser`).
"""

import asyncio
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from coordinator.protocol.keys import ApiKey, dump_key, hash_of
from coordinator.protocol.messages.gateway import Submit, TaskFailed
from tests.harness.browser import node_client
from tests.harness.cells.batch_process import BatchProcess
from tests.harness.cells.gateway_cell import FakeCell, GatewayProcess, Ran
from worker.demo import MODEL_DIR

pytestmark = [pytest.mark.timeout(300)]

WORDS = "the quick brown fox"
KEY = "sk-node"


@pytest.fixture(scope="module")
def node_folder() -> Path:
    return node_client.install()


@pytest.fixture
def cell() -> Iterator[FakeCell]:
    made = FakeCell()
    yield made
    made.close()


@pytest.fixture
def gateway(cell: FakeCell, tmp_path: Path) -> Iterator[GatewayProcess]:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys:\n" + dump_key(ApiKey(hash=hash_of(KEY), tenant="node")))
    process = GatewayProcess(tmp_path, MODEL_DIR, cell, keys_file=str(keys))
    yield process
    process.close()


@pytest.fixture
def batches(tmp_path: Path) -> Iterator[BatchProcess]:
    folder = tmp_path / "batches"
    folder.mkdir()
    process = BatchProcess(folder)
    yield process
    process.close()


def told_by(folder: Path, url: str, scenario: str) -> dict[str, dict[str, Any]]:
    """What the client says of each thing that it tried."""
    done = subprocess.run(
        [node_client.NODE, "client.mjs", f"{url}/v1", KEY, scenario],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    facts = [json.loads(line) for line in done.stdout.splitlines()]
    return {each.pop("name"): each for each in facts}


def test_node_client_sees_what_openai_would_send(
    gateway: GatewayProcess, cell: FakeCell, batches: BatchProcess, node_folder: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    ids = list(tokenizer.encode(WORDS, add_special_tokens=False).ids)
    tries: list[float] = []

    async def behave(ran: Ran) -> None:
        match ran.request.sampling_params.seed:
            case 1:
                cell.say(TaskFailed(ran.id, "queue_full", "Full.", 2))
            case 2:
                ran.tokens(0, ids[:2])
                await asyncio.sleep(0.2)
                cell.say(TaskFailed(ran.id, "no_healthy_workers", "All ranks are lost."))
            case 3 if len(tries) < 2:
                tries.append(time.monotonic())
                cell.say(TaskFailed(ran.id, "queue_full", "Full.", 1))
            case _:
                ran.tokens(0, ids, "length")

    cell.behave = behave
    seen = {
        **told_by(node_folder, gateway.url, "answers"),
        **told_by(node_folder, batches.url, "batches"),
    }
    whole = seen.pop("whole")
    assert whole.pop("id")
    assert whole == {"text": WORDS, "finish": "length", "tier": "flex"}
    assert seen.pop("retried") == {"finish": "length"}
    assert seen == {
        "stream": {"text": WORDS, "finish": "length"},
        "response": {"text": WORDS, "status": "incomplete", "tier": "flex"},
        "response stream": {"text": WORDS, "begun": True, "ended": True},
        "stored response": {
            "kind": "BadRequestError",
            "status": 400,
            "code": "unsupported_parameter",
        },
        "model": {"id": "demo"},
        "wrong model": {"kind": "NotFoundError", "status": 404, "code": "model_not_found"},
        "wrong key": {"kind": "AuthenticationError", "status": 401, "code": "invalid_api_key"},
        "bad value": {"kind": "BadRequestError", "status": 400, "code": "invalid_value"},
        "overload": {"kind": "RateLimitError", "status": 429, "code": "queue_full"},
        "batch": {
            "counts": {"total": 3, "completed": 2, "failed": 1},
            "errors": ["c2"],
            "listed": True,
            "deleted": True,
            "gone": 404,
        },
        "cancelled batch": {"asked": "cancelling", "output": ["c0"], "errors": ["c1"]},
        "broken stream": {"kind": "APIError", "status": None, "code": "no_healthy_workers"},
    }
    assert 1.0 <= tries[1] - tries[0] < 5.0, "the client waits as long as it was told to"
    assert {submit.header.tenant for submit in cell.of(Submit)} == {"node"}
