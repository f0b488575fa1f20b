"""Answers that gateway processes of one port share in a file."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gateway.admission import sibling_answers
from gateway.admission.idempotency import IN_PROGRESS, RETENTION_S, StoredAnswer
from gateway.admission.sibling_answers import TRIM_EVERY, SiblingAnswers
from gateway.errors import ApiError

ANSWER = StoredAnswer(200, [(b"content-type", b"application/json")], b"x" * 10)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "answers.sqlite"


@pytest.fixture
def first(file: Path) -> Iterator[SiblingAnswers]:
    with closing(SiblingAnswers(file)) as made:
        yield made


@pytest.fixture
def second(file: Path) -> Iterator[SiblingAnswers]:
    """Another process's view; the same process here, which cannot tell its own claims apart."""
    with closing(SiblingAnswers(file)) as made:
        yield made


def code_of(found: object) -> str:
    """The code of a refusal."""
    assert isinstance(found, ApiError)
    return str(found.code)


def test_one_process_answers_and_the_other_repeats_it(
    first: SiblingAnswers, second: SiblingAnswers
) -> None:
    assert not second.has(("t", "a"), 0.0)
    assert first.begin("t", "a", b"r", 0.0) is None
    assert second.has(("t", "a"), 0.0)
    assert code_of(second.begin("t", "a", b"r", 1.0)) == IN_PROGRESS
    assert second.begin("other tenant", "a", b"r", 1.0) is None
    first.end("t", "a", ANSWER)
    assert second.begin("t", "a", b"r", RETENTION_S - 1.0) == ANSWER
    assert code_of(second.begin("t", "a", b"another", 1.0)) == "invalid_value"
    assert not second.has(("t", "a"), RETENTION_S)
    assert second.begin("t", "a", b"r", RETENTION_S) is None, "it is forgotten"


def test_a_request_that_fails_leaves_nothing(first: SiblingAnswers, second: SiblingAnswers) -> None:
    first.begin("t", "a", b"r", 0.0)
    first.end("t", "a", None)
    assert second.begin("t", "a", b"another", 0.0) is None
    second.end("t", "a", ANSWER)
    first.end("t", "a", None)
    assert first.begin("t", "a", b"another", 0.0) == ANSWER, "an answer is no claim"


def test_the_claim_of_a_dead_process_is_void(first: SiblingAnswers, file: Path) -> None:
    child = os.fork()
    if not child:
        status = 1
        try:
            with closing(SiblingAnswers(file)) as own:
                status = 0 if own.begin("t", "a", b"r", 0.0) is None else 1
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert first.begin("t", "a", b"r", 1.0) is None
    assert code_of(first.begin("t", "a", b"r", 1.0)) == IN_PROGRESS, "the claim is ours now"


def test_the_oldest_answers_go_and_claims_stay(
    first: SiblingAnswers, second: SiblingAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sibling_answers, "KEYS_MAX", 3)
    first.begin("t", "running", b"r", 0.0)
    for number in range(TRIM_EVERY):
        first.begin("t", str(number), b"r", float(number))
        first.end("t", str(number), ANSWER)
    stored = [key for key in map(str, range(TRIM_EVERY)) if second.has(("t", key), 0.0)]
    assert stored == [str(number) for number in range(TRIM_EVERY - 3, TRIM_EVERY)]
    assert second.has(("t", "running"), 0.0)


def test_a_large_answer_is_not_stored(
    first: SiblingAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sibling_answers, "ANSWER_BYTES_MAX", 9)
    first.begin("t", "a", b"r", 0.0)
    first.end("t", "a", ANSWER)
    assert first.begin("t", "a", b"r", 0.0) is None


def test_a_request_is_answered_though_the_file_is_busy(first: SiblingAnswers, file: Path) -> None:
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert first.begin("t", "a", b"r", 0.0) is None
        first.end("t", "a", ANSWER)
        other.execute("ROLLBACK")
    assert first.begin("t", "a", b"r", 0.0) is None, "the answer was not stored"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="run_dir"):
        SiblingAnswers(tmp_path / "missing" / "answers.sqlite")


def test_nobody_else_reads_the_file(first: SiblingAnswers, file: Path) -> None:
    assert file.stat().st_mode & 0o777 == 0o600
