"""Anthropic's Messages API: its Python client and raw requests against a real gateway."""

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from coordinator.protocol.messages.gateway import Cancel, Submit
from coordinator.protocol.metrics_wire import DURATION, REJECTIONS, REQUESTS, TTFT
from coordinator.protocol.terms import Tier
from tests.harness.cells.gateway_cell import FakeCell, GatewayProcess, Ran
from tests.harness.cells.told import Told
from tests.harness.gateway.messages import (
    CANARY,
    COUNT,
    COUNTED,
    MESSAGE,
    PATH,
    TOOL,
    error_of,
    events_of,
    says,
)

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.xdist_group("gateway"),
    pytest.mark.usefixtures("cell"),
]


@pytest.fixture
def sdk(gateway: GatewayProcess) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as sdk:
        yield sdk


def test_a_message(sdk: Any) -> None:
    message = sdk.messages.create(**MESSAGE)
    assert message.type == "message"
    assert message.role == "assistant"
    assert message.id.startswith("msg_")
    assert message.model == "demo"
    assert [block.type for block in message.content] == ["text"]
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.usage.output_tokens == 2
    assert message.usage.input_tokens > 2
    assert message.usage.cache_read_input_tokens == 0
    assert message.usage.cache_creation_input_tokens == 0
    assert message.usage.service_tier == "standard"
    assert message._request_id
    assert message.id.endswith(message._request_id)


def test_a_stream_adds_up_to_the_message(sdk: Any) -> None:
    whole = sdk.messages.create(**MESSAGE)
    with sdk.messages.stream(**MESSAGE) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert [block.to_dict() for block in streamed.content] == [
        block.to_dict() for block in whole.content
    ]
    assert text
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.to_dict() == whole.usage.to_dict()
    assert streamed.id != whole.id


async def test_events_of_a_stream(client: httpx.AsyncClient) -> None:
    answer = await client.post(PATH, json={**MESSAGE, "stream": True})
    kinds = [event["type"] for event in events_of(answer)]
    assert kinds == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert answer.headers["cache-control"] == "no-cache"
    start = events_of(answer)[0]["message"]
    assert start["content"] == []
    assert start["stop_reason"] is None
    assert start["usage"]["output_tokens"] == 0
    assert start["id"] == f"msg_{answer.headers['request-id']}"


def test_tokens_are_counted_as_they_are_used(sdk: Any, cell: FakeCell) -> None:
    system = "be short"
    for more in ({}, {"system": system}, {"system": [{"type": "text", "text": system}]}):
        counted = sdk.messages.count_tokens(**COUNTED, **more)
        message = sdk.messages.create(**MESSAGE, **more)
        assert counted.input_tokens == message.usage.input_tokens
    assert len(cell.of(Submit)) == 3, "counting runs nothing"


def test_tokens_beyond_the_context_are_counted(sdk: Any, cell: FakeCell) -> None:
    """Anthropic's clients ask for the number to know how much to take out."""

    def asked(words: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": "sea " * words}]

    few, some, many = (
        sdk.messages.count_tokens(**{**COUNTED, "messages": asked(words)}).input_tokens
        for words in (100, 200, 20_000)
    )
    assert many - few == 199 * (some - few)
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        sdk.messages.create(**{**MESSAGE, "messages": asked(20_000)})
    assert not cell.of(Submit)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_cached_is_reported(
    client: httpx.AsyncClient, cell: FakeCell, stream: bool
) -> None:
    async def behave(ran: Ran) -> None:
        from vllm.v1.metrics.stats import PrefillStats

        span, output = ran.part(0, [300, 301], "length")
        prompt = len(ran.request.prompt_token_ids)
        output.prefill_stats = PrefillStats(prompt, prompt - 5, 5, 5)
        ran.push([(span, output)])

    counted = (await client.post(COUNT, json=COUNTED)).json()["input_tokens"]
    cell.behave = behave
    answer = await client.post(PATH, json={**MESSAGE, "stream": stream})
    if stream:
        events = events_of(answer)
        usages = [events[0]["message"]["usage"], events[-2]["usage"]]
    else:
        usages = [answer.json()["usage"]]
    for usage in usages:
        assert usage["cache_read_input_tokens"] == 5
        assert usage["input_tokens"] == counted - 5


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_under_one_request_id_have_ids_of_their_own(
    client: httpx.AsyncClient, stream: bool
) -> None:
    ids = set()
    for _ in range(2):
        headers = {"x-request-id": "trace-7"}
        answer = await client.post(PATH, json={**MESSAGE, "stream": stream}, headers=headers)
        message = events_of(answer)[0]["message"] if stream else answer.json()
        ids.add(message["id"])
        assert answer.headers["x-request-id"] == answer.headers["request-id"] == "trace-7"
    assert len(ids) == 2
    assert all(name.startswith("msg_trace-7-") for name in ids)


def test_a_stop_sequence_is_named(sdk: Any, cell: FakeCell) -> None:
    cell.behave = says("one STOP two")
    asked: dict[str, Any] = {**COUNTED, "max_tokens": 50, "stop_sequences": ["STOP"]}
    message = sdk.messages.create(**asked)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")
    with sdk.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "STOP")
    assert final.content[0].to_dict()["text"] == "one "


@pytest.mark.parametrize(
    ("asked", "headers", "tier", "named"),
    [
        ({}, {}, Tier.STANDARD, "standard"),
        ({"service_tier": "auto"}, {}, Tier.STANDARD, "standard"),
        (
            {"service_tier": "auto"},
            {"x-priority-tier": "interactive"},
            Tier.INTERACTIVE,
            "priority",
        ),
        ({"service_tier": "standard_only"}, {}, Tier.STANDARD, "standard"),
        ({"service_tier": None}, {"x-priority-tier": "batch"}, Tier.BATCH, "batch"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_tiers(
    client: httpx.AsyncClient,
    cell: FakeCell,
    asked: dict[str, Any],
    headers: dict[str, str],
    tier: Tier,
    named: str,
    stream: bool,
) -> None:
    body = {**MESSAGE, **asked, "stream": stream}
    answer = await client.post(PATH, json=body, headers=headers)
    message = events_of(answer)[0]["message"] if stream else answer.json()
    assert message["usage"]["service_tier"] == named
    [submit] = cell.of(Submit)
    assert submit.header.tier == tier


async def test_an_idempotency_key_repeats_the_message(
    client: httpx.AsyncClient, cell: FakeCell
) -> None:
    headers = {"idempotency-key": "message-1"}
    answers = [await client.post(PATH, json=MESSAGE, headers=headers) for _ in range(2)]
    assert answers[0].content == answers[1].content
    assert answers[1].headers["idempotent-replayed"] == "true"
    assert len(cell.of(Submit)) == 1
    other = await client.post(PATH, json={**MESSAGE, "max_tokens": 1}, headers=headers)
    assert error_of(other)[:2] == (400, "invalid_request_error")


async def test_a_client_that_leaves_cancels_its_message(
    client: httpx.AsyncClient, cell: FakeCell
) -> None:
    async def behave(ran: Ran) -> None:
        ran.tokens(0, [300, 301])

    cell.behave = behave
    async with client.stream("POST", PATH, json={**MESSAGE, "max_tokens": 9, "stream": True}) as it:
        await anext(it.aiter_lines())
    await cell.until(lambda: cell.of(Cancel))


async def test_messages_are_measured_as_chat(client: httpx.AsyncClient, cell: FakeCell) -> None:
    told = await Told.begin([cell])
    for body in (MESSAGE, {**MESSAGE, "stream": True}, {**MESSAGE, "temperature": -1}):
        await client.post(PATH, json=body)
    await client.post(COUNT, json=COUNTED)
    expected: list[tuple[Any, int]] = [
        ((REQUESTS, PATH, "standard", "200"), 2),
        ((REQUESTS, PATH, "standard", "400"), 1),
        ((REQUESTS, COUNT, "standard", "200"), 1),
        ((REJECTIONS, "invalid_value", "standard"), 1),
        ((DURATION, "standard", "chat"), 2),
        ((TTFT, "standard", "chat"), 2),
    ]
    await cell.until(lambda: all(told.grown(*series) == [count] for series, count in expected))


# ------------------------------------------------------------------ conversations


CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "go", "cache_control": None}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "so", "citations": None},
            {
                "type": "tool_use",
                "id": "t1",
                "name": "set_size",
                # What looks like media is not: it is the tool's.
                "input": {"size": 3, "file": "a.py", "source": {"type": "url", "url": "file:///"}},
            },
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "t1",
                "content": [{"type": "text", "text": "done"}],
                "is_error": False,
            },
            {"type": "tool_result", "tool_use_id": "t2", "content": "done"},
            {"type": "tool_result", "tool_use_id": "t3"},
            {"type": "text", "text": "and now?"},
        ],
    },
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "so"},
]


def test_a_conversation_with_tools_passes(sdk: Any) -> None:
    message = sdk.messages.create(
        **{**MESSAGE, "messages": CONVERSATION},
        tools=[{**TOOL, "cache_control": {"type": "ephemeral"}, "type": "custom"}],
        tool_choice={"type": "none"},
        system=[{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}],
        metadata={"user_id": "u"},
    )
    assert message.usage.output_tokens == 2


def test_an_answer_may_be_sent_back(sdk: Any) -> None:
    first = sdk.messages.create(**MESSAGE)
    turns: list[Any] = [
        *MESSAGE["messages"],
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": "again"},
    ]
    assert sdk.messages.create(**{**MESSAGE, "messages": turns}).content


IMAGE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}


def user(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(blocks)}]


UNREAD: list[tuple[dict[str, Any], str]] = [
    (
        {"messages": user({"type": "document", "source": {"type": "text", "data": CANARY}})},
        "text, image, tool_result",
    ),
    ({"messages": user({"type": "tool_reference", "tool_name": "f"})}, "text, image, tool_result"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use", "id": "x"}]}]},
        "text, tool_use, thinking, redacted_thinking",
    ),
    (
        {"messages": user({"type": "tool_result", "content": [{"type": "document"}]})},
        "text, image, tool_reference",
    ),
    (
        {"messages": user({"type": "tool_result", "content": [{"type": "text", "text": 5}]})},
        "needs a text",
    ),
    (
        {"messages": user({"type": "tool_result", "content": [{"type": "image", "source": "x"}]})},
        "needs a source",
    ),
    (
        {"messages": user({"type": "tool_result", "content": [{"type": "tool_reference"}]})},
        "needs a tool_name",
    ),
    (
        {"messages": [*MESSAGE["messages"], {"role": "system", "content": [{"type": "image"}]}]},
        "text, tool_addition, tool_removal",
    ),
    ({"system": [{"type": "image", "source": IMAGE}]}, "system"),
    (
        {"messages": user({"type": "image", "source": {"type": "file", "file_id": CANARY}})},
        "base64 or url",
    ),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "custom"),
    ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
    ({"tool_choice": {"type": "tool", "name": CANARY}, "tools": []}, "tool_choice needs tools"),
]


@pytest.mark.parametrize(("fields", "words"), UNREAD)
@pytest.mark.parametrize("path", [PATH, COUNT])
async def test_what_would_not_be_read_is_refused(
    client: httpx.AsyncClient, fields: dict[str, Any], words: str, path: str
) -> None:
    answer = await client.post(path, json={**MESSAGE, **fields})
    status, kind, text = error_of(answer)
    assert (status, kind) == (400, "invalid_request_error")
    assert words in text
    assert CANARY not in answer.text


PRIVATE = ("http://169.254.169.254/latest", "file:///etc/passwd", "http://127.0.0.1:8000/", 5, None)


@pytest.mark.parametrize("url", PRIVATE)
@pytest.mark.parametrize("nested", [False, True])
async def test_no_image_is_fetched_from_elsewhere(
    client: httpx.AsyncClient, url: object, nested: bool
) -> None:
    block: dict[str, Any] = {"type": "image", "source": {"type": "url", "url": url}}
    if nested:
        block = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    answer = await client.post(PATH, json={**MESSAGE, "messages": user(block)})
    status, kind, text = error_of(answer)
    assert (status, kind) == (400, "invalid_request_error")
    assert "text models alone" in text or url is None


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "http://elsewhere/"},
        {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}},
        {"type": "object", "properties": {"a": {"pattern": "(a{1,1000}){1,1000}"}}},
        {"type": "object", "properties": {f"p{i}": {} for i in range(1_001)}},
    ],
)
async def test_schemas_are_bounded_wherever_they_are(
    client: httpx.AsyncClient, schema: dict[str, Any]
) -> None:
    tool = {"name": "f", "input_schema": schema}
    added = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool}}
    for fields in (
        {"tools": [tool], "tool_choice": {"type": "none"}},
        {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        {"messages": [*MESSAGE["messages"], {"role": "system", "content": [added]}]},
    ):
        answer = await client.post(PATH, json={**MESSAGE, **fields})
        status, kind, text = error_of(answer)
        assert (status, kind) == (400, "invalid_request_error"), text
        assert text.startswith(next(iter(fields)))
