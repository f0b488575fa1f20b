"""What a request of Anthropic's Messages API may contain, beyond what every body may.

vLLM reads what it knows of a conversation and drops the rest without a word: documents, results of
the server's own tools, a schema in a field of an older version. Each of these is refused by name.
An image is inline, or at a URL of an allowed domain. Called by the body check. Pure.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from gateway.errors import MEDIA_TEXT, ApiError, api_error
from gateway.http.grammar_check import check_schemas
from gateway.http.media import is_allowed

TOOL_CHANGES_MAX = 128
"""Most tools that a conversation adds."""

_BLOCKS: Final = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text", "tool_addition", "tool_removal"),
}
"""The types of blocks that a message may have, by its role."""
_RESULTS: Final = ("text", "image", "tool_reference")
"""The types of blocks that the result of a tool may have."""
_SERVICE_TIERS: Final = {"auto": "auto", "standard_only": "default"}
"""Anthropic's tiers that a request may ask for -> OpenAI's."""


class _Fields(msgspec.Struct):
    """The checked members."""

    messages: object = None
    system: object = None
    tools: object = None
    tool_choice: object = None
    context_management: object = None
    container: object = None
    mcp_servers: object = None
    output_format: object = None
    fallbacks: object = None
    thread: object = None
    compaction: object = None
    inference_geo: object = None


_UNSUPPORTED: Final = (
    *("container", "mcp_servers", "output_format", "fallbacks", "thread", "compaction"),
    "inference_geo",
)
"""Parameters that ask for something which this server does not have."""


def check_messages(body: bytes, domains: frozenset[str]) -> ApiError | None:
    """Return the error in a body that is valid JSON, if any."""
    fields = msgspec.json.decode(body, type=_Fields)
    for name in _UNSUPPORTED:
        if getattr(fields, name) not in (None, [], {}):
            return _unsupported(name)
    if not _keeps_everything(fields.context_management):
        return _unsupported("context_management")
    if any(_kind(block) not in ("text", None) for block in _objects(fields.system)):
        return _invalid("system may have blocks of type text alone", "system")
    additions = 0
    for message in _objects(fields.messages):
        if (error := _check_message(message, domains)) is not None:
            return error
        additions += sum(_kind(block) == "tool_addition" for block in _objects(_content(message)))
    if additions > TOOL_CHANGES_MAX:
        return _invalid(f"messages may add {TOOL_CHANGES_MAX} tools at most")
    choice = fields.tool_choice
    if isinstance(choice, dict) and _kind(choice) in ("any", "tool") and not fields.tools:
        return None if additions else _invalid("tool_choice needs tools", "tool_choice")
    return None


def openai_service_tier(value: object) -> object | ApiError:
    """Return a body's `service_tier` in OpenAI's terms."""
    if value is None:
        return None
    tier = _SERVICE_TIERS.get(value) if isinstance(value, str) else None
    if tier is None:
        text = f"service_tier must be one of: {', '.join(_SERVICE_TIERS)}."
        return api_error("invalid_value", text, "service_tier")
    return tier


def _check_message(message: dict[str, Any], domains: frozenset[str]) -> ApiError | None:
    role = message.get("role")
    allowed = _BLOCKS.get(role) if isinstance(role, str) else None
    for block in _objects(_content(message)):
        kind = _kind(block)
        if allowed is not None and kind is not None and kind not in allowed:
            kinds = ", ".join(allowed)
            return _invalid(f"messages: blocks of role {role} must be of type: {kinds}")
        error = _check_source(block, domains) or _check_tool(block)
        if kind == "tool_result":
            error = error or _check_result(block, domains)
        if error is not None:
            return error
    return None


def _check_result(block: dict[str, Any], domains: frozenset[str]) -> ApiError | None:
    for part in _objects(block.get("content")):
        if _kind(part) not in _RESULTS:
            kinds = ", ".join(_RESULTS)
            return _invalid(f"messages: the content of a tool_result must be of type: {kinds}")
        if _kind(part) == "text" and not isinstance(part.get("text"), str):
            return _invalid("messages: a block of type text needs a text")
        name = part.get("tool_name") or part.get("name")
        if _kind(part) == "tool_reference" and not isinstance(name, str):
            return _invalid("messages: a block of type tool_reference needs a tool_name")
        if _kind(part) == "image" and not isinstance(part.get("source"), dict):
            return _invalid("messages: a block of type image needs a source")
        if (error := _check_source(part, domains)) is not None:
            return error
    return None


def _check_source(block: dict[str, Any], domains: frozenset[str]) -> ApiError | None:
    """Check where an image comes from."""
    source = block.get("source")
    if not isinstance(source, dict):
        return None
    if source.get("type") not in ("base64", "url"):
        return _invalid("messages: the source of an image must be of type base64 or url")
    if source["type"] == "url" and not is_allowed(source.get("url"), domains):
        return api_error("invalid_value", MEDIA_TEXT, "messages")
    return None


def _check_tool(block: dict[str, Any]) -> ApiError | None:
    tool = block.get("tool")
    if not isinstance(tool, dict):
        return None
    reason = check_schemas(msgspec.json.encode(tool))
    return _invalid(f"messages {reason}") if reason else None


def _keeps_everything(management: object) -> bool:
    """Return whether the edits of a context leave it as it is, which is all that happens here."""
    edits = management.get("edits") if isinstance(management, dict) else management
    if edits in (None, [], {}):
        return True
    return isinstance(edits, list) and all(
        isinstance(edit, dict) and edit.get("keep") == "all" for edit in edits
    )


def _content(message: dict[str, Any]) -> object:
    return message.get("content")


def _objects(value: object) -> Iterator[dict[str, Any]]:
    """Yield the objects of a list; vLLM reports what is none."""
    if isinstance(value, list):
        yield from (each for each in value if isinstance(each, dict))


def _kind(block: dict[str, Any]) -> str | None:
    kind = block.get("type")
    return kind if isinstance(kind, str) else None


def _unsupported(name: str) -> ApiError:
    text = f"{name} is not available to requests on this server: leave it out."
    return api_error("unsupported_parameter", text, name)


def _invalid(rule: str, param: str = "messages") -> ApiError:
    return api_error("invalid_value", f"{rule}.", param)
