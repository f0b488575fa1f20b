"""What config.json alone shows that ranks cannot serve."""

import json

import pytest

from coordinator.protocol.engine_options import GivenOption
from coordinator.protocol.model_support import (
    BORROWED_SHARED_EXPERTS,
    POOLING,
    Holding,
    refusals,
)
from worker.demo import MODEL_DIR

CONFIG = json.loads((MODEL_DIR / "config.json").read_text())


@pytest.mark.parametrize(
    "fields",
    [
        {"num_experts": 4, "shared_expert_intermediate_size": 64},
        {"n_routed_experts": 4, "n_shared_experts": 1},
        {"num_local_experts": 4, "intermediate_size_mlp": 128},
    ],
)
def test_shared_experts_are_not_borrowed(fields: dict[str, int]) -> None:
    config = {**CONFIG, **fields}

    def found(holding: Holding) -> list[str]:
        return list(refusals(config, (), "cpu", (1, 2), holding))

    for borrow in ("ffn", "all"):
        assert found(Holding(2, 2, borrow)) == [BORROWED_SHARED_EXPERTS]
    assert "--borrow none" in BORROWED_SHARED_EXPERTS
    assert not found(Holding(2, 2, "none"))
    assert not found(Holding(2, 1, "ffn"))


def test_other_experts_are_borrowed() -> None:
    config = {**CONFIG, "num_experts": 4}
    assert not list(refusals(config, (), "cpu", (1, 2), Holding(2, 2, "ffn")))


@pytest.mark.parametrize(
    ("name", "pools"),
    [
        ("BertModel", True),
        ("BertForMaskedLM", True),
        ("XLMRobertaForSequenceClassification", True),
        ("Qwen2ForRewardModel", True),
        ("LlamaForCausalLM", False),
        ("ChatGLMModel", False),
        ("GPT2LMHeadModel", False),
        ("Gemma3ForConditionalGeneration", False),
        ("FooForCausalLM", False),
    ],
)
def test_pooling_models_are_refused_by_their_class(name: str, pools: bool) -> None:
    config = {**CONFIG, "architectures": [name]}
    assert (POOLING in list(refusals(config, (), "cpu"))) is pools
    generate = GivenOption("--runner", ("generate",), ("--runner", "generate"))
    assert POOLING not in list(refusals(config, (generate,), "cpu"))
