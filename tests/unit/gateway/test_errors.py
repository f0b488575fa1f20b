"""Every error has OpenAI's shape, a string for a code, and nothing of the server's inside."""

import time

import msgspec
import pytest

from gateway.errors import (
    CODES,
    MESSAGE_CHARS_MAX,
    SERVER_ERROR_MESSAGE,
    api_error,
    failed_event,
    shape_error,
)


def vllm_body(message: str, code: int, param: str | None = None) -> bytes:
    fields = {"message": message, "type": "BadRequestError", "param": param, "code": code}
    return msgspec.json.encode({"error": fields})


@pytest.mark.parametrize("code", sorted(CODES))
def test_body_has_exactly_openai_s_fields(code: str) -> None:
    error = msgspec.json.decode(api_error(code, "why.").body())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code


@pytest.mark.parametrize(
    ("status", "body", "code", "param"),
    [
        (404, vllm_body("The model `x` does not exist.", 404, "model"), "model_not_found", "model"),
        (404, b'{"detail":"Not Found"}', "unknown_url", None),
        (405, b'{"detail":"Method Not Allowed"}', "method_not_allowed", None),
        (401, b'{"error":"Unauthorized"}', "invalid_api_key", None),
        (400, vllm_body("This model's maximum context length is 8.", 400),
         "context_length_exceeded", None),
        (400, vllm_body("The decoder prompt (length 9) is longer than the maximum model", 400),
         "context_length_exceeded", None),
        (400, vllm_body("bad top_p", 400, "top_p"), "invalid_value", "top_p"),
        (422, vllm_body("not processable", 422), "invalid_value", None),
        (400, vllm_body("JSON decode error: x", 400), "invalid_json", None),
        (501, vllm_body("no", 501), "not_implemented", None),
        (503, vllm_body("The engine is currently busy", 503), "no_healthy_workers", None),
        (413, b"", "request_too_large", None),
    ],
)  # fmt: skip
def test_others_errors_are_shaped(status: int, body: bytes, code: str, param: str | None) -> None:
    error = shape_error(status, body)
    assert (error.code, error.param) == (code, param)
    assert error.status == (400 if status == 422 else status)
    assert error.message


@pytest.mark.parametrize("status", [500, 502, 599, 418])
def test_insides_of_the_server_stay_inside(status: int) -> None:
    error = shape_error(status, vllm_body("EngineCoreProc failed at 0x7f", status))
    assert (error.status, error.code) == (500, "internal_error")
    assert error.message == SERVER_ERROR_MESSAGE


def test_own_errors_pass_unchanged() -> None:
    error = api_error("queue_full", "Full.", "n")
    assert shape_error(error.status, error.body()) == error


def test_failure_of_a_task_explains_every_answer() -> None:
    failure = api_error("queue_full", "Full.")
    assert shape_error(500, vllm_body("Internal server error", 500), failure) is failure
    assert failed_event(b"data: " + vllm_body("Internal server error", 500), failure) is failure


def test_event_of_vllm_is_shaped() -> None:
    error = failed_event(b"data: " + vllm_body("bad", 400, "n") + b"\n\n", None)
    assert (error.status, error.code, error.message) == (400, "invalid_value", "bad")
    assert failed_event(b"data: {broken", None).status == 500


def test_echo_of_the_value_is_left_out_and_messages_are_bounded() -> None:
    body = vllm_body("n must be positive. (parameter=n, value=-1)", 400, "n")
    assert shape_error(400, body).message == "n must be positive."
    assert len(shape_error(400, vllm_body("x" * 3_000, 400)).message) == MESSAGE_CHARS_MAX
    started = time.process_time()
    assert "xx" not in shape_error(400, vllm_body("x" * 100_000, 400)).message
    assert time.process_time() - started < 1, "what a client makes long must not cost long"


@pytest.mark.parametrize(
    ("theirs", "ours", "param"),
    [
        ("llama is not a multimodal model", "send messages of text", None),
        ('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
         "--tool-call-parser NAME", "tools"),
        ('tool_choice="required" requires --tool-call-parser to be set',
         "--tool-call-parser NAME", "tools"),
        ("When response_format type is 'json_schema', the 'json_schema' field must be provided.",
         "needs the field json_schema", "response_format"),
        ("logit_bias contains key(s) that cannot be converted to integer token IDs: ['a']",
         "takes token ids", "logit_bias"),
        ("`prompt_logprobs` are not available when `stream=True`.",
         "prompt_logprobs are not available when stream=True.", "prompt_logprobs"),
        ("Tool choice 'required' must be specified with 'tools' parameter.",
         "Tool choice required must be specified with tools parameter.", None),
    ],
)  # fmt: skip
def test_what_vllm_says_is_a_sentence_for_clients(
    theirs: str, ours: str, param: str | None
) -> None:
    error = shape_error(400, vllm_body(theirs, 400))
    assert ours in error.message
    assert "…" not in error.message
    assert error.code == "invalid_value"
    assert error.param == param


def test_quoted_words_of_a_client_are_left_out() -> None:
    for word in ("secret", "n=secret", "secret=True", "role secret"):
        error = shape_error(400, vllm_body(f"Invalid `name` in `function`: `{word}`", 400))
        assert "secret" not in error.message


@pytest.mark.parametrize("letter", ["x", "\x01", "\U0001f600"])
def test_an_error_is_short_whatever_it_is_made_of(letter: str) -> None:
    assert len(api_error("invalid_value", letter * 100_000, letter * 100_000).body()) < 8 * 1024


@pytest.mark.parametrize("code", ["", "Bad Code", "x" * 100, "A"])
def test_code_that_is_no_code_is_not_shown(code: str) -> None:
    assert api_error(code, "why").code == "internal_error"


def test_unknown_code_is_a_server_error() -> None:
    error = api_error("quantum_decoherence", "why")
    assert (error.status, error.code) == (500, "quantum_decoherence")


def test_overload_says_when_to_try_again() -> None:
    assert (b"retry-after", b"1") in api_error("queue_full", "Full.").headers()
    assert (b"retry-after", b"1") in api_error("draining", "Bye.").headers()
    assert (b"x-should-retry", b"false") in api_error("deadline_exceeded", "Late.").headers()
    assert len(api_error("invalid_value", "No.").headers()) == 1


@pytest.mark.parametrize("code", sorted(CODES))
def test_a_wait_is_told_in_seconds_and_in_milliseconds(code: str) -> None:
    """OpenAI's clients read the second one first: they must not contradict each other."""
    headers = dict(api_error(code, "why.", retry_after_s=7).headers())
    waits = CODES[code][0] in (429, 503) or code == "request_in_progress"
    assert headers.get(b"retry-after") == (b"7" if waits else None)
    assert headers.get(b"retry-after-ms") == (b"7000" if waits else None)
    finer = dict(api_error(code, "why.").with_retry_after(1_234).headers())
    assert finer.get(b"retry-after") == (b"2" if waits else None)
    assert finer.get(b"retry-after-ms") == (b"1234" if waits else None)
