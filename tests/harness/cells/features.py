"""What a client may ask for beside text, and the modes in which a test asks for all of it.

docs/models.md lists what is here. Each function returns what must be equal in every mode.
"""

import json
import re
import secrets
import time
from collections.abc import Callable
from typing import Any

import openai

from tests.harness.cells.product import MODEL_NAME

MODES = {"dp": "dp2", "tp": "tp2", "sp": "sp2", "shift": "shift2", "pp": "pp2"}
"""Modes, and the layout of two ranks in each."""
BATCH_LINES, BATCH_LIMIT_S = 3, 60
LOGPROBS_DIGITS = 3
"""After the point: kernels add in another order."""

PATTERN = "[a-f]{6}-[0-9]{4}"


def ask(client: openai.OpenAI, text: str, **fields: Any) -> Any:
    """One answer to one message."""
    return client.chat.completions.create(
        model=MODEL_NAME, messages=[{"role": "user", "content": text}], **fields
    )


def contents(answer: Any) -> list[str]:
    """The texts of all choices."""
    return [choice.message.content for choice in answer.choices]


def grammar(client: openai.OpenAI) -> Any:
    """An answer that a pattern allows."""
    body = {"structured_outputs": {"regex": PATTERN}}
    answer = ask(client, "Give me a number.", extra_body=body, max_tokens=40, temperature=0)
    (text,) = contents(answer)
    assert re.fullmatch(PATTERN, text)
    return text


def logprobs(client: openai.OpenAI) -> Any:
    """The likeliest tokens at each place."""
    answer = ask(
        client, "Count to ten.", logprobs=True, top_logprobs=2, max_tokens=12, temperature=0
    )
    found = answer.choices[0].logprobs.content
    return [(each.token, round(each.logprob, LOGPROBS_DIGITS)) for each in found]


def several_choices(client: openai.OpenAI) -> Any:
    """Several answers to one prompt, drawn by a seed."""
    found = contents(ask(client, "Say a word.", n=3, seed=7, temperature=0.9, max_tokens=12))
    assert len(found) == 3
    return found


def penalties(client: openai.OpenAI) -> Any:
    """Penalties, a bias and a text that ends it."""
    fields = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "logit_bias": {"300": -20}}
    return contents(ask(client, "Go on.", **fields, stop=["\n\n\n"], max_tokens=24, temperature=0))


def prefix_cache(client: openai.OpenAI) -> Any:
    """A prompt that comes again is not computed again."""
    text = f"{secrets.token_hex(4)}: " + " ".join(
        f"def f{number}(): return {number}" for number in range(60)
    )
    first, again = (ask(client, text, max_tokens=4, temperature=0) for _ in range(2))
    details = again.usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens > 0.8 * again.usage.prompt_tokens
    assert contents(first) == contents(again)
    return None


def batches(client: openai.OpenAI) -> Any:
    """A file of requests through the batch API."""
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": MODEL_NAME,
                "messages": [{"role": "user", "content": f"Line {number}."}],
                "max_tokens": 8,
                "temperature": 0,
            },
        }
        for number in range(BATCH_LINES)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    deadline = time.monotonic() + BATCH_LIMIT_S
    while (now := client.batches.retrieve(batch.id)).status != "completed":
        assert time.monotonic() < deadline, now
        assert now.status not in ("failed", "expired", "cancelled"), now
        time.sleep(0.05)
    assert now.output_file_id is not None
    answers = map(json.loads, client.files.content(now.output_file_id).text.splitlines())
    return sorted(
        (each["custom_id"], each["response"]["body"]["choices"][0]["message"]["content"])
        for each in answers
    )


FEATURES: dict[str, Callable[[openai.OpenAI], Any]] = {
    "grammars": grammar,
    "logprobs": logprobs,
    "several choices (`n`), seeds": several_choices,
    "penalties, logit bias, stop texts": penalties,
    "prefix cache": prefix_cache,
    "batch API": batches,
}
