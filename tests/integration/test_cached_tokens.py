"""A prompt that is cached is reported as cached on every route, in every form of an answer."""

import json
import time
from collections.abc import Iterator
from typing import Any, Final, Literal

import openai
import pytest
from openai.types import CompletionUsage

from tests.harness.cells.product import MODEL_NAME, Product

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.xdist_group("ranks-product"),
    pytest.mark.timeout(240),
]

CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"
LINES = 3
LINES_WITHIN_S = 120


@pytest.fixture
def client(shared_product: Product) -> Iterator[openai.OpenAI]:
    """A client of one group, so that each prompt comes where it was before."""
    shared_product.switch("tp2", "recompute")
    with openai.OpenAI(base_url=shared_product.url + "/v1", api_key="none") as client:
        yield client


def text_of(name: str) -> str:
    """A prompt of several pages that no other test sends."""
    return f"{name}: " + " ".join(f"def f{number}(): return {number}" for number in range(60))


def messages(name: str) -> Any:
    return [{"role": "user", "content": text_of(name)}]


def counts_of(usage: CompletionUsage | None) -> tuple[int, int]:
    """The cached tokens and all tokens of the prompts that a usage counts."""
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens or 0, usage.prompt_tokens


def cached_in_chat(client: openai.OpenAI, name: str) -> tuple[int, int]:
    usage = client.chat.completions.create(
        model=MODEL_NAME, messages=messages(name), max_tokens=2
    ).usage
    return counts_of(usage)


def cached_in_chat_stream(client: openai.OpenAI, name: str) -> tuple[int, int]:
    *_, last = client.chat.completions.create(
        model=MODEL_NAME,
        messages=messages(name),
        max_tokens=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    return counts_of(last.usage)


def cached_in_text(client: openai.OpenAI, name: str) -> tuple[int, int]:
    usage = client.completions.create(model=MODEL_NAME, prompt=text_of(name), max_tokens=2).usage
    return counts_of(usage)


def cached_in_texts(client: openai.OpenAI, name: str) -> tuple[int, int]:
    """Two prompts in one request, of which the second is new each time."""
    prompts = [text_of(name), f"{time.monotonic()}"]
    usage = client.completions.create(model=MODEL_NAME, prompt=prompts, max_tokens=2).usage
    return counts_of(usage)


def cached_in_texts_stream(client: openai.OpenAI, name: str) -> tuple[int, int]:
    *_, last = client.completions.create(
        model=MODEL_NAME,
        prompt=[f"{time.monotonic()}", text_of(name)],
        max_tokens=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    return counts_of(last.usage)


def cached_in_text_stream(client: openai.OpenAI, name: str) -> tuple[int, int]:
    *_, last = client.completions.create(
        model=MODEL_NAME,
        prompt=text_of(name),
        max_tokens=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    return counts_of(last.usage)


def cached_in_response(client: openai.OpenAI, name: str) -> tuple[int, int]:
    usage = client.responses.create(
        model=MODEL_NAME, input=text_of(name), max_output_tokens=2
    ).usage
    assert usage is not None
    return usage.input_tokens_details.cached_tokens, usage.input_tokens


def cached_in_response_stream(client: openai.OpenAI, name: str) -> tuple[int, int]:
    *_, last = client.responses.create(
        model=MODEL_NAME, input=text_of(name), max_output_tokens=2, stream=True
    )
    assert last.type in ("response.completed", "response.incomplete")
    usage = last.response.usage
    assert usage is not None
    return usage.input_tokens_details.cached_tokens, usage.input_tokens


@pytest.mark.parametrize(
    "ask",
    [
        *(cached_in_chat, cached_in_chat_stream, cached_in_text, cached_in_text_stream),
        *(cached_in_texts, cached_in_texts_stream),
        *(cached_in_response, cached_in_response_stream),
    ],
)
def test_a_repeated_prompt_is_reported_as_cached(client: openai.OpenAI, ask: Any) -> None:
    first, second = (ask(client, ask.__name__) for _ in range(2))
    assert first[0] == 0
    assert second[0] > second[1] / 2, "most pages of it are cached"


@pytest.mark.parametrize("endpoint", [CHAT, TEXT])
def test_batch_lines_and_their_batch_report_what_was_cached(
    client: openai.OpenAI, endpoint: Literal["/v1/chat/completions", "/v1/completions"]
) -> None:
    """The file is as an editor on Windows saves it, with a byte order mark."""
    name = f"batch {endpoint}"
    prompt = {"messages": messages(name)} if endpoint == CHAT else {"prompt": text_of(name)}
    body = {"model": MODEL_NAME, "max_tokens": 2, **prompt}
    fields = {"method": "POST", "url": endpoint, "body": body}
    lines = [json.dumps({"custom_id": f"c{n}", **fields}) + "\r\n" for n in range(LINES)]
    cached, _ = (cached_in_chat if endpoint == CHAT else cached_in_text)(client, name)
    assert cached == 0
    content = "".join(lines).encode("utf-8-sig")
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
    deadline = time.monotonic() + LINES_WITHIN_S
    while (batch := client.batches.retrieve(batch.id)).status not in ("completed", "failed"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
    assert batch.status == "completed", batch.errors
    assert batch.output_file_id is not None
    output = client.files.content(batch.output_file_id).text.splitlines()
    usages = [json.loads(line)["response"]["body"]["usage"] for line in output]
    numbers = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert len(numbers) == LINES
    assert min(numbers) > 0
    assert batch.usage is not None
    assert batch.usage.input_tokens_details.cached_tokens == sum(numbers)
    assert batch.usage.input_tokens == sum(usage["prompt_tokens"] for usage in usages)
