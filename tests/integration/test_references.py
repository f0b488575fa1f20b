"""The references that the repository keeps are what plain vLLM computes here, and see any change.

One of them, drawn by the day, is computed fresh in each run; AILERON_REFERENCE_DAY=2026-11-26 draws
that day's. `make references` makes all of them anew.
"""

import datetime
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.vllm import kept_rows
from tests.harness.vllm.quantized_models import plain_model
from tests.harness.vllm.reference_catalog import ENTRIES, Entry
from tests.harness.vllm.reference_files import (
    FOLDER,
    Reference,
    compute,
    load,
    path_of,
    spec_of,
)
from tests.harness.vllm.references import FP32_TOLERANCE, NEW_TOKENS
from tests.harness.vllm.tiny_models import VOCABULARY, model_of

DAY_ENV = "AILERON_REFERENCE_DAY"
FRESH_TOLERANCE = 5e-5
"""Half of what cells are given. The CPU that made a reference computes the same values to the bit;
without AVX-512 they differ by up to 3.6e-5, sums included."""


def drawn() -> Entry:
    """The entry of a day, which is the same one in every run of the day."""
    given = os.environ.get(DAY_ENV)
    utc = datetime.datetime.now(datetime.UTC).date()
    day = datetime.date.fromisoformat(given) if given else utc
    entry = ENTRIES[day.toordinal() % len(ENTRIES)]
    print(f"the reference of {day} is {entry.name}")
    return entry


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_the_reference_of_the_day_is_what_plain_vllm_computes(tmp_path: Path) -> None:
    entry = drawn()
    model = plain_model(entry.model, tmp_path)
    kept, fresh = load(entry, model), compute(entry, model, tmp_path)
    if entry.kind == "logits":
        rows = {name: kept.pop(name) for name in kept_rows.NAMES}
        logits = fresh.pop("logits")
        places = np.ndindex(logits.shape[:2])
        worst = np.max([kept_rows.difference(logits[at], rows, *at) for at in places])
        print(f"logits differ by {worst:.1e}")
        assert worst < FRESH_TOLERANCE
    assert kept.keys() == fresh.keys()
    for name in kept:
        if name == "scores":
            assert np.abs(kept[name] - fresh[name]).max() < FRESH_TOLERANCE
        else:
            assert np.array_equal(kept[name], fresh[name]), name


def test_every_entry_has_a_file_and_every_file_an_entry(tmp_path: Path) -> None:
    """Each is found under the hash of what it was made of: models made here are those."""
    models = {name: plain_model(name, tmp_path) for name in {entry.model for entry in ENTRIES}}
    expected = {path_of(entry, models[entry.model]) for entry in ENTRIES}
    assert set(FOLDER.iterdir()) == expected
    for entry in ENTRIES:
        assert load(entry, models[entry.model])


# What a comparison sees

STEPS = range(NEW_TOKENS)


class Answer:
    """What a cell would say for a prompt."""

    def __init__(self, tokens: list[int], logits: Any) -> None:
        self.tokens = tokens
        self.logits = logits


@pytest.fixture(scope="module")
def logits() -> Any:
    """Rows of two prompts, about as large as a model's."""
    shape = (2, NEW_TOKENS, VOCABULARY)
    return np.random.default_rng(1).normal(scale=3.0, size=shape).astype(np.float32)


@pytest.fixture(scope="module")
def kept(logits: Any) -> Reference:
    tokens = logits.argmax(-1)
    scores = np.linspace(-5.0, 0.0, 20, dtype=np.float32)
    return Reference([], [], {**kept_rows.keep(logits), "tokens": tokens, "scores": scores})


def answers(kept: Reference, logits: Any) -> list[Answer]:
    pairs = zip(kept.arrays["tokens"].tolist(), logits, strict=True)
    return [Answer(tokens, [*rows]) for tokens, rows in pairs]


def check(kept: Reference, given: list[Answer], scores: Any = None) -> None:
    scores = kept.arrays["scores"] if scores is None else scores
    kept.check(given, scores, FP32_TOLERANCE, "made up")


def test_what_is_within_the_tolerance_passes(kept: Reference, logits: Any) -> None:
    noise = np.random.default_rng(2).normal(scale=FP32_TOLERANCE / 100, size=logits.shape)
    check(kept, answers(kept, (logits + noise).astype(np.float32)))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_change_of_any_logit_is_seen(kept: Reference, logits: Any, sign: int) -> None:
    for column in range(VOCABULARY):
        row = logits[1, 5].copy()
        row[column] += sign * 1.3 * FP32_TOLERANCE
        assert kept_rows.difference(row, kept.rows, 1, 5) > FP32_TOLERANCE, column


def test_changes_that_cancel_out_are_seen(kept: Reference, logits: Any) -> None:
    """Two logits change places, or one grows by what another loses."""
    draw = np.random.default_rng(3)
    for _ in range(300):
        one, other = draw.choice(VOCABULARY, 2, replace=False)
        moved = logits[0, 3].copy()
        moved[one] += 2 * FP32_TOLERANCE
        moved[other] -= 2 * FP32_TOLERANCE
        assert kept_rows.difference(moved, kept.rows, 0, 3) > FP32_TOLERANCE, (one, other)
        moved = logits[0, 3].copy()
        if abs(moved[one] - moved[other]) > 2 * FP32_TOLERANCE:
            moved[[one, other]] = moved[[other, one]]
            assert kept_rows.difference(moved, kept.rows, 0, 3) > FP32_TOLERANCE, (one, other)


@pytest.mark.parametrize("by", [1, 16, 64, 2048])
def test_a_row_that_is_shifted_is_seen(kept: Reference, logits: Any, by: int) -> None:
    for step in STEPS:
        row = np.roll(logits[0, step], by)
        assert kept_rows.difference(row, kept.rows, 0, step) > FP32_TOLERANCE


def test_another_row_is_seen(kept: Reference, logits: Any) -> None:
    swapped = logits.copy()
    swapped[0, [3, 4]] = swapped[0, [4, 3]]
    with pytest.raises(AssertionError):
        check(kept, answers(kept, swapped))
    swapped[0, [3, 4]] = swapped[0, [4, 3]]
    check(kept, answers(kept, swapped))


def test_a_value_that_is_no_number_is_seen(kept: Reference, logits: Any) -> None:
    spoiled = logits.copy()
    spoiled[0, 7, 1001] = np.nan
    with pytest.raises(AssertionError):
        check(kept, answers(kept, spoiled))


def test_another_token_is_seen(kept: Reference, logits: Any) -> None:
    given = answers(kept, logits)
    given[1].tokens[-1] += 1
    with pytest.raises(AssertionError):
        check(kept, given)


def test_another_number_of_steps_or_prompts_is_seen(kept: Reference, logits: Any) -> None:
    given = answers(kept, logits)
    with pytest.raises(ValueError, match="longer"):
        check(kept, given[:1])
    given[0].logits.pop()
    with pytest.raises(AssertionError):
        check(kept, given)


def test_another_score_is_seen(kept: Reference, logits: Any) -> None:
    scores = kept.arrays["scores"].copy()
    scores[7] += 2 * FP32_TOLERANCE
    with pytest.raises(AssertionError):
        check(kept, answers(kept, logits), scores)


def test_a_reference_of_another_model_is_missing(tmp_path: Path) -> None:
    """Nothing is computed in its place."""
    model = model_of("untied", tmp_path)
    entry = next(each for each in ENTRIES if each.name == "untied")
    assert path_of(entry, model).exists()
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(AssertionError, match=r"is missing.*make references"):
        load(entry, model)


def test_a_reference_of_another_question_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, entry = model_of("demo", tmp_path), ENTRIES[0]
    known = path_of(entry, model)
    where = "tests.harness.vllm.reference_files"
    for name, other in {
        "vllm_version": lambda: "0.32.1",
        "spec_of": lambda each: {**spec_of(each), "max_tokens": 13},
        "FORM": -1,
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(f"{where}.{name}", other)
            assert path_of(entry, model) != known, name
    assert path_of(entry, model) == known
