"""Prompts of one tenant are cached for that tenant alone, on every route, in a real product."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import openai
import pytest

from coordinator.protocol.keys import ApiKey, dump_key, hash_of
from tests.harness.cells.product import MODEL_NAME, Product, product

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

KEYS: Final = {"acme": "acme", "acme-2": "acme", "other": "other"}
"""Key -> tenant."""
BATCH_WITHIN_S = 120


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys = (ApiKey(hash=hash_of("sk-" + key), tenant=tenant) for key, tenant in KEYS.items())
    path.write_text("keys:\n" + "".join(map(dump_key, keys)))
    return path


@pytest.fixture(scope="module")
def served(keys_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    settings = {"gateway": {"keys_file": str(keys_file)}}
    with product(tmp_path_factory.mktemp("up"), ranks=2, settings=settings) as running:
        yield running


def text_of(name: str) -> str:
    return f"{name}: " + " ".join(f"def f{number}(): return {number}" for number in range(60))


def client(served: Product, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url + "/v1", api_key="sk-" + key, timeout=60)


def chat(served: Product, key: str, name: str, **more: Any) -> int:
    with client(served, key) as made:
        usage = made.chat.completions.create(
            model=MODEL_NAME,
            messages=[{"role": "user", "content": text_of(name)}],
            max_tokens=2,
            extra_body=more,
        ).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens or 0


def text(served: Product, key: str, name: str) -> int:
    with client(served, key) as made:
        usage = made.completions.create(model=MODEL_NAME, prompt=text_of(name), max_tokens=2).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens or 0


def response(served: Product, key: str, name: str) -> int:
    with client(served, key) as made:
        usage = made.responses.create(
            model=MODEL_NAME, input=text_of(name), max_output_tokens=16
        ).usage
    assert usage is not None
    return usage.input_tokens_details.cached_tokens


def message(served: Product, key: str, name: str) -> int:
    body = {
        "model": MODEL_NAME,
        "max_tokens": 2,
        "messages": [{"role": "user", "content": text_of(name)}],
    }
    answer = httpx.post(
        f"{served.url}/v1/messages", headers={"x-api-key": "sk-" + key}, json=body, timeout=60
    )
    usage = answer.json()["usage"]
    return int(usage.get("cache_read_input_tokens") or 0)


def line(served: Product, key: str, name: str) -> int:
    """A batch of one line."""
    body = {"model": MODEL_NAME, "max_tokens": 2, "prompt": text_of(name)}
    fields = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": body}
    with client(served, key) as made:
        file = made.files.create(file=("in.jsonl", json.dumps(fields).encode()), purpose="batch")
        batch = made.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        deadline = time.monotonic() + BATCH_WITHIN_S
        while (batch := made.batches.retrieve(batch.id)).status not in ("completed", "failed"):
            assert time.monotonic() < deadline, batch
            time.sleep(0.1)
        assert batch.output_file_id is not None, batch
        output = json.loads(made.files.content(batch.output_file_id).text)
    usage = output["response"]["body"]["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("ask", [chat, text, response, message, line])
def test_a_tenant_s_prompt_is_cached_for_it_alone(served: Product, ask: Any) -> None:
    served.switch("tp2", "recompute")
    name = ask.__name__
    assert ask(served, "acme", name) == 0
    assert ask(served, "acme", name) > 0
    assert ask(served, "acme-2", name) > 0, "another key of the same tenant"
    assert ask(served, "other", name) == 0, "another tenant learns nothing"
    assert ask(served, "other", name) > 0


def test_a_client_s_own_salt_parts_its_tenant_s_cache_further(served: Product) -> None:
    served.switch("tp2", "recompute")
    assert chat(served, "acme", "own") == 0
    assert chat(served, "acme", "own", cache_salt="mine") == 0
    assert chat(served, "acme", "own", cache_salt="mine") > 0
    assert chat(served, "other", "own", cache_salt="mine") == 0, "the salt is no way in"


def test_prompts_still_go_where_they_are_cached(served: Product) -> None:
    """Two ranks alone, of which one has read each tenant's prompt; also after a switch."""
    served.switch("dp2", "recompute")
    for key in ("acme", "other"):
        assert chat(served, key, "home") == 0
        assert min(chat(served, key, "home") for _ in range(6)) > 0
    served.switch("tp2", "reshard")
    assert chat(served, "acme", "home") > 0, "cached blocks moved along"
    served.switch("dp2", "reshard")
    assert min(chat(served, "acme", "home") for _ in range(6)) > 0
