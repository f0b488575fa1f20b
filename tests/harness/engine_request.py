"""A request as a front end hands it to vLLM's engine core."""

import time
from typing import Any


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
