"""What clients of a soak ask for, and what must come back whatever happened meanwhile.

On CPU in fp32 a greedy answer is the same in every layout, so each is compared with what the same
prompt gave at the start. On GPUs rounding differs with the batch and the width. There half of the
answers are forced by a grammar to be one sentence, which shows tokens that are lost, repeated or
mixed up, and the other half is free and must have its length.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TOKENS = 96
PROMPTS = 8
FORCED_WORDS = 40
FORCED_TOKENS_MAX = 8 * FORCED_WORDS
"""More than the sentence has in any way to write it."""


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt; `sentence` is what its answer is forced to be, if it is."""

    prompt: str
    is_exact: bool = True
    sentence: str = ""

    @property
    def body(self) -> dict[str, Any]:
        """Fields of the request, without model and stream."""
        free: dict[str, Any] = {"max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}
        forced: dict[str, Any] = {
            "max_tokens": FORCED_TOKENS_MAX,
            "extra_body": {"structured_outputs": {"choice": [self.sentence]}},
        }
        return {"prompt": self.prompt, "temperature": 0, **(forced if self.sentence else free)}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client got; `tokens` is None where it left before the usage was told."""

    text: str
    tokens: int | None = None


def questions(device: str) -> tuple[Question, ...]:
    """The few questions of a soak."""
    prompts = [f"Question {n}: how do I sort a list of {n} words?" for n in range(PROMPTS)]
    if device == "cpu":
        return tuple(map(Question, prompts))
    forced = tuple(Question(each, sentence=_sentence(n)) for n, each in enumerate(prompts[::2]))
    return forced + tuple(Question(each, is_exact=False) for each in prompts[1::2])


def _sentence(number: int) -> str:
    """Words of which no two are the same, nor those of another sentence."""
    return " ".join(f"{number}x{place * 37 % 1_000}" for place in range(FORCED_WORDS))


def is_right(question: Question, answer: Answer, expected: Mapping[Question, str]) -> bool:
    """Say whether an answer, or the beginning of one, is what it must be."""
    is_whole = answer.tokens is not None
    if not question.is_exact:
        return answer.tokens == TOKENS or not is_whole
    whole = question.sentence or expected[question]
    return whole == answer.text if is_whole else whole.startswith(answer.text)
