"""The text of prompts: seeded words, or token ids, optionally after a prefix and a history.

Pure: a prompt depends only on the seed, the request's index, its lengths, its prefix group and its
session, so runs with one seed send the same prompts to different servers. Requests of a prefix
group start with the same prefix, and each turn of a session extends the history of the turn before;
nothing else is shared except by chance. A word counts as `tokens_per_word` tokens, because the
client has no tokenizer.
"""

import random
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


def make_prompt(style: PromptStyle, planned: PlannedRequest) -> str | list[int]:
    """Return the prompt of a request: its group's prefix, its session's history, its own part."""
    sections = (
        (f"{style.seed}/prefix/{planned.prefix_group}", planned.prefix_tokens),
        (f"{style.seed}/session/{planned.session}", planned.history_tokens),
        (f"{style.seed}/prompt/{planned.index}", planned.prompt_tokens),
    )
    # One random stream per section, so that a longer section begins with a shorter one's text.
    drawn = [(tokens, random.Random(stream)) for stream, tokens in sections]
    if style.kind is PromptKind.TOKENS:
        return [token for tokens, rng in drawn for token in _token_ids(style, tokens, rng)]
    return " ".join(word for tokens, rng in drawn for word in _words(style, tokens, rng))


def _token_ids(style: PromptStyle, tokens: int, rng: random.Random) -> list[int]:
    return [int(rng.random() * style.vocab_size) for _ in range(tokens)]


def _words(style: PromptStyle, tokens: int, rng: random.Random) -> list[str]:
    if tokens == 0:
        return []
    return rng.choices(WORDS, k=max(1, round(tokens / style.tokens_per_word)))
