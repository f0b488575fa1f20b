"""What models wrote before comes back in requests, in every form that OpenAI's schema allows."""

from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.harness.cells.gateway_cell import FakeCell, GatewayProcess, Ran
from worker.demo import MODEL_DIR

pytestmark = [pytest.mark.timeout(120)]

SAID = {"type": "output_text", "text": "It is blue.", "annotations": []}
MORE = {"type": "output_text", "text": " And wide.", "annotations": []}
REFUSED = {"type": "refusal", "refusal": "No comment."}
EASY = {"type": "input_text", "text": "Blue."}
ASKED = {"role": "user", "content": "And the sea?"}


OF_API = {"type": "message", "id": "msg_1", "status": "completed"}
"""What a message has beside role and content if the Responses API gave it out."""


@pytest.mark.parametrize(
    ("content", "text", "more"),
    [
        ((SAID,), "It is blue.", OF_API),
        ((SAID, MORE), "It is blue. And wide.", OF_API),
        ((REFUSED,), "No comment.", OF_API),
        ((), "", OF_API),
        ((SAID, REFUSED), "It is blue.No comment.", {"type": "message"}),
        ((EASY, EASY), "Blue.Blue.", {}),
        ((), "", {}),
    ],
)
async def test_what_was_written_before_is_read(
    client: httpx.AsyncClient,
    cell: FakeCell,
    content: tuple[Any, ...],
    text: str,
    more: dict[str, str],
) -> None:
    prompts: list[list[int]] = []

    async def keep_prompt(ran: Ran) -> None:
        prompts.append(ran.request.prompt_token_ids)
        ran.tokens(0, [300, 301], "length")

    cell.behave = keep_prompt
    message = {"role": "assistant", "content": list(content), **more}
    response = await client.post("/v1/responses", json={"input": [message, ASKED]})
    assert response.status_code == 200, response.text
    # The same conversation in the words of the older API.
    same = [{"role": "assistant", "content": text}, ASKED]
    response = await client.post(
        "/v1/chat/completions", json={"model": "demo", "messages": same, "max_tokens": 2}
    )
    assert response.status_code == 200, response.text
    assert prompts[0] == prompts[1]
    told = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")).decode(prompts[0])
    assert text in told
    assert ASKED["content"] in told


async def test_what_cannot_be_read_is_the_request_s_fault(
    client: httpx.AsyncClient, gateway: GatewayProcess, cell: FakeCell
) -> None:
    item = {"type": "custom_tool_call_output", "call_id": "1", "output": [{"type": "file"}]}
    response = await client.post("/v1/responses", json={"input": [item, ASKED]})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == "invalid_value"
    assert "request_failed" not in gateway.log.read_text()
