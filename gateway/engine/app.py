"""vLLM's OpenAI front end, built from the cell's configuration (vLLM 0.32.0).

Uses `build_app`, `init_app_state` and `AsyncLLM` unchanged, over AsyncLLM's interface for engines
that it does not manage (`client_addresses`). Two differences: `generate` raises a failed task's
error in a form that vLLM's whole and streamed answers both handle; and requests and outputs, which
stay in this process, bypass the engine's sockets.
"""

import logging
from argparse import Namespace
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from vllm import envs
from vllm.config import ModelConfig, VllmConfig
from vllm.connections import global_http_connection
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.exceptions import GenerationError
from vllm.outputs import RequestOutput
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.metrics.loggers import PrometheusStatLogger

from coordinator.protocol.cache_salt import CacheSalts
from coordinator.protocol.engine_options import NOT_OFFERED
from gateway.engine.cached_tokens import sum_cached_tokens
from gateway.engine.grammar import UnfitGrammarError, try_grammar
from gateway.engine.media import keep_public
from gateway.engine.messages import note_errors
from gateway.engine.rendering import (
    allow_equal_choices,
    join_output_messages,
    keep_room_for_output,
    keep_to_the_template,
    refuse_unreadable,
)
from gateway.engine.sandbox import Sandbox
from gateway.engine.text_streams import begin_at_the_end
from gateway.engine.tokenizing import copy_tokenizer_once_more, part_long_from_short
from gateway.engine.tool_streams import complete_streams
from gateway.engine.wire import (
    AbortRequests,
    EngineMessage,
    Frames,
    decode_outputs,
    failure_of,
    read_request,
    write_note,
)
from gateway.errors import ApiError, RequestState, current_request
from gateway.http.intake import REQUEST_ID_HEADER

try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ModuleNotFoundError:  # vLLM 0.33 has it here.
    from vllm.entrypoints.common.cli_args import make_arg_parser

_ENGINE = 0
"""The only engine that AsyncLLM knows here; the relay stands in for it."""
_FAILED = ("error", "abort")
_OPENAI_REASON = {"repetition": "stop"}
"""Finish reasons that only vLLM knows -> OpenAI's."""

NO_MEDIA_DOMAIN = "media.invalid"
"""Stands for no domain: an empty list would allow every domain."""


class TaskFailedError(GenerationError):
    """A task failed. vLLM makes its own answer of it, `errors.shape_error` the gateway's."""

    def __init__(self, error: ApiError) -> None:
        """Record the failure where the HTTP side finds it."""
        super().__init__(error.message)
        self.status_code = HTTPStatus(error.status)
        request = current_request.get()
        if request is not None:
            request.failure = error


class RelayedLLM(AsyncLLM):
    """AsyncLLM whose engine is the relay."""

    sandbox: Sandbox | None = None
    """Tries out grammars; without it they are checked in the event loop."""

    def connect(
        self, say: Callable[[EngineMessage], None], salts: CacheSalts | None = None
    ) -> None:
        """Pass requests and aborts to `say` directly: the sockets cost five thread hops.

        With `salts` each tenant's requests get its own.
        """
        client = self._client

        async def add_request(request: EngineCoreRequest) -> None:
            request.client_index = client.client_index
            if (message := read_request(request, salts)) is not None:
                say(message)

        async def abort_requests(request_ids: list[str]) -> None:
            say(AbortRequests(tuple(request_ids)))

        client.add_request_async = add_request
        client.abort_requests_async = abort_requests

    def take_outputs(self, frames: Frames) -> None:
        """Take a batch of outputs as if it had come over the engine's socket."""
        self._client.outputs_queue.put_nowait(decode_outputs(frames))

    @property
    def _client(self) -> AsyncMPClient:
        client: AsyncMPClient = self.engine_core
        return client

    def use_sandbox(self, sandbox: Sandbox) -> None:
        """Try grammars out in a sandbox from now on, instead of in the event loop."""
        self.sandbox = sandbox
        self.input_processor.structured_outputs_config = None

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Abort requests as AsyncLLM does, and count them, which it does not.

        AsyncLLM aborts a stream that ends at a stop string in another way, after it counts its end.
        """
        names = (request_id,) if isinstance(request_id, str) else tuple(request_id)
        aborted = self.output_processor.abort_requests(names, internal)
        self._count_aborts(len(aborted))
        await self.engine_core.abort_requests_async(aborted)

    def _count_aborts(self, count: int) -> None:
        manager = self.logger_manager
        for logger in manager.stat_loggers if manager is not None else ():
            if isinstance(logger, PrometheusStatLogger):
                logger.counter_request_success[FinishReason.ABORT][_ENGINE].inc(count)

    def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        """Generate as AsyncLLM does, but raise `TaskFailedError` for a failed task.

        The request's tenant, deadline and trace travel to the relay in `session_id`.
        """
        request = current_request.get() or RequestState()
        stream = self._generate(request, *args, **kwargs)
        request.streams.append(stream)
        return stream

    async def _generate(
        self, request: RequestState, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        if self.sandbox is not None:
            await self._try_grammar(args[1] if len(args) > 1 else kwargs["sampling_params"])
        session = kwargs.get("session_id")
        note = write_note(request.tenant, request.deadline_ms, session, request.trace)
        cached_tokens = 0
        async with aclosing(super().generate(*args, **{**kwargs, "session_id": note})) as outputs:
            async for output in outputs:
                # A request may have several prompts, each with a stream of its own.
                request.cached_tokens += (output.num_cached_tokens or 0) - cached_tokens
                cached_tokens = output.num_cached_tokens or 0
                for choice in output.outputs:
                    reason = choice.finish_reason
                    request.generated_tokens += len(choice.token_ids)
                    if reason in _FAILED:
                        raise TaskFailedError(failure_of(choice.stop_reason))
                    if reason is not None:
                        choice.finish_reason = _OPENAI_REASON.get(reason, reason)
                        request.finish_reasons += (choice.finish_reason,)
                yield output

    async def _try_grammar(self, params: Any) -> None:
        assert self.sandbox is not None
        try:
            await try_grammar(self.sandbox, params)
        except UnfitGrammarError as unfit:
            raise TaskFailedError(unfit.error) from None


BATCHED_TOKENS = 2048
"""Least `max_num_batched_tokens` of the front end, vLLM's default without a device."""


@dataclass(frozen=True, slots=True)
class FrontEndConfig:
    """vLLM's arguments and the configuration made from them."""

    args: Namespace
    vllm: VllmConfig


def configure(
    model: str,
    served_names: str | Sequence[str],
    engine_args: Sequence[str],
    media_domains: Sequence[str] = (),
) -> FrontEndConfig:
    """Read vLLM's options as `vllm serve` does; raises ValueError with a sentence for bad ones."""
    names = [served_names] if isinstance(served_names, str) else served_names
    parser = make_arg_parser(_Parser(prog="model.engine_args", add_help=False))
    args = parser.parse_args(
        [
            *("--model", model, "--served-model-name", *names),
            *engine_args,
            "--disable-fastapi-docs",
        ]
    )
    for option, why in NOT_OFFERED.items():
        name = option.removeprefix("--").replace("-", "_")
        if getattr(args, name) != parser.get_default(name):
            raise ValueError(f"model.engine_args: {option} is not offered: {why}.")
    # The layout decides how ranks compute; the front end sees one engine.
    args.tensor_parallel_size = args.pipeline_parallel_size = args.data_parallel_size = 1
    # The edge has checked every URL already; this is the second line of defence.
    args.allowed_media_domains = list(media_domains) or [NO_MEDIA_DOMAIN]
    args.allowed_local_media_path = ""
    args.trust_request_chat_template = False
    # OpenAI's answers always say how much of a prompt was cached.
    args.enable_prompt_tokens_details = True
    if args.max_num_batched_tokens is None and args.max_num_seqs is not None:
        # vLLM's default follows the device, which is the ranks'; here it must only fit.
        args.max_num_batched_tokens = max(args.max_num_seqs, BATCHED_TOKENS)
    return FrontEndConfig(args, _FrontEndArgs.from_cli_args(args).create_engine_config())


class _FrontEndArgs(AsyncEngineArgs):
    """Engine arguments of a process that computes nothing, as in vLLM's own render server."""

    def create_model_config(self) -> ModelConfig:
        """Leave the quantization out: the front end's platform need not have its kernels."""
        config = super().create_model_config()
        config.quantization = None
        return config


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> None:
        raise ValueError(f"model.engine_args: {message}.")


async def build_front_end(
    config: FrontEndConfig,
    say: Callable[[EngineMessage], None],
    *,
    input_address: str,
    output_address: str,
    salts: CacheSalts | None = None,
) -> tuple[FastAPI, RelayedLLM]:
    """Build AsyncLLM and the app around it; `say` takes the requests, with salts if there are any.

    The engine's ready frame must be on its way to `input_address`, because AsyncLLM's constructor
    waits for it. The engine must answer utility calls meanwhile, because the app waits for those.
    """
    copy_tokenizer_once_more()
    llm = RelayedLLM.from_vllm_config(
        config.vllm,
        enable_log_requests=config.args.enable_log_requests,
        disable_log_stats=config.args.disable_log_stats,
        client_addresses={"input_address": input_address, "output_address": output_address},
    )
    llm.connect(say, salts)
    part_long_from_short(llm.renderer)
    tasks = await llm.get_supported_tasks()
    level = logging.getLogger().level
    app = build_app(config.args, tasks, llm.model_config)
    # A package that vLLM imports for its routes raises the root logger's level.
    logging.getLogger().setLevel(level)
    complete_streams()
    await init_app_state(llm, app.state, config.args, tasks)
    begin_at_the_end()
    keep_to_the_template()
    keep_room_for_output()
    allow_equal_choices()
    refuse_unreadable(app.state.online_renderer)
    _name_responses(app.state.openai_serving_responses)
    sum_cached_tokens(app.state.openai_serving_completion)
    note_errors(app.state.anthropic_serving_messages)
    keep_public(global_http_connection)
    # Some variables are read for every token; from now on their values are cached.
    envs.enable_envs_cache()
    return app, llm


def _name_responses(serving: OpenAIServingResponses) -> None:
    """Name a response after its request, as vLLM does with chat completions.

    Also set values that OpenAI lets be null but vLLM's own answer does not.
    """
    create = serving.create_responses

    async def create_named(request: ResponsesRequest, raw_request: Request) -> Any:
        request.request_id = f"resp_{raw_request.headers[REQUEST_ID_HEADER]}"
        request.background = False
        request.truncation = request.truncation or "disabled"
        join_output_messages(request)
        return await create(request, raw_request)

    serving.create_responses = create_named
