"""A request as a front end hands it to vLLM's engine core."""

import time
from typing import Any

from coordinator.protocol import wire
from coordinator.protocol.messages.tasks import TaskHeader
from coordinator.protocol.terms import TaskId, Tier
from gateway.admission.tiers import PRIORITY_OF_TIER


def engine_request(name: str, prompt: list[int], sampling: Any) -> Any:
    """Return the `EngineCoreRequest` of one prompt; completes its `SamplingParams`.

    Imports vLLM when it is called, not before.
    """
    from vllm.v1.engine import EngineCoreRequest

    sampling.update_from_generation_config({}, None)
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def encoded_request(
    name: str, prompt: list[int], reply_to: str, tier: Tier, params: dict[str, Any]
) -> tuple[TaskHeader, bytes]:
    """What a gateway would submit for one request; greedy unless told otherwise."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.serial_utils import MsgpackEncoder

    settings = {"temperature": 0.0, "ignore_eos": True, "seed": 1, **params}
    sampling = SamplingParams(**settings)
    if sampling.structured_outputs is not None:
        sampling.structured_outputs._backend = "xgrammar"  # What a front end fills in.
    request = engine_request(name, prompt, sampling)
    request.priority = PRIORITY_OF_TIER[tier]
    frames = tuple(bytes(frame) for frame in MsgpackEncoder().encode(request))
    header = TaskHeader(
        task=TaskId(name),
        gateway="test",
        reply_to=reply_to,
        prompt_tokens=len(prompt),
        max_tokens=sampling.max_tokens or 16,
        tier=tier,
    )
    return header, wire.encode(frames)
