"""Requests that try to break something: each should be refused with a 4xx, or served."""

import json
from typing import Any

CANARY = "kanarienvogel"
"""Stands in every field that an error could quote."""

CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": CANARY}],
    "max_tokens": 2,
}


def _schema(schema: Any) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    }


def _content(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


PARAMETERS: dict[str, dict[str, Any]] = {
    "negative temperature": {"temperature": -3},
    "infinite temperature": {"temperature": 1e308},
    "text for a number": {"temperature": CANARY},
    "no choices": {"n": 0},
    "many choices": {"n": 10**9},
    "many tokens": {"max_tokens": 100_000},
    "negative tokens": {"max_tokens": -1},
    "many stops": {"stop": [CANARY] * 100},
    "empty stop": {"stop": ["", CANARY]},
    "large bias": {"logit_bias": {str(n): 1 for n in range(5_000)}},
    "strange bias": {"logit_bias": {CANARY: 1}},
    "unknown token biased": {"logit_bias": {"999999999": 100}},
    "many logprobs": {"logprobs": True, "top_logprobs": 999},
    "negative prompt logprobs": {"prompt_logprobs": -2},
    "large seed": {"seed": 2**70},
    "bad tool": {"tools": [{"type": CANARY}]},
    "tool with a bad schema": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": CANARY}}}],
        "tool_choice": "required",
    },
    "unknown tool wanted": {"tool_choice": {"type": "function", "function": {"name": CANARY}}},
    "bad schema": _schema({"type": CANARY}),
    "recursive schema": _schema({"$ref": "#"}),
    "foreign schema": _schema({"$ref": "http://10.0.0.1/" + CANARY}),
    "schema of many items": _schema({"type": "array", "minItems": 10**5, "maxItems": 10**6}),
    "schema of a long string": _schema({"type": "string", "minLength": 10**6}),
    "large schema": _schema({"enum": [CANARY * 10] * 1_000}),
    "nested regex": {"structured_outputs": {"regex": "((a{1,500}){1,500}){1,500}"}},
    "backtracking regex": {"structured_outputs": {"regex": "(a+)+$"}},
    "broken regex": {"structured_outputs": {"regex": "(" + CANARY}},
    "deep grammar": {"structured_outputs": {"grammar": "root ::= " + "(" * 20_000}},
    "broken grammar": {"structured_outputs": {"grammar": CANARY}},
    "two grammars": {"structured_outputs": {"regex": "a", "choice": [CANARY]}},
    "chat template": {"chat_template": "{{ " + CANARY + " }}"},
    "template arguments": {"chat_template_kwargs": {"messages": [CANARY]}},
    "processor arguments": {"mm_processor_kwargs": {"a": CANARY}},
    "file": _content([{"type": "image_url", "image_url": {"url": "file:///etc/" + CANARY}}]),
    "metadata service": _content(
        [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/" + CANARY}}]
    ),
    "image for a model of text": _content(
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    ),
    "content of no kind": _content([{"type": CANARY}]),
    "content that is a number": _content(5),
    "no messages": {"messages": []},
    "role of no kind": {"messages": [{"role": CANARY + "\u202e", "content": "x"}]},
    "broken tool call": {
        "messages": [
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}
                ],
            }
        ]
    },
    "beam search": {"use_beam_search": True, "n": 4},
    "unknown model": {"model": CANARY},
    "model that is no text": {"model": {"a": CANARY}},
    "unknown tier": {"service_tier": CANARY},
    "stream options without a stream": {"stream_options": {"include_usage": True}},
    "stream that is no truth": {"stream": CANARY},
    "unknown token ids": {"allowed_token_ids": [-1, 10**9]},
    "unknown stop ids": {"stop_token_ids": [-1, 2**40]},
    "empty salt": {"cache_salt": ""},
    "both ends": {"add_generation_prompt": True, "continue_final_message": True},
    "long prompt": _content(CANARY * 20_000),
    "logits processor": {"logits_processors": ["os.system"]},
    "adapter": {"lora_request": {"path": CANARY}},
}

OUTCOMES: dict[str, tuple[int, str | None]] = {
    "negative temperature": (400, "temperature"),
    "infinite temperature": (400, "temperature"),
    "text for a number": (400, "temperature"),
    "no choices": (400, "n"),
    "many choices": (400, "n"),
    "many tokens": (400, "max_tokens"),
    "negative tokens": (400, "max_tokens"),
    "many stops": (400, "stop"),
    "empty stop": (400, None),
    "large bias": (400, "logit_bias"),
    "strange bias": (400, "logit_bias"),
    "unknown token biased": (400, "logit_bias"),
    "many logprobs": (400, "logprobs"),
    "negative prompt logprobs": (400, "prompt_logprobs"),
    "large seed": (400, "seed"),
    "bad tool": (400, "tools"),
    "tool with a bad schema": (400, "tools"),
    "unknown tool wanted": (400, "tool_choice"),
    "bad schema": (400, "response_format"),
    "recursive schema": (400, "response_format"),
    "foreign schema": (400, "response_format"),
    "schema of many items": (400, None),
    "schema of a long string": (200, None),
    "large schema": (400, "response_format"),
    "nested regex": (400, "structured_outputs"),
    "backtracking regex": (200, None),
    "broken regex": (400, "structured_outputs"),
    "deep grammar": (400, "structured_outputs"),
    "broken grammar": (400, "structured_outputs"),
    "two grammars": (400, None),
    "chat template": (400, "chat_template"),
    "template arguments": (400, None),
    "processor arguments": (400, "mm_processor_kwargs"),
    "file": (400, "messages"),
    "metadata service": (400, "messages"),
    "image for a model of text": (400, None),
    "content of no kind": (400, None),
    "content that is a number": (400, "messages.0.content"),
    "no messages": (400, None),
    "role of no kind": (200, None),
    "broken tool call": (200, None),
    "beam search": (400, "use_beam_search"),
    "unknown model": (404, "model"),
    "model that is no text": (400, "model"),
    "unknown tier": (400, "service_tier"),
    "stream options without a stream": (400, "stream_options"),
    "stream that is no truth": (400, "stream"),
    "unknown token ids": (400, "allowed_token_ids"),
    "unknown stop ids": (400, "stop_token_ids"),
    "empty salt": (400, "cache_salt"),
    "both ends": (400, "continue_final_message"),
    "long prompt": (400, None),
    "logits processor": (200, None),
    "adapter": (400, "lora_request"),
}
"""Status and `param` that each of them gets; without a field vLLM blames none."""

FREE_KEYS: dict[str, tuple[str, dict[str, Any], str]] = {
    "bias": ("chat/completions", {"logit_bias": {CANARY: "x"}}, "logit_bias"),
    "long bias": ("chat/completions", {"logit_bias": {CANARY * 90_000: "x"}}, "logit_bias"),
    "bias of a prompt": ("completions", {"prompt": "x", "logit_bias": {CANARY: "x"}}, "logit_bias"),
    "document": ("chat/completions", {"documents": [{CANARY: 1}]}, "documents"),
    "arguments": ("chat/completions", {"vllm_xargs": {CANARY: {CANARY: 1}}}, "vllm_xargs"),
    "list of arguments": ("chat/completions", {"vllm_xargs": {CANARY: ["", {}]}}, "vllm_xargs"),
    "metadata": ("responses", {"input": CANARY, "metadata": {CANARY: 5}}, "metadata"),
}
"""Objects whose keys are the client's own: the route, what is sent, and the field to be named."""

BODIES: dict[str, bytes] = {
    "nothing": b"",
    "no json": CANARY.encode(),
    "half": b'{"model": "demo", "messages": [{"role": "user", "content": "kanarienvogel',
    "list": b"[]",
    "null": b"null",
    "not a number": b'{"model": "demo", "temperature": NaN}',
    "utf-16": json.dumps(CHAT).encode("utf-16"),
    "invalid utf-8": b'{"model": "demo", "prompt": "kanarienvogel\xff"}',
    "lone surrogate": b'{"model": "demo", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "control character": b'{"model": "demo\x00", "messages": []}',
    "deep": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "deep list": b"[" * 100_000,
    "long number": b'{"model": "demo", "n": ' + b"9" * 10_000 + b"}",
    "many keys": b"{" + b",".join(b'"k%d":1' % n for n in range(500_000)) + b"}",
    "same key": b'{"model": "demo", "model": "kanarienvogel", "messages": []}',
}

BODY_OUTCOMES: dict[str, tuple[int, str]] = {
    **dict.fromkeys(BODIES, (400, "invalid_json")),
    **dict.fromkeys(("list", "null", "long number"), (400, "invalid_value")),
    "same key": (404, "model_not_found"),
}
"""Status and code that each of them gets."""

PROMPTS: dict[str, dict[str, Any]] = {
    "prompt of unknown tokens": {"prompt": [10**9]},
    "prompt of a token just behind the last": {"prompt": [1, 2, 3, 2**31 - 1]},
    "prompt of negative tokens": {"prompt": [-1, -(2**40)]},
    "empty prompt": {"prompt": ""},
    "prompt of no tokens": {"prompt": []},
    "prompts of no tokens": {"prompt": [[], []]},
    "many prompts": {"prompt": [CANARY] * 2_000},
    "prompt of spaces": {"prompt": " " * 50_000},
    "embeddings for a prompt": {"prompt_embeds": CANARY},
    "echo with nothing behind": {"prompt": CANARY, "echo": True, "max_tokens": 0},
    "prompt logprobs": {"prompt": CANARY * 20, "prompt_logprobs": 20},
    "bad words": {"prompt": CANARY, "bad_words": [CANARY, "", " "]},
    "all at their ends": {
        "prompt": CANARY,
        "temperature": 2,
        "top_p": 1e-9,
        "top_k": 1,
        "min_p": 1,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "repetition_penalty": 1e-9,
        "min_tokens": 2,
    },
    "cut to one token": {"prompt": CANARY * 20, "truncate_prompt_tokens": 1},
    "no tokens allowed": {"prompt": CANARY, "allowed_token_ids": []},
    "all tokens forbidden": {"prompt": CANARY, "logit_bias": {str(n): -100 for n in range(1_024)}},
    "internal fields": {"prompt": CANARY, "kv_transfer_params": {"do_remote_prefill": True}},
    "extra arguments": {"prompt": CANARY, "vllm_xargs": {"a": CANARY}},
}
