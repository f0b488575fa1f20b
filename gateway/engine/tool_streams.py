"""Makes a stream with tools as whole as the answer that is not streamed (vLLM 0.32.0).

Some of vLLM's tool parsers stream nothing, and others withhold an end that might begin a call. Here
each stream reads its whole text once more when it ends, and sends what it lacks. A parser that
fails on plain text is refused at start. A request without tools asks for no calls, so its text
streams as it comes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeAlias

import structlog
from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    FunctionCall,
)
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.parser import DelegatingParser, Parser, ParserManager
from vllm.renderers.chat_utils import make_tool_call_id
from vllm.tokenizers import TokenizerLike

log = structlog.get_logger(__name__)

Request: TypeAlias = ChatCompletionRequest | ResponsesRequest
Answer: TypeAlias = tuple[str | None, str | None, list[FunctionCall] | None]
"""Reasoning, content and calls."""

PLAIN_TEXT = "Plain text."
"""An answer that every parser has to be able to read."""


@dataclass(slots=True)
class Sent:
    """The parts of an answer that its stream has sent."""

    reasoning: str = ""
    content: str = ""
    calls: dict[int, DeltaFunctionCall] = field(default_factory=dict)

    def add(self, delta: DeltaMessage | None) -> None:
        """Add the next message of the stream."""
        if delta is None:
            return
        self.reasoning += delta.reasoning or ""
        self.content += delta.content or ""
        for part in delta.tool_calls:
            call = self.calls.setdefault(part.index, DeltaFunctionCall(name="", arguments=""))
            if part.function is not None:
                call.name = (call.name or "") + (part.function.name or "")
                call.arguments = (call.arguments or "") + (part.function.arguments or "")


def rest_of(answer: Answer, sent: Sent, *, with_reasoning: bool = True) -> DeltaMessage | None:
    """Return the part of an answer that its stream lacks; nothing can take back what it has."""
    reasoning, content, calls = answer[0] or "", answer[1] or "", answer[2] or []
    rest = DeltaMessage()
    if len(sent.calls) <= len(calls):
        rest.tool_calls = _rest_of_calls(calls, sent.calls)
        more = _rest(content, sent.content)
        thought = _rest(reasoning, sent.reasoning) if with_reasoning else ""
        if more is not None and thought is not None:
            rest.content, rest.reasoning = more or None, thought or None
    return rest if rest.content or rest.reasoning or rest.tool_calls else None


def _rest(whole: str, sent: str) -> str | None:
    """Return the end of a text that is not sent; None if something else is."""
    if whole.startswith(sent):
        return whole[len(sent) :]
    return "" if whole.strip() == sent.strip() else None


def _rest_of_calls(
    calls: Sequence[FunctionCall], sent: dict[int, DeltaFunctionCall]
) -> list[DeltaToolCall]:
    parts = []
    index = max(sent, default=-1)
    for call, earlier in zip_longest(calls, sent.items()):
        if earlier is None:
            index += 1
            function = DeltaFunctionCall(name=call.name, arguments=call.arguments)
            name = call.id or make_tool_call_id()
            parts.append(DeltaToolCall(id=name, type="function", index=index, function=function))
        elif more := _rest(call.arguments, earlier[1].arguments or ""):
            function = DeltaFunctionCall(arguments=more)
            parts.append(DeltaToolCall(index=earlier[0], function=function))
    return parts


class Reader(DelegatingParser):
    """Mixed into a parser that reads no further answer, so that vLLM's metrics do not count it."""

    def extract_tool_calls(self, model_output: str, request: Request) -> Any:
        """Read a whole answer."""
        return self.tool_parser.extract_tool_calls(model_output, request=request)


class WholeStream(Parser):
    """Mixed into a parser of vLLM's: its stream ends with all that its whole answer has."""

    reader_cls: type[Parser]
    """Reads whole answers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what vLLM's parser takes."""
        super().__init__(*args, **kwargs)
        self._args, self._kwargs = args, kwargs
        self._plain: Request | None = None
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._sent = Sent()

    def parse(self, model_output: str, request: Request, *args: Any, **kwargs: Any) -> Answer:
        """Read a whole answer."""
        answer: Answer = super().parse(model_output, self._asked(request), *args, **kwargs)
        return answer

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: Request,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> DeltaMessage | None:
        """Return what the next text adds, and with the last one all that is not sent yet."""
        request = self._asked(request)
        delta: DeltaMessage | None = super().parse_delta(
            delta_text, delta_token_ids, request, prompt_token_ids, finished=finished
        )
        if request.tool_choice == "none":
            return delta
        self._text.append(delta_text)
        self._token_ids += delta_token_ids
        self._sent.add(delta)
        return self._complete(delta, request, prompt_token_ids) if finished else delta

    def _asked(self, request: Request) -> Request:
        """Return the request; without tools as one that wants no calls, as OpenAI reads it."""
        if request.tools or request.tool_choice == "none":
            return request
        if self._plain is None:
            self._plain = request.model_copy(update={"tool_choice": "none"})
        return self._plain

    def _complete(
        self, delta: DeltaMessage | None, request: Request, prompt: list[int] | None
    ) -> DeltaMessage | None:
        reader = self.reader_cls(*self._args, **self._kwargs)
        if prompt is not None:
            reader.set_prompt_token_ids(prompt)
        try:
            answer = reader.parse("".join(self._text), request, True, self._token_ids)
        except Exception:
            log.warning("tool_parser_failed", exc_info=True)
            return delta
        rest = rest_of(answer, self._sent, with_reasoning=request.include_reasoning)
        if rest is None or delta is None:
            return rest or delta
        if rest.content:
            delta.content = (delta.content or "") + rest.content
        if rest.reasoning:
            delta.reasoning = (delta.reasoning or "") + rest.reasoning
        delta.tool_calls = [*delta.tool_calls, *rest.tool_calls]
        return delta


def complete_streams() -> None:
    """Make every parser that vLLM's front end uses from now on send whole streams."""
    get_parser = ParserManager.get_parser

    def get_whole(*args: Any, **kwargs: Any) -> type[Parser] | None:
        try:
            parser_cls: type[Parser] | None = get_parser(*args, **kwargs)
        except (TypeError, ImportError) as error:
            raise ValueError(f"model.engine_args: {error}") from error
        if parser_cls is None or parser_cls.tool_parser_cls is None:
            return parser_cls
        whole = whole_stream(parser_cls)
        if (tokenizer := kwargs.get("tokenizer")) is not None:
            _refuse_unfit(whole.reader_cls, kwargs["tool_parser_name"], tokenizer)
        return whole

    ParserManager.get_parser = get_whole


def whole_stream(parser_cls: type[Parser]) -> type[WholeStream]:
    """Return a parser class of vLLM's whose streams are whole."""
    if issubclass(parser_cls, WholeStream):
        return parser_cls
    reader_cls = parser_cls
    if issubclass(parser_cls, DelegatingParser):
        reader_cls = type("PlainReader", (Reader, parser_cls), {})
    return type("CompleteParser", (WholeStream, parser_cls), {"reader_cls": reader_cls})


def _refuse_unfit(reader_cls: type[Parser], name: str, tokenizer: TokenizerLike) -> None:
    """Refuse a parser that fails on plain text: every answer with tools would be an error."""
    tool = {"type": "function", "function": {"name": "call"}}
    request = ChatCompletionRequest(messages=[], tools=[tool], tool_choice="auto")
    reader = reader_cls(tokenizer, request.tools)
    try:
        reader.parse(PLAIN_TEXT, request, True, tokenizer.encode(PLAIN_TEXT))
    except Exception as error:
        raise ValueError(
            f"model.engine_args: --tool-call-parser {name} fails on plain text: use the parser of "
            "the model's family, or hermes, which streams."
        ) from error
