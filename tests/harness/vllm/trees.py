"""vLLM module trees of a tiny model, built in the test's own process without an engine.

One process stands for every rank: the tp group that vLLM's layers ask is a stand-in that knows a
width and a rank, and nothing that uses it here communicates.
"""

import gc
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from vllm import _custom_ops
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

from comm_pool.layout import Mode
from tests.harness.vllm.quantized_models import compressed
from worker.engine.config import ModeKey, mode_config
from worker.engine.weights.tree import build_tp_tree, load_replica

SHARDS = 4
HIDDEN, INNER, VOCAB, LAYERS, HEADS, HEAD = 128, 256, 1400, 2, 4, 32
"""With padding the vocabulary has 1,408 rows, so no part of it is a multiple of 64."""
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
CPU = torch.device("cpu")

LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (HIDDEN, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
BLOCK = 32
"""Rows and columns of a block with one scale: a shard's heads are one."""


QUANTIZATION: dict[str, Any] = {
    "plain": None,
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8-static": {"quant_method": "fp8", "activation_scheme": "static"},
    "channel": compressed("channel", "token", dynamic=True),
    "compressed-static": compressed("tensor", "tensor", dynamic=False),
    "block": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    },
    "compressed-block": compressed("block", "group", dynamic=True, block=BLOCK),
    "modelopt": {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "ignore": ["lm_head"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
    },
}


BLOCK_SCALES = {"block": "weight_scale_inv", "compressed-block": "weight_scale"}
"""Kinds with a scale per block -> how the checkpoint names them."""
STATIC = ("fp8-static", "compressed-static", "modelopt")
"""Kinds with scales of activations in the checkpoint."""


def write_model(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """A random Qwen2 (its qkv has biases) of a kind of QUANTIZATION; returns its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.05

    tensors: dict[str, torch.Tensor] = {
        "model.embed_tokens.weight": random(VOCAB, HIDDEN),
        "lm_head.weight": random(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = torch.ones(HIDDEN)
        for number, (part, shape) in enumerate(LINEARS.items()):
            # Sizes differ by layer part, so that a scale in the wrong place shows.
            weight = random(*shape) * 2.0**number
            name = prefix + part
            if name[-6:] in ("q_proj", "k_proj", "v_proj"):
                tensors[f"{name}.bias"] = random(shape[0]) * 20
            tensors.update(stored_as(name, weight, kind))
        if kind == "modelopt":
            for number, each in enumerate("kv", 1):
                scale = torch.tensor(0.01 * number + 0.1 * layer)
                tensors[f"{prefix}self_attn.{each}_proj.{each}_scale"] = scale
    save_file(tensors, folder / "model.safetensors")
    config: dict[str, Any] = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    if QUANTIZATION[kind] is not None:
        config["quantization_config"] = QUANTIZATION[kind]
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def stored_as(name: str, weight: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
    """What a checkpoint of a kind has of one weight."""
    if kind == "plain":
        return {f"{name}.weight": weight}
    if kind in BLOCK_SCALES:
        size = weight.abs().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).amax((1, 3))
        scales = size / FP8_MAX
        each = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return {
            f"{name}.weight": (weight / each).to(FP8),
            f"{name}.{BLOCK_SCALES[kind]}": scales,
        }
    size = weight.abs().amax(1, keepdim=True) if kind == "channel" else weight.abs().max()
    scale = size / FP8_MAX
    stored = {f"{name}.weight": (weight / scale).to(FP8), f"{name}.weight_scale": scale}
    if kind in STATIC:
        stored[f"{name}.input_scale"] = torch.tensor(4 / FP8_MAX)
    return stored


def scaled_fp8_quant(
    x: torch.Tensor, scale: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's static fp8 quantization, of which its CPU build has no kernel."""
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


@contextmanager
def like_a_gpu() -> Iterator[None]:
    """Let vLLM on CPU compute as on a GPU for the length of the block, on one thread."""
    threads, quantize = torch.get_num_threads(), _custom_ops.scaled_fp8_quant
    # Processors with AMX would get a kernel of their own, which packs its weights: GPUs do not.
    os.environ.setdefault("VLLM_DISABLED_KERNELS", "CPUFp8PerTensorScaledMMLinearKernel")
    _set_torch_accelerator_to_noop()
    torch.set_num_threads(1)
    _custom_ops.scaled_fp8_quant = scaled_fp8_quant
    try:
        yield
    finally:
        _custom_ops.scaled_fp8_quant = quantize
        torch.set_num_threads(threads)


@contextmanager
def tree_process(folder: Path, device: torch.device = CPU) -> Iterator[None]:
    """This process as vLLM's only rank for the length of the block."""
    with like_a_gpu() if device.type == "cpu" else nullcontext(), only_rank(folder):
        yield


@contextmanager
def only_rank(folder: Path) -> Iterator[None]:
    """vLLM's groups of a rank that is alone, which meet in a file of this folder."""
    os.environ.setdefault("VLLM_DIST_IDENT", "trees")
    config = AsyncEngineArgs(
        model=str(write_and_name(folder / "first")), skip_tokenizer_init=True
    ).create_engine_config()
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        parallel_state.initialize_model_parallel(1)
    # vLLM collects garbage for each model it loads: what was imported needs no look each time.
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def write_and_name(folder: Path, kind: str = "plain") -> Path:
    """`write_model` for its folder."""
    write_model(folder, kind)
    return folder


class Trees:
    """A replica and what is viewed of it."""

    def __init__(self, folder: Path, *, shards: int = SHARDS, **engine: Any) -> None:
        """`engine` are vLLM's engine arguments, such as dtype and quantization."""
        options: dict[str, Any] = {
            "enforce_eager": True,
            "max_model_len": 256,
            "block_size": 32,
            "kv_cache_memory_bytes": 1 << 24,
            "skip_tokenizer_init": True,
        }
        self.shards = shards
        args = AsyncEngineArgs(model=str(folder), **{**options, **engine})
        self.base = args.create_engine_config()
        self.prepare()
        self.config = mode_config(self.base, ModeKey(Mode.DP, 1))
        with set_current_vllm_config(self.config):
            self.replica: nn.Module = load_replica(self.config, shards)

    def prepare(self) -> None:
        """Change the configuration before anything is built."""

    def view(self, width: int, rank: int) -> nn.Module:
        """A fresh tree of one rank of a group of this width."""
        with self.group(width, rank) as config:
            return build_tp_tree(
                config, self.replica, shards=self.shards, width=width, rank_in_group=rank
            )

    def part(self, parts: int, number: int, borrow: str) -> nn.Module:
        """One of several parts of the weights, loaded for ranks that borrow this."""
        with self.group(parts, number) as config:
            return load_replica(config, self.shards, parts, borrow)

    @contextmanager
    def group(self, width: int, rank: int) -> Iterator[Any]:
        """This process as a rank of a tp group, which the layers built inside ask."""
        config = mode_config(self.base, ModeKey(Mode.TP, width))
        with one_of(width, rank), set_current_vllm_config(config):
            yield config


@contextmanager
def one_of(width: int, rank: int) -> Iterator[None]:
    """This process as a rank of vLLM's active tp group, whose experts it divides as well."""
    own, experts = parallel_state._TP, parallel_state._EP
    parallel_state._TP = SimpleNamespace(world_size=width, rank_in_group=rank)
    if experts is not None:
        device_group = experts.device_group
        parallel_state._EP = SimpleNamespace(
            world_size=width, rank_in_group=rank, device_group=device_group
        )
    try:
        yield
    finally:
        parallel_state._TP, parallel_state._EP = own, experts


@contextmanager
def experts_process(folder: Path, device: torch.device = CPU) -> Iterator[None]:
    """The same for models with experts: vLLM makes their group for such a model alone."""
    with tree_process(folder, device):
        parallel_state._EP = parallel_state._TP
        try:
            yield
        finally:
            parallel_state._EP = None
