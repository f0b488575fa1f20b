"""A stream with tools holds what the whole answer holds, with every tool parser of vLLM's."""

import copy
import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, FunctionCall
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.parser import ParserManager
from vllm.parser.metrics import init_parser_metrics
from vllm.tool_parsers import ToolParserManager

from coordinator.cli.launch import DEMO_ENGINE_ARGS
from gateway.engine.tool_streams import Sent, complete_streams, rest_of
from worker.demo import MODEL_DIR

PARSERS = ToolParserManager.list_registered()
NEEDS_COHERE = ("cohere_command3", "cohere_command4")
"""They need the package `cohere_melody`, which no lock of ours has."""
REFUSED = ("openai",)
"""It reads nothing without the format of gpt-oss, which this server does not serve."""
READABLE = [name for name in PARSERS if name not in (*NEEDS_COHERE, *REFUSED)]
SILENT = ("muse_glimmer", "phi4_mini_json")
"""They stream no plain text themselves: it comes when the stream ends."""
STRIPS_LINE = ("ernie45",)
"""It streams text without its first line break, which nothing can add later."""
READS_NO_RESPONSES = ("hy_v4",)
"""It fails on the tools of the Responses API, whole and streamed: both answers are an error."""

SPECIAL = [
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<tool_calls>", "</tool_calls>", "<tool_call>"),
    *("</tool_call>", "<tool_sep>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"),
]
"""Tokens that some parsers look up."""
TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>", "content": "text"},
    },
}
"""The parser `hf` reads it from the tokenizer."""

TEXTS = [
    "Hello there, how are you?",
    "one\n\ntwo, a < b, {x: [1]} and <b>bold</b> done.\n",
    "it ends with what may begin a call: <",
    "def f(x):\n    return {'a': [x]}\n",
    '{"a": 1}',
    "[1, 2]",
]
FIRST_BREAKS = "\n\nafter two line breaks"

ARGUMENTS = {"size": 3, "names": ["a", "é"]}
CALL = json.dumps({"name": "set_size", "arguments": ARGUMENTS}, ensure_ascii=False)
CALLS = {
    "granite4": f"Sure.<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>",
    "hermes": f"Sure.<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>",
    "hf": f"Sure.<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>",
    "phi4_mini_json": 'functools[{"name": "set_size", "arguments": {"size": 3}}]',
    "pythonic": "[set_size(size=3), set_size(size=4)]",
    "xlam": f"[{CALL}, {CALL}]",
}

TOOL = {
    "type": "function",
    "function": {
        "name": "set_size",
        "parameters": {
            "type": "object",
            "properties": {
                "size": {"type": "integer"},
                "names": {"type": "array", "items": {"type": "string"}},
            },
        },
    },
}
CHAT = ChatCompletionRequest(messages=[], tools=[TOOL])
RESPONSE = ResponsesRequest(
    input="x",
    tools=[{"type": "function", **TOOL["function"], "strict": False}],  # type: ignore[dict-item]
)
BARE_CHAT = ChatCompletionRequest(messages=[], tool_choice=None)
BARE_RESPONSE = ResponsesRequest(input="x")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    loaded = AutoTokenizer.from_pretrained(MODEL_DIR)
    loaded.add_tokens(SPECIAL, special_tokens=True)
    loaded.response_template = TEMPLATE
    return loaded


@pytest.fixture(scope="module", autouse=True)
def _completed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParserManager, "get_parser", ParserManager.get_parser)
        complete_streams()
        yield


def parser_of(name: str, tokenizer: Any) -> Any:
    return ParserManager.get_parser(
        tool_parser_name=name, enable_auto_tools=True, model_name="demo", tokenizer=tokenizer
    )


def whole(parser_cls: Any, tokenizer: Any, request: Any, text: str) -> tuple[str, list[Any]]:
    """Content and calls of the whole answer."""
    reader = parser_cls(tokenizer, request.tools)
    ids = tokenizer.encode(text, add_special_tokens=False)
    _, content, calls = reader.parse(text, copy.copy(request), True, ids)
    return content or "", [(call.name, json.loads(call.arguments)) for call in calls or []]


def deltas(parser_cls: Any, tokenizer: Any, request: Any, text: str) -> Iterator[Any]:
    """Yield what a stream sends for each token."""
    parser = parser_cls(tokenizer, request.tools)
    ids = tokenizer.encode(text, add_special_tokens=False)
    sent = 0
    for last, token in enumerate(ids, 1):
        so_far = tokenizer.decode(ids[:last]).rstrip("\ufffd")
        yield parser.parse_delta(so_far[sent:], [token], request, [1, 2], finished=last == len(ids))
        sent = len(so_far)
    assert sent == len(text)


def streamed(parser_cls: Any, tokenizer: Any, request: Any, text: str) -> tuple[str, list[Any]]:
    """Content and calls of the stream, as a client joins them."""
    sent = Sent()
    for delta in deltas(parser_cls, tokenizer, request, text):
        sent.add(delta)
    assert not sent.reasoning
    calls = [(call.name, json.loads(call.arguments or "")) for call in sent.calls.values()]
    return sent.content, calls


def test_every_parser_of_vllm_is_here() -> None:
    assert len(PARSERS) == 54
    assert len(READABLE) == 51


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        *(pytest.param(name, CHAT, id=f"{name}-chat") for name in READABLE),
        *(
            pytest.param(name, RESPONSE, id=f"{name}-responses")
            for name in READABLE
            if name not in READS_NO_RESPONSES
        ),
    ],
)
def test_plain_text_streams_as_it_is(name: str, request_: Any, tokenizer: Any) -> None:
    parser_cls = parser_of(name, tokenizer)
    for text in TEXTS:
        expected = whole(parser_cls, tokenizer, request_, text)
        assert streamed(parser_cls, tokenizer, request_, text) == expected
        assert expected == (text, []), name
    first = [delta for delta in deltas(parser_cls, tokenizer, request_, TEXTS[0]) if delta]
    assert (len(first) == 1) == (name in SILENT)


@pytest.mark.parametrize("name", READS_NO_RESPONSES)
def test_a_parser_that_fails_is_never_silent(name: str, tokenizer: Any) -> None:
    for read in (whole, streamed):
        with pytest.raises(AttributeError):
            read(parser_of(name, tokenizer), tokenizer, RESPONSE, TEXTS[0])


def test_only_one_parser_loses_a_line_break(tokenizer: Any) -> None:
    differ = []
    for name in READABLE:
        parser_cls = parser_of(name, tokenizer)
        expected = whole(parser_cls, tokenizer, CHAT, FIRST_BREAKS)
        found = streamed(parser_cls, tokenizer, CHAT, FIRST_BREAKS)
        assert found[0].strip() == expected[0].strip()
        if found != expected:
            differ.append(name)
    assert tuple(differ) == STRIPS_LINE


@pytest.mark.parametrize("request_", [CHAT, RESPONSE], ids=["chat", "responses"])
@pytest.mark.parametrize("name", CALLS)
def test_calls_stream_as_they_are(name: str, request_: Any, tokenizer: Any) -> None:
    parser_cls = parser_of(name, tokenizer)
    expected = whole(parser_cls, tokenizer, request_, CALLS[name])
    assert streamed(parser_cls, tokenizer, request_, CALLS[name]) == expected
    assert [call[0] for call in expected[1]] == ["set_size"] * (CALLS[name].count("set_size"))


def test_each_call_of_a_stream_has_an_id_and_a_name_once(tokenizer: Any) -> None:
    for name, text in CALLS.items():
        parts = [
            part
            for delta in deltas(parser_of(name, tokenizer), tokenizer, CHAT, text)
            for part in (delta.tool_calls if delta else [])
        ]
        heads = [part for part in parts if part.id]
        assert len({part.id for part in heads}) == len({part.index for part in parts})
        assert [part.index for part in heads] == list(range(len(heads)))
        assert all(part.function.name == "set_size" for part in heads)


@pytest.mark.parametrize("name", ["granite4", "phi4_mini_json"])
def test_a_call_that_the_limit_cuts_is_text(name: str, tokenizer: Any) -> None:
    text = CALLS[name][: CALLS[name].index('size": 3')]
    parser_cls = parser_of(name, tokenizer)
    assert whole(parser_cls, tokenizer, CHAT, text)[0]
    assert streamed(parser_cls, tokenizer, CHAT, text) == whole(parser_cls, tokenizer, CHAT, text)


@pytest.mark.parametrize("request_", [BARE_CHAT, BARE_RESPONSE], ids=["chat", "responses"])
@pytest.mark.parametrize("name", ["granite4", *SILENT])
def test_without_tools_text_streams_as_it_comes(name: str, request_: Any, tokenizer: Any) -> None:
    parser_cls = parser_of(name, tokenizer)
    for text in (*TEXTS, *CALLS.values()):
        parts = list(deltas(parser_cls, tokenizer, request_, text))
        assert "".join(part.content or "" for part in parts if part) == text
        assert len([part for part in parts if part]) >= len(parts) - text.count("é")
        assert whole(parser_cls, tokenizer, request_, text) == (text, [])


@pytest.mark.parametrize("name", REFUSED)
def test_a_parser_that_fails_on_text_is_refused_at_start(name: str, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=f"--tool-call-parser {name} .* hermes, which streams"):
        parser_of(name, tokenizer)


@pytest.mark.skipif(
    importlib.util.find_spec("cohere_melody") is not None, reason="the package is here"
)
@pytest.mark.parametrize("name", NEEDS_COHERE)
def test_a_parser_without_its_package_is_refused_at_start(name: str, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"engine_args: .*`cohere_melody` package"):
        parser_of(name, tokenizer)


def test_the_demo_s_parser_streams() -> None:
    name = DEMO_ENGINE_ARGS[DEMO_ENGINE_ARGS.index("--tool-call-parser") + 1]
    assert name in READABLE
    assert name not in SILENT


def test_metrics_count_no_text_twice(tokenizer: Any) -> None:
    from vllm.parser import metrics

    init_parser_metrics(model_name="demo")
    counter: Any = metrics._tool_call_parser_invocations

    def counts() -> dict[str, float]:
        [family] = counter.collect()
        found = {"streaming": 0.0, "non_streaming": 0.0}
        for sample in family.samples:
            if sample.name.endswith("_total"):
                found[sample.labels["mode"]] += sample.value
        return found

    before = counts()
    parser_cls = parser_of("granite4", tokenizer)
    parts = list(deltas(parser_cls, tokenizer, CHAT, TEXTS[0]))
    after = counts()
    assert after["streaming"] - before["streaming"] == len(parts)
    assert after["non_streaming"] == before["non_streaming"]


def test_the_rest_of_an_answer() -> None:
    call = FunctionCall(name="f", arguments='{"a": 1}')
    begun = Sent(content="ab", calls={0: DeltaFunctionCall(name="f", arguments='{"a"')})
    rest: Any = rest_of((None, "abc", [call, call]), begun)
    assert rest.content == "c"
    assert [(each.index, each.function.name) for each in rest.tool_calls] == [(0, None), (1, "f")]
    assert [each.function.arguments for each in rest.tool_calls] == [": 1}", '{"a": 1}']
    assert rest_of((None, "abc", None), Sent(content="abc")) is None
    assert rest_of(("why", None, None), Sent(), with_reasoning=False) is None
    thought: Any = rest_of(("why", "so", None), Sent(reasoning="wh"))
    assert (thought.reasoning, thought.content) == ("y", "so")


def test_a_text_that_was_sent_otherwise_is_not_sent_again() -> None:
    call = FunctionCall(name="f", arguments="{}")
    assert rest_of((None, "abc", None), Sent(content="xyz")) is None
    assert rest_of(("abc", None, None), Sent(content="abc")) is None
    assert rest_of((None, "abc", None), Sent(calls={0: DeltaFunctionCall(name="f")})) is None
    rest: Any = rest_of((None, None, [call]), Sent(content="text"))
    assert rest.content is None
    assert [each.function.name for each in rest.tool_calls] == ["f"]
