"""A rank is killed with its device's memory while 64 long streams run: none computes again.

Shapes of models that people serve, random weights, two GPUs: `python -m pytest -m gpu -s tests/gpu`
prints what is measured.
"""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.cells.bare_cell import BareCell, TaskClient, bare_cell
from tests.harness.cells.gauges import settled_total, total
from tests.harness.cells.lost_ranks import begun, kill, pids_of, tell_pauses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}
STREAMS, PROMPT_TOKENS, ANSWER_TOKENS = 64, 2_000, 600
BLOCK_TOKENS = 16
HOST_GIB = 40.0
PAUSE_LIMIT_S = 1.2
ENGINE = (
    *("--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "4096"),
    *("--max-num-seqs", "128", "--kv-cache-memory-bytes", str(26 << 30)),
)


def write_model(folder: Path, **changes: int) -> Path:
    """Write the shape of a model of 8B, or one with these changes."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA_8B | changes))
    return model


def submit_all(client: TaskClient, tag: str) -> list[str]:
    names = [f"{tag}-{number}" for number in range(STREAMS)]
    for name in names:
        ids = random.Random(name).choices(range(10, 100_000), k=PROMPT_TOKENS)
        client.submit(name, ids, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    return names


async def kill_one(cell: BareCell, source: str) -> float:
    """Kill a rank in the middle of all streams; returns the longest pause, in seconds.

    The tasks that were submitted again take all their full blocks from this source.
    """
    client, hits = TaskClient(), await settled_total(cell, source, 0)
    async with client.connected(cell):
        names = submit_all(client, "warm")
        await client.finish(*names)
        names = submit_all(client, "lost")
        await begun(client, names, 100)
        hits = await settled_total(cell, source, 0)
        seen_s = await asyncio.to_thread(kill, cell, 1, pids_of(cell)[1])
        print(f"known after {seen_s * 1e3:.0f} ms")
        streams = await client.finish(*names)
        assert all(len(stream.tokens) == ANSWER_TOKENS for stream in streams)
        moved = [name for name in names if client.streams[name].resumed]
        assert len(moved) >= STREAMS // 4
        counts = [len(client.submitted(name).delivered_tokens) for name in moved]
        full = sum((PROMPT_TOKENS + each - 1) // BLOCK_TOKENS * BLOCK_TOKENS for each in counts)
        found = await total(cell, source, hits + full) - hits
        print(f"{len(moved)} streams submitted again, {full} tokens in full blocks, {found} found")
        longest_s = tell_pauses("lost", streams)
        assert found >= full
    return longest_s


async def test_host_pages_have_what_a_lost_device_had(tmp_path: Path) -> None:
    with bare_cell(
        tmp_path,
        ranks=2,
        engine_args=list(ENGINE),
        model=write_model(tmp_path),
        device="cuda",
        limits={"host_kv_gib": HOST_GIB},
    ) as cell:
        wanted = int(2 * 0.99 * HOST_GIB * 2**30)
        for _ in range(20):
            if await total(cell, "host_registered_bytes", wanted) >= wanted:
                break
        else:
            pytest.fail("the ranks register no host pages")
        assert await kill_one(cell, "host_hits") <= PAUSE_LIMIT_S
