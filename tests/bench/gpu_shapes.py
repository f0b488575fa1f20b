"""Model folders with the shapes of known models, engine options, and sizes of load.

A folder holds a `config.json` only; weights are dummies (`load_format=dummy`), so only speed and
memory mean anything. The demo model with tiny sizes is for trying the benchmark without a GPU.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.harness.vllm.known_shapes import (
    GPT_OSS_20B,
    LLAMA,
    LLAMA_8B,
    QWEN3_30B_A3B,
    QWEN3_32B,
)
from tests.harness.vllm.quantized_models import CONFIGS
from tests.harness.vllm.tiny_models import model_of

COMPILATION = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""Of aileron and, on equal terms, of static vLLM: full CUDA graphs for decode, no torch.compile."""

_LLAMA_70B: dict[str, Any] = {
    **LLAMA,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
FOUR_BITS = ("awq", "gptq")
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": LLAMA_8B,
    "qwen3-32b": QWEN3_32B,
    # What a rank of tp2 computes of it, but for the collectives: for machines of one GPU.
    "qwen3-32b-half": {
        **QWEN3_32B,
        "num_attention_heads": QWEN3_32B["num_attention_heads"] // 2,
        "num_key_value_heads": QWEN3_32B["num_key_value_heads"] // 2,
        "intermediate_size": QWEN3_32B["intermediate_size"] // 2,
        "vocab_size": QWEN3_32B["vocab_size"] // 2,
    },
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "gpt-oss-20b": GPT_OSS_20B,
    "llama-3-70b-fp8": _LLAMA_70B,
    # For a look at what a layer costs the host: starts in seconds.
    "llama-3-70b-fp8-short": {**_LLAMA_70B, "num_hidden_layers": 24},
    # As a published fp8 checkpoint looks. vLLM's dummy loader rounds its weights to nearly zero,
    # which draws less power than real ones do: prefill of both sides looks faster than it is.
    "llama-3-70b-fp8-checkpoint": {
        **_LLAMA_70B,
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    },
}
SHAPES |= {
    # As published checkpoints are described; a group of 4-bit weights has 128 inputs.
    f"llama-3-8b-{form}": {
        **LLAMA_8B,
        "quantization_config": CONFIGS[form] | ({"group_size": 128} if form in FOUR_BITS else {}),
    }
    for form in (*FOUR_BITS, "fp8-block", "fp8-channel", "fp8-static", "fp8-modelopt")
}
SHAPE_OPTIONS: dict[str, dict[str, Any]] = {
    # vLLM makes each layer's bf16 weights and quantizes them before it makes the next layer's, so
    # 140 GB never exist at once; scales follow the largest weight, so all of fp8's range is used.
    "llama-3-70b-fp8": {"quantization": "fp8_per_tensor"},
    "llama-3-70b-fp8-short": {"quantization": "fp8_per_tensor"},
}
DEMO, DEMO_OF_STAGES = "demo", "four-layers"
"""For dry runs on CPU: the model that ships, and a random one that pipeline stages divide."""


KINDS = ("ttft", "tpot", "saturated")
"""What is measured of each server, in this order."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that all come at once; tokens of a prompt and of an answer."""

    requests_per_gpu: int
    prompt: int
    answer: int

    @property
    def name(self) -> str:
        """Such as 256x1024+128."""
        return f"{self.requests_per_gpu}x{self.prompt}+{self.answer}"

    @classmethod
    def parse(cls, text: str) -> "Load":
        """Read what `name` writes; raises ValueError."""
        requests, _, sizes = text.partition("x")
        prompt, _, answer = sizes.partition("+")
        return cls(int(requests), int(prompt), int(answer))


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of load; tokens unless a name says otherwise."""

    ttft: Mapping[int, int] = field(default_factory=lambda: {512: 5, 4096: 5, 32768: 3})
    """Prompt tokens -> repeats."""
    tpot: Mapping[int, int] = field(default_factory=lambda: {1: 1024, 16: 1024, 64: 1024, 256: 256})
    """Streams per engine -> prompt tokens."""
    tpot_tokens: int = 112
    """Answer of each of those streams; the ones after all prompts are read are timed."""
    saturated_dp: int = 256
    """Requests per GPU, in layouts of one rank per engine."""
    saturated_tp: int = 96
    """Requests per GPU for one wide engine, which takes them one after the other."""
    saturated_prompt: int = 1024
    saturated_tokens: int = 128
    loads: tuple[Load, ...] = ()
    """Instead of these, as many requests for every layout."""
    kinds: tuple[str, ...] = KINDS
    """What is measured of each server, of `KINDS`."""
    idle_batches: tuple[int, ...] = (1, 64)
    """Streams per engine while idle times between steps are recorded."""
    switches: int = 100
    streams: int = 200
    """Running streams of each layout (pause) or of the cell (other plans) under switches."""
    switch_prompt: int = 256
    stay_ms: tuple[int, int] = (60, 100)
    """Shortest and longest time in a layout between two switches."""
    stream_tokens: tuple[int, int] = (600, 1200)
    """Shortest and longest answer of a stream under switches; a finished one is replaced."""
    vocab: int = 100_000
    """Prompts are random tokens below this."""


SATURATED = {"llama-3-8b": (256, 96), "qwen3-32b": (64, 48)}
"""Shape -> requests per GPU (dp, tp) that take about 8 s on H200s."""
SATURATED_LARGE = (48, 32)


def plan_for(shape: str, quick: bool) -> Plan:
    """Sizes for a shape; `quick` measures every phase once or twice, to see that all of it runs."""
    if shape in (DEMO, DEMO_OF_STAGES):
        plan = Plan(
            ttft={16: 2, 128: 2},
            tpot={1: 32, 4: 16},
            tpot_tokens=12,
            saturated_dp=4,
            saturated_tp=4,
            saturated_prompt=32,
            saturated_tokens=8,
            idle_batches=(1, 4),
            switches=6,
            streams=4,
            switch_prompt=16,
            stream_tokens=(100, 200),
            vocab=4000,
        )
    else:
        dp, tp = SATURATED.get(shape, SATURATED_LARGE)
        plan = Plan(saturated_dp=dp, saturated_tp=tp)
        if quick:
            plan = dataclasses.replace(
                plan,
                ttft={512: 3, 4096: 3, 32768: 2},
                tpot_tokens=64,
                saturated_dp=dp // 2,
                saturated_tp=tp // 2,
                switches=40,
            )
    return plan


def engine_options(shape: str, device: str, memory_share: float) -> dict[str, Any]:
    """vLLM engine options by Python name, alike for every server."""
    if device == "cpu":
        return {
            "skip_tokenizer_init": True,
            "max_model_len": 512,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 256,
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": 64 << 20,
            "block_size": 32,
            "enforce_eager": True,
        }
    return {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 36864,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": memory_share,
        "enable_prefix_caching": False,
        **SHAPE_OPTIONS.get(shape, {}),
    }


def as_arguments(options: Mapping[str, Any]) -> list[str]:
    """Engine options as on vLLM's command line."""
    arguments: list[str] = []
    for name, value in options.items():
        option = name.replace("_", "-")
        if value is False:
            arguments.append(f"--no-{option}")
        elif isinstance(value, Mapping):
            arguments += [f"--{option}", json.dumps(value)]
        else:
            arguments += [f"--{option}"] + ([] if value is True else [str(value)])
    return arguments


def write_shape(name: str, folder: Path) -> Path:
    """Write the named model's configuration into a folder of its own and return it."""
    if name in (DEMO, DEMO_OF_STAGES):
        return model_of(name, folder)
    model = folder / name
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(SHAPES[name], indent=1))
    return model


def kv_bytes_per_token(model: Path, kv_cache_dtype: str = "auto") -> int:
    """Bytes of keys and values of one token over all layers and heads; "auto" has 16 bits each."""
    config = json.loads((model / "config.json").read_text())
    heads, size = config["num_key_value_heads"], config["head_dim"]
    number = 1 if kv_cache_dtype.startswith("fp8") else 2
    return int(2 * config["num_hidden_layers"] * heads * size * number)


def hidden_size(model: Path) -> int:
    """Numbers per token between layers."""
    return int(json.loads((model / "config.json").read_text())["hidden_size"])


def layers(model: Path) -> int:
    """Of the decoder."""
    return int(json.loads((model / "config.json").read_text())["num_hidden_layers"])
