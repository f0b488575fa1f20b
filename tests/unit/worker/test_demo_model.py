"""The shipped demo model keeps what its README promises."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from worker.demo import MODEL_DIR, TRAINING_REPORT

MAX_FOLDER_BYTES = 12_000_000
GENERATION_PROMPT = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((MODEL_DIR / "config.json").read_text())
    return loaded


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(TRAINING_REPORT.read_text())
    return loaded


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(MODEL_DIR)


def test_folder_is_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in MODEL_DIR.iterdir()}
    assert sum(files.values()) <= MAX_FOLDER_BYTES
    assert set(files) == {
        "config.json",
        "generation_config.json",
        "heldout.txt",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert 50_000 <= files["heldout.txt"] <= 70_000


def test_shape(config: dict[str, Any]) -> None:
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_attention_heads"] == 8
    assert config["num_key_value_heads"] == 4
    assert config["head_dim"] >= 32
    assert 4 <= config["num_hidden_layers"] <= 6
    assert 2_000 <= config["vocab_size"] <= 8_192
    assert config["max_position_embeddings"] == 2048
    assert config["tie_word_embeddings"] is True
    assert config["dtype"] == "bfloat16"


def test_weights_are_bfloat16_and_finite() -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(MODEL_DIR / "model.safetensors", framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 (the handle is not a mapping)
            tensor = weights.get_tensor(name)
            assert tensor.dtype == torch.bfloat16, name
            assert torch.isfinite(tensor).all(), name


def test_special_tokens(tokenizer: Any, config: dict[str, Any]) -> None:
    assert len(tokenizer) == config["vocab_size"]
    assert tokenizer.pad_token_id == config["pad_token_id"]
    assert tokenizer.bos_token_id == config["bos_token_id"]
    assert tokenizer.eos_token_id == config["eos_token_id"]
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3


def test_any_text_survives_the_tokenizer(tokenizer: Any) -> None:
    text = "def f(x):\n\treturn x  # na\u00efve \u65e5\u672c \U0001f600\r\n"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_chat_template(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi!"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == (
        "<|bos|><|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nHi!<|im_end|>\n"
    )
    prompt = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    # The prompt is a prefix of the finished talk, so that its cached keys can be used again.
    assert prompt.endswith(GENERATION_PROMPT)
    assert text.startswith(prompt)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids.count(tokenizer.eos_token_id) == 3


def test_chat_template_tolerates_tools_and_parts(tokenizer: Any) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "One "}, {"type": "text", "text": "two"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    text = tokenizer.apply_chat_template(
        messages, tools=[tool], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|bos|><|im_start|>system\nTools:\n")
    assert '"name": "add"' in text
    # The form that the demo's tool parser reads.
    called = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert f"<|im_start|>assistant\n\n{called}<|im_end|>" in text
    assert "<|im_start|>user\nOne two<|im_end|>" in text
    assert "<|im_start|>tool\n3<|im_end|>" in text


def test_the_shipped_chat_template_is_the_source_s(tokenizer: Any) -> None:
    from tools.demo_model.tokenizer import CHAT_TEMPLATE

    assert tokenizer.chat_template == CHAT_TEMPLATE


def test_held_out_loss_is_as_reported(report: dict[str, Any], config: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tools.demo_model.evaluate import held_out_loss

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        loss, tokens = held_out_loss(MODEL_DIR)
    finally:
        torch.set_num_threads(threads)
    uniform = math.log(config["vocab_size"])
    assert tokens == report["held_out_tokens"]
    assert report["uniform_loss"] == pytest.approx(uniform, abs=1e-3)
    assert loss == pytest.approx(report["held_out_loss"], abs=0.1)
    assert loss <= uniform - 2.0
