"""Streams of text that begin with the end of their prompt say what vLLM's own streams say."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tokenizers.decoders
from tokenizers import Tokenizer, decoders, models
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from gateway.engine.text_streams import END_TOKENS, begin_at_the_end, end_of_prompt
from tests.harness.cells.servers import MODEL

HALF = "\N{REPLACEMENT CHARACTER}"
SEEDS = range(20)

Make = Callable[[Tokenizer, EngineCoreRequest], FastIncrementalDetokenizer]


class Wrapped:
    """As vLLM has it: a tokenizer of transformers around one of the library."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer


def demo() -> Tokenizer:
    """Byte-level, so that a token may be a part of a character."""
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def stripping() -> Tokenizer:
    """As Llama 2's: spaces are part of words, and the first of a text is left out."""
    words = [
        f"{space}w{number}" for space in ("", "\N{LOWER ONE EIGHTH BLOCK}") for number in range(200)
    ]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


@pytest.fixture(params=[demo, stripping], ids=["byte level", "stripping"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    made: Tokenizer = request.param()
    return made


def plain(tokenizer: Tokenizer, request: EngineCoreRequest) -> FastIncrementalDetokenizer:
    """A stream as vLLM makes it."""
    wrapped: Any = Wrapped(tokenizer)
    return FastIncrementalDetokenizer(wrapped, request)


@pytest.fixture
def late() -> Make:
    """Makes streams as the gateway does."""
    begin = FastIncrementalDetokenizer.__init__
    begin_at_the_end()
    begin_late = FastIncrementalDetokenizer.__init__
    FastIncrementalDetokenizer.__init__ = begin

    def make(tokenizer: Tokenizer, request: EngineCoreRequest) -> FastIncrementalDetokenizer:
        stream = FastIncrementalDetokenizer.__new__(FastIncrementalDetokenizer)
        wrapped: Any = Wrapped(tokenizer)
        begin_late(stream, wrapped, request)
        return stream

    return make


def request_of(prompt: Sequence[int], **more: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=list(prompt),
        mm_features=None,
        sampling_params=SamplingParams(**more),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def texts(stream: FastIncrementalDetokenizer, answer: Sequence[int]) -> list[str]:
    return [stream.decode_next(token) for token in answer]


@pytest.mark.parametrize("skips", [True, False])
def test_texts_are_vllms_own(tokenizer: Tokenizer, late: Make, skips: bool) -> None:
    most = tokenizer.get_vocab_size()
    compared = 0
    for seed in SEEDS:
        draw = random.Random(seed)
        prompt = draw.choices(range(3, most), k=draw.randrange(1, 5 * END_TOKENS))
        answer = draw.choices(range(most), k=60)
        request = request_of(prompt, skip_special_tokens=skips)
        theirs, ours = (make(tokenizer, request) for make in (plain, late))
        assert texts(ours, answer) == texts(theirs, answer)
        compared += len(prompt) > END_TOKENS
    assert compared > len(SEEDS) // 2


def test_a_prompt_that_ends_in_special_tokens_keeps_the_leading_space(
    late: Make,
) -> None:
    tokenizer = stripping()
    word, end = map(tokenizer.token_to_id, ("\N{LOWER ONE EIGHTH BLOCK}w1", "</s>"))
    assert word is not None
    assert end is not None
    prompt = [word] * 300 + [end] * 100
    streams = [make(tokenizer, request_of(prompt)) for make in (plain, late)]
    assert [texts(stream, [word, word]) for stream in streams] == [[" w1", " w1"]] * 2


def test_the_first_token_costs_as_much_after_any_prompt(
    late: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    real = tokenizers.decoders.DecodeStream

    def counted(ids: list[int], skip_special_tokens: bool) -> Any:
        lengths.append(len(ids))
        return real(ids=ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(tokenizers.decoders, "DecodeStream", counted)
    tokenizer = demo()
    word = tokenizer.encode("word ", add_special_tokens=False).ids
    prompt = word * 20_000
    request = request_of(prompt)
    assert late(tokenizer, request).decode_next(word[0])
    late(tokenizer, request_of(prompt[:END_TOKENS]))
    assert lengths == [END_TOKENS, END_TOKENS]
    assert request.prompt_token_ids == prompt, "the engine still gets all of it"


def test_the_end_is_as_short_as_can_be() -> None:
    sizes: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        """Tokens of 0 are special: they have no text; 9 is half of a character."""
        sizes.append(len(ids))
        return "".join(HALF if each == 9 else "a" * (each > 0) for each in ids)

    def end(ids: list[int]) -> int:
        return len(end_of_prompt(ids, decode))

    assert end([1] * END_TOKENS) == END_TOKENS
    assert not sizes
    assert end([1] * 100_000) == END_TOKENS
    assert sizes == [END_TOKENS]
    assert end([1] * 500 + [0] * 100) == 2 * END_TOKENS
    assert end([0] * 1_000) == 1_000
    assert end([1] * 500 + [9]) == 501
