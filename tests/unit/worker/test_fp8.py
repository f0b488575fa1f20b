"""fp8 weights: scales reach the rows that they belong to, views stay views, the rest is refused.

On CPU vLLM computes fp8 with torch's kernels; tests/gpu/test_fp8.py repeats what matters on CUDA.
"""

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from torch import nn
from torch.nn import Parameter
from vllm.model_executor.kernels.linear import CutlassFP8ScaledMMLinearKernel
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear
from vllm.model_executor.layers.quantization.online.base import (
    OnlineQuantizationConfig,
)

from coordinator.protocol.model_support import Holding
from tests.harness.vllm.quantized_models import write_quantized
from tests.harness.vllm.trees import (
    CPU,
    FP8,
    HIDDEN,
    LAYERS,
    STATIC,
    Trees,
    tree_process,
    write_model,
)
from worker.engine import config
from worker.engine.weights import fp8
from worker.engine.weights.layers import ViewError, place_scales
from worker.engine.weights.selftest import prove_tree, stored_rows
from worker.engine.weights.tree import foreign_bytes

KINDS = ("fp8", "fp8-static", "channel", "compressed-static", "modelopt")
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


class Loaded:
    """A checkpoint, loaded shard-major and, as vLLM would, in natural order."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.disk = write_model(folder, kind)
        self.trees = Trees(folder)
        self.natural = Trees(folder, shards=1)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Loaded]]:
    folder = tmp_path_factory.mktemp("fp8")
    with tree_process(folder):
        yield {kind: Loaded(folder / kind, kind) for kind in KINDS}


def linears(tree: nn.Module) -> dict[str, Any]:
    return {name: each for name, each in tree.named_modules() if isinstance(each, LinearBase)}


@pytest.mark.parametrize("kind", KINDS)
def test_shard_major_rows_have_the_bits_of_natural_order(
    loaded: dict[str, Loaded], kind: str
) -> None:
    """Also after vLLM has brought q, k and v to one scale: each row by the scale it had."""
    natural = linears(loaded[kind].natural.replica)
    for name, layer in linears(loaded[kind].trees.replica).items():
        assert layer.weight.dtype == FP8
        rows = torch.arange(layer.output_size)
        if name.endswith(("qkv_proj", "gate_up_proj")):
            rows = stored_rows(layer.output_partition_sizes, 4, 1, 0)
        bits = layer.weight.data.t().view(torch.uint8)
        assert torch.equal(bits[rows], natural[name].weight.data.t().view(torch.uint8)), name
        scales, expected = layer.weight_scale.data, natural[name].weight_scale.data
        assert torch.equal(scales[rows] if scales.numel() > 1 else scales, expected), name
        if kind in STATIC:
            assert torch.equal(layer.input_scale, natural[name].input_scale)
        else:
            assert layer.input_scale is None


@pytest.mark.parametrize("kind", KINDS)
def test_dequantized_rows_are_the_checkpoints(loaded: dict[str, Loaded], kind: str) -> None:
    disk = loaded[kind].disk
    for name, layer in linears(loaded[kind].trees.replica).items():
        prefix, part = name.rsplit(".", 2)[0], ".".join(name.rsplit(".", 2)[1:])
        scale = layer.weight_scale.data.reshape(-1, 1)
        rows = layer.weight.data.t().float() * scale
        if part in FUSED:
            rows = rows[stored_rows(layer.output_partition_sizes, 4, 1, 0)]
        start = 0
        for piece in FUSED.get(part, (part,)):
            stored = f"{prefix}.{piece}"
            wanted = disk[f"{stored}.weight"].float() * disk[f"{stored}.weight_scale"]
            own = rows[start : start + len(wanted)]
            start += len(wanted)
            # One scale for pieces of different size rounds the small ones once more.
            limit = 1e-6 if kind == "channel" or part not in FUSED else 0.05
            assert float((own - wanted).norm() / wanted.norm()) < limit, stored


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [2, 4])
def test_trees_are_views_that_compute_right(
    loaded: dict[str, Loaded], kind: str, width: int
) -> None:
    trees = loaded[kind].trees
    for rank in range(width):
        tree = trees.view(width, rank)
        assert foreign_bytes(tree, trees.replica) == 0
        assert prove_tree(
            tree, trees.replica, width=width, rank_in_group=rank, device=CPU, shards=trees.shards
        )


@pytest.mark.parametrize("kind", ["fp8-channel", "fp8-static", "fp8-modelopt"])
def test_the_checkpoints_that_gpus_are_asked_for_are_viewed(
    loaded: dict[str, Loaded], tmp_path: Path, kind: str
) -> None:
    """Those of gpu/test_models.py, which no CPU rank serves."""
    assert loaded
    trees = Trees(write_quantized(tmp_path, kind)[0], shards=2, dtype="bfloat16")
    for rank in range(2):
        tree = trees.view(2, rank)
        assert foreign_bytes(tree, trees.replica) == 0
        assert prove_tree(
            tree, trees.replica, width=2, rank_in_group=rank, device=CPU, shards=trees.shards
        )


@pytest.mark.parametrize("kind", KINDS)
def test_trees_have_what_vllms_processing_leaves_behind(
    loaded: dict[str, Loaded], kind: str
) -> None:
    trees = loaded[kind].trees
    tree = trees.view(2, 1)
    sources = dict(trees.replica.named_modules())
    for name, module in tree.named_modules():
        if not isinstance(module, (LinearBase, Attention)):
            continue
        source = sources[name]
        assert set(module._parameters) == set(source._parameters), name
        missing = {each for each in vars(source) if not hasattr(module, each)}
        assert not missing, (name, missing)


@pytest.mark.parametrize("width", [1, 2])
def test_attention_has_the_scales_of_its_kv(loaded: dict[str, Loaded], width: int) -> None:
    """They are numbers on the host, and tensors that the kernels read."""
    found = loaded["modelopt"]
    tree = found.trees.view(2, 1) if width > 1 else found.trees.replica
    layers = {name: each for name, each in tree.named_modules() if isinstance(each, Attention)}
    assert len(layers) == LAYERS
    for name, layer in layers.items():
        prefix = name.removesuffix(".attn")
        for each in "kv":
            wanted = found.disk[f"{prefix}.{each}_proj.{each}_scale"].item()
            assert getattr(layer, f"_{each}_scale_float") == pytest.approx(wanted, rel=0.01)
            assert getattr(layer, f"_{each}_scale").item() == pytest.approx(wanted, rel=0.01)
        assert layer.kv_cache_dtype.startswith("fp8")


@pytest.mark.parametrize("kind", KINDS)
def test_only_row_parallel_layers_of_trees_leave_vllms_kernel(
    loaded: dict[str, Loaded], kind: str
) -> None:
    trees = loaded[kind].trees
    tree = linears(trees.view(2, 0))
    for name, source in linears(trees.replica).items():
        own = fp8.kernel_of(source)
        assert type(own) in fp8.UNPACKED_KERNELS
        viewed = fp8.kernel_of(tree[name])
        if isinstance(source, RowParallelLinear):
            assert type(viewed) is fp8.StridedFp8Kernel
            assert tree[name].weight.stride() == (1, source.input_size)
            assert source.requires_unquantized_input
        else:
            assert type(viewed) is type(own)
            assert not source.requires_unquantized_input


def test_a_cutlass_kernel_learns_the_width_of_its_share() -> None:
    """vLLM tells it while it processes a weight, which a view does not go through."""
    assert "self.logical_output_size" in inspect.getsource(
        CutlassFP8ScaledMMLinearKernel.process_weights_after_loading
    )
    kernels = [CutlassFP8ScaledMMLinearKernel.__new__(CutlassFP8ScaledMMLinearKernel)]
    kernels.append(CutlassFP8ScaledMMLinearKernel.__new__(CutlassFP8ScaledMMLinearKernel))
    share, source = (
        SimpleNamespace(
            quant_method=SimpleNamespace(fp8_linear=kernel), output_size_per_partition=n
        )
        for kernel, n in zip(kernels, (64, 128), strict=True)
    )
    kernels[0].logical_output_size = None
    assert fp8._view_kernel("qkv_proj", share, source) is kernels[0]
    assert kernels[0].logical_output_size == 64
    source.quant_method.fp8_linear = object()
    with pytest.raises(AssertionError):
        fp8._view_kernel("qkv_proj", share, source)


def test_a_share_that_would_need_padding_is_refused(loaded: dict[str, Loaded]) -> None:
    layer = SimpleNamespace(input_size_per_partition=HIDDEN, output_size_per_partition=24)
    with pytest.raises(ViewError, match="multiples of 16"):
        fp8.bind_quantized("layer", layer, layer, 2, 0)


def test_an_unknown_kernel_is_refused(loaded: dict[str, Loaded]) -> None:
    layer = linears(loaded["fp8"].trees.view(2, 0))["model.layers.0.mlp.down_proj"]
    with pytest.raises(ViewError, match="down_proj computes with StridedFp8Kernel"):
        fp8.check_quantized("down_proj", layer)
    layer.quant_method = object()
    with pytest.raises(ViewError, match="down_proj computes with object"):
        fp8.check_quantized("down_proj", layer)


def test_a_padded_weight_is_refused(loaded: dict[str, Loaded]) -> None:
    layer = linears(loaded["fp8"].natural.replica)["model.layers.0.mlp.down_proj"]
    whole = layer.weight
    padded = nn.functional.pad(whole.data.t().view(torch.uint8), (0, 16)).view(FP8).t()
    layer.weight = Parameter(padded, requires_grad=False)
    try:
        with pytest.raises(ViewError, match="not a plain fp8 matrix"):
            fp8.check_quantized("down_proj", layer)
    finally:
        layer.weight = whole


@pytest.mark.parametrize("tokens", [1, 8, fp8.FEW_TOKENS + 1])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_strided_product(
    tokens: int, per_token: bool, per_channel: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    a = random(tokens, HIDDEN).to(FP8)
    whole = random(48, 2 * HIDDEN).to(FP8)
    b = whole[:, HIDDEN:].t()
    scale_a = random(tokens, 1).abs() + 0.1 if per_token else torch.tensor(0.5)
    scale_b = random(48, 1).abs() + 0.1 if per_channel else torch.tensor([0.25])
    out = fp8.strided_scaled_mm(a, b, scale_a, scale_b, dtype, torch.ones(1))
    wanted = (a.float() * scale_a) @ (whole[:, HIDDEN:].float() * scale_b).t()
    assert out.dtype == dtype
    assert out.shape == (tokens, 48)
    limit = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5}[dtype]
    assert float((out.float() - wanted).norm() / wanted.norm()) < limit


def test_scales_fused_on_disk_are_left_to_vllm() -> None:
    unset = torch.finfo(torch.float32).min
    param = Parameter(torch.full((6,), unset), requires_grad=False)
    place_scales(param, torch.tensor(0.5), range(3), 3)
    assert param.tolist() == [0.5, *[unset] * 5]
    place_scales(param, torch.tensor([3.0]), [2], 3)
    assert param.tolist()[2::3] == [3.0, 3.0]
    place_scales(param, torch.tensor([1.0, 2.0, 4.0]), range(3), 3)
    assert param.tolist() == [1.0, 2.0, 4.0] * 2


# ---------------------------------------------------------------------- refusals at configuration


def given(name: str, quant: Any) -> Any:
    """A vLLM configuration, as far as quantization is asked for."""
    return SimpleNamespace(
        model_config=SimpleNamespace(quantization=name, is_encoder_decoder=False),
        quant_config=quant,
    )


def named(name: str, **fields: Any) -> Any:
    return SimpleNamespace(get_name=lambda: name, **fields)


def scheme(strategy: str, bits: int = 8, kind: str = "float", inputs: bool = True) -> Any:
    side = SimpleNamespace(num_bits=bits, type=kind, strategy=strategy)
    return named(
        "compressed-tensors",
        kv_cache_scheme=None,
        target_scheme_map={
            "Linear": {"weights": side, "input_activations": side if inputs else None}
        },
    )


def online(shorthand: str) -> Any:
    from vllm.config.quantization import resolve_quantization_config

    args = resolve_quantization_config(shorthand, None)
    assert args is not None
    return OnlineQuantizationConfig(args)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "current_platform", SimpleNamespace(is_cpu=lambda: False))


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("none", None),
        ("fp8", named("fp8", weight_block_size=None)),
        ("fp8_per_tensor", online("fp8_per_tensor")),
        ("fp8_per_channel", online("fp8_per_channel")),
        ("compressed-tensors", scheme("tensor")),
        ("compressed-tensors", scheme("channel")),
        ("fp8", named("fp8", weight_block_size=[128, 128])),
        ("fp8_per_block", online("fp8_per_block")),
        ("compressed-tensors", scheme("block")),
        ("gpt_oss_mxfp4", named("gpt_oss_mxfp4")),
    ],
)
def test_plain_fp8_is_taken(name: str, quant: Any) -> None:
    assert config._quantization_refusal(given(name, quant), Holding(widest=2)) is None


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("kind", KINDS)
def test_real_configurations_are_taken(loaded: dict[str, Loaded], kind: str) -> None:
    assert config._quantization_refusal(loaded[kind].trees.base, Holding(widest=2)) is None


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("name", "quant", "why"),
    [
        ("compressed-tensors", scheme("group"), "block scales"),
        ("compressed-tensors", scheme("channel", kind="int"), "other weights than fp8"),
        ("compressed-tensors", scheme("group", bits=4, kind="int"), "other weights than fp8"),
        ("compressed-tensors", scheme("channel", inputs=False), "other weights than fp8"),
        ("gptq_marlin", named("gptq_marlin"), "packed weights"),
        ("awq", named("awq"), "packed weights"),
        ("modelopt", named("modelopt", quant_method="FP8_PB_WO"), "other weights than fp8"),
        ("modelopt_fp4", named("modelopt_fp4"), "packed weights"),
        ("nvfp4", named("nvfp4"), "packed weights"),
        (
            "fp8",
            named("fp8", weight_block_size=None, online_quantization_config=object()),
            "--quantization-config",
        ),
    ],
)
def test_other_quantizations_are_refused_with_a_reason_and_a_way(
    name: str, quant: Any, why: str
) -> None:
    sentence = config._quantization_refusal(given(name, quant), Holding(widest=2))
    assert sentence is not None
    assert why in sentence
    assert "--quantization" in sentence


@pytest.mark.parametrize("name", ["awq", "gptq_marlin", "mxfp4"])
def test_packed_weights_are_taken_where_nobody_views_them(name: str) -> None:
    """On any device; a quantized KV cache is refused all the same."""
    for own in (Holding(widest=2, parts=2, borrow="all"), Holding(widest=1)):
        assert config._quantization_refusal(given(name, named(name)), own) is None
        sentence = config._quantization_refusal(given(name, named(name, kv_cache_scheme={})), own)
        assert sentence is not None
        assert "quantized KV cache" in sentence


def test_fp8_on_cpu_is_refused() -> None:
    quant = named("fp8", weight_block_size=None)
    sentence = config._quantization_refusal(given("fp8", quant), Holding(widest=2))
    assert sentence is not None
    assert "CPU" in sentence
    assert "bf16" in sentence
