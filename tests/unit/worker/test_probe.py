"""The probe's texts are the same everywhere, and its error says what is off."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from worker.engine.probe import TEXTS, error_max_nats, probe_texts
from worker.rank.quarantine_probe import ERROR_TOP_NATS, error_nats


@pytest.mark.parametrize(("vocabulary", "length"), [(512, 32), (128_256, 16), (7, 64)])
def test_texts_are_fixed_and_of_the_vocabulary(vocabulary: int, length: int) -> None:
    texts = probe_texts(vocabulary, length)
    assert texts == probe_texts(vocabulary, length)
    assert [len(text) for text in texts] == [min(length, 32)] * TEXTS
    assert all(0 <= token < vocabulary for text in texts for token in text)
    assert len(set(texts)) == TEXTS
    assert vocabulary < 100 or len(set(texts[0])) > length // 2


def test_the_error_is_a_mean_in_which_nothing_cancels() -> None:
    assert error_nats([-1.0, -2.0], [-1.0, -2.0]) == 0.0
    assert error_nats([-1.5, -1.5], [-1.0, -2.0]) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("values", "reference"),
    [([math.nan], [-1.0]), ([-math.inf], [-1.0]), ([], [-1.0]), ([], []), ([-1.0], [math.nan])],
)
def test_what_is_no_number_counts_as_far_off(values: list[float], reference: list[float]) -> None:
    assert error_nats(values, reference) == ERROR_TOP_NATS


def test_finer_types_have_narrower_limits() -> None:
    types = ("float32", "float16", "bfloat16", "unheard_of")
    limits = [error_max_nats(dtype, is_quantized=False) for dtype in types]
    assert limits == sorted(limits)
    rough = error_max_nats("bfloat16", is_quantized=True)
    assert rough > limits[-1]
    assert error_max_nats("float16", is_quantized=False, has_experts=True) == rough
    assert error_max_nats("float32", is_quantized=False, has_experts=True) == limits[0]


def test_an_fp8_cache_has_the_limit_of_quantized_activations() -> None:
    """Of plain weights in fp32 it would else be that of fp32."""
    pytest.importorskip("vllm")
    from worker.engine.probe_steps import ProbeBatch

    model = SimpleNamespace(
        max_model_len=64, dtype="torch.float32", is_moe=False, get_vocab_size=lambda: 1_000
    )
    limits = {}
    for kv in ("auto", "fp8", "fp8_e4m3"):
        config: Any = SimpleNamespace(
            model_config=model,
            scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
            cache_config=SimpleNamespace(cache_dtype=kv),
            quant_config=None,
        )
        limits[kv] = ProbeBatch.of(config, 16).error_max_nats
    assert limits["auto"] == error_max_nats("float32", is_quantized=False)
    assert limits["fp8"] == limits["fp8_e4m3"] == error_max_nats("float32", is_quantized=True)
    assert limits["fp8"] > limits["auto"]
