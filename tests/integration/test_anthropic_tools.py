"""Keys and tools of Anthropic's Messages API, with its Python client against a real gateway."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from coordinator.protocol.keys import ApiKey, dump_key, hash_of
from coordinator.protocol.messages.gateway import Submit
from coordinator.protocol.terms import Tier
from tests.harness.cells.gateway_cell import FakeCell, GatewayProcess, Ran
from tests.harness.gateway.messages import (
    CANARY,
    COUNT,
    COUNTED,
    MESSAGE,
    PATH,
    TOOL,
    error_of,
    says,
)
from worker.demo import MODEL_DIR

pytestmark = [pytest.mark.timeout(240), pytest.mark.xdist_group("gateway")]

WITH_TOOLS = (
    *("--max-model-len", "2048", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)

KEYS = {
    "acme": ApiKey(hash=hash_of("sk-acme"), tenant="acme"),
    "slow": ApiKey(hash=hash_of("sk-slow"), tenant="slow", max_tier="batch"),
    "few": ApiKey(hash=hash_of("sk-few"), tenant="few", requests_per_minute=2),
    "short": ApiKey(hash=hash_of("sk-short"), tenant="short", tokens_per_minute=10),
}


@pytest.fixture(scope="module")
def own_gateway(
    own_cell: FakeCell, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """A gateway with keys and with tools."""
    folder: Path = tmp_path_factory.mktemp("gateway")
    keys = folder / "keys.yaml"
    keys.write_text("keys:\n" + "".join(map(dump_key, KEYS.values())))
    process = GatewayProcess(
        folder, MODEL_DIR, own_cell, engine_args=WITH_TOOLS, keys_file=str(keys)
    )
    yield process
    process.close()


@pytest.fixture
def with_key(own_gateway: GatewayProcess, own_cell: FakeCell) -> Iterator[Callable[..., Any]]:
    """Makes Anthropic's clients; the cell answers everybody with two tokens."""
    own_cell.reset()
    own_cell.behave = says("so")
    with ExitStack() as stack:

        def make(**options: Any) -> Any:
            made = anthropic.Anthropic(base_url=own_gateway.url, max_retries=0, **options)
            return stack.enter_context(made)

        yield make


Clients = Callable[..., Any]


def test_a_key_may_come_in_either_header(
    with_key: Clients, own_gateway: GatewayProcess, own_cell: FakeCell
) -> None:
    for options in ({"api_key": "sk-acme"}, {"auth_token": "sk-acme"}):
        client = with_key(**options)
        assert client.messages.create(**MESSAGE).content
        assert client.messages.count_tokens(**COUNTED).input_tokens
        model = MESSAGE["model"]
        assert [each.id for each in client.models.list()] == [model]
        assert client.models.retrieve(model).id == model
    # Some clients send both, one of them with a placeholder.
    for sent, bearer in (("sk-acme", "Bearer x"), ("x", "Bearer sk-acme"), ("", "Bearer sk-acme")):
        headers = {"x-api-key": sent, "authorization": bearer}
        answer = httpx.post(own_gateway.url + PATH, json=MESSAGE, headers=headers)
        assert answer.status_code == 200, (sent, bearer)
    assert {submit.header.tenant for submit in own_cell.of(Submit)} == {"acme"}


def test_a_wrong_key_or_none(with_key: Clients, own_gateway: GatewayProcess) -> None:
    with pytest.raises(anthropic.AuthenticationError) as wrong:
        with_key(api_key="sk-nobody").messages.create(**MESSAGE)
    assert wrong.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    for path in (PATH, COUNT):
        answer = httpx.post(own_gateway.url + path, json=MESSAGE)
        assert error_of(answer)[:2] == (401, "authentication_error")
        assert "x-api-key" in error_of(answer)[2]
    assert "sk-nobody" not in own_gateway.log.read_text()


def test_other_routes_take_no_such_header(with_key: Clients, own_gateway: GatewayProcess) -> None:
    headers = {"x-api-key": "sk-acme"}
    for path in ("/v1/chat/completions", "/v1/responses", "/tokenize"):
        answer = httpx.post(own_gateway.url + path, json=MESSAGE, headers=headers)
        assert answer.status_code == 401
        assert "Authorization: Bearer KEY" in answer.json()["error"]["message"]
    twice = [("x-api-key", "sk-acme"), ("x-api-key", "sk-slow")]
    answer = httpx.post(own_gateway.url + PATH, json=MESSAGE, headers=twice)
    assert error_of(answer)[:2] == (400, "invalid_request_error")


@pytest.mark.parametrize("tier", ["auto", "standard_only"])
def test_a_tier_is_at_most_the_highest_of_the_key(
    with_key: Clients, own_cell: FakeCell, tier: Any
) -> None:
    message = with_key(api_key="sk-slow").messages.create(**MESSAGE, service_tier=tier)
    assert message.usage.service_tier == "batch"
    assert own_cell.of(Submit)[-1].header.tier == Tier.BATCH


def test_rates(with_key: Clients) -> None:
    few = with_key(api_key="sk-few")
    few.messages.create(**MESSAGE)
    few.messages.create(**MESSAGE)
    with pytest.raises(anthropic.RateLimitError) as caught:
        few.messages.create(**MESSAGE)
    assert caught.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index]
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
    with pytest.raises(anthropic.RequestTooLargeError) as large:
        with_key(api_key="sk-short").messages.create(**MESSAGE)
    assert large.value.body["error"]["type"] == "request_too_large"  # type: ignore[index]


CALL = '<tool_call>\n{"name": "set_size", "arguments": {"size": 3}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (f"Sure. {CALL}", ["text", "tool_use"]),
        (CALL, ["tool_use"]),
        (f"{CALL}\n{CALL}", ["tool_use", "tool_use"]),
        ("No call, only text.", ["text"]),
    ],
)
def test_calls_are_the_same_whole_and_streamed(
    with_key: Clients, own_cell: FakeCell, text: str, kinds: list[str]
) -> None:
    own_cell.behave = says(text)
    client = with_key(api_key="sk-acme")
    asked: dict[str, Any] = {**COUNTED, "max_tokens": 100, "tools": [TOOL]}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert [block.type for block in message.content] == kinds
        calls = [block for block in message.content if block.type == "tool_use"]
        assert [(call.name, call.input) for call in calls] == [("set_size", {"size": 3})] * len(
            calls
        )
        assert len({call.id for call in calls}) == len(calls)
        assert message.stop_reason == ("tool_use" if calls else "end_turn")
    assert whole.usage.to_dict() == streamed.usage.to_dict()


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "set_size"}])
def test_a_tool_s_schema_binds_the_ranks(
    with_key: Clients, own_cell: FakeCell, choice: Any
) -> None:
    """The grammar that a forced call must match travels with the task."""
    grammars = []

    async def behave(ran: Ran) -> None:
        grammars.append(ran.request.sampling_params.structured_outputs)
        await says(CALL)(ran)

    own_cell.behave = behave
    tools = [{**TOOL, "strict": True}]
    asked: dict[str, Any] = {**COUNTED, "max_tokens": 100, "tools": tools, "tool_choice": choice}
    message = with_key(api_key="sk-acme").messages.create(**asked)
    assert message.stop_reason == "tool_use"
    [grammar] = grammars
    assert '"size"' in (grammar.structural_tag or json.dumps(grammar.json))


def test_a_forced_call_that_the_limit_cuts_has_no_input(
    with_key: Clients, own_cell: FakeCell
) -> None:
    """What the model wrote of its input is no JSON; but the request was right."""

    async def behave(ran: Ran) -> None:
        ran.tokens(0, [300, 301], "length")

    own_cell.behave = behave
    message = with_key(api_key="sk-acme").messages.create(
        **{**COUNTED, "max_tokens": 2},
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "set_size"},
    )
    assert message.stop_reason == "max_tokens"
    assert [block.input for block in message.content if block.type == "tool_use"] in ([], [{}])


def test_tools_count(with_key: Clients) -> None:
    client = with_key(api_key="sk-acme")
    counted = client.messages.count_tokens(**COUNTED, tools=[TOOL])
    message = client.messages.create(**MESSAGE, tools=[TOOL])
    assert counted.input_tokens == message.usage.input_tokens
    assert counted.input_tokens > client.messages.count_tokens(**COUNTED).input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_is_not_there_is_refused(with_key: Clients, stream: bool) -> None:
    with pytest.raises(anthropic.BadRequestError, match="not found in the tools") as caught:
        with_key(api_key="sk-acme").messages.create(
            **MESSAGE,
            tools=[TOOL],
            tool_choice={"type": "tool", "name": CANARY},
            stream=stream,
        )
    assert CANARY not in str(caught.value)


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_that_the_model_cannot_do_is_refused(with_key: Clients, stream: bool) -> None:
    asked: dict[str, Any] = {**COUNTED, "max_tokens": 1_030}
    with pytest.raises(anthropic.BadRequestError, match=r"thinking\.budget_tokens"):
        with_key(api_key="sk-acme").messages.create(
            **asked, thinking={"type": "enabled", "budget_tokens": 1_024}, stream=stream
        )
