"""`python -m tests.harness.vllm.static_pipeline SPEC.json OUT`: plain vLLM's own pipeline groups.

SPEC has the `model`, the number of `stages`, and `prompts` of token ids; OUT gets the greedy tokens
of each and their log-probabilities, in nats.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

TOKENS = 24


def warm(worker: Any) -> None:
    """Let a worker make the buffers of its activations.

    On CPU vLLM 0.32 makes them in a warm-up that it leaves out, and the first request fails.
    """
    worker.model_runner._dummy_run(8)


def main() -> None:
    """See the module."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # For `warm` itself.
    from vllm import LLM, SamplingParams

    spec = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(
        model=spec["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        pipeline_parallel_size=spec["stages"],
        kv_cache_memory_bytes=1 << 26,
    )
    llm.collective_rpc(warm)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=0, ignore_eos=True)
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in spec["prompts"]]
    outputs = [each.outputs[0] for each in llm.generate(prompts, params)]
    answers = [
        {
            "tokens": list(each.token_ids),
            "logprobs": [
                rows[token].logprob
                for token, rows in zip(each.token_ids, each.logprobs, strict=True)
            ],
        }
        for each in outputs
    ]
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
