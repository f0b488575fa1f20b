"""A test's own process as one of the ranks that hold a part of the weights each."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs

from comm_pool.layout import Mode
from tests.harness.vllm.trees import one_of
from worker.engine.config import ModeKey, mode_config

PARTS = 2


def base_config(model: Path, **engine: Any) -> VllmConfig:
    """The configuration of a small cell; `engine` are more of vLLM's engine arguments."""
    return AsyncEngineArgs(
        model=str(model),
        enforce_eager=True,
        max_model_len=256,
        block_size=32,
        kv_cache_memory_bytes=1 << 24,
        skip_tokenizer_init=True,
        **engine,
    ).create_engine_config()


@contextmanager
def rank_of_parts(model: Path, rank: int, **engine: Any) -> Iterator[VllmConfig]:
    """This process as one of the ranks, with a configuration of its own.

    `engine` are more of vLLM's engine arguments.
    """
    config = mode_config(base_config(model, **engine), ModeKey(Mode.TP, PARTS))
    with one_of(PARTS, rank), set_current_vllm_config(config):
        yield config
