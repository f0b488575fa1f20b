"""Tries out grammars before a rank gets them, in processes that block nothing (vLLM 0.32.0).

vLLM checks a request's grammar on the event loop and compiles it on the rank. Both run native code
that takes minutes for some schemas. Here a sandbox does both first, within a deadline, and returns
the parameters as vLLM's check leaves them, so that the event loop need not check again.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.structured_output.request import get_structured_output_key

from gateway.engine.sandbox import BusyError, Sandbox, TooSlowError
from gateway.errors import ApiError, api_error, current_request

COMPILE_S = 5.0
"""Longest time to check and compile a grammar."""

_COMPILED_BY_XGRAMMAR = ("xgrammar", "auto")
_RULES = {
    "json": "The JSON schema cannot be used: check its types, patterns and references.",
    "regex": (
        "The regular expression cannot be used: check its syntax. Look-around and back references "
        "are not supported."
    ),
    "choice": "The choices cannot be used: send a list of strings that are not empty.",
    "grammar": "The grammar cannot be used: send EBNF whose first rule is called root.",
    "structural_tag": "The structural tag cannot be used: check its tags and schemas.",
}
"""What to say of a grammar that does not compile, by its kind."""
_CHECKED = ("_backend", "_backend_was_auto")


class UnfitGrammarError(Exception):
    """The grammar is refused."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


def prepare(config: VllmConfig) -> Callable[[bytes], bytes]:
    """Return the workers' function: parameters in, checked parameters or an error out."""
    tokenizer = cached_tokenizer_from_config(model_config=config.model_config)
    backend = None
    if config.structured_outputs_config.backend in _COMPILED_BY_XGRAMMAR:
        # Created here, so once and not in every worker.
        backend = XgrammarBackend(config, tokenizer, config.model_config.get_vocab_size())

    def check(question: bytes) -> bytes:
        fields = msgspec.json.decode(question)
        try:
            params = SamplingParams(structured_outputs=StructuredOutputsParams(**fields))
            params._validate_structured_outputs(
                config.model_config, config.structured_outputs_config, tokenizer
            )
            checked = params.structured_outputs
            if checked._backend == "xgrammar" and backend is not None:
                backend.compile_grammar(*get_structured_output_key(checked))
        except (VLLMValidationError, ValueError, TypeError, RuntimeError) as error:
            return msgspec.json.encode({"error": str(error)[:1_000]})
        return msgspec.json.encode({"params": _fields_of(checked)})

    return check


async def try_grammar(sandbox: Sandbox, params: Any) -> None:
    """Check a request's grammar, if any; raises `UnfitGrammarError` or vLLM's own error."""
    grammar = getattr(params, "structured_outputs", None)
    if grammar is None or grammar._backend is not None:
        return
    question = msgspec.json.encode(
        {name: value for name, value in _fields_of(grammar).items() if name not in _CHECKED}
    )
    try:
        answer = msgspec.json.decode(await sandbox.ask(question))
    except TooSlowError:
        text = f"The grammar or schema takes longer than {COMPILE_S:.0f} s to compile: simplify it."
        raise UnfitGrammarError(api_error("invalid_value", text)) from None
    except BusyError:
        text = "Too many grammars are waiting to be compiled; try again soon."
        raise UnfitGrammarError(api_error("tier_capacity", text, retry_after_s=5)) from None
    if "error" in answer:
        request = current_request.get()
        field = request.grammar_field if request is not None else None
        raise UnfitGrammarError(api_error("invalid_value", _rule_for(grammar), field))
    for name, value in answer["params"].items():
        setattr(grammar, name, value)


def _rule_for(grammar: StructuredOutputsParams) -> str:
    """Return the rule that a grammar breaks: the compiler's own words quote the grammar."""
    for kind, rule in _RULES.items():
        if getattr(grammar, kind, None) is not None:
            return rule
    return "The grammar cannot be used: check its form."


def _fields_of(grammar: StructuredOutputsParams) -> dict[str, Any]:
    return {field.name: getattr(grammar, field.name) for field in dataclasses.fields(grammar)}
