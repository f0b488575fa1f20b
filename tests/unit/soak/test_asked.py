"""Which answers of a soak are wrong, and which are the beginning of a right one."""

import pytest

from tests.soak.asked import TOKENS, Answer, is_right, questions


def test_on_cpu_every_answer_is_compared() -> None:
    for question in questions("cpu"):
        expected = {question: "sorted(words)"}
        assert is_right(question, Answer("sorted(words)", TOKENS), expected)
        assert is_right(question, Answer("sorted("), expected)
        for wrong in (Answer("sorted(", TOKENS), Answer("sort"[::-1]), Answer("sorted(words))")):
            assert not is_right(question, wrong, expected)


def test_on_gpus_half_of_the_answers_are_forced_and_the_others_have_their_length() -> None:
    found = questions("cuda")
    forced = [each for each in found if each.sentence]
    assert 2 * len(forced) == len(found)
    for question in found:
        assert is_right(question, Answer(question.sentence, TOKENS), {})
        assert is_right(question, Answer(question.sentence[:20]), {})
        assert not is_right(question, Answer("", TOKENS - 1), {})
    for question in forced:
        words = question.sentence.split()
        assert len(set(words)) == len(words)
        for change in (words[1:], [*words[:5], *words[6:]], [*words, words[-1]]):
            assert not is_right(question, Answer(" ".join(change), TOKENS), {})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_questions_differ(device: str) -> None:
    found = questions(device)
    assert len({each.prompt for each in found}) == len(found)
    sentences = [each.sentence for each in found if each.sentence]
    assert len(set(sentences)) == len(sentences)
    assert all(each.body["temperature"] == 0 for each in found)
