"""What a request's body may be: well-formed, of bounded shape, and within parameter limits.

Checked before vLLM reads it: Python's JSON and pydantic take seconds for a few megabytes of small
values, and deep nesting makes them fail with a 500. Errors never quote the body. Called by the
edge, in a thread for large bodies. Pure.
"""

import codecs
import re
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from gateway.errors import ApiError, api_error
from gateway.http.body_form import may_need_rewrite, rewrite
from gateway.http.grammar_check import check_schemas
from gateway.http.large_bytes import breathe, contains, count, matches
from gateway.http.media import check_media
from gateway.http.messages_check import check_messages, openai_service_tier
from gateway.http.messages_form import is_messages_path

JSON_DEPTH_MAX = 64
"""Deepest nesting of arrays and objects."""
JSON_KEYS_MAX = 10_000
"""Most members of all objects of a body together."""
JSON_VALUES_MAX = 262_144
"""Most values of a body; a prompt may be a list of token ids."""

CHOICES_MAX = 8
"""Most choices (`n`, `best_of`) of one request."""
PROMPTS_MAX = 256
"""Most prompts of one completion request, times its choices."""
STOPS_MAX = 16
STOP_CHARS_MAX = 1_024
LOGIT_BIAS_MAX = 1_024
TOKEN_IDS_MAX = 1_024
"""Most token ids in a list that steers sampling."""
TOOLS_MAX = 128
OWN_TOOLS: Final[frozenset[str]] = frozenset({"function", "custom", "namespace"})
"""Types of tools that the client runs; vLLM would silently ignore others."""
SCHEMA_BYTES_MAX = 64 * 1024
"""Largest `response_format`, `structured_outputs`, `text` or `output_config`."""
MODEL_CHARS_MAX = 256
TOKENS_MAX = 2**31 - 1
"""Largest number of tokens that a request may name."""

UNSUPPORTED: Final[tuple[str, ...]] = (
    "chat_template",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "kv_transfer_params",
    "repetition_detection",
    "data_parallel_rank",
    "use_beam_search",
    "lora_request",
    "kv_hints",
    "ec_transfer_params",
    "previous_input_messages",
    "previous_response_id",
    "conversation",
    "background",
    "functions",
    "function_call",
    "audio",
    "web_search_options",
)
"""Parameters that would steer the server itself, or that it does not support.

The Responses API's stored state is among them: nothing is stored, whatever `store` says. OpenAI's
`functions` are today's `tools`.
"""
_NOTHING: Final = (b"", b"null", b"false")
_NOT_ASKED: Final = {"functions": (*_NOTHING, b"[]"), "function_call": (*_NOTHING, b'"none"')}
"""Values that ask for nothing, by parameter."""

# Both halves begin with the same characters, which `re` finds ten times as fast as a choice of two.
_LONE_SURROGATE = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|[c-fC-F](?<!\\u[dD][89abAB]..\\u[dD][c-fC-F]))"
)
_ESCAPED_BACKSLASH, _NO_BACKSLASH = b"\\\\", b"__"
_SURROGATES_BYTES = 12
"""Length of an escaped pair, the longest text that the pattern looks at."""
_STRUCTURE = frozenset(b'"{}[],:')
_NOT_STRUCTURE = bytes(set(range(256)) - _STRUCTURE)
_STEP = {ord("{"): 1, ord("["): 1, ord("}"): -1, ord("]"): -1}


class _Fields(msgspec.Struct):
    """The checked members; msgspec only validates the syntax of the others."""

    model: object = None
    service_tier: object = None
    n: object = None
    top_p: object = None
    top_k: object = None
    best_of: object = None
    stop: object = None
    stop_sequences: object = None
    stop_token_ids: object = None
    allowed_token_ids: object = None
    logit_bias: object = None
    max_tokens: object = None
    max_completion_tokens: object = None
    max_output_tokens: object = None
    min_tokens: object = None
    bad_words: object = None
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    response_format: msgspec.Raw = msgspec.Raw()
    output_config: msgspec.Raw = msgspec.Raw()
    structured_outputs: msgspec.Raw = msgspec.Raw()
    chat_template: msgspec.Raw = msgspec.Raw()
    mm_processor_kwargs: msgspec.Raw = msgspec.Raw()
    media_io_kwargs: msgspec.Raw = msgspec.Raw()
    kv_transfer_params: msgspec.Raw = msgspec.Raw()
    repetition_detection: msgspec.Raw = msgspec.Raw()
    data_parallel_rank: msgspec.Raw = msgspec.Raw()
    use_beam_search: msgspec.Raw = msgspec.Raw()
    lora_request: msgspec.Raw = msgspec.Raw()
    kv_hints: msgspec.Raw = msgspec.Raw()
    ec_transfer_params: msgspec.Raw = msgspec.Raw()
    previous_input_messages: msgspec.Raw = msgspec.Raw()
    previous_response_id: msgspec.Raw = msgspec.Raw()
    conversation: msgspec.Raw = msgspec.Raw()
    background: msgspec.Raw = msgspec.Raw()
    functions: msgspec.Raw = msgspec.Raw()
    function_call: msgspec.Raw = msgspec.Raw()
    audio: msgspec.Raw = msgspec.Raw()
    web_search_options: msgspec.Raw = msgspec.Raw()
    modalities: object = None


@dataclass(frozen=True, slots=True)
class BodyFacts:
    """The facts about a body that the gateway needs."""

    body: bytes
    """The body in the form that vLLM takes."""
    service_tier: object
    prompt_tokens_estimate: int
    """A quarter of the body's bytes, the estimate that OpenAI's own limits use."""
    grammar_field: str | None = None
    """The first parameter that holds a grammar or a schema."""
    model: str | None = None
    """The model that it names."""


def check_body(body: bytes, media_domains: frozenset[str], path: str = "") -> BodyFacts | ApiError:
    """Return the facts about a body that is sent to a path, or the error in it.

    A leading byte order mark is skipped.
    """
    body = body.removeprefix(codecs.BOM_UTF8)
    if (error := _check_shape(body)) is not None:
        return error
    try:
        fields = msgspec.json.decode(body, type=_Fields)
        if may_need_rewrite(body, fields.top_p):
            body = rewrite(body)
            fields = msgspec.json.decode(body, type=_Fields)
        # Skipped members may turn out to be invalid only here.
        service_tier, error = fields.service_tier, _check_fields(fields)
        if is_messages_path(path):
            service_tier = openai_service_tier(service_tier)
            error = error or check_messages(body, media_domains)
            if isinstance(service_tier, ApiError):
                error = error or service_tier
        else:
            error = error or _check_media(fields, media_domains)
        model = fields.model if isinstance(fields.model, str) else None
        grammar_field = _grammar_field(fields)
        return error or BodyFacts(body, service_tier, len(body) // 4, grammar_field, model)
    except msgspec.ValidationError:
        return api_error("invalid_value", "The body must be a JSON object with numbers in range.")
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return api_error("invalid_json", "The request's body is not valid JSON.")


def _check_fields(fields: _Fields) -> ApiError | None:
    return _check_sizes(fields) or _check_numbers(fields) or _check_unsupported(fields)


def _check_media(fields: _Fields, media_domains: frozenset[str]) -> ApiError | None:
    error: ApiError | None = None
    for name in ("messages", "input"):
        error = error or check_media(bytes(getattr(fields, name)), media_domains, name)
    return error


def _check_shape(body: bytes) -> ApiError | None:
    """Refuse what is costly or impossible to parse; linear, in a few large C calls."""
    try:
        body.decode()
    except UnicodeDecodeError:
        return api_error("invalid_json", "The request's body is not valid UTF-8.")
    if contains(body, b"\\u") and _has_lone_surrogate(body):
        return api_error("invalid_json", "A \\u escape in the body is half of a character.")
    brackets = count(body, b"{") + count(body, b"[")
    values, keys = brackets + count(body, b","), count(body, b":")
    if brackets <= JSON_DEPTH_MAX and values <= JSON_VALUES_MAX and keys <= JSON_KEYS_MAX:
        return None
    # The counts include characters in strings, so count again outside of them.
    plain = _structure(body)
    if count(plain, b'"') > 2 * (JSON_VALUES_MAX + JSON_KEYS_MAX):
        return _too_many(f"more than {JSON_VALUES_MAX} values")
    outside = b"".join(plain.split(b'"')[::2])
    brackets = count(outside, b"{") + count(outside, b"[")
    if brackets + count(outside, b",") > JSON_VALUES_MAX:
        return _too_many(f"more than {JSON_VALUES_MAX} values")
    if count(outside, b":") > JSON_KEYS_MAX:
        return _too_many(f"more than {JSON_KEYS_MAX} members in objects")
    if brackets > JSON_DEPTH_MAX and _depth(outside) > JSON_DEPTH_MAX:
        return _too_many(f"more than {JSON_DEPTH_MAX} levels of nesting")
    return None


def _has_lone_surrogate(body: bytes) -> bool:
    """Return whether an escape stands for half of a character.

    An escaped backslash before a `u` makes no escape: JSON within a string is full of them.
    """
    if contains(body, _ESCAPED_BACKSLASH):
        body = body.replace(_ESCAPED_BACKSLASH, _NO_BACKSLASH)
        breathe(body)
    return matches(_LONE_SURROGATE, body, _SURROGATES_BYTES)


def _structure(body: bytes) -> bytes:
    """Return JSON's structural characters, with quotes but without escaped ones."""
    for escape in (b"\\\\", b'\\"'):
        body = body.replace(escape, b"")
        breathe(body)
    body = body.translate(None, _NOT_STRUCTURE)
    breathe(body)
    return body


def _depth(outside: bytes) -> int:
    deepest = depth = 0
    for byte in outside.translate(None, b",:"):
        depth += _STEP[byte]
        deepest = max(deepest, depth)
    return deepest


def _too_many(what: str) -> ApiError:
    return api_error("invalid_json", f"The request's body has {what}; send less at once.")


def _check_sizes(fields: _Fields) -> ApiError | None:
    lists: tuple[tuple[str, Any, int], ...] = (
        ("stop", fields.stop, STOPS_MAX),
        ("stop_sequences", fields.stop_sequences, STOPS_MAX),
        ("stop_token_ids", fields.stop_token_ids, TOKEN_IDS_MAX),
        ("allowed_token_ids", fields.allowed_token_ids, JSON_VALUES_MAX),
        ("logit_bias", fields.logit_bias, LOGIT_BIAS_MAX),
        ("bad_words", fields.bad_words, TOKEN_IDS_MAX),
    )
    for name, value, most in lists:
        if isinstance(value, list | dict) and len(value) > most:
            return _invalid(name, f"may have {most} entries at most")
    if (error := _check_stops(fields)) is not None:
        return error
    if isinstance(fields.model, str) and len(fields.model) > MODEL_CHARS_MAX:
        return _invalid("model", f"may have {MODEL_CHARS_MAX} characters at most")
    for name in ("response_format", "structured_outputs", "text", "output_config"):
        raw = bytes(getattr(fields, name))
        if len(raw) > SCHEMA_BYTES_MAX:
            return _invalid(name, f"may have {SCHEMA_BYTES_MAX} bytes at most")
        if (error := _check_schemas(name, raw)) is not None:
            return error
    tools = _items(fields.tools)
    if len(tools) > TOOLS_MAX:
        return _invalid("tools", f"may have {TOOLS_MAX} entries at most")
    for tool in tools:
        if (error := _check_schemas("tools", bytes(tool))) is not None:
            return error
    if not _kinds(fields.tools) <= OWN_TOOLS:
        text = "This server runs no tools itself: tools may be of type function or custom."
        return api_error("unsupported_parameter", text, "tools")
    return None


def _check_stops(fields: _Fields) -> ApiError | None:
    for name in ("stop", "stop_sequences"):
        value = getattr(fields, name)
        stops = value if isinstance(value, list) else [value]
        if any(isinstance(each, str) and len(each) > STOP_CHARS_MAX for each in stops):
            return _invalid(name, f"may have {STOP_CHARS_MAX} characters per string at most")
    return None


def _grammar_field(fields: _Fields) -> str | None:
    names = ("response_format", "structured_outputs", "text", "output_config", "tools")
    return next((name for name in names if bytes(getattr(fields, name))), None)


def _check_schemas(name: str, raw: bytes) -> ApiError | None:
    reason = check_schemas(raw)
    return _invalid(name, reason) if reason else None


def _check_numbers(fields: _Fields) -> ApiError | None:
    for name in ("n", "best_of"):
        value = getattr(fields, name)
        if isinstance(value, int | float) and not 1 <= value <= CHOICES_MAX:
            return _invalid(name, f"must be between 1 and {CHOICES_MAX}")
    choices = int(fields.n) if isinstance(fields.n, int | float) else 1
    if _prompts(bytes(fields.prompt)) * choices > PROMPTS_MAX:
        return _invalid("prompt", f"times n may be {PROMPTS_MAX} prompts at most")
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"):
        value = getattr(fields, name)
        if isinstance(value, int | float) and not 0 <= value <= TOKENS_MAX:
            return _invalid(name, f"must be between 0 and {TOKENS_MAX}")
    if isinstance(fields.top_k, int | float) and fields.top_k > TOKENS_MAX:
        return _invalid("top_k", f"must be {TOKENS_MAX} at most")
    return None


def _check_unsupported(fields: _Fields) -> ApiError | None:
    for name in UNSUPPORTED:
        if bytes(getattr(fields, name)) not in _NOT_ASKED.get(name, _NOTHING):
            return _unsupported(name)
    choices = fields.n if isinstance(fields.n, int) else 1
    if isinstance(fields.best_of, int | float) and fields.best_of not in (1, choices):
        return _unsupported("best_of")
    if isinstance(fields.modalities, list) and any(each != "text" for each in fields.modalities):
        return _unsupported("modalities")
    return None


def _unsupported(name: str) -> ApiError:
    text = f"{name} is not available to requests on this server: leave it out."
    return api_error("unsupported_parameter", text, name)


def _prompts(prompt: bytes) -> int:
    """Count the prompts; a list of numbers is one prompt of token ids."""
    if not prompt.startswith(b"["):
        return 1
    first = prompt[1:].lstrip()[:1]
    return len(_items(msgspec.Raw(prompt))) if first in (b'"', b"[", b"{") else 1


def _items(raw: msgspec.Raw) -> list[msgspec.Raw]:
    """Return the items of a list; of anything else none."""
    if not bytes(raw).startswith(b"["):
        return []
    return msgspec.json.decode(raw, type=list[msgspec.Raw])


def _kinds(tools: msgspec.Raw) -> set[str]:
    """Return the types of tools that are strings; vLLM reports other faults."""
    if not bytes(tools).startswith(b"["):
        return set()
    entries = msgspec.json.decode(tools)
    kinds = [tool.get("type") for tool in entries if isinstance(tool, dict)]
    return {kind for kind in kinds if isinstance(kind, str)}


def _invalid(param: str, rule: str) -> ApiError:
    return api_error("invalid_value", f"{param} {rule}.", param)
