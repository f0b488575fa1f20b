"""Options that only ranks on GPUs can follow do not stop a front end without a device."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from worker.demo import MODEL_DIR

vllm_app = pytest.importorskip("gateway.engine.app")

GPU_OPTIONS = (
    ["--gpu-memory-utilization", "0.9"],
    ["--kv-cache-memory-bytes", "40G"],
    ["--dtype", "float16"],
    ["--block-size", "16"],
    ["--quantization", "fp8_per_channel"],
    ["--quantization", "fp8"],
    ["--attention-backend", "FLASH_ATTN"],
    ["--attention-backend", "FLASHINFER"],
    ["--compilation-config", '{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY"}'],
    ["--max-num-seqs", "4096"],
    ["--max-num-batched-tokens", "16384"],
    ["--no-enable-prefix-caching"],
    ["--enforce-eager"],
    ["--disable-custom-all-reduce"],
)
QUANTIZED: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                "input_activations": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "token",
                    "dynamic": True,
                },
            }
        },
        "ignore": ["lm_head"],
    },
}


@pytest.mark.parametrize("options", GPU_OPTIONS, ids=" ".join)
def test_an_option_for_gpus(options: list[str]) -> None:
    config = vllm_app.configure(str(MODEL_DIR), "demo", options)
    assert config.vllm.quant_config is None
    assert config.vllm.scheduler_config.max_num_batched_tokens >= vllm_app.BATCHED_TOKENS


@pytest.mark.parametrize("name", list(QUANTIZED))
def test_a_checkpoint_for_gpus(name: str, tmp_path: Path) -> None:
    model = shutil.copytree(MODEL_DIR, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps({**config, "quantization_config": QUANTIZED[name]})
    )
    assert vllm_app.configure(str(model), "demo", []).vllm.quant_config is None
