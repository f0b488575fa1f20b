"""Plain vLLM as the reference for greedy requests with any other parameters, and for scores.

Run in a process: `tests.harness.vllm.static_cases SPEC.json OUT.json`. SPEC has the
model folder and `cases`, each a prompt (token ids) and the parameters of `reshard_cases`. OUT has,
per case, the tokens and their log-probabilities when the whole text is given as a prompt; with a
grammar, which renormalises them, those that were told. Of ours, `reshard_cases` alone is imported.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.harness.vllm.reshard_cases import vllm_settings

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 32,
    "kv_cache_memory_bytes": 256 << 20,
    "block_size": 32,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}


def main() -> None:
    """Generate for every case, then score what was generated."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    spec = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(model=spec["model"], **OPTIONS)
    cases = spec["cases"]
    prompts: list[Any] = [{"prompt_token_ids": case["prompt"]} for case in cases]
    params = [SamplingParams(detokenize=False, **vllm_settings(case["params"])) for case in cases]
    made = [result.outputs[0] for result in llm.generate(prompts, params, use_tqdm=False)]
    score = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    texts: list[Any] = [
        {"prompt_token_ids": [*case["prompt"], *output.token_ids]}
        for case, output in zip(cases, made, strict=True)
    ]
    answers = []
    scored = llm.generate(texts, score, use_tqdm=False)
    for case, output, result in zip(cases, made, scored, strict=True):
        given = result.prompt_logprobs[len(case["prompt"]) :]
        rows = output.logprobs if "regex" in case["params"] else given
        scores = [row[token].logprob for row, token in zip(rows, output.token_ids, strict=True)]
        answers.append({"tokens": list(output.token_ids), "scores": scores})
    Path(sys.argv[2]).write_text(json.dumps(answers))
    llm.llm_engine.engine_core.shutdown()
    # Interpreter shutdown of vLLM's CPU build aborts now and then; the result is on disk.
    os._exit(0)


if __name__ == "__main__":
    main()
