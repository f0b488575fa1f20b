"""Whole models and vLLM's groups in one process, for cases under Triton's interpreter."""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs

from worker.engine.weights.tree import load_replica

MAX_POSITION = 64
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32},
}
MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": MAX_POSITION,
    "vocab_size": 64,
    "dtype": "float32",
}
LAYERS: int = MODEL["num_hidden_layers"]


@contextmanager
def world(folder: Path) -> Iterator[None]:
    """Be all of vLLM's groups in one process, which meet in a new file of this folder."""
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{folder / 'store'}", 0, "gloo")
        parallel_state.initialize_model_parallel(1)
    with pytest.MonkeyPatch.context() as patch:
        # vLLM's CPU runner does the same: there is no accelerator whose cache could be emptied.
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)
        # vLLM collects garbage for each model it loads; imported modules need no look each time.
        gc.freeze()
        yield
        gc.unfreeze()
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def config_of(folder: Path, **changes: Any) -> VllmConfig:
    """vLLM's configuration of a small model with random weights, with CUDA's norms."""
    (folder / "config.json").write_text(json.dumps({**MODEL, **changes}))
    config = EngineArgs(
        model=str(folder),
        dtype="float32",
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
    ).create_engine_config()
    config.kernel_config.ir_op_priority.rms_norm = ["vllm_c", "native"]  # As it is on CUDA.
    return config


def replica_of(config: VllmConfig, shards: int = 4) -> nn.Module:
    """The whole model, stored for this number of shards."""
    with set_current_vllm_config(config):
        replica = load_replica(config, shards)
    torch.manual_seed(1)
    for parameter in replica.parameters():
        parameter.data.normal_()
    return replica
