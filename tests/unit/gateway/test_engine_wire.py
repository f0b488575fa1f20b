"""vLLM's frames as the relay reads and writes them: the contract with vLLM's own codec."""

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from coordinator.protocol.cache_salt import CacheSalts
from gateway.engine import wire
from gateway.errors import api_error


def frames_of(kind: EngineCoreRequestType, body: Any) -> list[bytes]:
    return [kind.value, *(bytes(frame) for frame in MsgpackEncoder().encode(body))]


def encode(outputs: EngineCoreOutputs) -> list[bytes]:
    return [bytes(frame) for frame in MsgpackEncoder().encode(outputs)]


def decode(frames: Any) -> EngineCoreOutputs:
    return MsgpackDecoder(EngineCoreOutputs).decode(list(frames))


def request(**fields: Any) -> EngineCoreRequest:
    known: dict[str, Any] = {
        "request_id": "chat-1",
        "prompt_token_ids": [1, 2, 3],
        "mm_features": None,
        "sampling_params": SamplingParams(max_tokens=7, temperature=0.5, stop=["x"]),
        "pooling_params": None,
        "arrival_time": 1.0,
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
        "priority": -10,
    }
    return EngineCoreRequest(**{**known, **fields})


def read(message: EngineCoreRequest) -> wire.AddRequest | wire.UnfitRequest | None:
    return wire.read_request(message)


def test_request_gets_a_seed_and_keeps_the_rest() -> None:
    seen = read(request())
    assert isinstance(seen, wire.AddRequest)
    assert (seen.request_id, seen.prompt_tokens, seen.max_tokens, seen.priority) == (
        "chat-1",
        3,
        7,
        -10,
    )
    again = MsgpackDecoder(EngineCoreRequest).decode(list(seen.frames))
    seed = again.sampling_params.seed
    assert 0 <= seed < 2**63
    again.sampling_params.seed = None
    assert msgspec.structs.asdict(again) == msgspec.structs.asdict(request())
    other = read(request())
    assert isinstance(other, wire.AddRequest)
    assert other.frames != seen.frames, "every request draws a seed of its own"


@pytest.mark.parametrize("own", [None, "mine"])
def test_a_request_gets_the_salt_of_its_tenant(own: str | None) -> None:
    salts = CacheSalts("a-shared-secret-of-the-test")
    sent = request(cache_salt=own, session_id=wire.write_note("acme", 0, None))
    made = wire.read_request(sent, salts)
    assert isinstance(made, wire.AddRequest)
    again = MsgpackDecoder(EngineCoreRequest).decode(list(made.frames))
    assert made.cache_salt == again.cache_salt == salts.of("acme", own)
    assert sent.cache_salt == own, "AsyncLLM's own stays as it is"
    for shared in (read(sent), wire.read_request(request(cache_salt=own), salts)):
        assert isinstance(shared, wire.AddRequest)
        assert shared.cache_salt == own


def test_a_request_stays_as_asyncllm_has_it() -> None:
    # One object of parameters serves all choices of a request: a seed in it would be that of all.
    params = SamplingParams(max_tokens=1)
    first, second = (
        request(request_id=name, sampling_params=params, session_id=wire.write_note("t", 0, None))
        for name in ("0_chat", "1_chat")
    )
    seen = [read(first), read(second)]
    assert params.seed is None
    assert first.session_id == wire.write_note("t", 0, None)
    seeds = set()
    for each in seen:
        assert isinstance(each, wire.AddRequest)
        assert each.tenant == "t"
        again = MsgpackDecoder(EngineCoreRequest).decode(list(each.frames))
        assert again.session_id is None
        seeds.add(again.sampling_params.seed)
    assert len(seeds) == 2


def test_seed_of_the_client_is_kept() -> None:
    params = SamplingParams(seed=0, max_tokens=1)
    seen = read(request(sampling_params=params))
    assert isinstance(seen, wire.AddRequest)
    assert MsgpackDecoder(EngineCoreRequest).decode(list(seen.frames)).sampling_params.seed == 0


def test_large_tensors_travel_in_frames_of_their_own() -> None:
    embeds = torch.arange(4_096, dtype=torch.float32).reshape(16, 256)
    seen = read(request(prompt_token_ids=None, prompt_embeds=embeds))
    assert isinstance(seen, wire.AddRequest)
    assert seen.prompt_tokens == 16
    assert len(seen.frames) == 2
    again = MsgpackDecoder(EngineCoreRequest).decode(list(seen.frames))
    assert torch.equal(again.prompt_embeds, embeds)


def test_requests_that_cannot_be_run_are_told_apart() -> None:
    assert isinstance(read(request(sampling_params=None)), wire.UnfitRequest)
    assert isinstance(read(request(resumable=True)), wire.UnfitRequest)
    assert read(request(abort_immediately=True)) is None


def test_what_concerns_only_engines_of_vllm_is_left_alone() -> None:
    assert wire.decode_call(frames_of(EngineCoreRequestType.START_DP_WAVE, [0, 0])) is None


@pytest.mark.parametrize(
    ("method", "result"),
    [
        ("get_supported_tasks", ["generate"]),
        ("is_scheduler_paused", False),
        ("is_sleeping", False),
        ("reset_prefix_cache", True),
        ("pause_scheduler", None),
        ("resume_scheduler", None),
        ("reset_mm_cache", None),
        ("profile", None),
        ("list_loras", []),
    ],
)
def test_utility_calls_are_answered(method: str, result: object) -> None:
    frames = frames_of(EngineCoreRequestType.UTILITY, (0, 77, method, ()))
    call = wire.decode_call(frames)
    assert call == wire.UtilityCall(77, method, ())
    assert isinstance(call, wire.UtilityCall)
    answer = decode(wire.answer_utility(call)).utility_output
    assert answer is not None
    assert answer.result is not None
    assert (answer.call_id, answer.failure_message) == (77, None)
    assert answer.result.result == result


@pytest.mark.parametrize("method", ["collective_rpc", "add_lora", "sleep", "__class__"])
def test_other_utility_calls_fail(method: str) -> None:
    answer = decode(wire.answer_utility(wire.UtilityCall(1, method, ()))).utility_output
    assert answer is not None
    assert method in str(answer.failure_message)


def test_failure_reaches_the_other_side() -> None:
    error = api_error("queue_full", "Full: »20« waiting.")
    outputs = decode(wire.encode_failure(["a", "b"], error)).outputs
    assert [output.request_id for output in outputs] == ["a", "b"]
    assert all(output.finish_reason is FinishReason.ERROR for output in outputs)
    assert wire.failure_of(outputs[0].stop_reason) == error
    assert wire.failure_of(None).code == "internal_error"


def test_ready_frame_is_what_vllm_expects() -> None:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            world_size=1,
            data_parallel_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64),
        cache_config=SimpleNamespace(block_size=32),
        model_config=SimpleNamespace(max_model_len=512, dtype=torch.bfloat16),
        instance_id="id",
    )
    frame: Any = wire.ready_frame(config)
    response = msgspec.msgpack.decode(frame, type=EngineCoreReadyResponse)
    assert (response.max_model_len, response.block_size, response.dtype) == (512, 32, "bfloat16")


def logprobs(rows: int) -> LogprobsLists:
    return LogprobsLists(
        np.arange(rows * 3, dtype=np.int32).reshape(rows, 3),
        np.arange(rows * 3, dtype=np.float32).reshape(rows, 3),
        np.arange(rows, dtype=np.int32),
    )


def full_output() -> EngineCoreOutput:
    prompt = LogprobsTensors(torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2))
    return EngineCoreOutput(
        "chat-1",
        [10, 11, 12, 13],
        new_logprobs=logprobs(4),
        new_prompt_logprobs_tensors=prompt,
        finish_reason=FinishReason.STOP,
        stop_reason=13,
        events=[],
        prefill_stats=PrefillStats(num_prompt_tokens=3),
    )


def test_token_ids_are_read_without_the_rest() -> None:
    other = EngineCoreOutput("chat-2", [5], new_logprobs=logprobs(100))
    frames = encode(EngineCoreOutputs(outputs=[full_output(), other]))
    assert len(frames) > 1
    assert wire.read_token_ids(frames) == [[10, 11, 12, 13], [5]]


@pytest.mark.parametrize(
    "frames",
    [
        [b"\xc1"],
        [b""],
        encode(EngineCoreOutputs(engine_index=1)),
        encode(EngineCoreOutputs(utility_output=UtilityOutput(1, result=UtilityResult(None)))),
    ],
)
def test_what_a_leader_must_not_send_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(wire.WireError):
        wire.read_token_ids(frames)


def test_trimmed_output_survives_the_wire() -> None:
    batch = decode(encode(EngineCoreOutputs(outputs=[full_output()], timestamp=5.0)))
    [output] = batch.outputs
    wire.trim_output(output, 1, 2, finished=False)
    [output] = decode(wire.encode_outputs(batch, [output])).outputs
    assert output.new_token_ids == [11, 12]
    assert output.new_logprobs is not None
    assert output.new_logprobs.logprob_token_ids.tolist() == [[3, 4, 5], [6, 7, 8]]
    assert output.new_logprobs.sampled_token_ranks.tolist() == [1, 2]
    assert (output.finish_reason, output.stop_reason) == (None, None)
    assert output.new_prompt_logprobs_tensors is None
    assert output.prefill_stats is None


def test_trim_keeps_the_end_and_drops_what_is_told_once() -> None:
    output = full_output()
    wire.trim_output(output, 4, 0, finished=True)
    assert output.new_token_ids == []
    assert output.new_logprobs is None
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, 13)
    whole = full_output()
    wire.trim_output(whole, 0, 4, finished=True)
    assert whole.new_token_ids == [10, 11, 12, 13]
    assert whole.new_logprobs is not None
    assert whole.new_prompt_logprobs_tensors is None
