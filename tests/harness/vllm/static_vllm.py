"""Plain vLLM as the reference: generate with a static tp size and save every step's logits.

Run in a process: `tests.harness.vllm.static_vllm SPEC.json OUT.npz`. SPEC names the model folder,
dtype, tp, a quantization if any, whether ranks have whole experts or share one device, the prompts
(token ids), how many tokens to generate and the texts (token ids) to score. With an fp8 KV cache,
linear layers on CPU are not packed: packed ones sum in another order, and what they give may be
rounded to another number of fp8. Nothing of ours is imported.
"""

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "max_num_seqs": 32,
    "kv_cache_memory_bytes": 256 << 20,
    "logprobs_mode": "raw_logits",
    "max_logprobs": -1,
    "block_size": 32,
}
"""What vLLM is told beside what SPEC says."""


def full_row(by_token: dict[int, Any], vocab_size: int) -> np.ndarray:
    """{token id: Logprob} over the whole vocabulary -> (vocab_size,) float32."""
    row = np.full(vocab_size, np.nan, dtype=np.float32)
    for token, entry in by_token.items():
        row[token] = entry.logprob
    return row


def fork_workers() -> None:
    """Let vLLM's workers be forked where it is on CPU: each imports for ten seconds otherwise."""
    from vllm.platforms import current_platform
    from vllm.v1.executor import multiproc_executor

    if current_platform.is_cpu():
        multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")


def keep_plain_weights() -> None:
    """Let linear layers on CPU compute with their weights as they were loaded."""
    import torch
    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def main() -> None:
    """Generate and score, then save arrays named after the prompts' numbers."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    fork_workers()
    spec = json.loads(Path(sys.argv[1]).read_text())
    if spec.get("kv_cache_dtype", "auto") != "auto":
        keep_plain_weights()
    options = dict(OPTIONS)
    if spec.get("shares_device", False):
        from tests.harness.vllm import shared_device

        options |= shared_device.OPTIONS
    llm = LLM(
        model=spec["model"],
        dtype=spec["dtype"],
        quantization=spec.get("quantization"),
        kv_cache_dtype=spec.get("kv_cache_dtype", "auto"),
        tensor_parallel_size=spec["tp"],
        enable_expert_parallel=spec.get("expert_parallel", False),
        moe_backend=spec.get("moe_backend", "auto"),
        linear_backend=spec.get("linear_backend", "auto"),
        max_model_len=spec["max_model_len"],
        gpu_memory_utilization=spec.get("gpu_memory_utilization", 0.9),
        **options,
    )
    vocab = llm.llm_engine.model_config.get_vocab_size()
    arrays: dict[str, Any] = {}
    params = SamplingParams(
        temperature=0, max_tokens=spec["max_tokens"], ignore_eos=True, logprobs=-1, detokenize=False
    )
    prompts = [{"prompt_token_ids": ids} for ids in spec["prompts"]]
    for number, result in enumerate(llm.generate(prompts, params, use_tqdm=False)):
        output = result.outputs[0]
        arrays[f"tokens_{number}"] = np.array(output.token_ids, dtype=np.int64)
        arrays[f"logits_{number}"] = np.stack([full_row(r, vocab) for r in output.logprobs])
    score = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    for number, ids in enumerate(spec["texts"]):
        result = llm.generate([{"prompt_token_ids": ids}], score, use_tqdm=False)[0]
        values = [
            row[token].logprob
            for row, token in zip(result.prompt_logprobs[1:], ids[1:], strict=True)
        ]
        arrays[f"scores_{number}"] = np.array(values, dtype=np.float64)
    np.savez(sys.argv[2], **arrays)
    llm.llm_engine.engine_core.shutdown()
    # Interpreter shutdown of vLLM's CPU build aborts now and then; the result is on disk.
    os._exit(0)


if __name__ == "__main__":
    main()
