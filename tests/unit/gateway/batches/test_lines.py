"""What an input file may say, and what the files with results hold."""

import json
from typing import Any

import pytest

from gateway.batches import lines
from gateway.batches.lines import Line, Survey, answered, not_run, read_line, split_results
from gateway.batches.terms import Status, Usage

URL = "/v1/completions"


def line(number: int = 0, **changes: Any) -> bytes:
    body = {"model": "m", "prompt": "p"}
    fields = {"custom_id": f"c{number}", "method": "POST", "url": URL, "body": body, **changes}
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()


def survey(*texts: bytes) -> Survey:
    found = Survey(URL)
    start = 0
    for text in texts:
        found.look(text + b"\n", start)
        start += len(text) + 1
    found.finish()
    return found


def test_a_line_is_read() -> None:
    read = read_line(line(7), 7, URL)
    assert (read.number, read.custom_id, read.model) == (7, "c7", "m")
    assert json.loads(read.body) == {"model": "m", "prompt": "p"}


def test_places_of_lines_and_blank_ones() -> None:
    found = survey(line(1), b"", b"  ", line(2))
    assert found.starts == [0, len(line(1)) + 5]
    assert found.model == "m"
    assert not found.errors


@pytest.mark.parametrize(
    ("text", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (b'"\xff"', "invalid_json_line", None),
        (b"[" * 100_000, "invalid_json_line", None),
        (line(custom_id=None), "missing_required_parameter", "custom_id"),
        (line(custom_id=""), "missing_required_parameter", "custom_id"),
        (line(custom_id="x" * 513), "missing_required_parameter", "custom_id"),
        (line(custom_id=5), "missing_required_parameter", "custom_id"),
        (line(method="GET"), "invalid_method", "method"),
        (line(url="/v1/embeddings"), "mismatched_endpoint", "url"),
        (line(body=None), "missing_required_parameter", "body"),
        (line(body=[]), "missing_required_parameter", "body"),
        (line(body={"prompt": "p"}), "missing_required_parameter", "body.model"),
        (line(body={"model": ""}), "missing_required_parameter", "body.model"),
        (line(body={"model": "m", "stream": True}), "unsupported_parameter", "body.stream"),
    ],
)
def test_wrong_lines(text: bytes, code: str, param: str | None) -> None:
    (error,) = survey(line(1), text).errors
    assert (error.code, error.line, error.param) == (code, 2, param)
    assert "prompt" not in error.message


def test_lines_that_do_not_go_together() -> None:
    errors = survey(line(1), line(1), line(2, body={"model": "other"})).errors
    assert [(error.code, error.line) for error in errors] == [
        ("duplicate_custom_id", 2),
        ("mismatched_model", 3),
    ]
    assert [error.code for error in survey().errors] == ["empty_file"]


def test_too_much_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LINES_MAX", 3)
    found = survey(*(line(number) for number in range(9)))
    assert [(error.code, error.line) for error in found.errors] == [("too_many_tasks", None)]
    many = survey(*[b"{"] * 500)
    assert len(many.errors) <= lines.ERRORS_MAX
    monkeypatch.setattr(lines, "LINE_BYTES_MAX", 100)
    long = survey(line(1, body={"model": "m", "prompt": "x" * 100}))
    assert [error.code for error in long.errors] == ["line_too_long"]


def test_a_result_is_one_line_of_the_right_file() -> None:
    asked = Line(3, "c3", b"{}", "m")
    usage = {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    good = answered("batch_1", asked, 200, "r1", json.dumps({"usage": usage}, indent=2).encode())
    assert good.is_ok
    assert b"\n" not in good.text
    assert good.usage == Usage(7, 4, 2, 0)
    told = json.loads(good.text)
    assert told["custom_id"] == "c3"
    assert told["error"] is None
    assert told["response"] == {"status_code": 200, "request_id": "r1", "body": {"usage": usage}}
    bad = answered("batch_1", asked, 400, "r2", b'{"error":{"message":"no"}}')
    assert not bad.is_ok
    assert json.loads(bad.text)["response"]["body"]["error"]["message"] == "no"
    assert json.loads(bad.text)["id"] == told["id"], "the id is the line's"


def test_an_answer_that_is_no_json_tears_nothing() -> None:
    result = answered("batch_1", Line(1, "c", b"{}", "m"), 200, "r", b'{"a":')
    assert not result.is_ok
    assert json.loads(result.text)["response"]["status_code"] == 500


@pytest.mark.parametrize(
    ("status", "code"),
    [(Status.FINALIZING, "batch_expired"), (Status.CANCELLING, "batch_cancelled")],
)
def test_lines_that_were_not_run(status: Status, code: str) -> None:
    told = json.loads(not_run("batch_1", status, 4, "c4"))
    assert told["custom_id"] == "c4"
    assert told["response"] is None
    assert told["error"]["code"] == code


def test_every_line_is_in_one_of_the_files() -> None:
    done = answered("b", Line(2, "two", b"{}", "m"), 200, "r", b"{}")
    failed = answered("b", Line(4, "four", b"{}", "m"), 400, "r", b"{}")
    ids = [(1, "one"), (2, "two"), (3, "three"), (4, "four")]
    split = list(split_results("b", Status.FINALIZING, ids, [done, failed]))
    assert [(is_ok, json.loads(text)["custom_id"]) for is_ok, text in split] == [
        (False, "one"),
        (True, "two"),
        (False, "three"),
        (False, "four"),
    ]
