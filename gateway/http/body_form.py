"""Rewrites a request's body where vLLM refuses what OpenAI's reference allows.

OpenAI's SDKs dump members that are not set as null, and OpenAI reads null as absent; vLLM refuses
it for many members. A `top_p` of 0 leaves one token to choose from, which vLLM calls `top_k` 1.
Called by the body check. Pure.
"""

from typing import Any, Final

import msgspec

from gateway.http.large_bytes import contains

_FREE: Final = frozenset(
    {
        *("parameters", "input_schema", "schema", "json", "arguments", "structural_tag"),
        *("metadata", "logit_bias", "chat_template_kwargs", "vllm_xargs", "documents"),
    }
)
"""Members whose value is JSON of the client's own, where null has a meaning."""
_NULL_COUNTS: Final = frozenset({"content"})
"""Members that messages have to name, even as null."""


def may_need_rewrite(body: bytes, top_p: object) -> bool:
    """Return whether `rewrite` may change the body."""
    return (top_p == 0 and not isinstance(top_p, bool)) or contains(body, b"null")


def rewrite(body: bytes) -> bytes:
    """Return the body in the form that vLLM takes; it must be valid JSON."""
    fields = msgspec.json.decode(body)
    if not isinstance(fields, dict):
        return body
    fields = _without_nulls(fields)
    if fields.get("top_p") == 0 and not isinstance(fields["top_p"], bool):
        fields |= {"top_p": 1.0, "top_k": 1}
    return msgspec.json.encode(fields)


def _without_nulls(value: Any, name: str = "") -> Any:
    if name in _FREE or (name == "input" and isinstance(value, dict)):
        return value
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _without_nulls(inner, key)
        for key, inner in value.items()
        if inner is not None or key in _NULL_COUNTS
    }
