"""One static vLLM engine in a process of its own: `python -m tests.bench.gpu_static SPEC.json`.

It imports vLLM at once and touches the GPU only when told to `start`, so that imports overlap with
another server's measurement. Commands come as JSON lines on stdin, answers go to stdout; whatever
vLLM prints goes to stderr.
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import psutil

from tests.bench.gpu_load import GREEDY, MEASURES, LoadClient, calm_collector
from tests.harness.vllm.engine_request import engine_request


class EngineClient(LoadClient):
    """Speaks to vLLM's engine core as AsyncLLM does, without its work per token."""

    def __init__(self, core: Any) -> None:
        super().__init__()
        self._core = core
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            while True:
                outputs = (await self._core.get_output_async()).outputs
                self.take(0, 0, [(o.request_id, len(o.new_token_ids), o.finished) for o in outputs])
        except Exception as error:  # noqa: BLE001 -- whoever waits must learn why
            self.fail(error)

    def prepare(self, name: str, prompt: list[int], tokens: int) -> Any:
        """Build the engine core's request."""
        from vllm.sampling_params import SamplingParams

        sampling = SamplingParams(max_tokens=tokens, **GREEDY)
        return engine_request(name, prompt, sampling)

    async def _send(self, prepared: Any) -> None:
        await self._core.add_request_async(prepared)

    async def cancel(self, names: list[str]) -> None:
        """Abort in the engine core."""
        if names:
            await self._core.abort_requests_async(names)


def preload(spec: dict[str, Any]) -> Any:
    """Import what the engine needs, since its processes are forked, and check its configuration.

    No CUDA context is made by that: vLLM asks the driver's management library.
    """
    import vllm.v1.engine.core
    import vllm.v1.engine.core_client
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.executor.uniproc_executor  # noqa: F401
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments = AsyncEngineArgs(
        model=spec["model"],
        tensor_parallel_size=spec["tp"],
        pipeline_parallel_size=spec["pp"],
        **spec["engine"],
    )
    return arguments.create_engine_config()


def start_engine(config: Any) -> tuple[Any, dict[str, Any]]:
    """Start the engine; returns its client and what is known of it."""
    import torch
    import vllm
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.executor.abstract import Executor

    started = time.perf_counter()
    core = EngineCoreClient.make_async_mp_client(
        config, Executor.get_class(config), log_stats=False
    )
    blocks = int(config.cache_config.num_gpu_blocks or 0)
    compilation = config.compilation_config
    return core, {
        "start_s": round(time.perf_counter() - started, 2),
        "kv_blocks": blocks,
        "kv_tokens": blocks * int(config.cache_config.block_size),
        "block_tokens": int(config.cache_config.block_size),
        "compilation": f"{compilation.mode!s}, {compilation.cudagraph_mode!s}",
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
    }


async def serve(config: Any, answers: TextIO) -> None:
    """Start, then measure what each line asks for until there are no more."""
    core, facts = start_engine(config)
    client = EngineClient(core)
    calm_collector()
    answer(answers, {"ok": facts})
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        try:
            result = await asyncio.wait_for(
                MEASURES[command["do"]](client, **command["args"]), command["limit_s"]
            )
            answer(answers, {"ok": result})
        except Exception as error:  # noqa: BLE001 -- told to the caller, who goes on or ends us
            await client.clear()
            answer(answers, {"error": f"{type(error).__name__}: {error}"})


def answer(answers: TextIO, message: dict[str, Any]) -> None:
    """Write one line."""
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def main() -> None:
    """Wait for the word, then serve until stdin ends."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        config = preload(spec)
        answer(answers, {"ok": "loaded"})
        if sys.stdin.readline():
            asyncio.run(serve(config, answers))
    except Exception as error:
        answer(answers, {"error": f"{type(error).__name__}: {error}"})
        raise
    # The bench ends this tree before stdin does, unless it was ended itself.
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(0)  # vLLM's threads would keep the process.


if __name__ == "__main__":
    main()
