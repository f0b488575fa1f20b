"""Bodies that are costly, broken or out of bounds, and those that only look like it."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.http.body_check import (
    JSON_DEPTH_MAX,
    JSON_KEYS_MAX,
    JSON_VALUES_MAX,
    LOGIT_BIAS_MAX,
    BodyFacts,
    check_body,
)

MIB = 1024**2
CANARY = "kanarienvogel"
NOTHING: frozenset[str] = frozenset()


def check(body: bytes) -> BodyFacts | ApiError:
    return check_body(body, NOTHING)


def code(body: bytes) -> str | None:
    found = check(body)
    if isinstance(found, ApiError):
        assert found.status == 400
        assert len(found.body()) < 8 * 1024
        assert CANARY not in found.body().decode()
        return found.code
    return None


def nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"kanarienvogel",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": 01}',
        b'{"a": "kanarienvogel\xff"}',
        b'{"a": "nul \x00"}',
        b'{"a": "\\ud83d"}',
        b'{"a": "\\ud83d kanarienvogel"}',
        b'{"a": "\\ude00\\ud83d"}',
        b'{"a": 1} {"b": 2}',
        b'{"a": 1,}',
        b"{'a': 1}",
        b"[" * 10_000 + b"]" * 10_000,
        nested(10_000),
        nested(JSON_DEPTH_MAX + 1),
        b'{"a": [' + b"[" * JSON_DEPTH_MAX + b"]" * JSON_DEPTH_MAX + b"]}",
        b"{" + b",".join(b'"k%d":1' % n for n in range(JSON_KEYS_MAX + 1)) + b"}",
        b'{"a": [' + b"1," * JSON_VALUES_MAX + b"1]}",
    ],
    ids=lambda body: repr(body[:24]),
)
def test_broken_or_costly_json_is_refused(body: bytes) -> None:
    assert code(body) == "invalid_json"


@pytest.mark.parametrize("body", [b"[]", b"null", b"1", b'"x"', b'{"n": ' + b"9" * 5_000 + b"}"])
def test_what_is_no_object_of_usable_values_is_refused(body: bytes) -> None:
    assert code(body) == "invalid_value"


@pytest.mark.parametrize(
    "body",
    [
        nested(JSON_DEPTH_MAX),
        json.dumps({"prompt": "[{" * 100_000}).encode(),
        json.dumps({"prompt": ',":{[' * 100_000 + '\\"\\\\'}).encode(),
        json.dumps({"prompt": "\\" * 1_001 + '"' * 300_000}).encode(),
        b'{"prompt": [' + b"1," * (JSON_VALUES_MAX - 10) + b"1]}",
        '{"prompt": "\\ud83d\\ude00 ä 漢"}'.encode(),
        b'{"a": 1, "a": 2}',
    ],
    ids=lambda body: repr(body[:24]),
)
def test_what_only_looks_costly_passes(body: bytes) -> None:
    assert code(body) is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "' + b"x" * (8 * MIB) + b'"}',
        b'{"prompt": "' + b'\\"' * (4 * MIB) + b'"}',
        b'{"prompt": [' + b"1," * (4 * MIB - 10) + b"1]}",
        b"{" + b",".join(b'"%06d":1' % n for n in range(700_000)) + b"}",
        b'{"p": [' + b'"",' * (2 * MIB) + b'""]}',
        b"[" * (8 * MIB),
    ],
    ids=["string", "escapes", "numbers", "keys", "strings", "brackets"],
)
def test_eight_mebibytes_of_anything_are_judged_soon(body: bytes) -> None:
    began = time.process_time()
    check(body)
    took_ms = (time.process_time() - began) * 1_000
    print(f"{took_ms:.0f} ms")
    assert took_ms < 1_000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"n": 10**9}, "n"),
        ({"best_of": 99}, "best_of"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 1_025}, "stop"),
        ({"logit_bias": {str(n): 1 for n in range(LOGIT_BIAS_MAX + 1)}}, "logit_bias"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": 10**15}, "max_completion_tokens"),
        ({"tools": [{}] * 129}, "tools"),
        ({"response_format": {"schema": "x" * 70_000}}, "response_format"),
        ({"prompt": ["x"] * 257}, "prompt"),
        ({"prompt": [[1]] * 65, "n": 4}, "prompt"),
        ({"model": CANARY * 20}, "model"),
        ({"bad_words": ["x"] * 2_000}, "bad_words"),
    ],
)
def test_parameters_have_caps(fields: dict[str, Any], param: str) -> None:
    error = check(json.dumps({"prompt": "x", **fields}).encode())
    assert isinstance(error, ApiError)
    assert (error.code, error.param) == ("invalid_value", param)
    assert CANARY not in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 8, "stop": ["x"] * 16, "tools": None, "response_format": None},
        {"prompt": list(range(3_000))},
        {"prompt": [[1, 2]] * 32, "n": 8},
        {"n": "many"},
        {"stop": None, "max_tokens": None, "chat_template": None},
    ],
)
def test_parameters_within_the_caps_are_left_to_vllm(fields: dict[str, Any]) -> None:
    assert isinstance(check(json.dumps(fields).encode()), BodyFacts)


@pytest.mark.parametrize("name", ["chat_template", "mm_processor_kwargs", "kv_transfer_params"])
def test_parameters_that_steer_the_server_are_refused(name: str) -> None:
    error = check(json.dumps({name: {"x": CANARY}}).encode())
    assert isinstance(error, ApiError)
    assert (error.code, error.param) == ("unsupported_parameter", name)


def test_facts_are_read() -> None:
    facts = check(b'{"service_tier": "flex", "prompt": "0123456789"}')
    assert isinstance(facts, BodyFacts)
    assert facts.service_tier == "flex"
    assert facts.prompt_tokens_estimate == 12


def image(url: object) -> bytes:
    part = {"type": "image_url", "image_url": {"url": url}}
    return json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode()


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "http://169.254.169.254/latest/meta-data",
        "https://evil.example/x.png",
        "https://good.example@evil.example/x.png",
        "https://evil.example\\@good.example/x.png",
        "https://good.example.evil.example/x.png",
        "ftp://good.example/x",
        "//good.example/x",
        "gopher://good.example",
        "https://good.example /x",
        "http://[::1]/x",
        "http://127.0.0.1/x",
        "http://localhost/x",
        "",
        None,
        7,
        ["https://good.example/x"],
    ],
)
def test_media_of_other_places_are_refused(url: object) -> None:
    allowed = frozenset({"good.example", "127.0.0.1", "localhost", "::1"})
    found = check_body(image(url), allowed)
    assert isinstance(found, ApiError)
    assert (found.code, found.param) == ("invalid_value", "messages")
    assert "passwd" not in found.message
    assert "has text models alone" in found.message, "no setting of the operator changes it"


@pytest.mark.parametrize("url", ["data:image/png;base64,AAAA", "https://good.example/x.png"])
def test_inline_and_allowed_media_pass(url: str) -> None:
    assert isinstance(check_body(image(url), frozenset({"good.example"})), BodyFacts)
    plain = json.dumps({"messages": [{"role": "user", "content": "see file image_url"}]})
    assert isinstance(check(plain.encode()), BodyFacts)


def test_key_written_in_escapes_is_a_key_all_the_same() -> None:
    body = image("file:///etc/passwd").replace(b"image_url", b"image\\u005furl")
    assert isinstance(check(body), ApiError)


@pytest.mark.parametrize("key", ["video_url", "audio_url"])
def test_other_media_have_the_same_rules(key: str) -> None:
    body = image("http://10.0.0.1/x").replace(b"image_url", key.encode())
    assert isinstance(check(body), ApiError)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_image", "image_url": "http://10.0.0.1/x"},
        {"type": "input_file", "file_url": "http://10.0.0.1/x"},
        {"type": "input_image", "image_url": "file:///etc/passwd"},
    ],
)
def test_media_of_a_response_have_the_same_rules(part: dict[str, str]) -> None:
    body = json.dumps({"input": [{"role": "user", "content": [part]}]}).encode()
    refused = check(body)
    assert isinstance(refused, ApiError)
    assert refused.param == "input"


@pytest.mark.parametrize(
    "name", ["previous_response_id", "conversation", "background", "previous_input_messages"]
)
def test_stored_state_is_refused_and_its_absence_is_not(name: str) -> None:
    refused = check(json.dumps({"input": "x", "store": True, name: "a"}).encode())
    assert isinstance(refused, ApiError)
    assert (refused.code, refused.param) == ("unsupported_parameter", name)
    for empty in (None, False):
        fields = {"input": "x", "store": True, name: empty}
        assert isinstance(check(json.dumps(fields).encode()), BodyFacts)


@pytest.mark.parametrize(
    ("tools", "code"),
    [
        ('[{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}, 7]', ""),
        ('[{"name": "f"}, {"type": 3}]', ""),
        ('{"type": "web_search"}', ""),
        ('[{"type": "web_search"}]', "unsupported_parameter"),
        ('[{"type": "mcp", "server_url": "http://10.0.0.1"}]', "unsupported_parameter"),
        ("[1e999]", "invalid_value"),
    ],
)
def test_tools_that_the_server_would_have_to_run_are_refused(tools: str, code: str) -> None:
    found = check(b'{"tools": ' + tools.encode() + b"}")
    assert (found.code if isinstance(found, ApiError) else "") == code


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), json_values), st.booleans())
def test_json_that_python_writes_is_accepted(fields: dict[str, Any], ascii_only: bool) -> None:
    body = json.dumps(fields, ensure_ascii=ascii_only, allow_nan=False).encode()
    found = check(body)
    assert isinstance(found, BodyFacts) or found.code != "invalid_json"


@given(st.binary(max_size=200))
def test_any_bytes_are_judged(body: bytes) -> None:
    found = check(b'{"messages": ' + body + b"}")
    assert isinstance(found, ApiError | BodyFacts)


@given(parts=st.lists(st.sampled_from((r"\ud83d", r"\uDe00", r"\u0041", r"\\", "u", "d8", "a"))))
def test_half_a_character_is_found_wherever_it_is(parts: list[str]) -> None:
    text = "".join(parts)
    decoded = json.loads(f'"{text}"')
    has_half = any("\ud800" <= each <= "\udfff" for each in decoded)
    assert isinstance(check(f'{{"prompt": "{text}"}}'.encode()), ApiError) == has_half


ESCAPES = [
    (r"\\ud83d", True),
    (r"\ud83d\ude00", True),
    (r"D:\\udev", True),
    (r"\\\\ud83d", True),
    (r"\ud83d", False),
    (r"\ude00", False),
    (r"\\\ud83d", False),
    (r"\ud83d\\\ude00", False),
    (r"\ud83d\\ude00", False),
    (r"\ude00\ud83d", False),
    (r"\ud83d\ud83d\ude00", False),
]


@pytest.mark.parametrize(("text", "is_whole"), ESCAPES)
@pytest.mark.parametrize("length", [0, 512 * 1024 - 8])
def test_only_half_a_character_is_refused(text: str, is_whole: bool, length: int) -> None:
    """The judgement is that of the decoded text."""
    body = '{"prompt": "' + "x" * length + text + '"}'
    decoded = json.loads(body)["prompt"]
    assert is_whole == (not any(0xD800 <= ord(each) < 0xE000 for each in decoded))
    found = check(body.encode())
    assert isinstance(found, BodyFacts) == is_whole
    if isinstance(found, ApiError):
        assert found.code == "invalid_json"


def test_tools_are_bounded_by_the_body_alone() -> None:
    schema = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(30)}}
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": schema}}
        for n in range(128)
    ]
    assert len(json.dumps(tools)) > 100 * 1024
    assert isinstance(check(json.dumps({"tools": tools}).encode()), BodyFacts)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"response_format": {}, "tools": []}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"text": {}}, "text"),
        ({"tools": [], "text": None}, "tools"),
        ({}, None),
    ],
)
def test_the_field_with_a_grammar_is_known(fields: dict[str, Any], name: str | None) -> None:
    found = check(json.dumps(fields).encode())
    assert isinstance(found, BodyFacts)
    assert found.grammar_field == name


def test_a_byte_order_mark_is_skipped() -> None:
    found = check(b'\xef\xbb\xbf{"prompt": "x"}')
    assert isinstance(found, BodyFacts)
    assert found.body == b'{"prompt": "x"}'
