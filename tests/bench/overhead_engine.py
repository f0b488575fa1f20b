"""AsyncLLM inside one process, asked without any HTTP: the floor that a front end adds to.

`python -m tests.bench.overhead_engine OPTIONS…` reads loads as JSON lines from stdin and answers
each with what its requests saw.
"""

import asyncio
import json
import os
import sys
import time
from typing import Any

from tests.harness.cells.servers import MODEL


async def ask(llm: Any, name: str, prompt: list[int], tokens: int) -> list[float]:
    """Send one request; seconds from sending it to each of its outputs."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = SamplingParams(
        max_tokens=tokens,
        ignore_eos=True,
        temperature=0.0,
        output_kind=RequestOutputKind.DELTA,
    )
    began = time.perf_counter()
    return [
        time.perf_counter() - began
        async for _ in llm.generate({"prompt_token_ids": prompt}, sampling, name)
    ]


async def answer(llm: Any, load: dict[str, Any], number: int) -> dict[str, Any]:
    """Serve one load: so many prompts, so many of them at once."""
    places = asyncio.Semaphore(load["at_once"])
    began = time.perf_counter()

    async def one(place: int, prompt: list[int]) -> list[float]:
        async with places:
            return await ask(llm, f"{number}-{place}", prompt, load["tokens"])

    prompts = load["prompts"]
    times = await asyncio.gather(*(one(place, each) for place, each in enumerate(prompts)))
    took_s = time.perf_counter() - began
    return {
        "ttft_ms": [each[0] * 1e3 for each in times],
        "tokens_per_s": len(prompts) * load["tokens"] / took_s,
    }


async def serve(options: list[str]) -> None:
    """Answer loads until stdin ends."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", str(MODEL), *options]))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    llm = AsyncLLM.from_engine_args(arguments)
    print(json.dumps("ready"), file=out, flush=True)
    number = 0
    while line := await asyncio.to_thread(sys.stdin.readline):
        number += 1
        print(json.dumps(await answer(llm, json.loads(line), number)), file=out, flush=True)
    llm.shutdown()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1:]))
    os._exit(0)
