"""The text of prompts: seeded words, or token ids, optionally after a prefix and a history.

Pure: a request's own part depends only on the seed, its index and its length, so runs with one seed
send the same texts to different servers. Requests of a prefix group start with the same prefix. A
turn of a session has the session's earlier texts and the server's own answers before its own part.
A word counts as `tokens_per_word` tokens, because the client has no tokenizer.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from loadgen.workload.plan import PlannedRequest

WORD_LIST = """
    able above after again air all animal answer any apple arm ask away baby back ball bank bath
    bear bed bell best bird black blue board boat body book both box boy bread bring brother build
    cake call camp car card care cat change child city class clean clear close cloud coat cold
    color come cook corn count cover cow cross cup dark day deep desk dinner dish dog door down
    draw dream dress drink drive dry duck each ear early earth east easy eat egg end even every
    eye face fact fall family farm fast father feed feel field find fire fish five floor flower
    food foot forest form four free friend front fruit full game garden girl glass gold good
    grass great green ground group grow hand hat head hear heart heavy help high hill home horse
    hot hour house ice idea iron island jump keep kind king lake land large last late leaf learn
    leave left leg letter life light line lion list live long look low make map mark meat metal
    milk mind moon more morning mother mountain mouth move music name near neck need new night
    north nose note number ocean old open orange order other page paint paper park part party path
    pen people person picture piece place plain plant play point press pull push queen question
    quick rain reach read ready red rest rice ride right ring river road rock room rose round run
    salt sand school sea seat second seed ship shoe shop short side sign silver sing sister size
    skin sky sleep slow small snow soft song south space spring square star start stone stop
    store story street strong sugar summer sun table tail talk tall teach ten test thick thin
    three time top town train travel tree turn valley view village visit voice wait walk wall
    warm wash watch water wave west wheel white wild wind window winter wood word work world
    write year yellow young zoo
    """
WORDS = tuple(WORD_LIST.split())


class PromptKind(StrEnum):
    """Whether prompts are sent as text or as token ids."""

    WORDS = "words"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class PromptStyle:
    """How prompts are made, the same for every request of a run."""

    kind: PromptKind
    seed: int
    vocab_size: int
    tokens_per_word: float


@dataclass(frozen=True, slots=True)
class Exchange:
    """An earlier turn of a session: its own part, and its answer's text if there is one."""

    planned: PlannedRequest
    asked: str
    answer: str


History = tuple[Exchange, ...]
"""A session's earlier turns, oldest first; empty for its first turn and without a session."""


def exchange_of(style: PromptStyle, planned: PlannedRequest, answer: str) -> Exchange:
    """Return a turn and its answer for the history of the next one."""
    return Exchange(planned, own_words(style, planned), answer)


def make_prompt(
    style: PromptStyle, planned: PlannedRequest, history: History = ()
) -> str | list[int]:
    """Return the prompt of a request: its group's prefix, its session's history, its own part.

    The text of a turn begins with the text of the turn before, and that turn's answer. Prompts of
    token ids have drawn ids of the planned length for the answers, whose ids no server returns.
    """
    if style.kind is PromptKind.TOKENS:
        ids = _token_ids(style, _prefix_stream(style, planned), planned.prefix_tokens)
        for each in (*(earlier.planned for earlier in history), planned):
            ids += _token_ids(style, _own_stream(style, each), each.prompt_tokens)
            if each is not planned:
                answer_stream = f"{style.seed}/answer/{each.index}"
                ids += _token_ids(style, answer_stream, each.output_tokens)
        return ids
    texts = [prefix_words(style, planned)] if planned.prefix_tokens else []
    texts += [f"{earlier.asked}{earlier.answer}" for earlier in history]
    return " ".join((*texts, own_words(style, planned)))


def make_messages(
    style: PromptStyle, planned: PlannedRequest, history: History = ()
) -> Sequence[dict[str, str]]:
    """Return the messages of a chat; those of a session have roles, others are one user message."""
    if planned.session is None:
        return [{"role": "user", "content": str(make_prompt(style, planned))}]
    messages = []
    if planned.prefix_tokens:
        messages.append({"role": "system", "content": prefix_words(style, planned)})
    for earlier in history:
        messages.append({"role": "user", "content": earlier.asked})
        messages.append({"role": "assistant", "content": earlier.answer})
    messages.append({"role": "user", "content": own_words(style, planned)})
    return messages


def prefix_words(style: PromptStyle, planned: PlannedRequest) -> str:
    """Return the text that a request shares with its prefix group."""
    return _words(style, _prefix_stream(style, planned), planned.prefix_tokens)


def own_words(style: PromptStyle, planned: PlannedRequest) -> str:
    """Return the text that is the request's own: after the prefix and the history."""
    return _words(style, _own_stream(style, planned), planned.prompt_tokens)


def _prefix_stream(style: PromptStyle, planned: PlannedRequest) -> str:
    return f"{style.seed}/prefix/{planned.prefix_group}"


def _own_stream(style: PromptStyle, planned: PlannedRequest) -> str:
    return f"{style.seed}/prompt/{planned.index}"


def _token_ids(style: PromptStyle, stream: str, tokens: int) -> list[int]:
    rng = random.Random(stream)
    return [int(rng.random() * style.vocab_size) for _ in range(tokens)]


def _words(style: PromptStyle, stream: str, tokens: int) -> str:
    """Return words that stand for `tokens` tokens, at least one."""
    count = max(1, round(tokens / style.tokens_per_word))
    return " ".join(random.Random(stream).choices(WORDS, k=count))
