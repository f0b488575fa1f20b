"""The memory of a unit: large tensors first, aligned, and moved in bit for bit."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.harness.vllm.shared_parts import output_of
from tests.harness.vllm.trees import FP8, Trees, tree_process, write_and_name
from worker.engine.weights.fp8 import is_quantized
from worker.engine.weights.layers import ViewError
from worker.engine.weights.part_memory import (
    ALIGNMENT_BYTES,
    RESIDENT_SHARE,
    Unit,
    UnitKind,
    UnitLayout,
    in_pieces,
    is_parted,
    layout_of,
    layouts_of,
    move_in,
    units_of,
)

LARGE, SMALL = 1 << 14, 50


def unit_of(**layers: nn.Module) -> Unit:
    return Unit("mlp", UnitKind.FEED_FORWARD, layers)


def layer_of(**tensors: torch.Tensor) -> nn.Module:
    """Parameters, or buffers where the name says so, or plain attributes."""
    layer = nn.Module()
    for name, tensor in tensors.items():
        if name.startswith("buffer"):
            layer.register_buffer(name, tensor)
        elif name.startswith("plain"):
            setattr(layer, name, tensor)
        else:
            layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return layer


def tensors_of(unit: Unit) -> dict[tuple[str, str], torch.Tensor]:
    """All tensors that the layout of a unit names, as the layers have them now."""
    return {
        (place.layer, place.name): getattr(unit.layers[place.layer], place.name).data
        for place in layout_of(unit).places
    }


def bits_of(tensor: torch.Tensor) -> bytes:
    items = tensor.contiguous().view(-1).view(torch.uint8)
    return bytes(items.numpy())


def moved(unit: Unit) -> tuple[UnitLayout, torch.Tensor]:
    layout = layout_of(unit)
    raw = torch.full((layout.num_bytes,), -1, dtype=torch.int8)
    move_in(unit, layout, raw)
    return layout, raw


def test_large_tensors_come_first_and_small_ones_are_copied_once() -> None:
    first = layer_of(bias=torch.randn(SMALL), weight=torch.randn(LARGE))
    second = layer_of(weight=torch.randn(LARGE // 2), buffer_scale=torch.randn(1))
    layout = layout_of(unit_of(first=first, second=second))
    assert [(each.layer, each.name) for each in layout.places] == [
        ("first", "weight"),
        ("second", "weight"),
        ("first", "bias"),
        ("second", "buffer_scale"),
    ]
    assert layout.loan_bytes == 4 * (LARGE + LARGE // 2)
    assert [each.offset for each in layout.places] == [0, 4 * LARGE, 6 * LARGE, 6 * LARGE + 256]
    assert layout.num_bytes == layout.loan_bytes + 2 * ALIGNMENT_BYTES


@pytest.mark.parametrize(("more", "is_loan"), [(0, True), (-1, False)])
def test_a_tensor_is_small_below_a_share_of_the_largest(more: int, is_loan: bool) -> None:
    weight, bias = torch.zeros(LARGE), torch.zeros(1)
    edge = torch.zeros(LARGE // RESIDENT_SHARE + more)
    layout = layout_of(unit_of(one=layer_of(bias=bias, edge=edge, weight=weight)))
    order = ["edge", "weight", "bias"] if is_loan else ["weight", "bias", "edge"]
    assert [place.name for place in layout.places] == order
    assert layout.loan_bytes == 4 * LARGE + (edge.nbytes if is_loan else 0)


def test_each_tensor_is_aligned_and_none_overlaps() -> None:
    sizes = (LARGE, 1, 300, 64, 65, 7, LARGE - 1, LARGE // 3)
    tensors = {f"weight{number}": torch.randn(size) for number, size in enumerate(sizes)}
    layout = layout_of(unit_of(one=layer_of(**tensors)))
    end = 0
    for place in layout.places:
        assert place.offset % ALIGNMENT_BYTES == 0
        assert end <= place.offset < end + ALIGNMENT_BYTES
        end = place.offset + tensors[place.name].nbytes
    assert end <= layout.num_bytes
    assert layout.num_bytes % ALIGNMENT_BYTES == layout.loan_bytes % ALIGNMENT_BYTES == 0


def test_tensors_survive_bit_for_bit_with_their_strides() -> None:
    """fp8 weights are views of transposed memory, with strides (1, K)."""
    columns = torch.randint(0, 256, (96, 64), dtype=torch.uint8).view(FP8).t()
    rows = torch.randn(64, 96)
    scale, bias = torch.randn(1)[0], torch.randn(96, dtype=torch.bfloat16)
    experts = torch.randn(4, 8, 16).permute(2, 0, 1)
    given = {"weight": columns, "plain": rows, "buffer": scale, "bias": bias, "experts": experts}
    layer = layer_of(**given)
    bits = {name: bits_of(tensor) for name, tensor in given.items()}
    unit = unit_of(one=layer)
    layout, raw = moved(unit)
    assert columns.stride() == (1, 64)
    start, end = raw.data_ptr(), raw.data_ptr() + raw.nbytes
    assert {place.name for place in layout.places} == {*given}
    for (_, name), tensor in tensors_of(unit).items():
        assert bits_of(tensor) == bits[name], name
        assert (tensor.shape, tensor.stride()) == (given[name].shape, given[name].stride())
        assert tensor.dtype == given[name].dtype
        assert start <= tensor.data_ptr() < end
    assert isinstance(layer.weight, nn.Parameter)
    assert not layer.weight.requires_grad
    assert "plain" in vars(layer)
    assert "buffer" in dict(layer.named_buffers())


def test_the_same_memory_elsewhere_reads_the_same() -> None:
    """A borrower reads large tensors in a slot, and the others where it keeps them."""
    unit = unit_of(one=layer_of(weight=torch.randn(128, 128).t(), bias=torch.randn(128)))
    layout, raw = moved(unit)
    weight, bias = layout.places
    slot, kept = raw[: layout.loan_bytes].clone(), raw[layout.loan_bytes :].clone()
    assert torch.equal(weight.view(slot), unit.layers["one"].weight)
    assert torch.equal(bias.moved(-layout.loan_bytes).view(kept), unit.layers["one"].bias)


@pytest.mark.parametrize(
    "gaps", [torch.zeros(8, 32)[:, :8], torch.zeros(64)[::3], torch.zeros(8, 1).expand(8, 4)]
)
def test_gaps_are_refused_with_the_layer(gaps: torch.Tensor) -> None:
    unit = unit_of(down_proj=layer_of(weight=torch.zeros(LARGE), plain_scale=gaps))
    with pytest.raises(ViewError) as refused:
        layout_of(unit)
    assert str(refused.value) == (
        "layer mlp.down_proj has a tensor plain_scale with gaps in its memory, which peers cannot "
        "borrow: use --borrow none, and please report it."
    )


def test_rows_that_a_kernel_has_padded_keep_their_strides() -> None:
    """Scales of blocks lie in columns whose beginnings are aligned."""
    scales = torch.arange(21.0).view(7, 3)
    padded = torch.zeros(3, 8)[:, :7].t().copy_(scales)
    unit = unit_of(one=layer_of(weight=torch.zeros(LARGE), weight_scale=padded))
    moved(unit)
    there = unit.layers["one"].weight_scale
    assert torch.equal(there, scales)
    assert there.stride() == (1, 8)


def test_what_kernels_write_is_not_lent() -> None:
    locks = torch.zeros(LARGE, dtype=torch.int32)
    layer = layer_of(weight=torch.zeros(LARGE), plain_scale=torch.zeros(1))
    layer.workspace = locks
    unit = unit_of(one=layer)
    layout, _ = moved(unit)
    assert [place.name for place in layout.places] == ["weight", "plain_scale"]
    assert layer.workspace is locks


def test_packed_integers_keep_their_bits_and_all_their_holders() -> None:
    packed = torch.randint(-(2**31), 2**31 - 1, (64, 256), dtype=torch.int32)
    bits, layer = bits_of(packed), layer_of(qweight=packed)
    kept_by_kernel = layer.qweight
    moved(unit_of(one=layer))
    assert layer.qweight is kept_by_kernel
    assert layer.qweight.data_ptr() != packed.data_ptr()
    assert bits_of(kept_by_kernel.data) == bits


def test_empty_tensors_take_no_memory() -> None:
    empty: Any = torch.zeros(0)
    layout = layout_of(unit_of(one=layer_of(weight=torch.zeros(8), plain_workspace=empty)))
    assert [place.name for place in layout.places] == ["weight"]


@given(st.integers(1, 700), st.integers(1, 40), st.integers(0, 1 << 15))
def test_pieces_of_an_lm_head_are_whole_rows_that_fit_a_slot(
    rows: int, columns: int, slot_bytes: int
) -> None:
    layout = layout_of(unit_of(one=layer_of(weight=torch.zeros(rows, 2 * columns))))
    cut = in_pieces(layout, slot_bytes)
    row_bytes = 8 * columns
    assert [at for piece in cut.pieces for at in piece] == [*range(rows * row_bytes)]
    assert all(len(piece) <= max(slot_bytes, row_bytes) for piece in cut.pieces)
    for piece in cut.pieces:
        (place,) = cut.places_in(piece)
        assert (place.offset, place.shape[1:]) == (0, (2 * columns,))
        assert place.shape[0] * row_bytes == len(piece)
        assert cut.first_row(piece) * row_bytes == piece.start
    if slot_bytes >= row_bytes:
        assert len(cut.pieces) == -(-rows // (slot_bytes // row_bytes))


def test_pieces_have_rows_in_multiples_of_64_where_slots_allow() -> None:
    layout = layout_of(unit_of(one=layer_of(weight=torch.zeros(704, 32))))
    assert [len(piece) // 128 for piece in in_pieces(layout, 400 * 128).pieces] == [384, 320]
    assert [len(piece) // 128 for piece in in_pieces(layout, 353 * 128).pieces] == [352, 352]


def test_an_lm_head_with_a_bias_is_not_cut() -> None:
    layout = layout_of(unit_of(one=layer_of(weight=torch.zeros(64, 8), bias=torch.zeros(64))))
    with pytest.raises(ViewError, match=r"a bias or a scale beside its weight.*--borrow ffn"):
        in_pieces(layout, 1 << 10)


def test_the_slots_of_the_largest_unit_bound_the_pieces() -> None:
    small = Unit("qkv", UnitKind.QKV, {"": layer_of(weight=torch.zeros(16, 8))})
    large = unit_of(one=layer_of(weight=torch.zeros(64, 8)))
    lm_head = Unit("lm_head", UnitKind.LM_HEAD, {"": layer_of(weight=torch.zeros(100, 8))})
    *others, cut = layouts_of([small, large, lm_head])
    assert others == [layout_of(small), layout_of(large)]
    assert [len(piece) for piece in cut.pieces] == [64 * 32, 36 * 32]


# Parts of real layers


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Trees]]:
    """A Qwen2 of two layers whose qkv has biases: in fp32, and in fp8 with bf16 around it."""
    folder = tmp_path_factory.mktemp("part-memory")
    with tree_process(folder):
        yield {
            "plain": Trees(write_and_name(folder / "plain"), dtype="float32"),
            "fp8": Trees(write_and_name(folder / "fp8", "fp8")),
            "channel": Trees(write_and_name(folder / "channel", "channel")),
        }


@pytest.mark.parametrize(
    ("borrow", "names"),
    [
        ("ffn", ["model.layers.0.mlp", "model.layers.1.mlp"]),
        (
            "all",
            [
                "model.embed_tokens",
                *(
                    f"model.layers.{layer}.{unit}"
                    for layer in (0, 1)
                    for unit in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp")
                ),
                "lm_head",
            ],
        ),
    ],
)
def test_units_come_in_the_order_of_use(
    trees: dict[str, Trees], borrow: str, names: list[str]
) -> None:
    part = trees["plain"].part(2, 1, borrow)
    units = [*units_of(part)]
    assert [unit.name for unit in units] == names
    last = next(unit for unit in units if unit.name == "model.layers.1.mlp")
    assert {*last.layers} == {"gate_up_proj", "down_proj"}
    assert all(is_parted(layer) for unit in units for layer in unit.layers.values())
    assert [*units_of(trees["plain"].replica)] == []


@pytest.mark.parametrize("kind", ["plain", "fp8", "channel"])
def test_parts_of_a_model_are_laid_out_alike_and_compute_as_before(
    trees: dict[str, Trees], kind: str
) -> None:
    layouts = []
    for number in range(2):
        part = trees[kind].part(2, number, "all")
        units = {unit.name: unit for unit in units_of(part)}
        layouts.append({name: layout_of(unit) for name, unit in units.items()})
        modules = dict(part.named_modules())
        qkv = [name for name in units if name.endswith("qkv_proj")]
        assert kind == "plain" or all(is_quantized(modules[name]) for name in qkv)
        dtype = trees[kind].base.model_config.dtype
        before = {name: output_of(modules[name], dtype) for name in qkv}
        for unit in units.values():
            moved(unit)
        for name, out in before.items():
            assert torch.equal(output_of(modules[name], dtype), out), name
    assert layouts[0] == layouts[1]
    assert all(layout.places[0].name == "weight" for layout in layouts[0].values())
    first = layouts[0]["model.layers.0.self_attn.qkv_proj"]
    assert kind != "plain" or 0 < first.loan_bytes < first.num_bytes, "biases are copied once"
