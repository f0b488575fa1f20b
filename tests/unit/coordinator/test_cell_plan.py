"""What a cell of some ranks holds: divisions, layouts, pages, reasons and defaults."""

import json
from functools import partial
from typing import Any

import pytest
from transformers import AutoConfig
from vllm.config import CacheConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from comm_pool.mixed import Mixed
from coordinator.protocol.engine_options import read_options
from coordinator.protocol.held_weights import ElementBytes, element_bytes, held_bytes
from coordinator.protocol.kv_defaults import CUDA_BLOCK_TOKENS
from coordinator.protocol.model_length import length_refusal, model_length
from coordinator.protocol.model_size import model_size
from coordinator.sizing.cell_plan import (
    CellPlan,
    Division,
    divisions,
    fewest_gpus,
    longest_length,
    plan_cell,
)
from coordinator.sizing.device_memory import GIB, default_limits
from coordinator.sizing.model_facts import ModelFacts, device_of, facts_of
from tests.harness.coordinator.published_models import QWEN3_30B_A3B, QWEN3_32B
from tests.harness.vllm.families import FAMILIES, SIZES, Family

MODEL = {**QWEN3_32B, "model_type": "qwen3", "max_position_embeddings": 40_960}
BF16 = ElementBytes(2, 2, 2, 2)


def facts(*words: str, config: dict[str, Any] = MODEL, memory: int = 80 * GIB) -> ModelFacts:
    found = facts_of(config, read_options(words)[0], "cuda", memory)
    assert found is not None
    return found


def plan(division: Division, *words: str, gib: int = 80) -> CellPlan:
    device = device_of(read_options(words)[0], "cuda", gib * GIB, division.ranks)
    return plan_cell(facts(*words, memory=gib * GIB), device, division)


def test_layouts_differ_in_the_tokens_of_groups_alone() -> None:
    """A page of a wide group holds more tokens, and no layout moves the weights."""
    found = plan(Division(4, (1, 2, 4), mixed=(Mixed(2, 2),)))
    layouts = {each.layout: each for each in found.layouts}
    own = found.rank_tokens
    assert own == (found.pages - 1) * CUDA_BLOCK_TOKENS > 0
    assert layouts["dp4"].group_tokens == (own,) * 4
    assert layouts["tp2+tp2"].group_tokens == (2 * own, 2 * own)
    assert layouts["tp2+dp2"].group_tokens == (2 * own, own, own)
    for name in ("tp4", "sp4", "shift4", "sp2tp2", "shift2tp2"):
        assert layouts[name].group_tokens == (4 * own,)
        assert layouts[name].longest_request == min(40_960, 4 * own)
    assert {each.cell_tokens for each in layouts.values()} == {4 * own}


def test_more_ranks_than_heads_hold_the_tokens_of_the_heads() -> None:
    """Four KV heads: eight ranks hold each of them twice."""
    found = facts(config={**QWEN3_30B_A3B, "max_position_embeddings": 4_096})
    device = device_of([], "cuda", 80 * GIB, 8)
    cell = plan_cell(found, device, Division(8, (1, 2, 4, 8)))
    layouts = {each.layout: each for each in cell.layouts}
    assert max(layouts["tp8"].group_tokens) == 4 * cell.rank_tokens


def test_ranks_with_parts_serve_in_fewer_groups() -> None:
    borrowing = {each.layout for each in plan(Division(4, (1, 2, 4), 4, "ffn")).layouts}
    assert borrowing == {"dp4", "tp4", "sp4", "shift4"}
    alone = {each.layout for each in plan(Division(4, (1, 2, 4), 4, "none")).layouts}
    assert alone == {"tp4"}
    shape = (Mixed(2, 2),)
    halves = {each.layout for each in plan(Division(4, (1, 2, 4), 2, "none", mixed=shape)).layouts}
    assert halves == {"tp4", "sp2tp2", "shift2tp2"}


def test_what_is_divided_by_each_way_to_borrow() -> None:
    size = model_size(MODEL)
    assert size is not None
    whole = held_bytes(size, BF16)
    ffn, every, none = (held_bytes(size, BF16, 2, each) for each in ("ffn", "all", "none"))
    assert whole.weights - ffn.weights == size.feed_forward  # a half, of two bytes
    divided = size.feed_forward + size.attention + size.lm_head
    assert whole.weights - none.weights == divided
    assert whole.weights - every.weights == divided + size.embeddings
    assert none.ring == whole.ring == 0
    assert ffn.ring == 2 * size.dense_elements  # two slots, each of a half of a layer
    assert every.ring == ffn.ring + 2 * (size.qkv_layer + size.output_layer)
    some = held_bytes(size, BF16, 2, "ffn", 16)
    assert some.whole_layers == 16 * size.dense_elements
    assert some.weights == ffn.weights


@pytest.mark.parametrize(
    ("config", "words", "linear"),
    [
        ({}, (), 2),
        ({"torch_dtype": "float32"}, ("--dtype", "float32"), 4),
        ({}, ("--quantization", "fp8_per_tensor"), 1),
        ({"quantization_config": {"quant_method": "fp8"}}, (), 1),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}, (), 0.52),
        ({"quantization_config": {"quant_method": "gptq", "bits": 8, "group_size": -1}}, (), 1.02),
        (
            {"quantization_config": {"config_groups": {"a": {"weights": {"num_bits": 8}}}}},
            (),
            1,
        ),
        ({"quantization_config": "fp8"}, (), 2),
    ],
)
def test_bytes_of_linear_layers(
    config: dict[str, Any], words: tuple[str, ...], linear: float
) -> None:
    found = element_bytes(config, read_options(words)[0])
    assert found.linear == pytest.approx(linear, abs=0.005)


GPT_OSS_120B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "mxfp4"},
}


def test_experts_alone_are_of_four_bits_and_padded() -> None:
    """Marlin pads 2,880 hidden numbers to 3,072 and 2,880 inner ones to 2,944."""
    size, found = model_size(GPT_OSS_120B), element_bytes(GPT_OSS_120B)
    assert size is not None
    assert (found.linear, found.other) == (2, 2)
    assert found.experts == pytest.approx(4.25 / 8 * (3072 / 2880) * (2944 / 2880))
    held = held_bytes(size, found).total
    assert held == pytest.approx(70.1e9, rel=0.01)
    stored = held_bytes(size, element_bytes(GPT_OSS_120B, in_files=True)).total
    assert held / stored == pytest.approx(1.085, abs=0.01)
    assert held_bytes(size, found, 2, "none").total < 0.52 * held


@pytest.mark.parametrize(
    ("words", "kv_bytes"),
    [
        ((), 2),
        (("--dtype", "float32"), 4),
        (("--dtype", "float32", "--kv-cache-dtype", "auto"), 4),
        (("--dtype", "float32", "--kv-cache-dtype", "bfloat16"), 2),
        (("--kv-cache-dtype", "fp8"), 1),
    ],
)
def test_bytes_of_a_number_of_kv(words: tuple[str, ...], kv_bytes: int) -> None:
    assert element_bytes({}, read_options(words)[0]).kv == kv_bytes


def test_an_fp8_cache_has_twice_the_pages() -> None:
    half, whole = (
        plan(Division(2, (1, 2)), "--kv-cache-memory-bytes", "4294967296", *words)
        for words in (("--kv-cache-dtype", "fp8"), ())
    )
    assert half.pages == 2 * whole.pages > 0


def test_a_cell_that_does_not_start_says_why() -> None:
    small = plan(Division(2, (1, 2)), gib=40)
    assert not small.fits
    assert small.reason == "The weights and what steps need exceed the memory."
    assert small.kv_bytes == small.rank_tokens == 0
    tight = plan(Division(2, (1, 2)), "--gpu-memory-utilization", "0.87")
    assert "A request of 40,960 tokens needs" in tight.reason
    length = longest_length(facts(), tight)
    again = ("--gpu-memory-utilization", "0.87", "--max-model-len", str(length))
    assert plan(Division(2, (1, 2)), *again).fits
    again = (*again[:3], str(length + 32))
    assert not plan(Division(2, (1, 2)), *again).fits


def test_kv_memory_that_is_asked_for() -> None:
    words = ("--kv-cache-memory-bytes", "4G")
    found = plan(Division(1, (1,)), *words, "--max-model-len", "8k")
    assert found.kv_bytes == 4 * GIB
    assert found.pages == 4 * GIB // (64 * 2 * 8 * 128 * 2 * 16)
    assert (
        "exceeds what the weights leave"
        in plan(Division(1, (1,)), "--kv-cache-memory-bytes", "40G").reason
    )


def test_the_fewest_gpus() -> None:
    device = device_of([], "cuda", 24 * GIB, 1)
    found = fewest_gpus(facts(memory=24 * GIB), device, 64)
    assert found is not None
    assert (found.division.ranks, found.fits) == (8, True)
    assert fewest_gpus(facts(memory=24 * GIB), device, 2) is None


def test_divisions_follow_the_heads() -> None:
    size = model_size({**MODEL, "num_attention_heads": 40, "num_key_value_heads": 8})
    assert size is not None
    assert {each.widths for each in divisions(size, 16)} == {(1, 2, 4, 8)}
    assert [each.parts for each in divisions(size, 6)] == [1, 2, 2, 2]


def test_defaults_are_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CacheConfig.DEFAULT_BLOCK_SIZE == CUDA_BLOCK_TOKENS
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    for gib, name in ((40, "NVIDIA L40S"), (80, "NVIDIA H100"), (180, "NVIDIA B200")):
        size = gib * GIB
        platform = type(current_platform)
        size_of, name_of = partial(_always, size), partial(_always, name)
        monkeypatch.setattr(platform, "get_device_total_memory", size_of)
        monkeypatch.setattr(platform, "get_device_name", name_of)
        tokens, tasks = EngineArgs.get_batch_defaults(1)
        server = UsageContext.OPENAI_API_SERVER
        limits = default_limits(size)
        assert (limits.tokens, limits.tasks) == (tokens[server], tasks[server])


@pytest.mark.parametrize("family", FAMILIES, ids=[each.slug for each in FAMILIES])
def test_lengths_are_those_of_vllm(family: Family) -> None:
    config = config_of(family)
    assert model_length(json.loads(config.to_json_string(use_diff=True))) == vllm_length(config)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    ],
    ids=lambda rope: str(rope["rope_type"]),
)
def test_scaled_lengths_are_those_of_vllm(rope: dict[str, Any]) -> None:
    config = AutoConfig.for_model("qwen3", **SIZES, rope_parameters={"rope_theta": 1e6, **rope})
    assert model_length(json.loads(config.to_json_string(use_diff=True))) == vllm_length(config)


@pytest.mark.parametrize("field", ["", "model_max_length"])
@pytest.mark.parametrize("kind", ["", "linear", "dynamic", "yarn", "longrope", "llama3"])
def test_the_longest_length_is_that_of_vllm(kind: str, field: str) -> None:
    """Also with a factor that config.json has applied already, and with another bound."""
    rope = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 256,
            "short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0}  # fmt: skip
    parameters = {"rope_theta": 1e6, **(rope if kind else {"rope_type": "default"})}
    fields = {field: 1_024} if field else {}
    config = AutoConfig.for_model("qwen3", **SIZES, **fields, rope_parameters=parameters)
    stored = json.loads(config.to_json_string(use_diff=True))
    refused = [length_refusal(stored, asked, {}) is not None for asked in (64, 4_000, 10**7)]
    assert refused == [vllm_refuses(config, asked) for asked in (64, 4_000, 10**7)]
    longest = next(n for n in range(64, 10**5) if length_refusal(stored, n + 1, {}) is not None)
    assert not vllm_refuses(config, longest)
    assert vllm_refuses(config, longest + 1)


@pytest.mark.parametrize("uses", [True, False])
@pytest.mark.parametrize("window", [None, 128, 512])
def test_a_window_that_is_disabled_bounds_requests_as_in_vllm(
    window: int | None, uses: bool
) -> None:
    config = AutoConfig.for_model("qwen2", **{**SIZES, "max_position_embeddings": 256})
    config.use_sliding_window, config.sliding_window = uses, window
    stored = {**config.to_diff_dict(), "sliding_window": window, "use_sliding_window": uses}
    for asked in (64, 128, 129, 256, 257, 600):
        ours = length_refusal(stored, asked, {}, is_windowless=True)
        used = window if uses else None
        assert (ours is not None) == vllm_refuses(config, asked, used)
        assert window == 128 or ours is None or "sliding" not in ours
        if used == 128 < asked:
            assert ours is not None
            assert "leave --disable-sliding-window out" in ours


def vllm_refuses(config: Any, asked: int, window: int | None = None) -> bool:
    try:
        vllm_length(config, asked, window)
    except ValueError:
        return True
    return False


def _always(value: Any, *_: object) -> Any:
    return value


def config_of(family: Family) -> Any:
    given = {**SIZES, **family.fields}
    fields = {name: value for name, value in given.items() if value is not ...}
    return AutoConfig.for_model(family.kind, **fields)


def vllm_length(config: Any, asked: int | None = None, window: int | None = None) -> int:
    """What vLLM derives; `window` is one that the user disables."""
    from vllm.config.model import _get_and_verify_max_len
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    found = ModelArchConfigConvertorBase(config, config)
    derived = type("Derived", (), {"derived_max_model_len_and_key": None})()
    derived.derived_max_model_len_and_key = found.derive_max_model_len_and_key()
    is_off = window is not None
    return int(_get_and_verify_max_len(config, derived, None, asked, is_off, window))
