"""The engine's side of vLLM's private engine wire format (vLLM 0.32.0).

The only module that knows vLLM's frames: `EngineCoreRequest` as ranks read it, `EngineCoreOutputs`
as they write it, and the method calls that come from AsyncLLM's ROUTER socket and are answered at
its PULL socket. `tests/integration/test_gateway.py` is its contract test. Called by the relay.
"""

import copy
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import vllm
from vllm.config import VllmConfig
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from coordinator.protocol.cache_salt import CacheSalts
from gateway.errors import ApiError, RequestState, api_error, current_request

ENGINE_IDENTITY = (0).to_bytes(2, "little")
"""ZeroMQ identity of engine 0, which the relay stands in for."""

SUPPORTED_TASKS = ("generate",)
SEED_BITS = 63
FAILURE_MARK = "aileron-failure:"
"""Start of a `stop_reason` that carries an `ApiError` to `gateway.engine.app`."""

NOTE_MARK = "aileron-note:"
"""Start of a `session_id` that carries the tenant, deadline and trace of a request."""

Frames = Sequence[bytes | memoryview]
Output = EngineCoreOutput


@dataclass(frozen=True, slots=True)
class AddRequest:
    """A request to run; `frames` are vLLM's, encoded again with a seed."""

    request_id: str
    prompt_tokens: int
    max_tokens: int
    priority: int
    tenant: str
    deadline_ms: int
    trace: str
    frames: tuple[bytes, ...]
    state: RequestState | None = None
    """State shared with the HTTP side."""
    prompt_token_ids: Sequence[int] = ()
    """Empty for a prompt of embeddings."""
    cache_salt: str | None = None
    """Prompts with different salts share no cached block."""


@dataclass(frozen=True, slots=True)
class UnfitRequest:
    """A request of a kind that this engine does not run."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """Requests that no client waits for any more."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UtilityCall:
    """A method that AsyncLLM calls on its engine."""

    call_id: int
    method: str
    args: tuple[Any, ...]


EngineMessage = AddRequest | UnfitRequest | AbortRequests | UtilityCall


class _TokenIds(msgspec.Struct, array_like=True, gc=False):
    """The first fields of `EngineCoreOutput`; msgspec skips the others quickly."""

    request_id: str
    new_token_ids: list[int]


class _BatchIds(msgspec.Struct, array_like=True, gc=False):
    """The first fields of `EngineCoreOutputs`; a leader must not answer utility calls."""

    engine_index: int
    outputs: list[_TokenIds] = []
    scheduler_stats: msgspec.Raw = msgspec.Raw()
    timestamp: float = 0.0
    utility_output: None = None


_encoder = MsgpackEncoder()
_decode_any = MsgpackDecoder().decode
_decode_outputs = MsgpackDecoder(EngineCoreOutputs).decode
_decode_ids = msgspec.msgpack.Decoder(_BatchIds).decode

WireError = msgspec.MsgspecError
"""Raised for invalid frames."""


def _encode(value: Any) -> tuple[bytes, ...]:
    return tuple(bytes(buffer) for buffer in _encoder.encode(value))


def ready_frame(config: VllmConfig) -> bytes:
    """Return an engine's first message, a description made from the front end's configuration."""
    parallel, scheduler, cache = (
        config.parallel_config,
        config.scheduler_config,
        config.cache_config,
    )
    response = EngineCoreReadyResponse(
        max_model_len=config.model_config.max_model_len,
        num_gpu_blocks=0,
        block_size=cache.block_size,
        dp_stats_address=None,
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        vllm_version=vllm.__version__,
        world_size=parallel.world_size,
        data_parallel_size=parallel.data_parallel_size,
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        decode_context_parallel_size=parallel.decode_context_parallel_size,
        data_parallel_rank=0,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        instance_id=config.instance_id,
        supports_lora=False,
        max_loras=0,
    )
    return msgspec.msgpack.encode(response)


def decode_call(frames: Frames) -> UtilityCall | None:
    """Read a message from AsyncLLM's socket; None for what concerns only vLLM's own engines.

    Requests and aborts do not come here: AsyncLLM passes them by a direct call.
    """
    if EngineCoreRequestType(bytes(frames[0])) != EngineCoreRequestType.UTILITY:
        return None
    _client, call_id, method, args = _decode_any(frames[1:])
    return UtilityCall(call_id, method, tuple(args))


def read_request(
    request: EngineCoreRequest, salts: CacheSalts | None = None
) -> AddRequest | UnfitRequest | None:
    """Read a request of AsyncLLM without changing it; None if it is aborted already.

    With `salts` it gets its tenant's. Call it in the context of the HTTP request.
    """
    if request.abort_immediately:
        return None
    # AsyncLLM goes on using its own: all choices of a request share one params object.
    request, params = copy.copy(request), request.sampling_params
    if params is None:
        return UnfitRequest(request.request_id, "This model generates text only: it does not pool.")
    if request.resumable:
        return UnfitRequest(
            request.request_id, "Streamed input is not supported: send the whole prompt."
        )
    note = _read_note(request.session_id)
    request.session_id = note.session_id
    if salts is not None:
        request.cache_salt = salts.of(note.tenant, request.cache_salt)
    if params.seed is None:
        # All ranks of a group must sample the same tokens, and so must a later attempt.
        params = request.sampling_params = copy.copy(params)
        params.seed = secrets.randbits(SEED_BITS)
    if request.prompt_token_ids is not None:
        prompt_tokens = len(request.prompt_token_ids)
    else:
        prompt_tokens = len(request.prompt_embeds) if request.prompt_embeds is not None else 0
    return AddRequest(
        request_id=request.request_id,
        prompt_tokens=prompt_tokens,
        max_tokens=params.max_tokens or 0,
        priority=request.priority,
        tenant=note.tenant,
        deadline_ms=note.deadline_ms,
        trace=note.trace,
        frames=_encode(request),
        state=current_request.get(),
        prompt_token_ids=request.prompt_token_ids or (),
        cache_salt=request.cache_salt,
    )


class _Note(msgspec.Struct, array_like=True):
    tenant: str
    deadline_ms: int
    session_id: str | None
    trace: str = ""


def write_note(tenant: str, deadline_ms: int, session_id: str | None, trace: str = "") -> str:
    """Encode the tenant, deadline and trace of a request into its session id."""
    return NOTE_MARK + msgspec.json.encode([tenant, deadline_ms, session_id, trace]).decode()


def _read_note(session_id: str | None) -> _Note:
    if session_id is None or not session_id.startswith(NOTE_MARK):
        return _Note("", 0, session_id)
    return msgspec.json.decode(session_id.removeprefix(NOTE_MARK), type=_Note)


def answer_utility(call: UtilityCall) -> tuple[bytes, ...]:
    """Answer a method call: here the layout pauses and switches engines, not the front end."""
    answers: dict[str, Any] = {
        "get_supported_tasks": SUPPORTED_TASKS,
        "is_scheduler_paused": False,
        "is_sleeping": False,
        "pause_scheduler": None,
        "resume_scheduler": None,
        "reset_prefix_cache": True,
        "reset_mm_cache": None,
        "reset_encoder_cache": None,
        "profile": None,
        "list_loras": [],
    }
    if call.method in answers:
        output = UtilityOutput(call.call_id, result=UtilityResult(answers[call.method]))
    else:
        reason = f"{call.method} is not available in this gateway"
        output = UtilityOutput(call.call_id, failure_message=reason)
    return _encode(EngineCoreOutputs(utility_output=output))


def encode_failure(request_ids: Sequence[str], error: ApiError) -> tuple[bytes, ...]:
    """Return outputs that end these requests with an error, for `failure_of` to read."""
    reason = FAILURE_MARK + _encode_failure_note(error)
    outputs = [
        EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, stop_reason=reason)
        for request_id in request_ids
    ]
    return _encode(EngineCoreOutputs(outputs=outputs))


def _encode_failure_note(error: ApiError) -> str:
    return msgspec.json.encode([error.code, error.message, error.retry_after_s]).decode()


def failure_of(stop_reason: int | str | None) -> ApiError:
    """Return the error in the `stop_reason` of an output that ended with an error."""
    if isinstance(stop_reason, str) and stop_reason.startswith(FAILURE_MARK):
        code, message, retry_s = msgspec.json.decode(stop_reason.removeprefix(FAILURE_MARK))
        return api_error(code, message, retry_after_s=retry_s)
    return api_error("internal_error", "The request failed while text was generated.")


def read_token_ids(frames: Frames) -> list[list[int]]:
    """Return the token ids of each output of a batch, without decoding the rest."""
    batch = _decode_ids(frames[0])
    if batch.engine_index != 0:
        raise msgspec.ValidationError("outputs of another engine than 0")
    return [output.new_token_ids for output in batch.outputs]


def decode_outputs(frames: Frames) -> EngineCoreOutputs:
    """Decode a whole batch."""
    return _decode_outputs(frames)


def encode_outputs(batch: EngineCoreOutputs, outputs: list[EngineCoreOutput]) -> tuple[bytes, ...]:
    """Encode a batch again with other outputs."""
    batch.outputs = outputs
    return _encode(batch)


def trim_output(output: EngineCoreOutput, skip: int, keep: int, *, finished: bool) -> None:
    """Keep tokens skip..skip+keep-1 of an output, and drop all data sent once per request.

    An earlier attempt already sent prompt logprobs, prefill statistics and queue events.
    """
    whole = keep == len(output.new_token_ids)
    output.new_token_ids = output.new_token_ids[skip : skip + keep]
    output.new_prompt_logprobs_tensors = None
    output.prompt_token_id_logprobs = None
    output.prefill_stats = None
    output.events = None
    output.routed_experts = None
    if not finished:
        output.finish_reason = None
        output.stop_reason = None
    if whole:
        return
    if output.new_logprobs is not None:
        cut = slice(skip, skip + keep)
        token_ids, logprobs, ranks, _ = output.new_logprobs
        output.new_logprobs = (
            type(output.new_logprobs)(token_ids[cut], logprobs[cut], ranks[cut]) if keep else None
        )
    if output.new_sampling_mask is not None:
        mask = output.new_sampling_mask
        output.new_sampling_mask = mask.slice_request(skip, keep) if keep else None
